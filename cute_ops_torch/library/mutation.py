"""Inputs that an op writes, outputs that a caller gives, and what is refused of both, as torch's own ops refuse it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
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
    _check_themselves(op, tensors, {name: given[name] for name in op.mutates if name in given})
    for name, other, least, most in _pairs(op, given):
        if least < given[name].data_ptr() - given[other].data_ptr() < most:
            _refuse_shared(op, tensors, name, other)


def check_outputs(op: Op, tensors: Tensors, outputs: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError where an output that the caller gives overlaps itself, an input or another output. It may be the
    input that the op donates to it.
    """
    _check_themselves(op, tensors, outputs)
    given = {n: t for n, t in zip(op.inputs, tensors, strict=True) if t is not None and not op.inputs[n].unread}
    for k, (name, out) in enumerate(outputs.items()):
        others = {**given, **dict(list(outputs.items())[:k])}
        for other, tensor in others.items():
            same = (out.data_ptr(), out.shape, out.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
            if not (same and op.outputs[name].donates == other) and _overlap(out, tensor):
                _refuse_shared(op, tensors, name, other)


def _check_themselves(op: Op, tensors: Tensors, written: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in written.items():
        if _overlaps_itself(tensor):
            problem = (
                f"argument `{name}` is written, but with strides {tensor.stride()} several of its elements are "
                "one place in memory; pass a tensor of its own."
            )
            raise ValueError(message(op, problem, arrays(op, tensors)))


def _refuse_shared(op: Op, tensors: Tensors, name: str, other: str) -> NoReturn:
    problem = f"argument `{name}` is written, but shares memory with `{other}`; pass a tensor of its own."
    raise ValueError(message(op, problem, arrays(op, tensors)))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    spans = [(t.data_ptr(), t.data_ptr() + _span(t)) for t in (one, other)]
    if not all(t.numel() for t in (one, other)) or spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    import numpy as np  # few outputs lie between the rows of another tensor

    return np.shares_memory(np.asarray(_Place(one)), np.asarray(_Place(other)))


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


class _Place:
    """The bytes of a tensor on any device, which NumPy compares but does not read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        strides = [step * tensor.itemsize for step in tensor.stride()]
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False), "shape": (*tensor.shape, tensor.itemsize), "strides": (*strides, 1),
            "typestr": "|u1", "version": 3,
        }  # fmt: skip


def apart(op: Op, tensors: Tensors) -> tuple[list[str], dict[str, int]]:
    """Source of the check that written tensors share no memory, and the numbers in it by name, for calls with tensors
    like these at other addresses. Calls of other sizes have the same source.
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
