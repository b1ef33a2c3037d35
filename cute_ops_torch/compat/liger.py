"""Functions and modules of Liger Kernel 0.8 (``liger_kernel.transformers`` and its ``functional``), by our ops.

Ours compute in float32 and round once: a ``casting_mode`` says where Liger rounds in between, and ``in_place`` that it
may write a gradient over an input, so neither changes a result here. Losses are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.compat.refusal import missing, one_of, only
from cute_ops_torch.composite.autocast import autocast_given

Tensor = torch.Tensor
__all__ = [
    "CrossEntropyOutput",
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerLayerNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerRMSNorm",
    "LigerReLUSquared",
    "LigerSoftmax",
    "LigerSwiGLUMLP",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_geglu",
    "liger_group_norm",
    "liger_layer_norm",
    "liger_llama4_text_rotary_pos_emb",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_rotary_pos_emb",
    "liger_softmax",
    "liger_swiglu",
]
_PATCH = "cute_ops_torch.patch(model) patches a model of any family that it knows"
__getattr__ = missing(__name__, __all__, {"apply_liger_kernel": _PATCH, "AutoLigerKernel": _PATCH})
CASTING_MODES = ("llama", "gemma", "none", None)


@dataclass
class CrossEntropyOutput:
    """A loss, and what else was asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """The loss of logits, (tokens, classes), by :func:`cute_ops_torch.cross_entropy`.

    ``size_average`` and ``reduce`` are refused, which Liger takes and does not read.

    Returns:
        The loss, or a :class:`CrossEntropyOutput` where more is asked for: of ``lse_square_scale * lse^2`` what
        ``reduction`` gives, without a gradient of its own; how many of the tokens that count were predicted, of
        ``"none"`` each token; and the predicted classes, -1 where the target is ignored.
    """
    only("liger_cross_entropy", size_average=(size_average, None), reduce=(reduce, None))
    one_of("liger_cross_entropy", "reduction", reduction, ("mean", "sum", "none"))
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    if weight is None and not any(asked):
        loss = cute_ops_torch.cross_entropy(
            input, target, ignore_index, label_smoothing, lse_square_scale, softcap=softcap or 0.0, reduction=reduction
        )
        return _of_some(loss, target, ignore_index, reduction)
    found = cute_ops_torch.cross_entropy_metrics(
        input, target, weight, ignore_index, label_smoothing, lse_square_scale if weight is None else 0.0,
        softcap=softcap or 0.0, reduction=reduction,
    )  # fmt: skip
    z = lse_square_scale, weight is not None
    return _completed(found, target, z, asked, ignore_index=ignore_index, reduction=reduction)


