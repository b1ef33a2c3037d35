"""RMS norms, layer norms and group norms."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface import residual_norm
from cute_ops_torch.huggingface.bypass import declined, takes
from cute_ops_torch.huggingface.match import Replacement, by_source
from cute_ops_torch.huggingface.residual_norm import LlamaRMSNorm, Norm
from cute_ops_torch.huggingface.source import source_digest

# `forward` of LlamaRMSNorm: computed in float32 and rounded to the input's dtype, then multiplied by the weight.
LLAMA = "8bc5134cf59001ea"
# `forward` of GemmaRMSNorm and the `_norm` that it calls: multiplied by one plus the weight in float32, then rounded.
_GEMMA, _GEMMA_INNER = "c311ca8f9a707b5e", "50ca4c939420093f"


def llama_rmsnorm(self: LlamaRMSNorm, hidden_states: torch.Tensor) -> Any:
    if (normed := residual_norm.pop(self, hidden_states)) is not None:
        return normed
    weight = self.weight
    if not _fits(hidden_states, weight):
        return declined(self, hidden_states, weight)
    out = functions.rmsnorm(hidden_states, weight, None, self.variance_epsilon)
    return out.to(torch.promote_types(out.dtype, weight.dtype))  # to which the original's product promotes


def _gemma_rmsnorm(self: Any, x: torch.Tensor) -> Any:
    if (normed := residual_norm.pop(self, x)) is not None:
        return normed
    weight = self.weight
    return functions.rmsnorm(x, weight, None, self.eps, 1.0) if _fits(x, weight) else declined(self, x, weight)


def _layernorm(self: nn.LayerNorm, input: torch.Tensor) -> Any:
    if (normed := residual_norm.pop(self, input)) is not None:
        return normed
    if torch.is_autocast_enabled(input.device.type):
        return NotImplemented  # the original's output is float32 under autocast
    weight, bias = self.weight, self.bias
    if input.ndim and not input.is_nested and input.stride(-1) != 1:  # of a convolution; torch copies it, too
        input = input.contiguous()
    if len(self.normalized_shape) != 1 or not takes(input, weight, bias):
        return declined(self, input, weight, bias)
    return functions.layernorm(input, weight, bias, self.eps)


def group_norm_forward(self: nn.GroupNorm, input: torch.Tensor) -> Any:
    if torch.is_autocast_enabled(input.device.type):
        return NotImplemented  # the original's output is float32 under autocast
    if not takes_image(self, input):
        return declined(self, input, self.weight, self.bias)
    return run_group_norm(self, input)


def run_group_norm(norm: nn.GroupNorm, x: torch.Tensor, activation: str = "none") -> Any:
    from cute_ops_torch.composite.layouts import group_norm  # start-up time: few models have one, and its ops are many

    return group_norm(x, norm.weight, norm.bias, norm.num_groups, norm.eps, activation=activation)


def takes_image(norm: nn.GroupNorm, x: torch.Tensor) -> bool:
    """Whether our op takes a group norm's input and parameters, outside of autocast."""
    if torch.is_autocast_enabled(x.device.type) or x.ndim < 2 or not x.numel():
        return False
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return takes(x.movedim(1, -1) if last else x, norm.weight, norm.bias)


def _with_group_norm(original: Any) -> Any:
    import_module("cute_ops_torch.composite.layouts")  # before the first call, which may be traced
    return group_norm_forward


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether our op takes a norm's input and weight, which has an element for each column."""
    return x.shape[-1:] == weight.shape and takes(x, weight)


def _is_layernorm(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and _is_number(module.eps)


def _is_number(eps: Any) -> bool:
    """Whether ``eps`` is a number of Python: tensors and NumPy's scalars are tensors in a graph, which ops refuse."""
    return type(eps) in (float, int)


REPLACEMENTS = (
    by_source(
        "rmsnorm",
        LLAMA,
        llama_rmsnorm,
        also=lambda norm: _is_number(norm.variance_epsilon),
        norm=lambda norm: Norm("rmsnorm", norm.weight, None, norm.variance_epsilon, 0.0),
    ),
    by_source(
        "rmsnorm",
        _GEMMA,
        _gemma_rmsnorm,
        also=lambda norm: source_digest(type(norm)._norm) == _GEMMA_INNER and _is_number(norm.eps),
        norm=lambda norm: Norm("rmsnorm", norm.weight, None, norm.eps, 1.0),
    ),
    Replacement(
        "layernorm",
        _is_layernorm,
        lambda original: _layernorm,
        norm=lambda norm: Norm("layernorm", norm.weight, norm.bias, norm.eps, 0.0),
    ),
    Replacement("group_norm", lambda module, model: type(module) is nn.GroupNorm, _with_group_norm),
)
