"""Eager attention, which computes its weights: their softmax runs on our op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface.bypass import declined, takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, rebind
from cute_ops_torch.huggingface.source import source_digest

Tensor = torch.Tensor
# `eager_attention_forward` of BERT: the softmax is in the dtype of the scores. transformers 5.0 cuts the mask to the
# number of keys.
_BERT = ("1355b8a74d8b8187", "1d3f7a03efb1ba57")
# The same of Llama: keys and values are repeated for the heads of their group, the softmax is in float32.
_LLAMA = ("3703dfb5640252f0", "898dcc7251219ad0")


def _make_forward(forward: Any) -> Forward:
    plain = forward.__globals__["eager_attention_forward"]
    repeat = plain.__globals__["repeat_kv"] if source_digest(plain) in _LLAMA else None

    def eager_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = module, query, key, value, attention_mask, scaling, dropout
        if torch.is_autocast_enabled(query.device.type):  # the output of its softmax is float32
            return plain(*given, **kwargs)  # type: ignore[no-any-return]
        if repeat is not None:
            key, value = (repeat(t, module.num_key_value_groups) for t in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * (query.size(-1) ** -0.5 if scaling is None else scaling)
        if attention_mask is not None:
            scores = scores + attention_mask[..., : key.shape[-2]]
        if not takes(scores):
            declined(module, scores)
            return plain(*given, **kwargs)  # type: ignore[no-any-return]
        weights = functions.softmax(scores).to(query.dtype)
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    vars(eager_attention_forward)["__wrapped__"] = plain  # by which other replacements know it
    return rebind(forward, eager_attention_forward=eager_attention_forward)


def _is_eager(module: nn.Module, model: nn.Module) -> bool:
    forward = innermost(type(module).forward)
    if forward is None or "eager_attention_forward" not in forward.__code__.co_names:
        return False
    eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    return eager and source_digest(forward.__globals__.get("eager_attention_forward")) in (*_BERT, *_LLAMA)


EAGER_ATTENTION = Replacement("softmax", _is_eager, _make_forward)
