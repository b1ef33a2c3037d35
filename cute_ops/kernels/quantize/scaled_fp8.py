"""Rows divided by a given scale, in fp8: see :mod:`cute_ops.ops.quantize.scaled_fp8`."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import gmem_elements
from cute_ops.kernels.lib.fp8 import to_fp8
from cute_ops.kernels.rowwise.config import MapConfig
from cute_ops.kernels.rowwise.function import RowFunction
from cute_ops.kernels.rowwise.kernel import RowKernel
from cute_ops.kernels.rowwise.pointwise import Piece, Pointwise


class Launch(NamedTuple):
    """Vectors of a thread, and threads of a CTA."""

    threads: int
    unroll: int = 2


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


class ScaledElements(Pointwise):
    """:class:`Scaled` of compact tensors as one long row: of rows that do not start on vectors most would be masked."""

    def __init__(self, variant):
        inputs = (Piece("x"), Piece("scale", rows=False, columns=False))
        config = MapConfig.of(variant.config)
        self.kind = Scaled(variant).kind
        super().__init__(
            variant, inputs, (Piece("out"),), lambda x, scale: (x * (1.0 / scale),), Launch(config.threads)
        )

    def rounded(self, x, dtype):
        # A tiled copy takes elements of the output's dtype, not their bytes.
        return cute.recast_tensor(to_fp8(x, self.vec, self.kind), dtype)


class ScaledFP8:
    """Rows divided by a given scale."""

    def __init__(self, variant):
        keys = [variant.tensors[name] for name in ("x", "out")]
        compact = all(key.layout == "flat" and key.align >= VECTOR_BYTES for key in keys)
        self.elements = compact and MapConfig.of(variant.config).form == "flat"
        self.form = ScaledElements(variant) if self.elements else RowKernel(Scaled, variant)

    @cute.jit
    def __call__(self, mX, mScale, mOut, stream):
        if const_expr(self.elements):
            self.form((mX, mScale), (mOut,), stream)
        else:
            self.form(mX, mScale, mOut, stream)
