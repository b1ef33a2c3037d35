"""Expressions of scores with few instructions: factors and sums of constants become one, and so do terms of a row.

An instruction for each score costs the forward about 7% of its time. So a number may be one that is not computed
yet, :class:`Scaled` or :class:`Along`, and each is computed where a function needs it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_ops.expressions.graph import operands_of
from cute_ops.expressions.text import parse
from cute_ops.kernels.lib.activation import LOG2_E


class Scaled(NamedTuple):
    """``factor * x + offset``, of constants."""

    factor: float
    x: Any
    offset: float = 0.0

    def computed(self):
        value = self.x if self.factor == 1.0 else self.x * self.factor
        return value if self.offset == 0.0 else value + self.offset


class Along(NamedTuple):
    """``base + step * column`` of a column, which is a constant; base and step are those of all columns of a row."""

    base: Any
    step: Any
    column: float

    def computed(self):
        if isinstance(self.step, float) and self.step == 1.0:
            return self.base + self.column
        return self.base + self.step * Float32(self.column)

    def between(self, columns):
        """Whether it keeps its sign between the first and the last of some columns, and the sign."""
        low, high = (self._replace(column=float(column)).computed() for column in (columns[0], columns[-1]))
        return low * high >= 0.0, cutlass.select_(low + high >= 0.0, Float32(1.0), Float32(-1.0))


def computed(x):
    """A number that registers hold."""
    if isinstance(x, float):
        return Float32(x)
    return x.computed() if isinstance(x, Scaled | Along) else x


class Folded:
    """Evaluates an expression whose operands may be numbers that are not computed yet.

    Args:
        text: of the expression.
        device: its functions.
    """

    def __init__(self, text, device):
        self.expression, self.device = parse(text), device
        self.of = [operands_of(self.expression, i) for i in range(len(self.expression.nodes))]
        self.absolute = [i for i, node in enumerate(self.expression.nodes) if node.primitive == "abs"]

    def __call__(self, operands, varying, signs=None):
        """The output: a number of which :meth:`outer` has made it.

        Args:
            operands: numbers.
            varying: those of them that differ between columns of a row, besides those that are :class:`Along`.
            signs: those of the arguments of absolute values that keep theirs, by node; or None.
        """
        found = self._value(self.expression.outputs[0], operands, varying, {}, signs or {})
        if self.outer() == (1.0, 0.0):
            return computed(found)
        if found[::2] != self.outer():
            raise RuntimeError(f"the output is {found}, not {self.outer()} of a number")
        return found.x

    def outer(self):
        """A positive factor and an offset with which the output comes from a number: what uses it may apply these."""
        node, factor, offset = self.expression.nodes[self.expression.outputs[0]], 1.0, 0.0
        if node.primitive == "multiply":
            first, second = (self.expression.nodes[i] for i in node.args)
            if first.primitive == "constant":
                first, second = second, first
            if second.primitive == "constant" and first.primitive == "tanh":
                node, factor = first, float(second.number)
        if node.primitive == "tanh" and factor > 0.0:
            factor, offset = 2.0 * factor, -factor
        return (factor, offset) if node.primitive == "tanh" else (1.0, 0.0)

    def cap(self):
        """The factors (a, b) if the output is ``a * tanh(b * score)``, else None."""
        nodes = self.expression.nodes

        def scaled(i):
            """The argument that a node multiplies by a constant, and the constant; any other node, and 1."""
            if nodes[i].primitive != "multiply":
                return i, 1.0
            for x, y in (nodes[i].args, nodes[i].args[::-1]):
                if nodes[y].primitive == "constant":
                    return x, float(nodes[y].number)
            return i, 1.0

        (i, outer), inner = scaled(self.expression.outputs[0]), None
        if nodes[i].primitive == "tanh":
            j, inner = scaled(*nodes[i].args)
            inner = inner if nodes[j].primitive == "operand" and nodes[j].operand == 0 else None
        return None if inner is None or min(outer, inner) <= 0.0 else (outer, inner)

    def along(self, operands, varying):
        """The arguments of absolute values that are :class:`Along`, by the number of the absolute value."""
        found, known = {}, {}
        for i in self.absolute:
            (argument,) = self.expression.nodes[i].args
            if self.of[argument].isdisjoint(varying):
                value = self._value(argument, operands, varying, known, {})
                if isinstance(value, Along):
                    found[i] = value
        return found

    def _value(self, i, operands, varying, known, signs):
        if i not in known:
            node = self.expression.nodes[i]
            if node.primitive == "operand":
                known[i] = operands[node.operand]
            elif node.primitive == "constant":
                known[i] = Boolean(node.number) if isinstance(node.number, bool) else float(node.number)
            else:
                given = [self._value(arg, operands, varying, known, signs) for arg in node.args]
                of_row = [self.of[arg].isdisjoint(varying) for arg in node.args]
                known[i] = self._result(i, given, of_row, signs)
        return known[i]

    def _result(self, i, given, of_row, signs):
        node = self.expression.nodes[i]
        if node.primitive in ("add", "subtract"):
            first, second = given
            return plus(first, times(second, -1.0) if node.primitive == "subtract" else second, of_row)
        if node.primitive == "negative":
            return times(given[0], -1.0)
        if node.primitive == "multiply":
            return product(*given, of_row)
        if node.primitive == "tanh":  # 2 / (1 + exp(-2 x)) - 1, right to 2e-7 absolutely, as scores ask for
            exponential = cute.math.exp2(computed(times(given[0], -2 * LOG2_E)), fastmath=True)
            return Scaled(2.0, cute.arch.rcp_approx(exponential + 1.0), -1.0)
        if node.primitive == "exp":
            return cute.math.exp2(computed(times(given[0], LOG2_E)), fastmath=True)
        if i in signs and isinstance(given[0], Along):
            return product(given[0], signs[i], [True, True])
        more = [node.value] if node.primitive == "astype" else []
        return self.device[node.primitive](*map(computed, given), *more)


def times(x, factor):
    """A number times a constant."""
    if isinstance(x, float):
        return x * factor
    if isinstance(x, Scaled):
        return Scaled(x.factor * factor, x.x, x.offset * factor)
    if isinstance(x, Along):
        return Along(x.base * factor, x.step * factor, x.column)
    return Scaled(factor, x)


def product(x, y, of_row):
    """``of_row``: whether each is the same in all columns of a row, or :class:`Along`."""
    if isinstance(x, float) or isinstance(y, float):
        return times(y, x) if isinstance(x, float) else times(x, y)
    if isinstance(y, Along) or (isinstance(y, Scaled) and not isinstance(x, Along)):
        x, y, of_row = y, x, of_row[::-1]
    if isinstance(x, Along) and of_row[1] and not isinstance(y, Along):
        factor = computed(y)
        return Along(x.base * factor, x.step * factor, x.column)
    if isinstance(x, Scaled) and x.offset == 0.0:  # the constant is left for what comes
        return Scaled(x.factor, x.x * computed(y))
    return computed(x) * computed(y)


def plus(x, y, of_row):
    """``of_row``: as for :func:`product`."""
    if isinstance(x, float):
        x, y, of_row = y, x, of_row[::-1]
    if isinstance(y, float):
        if isinstance(x, float):
            return x + y
        if isinstance(x, Scaled):
            return x._replace(offset=x.offset + y)
        return x._replace(base=x.base + y) if isinstance(x, Along) else Scaled(1.0, x, y)
    if isinstance(y, Along):
        x, y, of_row = y, x, of_row[::-1]
    if isinstance(x, Along) and isinstance(y, Along):
        return Along(x.base + y.base, x.step + y.step, x.column)
    if isinstance(x, Along) and of_row[1]:
        return x._replace(base=x.base + computed(y))
    return computed(x) + computed(y)
