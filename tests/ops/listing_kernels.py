"""The kernels of ``listing.py``: one thread block a row. The tensors of a list are arguments one after another."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


class AddN:
    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, xs, mOut):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for start in cutlass.range_constexpr(0, self.n, 32):
            i = start + thread
            if i < self.n:
                total = xs[0][row, i].to(Float32)
                for mX in xs[1:]:
                    total = total + mX[row, i].to(Float32)
                mOut[row, i] = total.to(mOut.element_type)

    @cute.jit
    def __call__(self, *arguments):
        xs, mOut, stream = arguments[:-2], arguments[-2], arguments[-1]
        self.kernel(xs, mOut).launch(grid=[mOut.shape[0], 1, 1], block=[32, 1, 1], stream=stream)


class AddNBwd:
    def __init__(self, variant):
        self.n = variant.dims["n"]
        self.count = len(variant.names) // 2

    @cute.kernel
    def kernel(self, mDout, dxs):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for start in cutlass.range_constexpr(0, self.n, 32):
            i = start + thread
            if i < self.n:
                for mDx in dxs:
                    mDx[row, i] = mDout[row, i]

    @cute.jit
    def __call__(self, *arguments):
        mDout, dxs, stream = arguments[self.count], arguments[self.count + 1 : -1], arguments[-1]
        self.kernel(mDout, dxs).launch(grid=[mDout.shape[0], 1, 1], block=[32, 1, 1], stream=stream)


class ScaleAll:
    """A launch for each tensor, since each has rows of its own."""

    def __init__(self, variant):
        self.n, self.alpha = variant.dims["n"], variant.attrs["alpha"]
        self.count = len(variant.names) // 2

    @cute.kernel
    def kernel(self, mX, mFactors, mY, place):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        factor = mFactors[place] * self.alpha
        for start in cutlass.range_constexpr(0, self.n, 32):
            i = start + thread
            if i < self.n:
                mY[row, i] = (factor * mX[row, i].to(Float32)).to(mY.element_type)

    @cute.jit
    def __call__(self, *arguments):
        xs, mFactors, ys = arguments[: self.count], arguments[self.count], arguments[self.count + 1 : -1]
        for place in cutlass.range_constexpr(self.count):
            self.kernel(xs[place], mFactors, ys[place], place).launch(
                grid=[xs[place].shape[0], 1, 1], block=[32, 1, 1], stream=arguments[-1]
            )


class Concatenate:
    def __init__(self, variant):
        self.n = variant.dims["n"]

    @cute.kernel
    def kernel(self, mFrom, mTo, first_from, first_to):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for start in cutlass.range_constexpr(0, self.n, 32):
            i = start + thread
            if i < self.n:
                mTo[first_to + row, i] = mFrom[first_from + row, i]

    @cute.jit
    def __call__(self, *arguments):
        xs, mOut, stream = arguments[:-2], arguments[-2], arguments[-1]
        start = 0
        for mX in xs:
            self.kernel(mX, mOut, 0, start).launch(grid=[mX.shape[0], 1, 1], block=[32, 1, 1], stream=stream)
            start = start + mX.shape[0]


class Split(Concatenate):
    def __init__(self, variant):
        super().__init__(variant)
        self.count = len(variant.names) // 2

    @cute.jit
    def __call__(self, *arguments):
        mDout, dxs, stream = arguments[self.count], arguments[self.count + 1 : -1], arguments[-1]
        start = 0
        for mDx in dxs:
            self.kernel(mDout, mDx, start, 0).launch(grid=[mDx.shape[0], 1, 1], block=[32, 1, 1], stream=stream)
            start = start + mDx.shape[0]
