"""Sums of exponentials that never overflow: a maximum, and a sum relative to it.

``lse = log(sum(exp(x))) = M + log(S)`` with ``M = max(x)`` and ``S = sum(exp(x - M))``. Two pairs of a maximum and a
sum combine into one, so that every thread finds its own and one exchange combines them all. Where the maximum is
-inf, sums are relative to 0: an empty part counts nothing, a row of nothing but -inf has S = 0.
"""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.kernels._reduce import WARP, RowSum

LOG2_E = math.log2(math.e)


def origin(m):
    """What a sum beside the maximum ``m`` is relative to."""
    return cutlass.select_(m > -Float32.inf, m, Float32(0.0))


def exponentials(x, m):
    """``exp(x - m)``; the difference first, which is exact where it matters."""
    return cute.math.exp2((x - m) * LOG2_E, fastmath=True)


class RowLogSum(RowSum):
    """As :class:`RowSum`; of the values the first is a maximum, the second a sum relative to it, others plain sums."""

    def __init__(self, tile, values, stages):
        super().__init__(tile, values, stages)
        self.halved = False

    def warp_sums(self, values):
        return self._reduce(values, min(self.tile.threads_per_row, WARP))

    def _reduce(self, values, group):
        """Across the lanes of a group."""
        m, s, *others = values
        top = cute.arch.warp_reduction(m, cute.arch.fmax, threads_in_group=group)
        s = s * exponentials(m, origin(top))
        return (
            top, *(cute.arch.warp_reduction(v, operator.add, threads_in_group=group) for v in (s, *others))
        )  # fmt: skip

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
            values[1] = values[1] * exponentials(values[0], origin(top))
            for i in range(self.values - 1):
                sums[i] = sums[i] + values[i + 1]
        combined = (top, *sums)
        return combined if const_expr(self.parts <= 8) else self._reduce(combined, WARP)


class LogSum:
    """The pair (M, S) of a row, as a reduction for :class:`cute_ops.kernels._held.HeldRows`.

    Args:
        plain: whether the plain sum of the row is wanted too.
    """

    empty = -math.inf

    def __init__(self, plain=False):
        self.plain = plain
        self.values = 3 if plain else 2

    def across(self, tile, stages):
        return RowLogSum(tile, self.values, stages)

    def start(self):
        return (-Float32.inf, *[Float32(0.0)] * (self.values - 1))

    def add(self, state, get, inside):
        """One more vector: ``get()`` reads it, ``inside()`` reads it with zeros outside the row."""
        m, s, *plain = state
        (x,) = get()
        top = cute.arch.fmax(m, x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        base = origin(top)
        s = s * exponentials(m, base) + exponentials(x, base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return (top, s, *(p + inside()[0].reduce(cute.ReductionOp.ADD, Float32(0.0), 0) for p in plain))

    def gather(self, gets, insides):
        """All vectors at once: a maximum first, which spares the corrections."""
        top = -Float32.inf
        for get in gets:
            top = cute.arch.fmax(top, get()[0].reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        base = origin(top)
        s, plain = Float32(0.0), Float32(0.0)
        for get, inside in zip(gets, insides):
            s = s + exponentials(get()[0], base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            if self.plain:
                plain = plain + inside()[0].reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return (top, s, plain)[: self.values]
