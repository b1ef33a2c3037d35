"""GELU-gated product kernels."""

from cute_ops.kernels.activation.gated import Gated, GatedBackward
from cute_ops.kernels.lib.activation import GELU


class GeluMul(Gated):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])


class GeluMulBackward(GatedBackward):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])
