"""Layer norm kernels."""

from functools import partial

from cute_ops.kernels.norm.rmsnorm import RMSNorm, RMSNormBackward

LayerNorm, LayerNormBackward = partial(RMSNorm, centred=True), partial(RMSNormBackward, centred=True)
