"""Norms that are computed with the residual add before them, and attached to the sum.

Who adds knows which norm reads the sum: a decoder says so of its layers while it runs, and other adds have learned it
(:mod:`cute_ops_torch.huggingface.sums`). It computes the norm together with the sum, and attaches it as an attribute.
The norm takes it from there if neither the sum nor the norm has changed; to everything else the sum is a tensor like
any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface.bypass import calls, takes
from cute_ops_torch.huggingface.traced import NORMED, SIGNED, has_set, learn, version_of

Tensor = torch.Tensor


class Norm(NamedTuple):
    """A norm: the op and its parameters.

    Attributes:
        op: ``"rmsnorm"`` or ``"layernorm"``.
        weight, bias: its parameters.
        eps, offset: added to the variance and to the weight.
    """

    op: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float  # no default: Dynamo would have a symbol for it, which two checkpointed layers cannot share

    def fits(self, x: Tensor) -> bool:
        """Whether the norm of a sum like ``x`` has its dtype and runs on our op."""
        own = [t for t in (self.weight, self.bias) if t is not None]
        return all(t.dtype == x.dtype and t.shape == x.shape[-1:] for t in own) and takes(x, *own)

    def with_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and the sum."""
        if self.op == "rmsnorm":
            return functions.add_rmsnorm(x, residual, self.weight, self.bias, self.eps, self.offset)
        return functions.add_layernorm(x, residual, self.weight, self.bias, self.eps)


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


def norm_of(module: Any) -> Norm | None:
    """The norm that a call of a patched module computes; None of other modules, or where something sees the call."""
    cls: Any = type(module)
    read = getattr(cls, "_cute_norm", None)
    if read is None or not cls._cute_may(module) or not calls(module, cls._cute_forward):
        return None
    return read(module)  # type: ignore[no-any-return]


def add(x: Tensor, residual: Tensor, norm: Any) -> Tensor:
    """``x + residual``, with its norm attached."""
    made: Norm = type(norm)._cute_norm(norm)
    return attach(norm, *made.with_sum(x, residual))


def attach(norm: Any, normed: Tensor, total: Tensor) -> Tensor:
    """A sum, with its norm attached."""
    made: Norm = type(norm)._cute_norm(norm)
    if torch.compiler.is_dynamo_compiling():
        total = total.view_as(total)  # Dynamo knows attributes of what a call returns, and not of what is in a tuple
    setattr(total, NORMED, (norm, made, _versions(made, total), normed))
    return total


def pop(norm: Any, total: Tensor) -> Tensor | None:
    """Detach the norm of a sum; None where there is none, or the sum or the norm has changed since. Of a sum without
    one that is as it was made it tells the add which norm has read it.
    """
    attached = _read(total, NORMED)
    if attached is None or attached[0] is not norm:
        if (signed := _read(total, SIGNED)) is not None:
            module, number, version = signed
            if torch.compiler.is_dynamo_compiling() or version == total._version:
                learn(norm, module, number)
        return None
    setattr(total, NORMED, None)
    if not torch.is_grad_enabled() or _has_own_gradient(total):
        return None
    _, then, versions, normed = attached
    made: Norm = type(norm)._cute_norm(norm)
    own = (made.weight is then.weight, made.bias is then.bias, made.eps == then.eps, made.offset == then.offset)
    return normed if all(own) and versions == _versions(made, total) else None


def _has_own_gradient(total: Tensor) -> bool:
    """Whether a sum's gradient is kept or given to hooks. That gradient must include the norm's part, so the norm has
    to be computed from the sum.
    """
    return not torch.compiler.is_dynamo_compiling() and bool(total.retains_grad or total._backward_hooks)


def _read(total: Tensor, name: str) -> Any:
    """An attribute of a sum; None where there is none, or where it is from outside of the graph that is traced."""
    if torch.compiler.is_dynamo_compiling() and not has_set(total, name):
        return None
    return getattr(total, name, None)


def _versions(made: Norm, total: Tensor) -> tuple[int, ...]:
    """Version counters of a norm's sum and parameters; in a trace they differ from all others, as graphs count anew."""
    return torch.compiler.is_dynamo_compiling(), *(
        version_of(t) for t in (total, made.weight, made.bias) if t is not None
    )


def sign(total: Tensor, module: nn.Module, number: int) -> None:
    """Write on a sum which add of which module has made it."""
    version = None if torch.compiler.is_dynamo_compiling() else total._version
    setattr(total, SIGNED, (module, number, version))
