"""SiLU-gated product kernels."""

from cute_ops.kernels._activations import silu
from cute_ops.kernels._gated import Gated, GatedBackward


class SiluMul(Gated):
    def __init__(self, variant):
        super().__init__(variant, silu)


class SiluMulBackward(GatedBackward):
    def __init__(self, variant):
        super().__init__(variant, silu)
