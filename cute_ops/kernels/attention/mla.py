"""Which kernel computes multi-head latent attention."""

from cute_ops.kernels.attention.config import MlaConfig
from cute_ops.kernels.attention.latent import Latent
from cute_ops.kernels.attention.mla_decode import MlaDecode
from cute_ops.kernels.attention.mla_decode_sm90 import MlaDecodeSm90


def mla_decode(variant) -> Latent:
    return MlaDecodeSm90(variant) if MlaConfig.of(variant.config).wgmma else MlaDecode(variant)
