"""The products of a linear layer and of its gradients."""

from functools import partial

import cutlass.cute as cute

from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.kernels.gemm.sm80 import GemmSm80
from cute_ops.kernels.gemm.sm90 import GemmSm90
from cute_ops.kernels.gemm.views import by_column, by_row


def unchanged(values):
    return values


class Product:
    """The product of two tensors, with or without TMA.

    Args:
        views: how the two become matrices whose rows are multiplied with each other.
        epilogue: ``epilogue(values)``: what is stored, from the float32 sums of a thread's part of a tile.
    """

    def __init__(self, variant, views, epilogue=unchanged):
        self.keys, self.views = variant.args, views
        form = GemmSm80 if GemmConfig.of(variant.config).form == "mma_sync" else GemmSm90
        self.form = form(variant, epilogue)

    @cute.jit
    def __call__(self, mFirst, mSecond, mOut, stream):
        first, second = (view(m, key) for view, m, key in zip(self.views, (mFirst, mSecond), self.keys))
        self.form.launch(first, second, by_row(mOut, self.keys[-1]), stream)


# out[m, n] = x[m, k] @ weight[n, k].T
Linear = partial(Product, views=(by_row, by_row))
# dx[m, k] = dout[m, n] @ weight[n, k]
LinearDx = partial(Product, views=(by_row, by_column))
# dweight[n, k] = dout[m, n].T @ x[m, k]
LinearDweight = partial(Product, views=(by_column, by_column))
