"""Rotary position embeddings, as Hugging Face's attention calls them."""

from __future__ import annotations

import inspect
import types

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface.match import source_digest

# `apply_rotary_pos_emb`: `x * cos + rotate_half(x) * sin` for q and k.
_APPLY = "6e071d28b2d6c73c"
# `rotate_half`: the halves of the last dim swapped, the second one negated.
_ROTATE_HALF = "a68a16140f32af85"


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = half_table(cos), half_table(sin)
    if unsqueeze_dim == 2:  # (batch, seqlen, heads, headdim)
        return functions.rope(q, cos, sin), functions.rope(k, cos, sin)
    # (batch, heads, seqlen, headdim), as views of memory that has positions before heads
    q, k = (functions.rope(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    return q, k


def half_table(table: torch.Tensor) -> torch.Tensor:
    """One of the two equal halves of a table of cosines or sines, without a batch dim of one."""
    table = table[..., : table.shape[-1] // 2]
    return table[0] if table.shape[0] == 1 else table


def applies_rotary(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module's ``forward`` calls ``apply_rotary_pos_emb``, on tables whose halves are equal."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return False
    tables = [type(m).forward for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    return (
        source_digest(forward.__globals__.get("apply_rotary_pos_emb")) == _APPLY
        and source_digest(forward.__globals__.get("rotate_half")) == _ROTATE_HALF
        and bool(tables)
        and all("emb = torch.cat((freqs, freqs), dim=-1)" in inspect.getsource(inspect.unwrap(t)) for t in tables)
    )
