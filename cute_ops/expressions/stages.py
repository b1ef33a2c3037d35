"""The stages of an expression's reductions: those that do not depend on each other are computed together."""

from __future__ import annotations

from typing import NamedTuple

from cute_ops.expressions.graph import Expression, Graph, Kind, Operand, copied, rebuilt
from cute_ops.expressions.primitives import PRIMITIVES


def levels(expression: Expression) -> tuple[int, ...]:
    """How many stages of reductions come before each node's value is known."""
    found: list[int] = []
    for node in expression.nodes:
        before = max((found[i] for i in node.args), default=0)
        found.append(before + 1 if _reduces(node.primitive) else before)
    return tuple(found)


def stages(expression: Expression) -> tuple[tuple[int, ...], ...]:
    """The reductions of each stage, as nodes: ``x * rsqrt(mean(x * x))`` has one stage, a softmax two."""
    of = levels(expression)
    reductions = [i for i, node in enumerate(expression.nodes) if _reduces(node.primitive)]
    return tuple(tuple(i for i in reductions if of[i] == stage) for stage in range(1, max(of, default=0) + 1))


def awaited(expression: Expression, kinds: str) -> int:
    """How many stages a kernel waits for before it stores outputs with columns. ``kinds`` has a letter for each output:
    what it becomes, after sums over rows.
    """
    of = levels(expression)
    return max((of[i] for i, kind in zip(expression.outputs, kinds, strict=True) if kind in "tr"), default=0)


class SplitExpression(NamedTuple):
    """An expression in two: what is computed for each element, and then for each row.

    Attributes:
        elements: computes the outputs with columns, followed by the values to reduce.
        reductions: how each of these values is reduced: by ``sum``, ``max`` or ``min``.
        rows: computes the outputs without columns from the results of the reductions, followed by all operands. None if
            there are no such outputs.
    """

    elements: Expression
    reductions: tuple[str, ...]
    rows: Expression | None


def split(expression: Expression) -> SplitExpression:
    """Split an expression that has at most one stage of reductions, on which no output with columns depends.

    Raises:
        ValueError: it has more, or such an output does.
    """
    of, kinds = levels(expression), expression.output_kinds
    first, *more = stages(expression) or ((),)
    late = [i for i, kind in zip(expression.outputs, kinds, strict=True) if kind.columns and of[i]]
    if late or more:
        primitive = expression.nodes[first[0]].primitive
        raise ValueError(
            f"values with columns depend on xp.{primitive} of a row: make that an operand, '*m 1', or return it"
        )
    wanted = [
        ("sum" if node.primitive == "mean" else node.primitive, node.args[0])
        for node in (expression.nodes[i] for i in first)
    ]
    taken = tuple(dict.fromkeys(wanted))  # each once: sum and mean of the same values share one
    tiles = [i for i, kind in zip(expression.outputs, kinds, strict=True) if kind.columns]
    elements = rebuilt(expression, outputs=[*tiles, *(value for _, value in taken)])
    if len(tiles) == len(kinds):
        return SplitExpression(elements, (), None)
    column = Operand(Kind(True, False))
    graph = Graph((*[column] * len(taken), *expression.operands))
    results = {}
    for i, reduction in zip(first, wanted, strict=True):
        total = graph.operand(taken.index(reduction))
        mean = expression.nodes[i].primitive == "mean"
        results[i] = graph.add("divide", total, graph.leaf("n")) if mean else total
    nodes = copied(expression, graph, lambda node: graph.operand(node.operand + len(taken), node.half), results)
    rows = graph.finish([nodes[i] for i, kind in zip(expression.outputs, kinds, strict=True) if not kind.columns])
    return SplitExpression(elements, tuple(primitive for primitive, _ in taken), rows)


def _reduces(primitive: str) -> bool:
    return primitive in PRIMITIVES and PRIMITIVES[primitive].reduces
