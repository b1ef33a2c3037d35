"""Masks, or parts of them, that let one interval of each row of a tile pass, and the columns in it as bits of a word.

To compare each score's coordinates takes three to five instructions a score; to select by a bit takes one and a part of
another, which moves several bits to predicates.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.expressions.limits import limits_and_rest
from cute_ops.expressions.text import text_of
from cute_ops.kernels.emit.emitter import Emitter

WORD = 32  # bits
FAR = float(1 << 25)  # no coordinate is so large


def limits_of(mod, axis, device):
    """What :func:`limits_and_rest` finds, with emitters of the rests of limits. ``device``: their functions."""
    found, others = limits_and_rest(mod, axis)
    return [each._replace(rest=Emitter(text_of(each.rest), device)) for each in found], others


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
