"""Decoder layers: each residual add is fused with the product before it and with the norm that reads its sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface import attention, residual_norm, sums
from cute_ops_torch.huggingface.autograd_nodes import linear_add_rmsnorm, rmsnorm_and_residual, silu_mlp_add_rmsnorm
from cute_ops_torch.huggingface.bypass import can_bypass_linear, is_exporting, is_plain, parameter, runs, takes
from cute_ops_torch.huggingface.match import Forward, Replacement
from cute_ops_torch.huggingface.mlp import drops_product
from cute_ops_torch.huggingface.norm import LLAMA as LLAMA_NORM
from cute_ops_torch.huggingface.norm import llama_rmsnorm
from cute_ops_torch.huggingface.residual_norm import LlamaRMSNorm
from cute_ops_torch.huggingface.source import Parameters, source_digest

Tensor = torch.Tensor
# `forward` of LlamaDecoderLayer: attention, then MLP, each behind a norm and added to the residual stream.
_LLAMA = "0cd35fa51e4a7fb4"


class LlamaDecoderLayer(nn.Module):
    """The modules of Hugging Face's class of this name."""

    input_layernorm: LlamaRMSNorm
    self_attn: Any
    post_attention_layernorm: LlamaRMSNorm
    mlp: Any


def _make_forward(original: Any) -> Forward:
    """Its arguments have the names that they have in ``original``, which passes all but the first one to attention."""
    parameters = Parameters.of(original)
    (first,) = parameters.used

    def forward(self: LlamaDecoderLayer, *args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(args, kwargs)
        if given is None:
            return NotImplemented  # raises
        return run_layer(self, first, given)

    vars(forward)["__wrapped__"] = run_layer
    return forward


def run_layer(self: LlamaDecoderLayer, first: str, given: dict[str, Any]) -> Tensor:
    hidden_states = given[first]
    normed, residual = _norm_and_residual(self.input_layernorm, hidden_states)
    fused = normed.dtype == residual.dtype and _can_fuse(self.post_attention_layernorm, residual)
    without_output = attention.without_output(self.self_attn, normed) if fused else None
    given[first] = normed
    attended, _ = (self.self_attn if without_output is None else without_output)(**given)
    norm = self.post_attention_layernorm
    if without_output is not None and not (
        can_bypass_linear(attended, self.self_attn.o_proj) and _can_fuse(norm, residual)
    ):
        attended, without_output = self.self_attn.o_proj(attended), None  # a hook in the attention has changed them
    if without_output is not None:
        weight: Tensor = self.self_attn.o_proj.weight
        normed, residual = linear_add_rmsnorm(attended, weight, residual, norm.weight, norm.variance_epsilon)
    elif (shared := _shared_weight(norm, residual, attended)) is not None:
        normed, residual = functions.add_rmsnorm(attended, residual, shared, None, norm.variance_epsilon)
    else:
        residual = residual + attended
        normed = norm(residual)
    return _mlp_and_residual(self, normed, residual)


def _mlp_and_residual(layer: LlamaDecoderLayer, normed: Tensor, residual: Tensor) -> Tensor:
    """``residual + mlp(normed)``, with the norm that reads it attached where that is known."""
    after, mlp = None if torch.compiler.is_compiling() else residual_norm.next_norm(layer), layer.mlp
    if after is not None and not _can_fuse(after, residual):
        after = None
    if after is not None and normed.dtype == residual.dtype and drops_product(mlp, normed):
        weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        found = silu_mlp_add_rmsnorm(normed, *weights, residual, after)
        return residual_norm.attach(after, *found)
    out: Tensor = mlp(normed)
    if after is not None and _can_fuse(after, out):
        return residual_norm.add(out, residual, after)
    return sums.add(layer, (0, ()), residual, out)  # type: ignore[no-any-return]


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
    if not (torch.is_grad_enabled() and is_plain(x) and runs(norm, llama_rmsnorm)) or is_exporting():
        return False
    weight = parameter(norm, "weight")
    return weight is not None and (x.dtype, x.device) == (weight.dtype, weight.device) and takes(x, weight)


def _shared_weight(norm: nn.Module, residual: Tensor, attended: Tensor) -> Tensor | None:
    """The weight of a norm that is computed together with the add before it; None where they run one by one.

    Mixed dtypes promote step by step in the original.
    """
    weight = norm._parameters.get("weight") if runs(norm, llama_rmsnorm) else None
    if weight is None or not (residual.dtype == attended.dtype == weight.dtype and residual.shape == attended.shape):
        return None
    return weight if takes(residual, attended, weight) else None


def _is_llama_layer(layer: Any, model: nn.Module) -> bool:
    if source_digest(type(layer).forward) != _LLAMA:
        return False
    norm = layer.post_attention_layernorm
    return "forward" not in vars(norm) and source_digest(type(norm).forward) == LLAMA_NORM


REPLACEMENTS = (Replacement("add_rmsnorm", _is_llama_layer, _make_forward),)
