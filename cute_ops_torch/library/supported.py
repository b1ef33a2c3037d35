"""Which tensors our ops compute with, where others compute with the rest."""

from __future__ import annotations

import torch

from cute_ops_torch.library.modes import EXACT

DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
# Subclasses of tensors through which our ops run; others (quantized, masked, nested) know torch's ops only.
_SEEN_THROUGH = frozenset(("DTensor", "FakeTensor", "AsyncCollectiveTensor"))


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether our ops compute with tensors of a dim or more: these dtypes and devices, the last dim contiguous."""
    sharded = plain = False
    for x in tensors:
        if x is None:
            continue
        if type(x) in EXACT:
            plain = True
        elif type(x).__name__ in _SEEN_THROUGH:
            sharded = sharded or type(x).__name__ == "DTensor"
        else:
            return False
        if x.dtype not in DTYPES or x.is_nested:
            return False
        if not ((x.is_contiguous() or x.stride(-1) == 1) and (x.is_cuda or x.is_cpu or x.is_meta)):
            return False
    return not (sharded and plain)  # torch refuses most products of a DTensor and a tensor
