"""The kernels of ``writing.py``: one thread block a row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


class Store:
    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, mCache, mRows, mIndex):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        place = mIndex[row]
        if place >= 0 and place < mCache.shape[0]:
            for i in range(thread, self.n, 32):
                mCache[place, i] = mRows[row, i]

    @cute.jit
    def __call__(self, mCache, mRows, mIndex, stream):
        self.kernel(mCache, mRows, mIndex).launch(grid=[mRows.shape[0], 1, 1], block=[32, 1, 1], stream=stream)


class Follow:
    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, mState, mX, mGain, mOut, keep):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        gain = mGain[0]
        for i in range(thread, self.n, 32):
            kept = keep * mState[row, i].to(Float32)
            mOut[row, i] = kept.to(mOut.element_type)
            mState[row, i] = (kept + gain * mX[row, i].to(Float32)).to(mState.element_type)

    @cute.jit
    def __call__(self, mState, mX, mGain, mOut, keep, stream):
        self.kernel(mState, mX, mGain, mOut, keep).launch(grid=[mX.shape[0], 1, 1], block=[32, 1, 1], stream=stream)


class Axpy:
    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, mX, mY, mOut, alpha, first):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for i in range(thread, self.n, 32):
            factor = cutlass.select_(i >= first, alpha, Float32(0.0))
            mOut[row, i] = (factor * mX[row, i].to(Float32) + mY[row, i].to(Float32)).to(mOut.element_type)

    @cute.jit
    def __call__(self, mX, mY, mOut, alpha, first, stream):
        self.kernel(mX, mY, mOut, alpha, first).launch(grid=[mX.shape[0], 1, 1], block=[32, 1, 1], stream=stream)


class AxpyBwd:
    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, mDout, mDx, mDy, alpha, first):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for i in range(thread, self.n, 32):
            factor = cutlass.select_(i >= first, alpha, Float32(0.0))
            mDx[row, i] = (factor * mDout[row, i].to(Float32)).to(mDx.element_type)
            mDy[row, i] = mDout[row, i]

    @cute.jit
    def __call__(self, mDout, mDx, mDy, alpha, first, stream):
        self.kernel(mDout, mDx, mDy, alpha, first).launch(grid=[mDout.shape[0], 1, 1], block=[32, 1, 1], stream=stream)
