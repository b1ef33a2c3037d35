"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`."""

import torch

from cute_ops.composite.layouts import Layouts
from cute_ops.composite.public import published
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import register

_layouts = Layouts(
    register,
    lambda x: x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last),
)
group_norm = published(_layouts.group_norm, __name__, "Tensor", checked)
