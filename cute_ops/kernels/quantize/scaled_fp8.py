"""Rows divided by a given scale, in fp8: see :mod:`cute_ops.ops.quantize.scaled_fp8`."""

from functools import partial

from cute_ops.kernels.lib.copy import gmem_elements
from cute_ops.kernels.lib.fp8 import to_fp8
from cute_ops.kernels.rowwise.function import RowFunction
from cute_ops.kernels.rowwise.kernel import RowKernel


class Scaled(RowFunction):
    """An element divided by the scale of all, by its reciprocal."""

    inputs, outputs, numbers = ("x",), ("out",), ("scale",)

    def __init__(self, variant):
        self.kind = "e5m2" if variant.attrs["out_dtype"] == "float8_e5m2" else "e4m3"

    def begin(self, variant, numbers, row, valid):
        (mScale,) = numbers
        return 1.0 / gmem_elements(mScale.element_type, mScale.iterator.toint(), 1)[0], valid

    def emit(self, values, results, context, columns):
        return (values[0] * context,)

    def rounded(self, x, dtype, vec):
        return to_fp8(x, vec, self.kind)


ScaledFP8 = partial(RowKernel, Scaled)
