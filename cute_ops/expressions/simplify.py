"""A graph that simplifies what is added to it: constants are folded, and what changes nothing is left out.

Only what is right for every float is done, infinities and NaN included, except that ``x + 0`` may keep the sign of a
zero. ``x * 0`` and ``x - x`` stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

from cute_ops.expressions.graph import Graph, Node
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.recognize import recognize
from cute_ops.expressions.reference import REFERENCE

# Python's numbers as an array namespace, which references are evaluated with.
NUMBERS = SimpleNamespace(
    __name__="math", exp=math.exp, exp2=math.exp2, log=math.log, log1p=math.log1p, tanh=math.tanh, sqrt=math.sqrt,
    erf=math.erf, erfc=math.erfc, floor=math.floor, round=round, sin=math.sin, cos=math.cos,
    abs=abs, minimum=min, maximum=max,
    sign=lambda x: (x > 0) - (x < 0), where=lambda c, x, y: x if c else y,
    logical_and=lambda x, y: x and y, logical_or=lambda x, y: x or y, logical_not=lambda x: not x,
)  # fmt: skip


def fold(primitive: str, *args: float | bool) -> float | bool | None:
    """A primitive of numbers; None where it has no value that is a number."""
    try:
        result = REFERENCE[primitive](NUMBERS, *args)
    except (ArithmeticError, ValueError):
        return None
    return result if isinstance(result, bool) else None if math.isnan(result) else float(result)


class SimplifyingGraph(Graph):
    """The graph that the module describes. A simpler node does not replace a result that has more dims.

    Attributes:
        simplifies: whether it does; else it is a :class:`Graph`.
    """

    simplifies = True

    def add(self, primitive: str, *args: int, value: str = "") -> int:
        simpler = self._simpler(primitive, args, value) if self.simplifies else None
        return super().add(primitive, *args, value=value) if simpler is None else simpler

    def arg(self, i: int, primitive: str) -> int | None:
        """The first argument of a node of this primitive; None of other nodes."""
        return self.nodes[i].args[0] if self.nodes[i].primitive == primitive else None

    def _simpler(self, primitive: str, args: tuple[int, ...], value: str) -> int | None:
        if not args or PRIMITIVES[primitive].grouped:
            return None
        numbers = [self.nodes[i].number if self.nodes[i].primitive == "constant" else None for i in args]
        if primitive == "astype":
            return args[0] if self.nodes[args[0]] == Node("astype", self.nodes[args[0]].args, value) else None
        known = [x for x in numbers if x is not None]
        if len(known) == len(args):
            folded = fold(primitive, *known)
            return None if folded is None else self.constant(folded)
        rule = _RULES.get(primitive)
        found = rule(self, args, numbers) if rule else None
        if found is None:
            found = recognize(self, primitive, args)
        if found is None:
            return None
        rows, columns, _ = self.kinds[found]
        return found if all(rows >= self.kinds[i].rows and columns >= self.kinds[i].columns for i in args) else None


Numbers = list[float | bool | None]


def _add(g: SimplifyingGraph, args: tuple[int, ...], numbers: Numbers) -> int | None:
    for (i, j), x in ((args, numbers[0]), (args[::-1], numbers[1])):
        if x == 0:
            return j
        negated = g.arg(i, "negative")
        if negated is not None:
            return g.add("subtract", j, negated)
    return None


def _subtract(g: SimplifyingGraph, args: tuple[int, ...], numbers: Numbers) -> int | None:
    i, j = args
    if numbers[1] == 0:
        return i
    negated = g.arg(j, "negative")
    return g.add("negative", j) if numbers[0] == 0 else None if negated is None else g.add("add", i, negated)


def _multiply(g: SimplifyingGraph, args: tuple[int, ...], numbers: Numbers) -> int | None:
    if args[0] == args[1]:
        return g.add("square", args[0])
    for (i, j), x in ((args, numbers[0]), (args[::-1], numbers[1])):
        if x == 1:
            return j
        if x == -1:
            return g.add("negative", j)
        negated = g.arg(j, "negative")
        if x is not None and negated is not None:
            return g.add("multiply", negated, g.add("negative", i))
    return None


def _divide(g: SimplifyingGraph, args: tuple[int, ...], numbers: Numbers) -> int | None:
    i, j = args
    if numbers[0] == 1:
        return g.add("reciprocal", j)
    divisor = numbers[1]
    if divisor and math.isfinite(divisor) and abs(math.frexp(divisor)[0]) == 0.5:
        return g.add("multiply", i, g.constant(1 / divisor))  # exact: a power of two
    return None


def _where(g: SimplifyingGraph, args: tuple[int, ...], numbers: Numbers) -> int | None:
    condition, i, j = args
    if numbers[0] is not None or i == j:
        return i if numbers[0] or i == j else j
    opposite = g.arg(condition, "logical_not")
    return None if opposite is None else g.add("where", opposite, j, i)


def _logical(keeps: bool) -> Rule:
    """The rule of ``and`` or ``or``: the constant ``keeps`` gives the other argument, its opposite itself."""

    def rule(g: SimplifyingGraph, args: tuple[int, ...], numbers: Numbers) -> int | None:
        for (i, j), x in ((args, numbers[0]), (args[::-1], numbers[1])):
            if x is not None:
                return j if x is keeps else i
        return args[0] if args[0] == args[1] else None

    return rule


def _twice(primitive: str) -> Rule:
    """The rule of a primitive that is its own inverse."""
    return lambda g, args, numbers: g.arg(args[0], primitive)


Rule = Callable[[SimplifyingGraph, tuple[int, ...], Numbers], int | None]
_RULES: dict[str, Rule] = {
    "add": _add, "subtract": _subtract, "multiply": _multiply, "divide": _divide, "where": _where,
    "logical_and": _logical(True), "logical_or": _logical(False), "logical_not": _twice("logical_not"),
    "negative": _twice("negative"),
}  # fmt: skip
