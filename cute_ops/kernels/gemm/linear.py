"""The products of a linear layer and of its gradients."""

import cutlass.cute as cute

from cute_ops.kernels.gemm.sm90 import GemmSm90, by_column, by_row


class Linear(GemmSm90):
    """``out[m, n] = x[m, k] @ weight[n, k].T``."""

    @cute.jit
    def __call__(self, mX, mWeight, mOut, stream):
        x, weight, out = self.keys
        self.launch(by_row(mX, x), by_row(mWeight, weight), by_row(mOut, out), stream)


class LinearDx(GemmSm90):
    """``dx[m, k] = dout[m, n] @ weight[n, k]``: neighbours of weight in memory lie across the sum."""

    @cute.jit
    def __call__(self, mDout, mWeight, mDx, stream):
        dout, weight, dx = self.keys
        self.launch(by_row(mDout, dout), by_column(mWeight, weight), by_row(mDx, dx), stream)


class LinearDweight(GemmSm90):
    """``dweight[n, k] = dout[m, n].T @ x[m, k]``: neighbours of both operands in memory lie across the sum."""

    @cute.jit
    def __call__(self, mDout, mX, mDweight, stream):
        dout, x, dweight = self.keys
        self.launch(by_column(mDout, dout), by_column(mX, x), by_row(mDweight, dweight), stream)
