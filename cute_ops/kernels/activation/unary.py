"""Kernels of activations alone."""

from cute_ops.kernels.activation.gated import Alone, AloneBackward
from cute_ops.kernels.lib.activation import GELU, relu2, silu


class Silu(Alone):
    def __init__(self, variant):
        super().__init__(variant, silu)


class SiluBackward(AloneBackward):
    def __init__(self, variant):
        super().__init__(variant, silu)


class Gelu(Alone):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])


class GeluBackward(AloneBackward):
    def __init__(self, variant):
        super().__init__(variant, GELU[variant.attrs["approximate"]])


class Relu2(Alone):
    def __init__(self, variant):
        super().__init__(variant, relu2)


class Relu2Backward(AloneBackward):
    def __init__(self, variant):
        super().__init__(variant, relu2)
