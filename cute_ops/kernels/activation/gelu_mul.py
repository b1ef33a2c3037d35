"""GELU-gated product kernels."""

from functools import partial

from cute_ops.kernels.activation.pointwise import GATED, GATED_BACKWARD, Activation
from cute_ops.kernels.lib.activation import GELU

GeluMul, GeluMulBackward = partial(Activation, GELU, GATED), partial(Activation, GELU, GATED_BACKWARD)
