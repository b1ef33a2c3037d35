"""Fuse a layer's final residual add with the norm that reads its sum: the next layer's, or the model's last.

While a decoder runs, it says which norm reads the output of which layer. Such a layer computes the norm together with
its add, and attaches it to the sum as an attribute. The next layer takes it from there if neither the sum nor the norm
has changed; to everything else the sum is a tensor like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from cute_ops_torch import functions

_ATTRIBUTE = "_cute_normed"


class LlamaRMSNorm(nn.Module):
    """The attributes of Hugging Face's class of this name."""

    weight: nn.Parameter
    variance_epsilon: float


_next_norms: ContextVar[Mapping[int, LlamaRMSNorm]] = ContextVar("cute_ops_next_norms", default={})  # noqa: B039 (never written)


@contextmanager
def next_norms(norms: Mapping[int, LlamaRMSNorm]) -> Iterator[None]:
    """A context in which ``norms`` says, by a layer's id, which norm reads the layer's output."""
    token = _next_norms.set(norms)
    try:
        yield
    finally:
        _next_norms.reset(token)


def next_norm(layer: nn.Module) -> LlamaRMSNorm | None:
    """The norm that reads a layer's output; None where that is not known."""
    return _next_norms.get().get(id(layer))


def add(x: torch.Tensor, residual: torch.Tensor, norm: LlamaRMSNorm) -> torch.Tensor:
    """``x + residual``, with its norm attached."""
    return attach(norm, *functions.add_rmsnorm(x, residual, norm.weight, None, norm.variance_epsilon))


def attach(norm: LlamaRMSNorm, normed: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """A sum, with its norm attached."""
    setattr(total, _ATTRIBUTE, (norm, norm.weight, _versions(norm, total), normed))
    return total


def pop(norm: LlamaRMSNorm, total: torch.Tensor) -> torch.Tensor | None:
    """Detach the norm of a sum; None where there is none, or the sum or the norm has changed since."""
    attached = vars(total).pop(_ATTRIBUTE, None)
    if attached is None or not torch.is_grad_enabled():
        return None
    of, weight, versions, normed = attached
    valid = of is norm and weight is norm.weight and versions == _versions(norm, total)
    return normed if valid else None


def _versions(norm: LlamaRMSNorm, total: torch.Tensor) -> tuple[int, int, float]:
    return total._version, norm.weight._version, norm.variance_epsilon
