"""Functions of the vectors of a row that compute what is quantised."""

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.kernels.lib.activation import silu
from cute_ops.kernels.lib.column_params import scale
from cute_ops.kernels.lib.copy import fragment


class Plain:
    """``y = x``."""

    names = ("x",)
    normed, costly, eps = False, False, 0.0

    def __init__(self, variant):
        pass

    def __call__(self, x, rstd, rWeight, rBias):
        return x


class Gated(Plain):
    """``y = silu(gate) * up``."""

    names = ("gate", "up")
    costly = True

    def __call__(self, gate, up, rstd, rWeight, rBias):
        rY = fragment(Float32, cute.size(gate.shape))
        for j in range(cute.size(rY)):
            rY[j] = silu(gate[j])[0] * up[j]
        return rY.load()


class Normed:
    """``y = h * rstd * (weight_offset + weight) + bias``."""

    names = ("x", "residual")
    normed, costly = True, False

    def __init__(self, variant):
        self.eps = variant.attrs["eps"]
        self.weight_offset = variant.attrs["weight_offset"]

    def __call__(self, h, rstd, rWeight, rBias):
        y = h * rstd
        if rWeight is not None:
            y = y * scale(rWeight, self.weight_offset)
        return y if rBias is None else y + rBias.load().to(Float32)
