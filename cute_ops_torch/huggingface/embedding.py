"""Embeddings: torch's forward, with our gradient of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch.composite.embedding import embedding
from cute_ops_torch.huggingface.match import Replacement, by_source

# `forward` of Gemma's embedding: torch's, times `embed_scale`.
_SCALED = "382d858fe9dddb30"


def _embed(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    # Tables that ranks share (tensor parallelism) are DTensors, whose lookup is torch's.
    if not (torch.is_grad_enabled() and self.weight.requires_grad) or type(self.weight) is not nn.Parameter:
        return nn.Embedding.forward(self, input)
    return embedding(input, self.weight, self.padding_idx)


def _embed_scaled(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _embed(self, input_ids) * self.embed_scale.to(self.weight.dtype)
    return out


def _only_gathers(module: nn.Embedding) -> bool:
    return (
        module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
        and module.weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def _is_embedding(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is nn.Embedding and _only_gathers(module)


def _is_scaled(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and type(module).__mro__[1] is nn.Embedding and _only_gathers(module)


REPLACEMENTS = (
    Replacement("embedding", _is_embedding, lambda original: _embed),
    by_source("embedding", _SCALED, _embed_scaled, also=_is_scaled),
)
