"""Whether a program depends on what it subtracts from the rows of a softmax."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cute_ops.fusion.graph import Graph, Node
from cute_ops.fusion.region import live_nodes
from cute_ops.fusion.shifts import is_without_effect

SHAPE, ROW = (3, 5), (3, 1)


class Rows:
    """Operations on rows ``x``, a stopped number ``s`` of each and a stopped ``y`` with one for each column."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.graph.input(SHAPE, "float32")
        self.s = self.graph.opaque("stop_gradient", [self.x], ROW, "float32")
        self.y = self.graph.opaque("stop_gradient", [self.x], SHAPE, "float32")

    def __call__(self, name: str, *args: Node | float) -> Node:
        nodes = [arg if isinstance(arg, Node) else self.graph.constant(arg) for arg in args]
        shape = max((node.shape for node in nodes), key=lambda shape: (len(shape), shape))
        return self.graph.primitive(name, nodes, shape, "float32")

    def sum(self, x: Node) -> Node:
        return self.graph.reduce("sum", x, (1,), True, "float32")

    def weights(self, stopped: Node) -> Node:
        return self("exp", self("subtract", self.x, stopped))

    def softmax(self, stopped: Node) -> Node:
        weights = self.weights(stopped)
        return self("divide", weights, self.sum(weights))


def log_softmax(rows: Rows) -> Node:
    shifted = rows("subtract", rows.x, rows.s)
    return rows("subtract", shifted, rows("log", rows.sum(rows("exp", shifted))))


def masked(rows: Rows) -> Node:
    kept = rows.graph.opaque("mask", [], SHAPE, "bool")
    weights = rows.graph.primitive("where", [kept, rows.weights(rows.s), rows.graph.constant(0.0)], SHAPE, "float32")
    return rows("divide", weights, rows.sum(weights))


def mixed(rows: Rows) -> Node:
    """Of values whose weights are divided by their sum afterwards."""
    weights, values = rows.weights(rows.s), rows.graph.input((5, 7), "float32")
    product = rows.graph.contract(weights, values, ((1,), (0,)), (3, 7), "float32")
    return rows("divide", product, rows.sum(weights))


WITHOUT: dict[str, Callable[[Rows], Node]] = {
    "softmax": lambda rows: rows.softmax(rows.s),
    "log softmax": log_softmax,
    "logsumexp": lambda rows: rows("add", rows("log", rows("abs", rows.sum(rows.weights(rows.s)))), rows.s),
    "masked": masked,
    "values": mixed,
    "doubled": lambda rows: rows("subtract", rows("multiply", rows.s, 2.0), rows("add", rows.s, rows.s)),
}
WITH: dict[str, Callable[[Rows], Node]] = {
    "numerator": lambda rows: rows.weights(rows.s),
    "another base": lambda rows: rows("divide", rows.weights(rows.s), rows.sum(rows("exp", rows.x))),
    "a number of each column": lambda rows: rows.softmax(rows.y),
    "one beside the weights": lambda rows: rows(
        "divide", rows.weights(rows.s), rows("add", rows.sum(rows.weights(rows.s)), 1.0)
    ),
    "what no rule says": lambda rows: rows("tanh", rows("subtract", rows.x, rows.s)),
    "itself": lambda rows: rows.s,
}  # fmt: skip


def effect(make: Callable[[Rows], Node]) -> bool:
    rows = Rows()
    rows.graph.outputs = [make(rows)]
    live = set(live_nodes(rows.graph))
    return not all(is_without_effect(each, live, rows.graph.outputs) for each in (rows.s, rows.y) if each in live)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_cancels(name: str) -> None:
    assert not effect(WITHOUT[name])


@pytest.mark.parametrize("name", WITH)
def test_what_remains(name: str) -> None:
    assert effect(WITH[name])