def _of_some(loss: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The loss, 0 where it is the mean of no token, as Liger's is; torch's is NaN then."""
    return torch.where((target != ignore_index).any(), loss, 0.0) if reduction == "mean" else loss


def _completed(
    found: tuple[Tensor, ...], target: Tensor, z: tuple[float, bool], asked: tuple[bool, bool, bool], *,
    ignore_index: int, reduction: str, scaled: bool = False,
) -> Any:  # fmt: skip
    """The results that are asked for beside the loss.

    Args:
        found: loss, lse, log probability and prediction, as :func:`cute_ops_torch.cross_entropy_metrics` returns them.
        target: the classes.
        z: the z-loss's weight, and whether the loss is yet without it: Liger's is not multiplied by class weights.
        asked: for the z-loss, the accuracy, the predictions.
        ignore_index, reduction: of the loss.
        scaled: by the probability of each target.
    """
    loss, lse, log_prob, predicted = found
    counts = target != ignore_index
    squares = z[0] * lse.square() * (log_prob.detach().exp() if scaled else 1.0)
    rows = squares.where(counts, torch.zeros_like(squares))
    z_loss = rows if reduction == "none" else rows.sum() / (counts.sum().clamp(min=1) if reduction == "mean" else 1)
    loss = _of_some(loss, target, ignore_index, reduction)
    if z[1]:
        loss = loss + z_loss
    if not any(asked):
        return loss
    right = ((predicted == target) & counts).float()
    return CrossEntropyOutput(
        loss,
        z_loss.detach() if asked[0] else None,
        (right if reduction == "none" else right.sum() / counts.sum()) if asked[1] else None,
        predicted.long() if asked[2] else None,
    )


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:  # fmt: skip
    """The loss of ``input @ weight.T + bias``, by :func:`cute_ops_torch.linear_cross_entropy`.

    ``accum_dtype`` None sums the weight's gradient in float32, where Liger sums in the weight's dtype.

    Returns:
        The loss, or a :class:`CrossEntropyOutput` where more is asked for, as :func:`liger_cross_entropy`.
    """
    name = "liger_fused_linear_cross_entropy"
    only(name, chunk_mem_const=(chunk_mem_const, 1))
    one_of(name, "reduction", reduction, ("mean", "sum", "none"))
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    input, weight, bias = autocast_given(input, weight, bias)
    if ce_weight is None and not use_token_scaling and not any(asked):
        loss = cute_ops_torch.linear_cross_entropy(
            input, weight, target, bias, ignore_index, label_smoothing, lse_square_scale, reduction,
            accum_dtype=accum_dtype, softcap=softcap or 0.0,
        )  # fmt: skip
        return _of_some(loss, target, ignore_index, reduction)
    found = cute_ops_torch.linear_cross_entropy_metrics(
        input, weight, target, bias, ce_weight, ignore_index, label_smoothing,
        lse_square_scale if ce_weight is None else 0.0, softcap=softcap or 0.0,
        accum_dtype=str(accum_dtype or torch.float32).removeprefix("torch."), reduction=reduction,
        token_scaling=use_token_scaling,
    )  # fmt: skip
    z = lse_square_scale, ce_weight is not None
    return _completed(found, target, z, asked, ignore_index=ignore_index, reduction=reduction, scaled=use_token_scaling)


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """``X * rsqrt(mean(X^2) + eps) * (W + offset)``."""
    one_of("liger_rms_norm", "casting_mode", casting_mode, CASTING_MODES)
    return cute_ops_torch.rmsnorm(X, W, eps=eps, weight_offset=offset)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`liger_rms_norm` of ``X + R``, and that sum."""
    one_of("liger_fused_add_rms_norm", "casting_mode", casting_mode, CASTING_MODES)
    return cute_ops_torch.add_rmsnorm(X, R, W, eps=eps, weight_offset=offset)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """``(X - mean) * rsqrt(variance + eps) * W + B``."""
    return cute_ops_torch.layernorm(X, W, B, eps=eps)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, by tanh."""
    return cute_ops_torch.gelu_mul(a, b)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``."""
    return cute_ops_torch.silu_mul(a, b)


def liger_relu_squared(x: Tensor) -> Tensor:
    """``relu(x)^2``."""
    return cute_ops_torch.relu2(x)


def liger_softmax(x: Tensor) -> Tensor:
    """Softmax of the last dim."""
    return cute_ops_torch.softmax(x)


def liger_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotary embeddings of (batch, heads, seqlen, headdim), with tables as Hugging Face makes them.

    Args:
        q, k: (batch, heads, seqlen, headdim), of any strides but the last.
        cos, sin: ([batch or 1,] seqlen, rotary dim), whose halves are alike; with ``rotary_dim`` also one half.
        position_ids: refused, since the tables are those of the positions; Liger does not read it.
        unsqueeze_dim: 1, since heads come before positions.
        rotary_dim: how many of a head's first elements are rotated; by default as many as the tables have columns.
    """
    only("liger_rope", position_ids=(position_ids, None), unsqueeze_dim=(unsqueeze_dim, 1))
    half = (cos.shape[-1] if rotary_dim is None else rotary_dim) // 2
    cos, sin = cos[..., :half], sin[..., :half]
    rotated = [cute_ops_torch.rope(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k)]
    return rotated[0], rotated[1]


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`liger_rope` by its name in ``liger_kernel.transformers``."""
    return liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embeddings of neighbours in (batch, seqlen, heads, headdim), by complex ([batch,] seqlen, pairs)."""
    if not freqs_cis.is_complex():
        raise TypeError(f"liger_llama4_text_rotary_pos_emb: freqs_cis is {freqs_cis.dtype}, expected a complex dtype.")
    cos, sin = freqs_cis.real.contiguous(), freqs_cis.imag.contiguous()
    return cute_ops_torch.rope(xq, cos, sin, True), cute_ops_torch.rope(xk, cos, sin, True)


class LigerRMSNorm(nn.Module):
    """:func:`liger_rms_norm` with a learned weight."""

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        only("LigerRMSNorm", row_mode=(row_mode, None))
        one_of("LigerRMSNorm", "casting_mode", casting_mode, CASTING_MODES)
        self.elementwise_affine, self.variance_epsilon, self.offset = elementwise_affine, eps, offset
        self.casting_mode, self.in_place = casting_mode, in_place
        weight = _start("LigerRMSNorm", hidden_size, init_fn) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        offset = self.offset if self.weight is not None else 0.0
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, offset, self.casting_mode)


class LigerFusedAddRMSNorm(nn.Module):
    """:func:`liger_fused_add_rms_norm` with a learned weight."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        one_of("LigerFusedAddRMSNorm", "casting_mode", casting_mode, CASTING_MODES)
        self.variance_epsilon, self.offset = eps, offset
        self.casting_mode, self.in_place = casting_mode, in_place
        self.weight = _start("LigerFusedAddRMSNorm", hidden_size, init_fn)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return liger_fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor, affine_shifting_bias: Tensor, num_channels: int, num_groups: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """The norm of groups of channels of (batch, channels, ...), by :func:`cute_ops_torch.group_norm`."""
    if X.shape[1] != num_channels:
        raise ValueError(f"liger_group_norm: X has {X.shape[1]} channels, expected num_channels={num_channels}.")
    return cute_ops_torch.group_norm(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)


class LigerGroupNorm(nn.Module):
    """:func:`liger_group_norm` with a learned weight and bias; a bias that is not asked for starts as zeros."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = _start("LigerGroupNorm", num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_group_norm(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )


class LigerLayerNorm(nn.Module):
    """:func:`liger_layer_norm` with a learned weight and bias; a bias that is not asked for starts as zeros."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", impl: str | None = None,
        mode: str | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        only("LigerLayerNorm", impl=(impl, None), mode=(mode, None), backend=(backend, None))
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _start("LigerLayerNorm", hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)


def _start(name: str, size: int, init_fn: str) -> nn.Parameter:
    one_of(name, "init_fn", init_fn, ("ones", "zeros"))
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerCrossEntropyLoss(nn.Module):
    """:func:`liger_cross_entropy` with its options."""

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        one_of("LigerCrossEntropyLoss", "reduction", reduction, ("mean", "sum", "none"))
        self.weight = weight
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Any:
        return liger_cross_entropy(
            _input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing, lse_square_scale=self.lse_square_scale, softcap=self.softcap,
            return_z_loss=self.return_z_loss, return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )  # fmt: skip


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """:func:`liger_fused_linear_cross_entropy` with its options; called with the weight first."""

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        one_of("LigerFusedLinearCrossEntropyLoss", "reduction", reduction, ("mean", "sum", "none"))
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.ce_weight, self.reduction, self.softcap, self.accum_dtype = ce_weight, reduction, softcap, accum_dtype
        self.use_token_scaling, self.return_z_loss = use_token_scaling, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, ignore_index=self.ignore_index,
            lse_square_scale=self.lse_square_scale,
            label_smoothing=self.label_smoothing, reduction=self.reduction, softcap=self.softcap,
            accum_dtype=self.accum_dtype, use_token_scaling=self.use_token_scaling, return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy, return_predicted_tokens=self.return_predicted_tokens,
        )  # fmt: skip


