"""Embedding lookup, whose weight gradient is written in one pass: :mod:`cute_ops.composite.embedding`."""

from __future__ import annotations

import torch

from cute_ops.composite import embedding as declared
from cute_ops.composite.public import continued
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import define

Tensor = torch.Tensor
_embedding = define(declared.embedding).function


@checked
@continued(declared.DOC)
def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table: ``out = weight[index]``.

    An index that is no class is torch's own error: IndexError on the CPU, a failed assertion on a GPU.
    """
    return _embedding(index, weight, declared.padding(padding_idx, weight.shape))  # type: ignore[no-any-return]
