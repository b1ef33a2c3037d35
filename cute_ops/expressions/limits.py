"""Which comparisons of a mask limit a coordinate, and the rest of it.

Kernels import this module, so that it imports the standard library only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from cute_ops.expressions.graph import Expression, Graph, copied
from cute_ops.expressions.reads import Mod

LONGEST, EXACT = 1 << 22, 1 << 24  # coordinates, and whole numbers that float32 holds
# By primitive: a bound of the result's size from bounds of its operands' sizes, for operands that are whole numbers.
WHOLE: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("add", "subtract"), operator.add), "multiply": operator.mul,
    **dict.fromkeys(("negative", "abs", "floor"), abs), **dict.fromkeys(("minimum", "maximum"), max),
}  # fmt: skip
# By comparison of a and b: (strict, sign). It says that sign * (b - a) is positive, or, if not strict, not negative.
COMPARISONS = {"less_equal": (False, 1), "less": (True, 1), "greater_equal": (False, -1), "greater": (True, -1)}


class Limit(NamedTuple):
    """The condition that ``rest + step * x`` is not negative, or positive, where x is a coordinate of a column.

    Attributes:
        rest: a number of the row.
        step: 1 or -1.
        strict: whether it is positive.
    """

    rest: Expression
    step: int
    strict: bool


def limits_and_rest(mod: Mod, axis: int) -> tuple[list[Limit], Mod | None]:
    """The limits of a coordinate in a mask that is a conjunction, and a mask of its other parts, None where there are
    none.
    """
    expression, found, others = mod.expression, list[Limit](), list[int]()
    graph = Graph(expression.operands)
    nodes, places = expression.nodes, copied(expression, graph)

    @cache  # a node that each of many steps reads twice would else be walked 2**steps times
    def slope(i: int) -> int | None:
        """How often the coordinate is added; None if it is otherwise used."""
        node = nodes[i]
        if node.primitive in ("operand", "constant"):
            is_read = node.primitive == "operand" and node.operand >= mod.given
            return None if is_read else int(node.primitive == "operand" and node.operand == axis)
        slopes = [slope(j) for j in node.args]
        if all(each == 0 for each in slopes):
            return 0
        known = [each for each in slopes if each is not None]
        if len(known) < len(slopes) or node.primitive not in ("add", "subtract", "negative"):
            return None
        return {"add": sum(known), "subtract": known[0] - known[-1], "negative": -known[0]}[node.primitive]

    @cache
    def largest(i: int) -> float:
        """The largest whole number that a node can be, as coordinates and sizes are; infinite if it may be none."""
        node = nodes[i]
        if node.primitive == "operand":
            return LONGEST
        if node.primitive == "constant":
            number = math.inf if node.number is None else float(node.number)
            return abs(number) if number.is_integer() else math.inf
        of_whole = WHOLE.get(node.primitive)
        return of_whole(*map(largest, node.args)) if of_whole else math.inf

    def is_exact(i: int) -> bool:
        """Whether float32 computes a node, or the difference of it and another one, without an error."""
        return nodes[i].primitive == "constant" or largest(i) <= EXACT

    def limit(i: int) -> Limit | None:
        """The limit that a node is; None if it is none."""
        node = nodes[i]
        if node.primitive not in COMPARISONS:
            return None
        (strict, sign), (first, second) = COMPARISONS[node.primitive], map(slope, node.args)
        if first is None or second is None or abs(second - first) != 1:
            return None
        alone = any(nodes[j].primitive == "operand" and nodes[j].operand == axis for j in node.args)
        if not alone and not all(map(is_exact, node.args)):
            return None
        low, high = node.args[::sign]
        rest = graph.finish([graph.add("subtract", places[high], places[low])])
        return Limit(rest, sign * (second - first), strict)

    def gather(i: int) -> None:
        if nodes[i].primitive == "logical_and":
            for j in nodes[i].args:
                gather(j)
        elif (made := limit(i)) is not None:
            found.append(made)
        else:
            others.append(places[i])

    gather(expression.outputs[0])
    if not others:
        return found, None
    first, *more = others
    for each in more:
        first = graph.add("logical_and", first, each)
    return found, Mod(graph.finish([first]), mod.reads)
