"""Functions and modules of quack 0.6, by our ops. Theirs lie in modules of their own; here all lie in one.

Losses are float32. ``tuned=False`` is refused: our tables and ``python -m cute_ops tune`` say which config runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.compat.refusal import missing, one_of, only

Tensor = torch.Tensor
__all__ = [
    "MLP",
    "Linear",
    "LinearCrossEntropy",
    "QuackRMSNorm",
    "apply_rotary_emb",
    "chunked_linear_cross_entropy",
    "cross_entropy",
    "layernorm_fwd",
    "linear_cross_entropy_func",
    "linear_func",
    "mlp_func",
    "rmsnorm",
    "softmax",
    "topk",
]
__getattr__ = missing(__name__, __all__, {})
GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}
ACTIVATIONS = {"gelu_tanh_approx": "gelu_tanh", "relu": "relu", "relu_sq": "relu2", "silu": "silu"}


def rmsnorm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None, residual_dtype: torch.dtype | None = None, eps: float = 1e-6,
    prenorm: bool = False, weight_offset: float = 0.0,
) -> Any:  # fmt: skip
    """``x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) + bias``, of ``x + residual`` if one is given.

    ``out_dtype`` and ``residual_dtype`` are that of x, the only one that is computed. A weight ``[heads, headdim]`` is
    one of each head, by :func:`cute_ops_torch.head_rmsnorm`.

    Returns:
        The norm; with ``prenorm`` also what it is of, ``x + residual`` or x.
    """
    for name, dtype in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        one_of("rmsnorm", name, dtype, (None, x.dtype))
    if weight is not None and weight.ndim == 2:  # of heads
        only("rmsnorm", bias=(bias, None))
        summed = x if residual is None else x + residual
        out = cute_ops_torch.head_rmsnorm(summed, weight, eps, weight_offset)
        return (out, summed) if prenorm else out
    if residual is None:
        out = cute_ops_torch.rmsnorm(x, weight, bias, eps, weight_offset)
        return (out, x) if prenorm else out
    out, summed = cute_ops_torch.add_rmsnorm(x, residual, weight, bias, eps, weight_offset)
    return (out, summed) if prenorm else out


class QuackRMSNorm(nn.RMSNorm):
    """:func:`rmsnorm` with a learned weight."""

    def __init__(
        self, dim: int, eps: float = 1e-6, elementwise_affine: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, elementwise_affine, device, dtype)
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return cute_ops_torch.rmsnorm(x, self.weight, eps=self.epsilon)


def softmax(x: Tensor) -> Tensor:
    """Softmax of the last dim."""
    return cute_ops_torch.softmax(x)


def topk(x: Tensor, k: int, softmax: bool = False) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row, from the largest on, or their softmax; and int32, where they are."""
    values, index = cute_ops_torch.topk(x, k)
    return (cute_ops_torch.softmax(values) if softmax else values), index


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6, return_rstd: bool = False,
    return_mean: bool = False,
) -> Tensor:  # fmt: skip
    """``(x - mean) * rsqrt(variance + eps) * weight + bias``, which has a gradient here."""
    only("layernorm_fwd", return_rstd=(return_rstd, False), return_mean=(return_mean, False))
    return cute_ops_torch.layernorm(x, weight, bias, eps)


def cross_entropy(
    x: Tensor, target: Tensor, lse_partial: Tensor | None = None, weight: Tensor | None = None,
    ignore_index: int = -100, reduction: str = "mean", inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    """The loss of logits, (rows, classes), by :func:`cute_ops_torch.cross_entropy`, with a weight per class or none."""
    only("cross_entropy", lse_partial=(lse_partial, None))
    if weight is not None:
        return cute_ops_torch.cross_entropy_metrics(
            x, target, weight, ignore_index, reduction=reduction, inplace_backward=inplace_backward
        )[0]
    return cute_ops_torch.cross_entropy(x, target, ignore_index, reduction=reduction, inplace_backward=inplace_backward)


def chunked_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, chunk_size: int = 4096, ignore_index: int = -100,
    reduction: str = "mean", tuned: bool = True, use_scaled_exp: bool | None = None,
) -> Tensor:  # fmt: skip
    """The loss of ``x @ weight.T``, whose logits are held for ``chunk_size`` rows at a time."""
    only("chunked_linear_cross_entropy", tuned=(tuned, True), use_scaled_exp=(use_scaled_exp, None))
    return cute_ops_torch.linear_cross_entropy(
        x, weight, target, None, ignore_index, reduction=reduction, chunk_rows=chunk_size
    )


