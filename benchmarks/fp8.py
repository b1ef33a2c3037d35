"""The fp8 ops written out for torch and for jax.numpy: rowwise, or by blocks that divide a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

LARGEST, LEAST_SCALE = 448.0, 2.0**-126
Calls = dict[str, Callable[..., Any]]


def in_torch(attrs: Mapping[str, Any], eps: float) -> Calls:
    """By op name, for these attributes."""
    block = attrs.get("block", 0)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        rows = wide.unflatten(-1, (-1, block)) if block else wide
        scale = (rows.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
        out = (rows / scale).to(torch.float8_e4m3fn)
        return (out.flatten(-2), scale.squeeze(-1)) if block else (out, scale)

    def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        return quantize(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

    def add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + residual
        return *rmsnorm(total, weight), total

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(F.silu(gate.float()) * up.float())

    return {
        "quantize_fp8": quantize,
        "rmsnorm_fp8": rmsnorm,
        "add_rmsnorm_fp8": add_rmsnorm,
        "silu_mul_fp8": silu_mul,
    }


def in_jax(attrs: Mapping[str, Any], eps: float) -> Calls:
    """By op name, for these attributes."""
    import jax
    import jax.numpy as jnp

    block = attrs.get("block", 0)

    def quantize(x: Any) -> tuple[Any, Any]:
        wide = x.astype(jnp.float32)
        rows = wide.reshape(*wide.shape[:-1], -1, block) if block else wide
        scale = jnp.maximum(jnp.max(jnp.abs(rows), axis=-1, keepdims=True) / LARGEST, LEAST_SCALE)
        out = (rows / scale).astype(jnp.float8_e4m3fn)
        return (out.reshape(x.shape), scale[..., 0]) if block else (out, scale)

    def rmsnorm(x: Any, weight: Any) -> tuple[Any, Any]:
        wide = x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return quantize(wide * rstd * weight.astype(jnp.float32))

    def add_rmsnorm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        total = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
        return *rmsnorm(total, weight), total

    def silu_mul(gate: Any, up: Any) -> tuple[Any, Any]:
        return quantize(jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32))

    return {
        "quantize_fp8": quantize,
        "rmsnorm_fp8": rmsnorm,
        "add_rmsnorm_fp8": add_rmsnorm,
        "silu_mul_fp8": silu_mul,
    }
