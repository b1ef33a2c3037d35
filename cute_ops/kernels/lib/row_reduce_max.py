"""Largest number over the threads of a row, exchanged as :mod:`cute_ops.kernels.lib.row_reduce` exchanges sums."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.row_reduce import RowSum


def lanes_max(value, lanes):
    """Largest non-negative number of a group of lanes: such numbers are ordered as their bits are as integers."""
    if lanes == WARP:
        return cute.arch.warp_redux_sync(value.bitcast(Int32), "max").bitcast(Float32)
    return cute.arch.warp_reduction(value, cute.arch.fmax, threads_in_group=lanes)


class RowMax(RowSum):
    """The largest of one fp32 number per thread that is not negative, over the threads of each row of a tile; with more
    ``values`` also the sums of others, which come before it, in the same exchange.

    Shared memory: as :class:`RowSum`.
    """

    def __init__(self, tile, stages, values=1):
        super().__init__(tile, values, stages)
        self.halved = False

    def warp_sums(self, values):
        *others, largest = values
        return (*map(self.warp_sum, others), lanes_max(largest, min(self.tile.threads_per_row, WARP)))

    @cute.jit
    def _combine(self, sMax, stage, lane, row):
        found = [Float32(0.0) for _ in range(self.values)]
        if const_expr(self.partials <= 8):
            for p in cutlass.range_constexpr(self.partials):
                found = self._with(found, [sMax[i, p, row, stage] for i in range(self.values)])
            return tuple(found)
        for p in cutlass.range_constexpr(0, self.partials, WARP):
            # Lanes past the last number repeat it, which does not change the maximum.
            place = cutlass.min(p + lane, self.partials - 1)
            *others, largest = (sMax[i, place, row, stage] for i in range(self.values))
            others = [cutlass.select_(p + lane < self.partials, x, Float32(0.0)) for x in others]
            found = self._with(found, [*others, largest])
        *totals, largest = found
        return (*(cute.arch.warp_reduction(x, operator.add) for x in totals), lanes_max(largest, WARP))

    def _with(self, found, values):
        """Sums and the largest number, with one more of each."""
        *totals, largest = found
        *others, x = values
        return [*(a + b for a, b in zip(totals, others)), cute.arch.fmax(largest, x)]
