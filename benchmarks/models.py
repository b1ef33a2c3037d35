"""Losses, routing, norms, rotations and convolutions of models written out for torch and for jax.numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from cute_ops.composite.group_norm import group_norm_first, group_norm_last
from cute_ops.composite.rope_at import rope_at
from cute_ops.declaration.op import Op
from cute_ops.ops.conv.channels_first import causal_conv1d_channels_first
from cute_ops.ops.norm.add_layernorm import add_layernorm
from cute_ops.ops.norm.dropout_add_norm import dropout_add_layernorm, dropout_add_rmsnorm
from cute_ops.ops.norm.head_norm import head_layernorm, head_rmsnorm
from cute_ops.ops.norm.l2norm import l2norm
from cute_ops.ops.optim.adamw_stochastic import adamw_stochastic
from cute_ops.ops.quantize.scaled_fp8 import scaled_fp8
from cute_ops.ops.reduction.cross_entropy_metrics import cross_entropy_metrics, cross_entropy_of_slice
from cute_ops.ops.reduction.divergence import divergence
from cute_ops.ops.reduction.soft_cross_entropy import soft_cross_entropy
from cute_ops.ops.rotary.rope import rope_fp8, rope_packed
from cute_ops.ops.routing.permute import permute_tokens, unpermute_tokens
from cute_ops.ops.routing.route import route
from cute_ops.ops.routing.topk import topk

OPS: tuple[Op, ...] = (
    topk, route, permute_tokens, unpermute_tokens, l2norm, rope_at, divergence, soft_cross_entropy,
    cross_entropy_metrics, add_layernorm, head_rmsnorm, head_layernorm, group_norm_first, group_norm_last, rope_packed,
    causal_conv1d_channels_first, scaled_fp8, cross_entropy_of_slice, dropout_add_rmsnorm, dropout_add_layernorm,
    rope_fp8, adamw_stochastic,
)  # fmt: skip
L2_EPS, EPS = 1e-6, 1e-5
Calls = dict[str, Callable[..., Any]]


def in_torch(attrs: Mapping[str, Any]) -> Calls:
    """By op name, for these attributes."""
    k, smoothing, beta = attrs.get("k", 1), attrs.get("label_smoothing", 0.0), attrs.get("beta", 0.5)

    def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, index = torch.topk(x, k)
        return values, index.int()

    def routed(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        p = logits.float().softmax(-1)
        weights, index = torch.topk(p, k)
        load = torch.zeros_like(p).scatter_(-1, index, 1.0).mean(0)
        balance = (p.mean(0) * load).sum() * p.shape[-1]
        return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), index.int(), balance

    def permuted(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = index.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=attrs["experts"]).cumsum(0)
        return x[order // index.shape[1]], order.argsort().view(index.shape).int(), ends.int()

    def unpermuted(y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (y[place.long()].float() * weights.float()[..., None]).sum(1).to(y.dtype)

    def unit(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, s = (table[..., None, :].float() for table in (cos, sin))
        a, b = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :].float()
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    def rope_at(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotated(x, cos[positions], sin[positions]).to(x.dtype)

    def divergences(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        q, p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
        mixed = torch.log(beta * p.exp() + (1 - beta) * q.exp())
        return (beta * p.exp() * (p - mixed) + (1 - beta) * q.exp() * (q - mixed)).sum(-1)

    def soft(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), target.float(), reduction="none", label_smoothing=smoothing)

    def metrics(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = logits.float()
        loss = F.cross_entropy(wide, target, weight.float(), reduction="none", label_smoothing=smoothing)
        lse = wide.logsumexp(-1)
        return loss, lse, wide.gather(-1, target[:, None])[:, 0] - lse, logits.argmax(-1).int()

    def of_slice(logits: torch.Tensor, target: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = logits.float()
        lse = torch.logaddexp(wide.logsumexp(-1), others)
        log_prob = wide.gather(-1, target[:, None])[:, 0] - lse
        return -log_prob, lse, log_prob, logits.argmax(-1).int()

    def add_layernorm(x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x + residual
        return F.layer_norm(h, h.shape[-1:], *parameters, eps=EPS), h

    def head_rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + L2_EPS) * weight.float()).to(x.dtype)

    def head_layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], eps=EPS) * weight.float() + bias.float()).to(x.dtype)

    def group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = F.group_norm(x, attrs.get("groups", 32), weight, bias, EPS)
        return F.silu(out) if attrs.get("activation") == "silu" else out

    def group_norm_last(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return group_norm(x.transpose(1, 2), weight, bias).transpose(1, 2)

    def rope_packed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = attrs.get("heads", 0) or x.shape[-2]
        return torch.cat([rotated(x[..., :heads, :], cos, sin).to(x.dtype), x[..., heads:, :]], -2)

    def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        width = weight.shape[-1]
        out = F.conv1d(x, weight[:, None], bias, padding=width - 1, groups=x.shape[1])[..., : x.shape[-1]]
        return F.silu(out) if attrs.get("activation") == "silu" else out

    def rope_fp8(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scaled(rotated(x, cos, sin), scale)

    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    return {
        "add_layernorm": add_layernorm, "head_rmsnorm": head_rmsnorm, "head_layernorm": head_layernorm,
        "group_norm_first": group_norm, "group_norm_last": group_norm_last, "rope_packed": rope_packed,
        "causal_conv1d_channels_first": convolved, "scaled_fp8": scaled, "rope_fp8": rope_fp8,
        "cross_entropy_of_slice": of_slice,
        "topk": largest, "route": routed, "permute_tokens": permuted, "unpermute_tokens": unpermuted, "l2norm": unit,
        "rope_at": rope_at, "divergence": divergences, "soft_cross_entropy": soft, "cross_entropy_metrics": metrics,
    }  # fmt: skip


def in_quack(attrs: Mapping[str, Any]) -> Calls:
    def largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from quack.topk import topk as of_quack

        values, index = of_quack(x, attrs.get("k", 1))
        return values, index.int()

    return {"topk": largest}


def in_jax(attrs: Mapping[str, Any]) -> Calls:
    """By op name, for these attributes."""
    import jax
    import jax.numpy as jnp

    k, smoothing, beta = attrs.get("k", 1), attrs.get("label_smoothing", 0.0), attrs.get("beta", 0.5)

    def unit(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + L2_EPS)).astype(x.dtype)

    def divergences(student: Any, teacher: Any) -> Any:
        q, p = (jax.nn.log_softmax(x.astype(jnp.float32), -1) for x in (student, teacher))
        mixed = jnp.log(beta * jnp.exp(p) + (1 - beta) * jnp.exp(q))
        return jnp.sum(beta * jnp.exp(p) * (p - mixed) + (1 - beta) * jnp.exp(q) * (q - mixed), -1)

    def soft(logits: Any, target: Any) -> Any:
        logs = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
        return -jnp.sum(((1 - smoothing) * target.astype(jnp.float32) + smoothing / logs.shape[-1]) * logs, -1)

    return {
        "topk": lambda x: jax.lax.top_k(x, k),
        "l2norm": unit,
        "divergence": divergences,
        "soft_cross_entropy": soft,
    }
