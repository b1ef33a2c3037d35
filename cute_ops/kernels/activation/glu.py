"""Gated products of packed rows."""

from functools import partial

from cute_ops.kernels.activation.pointwise import PACKED, PACKED_AGAIN, PACKED_BACKWARD, Activation
from cute_ops.kernels.lib.activation import GELU, silu

SwiGLU, SwiGLUBackward = partial(Activation, silu, PACKED), partial(Activation, silu, PACKED_BACKWARD)
SwiGLUAgain = partial(Activation, silu, PACKED_AGAIN)
GEGLU, GEGLUBackward = partial(Activation, GELU, PACKED), partial(Activation, GELU, PACKED_BACKWARD)
