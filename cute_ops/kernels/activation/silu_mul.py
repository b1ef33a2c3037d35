"""SiLU-gated product kernels."""

from functools import partial

from cute_ops.kernels.activation.pointwise import GATED, GATED_BACKWARD, Activation
from cute_ops.kernels.lib.activation import silu

SiluMul, SiluMulBackward = partial(Activation, silu, GATED), partial(Activation, silu, GATED_BACKWARD)
