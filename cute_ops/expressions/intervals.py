"""Bounds of an expression over a tile of rows and columns, by interval arithmetic, as an expression of scalars.

A mask such as ``k <= q`` is true for every element of a tile if it is for the extremes: ``k_high <= q_low``. Attention
classifies its tiles so: empty tiles are skipped, and full tiles need no mask. A float has the bounds ``(low, high)``,
a bool ``(all, any)``: whether it is true of every element, and whether it may be true of one.

Sums, products and roundings are monotonic in floating point, too, so that bounds hold for the values that a kernel
computes, not only for real numbers. Primitives whose device functions approximate are not bounded, and neither is what
depends on an operand without a range: such a bool has the bounds ``(false, true)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from cute_ops.expressions.graph import SCALAR, Expression, Node, Operand
from cute_ops.expressions.simplify import SimplifyingGraph


class Range(Enum):
    """The bounds of an operand over a tile."""

    POINT = 1  # one value
    INTERVAL = 2  # its least and its largest value
    UNKNOWN = 0


class Bounds(NamedTuple):
    """Bounds of an expression's outputs.

    Attributes:
        expression: of scalars: for each operand in turn its value if it is a point, or its least and its largest value.
            Its outputs are a low and a high, or an all and an any, for each output of the expression.
        unbounded: operands and primitives that could not be bounded, each once; nothing for exact bounds.
    """

    expression: Expression
    unbounded: tuple[str, ...]


class UnboundedError(ValueError):
    """A float output has no bounds."""


def bounds(expression: Expression, ranges: Sequence[Range]) -> Bounds:
    """The bounds of the outputs.

    Args:
        expression: without packed operands, reductions and groups.
        ranges: what is known of each operand.

    Raises:
        UnboundedError: a float output depends on what cannot be bounded.
    """
    graph = SimplifyingGraph(Operand(SCALAR) for each in ranges for _ in range(each.value))
    pairs: list[Pair | None] = []
    unbounded: dict[str, None] = {}
    for node, kind in zip(expression.nodes, expression.kinds, strict=True):
        pair = _bounded(graph, node, [pairs[i] for i in node.args], ranges)
        if pair is None:
            is_new = node.primitive in ("operand", "constant") or all(pairs[i] is not None for i in node.args)
            if is_new:
                unbounded[f"operand {node.operand}" if node.primitive == "operand" else node.primitive] = None
            if kind.dtype == "bool":
                pair = graph.constant(False), graph.constant(True)
        pairs.append(pair)
    outputs = [pairs[i] for i in expression.outputs]
    known = [pair for pair in outputs if pair is not None]
    if len(known) < len(outputs):
        raise UnboundedError(f"an output depends on {', '.join(unbounded)}, which has no bounds")
    return Bounds(graph.finish([i for pair in known for i in pair]), tuple(unbounded))


Pair = tuple[int, int]


def _bounded(g: SimplifyingGraph, node: Node, args: Sequence[Pair | None], ranges: Sequence[Range]) -> Pair | None:
    """The bounds of a node from those of its arguments; None where it has none."""
    if node.primitive == "operand":
        first, size = sum(each.value for each in ranges[: node.operand]), ranges[node.operand].value
        return (g.operand(first), g.operand(first + size - 1)) if size else None
    if node.primitive == "constant":
        number = node.number
        if number is None or not math.isfinite(number):  # inf - inf and 0 * inf have no bounds
            return None
        return (g.constant(number),) * 2
    known = [pair for pair in args if pair is not None]
    rule = _RULES.get(node.primitive)
    return rule(g, *known) if rule and len(known) == len(args) else None


def _increasing(primitive: str) -> Rule:
    """The rule of a primitive that increases in each of its arguments."""

    def rule(g: SimplifyingGraph, *args: Pair) -> Pair:
        return g.add(primitive, *(low for low, _ in args)), g.add(primitive, *(high for _, high in args))

    return rule


def _subtract(g: SimplifyingGraph, x: Pair, y: Pair) -> Pair:
    return g.add("subtract", x[0], y[1]), g.add("subtract", x[1], y[0])


def _multiply(g: SimplifyingGraph, x: Pair, y: Pair) -> Pair:
    for pair, other in ((x, y), (y, x)):
        factor = g.nodes[pair[0]].number
        if factor is not None and pair[0] == pair[1]:
            low, high = other if factor >= 0 else other[::-1]
            return g.add("multiply", low, pair[0]), g.add("multiply", high, pair[0])
    if x == y:
        return _square(g, x)
    low, *others = {g.add("multiply", a, b): None for a in x for b in y}
    high = low
    for each in others:
        low, high = g.add("minimum", low, each), g.add("maximum", high, each)
    return low, high


def _divide(g: SimplifyingGraph, x: Pair, y: Pair) -> Pair | None:
    divisor = g.nodes[y[0]].number
    if y[0] != y[1] or not divisor:
        return None
    low, high = x if divisor > 0 else x[::-1]
    return g.add("divide", low, y[0]), g.add("divide", high, y[0])


def _negative(g: SimplifyingGraph, x: Pair) -> Pair:
    return g.add("negative", x[1]), g.add("negative", x[0])


def _abs(g: SimplifyingGraph, x: Pair) -> Pair:
    zero, (low, high) = g.constant(0.0), x
    return (
        g.add("maximum", zero, g.add("maximum", low, g.add("negative", high))),
        g.add("maximum", g.add("abs", low), g.add("abs", high)),
    )


def _square(g: SimplifyingGraph, x: Pair) -> Pair:
    low, high = _abs(g, x)
    return g.add("square", low), g.add("square", high)


def _where(g: SimplifyingGraph, condition: Pair, x: Pair, y: Pair) -> Pair:
    always, ever = condition
    low = g.add("where", ever, g.add("minimum", x[0], y[0]), y[0])
    high = g.add("where", ever, g.add("maximum", x[1], y[1]), y[1])
    return g.add("where", always, x[0], low), g.add("where", always, x[1], high)


def _less(primitive: str) -> Rule:
    def rule(g: SimplifyingGraph, x: Pair, y: Pair) -> Pair:
        return g.add(primitive, x[1], y[0]), g.add(primitive, x[0], y[1])

    return rule


def _equal(g: SimplifyingGraph, x: Pair, y: Pair) -> Pair:
    always = g.add("logical_and", g.add("equal", x[0], y[1]), g.add("equal", x[1], y[0]))
    return always, g.add("logical_and", g.add("less_equal", x[0], y[1]), g.add("less_equal", y[0], x[1]))


def _not(g: SimplifyingGraph, x: Pair) -> Pair:
    return g.add("logical_not", x[1]), g.add("logical_not", x[0])


Rule = Callable[..., Pair | None]
_INCREASING = (
    "add", "floor", "round", "stop_gradient", "relu", "sign", "minimum", "maximum", "clip", "logical_and",
    "logical_or",
)  # fmt: skip
_RULES: dict[str, Rule] = {
    **{primitive: _increasing(primitive) for primitive in _INCREASING},
    "subtract": _subtract, "multiply": _multiply, "divide": _divide, "negative": _negative, "abs": _abs,
    "square": _square, "where": _where, "less": _less("less"), "less_equal": _less("less_equal"), "equal": _equal,
    "logical_not": _not,
}  # fmt: skip
