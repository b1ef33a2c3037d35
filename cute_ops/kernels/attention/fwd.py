"""Which kernel computes attention."""

from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.fwd_sm80 import AttentionFwdSm80
from cute_ops.kernels.attention.fwd_sm90 import AttentionFwd


def attention_fwd(variant) -> AttentionFwd | AttentionFwdSm80:
    return (AttentionFwdSm80 if AttentionConfig.of(variant.config).warps else AttentionFwd)(variant)
