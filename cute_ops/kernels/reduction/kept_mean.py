"""The mean of losses over what is not ignored: see :mod:`cute_ops.ops.reduction.kept_mean` for the maths."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import extent

THREADS, BATCH = 1024, 4


class KeptMean:
    """``out = sum(loss) * factor / sum(target != ignore_index)``.

    Tile: one CTA of 1024 threads, of which each has every 1024th element, four in flight. That suffices: the losses of
    16384 rows are 64 KB. Targets are counted as integers.
    Shared memory: 256 bytes. Bytes moved per element: target once, loss once.
    """

    def __init__(self, variant):
        self.ignored = variant.attrs["ignore_index"]
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mTarget, mLoss, mFactor, mOut, stream):
        self.kernel(mTarget, mLoss, mFactor, mOut).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mTarget, mLoss, mFactor, mOut):
        tidx = cute.arch.thread_idx()[0]
        smem = cutlass.utils.SmemAllocator()
        sCount = smem.allocate_tensor(Int32, cute.make_layout(WARP), byte_alignment=16)
        sTotal = smem.allocate_tensor(Float32, cute.make_layout(WARP), byte_alignment=16)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        n, count, total = extent(mTarget, 0), Int32(0), Float32(0.0)
        for first in cutlass.range(Int64(tidx), n, THREADS * BATCH, unroll=1):
            # Past the end the last element is loaded again, which is not counted.
            rTarget, rLoss = fragment(mTarget.element_type, BATCH), fragment(Float32, BATCH, 0.0)
            for i in cutlass.range_constexpr(BATCH):
                place = cutlass.min(first + i * THREADS, n - 1)
                rTarget[i] = _at(mTarget, place)
                if const_expr(mLoss is not None):
                    rLoss[i] = _at(mLoss, place)
            for i in cutlass.range_constexpr(BATCH):
                inside = first + i * THREADS < n
                kept = inside & (Int64(rTarget[i]) != Int64(self.ignored))
                count = count + cutlass.select_(kept, Int32(1), Int32(0))
                total = total + cutlass.select_(inside, rLoss[i], Float32(0.0))
        lane, warp = tidx % WARP, tidx // WARP
        count, total = _over_lanes(count), _over_lanes(total)
        if lane == 0:
            sCount[warp], sTotal[warp] = count, total
        cute.arch.barrier()
        if warp == 0:
            count, total = _over_lanes(sCount[lane]), _over_lanes(sTotal[lane])
            if lane == 0:
                whole = Float32(1.0) if const_expr(mLoss is None) else total
                if const_expr(mFactor is not None):
                    whole = whole * gmem_elements(Float32, mFactor.iterator.toint(), 1)[0]
                gOut = gmem_elements(Float32, mOut.iterator.toint(), 1)
                gOut[0] = whole / Float32(count)


def _at(mX, place):
    """An element of a vector, by its place in 64 bits."""
    return gmem_elements(mX.element_type, mX.iterator.toint() + place * (mX.element_type.width // 8), 1)[0]


def _over_lanes(value):
    return cute.arch.warp_reduction(value, operator.add)
