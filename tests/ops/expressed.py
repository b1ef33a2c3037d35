"""A kernel that computes an expression of a tile, a row vector, a column vector, and a packed or another tile."""

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.kernels.emit.emitter import Emitter


class Expressed:
    """One thread block a row; ``out`` is the first output."""

    def __init__(self, variant):
        self.n = variant.dims["n"]
        self.emit = Emitter(variant.attrs["expression"])

    @cute.kernel
    def kernel(self, mX, mBias, mScale, mPacked, mOut):
        tidx, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for i in range(tidx, self.n, 32):
            halves = (mPacked[row, i].to(Float32), mPacked[row, self.n + i].to(Float32))
            last = halves if self.emit.expression.operands[3].packed else halves[0]
            given = (mX[row, i].to(Float32), mBias[i].to(Float32), mScale[row].to(Float32), last)
            mOut[row, i] = self.emit(*given)[0].to(mOut.element_type)

    @cute.jit
    def __call__(self, mX, mBias, mScale, mPacked, mOut, stream):
        self.kernel(mX, mBias, mScale, mPacked, mOut).launch(grid=[mX.shape[0], 1, 1], block=[32, 1, 1], stream=stream)
