"""Second stage of the weight gradients: the sum of the workspace's rows, in a fixed order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

LANES = 32


class ColumnSum:
    """``out[c] = sum_p parts[p, c]``, fp32, rounded once to out's dtype.

    Tile: a CTA takes 32 columns; ``threads / 32`` threads share a column, each adds every so many rows, and the first
    warp adds what they found.
    Shared memory: 4 bytes per thread. Bytes moved: the workspace once, mostly from L2.
    """

    def __init__(self, n, arch):
        self.n = n
        # Many columns bring parallelism of their own.
        self.depth = 32 if n is None or n <= 4096 else 16 if n <= 16384 else 8
        # Starts while the first stage drains and waits for its writes: Hopper and later.
        self.chained = int(arch.removeprefix("sm_").rstrip("af")) >= 90

    @cute.jit
    def __call__(self, parts, outputs, stream):
        mParts = parts[0] if const_expr(parts[0] is not None) else parts[1]
        self.kernel(parts, outputs).launch(
            grid=[cute.ceil_div(Int32(mParts.shape[1]), LANES), 1, 1],
            block=[LANES, self.depth, 1],
            stream=stream,
            use_pdl=self.chained,
        )

    @cute.kernel
    def kernel(self, parts, outputs):
        lane, level, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        sSum = smem.allocate_tensor(Float32, cute.make_layout((LANES, self.depth)), byte_alignment=16)
        column = bidx * LANES + lane
        if const_expr(self.chained):
            cute.arch.griddepcontrol_wait()
        for mParts, mOut in zip(parts, outputs):
            if const_expr(mParts is not None):
                self._sum(mParts, mOut, sSum, column, lane, level)

    @cute.jit
    def _sum(self, mParts, mOut, sSum, column, lane, level):
        n = Int32(mParts.shape[1])
        total = Float32(0.0)
        if column < n:
            for p in cutlass.range(level, Int32(mParts.shape[0]), self.depth, unroll=4):
                total = total + mParts[p, column]
        sSum[lane, level] = total
        cute.arch.barrier()
        if level == 0 and column < n:
            total = Float32(0.0)
            for d in cutlass.range_constexpr(self.depth):
                total = total + sSum[lane, d]
            mOut[column] = total.to(mOut.element_type)
        cute.arch.barrier()
