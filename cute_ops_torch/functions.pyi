"""Made by ``python -m cute_ops_torch.tools.stubs``; edit the declarations instead."""

from collections.abc import Sequence

from torch import Tensor

__all__ = [
    "adamw",
    "adamw_stochastic",
    "add_layernorm",
    "add_rmsnorm",
    "add_rmsnorm_fp8",
    "append_kv",
    "attention",
    "attention_cached",
    "attention_cached_packed",
    "attention_packed",
    "causal_conv1d",
    "causal_conv1d_channels_first",
    "causal_conv1d_packed",
    "causal_conv1d_states",
    "cross_entropy",
    "cross_entropy_metrics",
    "cross_entropy_of_slice",
    "decode_attention",
    "divergence",
    "dropout_add_layernorm",
    "dropout_add_rmsnorm",
    "gated_linear",
    "geglu",
    "gelu",
    "gelu_mul",
    "head_layernorm",
    "head_rmsnorm",
    "l2norm",
    "layernorm",
    "linear_add",
    "linear_cross_entropy_metrics",
    "linear_gelu",
    "linear_silu",
    "log_softmax",
    "mean",
    "merge_states",
    "mla_attention",
    "mla_decode",
    "permute_tokens",
    "qk_norm_rope",
    "quantize_fp8",
    "relu2",
    "rmsnorm",
    "rmsnorm_fp8",
    "rope",
    "rope_at",
    "rope_fp8",
    "rope_packed",
    "route",
    "scaled_fp8",
    "silu",
    "silu_mul",
    "silu_mul_fp8",
    "soft_cross_entropy",
    "softmax",
    "sum",
    "swiglu",
    "topk",
    "unpermute_tokens",
]

def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def layernorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "tanh", *, out: Tensor | None = None) -> Tensor: ...
def swiglu(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def geglu(x: Tensor, approximate: str = "tanh", *, out: Tensor | None = None) -> Tensor: ...
def silu(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def gelu(x: Tensor, approximate: str = "tanh", *, out: Tensor | None = None) -> Tensor: ...
def relu2(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace_backward: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-06,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    classes: int = 0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor: ...
def softmax(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def log_softmax(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def sum(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def mean(x: Tensor, *, out: Tensor | None = None) -> Tensor: ...
def quantize_fp8(
    x: Tensor,
    block: int = 0,
    power_of_two: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def rmsnorm_fp8(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    block: int = 0,
    power_of_two: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def add_rmsnorm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    block: int = 0,
    power_of_two: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def silu_mul_fp8(
    gate: Tensor,
    up: Tensor,
    block: int = 0,
    power_of_two: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    keep: Tensor,
    step_size: Tensor,
    scale: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-08,
    counted: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str = "none",
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    interleaved: bool = False,
) -> None: ...
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    approximate: str = "none",
    fused: str = "auto",
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def linear_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    fused: str = "auto",
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    fused: str = "auto",
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: str = "silu",
    fused: str = "auto",
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    fused: str = "auto",
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    fused: str = "auto",
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    fused: str = "auto",
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention_cached_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    fused: str = "auto",
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    batch_invariant: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    scale: float = 0.07216878364870322,
    rank: int = 512,
    batch_invariant: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def mla_attention(
    q: Tensor,
    q_rotated: Tensor,
    latent_cache: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    scale: float = 0.0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]: ...
def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def cross_entropy_metrics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    token_scaling: bool = False,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def cross_entropy_of_slice(
    logits: Tensor,
    target: Tensor,
    lse_partial: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    classes: int = 0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    inplace_backward: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Tensor: ...
def divergence(
    student: Tensor,
    teacher: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def add_layernorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def l2norm(x: Tensor, eps: float = 1e-06, *, out: Tensor | None = None) -> Tensor: ...
def head_rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def head_layernorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-05,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def dropout_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    seed: Tensor,
    p: float = 0.1,
    eps: float = 1e-06,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def dropout_add_layernorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
    p: float = 0.1,
    eps: float = 1e-05,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]: ...
def rope_packed(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int = 0,
    interleaved: bool = False,
    inplace_backward: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def rope_fp8(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor,
    interleaved: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def adamw_stochastic(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    seed: Tensor,
    keep: Tensor,
    step_size: Tensor,
    scale: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-08,
    counted: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def causal_conv1d_channels_first(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str = "none",
    *,
    out: Tensor | None = None,
) -> Tensor: ...
def scaled_fp8(x: Tensor, scale: Tensor, out_dtype: str = "float8_e4m3fn", *, out: Tensor | None = None) -> Tensor: ...
def topk(x: Tensor, k: int = 1) -> tuple[Tensor, Tensor]: ...
def route(logits: Tensor, k: int = 1, normalize: bool = True) -> tuple[Tensor, Tensor, Tensor]: ...
def permute_tokens(x: Tensor, index: Tensor, experts: int = 1) -> tuple[Tensor, Tensor, Tensor]: ...
def unpermute_tokens(y: Tensor, place: Tensor, weights: Tensor | None = None) -> Tensor: ...
def linear_cross_entropy_metrics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    accum_dtype: str = "float32",
    chunk_rows: int = 0,
    reduction: str = "mean",
    token_scaling: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def causal_conv1d_packed(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
) -> Tensor: ...
def causal_conv1d_states(x: Tensor, cu_seqlens: Tensor, length: int = 3) -> Tensor: ...
def rope_at(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor: ...
