"""Backward ops that write their outputs over inputs which nothing reads any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_ops.op import Op

Call = Callable[..., Any]


def inplace_gradient(grad: Op, gradient: Call, into: Call) -> Call:
    """The backward op, writing over the inputs that its outputs reuse where these are compact.

    Args:
        grad: the backward op.
        gradient: its function, raw.
        into: its CUDA implementation with outputs given.
    """
    names = list(grad.inputs)
    sources = [names.index(t.donates) if t.donates else None for t in grad.outputs.values()]
    return overwriting(gradient, into, sources)


def overwriting(call: Call, into: Call, sources: Sequence[int | None]) -> Call:
    """A raw function that writes its outputs over arguments.

    Args:
        call: the function.
        into: its CUDA implementation with outputs given.
        sources: for each output the index of the argument, None where the output has memory of its own.
    """

    def run(*args: Any) -> Any:
        reused = [None if k is None else args[k].detach() for k in sources]
        results = tuple(t for t in reused if t is not None)
        whole = all(t.is_cuda and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in results)
        # A negated view shares its base's memory.
        whole &= not any(isinstance(a, torch.Tensor) and a.is_neg() for a in args)
        if whole and len(results) == len(reused):
            if all(t.numel() for t in results):
                into(*args, *results)
                # Another node that has saved this memory raises in its backward instead of reading other numbers.
                torch.autograd.graph.increment_version(results)
        else:
            made = call(*args)
            made = made if isinstance(made, tuple) else (made,)
            results = tuple(r if t is None else t.copy_(r) for r, t in zip(made, reused, strict=True))
        return results[0] if len(results) == 1 else results

    return run
