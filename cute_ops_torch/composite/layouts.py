"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`."""

import torch

from cute_ops.composite.layouts import Layouts
from cute_ops.composite.public import published
from cute_ops_torch.library.remembered import constant_of_device
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import register

_layouts = Layouts(
    torch,
    register,
    frequencies=lambda base, r, x: (base ** (torch.arange(r, dtype=torch.float64, device=x.device) / -r)).float(),
    places=lambda r, x: torch.arange(r, dtype=torch.int32, device=x.device),
    float32=torch.Tensor.float,
    kept=constant_of_device,
    constant=torch.detach,
    turned=lambda x: x.movedim(0, -1),
    array=lambda x: x,
    channels_last=lambda x: (
        x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    ),
)
group_norm = published(_layouts.group_norm, __name__, "Tensor", checked)
rope_from_positions = published(_layouts.rope_from_positions, __name__, "Tensor", checked)
