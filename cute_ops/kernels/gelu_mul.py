"""GELU-gated product kernels."""

from cute_ops.kernels._activations import GELU
from cute_ops.kernels._gated import Gated, GatedBackward


class GeluMul(Gated):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])


class GeluMulBackward(GatedBackward):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])
