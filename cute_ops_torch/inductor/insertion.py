"""Nodes that are put into a graph before another node, each together with its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node

# What a node takes over from the one before which it is put.
_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


class Insertion:
    """Puts nodes before a node of a graph, and removes them if they are not wanted after all.

    Args:
        graph: Dynamo's graph, or one of ATen's operators.
        before: the node.
    """

    key = ""  # of a node's value in its ``meta``; empty: the one that Dynamo or export has used in the graph

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before = graph, before
        self.made: list[Node] = []
        self.key = self.key or ("val" if "val" in next(iter(graph.nodes)).meta else "example_value")

    def insert(
        self, create: Callable[..., Node], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Node:
        """The node of a call, by the graph's method that creates such nodes."""
        with self.graph.inserting_before(self.before):
            node = create(target, args, kwargs)
        node.meta = {**_place_of(self.before.meta), self.key: value}
        self.made.append(node)
        return node

    def undo(self) -> None:
        """Remove the nodes that were put."""
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()


def _place_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What of a node's metadata says where in a program it comes from."""
    return {key: meta[key] for key in _KEPT if key in meta}
