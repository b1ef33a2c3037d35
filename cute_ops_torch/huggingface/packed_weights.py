"""Weights of linear layers that read the same input, one after another in one piece of memory.

They are then one weight to whoever wants one product instead of several, without a copy. Each stays the parameter that
it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Tensor = torch.Tensor


def lay_side_by_side(weights: Sequence[Tensor]) -> None:
    """Moves ``[rows, columns]`` weights together, unless some memory is not theirs alone: views of it would be lost."""
    first = weights[0]
    alike = all(
        type(w) is nn.Parameter
        and w.is_contiguous()
        and (w.ndim, w.shape[-1], w.dtype, w.device) == (2, first.shape[-1], first.dtype, first.device)
        for w in weights
    )
    if alike and as_one(weights) is None and all(map(_alone, weights)):
        parts = torch.cat([w.detach() for w in weights]).split([w.shape[0] for w in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part


def _alone(weight: Tensor) -> bool:
    """Whether all of a tensor's memory is its own, and nobody else's."""
    storage = weight.untyped_storage()
    # Two hold it: the tensor, and what we ask by.
    held = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return storage.nbytes() == weight.nbytes and held <= 2 and (weight.is_cuda or not weight.is_shared())


def as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows are those of the weights, one after another, if they lie like that."""
    first = weights[0]
    end = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return None
        end += weight.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # neighbours by chance
    return first.as_strided((sum(w.shape[0] for w in weights), first.shape[1]), (first.shape[1], 1))
