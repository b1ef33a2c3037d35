"""Kernels of activations alone."""

from functools import partial

from cute_ops.kernels.activation.pointwise import ALONE, ALONE_BACKWARD, Activation
from cute_ops.kernels.lib.activation import GELU, relu2, silu

Silu, SiluBackward = partial(Activation, silu, ALONE), partial(Activation, silu, ALONE_BACKWARD)
Gelu, GeluBackward = partial(Activation, GELU, ALONE), partial(Activation, GELU, ALONE_BACKWARD)
Relu2, Relu2Backward = partial(Activation, relu2, ALONE), partial(Activation, relu2, ALONE_BACKWARD)
