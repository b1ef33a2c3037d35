"""Questions about the nodes of a graph from Dynamo."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that a node was traced with, None if it made no tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def calls(node: Any, *names: str) -> bool:
    """Whether a node calls torch's function, operator or method of one of these names."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        name = str(node.target)
        if name.startswith("__") and name.endswith("__"):  # some versions of Dynamo trace operators so
            return name[2:-2] in names or f"{name[2:-2]}_" in names
        return name in names
    if node.op != "call_function":
        return False
    return any(node.target is getattr(space, name, None) for name in names for space in (operator, torch, F))


def hint(size: Any) -> int:
    """A size as it was when it was traced, 0 of one that depends on data; nothing is guarded."""
    known: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return 0 if known is None else int(known)


def changed(graph: Graph, since: Any, until: Any) -> bool:
    """Whether a node between two others writes in place: perhaps to a view of what a pattern has read."""
    order = list(graph.nodes)
    return any(map(_writes, order[order.index(since) + 1 : order.index(until)]))


def _writes(node: Any) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    ends = isinstance(name, str) and ((name.endswith("_") and not name.endswith("__")) or name in _INPLACE)
    ends = ends and node.target not in (operator.and_, operator.or_, operator.not_)
    return ends or node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))


_INPLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior")
