"""Row functions by expression, and the same in torch and JAX: what generated kernels are measured by.

    python benchmarks/device_time.py --out out/benchmarks --ops rmsnorm softmax row_rms row_softmax \
        row_capped_log_softmax row_unit row_gated_rms
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from cute_ops import fused

EPS, CAP = 1e-6, 30.0
ROW = {"axis": -1, "keepdims": True}


def row_rms(xp: Any, x: Any, weight: Any) -> Any:
    """``x * rsqrt(mean(x^2) + eps) * weight``"""
    return x * xp.rsqrt(xp.mean(x * x, **ROW) + EPS) * weight


def row_softmax(xp: Any, x: Any) -> Any:
    """``softmax(x)``"""
    e = xp.exp(x - xp.max(x, **ROW))
    return e / xp.sum(e, **ROW)


def row_capped_log_softmax(xp: Any, x: Any) -> Any:
    """``log_softmax(cap * tanh(x / cap))``"""
    capped = CAP * xp.tanh(x / CAP)
    shifted = capped - xp.max(capped, **ROW)
    return shifted - xp.log(xp.sum(xp.exp(shifted), **ROW))


def row_unit(xp: Any, x: Any) -> Any:
    """``x / |x|``"""
    return x * xp.rsqrt(xp.sum(x * x, **ROW) + EPS)


def row_gated_rms(xp: Any, x: Any, weight: Any) -> Any:
    """The RMS norm of ``silu(gate) * up``."""
    n = x.shape[-1] // 2
    y = xp.silu(x[..., :n]) * x[..., n:]
    return y * xp.rsqrt(xp.mean(y * y, **ROW) + EPS) * weight


TILE, WEIGHTED = {"x": "*m n"}, {"x": "*m n", "weight": "n"}
OPS = (
    fused(row_rms, operands=WEIGHTED), fused(row_softmax, operands=TILE), fused(row_capped_log_softmax, operands=TILE),
    fused(row_unit, operands=TILE), fused(row_gated_rms, operands={"x": "*m 2n", "weight": "n"}),
)  # fmt: skip
NAMES = [op.name for op in OPS]


def in_torch() -> dict[str, Callable[..., Any]]:
    """By name: what a user of torch writes."""

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def gated_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return rms(F.silu(gate) * up, weight.float()).to(x.dtype)

    def unit(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)

    return {
        "row_rms": rms, "row_softmax": lambda x: F.softmax(x, -1), "row_unit": unit, "row_gated_rms": gated_rms,
        "row_capped_log_softmax": lambda x: F.log_softmax(CAP * torch.tanh(x.float() / CAP), -1).to(x.dtype),
    }  # fmt: skip


def in_jax() -> dict[str, Callable[..., Any]]:
    """By name: what a user of JAX writes."""
    import jax
    import jax.numpy as jnp

    def scaled(wide: Any, squares: Any) -> Any:
        return wide * jax.lax.rsqrt(squares(wide * wide, axis=-1, keepdims=True) + EPS)

    def rms(x: Any, weight: Any) -> Any:
        return (scaled(x.astype(jnp.float32), jnp.mean) * weight.astype(jnp.float32)).astype(x.dtype)

    def gated_rms(x: Any, weight: Any) -> Any:
        gate, up = jnp.split(x.astype(jnp.float32), 2, -1)
        return rms(jax.nn.silu(gate) * up, weight).astype(x.dtype)

    def capped(x: Any) -> Any:
        return jax.nn.log_softmax(CAP * jnp.tanh(x.astype(jnp.float32) / CAP), -1).astype(x.dtype)

    return {
        "row_rms": rms, "row_gated_rms": gated_rms, "row_capped_log_softmax": capped,
        "row_softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype),
        "row_unit": lambda x: scaled(x.astype(jnp.float32), jnp.sum).astype(x.dtype),
    }  # fmt: skip
