"""A product with an epilogue."""

from functools import partial

import cutlass.cute as cute

from cute_ops.kernels.gemm.linear import Product
from cute_ops.kernels.gemm.views import by_row


def relu(values):
    return cute.where(values > 0.0, values, cute.full_like(values, 0.0))


LinearRelu = partial(Product, views=(by_row, by_row), epilogue=relu)
