"""Means of rows over what is not ignored: see :mod:`cute_ops.ops.reduction.kept_mean` for the maths."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import store_number
from cute_ops.kernels.lib.row_layout import MAX_GRID, extent, row_address, row_count

THREADS, BATCH = 1024, 4


class KeptMean:
    """``out = sum(loss) / sum(target != ignore_index)`` of each row.

    Tile: a CTA of 1024 threads takes a row; a thread has every 1024th element, four in flight. One CTA suffices: the
    losses of 16384 rows are 64 KB. Targets are counted as integers.
    Shared memory: 256 bytes. Bytes moved per element: target once, loss once.
    """

    def __init__(self, variant):
        self.keys, self.ignored = variant.tensors, variant.attrs["ignore_index"]
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mTarget, mLoss, mOut, stream):
        self.kernel(mTarget, mLoss, mOut).launch(
            grid=[Int32(cutlass.min(row_count(mTarget), Int64(MAX_GRID))), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mTarget, mLoss, mOut):
        bidx, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        smem = cutlass.utils.SmemAllocator()
        sCount = smem.allocate_tensor(Int32, cute.make_layout(WARP), byte_alignment=16)
        sTotal = smem.allocate_tensor(Float32, cute.make_layout(WARP), byte_alignment=16)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        steps = Int32((row_count(mTarget) - bidx + (grid - 1)) // Int64(grid))
        for step in cutlass.range(steps, unroll=1):
            row = Int64(bidx) + Int64(step) * Int64(grid)
            self._row(mTarget, mLoss, mOut, row, sCount, sTotal)

    @cute.jit
    def _row(self, mTarget, mLoss, mOut, row: Int64, sCount, sTotal):
        tidx = cute.arch.thread_idx()[0]
        n = extent(mTarget, len(mTarget.shape) - 1)
        targets = row_address(mTarget, self.keys["target"], row, n)
        losses = targets if const_expr(mLoss is None) else row_address(mLoss, self.keys["loss"], row, n)
        count, total = Int32(0), Float32(0.0)
        for first in cutlass.range(Int64(tidx), n, THREADS * BATCH, unroll=1):
            # Past the end the last element is loaded again, which is not counted.
            rTarget, rLoss = fragment(mTarget.element_type, BATCH), fragment(Float32, BATCH, 0.0)
            for i in cutlass.range_constexpr(BATCH):
                place = cutlass.min(first + i * THREADS, n - 1)
                rTarget[i] = self._at(mTarget.element_type, targets, place)
                if const_expr(mLoss is not None):
                    rLoss[i] = self._at(Float32, losses, place)
            for i in cutlass.range_constexpr(BATCH):
                inside = first + i * THREADS < n
                kept = inside & (Int64(rTarget[i]) != Int64(self.ignored))
                count = count + cutlass.select_(kept, Int32(1), Int32(0))
                total = total + cutlass.select_(inside, rLoss[i], Float32(0.0))
        lane, warp = tidx % WARP, tidx // WARP
        count, total = self._over_lanes(count), self._over_lanes(total)
        cute.arch.barrier()  # of the row before all sums are read
        if lane == 0:
            sCount[warp], sTotal[warp] = count, total
        cute.arch.barrier()
        if warp == 0:
            count, total = self._over_lanes(sCount[lane]), self._over_lanes(sTotal[lane])
            if lane == 0:
                whole = Float32(1.0) if const_expr(mLoss is None) else total
                store_number(whole / Float32(count), mOut, self.keys["out"], row)

    def _at(self, dtype, address, place):
        return gmem_elements(dtype, address + place * (dtype.width // 8), 1)[0]

    def _over_lanes(self, value):
        return cute.arch.warp_reduction(value, operator.add)
