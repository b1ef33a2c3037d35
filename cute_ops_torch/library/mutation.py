"""Inputs that an op writes, and what is refused of them, as torch's own in-place ops refuse it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_ops.errors import message
from cute_ops.op import Op
from cute_ops_torch.library.tensors import Tensors, arrays


def refuse_gradients(op: Op, tensors: Tensors) -> None:
    """Raise NotImplementedError for an op that mutates inputs where one requires grad: it would be lost silently."""
    given = zip(op.inputs, tensors, strict=True) if op.mutates else ()
    name = next((n for n, t in given if t is not None and t.requires_grad), None)
    if name is not None:
        problem = (
            f"argument `{name}` requires grad, but an op that writes its inputs has no gradient: call it under "
            f"torch.no_grad(), or with {name}.detach()."
        )
        raise NotImplementedError(message(op, problem, arrays(op, tensors)))


def check_memory(op: Op, tensors: Tensors) -> None:
    """Raise ValueError where an input that is written overlaps itself or another input.

    Inputs with gaps, whose elements may interleave, are compared by their first addresses alone.
    """
    given = {n: t for n, t in zip(op.inputs, tensors, strict=True) if t is not None}
    for name in op.mutates:
        if name in given and _overlaps_itself(given[name]):
            problem = (
                f"argument `{name}` is written, but with strides {given[name].stride()} several of its elements are "
                "one place in memory; pass a tensor of its own."
            )
            raise ValueError(message(op, problem, arrays(op, tensors)))
    for name, other, least, most in _pairs(op, given):
        if least < given[name].data_ptr() - given[other].data_ptr() < most:
            problem = f"argument `{name}` is written, but shares memory with `{other}`; pass a tensor of its own."
            raise ValueError(message(op, problem, arrays(op, tensors)))


def apart(op: Op, tensors: Tensors) -> tuple[list[str], dict[str, int]]:
    """The same as source, and the numbers in it by name, for calls with tensors like these at other addresses. Calls of
    other sizes have the same source.
    """
    given = {n: t for n, t in zip(op.inputs, tensors, strict=True) if t is not None}
    source: list[str] = []
    numbers: dict[str, int] = {}
    for k, (name, other, least, most) in enumerate(_pairs(op, given)):
        source.append(f"not _least{k} < {name}.data_ptr() - {other}.data_ptr() < _most{k}")
        numbers |= {f"_least{k}": least, f"_most{k}": most}
    return source, numbers


def _pairs(op: Op, given: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, int, int]]:
    """Each input that is written with each other one, and between which distances in memory they overlap."""
    written = [name for name in op.mutates if name in given]
    for k, name in enumerate(written):
        for other in given:
            if other != name and other not in written[:k]:
                yield name, other, -_extent(given[name]), _extent(given[other])


def _extent(tensor: torch.Tensor) -> int:
    """How many bytes from the first on surely belong to a tensor: all of a contiguous one, one where it has gaps."""
    return tensor.numel() * tensor.itemsize if tensor.is_contiguous() else min(tensor.numel(), 1)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach, steps = 0, sorted(zip(tensor.stride(), tensor.shape, strict=True)) if tensor.numel() else []
    for stride, size in steps:
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def write_back(op: Op, tensors: Tensors, results: Sequence[Any]) -> Sequence[Any]:
    """Give the inputs that are written their new values, the first ones of these results; returns the others."""
    given = dict(zip(op.inputs, tensors, strict=True))
    for name, result in zip(op.mutates, results, strict=False):
        tensor = given[name]
        if tensor is not None:
            tensor.copy_(result)
    return results[len(op.mutates) :]
