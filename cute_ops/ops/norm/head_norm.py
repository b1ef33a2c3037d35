"""Norms of heads with a weight for each head: expressions of rows, cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops.checks import FINITE, NOT_NEGATIVE, within
from cute_ops.ops.expression.fused import fused

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
CASES = (
    Case("one-element", {"m": (1,), "h": 1, "n": 1}),
    Case("odd-small", {"m": (3, 5), "h": 3, "n": 7}, {"T_weight": "float32"}),
    Case("olmo2-k", {"m": (2, 17), "h": 8, "n": 128}),
    Case("command-r-plus", {"m": (33,), "h": 96, "n": 128}, {"T_weight": "float32"}),
    Case("long-heads", {"m": (3,), "h": 2, "n": 4097}),
)

# The gradient of a row of one element is 0. What is computed is a product's rounding error times rstd: eps bounds it.
LAYER_CASES = (CASES[0]._replace(attrs={"eps": 0.1}), *CASES[1:])


def _head_rmsnorm(xp: Any, x: Any, weight: Any, *, eps: float, weight_offset: float) -> Any:
    scale = weight + weight_offset if weight_offset else weight
    return x * xp.rsqrt(xp.mean(x * x, **ROW) + eps) * scale


def _head_layernorm(xp: Any, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    x = x - xp.mean(x, **ROW)
    return x * xp.rsqrt(xp.mean(x * x, **ROW) + eps) * weight + bias


_X = """x: ``T[*m h n]``: (batch, seqlen, nheads, headdim), or (tokens, nheads, headdim); float32, float16 or bfloat16.
            Tokens and heads may have any stride: q or k of a fused projection, without a copy."""
_RAISES = """Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous, 2^31 heads
            or more."""

head_rmsnorm = fused(
    _head_rmsnorm, name="head_rmsnorm", operands={"x": "*m n", "weight": "h n"}, cases=CASES,
    attrs={"eps": 1e-6, "weight_offset": 0.0}, check=within(eps=NOT_NEGATIVE, weight_offset=FINITE),
    grad_doc="Gradients of :func:`head_rmsnorm`: as :func:`rmsnorm_bwd`, with sums over tokens for each head.",
    doc=f"""RMSNorm of every head, with a weight of each head's own.

    ``out[..., i, :] = x[..., i, :] * rsqrt(mean(x[..., i, :]^2) + eps) * (weight_offset + weight[i])``

    Args:
        {_X}
        weight: ``W[h n]``, a float dtype of its own.
        eps: added to the mean square; a compile-time constant.
        weight_offset: added to the weight; a compile-time constant.

    Returns:
        ``T[*m h n]``, compact. Computed in float32, rounded once; deterministic.

    {_RAISES}

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; per head in quack's ``rmsnorm``.
    """,
)  # fmt: skip

head_layernorm = fused(
    _head_layernorm, name="head_layernorm", operands={"x": "*m n", "weight": "h n", "bias": "h n"}, cases=LAYER_CASES,
    attrs={"eps": 1e-5}, check=within(eps=NOT_NEGATIVE),
    grad_doc="Gradients of :func:`head_layernorm`: as :func:`layernorm_bwd`, with sums over tokens for each head.",
    doc=f"""Layer norm of every head, with a weight and a bias of each head's own.

    ``out[..., i, :] = (x[..., i, :] - mean) * rsqrt(var + eps) * weight[i] + bias[i]``, of the head's n elements

    Args:
        {_X}
        weight: ``W[h n]``, a float dtype of its own.
        bias: ``B[h n]``, a float dtype of its own.
        eps: added to the variance; a compile-time constant.

    Returns:
        ``T[*m h n]``, compact. Computed in float32, rounded once; deterministic.

    {_RAISES}

    Source: Cohere's Command R+, 2024; Ba, Kiros and Hinton, Layer Normalization, 2016.
    """,
)  # fmt: skip