class LigerReLUSquared(nn.Module):
    """:func:`liger_relu_squared`."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_relu_squared(x)


class LigerSoftmax(nn.Module):
    """:func:`liger_softmax`."""

    def forward(self, x: Tensor) -> Tensor:
        return liger_softmax(x)


class _GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, three layers without biases, of the sizes of a Hugging Face config."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    gate_up_proj: nn.Linear
    w1: nn.Linear
    w2: nn.Linear
    w3: nn.Linear

    def __init__(self, config: Any, intermediate_size: int | None, names: tuple[str, ...]) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        *inner, last = names
        width = self.intermediate_size * (1 if len(inner) == 2 else 2)
        for name in inner:
            setattr(self, name, nn.Linear(self.hidden_size, width, bias=False))
        setattr(self, last, nn.Linear(self.intermediate_size, self.hidden_size, bias=False))


def _needs_silu(config: Any) -> None:
    one_of("config", "hidden_act", config.hidden_act, ("silu", "swish"))


class LigerGEGLUMLP(_GatedMLP):
    """An MLP of :func:`liger_geglu`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, ("gate_proj", "up_proj", "down_proj"))
        self.config = config

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(liger_geglu(self.gate_proj(x), self.up_proj(x)))


class LigerSwiGLUMLP(_GatedMLP):
    """An MLP of :func:`liger_swiglu`, with the names of Llama's layers."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _needs_silu(config)
        super().__init__(config, intermediate_size, ("gate_proj", "up_proj", "down_proj"))
        self.config = config

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(liger_swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` by its name for Qwen3's experts."""


class LigerPhi3SwiGLUMLP(_GatedMLP):
    """An MLP of :func:`liger_swiglu` whose gate and up are one layer, with the names of Phi-3's layers."""

    def __init__(self, config: Any) -> None:
        _needs_silu(config)
        super().__init__(config, None, ("gate_up_proj", "down_proj"))
        self.config = config

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(cute_ops_torch.swiglu(self.gate_up_proj(x)))


class LigerBlockSparseTop2MLP(_GatedMLP):
    """An MLP of :func:`liger_swiglu`, with the names of Mixtral's layers."""

    def __init__(self, config: Any) -> None:
        _needs_silu(config)
        super().__init__(config, None, ("w1", "w3", "w2"))
        self.ffn_dim, self.hidden_dim = self.intermediate_size, self.hidden_size

    def forward(self, x: Tensor) -> Any:
        return self.w2(liger_swiglu(self.w1(x), self.w3(x)))
