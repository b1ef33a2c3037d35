"""Gated products of packed rows."""

from cute_ops.kernels.activation.gated import Packed, PackedAgain, PackedBackward
from cute_ops.kernels.lib.activation import GELU, silu


class SwiGLU(Packed):
    def __init__(self, variant):
        super().__init__(variant, silu)


class SwiGLUBackward(PackedBackward):
    def __init__(self, variant):
        super().__init__(variant, silu)


class SwiGLUAgain(PackedAgain):
    def __init__(self, variant):
        super().__init__(variant, silu)


class GEGLU(Packed):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])


class GEGLUBackward(PackedBackward):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])
