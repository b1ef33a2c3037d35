"""Embeddings: torch's forward, with our gradient of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch.composite.embedding import embedding
from cute_ops_torch.huggingface.bypass import declined, parameter, takes
from cute_ops_torch.huggingface.match import Replacement, by_source

# `forward` of Gemma's embedding: torch's, times `embed_scale`.
_SCALED = "382d858fe9dddb30"


def _embed(self: nn.Embedding, input: torch.Tensor) -> Any:
    weight = parameter(self, "weight")
    # Tables that ranks share (tensor parallelism) are DTensors, whose lookup is torch's.
    if weight is None or not (torch.is_grad_enabled() and weight.requires_grad and _only_gathers(self)):
        return NotImplemented
    if not takes(weight):
        return declined(self, weight)
    return embedding(input, weight, self.padding_idx)


def _embed_scaled(self: Any, input_ids: torch.Tensor) -> Any:
    out = _embed(self, input_ids)
    return out if out is NotImplemented else out * self.embed_scale.to(self.weight.dtype)


def _only_gathers(module: nn.Embedding) -> bool:
    return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _is_embedding(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is nn.Embedding and _only_gathers(module) and takes(module.weight)


def _is_scaled(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding) or type(module).__mro__[1] is not nn.Embedding:
        return False
    return _only_gathers(module) and takes(module.weight)


REPLACEMENTS = (
    Replacement("embedding", _is_embedding, lambda original: _embed),
    by_source("embedding", _SCALED, _embed_scaled, also=_is_scaled),
)
