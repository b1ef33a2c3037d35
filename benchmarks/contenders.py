"""Who is measured. Every contender of an op takes the same tensors and returns the same outputs.

A contender that is not installed, or that has no such op, is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

EPS = 1e-6
Call = Callable[..., Any]
TORCH = ("torch eager", "torch.compile", "quack", "Liger", "ours (torch)")
JAX = ("XLA (jit)", "ours (JAX)")
ALL = TORCH + JAX


def make(contender: str, op: str) -> Call | None:
    """The contender's function for an op: tensors in declaration order to an output or a tuple of them."""
    makers = {
        "torch eager": _eager,
        "torch.compile": _compiled,
        "quack": _quack,
        "Liger": _liger,
        "ours (torch)": _ours_torch,
        "XLA (jit)": _xla,
        "ours (JAX)": _ours_jax,
    }
    try:
        return makers[contender](op)
    except ImportError:
        return None


def _eager(op: str) -> Call:
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype != x.dtype:  # F.rms_norm wants one dtype
            return (F.rms_norm(x.float(), x.shape[-1:], None, EPS) * weight.float()).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rmsnorm(total, weight).to(x.dtype), total

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    return {"rmsnorm": rmsnorm, "add_rmsnorm": add_rmsnorm, "silu_mul": silu_mul}[op]


def _compiled(op: str) -> Call:
    return torch.compile(_eager(op), fullgraph=True, dynamic=False)


def _quack(op: str) -> Call | None:
    from quack import rmsnorm

    def add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rmsnorm(x, weight, residual=residual, prenorm=True, eps=EPS)

    calls = {"rmsnorm": lambda x, weight: rmsnorm(x, weight, eps=EPS), "add_rmsnorm": add_rmsnorm}
    return calls.get(op)


def _liger(op: str) -> Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    # in_place=False: its default overwrites the incoming gradient, which others read after it.
    return {
        "rmsnorm": lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
        "add_rmsnorm": lambda x, r, weight: LigerFusedAddRMSNormFunction.apply(x, r, weight, EPS, 0.0, "llama", False),
        "silu_mul": lambda gate, up: LigerSiLUMulFunction.apply(gate, up),
    }[op]


def overwrites_inputs(contender: str, op: str) -> bool:
    """Liger's SwiGLU writes its gradients over its inputs: it needs copies of its own."""
    return contender == "Liger" and op == "silu_mul"


def _ours_torch(op: str) -> Call:
    import cute_ops_torch

    return _with_eps(getattr(cute_ops_torch, op), op)


def _ours_jax(op: str) -> Call:
    import cute_ops_jax

    return _with_eps(getattr(cute_ops_jax, op), op)


def _with_eps(function: Call, op: str) -> Call:
    return function if op == "silu_mul" else lambda *tensors: function(*tensors, eps=EPS)


def _xla(op: str) -> Call:
    import jax
    import jax.numpy as jnp

    def rmsnorm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        out = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
        return (out * weight.astype(jnp.float32)).astype(x.dtype)

    def add_rmsnorm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        total = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype)
        return rmsnorm(total, weight).astype(x.dtype), total

    def silu_mul(gate: Any, up: Any) -> Any:
        wide = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return wide.astype(gate.dtype)

    return {"rmsnorm": rmsnorm, "add_rmsnorm": add_rmsnorm, "silu_mul": silu_mul}[op]
