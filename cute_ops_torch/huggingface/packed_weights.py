"""Pack the weights of linear layers that read the same input: one after another in the same memory.

A view then is their concatenation, so that one matrix product takes the place of several. Each stays the parameter
that it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cute_ops_torch.library.packed import packed_view

Tensor = torch.Tensor


def pack(weights: Sequence[Tensor]) -> None:
    """Move ``[rows, columns]`` weights to one piece of memory; none where one shares its memory, with views of it."""
    first = weights[0]
    alike = all(
        type(w) is nn.Parameter
        and w.is_contiguous()
        and (w.ndim, w.shape[-1], w.dtype, w.device) == (2, first.shape[-1], first.dtype, first.device)
        for w in weights
    )
    if alike and packed_view(weights) is None and all(map(_owns_memory, weights)):
        packed = torch.cat([w.detach() for w in weights])
        for weight, rows in zip(weights, torch.split(packed, [w.shape[0] for w in weights]), strict=True):
            weight.data = rows


def _owns_memory(weight: Tensor) -> bool:
    """Whether a tensor uses all of its storage, and no other tensor or process uses it."""
    storage = weight.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)  # the weight, and `storage` here
    shared = not weight.is_cuda and weight.is_shared()
    return storage.nbytes() == weight.nbytes and uses <= 2 and not shared
