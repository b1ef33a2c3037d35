"""Backward ops that write their outputs over inputs which nothing reads any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_ops.declaration.op import Op

Call = Callable[..., Any]


def inplace_gradient(grad: Op, gradient: Call, launcher: Any) -> Call:
    """The backward op by its raw function and its launcher, which writes over the inputs that its outputs reuse."""
    names = list(grad.inputs)
    donated = [names.index(t.donates) if t.donates else None for t in grad.outputs.values()]

    def into_rows(args: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> Any:
        given = {name: t for name, t in zip(grad.outputs, outputs, strict=True) if t is not None}
        tensors, attrs = args[: len(names)], args[len(names) :]
        call = launcher.find(tensors, attrs, given)
        return call.fill(tuple(given))(
            *(t for t in (*tensors, *given.values()) if t is not None), *attrs[len(grad.attrs) :]
        )

    return overwriting(gradient, launcher.into, donated, into_rows)


def overwriting(
    call: Call, into: Call, places: Sequence[int | None],
    into_rows: Callable[[Sequence[Any], Sequence[torch.Tensor | None]], Any] | None = None,
) -> Call:  # fmt: skip
    """A raw function that writes outputs over arguments, where those are compact, or have aligned rows.

    Args:
        call: the function.
        into: its CUDA implementation with outputs given.
        places: for each output the index of the argument that it goes over; None where it has memory of its own.
        into_rows: the same for outputs that have aligned rows of any pitch.
    """

    def _writer(args: Sequence[Any], given: Sequence[torch.Tensor]) -> Call | None:
        for a in args:  # no generator: it takes as long again
            if isinstance(a, torch.Tensor) and a.is_neg():  # a negated view shares its base's memory
                return None
        if all(map(is_compact, given)):
            return lambda args, reused: into(*args, *reused)
        return into_rows if all(map(_has_rows, given)) else None

    def run(*args: Any) -> Any:
        reused = [None if place is None else args[place].detach() for place in places]
        given = [t for t in reused if t is not None]
        write = _writer(args, given)
        if write is not None:
            fresh = iter(write(args, reused) or ())
            # Another node that has saved this memory raises in its backward instead of reading other numbers.
            torch.autograd.graph.increment_version(given)
            results = tuple(next(fresh, None) if t is None else t for t in reused)
        else:
            made = call(*args)
            made = made if isinstance(made, tuple) else (made,)
            pairs = zip(made, reused, strict=True)
            results = tuple(r if t is None or _is_expanded(t) else t.copy_(r) for r, t in pairs)
        return results[0] if len(results) == 1 else results

    return run


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as those of the cotangent of a sum over rows do."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_compact(tensor: torch.Tensor) -> bool:
    """Whether a kernel may write over a tensor as over a fresh output."""
    return bool(tensor.is_cuda and tensor.is_contiguous() and tensor.numel() and tensor.data_ptr() % 16 == 0)


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether a kernel may write over the rows of a matrix with some memory between them."""
    if not (tensor.is_cuda and tensor.ndim == 2 and tensor.numel() and tensor.stride(1) == 1):
        return False
    pitch = tensor.stride(0)
    return pitch >= tensor.shape[1] and not (pitch * tensor.itemsize | tensor.data_ptr()) % 16
