"""The declarations. ``OPS``, ``PRODUCTS``, ``ATTENTION`` and ``MODELS`` have a public Python function and an entry in
the documentation and in the stubs; the last three have tests of their own. ``PARTS`` are ops without a function, which
our own functions call.
"""

from cute_ops.declaration.op import Op
from cute_ops.ops.activation.gelu_mul import gelu_mul
from cute_ops.ops.activation.glu import geglu, swiglu, swiglu_again
from cute_ops.ops.activation.silu_mul import silu_mul
from cute_ops.ops.activation.unary import gelu, relu2, silu
from cute_ops.ops.attention.append_kv import append_kv
from cute_ops.ops.attention.attention import attention, attention_packed
from cute_ops.ops.attention.attention_cached import attention_cached, attention_cached_packed
from cute_ops.ops.attention.decode_attention import decode_attention
from cute_ops.ops.attention.merge_states import merge_states
from cute_ops.ops.attention.mla_decode import mla_attention, mla_decode
from cute_ops.ops.conv.causal_conv1d import causal_conv1d
from cute_ops.ops.conv.channels_first import causal_conv1d_channels_first
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd
from cute_ops.ops.gemm.named import gated_linear, linear_add, linear_gelu, linear_silu
from cute_ops.ops.norm.add_layernorm import add_layernorm
from cute_ops.ops.norm.add_rmsnorm import add_rmsnorm
from cute_ops.ops.norm.dropout_add_norm import dropout_add_layernorm, dropout_add_rmsnorm
from cute_ops.ops.norm.head_norm import head_layernorm, head_rmsnorm
from cute_ops.ops.norm.l2norm import l2norm
from cute_ops.ops.norm.layernorm import layernorm
from cute_ops.ops.norm.rmsnorm import rmsnorm
from cute_ops.ops.optim.adamw import adamw
from cute_ops.ops.optim.adamw_stochastic import adamw_stochastic
from cute_ops.ops.quantize.add_rmsnorm_fp8 import add_rmsnorm_fp8
from cute_ops.ops.quantize.quantize_fp8 import quantize_fp8
from cute_ops.ops.quantize.rmsnorm_fp8 import rmsnorm_fp8
from cute_ops.ops.quantize.scaled_fp8 import scaled_fp8
from cute_ops.ops.quantize.silu_mul_fp8 import silu_mul_fp8
from cute_ops.ops.reduction.cross_entropy import cross_entropy, cross_entropy_step
from cute_ops.ops.reduction.cross_entropy_metrics import cross_entropy_metrics, cross_entropy_of_slice
from cute_ops.ops.reduction.divergence import divergence
from cute_ops.ops.reduction.scale import scale
from cute_ops.ops.reduction.soft_cross_entropy import soft_cross_entropy
from cute_ops.ops.reduction.softmax import log_softmax, softmax
from cute_ops.ops.reduction.sum_mean import row_mean, row_sum
from cute_ops.ops.rotary.qk_norm_rope import qk_norm_rope
from cute_ops.ops.rotary.rope import rope, rope_bwd_joined, rope_fp8, rope_packed, rope_tables
from cute_ops.ops.routing.permute import permute_tokens, unpermute_tokens
from cute_ops.ops.routing.route import route
from cute_ops.ops.routing.topk import topk

OPS: tuple[Op, ...] = (
    rmsnorm, add_rmsnorm, layernorm, silu_mul, gelu_mul, swiglu, geglu, silu, gelu, relu2, rope, qk_norm_rope,
    cross_entropy, softmax, log_softmax, row_sum, row_mean,
    quantize_fp8, rmsnorm_fp8, add_rmsnorm_fp8, silu_mul_fp8, adamw, causal_conv1d, append_kv,
)  # fmt: skip
PRODUCTS: tuple[Op, ...] = (linear_gelu, linear_silu, linear_add, gated_linear)
ATTENTION: tuple[Op, ...] = (
    attention,
    attention_packed,
    attention_cached,
    attention_cached_packed,
    decode_attention,
    mla_decode,
    mla_attention,
    merge_states,
)
MODELS: tuple[Op, ...] = (
    cross_entropy_metrics,
    cross_entropy_of_slice,
    soft_cross_entropy,
    divergence,
    add_layernorm,
    l2norm,
    head_rmsnorm,
    head_layernorm,
    dropout_add_rmsnorm,
    dropout_add_layernorm,
    rope_packed,
    rope_fp8,
    adamw_stochastic,
    causal_conv1d_channels_first,
    scaled_fp8,
    topk,
    route,
    permute_tokens,
    unpermute_tokens,
)
PARTS: tuple[Op, ...] = (scale, sorted_embedding_bwd, swiglu_again, cross_entropy_step, rope_bwd_joined, rope_tables)
