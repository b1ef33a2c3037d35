"""Which kernel computes attention."""

from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.fwd_cached_boxes_sm90 import AttentionCachedBoxesSm90
from cute_ops.kernels.attention.fwd_cached_sm80 import AttentionCachedSm80
from cute_ops.kernels.attention.fwd_cached_sm90 import AttentionCachedSm90
from cute_ops.kernels.attention.fwd_sm80 import AttentionFwdSm80
from cute_ops.kernels.attention.fwd_sm90 import AttentionFwd


def attention_fwd(variant) -> AttentionFwd | AttentionFwdSm80:
    return (AttentionFwdSm80 if AttentionConfig.of(variant.config).warps else AttentionFwd)(variant)


def attention_cached(variant) -> AttentionCachedSm90 | AttentionCachedSm80:
    config = AttentionConfig.of(variant.config)
    if config.warps:
        return AttentionCachedSm80(variant)
    return (AttentionCachedBoxesSm90 if config.box else AttentionCachedSm90)(variant)
