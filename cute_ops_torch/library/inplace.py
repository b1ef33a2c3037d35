"""Backward ops that write their outputs over inputs which nothing reads any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_ops.declaration.op import Op

Call = Callable[..., Any]


def inplace_gradient(grad: Op, gradient: Call, into: Call) -> Call:
    """The backward op by its raw function and ``into``, which writes over the inputs that its outputs reuse."""
    names = list(grad.inputs)
    donated = [names.index(t.donates) if t.donates else None for t in grad.outputs.values()]
    return overwriting(gradient, into, donated)


def overwriting(call: Call, into: Call, places: Sequence[int | None]) -> Call:
    """A raw function that writes outputs over arguments, where those are compact.

    Args:
        call: the function.
        into: its CUDA implementation with outputs given.
        places: for each output the index of the argument that it goes over; None where it has memory of its own.
    """

    def run(*args: Any) -> Any:
        reused = [None if place is None else args[place].detach() for place in places]
        given = [t for t in reused if t is not None]
        # A negated view shares its base's memory.
        if not any(isinstance(a, torch.Tensor) and a.is_neg() for a in args) and all(map(_is_compact, given)):
            fresh = iter(into(*args, *reused) or ())
            # Another node that has saved this memory raises in its backward instead of reading other numbers.
            torch.autograd.graph.increment_version(given)
            results = tuple(next(fresh, None) if t is None else t for t in reused)
        else:
            made = call(*args)
            made = made if isinstance(made, tuple) else (made,)
            results = tuple(r if t is None else t.copy_(r) for r, t in zip(made, reused, strict=True))
        return results[0] if len(results) == 1 else results

    return run


def _is_compact(tensor: torch.Tensor) -> bool:
    """Whether a kernel may write over a tensor as over a fresh output."""
    return bool(tensor.is_cuda and tensor.is_contiguous() and tensor.numel() and tensor.data_ptr() % 16 == 0)
