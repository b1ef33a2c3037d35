"""HOW: what unit_norm and its gradient compute of a row."""

from functools import partial

import cutlass.cute as cute

from cute_ops.kernels.lib.row_copy import number_or, store_number
from cute_ops.kernels.rowwise.function import RowFunction, Sum
from cute_ops.kernels.rowwise.kernel import RowKernel


class Unit(RowFunction):
    """``scale = rsqrt(sum(x^2) + eps)``, ``out = x * scale``."""

    inputs, outputs, numbers = ("x",), ("out",), ("scale",)
    reduction = Sum(lambda x: x * x)

    def __init__(self, variant):
        self.eps = variant.attrs["eps"]

    def emit(self, values, results, context, columns):
        return (values[0] * cute.math.rsqrt(results[0] + self.eps),)

    def postprocess(self, variant, numbers, rows, results, context, row):
        store_number(cute.math.rsqrt(results[0] + self.eps), numbers[0], variant.tensors["scale"], row)


class UnitGradient(RowFunction):
    """``dx = scale * (dout - out * sum(out * dout))``."""

    inputs, outputs, numbers = ("out", "dout"), ("dx",), ("scale",)
    reduction = Sum(lambda out, dout: out * dout)

    def begin(self, variant, numbers, row, valid):
        return number_or(numbers[0], variant.tensors["scale"], row, valid, 0), valid

    def emit(self, values, results, context, columns):
        out, dout = values
        return (context * (dout - out * results[0]),)


UnitNorm, UnitNormBackward = partial(RowKernel, Unit), partial(RowKernel, UnitGradient)
