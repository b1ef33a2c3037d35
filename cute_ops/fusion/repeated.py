"""Regions that are alike, as those of a model's layers are: one is expressed, and the others take its expressions."""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import NamedTuple

from cute_ops.fusion.express import Expressed, express
from cute_ops.fusion.graph import Node
from cute_ops.fusion.region import Facts, Region


class _Known(NamedTuple):
    nodes: list[Node]
    made: list[Expressed]
    failed: dict[Node, str]


class Expressing:
    """Expressions of a graph's regions.

    Args:
        plain: views and casts that regions look through.
        facts: of the graph.
        exact: as :func:`express` takes it.
    """

    def __init__(self, plain: Container[Node], facts: Facts, exact: bool) -> None:
        self.plain, self.facts, self.exact = plain, facts, exact
        self._known: dict[Hashable, _Known] = {}

    def of(self, region: Region) -> tuple[list[Expressed], dict[Node, str]]:
        """The result of :func:`express`."""
        key, nodes = self._described(region)
        known = self._known.get(key)
        if known is None:
            made, failed = express(region, self.plain, self.facts, self.exact)
            self._known[key] = _Known(nodes, made, failed)
            return made, failed
        here = dict(zip(known.nodes, nodes, strict=True))
        moved = [
            each._replace(
                leaves=tuple(leaf._replace(node=here[leaf.node]) for leaf in each.leaves),
                roots=tuple(here[root] for root in each.roots),
            )
            for each in known.made
        ]
        return moved, {here[node]: why for node, why in known.failed.items()}

    def _described(self, region: Region) -> tuple[Hashable, list[Node]]:
        """All that :func:`express` looks at, and the nodes in the order in which it is said."""
        place: dict[Node, int] = {}
        said: list[Hashable] = []
        rowlike = self.facts.rowlike
        for node in region.nodes:
            stack = [node]
            while stack:
                each = stack[-1]
                inside = each is node or each in self.plain
                missing = [arg for arg in each.args if arg not in place] if inside else []
                if missing:
                    stack += missing
                    continue
                stack.pop()
                if each not in place:
                    args = tuple([place[arg] for arg in each.args]) if inside else ()
                    attr = str(each.attr) if each.op == "constant" else each.attr if inside else None
                    said.append((each.op if inside or each.op == "constant" else "leaf", attr, each.shape, each.dtype,
                                 each in rowlike, args))  # fmt: skip
                    place[each] = len(place)
        return (tuple(said), tuple([place[root] for root in region.roots])), list(place)
