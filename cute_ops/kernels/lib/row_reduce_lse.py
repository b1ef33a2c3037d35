"""Sums of exponentials that never overflow: a maximum, and a sum relative to it.

``lse = log(sum(exp(x))) = M + log(S)`` with ``M = max(x)`` and ``S = sum(exp(x - M))``. Two pairs of a maximum and a
sum combine into one, so that every thread finds its own and one exchange combines them all. Where the maximum is
-inf, sums are relative to 0: an empty part counts nothing, a row of nothing but -inf has S = 0.

M and S stay apart: once added, the rounding of a large M is more than all of log(S). A plain sum is one of
differences, too, P = sum(x - M) of C elements: where a pair is moved to a larger maximum M', it gains C * (M - M'), of
the same sign.
"""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.kernels.lib.row_reduce import WARP, RowSum

LOG2_E = math.log2(math.e)


def origin(m):
    """What a sum beside the maximum ``m`` is relative to."""
    return cutlass.select_(m > -Float32.inf, m, Float32(0.0))


def moved(state, top):
    """A pair, and its plain sum if there is one, relative to a maximum that is no smaller."""
    m, s, *plain = state
    base = origin(top)
    s = s * exponentials(m, base)
    if not plain:
        return (top, s)
    p, count = plain
    return (top, s, p + count * (origin(m) - base), count)


def exponentials(x, m):
    """``exp(x - m)``; the difference first, which is exact where it matters."""
    return cute.math.exp2((x - m) * LOG2_E, fastmath=True)


class RowLogSum(RowSum):
    """As :class:`RowSum`; the values are those of a :class:`LogSum`."""

    def __init__(self, tile, values, stages):
        super().__init__(tile, values, stages)
        self.halved = False

    def warp_sums(self, values):
        return self._reduce(values, min(self.tile.threads_per_row, WARP))

    def _reduce(self, values, group):
        """Across the lanes of a group."""
        top = cute.arch.warp_reduction(values[0], cute.arch.fmax, threads_in_group=group)
        _, *sums = moved(values, top)
        return (top, *(cute.arch.warp_reduction(v, operator.add, threads_in_group=group) for v in sums))

    def _combine(self, sSum, stage, lane, row):
        if const_expr(self.parts <= 8):
            places = [Int32(p) for p in range(self.parts)]
            insides = [True] * self.parts
        else:
            places = [Int32(p) + lane for p in range(0, self.parts, WARP)]
            insides = [True if p + WARP <= self.parts else p + lane < self.parts for p in range(0, self.parts, WARP)]
        found = []
        for place, inside in zip(places, insides):
            if const_expr(inside is True):
                found.append([sSum[i, place, row, stage] for i in range(self.values)])
            else:
                safe = cutlass.select_(inside, place, Int32(0))
                empty = [-Float32.inf] + [Float32(0.0)] * (self.values - 1)
                found.append(
                    [cutlass.select_(inside, sSum[i, safe, row, stage], empty[i]) for i in range(self.values)]
                )  # fmt: skip
        top = found[0][0]
        for values in found[1:]:
            top = cute.arch.fmax(top, values[0])
        sums = [Float32(0.0) for _ in range(self.values - 1)]
        for values in found:
            _, *parts = moved(values, top)
            sums = [total + part for total, part in zip(sums, parts)]
        combined = (top, *sums)
        return combined if const_expr(self.parts <= 8) else self._reduce(combined, WARP)


class LogSum:
    """The pair (M, S) of a row, as a reduction for :class:`cute_ops.kernels.rowwise.one_pass.OnePassRows`.

    Args:
        plain: whether P and C are wanted too, the sum of ``x - M`` and the number of elements.
    """

    empty = -math.inf

    def __init__(self, plain=False):
        self.plain = plain
        self.values = 4 if plain else 2

    def across(self, tile, stages):
        return RowLogSum(tile, self.values, stages)

    def start(self):
        return (Float32(-Float32.inf), *[Float32(0.0)] * (self.values - 1))

    def add(self, state, get, inside):
        """One more vector: ``get()`` reads it, ``inside`` says what of it is inside the row."""
        (x,) = get()
        top = cute.arch.fmax(state[0], x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        return self._with(moved(state, top), x, inside)

    def gather(self, gets, insides):
        """All vectors at once: a maximum first, which spares the corrections."""
        top = -Float32.inf
        for get in gets:
            top = cute.arch.fmax(top, get()[0].reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        state = (top, *self.start()[1:])
        for get, inside in zip(gets, insides):
            state = self._with(state, get()[0], inside)
        return state

    def _with(self, state, x, inside):
        """The state with a vector whose elements its maximum counts already."""
        top, s, *plain = state
        base = origin(top)
        s = s + exponentials(x, base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        if not self.plain:
            return (top, s)
        p, count = plain
        p = p + inside.only(x - base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return (top, s, p, count + inside.count())
