"""Which kernel computes attention of a few queries to caches."""

from cute_ops.kernels.attention.config import DecodeConfig
from cute_ops.kernels.attention.decode_attention import DecodeAttention
from cute_ops.kernels.attention.decode_attention_sm90 import DecodeAttentionSm90


def decode_attention(variant) -> DecodeAttention:
    return (DecodeAttentionSm90 if DecodeConfig.of(variant.config).box else DecodeAttention)(variant)
