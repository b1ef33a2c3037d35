"""Made by ``python -m cute_ops_jax.tools.stubs``; edit the declarations instead."""

from jax import Array
from jax.typing import ArrayLike

from cute_ops import __version__ as __version__
from cute_ops_jax.composite.attention import attention as attention
from cute_ops_jax.composite.attention import decode_attention as decode_attention
from cute_ops_jax.composite.block import gated_mlp as gated_mlp
from cute_ops_jax.composite.block import linear_add_rmsnorm as linear_add_rmsnorm
from cute_ops_jax.composite.block import mlp as mlp
from cute_ops_jax.composite.block import qkv_rope as qkv_rope
from cute_ops_jax.composite.block import rmsnorm_linear as rmsnorm_linear
from cute_ops_jax.composite.dot_product_attention import dot_product_attention as dot_product_attention
from cute_ops_jax.composite.embedding import embedding as embedding
from cute_ops_jax.composite.fused import fused as fused
from cute_ops_jax.composite.layouts import group_norm as group_norm
from cute_ops_jax.composite.layouts import rope_from_positions as rope_from_positions
from cute_ops_jax.composite.linear import gated_linear as gated_linear
from cute_ops_jax.composite.linear import linear as linear
from cute_ops_jax.composite.losses import linear_cross_entropy as linear_cross_entropy
from cute_ops_jax.composite.losses import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from cute_ops_jax.composite.losses import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from cute_ops_jax.composite.training import linear_distillation_loss as linear_distillation_loss
from cute_ops_jax.composite.training import linear_log_probs as linear_log_probs
from cute_ops_jax.composite.training import linear_policy_loss as linear_policy_loss
from cute_ops_jax.composite.training import linear_preference_loss as linear_preference_loss
from cute_ops_jax.exporting import export as export
from cute_ops_jax.fusion import fuse as fuse
from cute_ops_jax.loading import load as load
from cute_ops_jax.primitive.ffi_check import probe as probe
from cute_ops_jax.primitive.function import register as register

