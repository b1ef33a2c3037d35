"""The last add of a layer and the norm that reads its sum, which is the next layer's, in one pass.

A model says which norm comes after which of its layers while they run. A layer that is followed by one computes it with
its add and hands it on as an attribute of the sum, which is a tensor like any other: the next layer takes the norm from
there if it is what it would compute, and whoever else sees the sum sees nothing new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from cute_ops_torch import functions

Tensor = torch.Tensor
_ATTRIBUTE = "_cute_normed"
_followed: ContextVar[Mapping[int, Any]] = ContextVar("cute_ops_followed", default={})  # noqa: B039 (nobody writes to it)


@contextmanager
def followed(norms: Mapping[int, Any]) -> Iterator[None]:
    """While it lasts, the layer with this id is followed by this norm."""
    token = _followed.set(norms)
    try:
        yield
    finally:
        _followed.reset(token)


def norm_after(layer: Any) -> Any:
    """The norm that reads a layer's output next; None where that is not known."""
    return _followed.get().get(id(layer))


def add(x: Tensor, residual: Tensor, norm: Any) -> Tensor:
    """``x + residual``, with its norm for the one who asks for that."""
    normed, total = functions.add_rmsnorm(x, residual, norm.weight, None, norm.variance_epsilon)
    setattr(total, _ATTRIBUTE, (norm, norm.weight, _versions(norm, total), normed))
    return total


def take(norm: Any, total: Tensor) -> Tensor | None:
    """The norm of a sum if it came with it and neither has changed since; once."""
    found = vars(total).pop(_ATTRIBUTE, None)
    if found is None or not torch.is_grad_enabled():
        return None
    of, weight, versions, normed = found
    same = of is norm and weight is norm.weight and versions == _versions(norm, total)
    return normed if same else None


def _versions(norm: Any, total: Tensor) -> tuple[int, int, float]:
    return total._version, norm.weight._version, norm.variance_epsilon
