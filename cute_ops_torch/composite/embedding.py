"""Embedding lookup, whose weight gradient is written in one pass: :mod:`cute_ops.composite.embedding`."""

from __future__ import annotations

import torch

from cute_ops.composite import embedding as declared
from cute_ops.composite.public import continued
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import define

Tensor = torch.Tensor
_embedding = define(declared.embedding).function
_sorted_bwd = define(sorted_embedding_bwd).function


@checked
@continued(declared.DOC)
def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table: ``out = weight[index]``.

    An index that is no class is torch's own error: IndexError on the CPU, a failed assertion on a GPU.
    """
    return _embedding(index, weight, declared.padding(padding_idx, weight.shape))  # type: ignore[no-any-return]


def add_gradient_(total: Tensor, index: Tensor, dout: Tensor, padding_idx: int) -> None:
    """``total += embedding_bwd(index, total, dout, padding_idx)``, which reads and writes the rows of tokens alone.

    Each is rounded as the sum of two arrays is: the sum over the tokens of a class, then the sum with ``total``.
    """
    count, tokens = total.shape[0], index.numel()
    if not tokens:
        return
    key = index.reshape(-1).to(torch.int32)
    kept = None
    if padding_idx >= 0:
        key = torch.where(key == padding_idx, count, key)
        kept = (key < count).sum(dtype=torch.int32)
    key, order = key.sort(stable=True)
    # Classes that occur, numbered. What is left of the numbers has no tokens, and stands for the last of them.
    number = torch.zeros_like(key)
    torch.cumsum(key[1:] != key[:-1], 0, dtype=torch.int32, out=number[1:])
    ends = torch.searchsorted(
        number, torch.arange(tokens, dtype=torch.int32, device=key.device), right=True, out_int32=True
    )
    if kept is not None:
        ends = torch.minimum(ends, kept)
    last = (ends - 1).clamp_(min=0)
    classes = key[last].clamp_(max=count - 1).to(torch.int64)
    sums = _sorted_bwd(ends, number, order, dout.reshape(tokens, -1))
    # A class that is written several times gets the same numbers each time.
    total.index_copy_(0, classes, total[classes] + sums[number[last]])


def _add_gradient(total: Tensor, index: Tensor, dout: Tensor, padding_idx: int) -> Tensor:
    total = total.clone()
    add_gradient_(total, index, dout, padding_idx)
    return total


# Ops of graphs that Inductor compiles.
_library = torch.library.Library("cute", "FRAGMENT")
_given = "Tensor index, Tensor dout, int padding_idx"
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(f"add_embedding_gradient(Tensor total, {_given}) -> Tensor", tags=_tags)
_library.define(f"add_embedding_gradient_(Tensor(a!) total, {_given}) -> ()", tags=_tags)
_library.impl("add_embedding_gradient", _add_gradient, "CompositeExplicitAutograd")
_library.impl("add_embedding_gradient_", add_gradient_, "CompositeExplicitAutograd")
register_fake(_library, "add_embedding_gradient", lambda total, *_: torch.empty_like(total))
register_fake(_library, "add_embedding_gradient_", lambda *_: None)
