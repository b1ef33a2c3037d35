"""Which kernel computes attention of a few queries to caches."""

from cute_ops.kernels.attention.config import DecodeConfig
from cute_ops.kernels.attention.decode_attention import DecodeAttention
from cute_ops.kernels.attention.decode_attention_sm90 import DecodeAttentionSm90
from cute_ops.kernels.attention.decode_clusters_sm90 import DecodeAttentionInClusters


def decode_attention(variant) -> DecodeAttention:
    config = DecodeConfig.of(variant.config)
    if config.cluster > 1:
        return DecodeAttentionInClusters(variant)
    return (DecodeAttentionSm90 if config.box else DecodeAttention)(variant)
