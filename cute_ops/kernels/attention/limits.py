"""Masks that let one interval of each row of a tile pass, and the columns in it as bits of a word.

To compare each score's coordinates takes three to five instructions a score; to select by a bit takes one and a part of
another, which moves several bits to predicates.
"""

import math
import operator
from functools import cache
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.expressions.graph import Graph, copied
from cute_ops.expressions.text import text_of
from cute_ops.kernels.emit.emitter import Emitter

WORD = 32  # bits
FAR = float(1 << 25)  # no coordinate is so large
LONGEST, EXACT = 1 << 22, 1 << 24  # coordinates, and whole numbers that float32 holds
# By primitive: a bound of the result's size from bounds of its operands' sizes, for operands that are whole numbers.
WHOLE = {
    **dict.fromkeys(("add", "subtract"), operator.add), "multiply": operator.mul,
    **dict.fromkeys(("negative", "abs", "floor"), abs), **dict.fromkeys(("minimum", "maximum"), max),
}  # fmt: skip
# By comparison of a and b: (strict, sign). It says that sign * (b - a) is positive, or, if not strict, not negative.
COMPARISONS = {"less_equal": (False, 1), "less": (True, 1), "greater_equal": (False, -1), "greater": (True, -1)}


class Limit(NamedTuple):
    """The condition that ``rest + step * x`` is not negative, or positive, where x is a coordinate of a column.

    Attributes:
        rest: an emitter of a number of the row.
        step: 1 or -1.
        strict: whether it is positive.
    """

    rest: Any
    step: int
    strict: bool


def limits_of(mod, axis, device):
    """The limits of a coordinate if a mask is a conjunction of limits, else None. ``device``: functions of emitters."""
    if mod.reads:
        return None
    expression, found = mod.expression, []
    graph = Graph(expression.operands)
    nodes, places = expression.nodes, copied(expression, graph)

    @cache  # a node that each of many steps reads twice would else be walked 2**steps times
    def slope(i):
        """How often the coordinate is added; None if it is otherwise used."""
        node = nodes[i]
        if node.primitive in ("operand", "constant"):
            return int(node.primitive == "operand" and node.operand == axis)
        slopes = [slope(j) for j in node.args]
        if all(each == 0 for each in slopes):
            return 0
        if None in slopes or node.primitive not in ("add", "subtract", "negative"):
            return None
        return {"add": sum(slopes), "subtract": slopes[0] - slopes[-1], "negative": -slopes[0]}[node.primitive]

    @cache
    def largest(i):
        """The largest whole number that a node can be, as coordinates and sizes are; infinite if it may be none."""
        node = nodes[i]
        if node.primitive == "operand":
            return LONGEST
        if node.primitive == "constant":
            return abs(float(node.number)) if float(node.number).is_integer() else math.inf
        return WHOLE.get(node.primitive, lambda *_: math.inf)(*map(largest, node.args))

    def is_exact(i):
        """Whether float32 computes a node, or the difference of it and another one, without an error."""
        return nodes[i].primitive == "constant" or largest(i) <= EXACT

    def gather(i):
        node = nodes[i]
        if node.primitive == "logical_and":
            return all([gather(j) for j in node.args])
        if node.primitive not in COMPARISONS:
            return False
        (strict, sign), slopes = COMPARISONS[node.primitive], [slope(j) for j in node.args]
        if None in slopes or abs(slopes[1] - slopes[0]) != 1:
            return False
        alone = any(nodes[j].primitive == "operand" and nodes[j].operand == axis for j in node.args)
        if not alone and not all(map(is_exact, node.args)):
            return False
        first, second = node.args[::sign]
        rest = graph.finish([graph.add("subtract", places[second], places[first])])
        found.append(Limit(Emitter(text_of(rest), device), sign * (slopes[1] - slopes[0]), strict))
        return True

    return found if gather(expression.outputs[0]) else None


def interval(limits, operands, low=None, high=None):
    """The least and the largest coordinate within limits, None where none is.

    Args:
        operands: of the row, with 0 for the coordinate.
        low, high: limits besides these.
    """
    for rest, step, strict in limits:
        (value,) = rest(*operands)
        value = cute.arch.fmin(cute.arch.fmax(value, Float32(-FAR)), Float32(FAR))  # of NaN no comparison is true
        if step > 0:  # x > -rest, or x >= -rest, where x is a whole number
            least = _floor(-value) + 1 if strict else -_floor(value)
            low = least if low is None else cutlass.max(low, least)
        else:  # x < rest, or x <= rest
            most = -_floor(-value) - 1 if strict else _floor(value)
            high = most if high is None else cutlass.min(high, most)
    return low, high


def _floor(x):
    return Int32(cute.math.floor(x))


def words_of(low, high, start, columns):
    """Bits of a thread's columns, of which ``start`` is the first, that are between two coordinates or None."""
    before = Int32(0) if low is None else _columns_below(low, start, columns)
    through = Int32(columns) if high is None else _columns_below(high + 1, start, columns)
    bits = (Int64(1) << Int64(cutlass.max(through, before))) - (Int64(1) << Int64(before))
    return [Int32(bits >> i) if i else Int32(bits & 0xFFFFFFFF) for i in range(0, columns, WORD)]


def _columns_below(end, start, columns):
    """How many of a thread's columns are before this coordinate: pairs of neighbours, eight from one to the next."""
    ahead = cutlass.min(cutlass.max(end - start, Int32(0)), Int32(4 * columns))
    return ahead // 8 * 2 + cutlass.min(ahead % 8, Int32(2))


def are_pairs(columns):
    """Whether these are the columns of a thread as accumulators have them."""
    return tuple(columns) == tuple(8 * (c // 2) + c % 2 for c in range(len(columns))) and len(columns) < 2 * WORD


def bit_of(i):
    """A bit of a word, as a signed number."""
    return (1 << i) - (1 << WORD if i == WORD - 1 else 0)
