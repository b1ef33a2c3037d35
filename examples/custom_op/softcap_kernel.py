"""HOW: the device code of softcap and of its gradient."""

import math

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr


class SoftCap:
    """``out = cap * tanh(x / cap)``. A thread holds ``vec`` neighbours of a row, as many as alignment allows."""

    def __init__(self, variant):
        self.cap = variant.attrs["cap"]
        aligned = [min(t.align, t.row_align) // t.itemsize for t in variant.args]
        self.vec = math.gcd(*aligned, variant.dims["n"] or 1)  # n is None in the one variant with a dynamic n

    @cute.jit
    def __call__(self, mX, mOut, stream):
        self.launch(mX, None, mOut, stream)

    @cute.jit
    def launch(self, mX, mDout, mOut, stream):
        gX, gDout, gOut = [None if m is None else self.vectors(m) for m in (mX, mDout, mOut)]
        blocks = cute.ceil_div(cute.size(gX, mode=[1]), 128)
        self.kernel(gX, gDout, gOut).launch(grid=[blocks, 1, 1], block=[128, 1, 1], stream=stream)

    def vectors(self, mX):
        """((vec), (n / vec, ..., m)): CuTe counts the first mode fastest, so the last dim comes first."""
        modes = list(reversed(range(len(mX.shape))))
        last_first = cute.make_tensor(mX.iterator, cute.select(mX.layout, modes))
        return cute.zipped_divide(last_first, (self.vec,) + (1,) * (len(modes) - 1))

    @cute.kernel
    def kernel(self, gX, gDout, gOut):
        i = Int64(cute.arch.block_idx()[0]) * 128 + cute.arch.thread_idx()[0]
        if i < cute.size(gX, mode=[1]):
            t = cute.math.tanh(gX[(None, i)].load().to(Float32) / self.cap)
            y = t * self.cap
            if const_expr(gDout is not None):
                y = gDout[(None, i)].load().to(Float32) * (1 - t * t)
            gOut[(None, i)].store(y.to(gOut.element_type))


class SoftCapBackward(SoftCap):
    @cute.jit
    def __call__(self, mX, mDout, mDx, stream):
        self.launch(mX, mDout, mDx, stream)
