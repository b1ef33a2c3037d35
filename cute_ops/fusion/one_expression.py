"""A few nodes of a graph as one expression of the values that they are computed from."""

from __future__ import annotations

from cute_ops.expressions.graph import Expression
from cute_ops.fusion.canonical import canonical
from cute_ops.fusion.express import express
from cute_ops.fusion.graph import Node
from cute_ops.fusion.region import VIEWS, Facts, Region, obstacle

MOST = 40  # nodes


def between(root: Node, leaves: set[Node]) -> list[Node] | None:
    """The nodes that compute a value from these leaves and constants, arguments first; None if it reads more."""
    found: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in found or node in leaves or node.op == "constant":
            continue
        if node.op not in ("primitive", "reduce", "cast", *VIEWS) or len(found) == MOST:
            return None
        found.add(node)
        waiting += node.args
    return sorted(found, key=lambda node: node.index)


def expressed(nodes: list[Node], root: Node, exact: bool) -> tuple[Expression, list[Node]] | None:
    """The canonical expression of a node, and its leaves; None of a node that is none, as where one in between is of
    other rows.
    """
    facts, inside = Facts(), set(nodes)
    for node in sorted({*nodes, *(arg for node in nodes for arg in node.args)}, key=lambda node: node.index):
        if node in inside and obstacle(node, facts, inside) is not None:
            return None
        facts.note(node)
    made, _ = express(Region(nodes, [root]), (), facts, exact)
    if len(made) != 1:
        return None
    text = canonical(made[0].expression, made[0].n)
    return text.flat, [made[0].leaves[i].node for i in text.operands]
