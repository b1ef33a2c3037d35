"""Decoder layers: each residual add is fused with the product before it and with the norm that reads its sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface import attention, residual_norm
from cute_ops_torch.huggingface.autograd_nodes import linear_add_rmsnorm, rmsnorm_and_residual, silu_mlp_add_rmsnorm
from cute_ops_torch.huggingface.bypass import has_hooks, is_eager, is_unobserved
from cute_ops_torch.huggingface.match import by_source, source_digest
from cute_ops_torch.huggingface.mlp import drops_product
from cute_ops_torch.huggingface.norm import LLAMA as LLAMA_NORM
from cute_ops_torch.huggingface.norm import llama_rmsnorm
from cute_ops_torch.huggingface.residual_norm import LlamaRMSNorm

Tensor = torch.Tensor
# `forward` of LlamaDecoderLayer: attention, then MLP, each behind a norm and added to the residual stream.
_LLAMA = "bb4a23cffe10017e"


class LlamaDecoderLayer(nn.Module):
    """The modules of Hugging Face's class of this name."""

    input_layernorm: LlamaRMSNorm
    self_attn: Any
    post_attention_layernorm: LlamaRMSNorm
    mlp: Any


def layer_forward(
    self: LlamaDecoderLayer, hidden_states: Tensor, attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None, past_key_values: Any = None, use_cache: bool | None = False,
    position_embeddings: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    normed, residual = _norm_and_residual(self.input_layernorm, hidden_states)
    norm = self.post_attention_layernorm
    fused = normed.dtype == residual.dtype and _can_fuse(norm, residual)
    without_output = attention.without_output(self.self_attn, normed) if fused else None
    attended, _ = (without_output or self.self_attn)(
        hidden_states=normed, attention_mask=attention_mask, position_ids=position_ids,
        past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
    )  # fmt: skip
    if without_output:
        weight: Tensor = self.self_attn.o_proj.weight
        normed, residual = linear_add_rmsnorm(attended, weight, residual, norm.weight, norm.variance_epsilon)
    elif residual.dtype == attended.dtype == norm.weight.dtype and not has_hooks(norm):
        normed, residual = functions.add_rmsnorm(attended, residual, norm.weight, None, norm.variance_epsilon)
    else:  # mixed dtypes promote step by step in the original; hooks need the module to be called
        residual = residual + attended
        normed = norm(residual)
    return _mlp_and_residual(self, normed, residual)


def _mlp_and_residual(layer: LlamaDecoderLayer, normed: Tensor, residual: Tensor) -> Tensor:
    """``residual + mlp(normed)``, with the norm that reads it attached where that is known."""
    after, mlp = None if torch.compiler.is_compiling() else residual_norm.next_norm(layer), layer.mlp
    if after is not None and not _can_fuse(after, residual):
        after = None
    if after and normed.dtype == residual.dtype and drops_product(mlp, normed) and is_unobserved(mlp):
        weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        found = silu_mlp_add_rmsnorm(normed, *weights, residual, after.weight, after.variance_epsilon)
        return residual_norm.attach(after, *found)
    out: Tensor = mlp(normed)
    return residual_norm.add(out, residual, after) if after and _can_fuse(after, out) else residual + out


def _norm_and_residual(norm: LlamaRMSNorm, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the residual stream, and the stream."""
    if not _can_fuse(norm, residual):
        return norm(residual), residual
    normed = residual_norm.pop(norm, residual)
    if normed is None:
        return rmsnorm_and_residual(residual, norm.weight, norm.variance_epsilon)
    return normed, residual


def _can_fuse(norm: nn.Module, x: Tensor) -> bool:
    """Whether a norm of ``x`` may be fused with another use of ``x``, instead of being called."""
    return (
        type(norm).forward is llama_rmsnorm
        and torch.is_grad_enabled()
        and is_eager(x)
        and type(norm.weight) is nn.Parameter
        and (x.dtype, x.device) == (norm.weight.dtype, norm.weight.device)
        and is_unobserved(norm)
    )


def _has_llama_norm(layer: LlamaDecoderLayer) -> bool:
    norm = layer.post_attention_layernorm
    return "forward" not in vars(norm) and source_digest(type(norm).forward) == LLAMA_NORM


REPLACEMENTS = (by_source("add_rmsnorm", _LLAMA, layer_forward, also=_has_llama_norm),)