def linear_cross_entropy_func(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int = -100, reduction: str = "mean",
    inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    """The loss of ``x @ weight.T + bias``. Gradients of logits lie in the logits' memory here in any case."""
    return cute_ops_torch.linear_cross_entropy(x, weight, target, bias, ignore_index, reduction=reduction)


class LinearCrossEntropy(nn.Linear):
    """:func:`linear_cross_entropy_func` with a learned weight."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, ignore_index: int = -100,
        reduction: str = "mean", chunk_size: int | None = None, inplace_backward: bool = False, tuned: bool = True,
        use_scaled_exp: bool | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        only("LinearCrossEntropy", tuned=(tuned, True), use_scaled_exp=(use_scaled_exp, None))
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index, self.reduction, self.chunk_size = ignore_index, reduction, chunk_size
        self.inplace_backward = inplace_backward

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return cute_ops_torch.linear_cross_entropy(
            input, self.weight, target, self.bias, self.ignore_index, reduction=self.reduction,
            chunk_rows=self.chunk_size,
        )  # fmt: skip


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotary embeddings of (batch, seqlen, heads, headdim), by tables of (positions, rotary dim / 2).

    ``seqlen_offsets``, a number or one for each sequence, is the position of the first token. With ``cu_seqlens`` x is
    (tokens, heads, headdim), of packed sequences.
    """
    seqlen = x.shape[0 if cu_seqlens is not None else 1]
    if cu_seqlens is not None:
        tokens = torch.arange(seqlen, device=x.device, dtype=cu_seqlens.dtype)
        sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
        first = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets or 0
        places = tokens - cu_seqlens[sequence] + first
        cos, sin = cos[places], sin[places]
    elif not isinstance(seqlen_offsets, Tensor):
        first = seqlen_offsets or 0
        cos, sin = cos[first : first + seqlen], sin[first : first + seqlen]
    else:
        places = seqlen_offsets[:, None] + torch.arange(seqlen, device=x.device)
        cos, sin = cos[places], sin[places]
    if not inplace:
        return cute_ops_torch.rope(x, cos, sin, interleaved)
    if torch.is_grad_enabled() and x.requires_grad:
        return x.copy_(cute_ops_torch.rope(x, cos, sin, interleaved))
    return cute_ops_torch.rope(x, cos, sin, interleaved, out=x)


def linear_func(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, fuse_grad_accum: bool = False, tuned: bool = True
) -> Tensor:
    """``x @ weight.T + bias``."""
    only("linear_func", fuse_grad_accum=(fuse_grad_accum, False), tuned=(tuned, True))
    return cute_ops_torch.linear(x, weight, bias, epilogue="bias")  # type: ignore[no-any-return]


class Linear(nn.Linear):
    """:func:`linear_func` with a learned weight."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: Any = None,
        dtype: torch.dtype | None = None, fuse_grad_accum: bool = False,
    ) -> None:  # fmt: skip
        only("Linear", fuse_grad_accum=(fuse_grad_accum, False))
        super().__init__(in_features, out_features, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return linear_func(input, self.weight, self.bias)


def mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, bias1: Tensor | None = None,
    bias2: Tensor | None = None, fuse_grad_accum: bool = False, tuned: bool = True, recompute: bool = False,
    concat_layout: bool = False,
) -> Tensor:  # fmt: skip
    """``activation(x @ weight1.T + bias1) @ weight2.T + bias2``, by :func:`cute_ops_torch.mlp`, or ``gated_mlp``.

    A gated activation wants ``concat_layout``, all rows of the gate before those of up: interleaved ones, quack's
    default, are refused. ``recompute`` computes the first product again in the backward.
    """
    only("mlp_func", fuse_grad_accum=(fuse_grad_accum, False), tuned=(tuned, True))
    one_of("mlp_func", "activation", activation, (*ACTIVATIONS, *GATED))
    save = "none" if recompute else "pre"
    if activation in GATED:
        only("mlp_func", bias1=(bias1, None), bias2=(bias2, None), concat_layout=(concat_layout, True))
        return cute_ops_torch.gated_mlp(x, weight1, weight2, GATED[activation], save=save)
    only("mlp_func", concat_layout=(concat_layout, False))
    return cute_ops_torch.mlp(x, weight1, bias1, weight2, bias2, ACTIVATIONS[activation], save=save)


class MLP(nn.Module):
    """:func:`mlp_func` with learned weights, ``fc1`` and ``fc2``."""

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        bias1: bool = False, bias2: bool = False, activation: str = "gelu_tanh_approx", multiple_of: int = 1,
        device: Any = None, dtype: torch.dtype | None = None, fuse_grad_accum: bool = False, tuned: bool = True,
        recompute: bool = False, concat_layout: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        only("MLP", fuse_grad_accum=(fuse_grad_accum, False), tuned=(tuned, True))
        one_of("MLP", "activation", activation, (*ACTIVATIONS, *GATED))
        gated = activation in GATED
        only("MLP", concat_layout=(concat_layout, gated))
        if gated:
            only("MLP", bias1=(bias1, False), bias2=(bias2, False))
        if hidden_features is None:
            hidden_features = int(8 / 3 * in_features) if gated else 4 * in_features
        hidden_features = -(-hidden_features // multiple_of) * multiple_of
        outs = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden_features * (2 if gated else 1), bias1, device, dtype)
        self.fc2 = nn.Linear(hidden_features, outs, bias2, device, dtype)
        self.activation, self.recompute, self.concat_layout = activation, recompute, concat_layout

    def forward(self, input: Tensor) -> Tensor:
        return mlp_func(
            input, self.fc1.weight, self.fc2.weight, self.activation, self.fc1.bias, self.fc2.bias,
            recompute=self.recompute, concat_layout=self.concat_layout,
        )  # fmt: skip
