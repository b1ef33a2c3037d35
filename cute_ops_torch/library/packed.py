"""Matrices that lie one after the other in memory: a view is their concatenation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def packed_view(weights: Sequence[Tensor]) -> Tensor | None:
    """The concatenation of packed weights along their rows, as a view; None where they are not packed, and while
    torch.compile traces, which knows no addresses.
    """
    if torch.compiler.is_compiling():
        return None
    first = weights[0]
    end = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return None
        end += weight.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # neighbours by chance, in different storages
    return first.as_strided((sum(w.shape[0] for w in weights), first.shape[1]), (first.shape[1], 1))
