"""``torch.nn.MultiheadAttention``: its heads, views of one product where they can be, are attended to by our op."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from cute_ops_torch.composite.multi_head import MultiHead, multi_head_attention
from cute_ops_torch.composite.scaled_dot_product import computes, scaled_dot_product_attention
from cute_ops_torch.huggingface.bypass import takes
from cute_ops_torch.huggingface.match import Replacement
from cute_ops_torch.huggingface.source import caller

Tensor = torch.Tensor


# The arguments behind the three tensors.
_DEFAULTS = {
    "key_padding_mask": None, "need_weights": True, "attn_mask": None, "average_attn_weights": True, "is_causal": False,
}  # fmt: skip


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def _forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> Any:
    """The result without weights, in 16 bits, of a call without dropout whose only mask is said to be causal."""
    by_place = dict(zip(_DEFAULTS, more, strict=False))
    said = _DEFAULTS | by_place | options
    twice = any(name in options for name in by_place)
    if twice or len(by_place) < len(more) or len(said) > len(_DEFAULTS):
        return NotImplemented  # raises
    is_causal = said["is_causal"]
    masked = said["key_padding_mask"] is not None or (said["attn_mask"] is not None) is not is_causal
    if said["need_weights"] or masked or (self.training and self.dropout > 0):
        return NotImplemented
    weights, last = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight), self.out_proj
    given = MultiHead(
        query, key, value, self.num_heads, self.in_proj_weight, self.in_proj_bias, weights, last.weight, last.bias,
        causal=is_causal, batch_first=self.batch_first,
    )  # fmt: skip
    return (multi_head_attention(given, _attend), None) if _fits(self, given) else NotImplemented


def _fits(module: Any, given: MultiHead) -> bool:
    """Whether tensors are those that a module is for, and of kinds that our attention takes."""
    query, key, value = given[:3]
    tensors = query, key, value, given.in_weight, given.in_bias, *given.weights, given.out_weight, given.out_bias
    if not (takes(*tensors) and computes(query)):
        return False
    size, lead = module.head_dim, key.shape[:-1]
    batch = slice(0, 0) if query.ndim == 2 else slice(0, 1) if module.batch_first else slice(1, 2)
    alike = query.ndim == key.ndim == value.ndim and query.ndim in (2, 3) and value.shape[:-1] == lead
    columns = (query.shape[-1], key.shape[-1], value.shape[-1]) == (module.embed_dim, module.kdim, module.vdim)
    heads = 16 <= size <= 256 and size % 16 == 0
    return alike and columns and heads and query.shape[batch] == lead[batch]


def why_left(module: nn.MultiheadAttention) -> str:
    """Why a module of this class, or of one that is derived from it, goes on running its own ``forward``."""
    if not _is_plain(module):
        return "its forward is not torch.nn's"
    return "it attends to keys of its own" if _adds_keys(module) else "its weights are asked for where it is called"


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def _adds_keys(module: Any) -> bool:
    return module.bias_k is not None or module.bias_v is not None or bool(module.add_zero_attn)


def _matches(module: nn.Module, model: nn.Module) -> bool:
    return _is_plain(module) and not _adds_keys(module) and not _is_asked_for_weights(module, model)


def _is_asked_for_weights(module: nn.Module, model: nn.Module) -> bool:
    """Whether the module around another one always asks it for weights, which is the default."""
    around = caller(module, model)
    calls = (
        [n for n in ast.walk(around[0]) if isinstance(n, ast.Call) and ast.unparse(n.func) == around[1]]
        if around
        else []
    )
    return bool(calls) and not any(map(_says_if_weights, calls))


def _says_if_weights(call: ast.Call) -> bool:
    """Whether a call may give ``need_weights``, the fifth argument."""
    named = any(keyword.arg in (None, "need_weights") for keyword in call.keywords)
    return named or len(call.args) > 4 or any(isinstance(arg, ast.Starred) for arg in call.args)


MULTI_HEAD = Replacement("attention", _matches, lambda original: _forward)
