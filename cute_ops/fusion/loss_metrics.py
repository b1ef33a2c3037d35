"""Metrics that a program computes from the logits of a loss: log-sum-exps and predicted classes."""

from __future__ import annotations

from typing import NamedTuple

from cute_ops.fusion.graph import Graph, Node
from cute_ops.fusion.loss_terms import is_lse
from cute_ops.fusion.named import uncast
from cute_ops.fusion.one_expression import MOST, between, expressed
from cute_ops.fusion.region import VIEWS, without_ones

MOST_CLASSES = 2**24  # so many columns the op counts
What = tuple[str, float, float]
LSE = ("lse", 1.0, 0.0)
PREDICTED = ("predicted", 0.0, 0.0)


class Beside(NamedTuple):
    """A value of each row of logits.

    Attributes:
        node: the value.
        what: ``("lse", 1, 0)``, the log-sum-exp; ``("predicted", 0, 0)``, the place of the largest logit;
            ``("of_lse", a, b)``, ``a * lse + b * lse^2`` without a gradient.
    """

    node: Node
    what: What


def read_beside(graph: Graph, loss: Node, x: Node, live: set[Node], exact: bool) -> list[Beside] | None:
    """All that the program computes of logits x beside a loss that reads them; None if one of them is another value."""
    found: list[Beside] = []
    waiting, seen = [x], {x, loss}
    while waiting:
        node = waiting.pop(0)
        if node in graph.outputs or len(seen) > MOST:
            return None
        for user in (each for each in node.users if each in live and each not in seen):
            seen.add(user)
            if not graph.metrics:
                return None
            if (what := _what(graph, user, x, exact)) is not None:
                found.append(Beside(user, what))
            elif user.op in ("primitive", "reduce", "cast", *VIEWS):
                waiting.append(user)
            else:
                return None
    return found


def of_lse_beside(graph: Graph, loss: Node, x: Node, live: set[Node]) -> list[Beside]:
    """The values of logits x that the function of their loss gives beside it."""
    if not graph.metrics:
        return []
    calls = ((node, call) for node, call in graph.named.items() if call.op == "of_lse" and node in live)
    return [Beside(node, what) for node, call in calls if (what := _what(graph, node, x, False)) is not None]


def _what(graph: Graph, node: Node, x: Node, exact: bool) -> What | None:
    if (call := graph.named.get(node)) is not None and call.op in ("argmax", "of_lse"):
        if _rows_as_they_lie(call.nodes[0]) is not x:
            return None
        return PREDICTED if call.op == "argmax" else ("of_lse", call.attrs["factor"], call.attrs["square"])
    if node.op != "primitive" or without_ones(node.shape) != without_ones(x.shape[:-1]):
        return None
    nodes = between(node, {x})
    found = None if nodes is None else expressed(nodes, node, exact)
    return LSE if found is not None and all(uncast(leaf) is x for leaf in found[1]) and is_lse(found[0]) else None


def _rows_as_they_lie(node: Node) -> Node:
    """The value before casts and before its rows were joined or split."""
    while node.op == "cast" or (node.op == "reshape" and node.shape[-1:] == node.args[0].shape[-1:]):
        node = node.args[0]
    return node