def rmsnorm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
) -> Array: ...
def add_rmsnorm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
) -> tuple[Array, Array]: ...
def layernorm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-05,
) -> Array: ...
def silu_mul(gate: ArrayLike, up: ArrayLike) -> Array: ...
def gelu_mul(gate: ArrayLike, up: ArrayLike, approximate: str = "tanh") -> Array: ...
def swiglu(x: ArrayLike) -> Array: ...
def geglu(x: ArrayLike, approximate: str = "tanh") -> Array: ...
def silu(x: ArrayLike) -> Array: ...
def gelu(x: ArrayLike, approximate: str = "tanh") -> Array: ...
def relu2(x: ArrayLike) -> Array: ...
def rope(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    interleaved: bool = False,
    inplace_backward: bool = False,
) -> Array: ...
def qk_norm_rope(
    q: ArrayLike,
    k: ArrayLike,
    q_weight: ArrayLike,
    k_weight: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    eps: float = 1e-06,
) -> tuple[Array, Array]: ...
def cross_entropy(
    logits: ArrayLike,
    target: ArrayLike,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    classes: int = 0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Array: ...
def softmax(x: ArrayLike) -> Array: ...
def log_softmax(x: ArrayLike) -> Array: ...
def sum(x: ArrayLike) -> Array: ...
def mean(x: ArrayLike) -> Array: ...
def quantize_fp8(x: ArrayLike, block: int = 0, power_of_two: bool = False) -> tuple[Array, Array]: ...
def rmsnorm_fp8(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    block: int = 0,
    power_of_two: bool = False,
) -> tuple[Array, Array]: ...
def add_rmsnorm_fp8(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    block: int = 0,
    power_of_two: bool = False,
) -> tuple[Array, Array, Array]: ...
def silu_mul_fp8(gate: ArrayLike, up: ArrayLike, block: int = 0, power_of_two: bool = False) -> tuple[Array, Array]: ...
def adamw(
    param: ArrayLike,
    grad: ArrayLike,
    exp_avg: ArrayLike,
    exp_avg_sq: ArrayLike,
    keep: ArrayLike,
    step_size: ArrayLike,
    scale: ArrayLike,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-08,
    counted: bool = False,
) -> tuple[Array, Array, Array]: ...
def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    activation: str = "none",
) -> tuple[Array, Array]: ...
def append_kv(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slots: ArrayLike,
    cos: ArrayLike | None = None,
    sin: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    interleaved: bool = False,
) -> tuple[Array, Array]: ...
def linear_gelu(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike,
    approximate: str = "none",
    fused: str = "auto",
) -> Array: ...
def linear_silu(x: ArrayLike, weight: ArrayLike, bias: ArrayLike, fused: str = "auto") -> Array: ...
def linear_add(x: ArrayLike, weight: ArrayLike, residual: ArrayLike, fused: str = "auto") -> Array: ...
def attention_packed(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    sinks: ArrayLike | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    fused: str = "auto",
) -> tuple[Array, Array]: ...
def attention_cached(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    lengths: ArrayLike,
    page_table: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    fused: str = "auto",
) -> tuple[Array, Array]: ...
def attention_cached_packed(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    lengths: ArrayLike,
    page_table: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    fused: str = "auto",
) -> tuple[Array, Array]: ...
def mla_decode(
    q: ArrayLike,
    latent_cache: ArrayLike,
    lengths: ArrayLike,
    page_table: ArrayLike | None = None,
    scale: float = 0.07216878364870322,
    rank: int = 512,
    batch_invariant: bool = False,
) -> tuple[Array, Array]: ...
def mla_attention(
    q: ArrayLike,
    q_rotated: ArrayLike,
    latent_cache: ArrayLike,
    w_k: ArrayLike,
    w_v: ArrayLike,
    lengths: ArrayLike,
    page_table: ArrayLike | None = None,
    scale: float = 0.0,
    batch_invariant: bool = False,
) -> tuple[Array, Array]: ...
def merge_states(out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike) -> tuple[Array, Array]: ...
def cross_entropy_metrics(
    logits: ArrayLike,
    target: ArrayLike,
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    token_scaling: bool = False,
    inplace_backward: bool = False,
) -> tuple[Array, Array, Array, Array]: ...
def cross_entropy_of_slice(
    logits: ArrayLike,
    target: ArrayLike,
    lse_partial: ArrayLike,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    classes: int = 0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
) -> tuple[Array, Array, Array, Array]: ...
def soft_cross_entropy(
    logits: ArrayLike,
    target: ArrayLike,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Array: ...
def divergence(student: ArrayLike, teacher: ArrayLike, beta: float = 0.5, temperature: float = 1.0) -> Array: ...
def add_layernorm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-05,
) -> tuple[Array, Array]: ...
def l2norm(x: ArrayLike, eps: float = 1e-06) -> Array: ...
def head_rmsnorm(x: ArrayLike, weight: ArrayLike, eps: float = 1e-06, weight_offset: float = 0.0) -> Array: ...
def head_layernorm(x: ArrayLike, weight: ArrayLike, bias: ArrayLike, eps: float = 1e-05) -> Array: ...
def dropout_add_rmsnorm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    seed: ArrayLike,
    p: float = 0.1,
    eps: float = 1e-06,
) -> tuple[Array, Array]: ...
def dropout_add_layernorm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike,
    seed: ArrayLike,
    p: float = 0.1,
    eps: float = 1e-05,
) -> tuple[Array, Array]: ...
def rope_packed(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    heads: int = 0,
    interleaved: bool = False,
    inplace_backward: bool = False,
) -> Array: ...
def rope_fp8(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, scale: ArrayLike, interleaved: bool = False) -> Array: ...
def adamw_stochastic(
    param: ArrayLike,
    grad: ArrayLike,
    exp_avg: ArrayLike,
    exp_avg_sq: ArrayLike,
    seed: ArrayLike,
    keep: ArrayLike,
    step_size: ArrayLike,
    scale: ArrayLike,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-08,
    counted: bool = False,
) -> tuple[Array, Array, Array]: ...
def causal_conv1d_channels_first(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    seq_idx: ArrayLike | None = None,
    activation: str = "none",
) -> Array: ...
def scaled_fp8(x: ArrayLike, scale: ArrayLike, out_dtype: str = "float8_e4m3fn") -> Array: ...
def topk(x: ArrayLike, k: int = 1) -> tuple[Array, Array]: ...
def route(logits: ArrayLike, k: int = 1, normalize: bool = True) -> tuple[Array, Array, Array]: ...
def permute_tokens(x: ArrayLike, index: ArrayLike, experts: int = 1) -> tuple[Array, Array, Array]: ...
def unpermute_tokens(y: ArrayLike, place: ArrayLike, weights: ArrayLike | None = None) -> Array: ...
def linear_cross_entropy_metrics(
    hidden: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    bias: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    accum_dtype: str = "float32",
    chunk_rows: int = 0,
    reduction: str = "mean",
    token_scaling: bool = False,
) -> tuple[Array, Array, Array, Array]: ...
def causal_conv1d_packed(
    x: ArrayLike,
    weight: ArrayLike,
    cu_seqlens: ArrayLike,
    bias: ArrayLike | None = None,
    activation: str = "none",
) -> Array: ...
def causal_conv1d_states(x: ArrayLike, cu_seqlens: ArrayLike, length: int = 3) -> Array: ...
def rope_at(x: ArrayLike, positions: ArrayLike, cos: ArrayLike, sin: ArrayLike, interleaved: bool = False) -> Array: ...
