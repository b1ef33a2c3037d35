"""Largest number over the threads of a row, exchanged as :mod:`cute_ops.kernels.lib.row_reduce` exchanges sums."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.kernels.lib.row_reduce import WARP, RowSum


def lanes_max(value, lanes):
    """Largest non-negative number of a group of lanes: such numbers are ordered as their bits are as integers."""
    if lanes == WARP:
        return cute.arch.warp_redux_sync(value.bitcast(Int32), "max").bitcast(Float32)
    return cute.arch.warp_reduction(value, cute.arch.fmax, threads_in_group=lanes)


class _Beside(RowSum):
    """A second exchange over a row, beside another :class:`RowSum`."""

    @cute.jit
    def start(self, mbar):
        """Initialise the mbarriers; the other :class:`RowSum` waits for the cluster."""
        if const_expr(self.tile.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(mbar + stage, 1)


class RowMax(_Beside):
    """The largest of one non-negative fp32 number per thread, over the threads of each row of a tile.

    Shared memory: as :class:`RowSum`.
    """

    def __init__(self, tile, stages):
        super().__init__(tile, values=1, stages=stages)

    @cute.jit
    def arrive(self, values: cutlass.Constexpr, sMax, mbar, step: Int32):
        values = (lanes_max(values[0], min(self.tile.threads_per_row, WARP)),)
        if const_expr(not self.alone):
            tidx = cute.arch.thread_idx()[0]
            warp = tidx // WARP
            self._share(values, sMax, mbar, self._stage(step), tidx % WARP, warp // self.warps, warp % self.warps)
        return values

    @cute.jit
    def _combine(self, sMax, stage, lane, row):
        found = Float32(0.0)
        if const_expr(self.partials <= 8):
            for p in cutlass.range_constexpr(self.partials):
                found = cute.arch.fmax(found, sMax[0, p, row, stage])
            return (found,)
        for p in cutlass.range_constexpr(0, self.partials, WARP):
            # Lanes past the last number repeat it.
            place = cutlass.min(p + lane, self.partials - 1)
            found = cute.arch.fmax(found, sMax[0, place, row, stage])
        return (lanes_max(found, WARP),)


class SumAndMax(_Beside):
    """The sum of one fp32 number per thread, and the largest of another that is not negative, in one exchange.

    Shared memory: as :class:`RowSum`, of two values.
    """

    def __init__(self, tile, stages):
        super().__init__(tile, values=2, stages=stages)
        self.halved = False

    def warp_sums(self, values):
        total, largest = values
        return self.warp_sum(total), lanes_max(largest, min(self.tile.threads_per_row, WARP))

    @cute.jit
    def _combine(self, sSum, stage, lane, row):
        total, largest = Float32(0.0), Float32(0.0)
        if const_expr(self.partials <= 8):
            for p in cutlass.range_constexpr(self.partials):
                total = total + sSum[0, p, row, stage]
                largest = cute.arch.fmax(largest, sSum[1, p, row, stage])
            return total, largest
        for p in cutlass.range_constexpr(0, self.partials, WARP):
            # Lanes past the last pair repeat it, which does not change the maximum.
            place = cutlass.min(p + lane, self.partials - 1)
            total = total + cutlass.select_(p + lane < self.partials, sSum[0, place, row, stage], Float32(0.0))
            largest = cute.arch.fmax(largest, sSum[1, place, row, stage])
        return cute.arch.warp_reduction(total, operator.add), lanes_max(largest, WARP)
