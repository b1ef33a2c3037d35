"""Multiply a gradient by a scalar: the backward of ``linear_cross_entropy``, whose gradients its forward computed."""

from __future__ import annotations

import torch

from cute_ops_torch.host.modes import EXACT
from cute_ops_torch.library.inplace import inplace_gradient
from cute_ops_torch.registry import family

Tensor = torch.Tensor


def scale(gradient: Tensor, dloss: Tensor) -> Tensor:
    """``gradient * dloss``, in float32, rounded once."""
    row = _as_row(gradient)
    if row is None:
        return (gradient.float() * dloss).to(gradient.dtype)
    _, run, _ = family("cute", "scale")
    return run(row, dloss.view(1)).as_strided(gradient.shape, gradient.stride())  # type: ignore[no-any-return]


def scale_(gradient: Tensor, dloss: Tensor) -> Tensor:
    """The same in place. Where dloss is one, the kernel moves nothing: only the device needs to know its value."""
    row = _as_row(gradient)
    if row is None or type(dloss) not in EXACT:
        return gradient.copy_(scale(gradient, dloss))
    inplace_gradient(*family("cute", "scale"))(row, dloss.view(1))
    return gradient


def _as_row(tensor: Tensor) -> Tensor | None:
    """All elements as one row, in the order of memory, so that one kernel takes every shape; None if there are gaps."""
    ordered = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return ordered.view(1, -1) if ordered.is_contiguous() else None
