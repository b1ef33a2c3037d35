"""SiLU-gated product kernels."""

from cute_ops.kernels.activation.gated import Gated, GatedBackward
from cute_ops.kernels.lib.activation import silu


class SiluMul(Gated):
    def __init__(self, variant):
        super().__init__(variant, silu)


class SiluMulBackward(GatedBackward):
    def __init__(self, variant):
        super().__init__(variant, silu)
