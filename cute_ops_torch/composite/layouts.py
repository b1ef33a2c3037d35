"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`."""

from collections.abc import Callable
from typing import Any

import torch

from cute_ops.composite.layouts import Layouts
from cute_ops.composite.public import published
from cute_ops_torch.library.modes import EXACT, transforms_active
from cute_ops_torch.library.remembered import remembered
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import register

Tensor = torch.Tensor
_KEPT: dict[Any, Tensor] = {}


def _kept(key: Any, make: Callable[[], Tensor], x: Tensor) -> Tensor:
    """A small constant of a device: to make one takes several launches. A trace, a mode or a CUDA graph, whose memory
    is its own, makes a constant of its own.
    """
    watched = torch.compiler.is_compiling() or type(x) not in EXACT or transforms_active()
    if watched or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    with torch.inference_mode(False):
        return remembered(_KEPT, (key, x.device), make)


_layouts = Layouts(
    torch,
    register,
    frequencies=lambda base, r, x: (base ** (torch.arange(r, dtype=torch.float64, device=x.device) / -r)).float(),
    places=lambda r, x: torch.arange(r, device=x.device),
    kept=_kept,
    constant=torch.detach,
    channels_last=lambda x: (
        x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    ),
)
group_norm = published(_layouts.group_norm, __name__, "Tensor", checked)
rope_from_positions = published(_layouts.rope_from_positions, __name__, "Tensor", checked)
