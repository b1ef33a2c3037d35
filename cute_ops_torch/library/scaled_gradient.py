"""Gradients that a forward computed for a cotangent of one, multiplied by the cotangent that came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from cute_ops.declaration.op import Op
from cute_ops.ops.reduction.scale import scale as declared
from cute_ops_torch.library import program
from cute_ops_torch.library.modes import EXACT, modes_active, wrapped
from cute_ops_torch.library.no_gradient import double_backward
from cute_ops_torch.library.reference import register_fake

Tensor = torch.Tensor


def scaled_gradients(op: Op) -> Callable[[Sequence[Tensor], Tensor, Sequence[Any]], Sequence[Tensor]]:
    """``scaled(saved, dloss, second)``: the gradients of an op.

    Its arguments are what the forward computed, the cotangent, and the cotangents of what it computed: of a second
    derivative, else None.
    """
    name = op.aliases.get(op.name, op.name)

    def scaled(saved: Sequence[Tensor], dloss: Tensor, second: Sequence[Any]) -> Sequence[Tensor]:
        for d in second:
            if d is not None:
                raise double_backward(name)
        if torch._C._are_functorch_transforms_active() or wrapped(dloss):  # whose outer levels differentiate this, too
            return [(t.float() * dloss).to(t.dtype) for t in saved]
        return _scaled(saved, dloss)

    return scaled


def _scaled(saved: Sequence[Tensor], dloss: Tensor) -> tuple[Tensor, ...]:
    if torch.compiler.is_dynamo_compiling():
        return _dispatched(saved, dloss)
    # In place, without a second buffer of the weight's size, unless another backward is to come.
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    found: tuple[Tensor, ...] = _of_many(len(saved), bool(keep))(*saved, dloss)
    return found


def _dispatched(gradients: Sequence[Tensor], dloss: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.ops.cute.scaled_gradient(t, dloss) for t in gradients)


@cache
def _of_many(count: int, keep: bool) -> Callable[..., tuple[Tensor, ...]]:
    """``scaled(*gradients, dloss)``, the calls of all kernels by one guard."""

    def apart(*given: Tensor) -> tuple[Tensor, ...]:
        *gradients, dloss = given
        if torch.compiler.is_compiling() or modes_active() or not EXACT.issuperset(map(type, given)):
            return _dispatched(gradients, dloss)
        return tuple(scale(t, dloss) if keep else scale_(t, dloss) for t in gradients)

    def together(record: Any, *given: Tensor) -> tuple[Tensor, ...]:
        *gradients, dloss = given
        rows = [_as_row(t) for t in gradients]
        if any(row is None for row in rows):
            record.complete = False
            return apart(*given)
        values = {"factor": dloss.view(1)}
        found = [record.run_op(declared, {"x": row, **values}, {}, not keep, not keep)["out"] for row in rows]
        if keep:
            return tuple(f.as_strided(t.shape, t.stride()) for f, t in zip(found, gradients, strict=True))
        record.note(torch.autograd.graph.increment_version, [gradients], {}, ())
        return tuple(gradients)

    inputs = {f"gradient{k}": declared.inputs["x"] for k in range(count)}
    return program.repeated("scaled_gradients", {**inputs, "dloss": declared.inputs["factor"]}, together, apart)


def scale(gradient: Tensor, dloss: Tensor) -> Tensor:
    """``gradient * dloss``, in float32, rounded once."""
    row = _as_row(gradient)
    if row is None:
        return (gradient.float() * dloss).to(gradient.dtype)
    run = program.functions[declared](False)
    return run(row, dloss.view(1)).as_strided(gradient.shape, gradient.stride())  # type: ignore[no-any-return]


def scale_(gradient: Tensor, dloss: Tensor) -> Tensor:
    """``gradient *= dloss``. Where dloss is one, the kernel moves nothing: only the device needs to know its value."""
    row = _as_row(gradient)
    if row is None:
        return gradient.copy_(scale(gradient, dloss))
    program.functions[declared](True)(row, dloss.view(1))
    return gradient


def _as_row(tensor: Tensor) -> Tensor | None:
    """All elements as one row, in the order of memory, so that one kernel takes every shape; None if there are gaps."""
    if tensor.is_contiguous():
        return tensor.view(1, -1)
    ordered = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return ordered.view(1, -1) if ordered.is_contiguous() else None


# An op, so that compilers see one, and gradients that are DTensors keep their placements.
_library = torch.library.Library("cute", "FRAGMENT")
_library.define(
    "scaled_gradient(Tensor gradient, Tensor dloss) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_library.impl("scaled_gradient", scale, "CompositeExplicitAutograd")
register_fake(_library, "scaled_gradient", lambda gradient, dloss: torch.empty_like(gradient))


# What Inductor calls where a backward gets the only reference to a gradient.
def _scaled_in_place(gradient: Tensor, dloss: Tensor) -> None:
    scale_(gradient, dloss)


_library.define("scaled_gradient_(Tensor(a!) gradient, Tensor dloss) -> ()", tags=(torch.Tag.needs_exact_strides,))
_library.impl("scaled_gradient_", _scaled_in_place, "CompositeExplicitAutograd")
register_fake(_library, "scaled_gradient_", lambda gradient, dloss: None)
