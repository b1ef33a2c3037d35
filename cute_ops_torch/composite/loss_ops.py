"""``torch.ops.cute.linear_cross_entropy`` and the ops it consists of: schemas, fakes, autograd.

``linear_cross_entropy_step`` computes the reduced loss and its gradients together; its backward scales them.
``_rows`` and ``_rows_bwd`` compute losses of rows, and their gradients from logits computed again: for
``reduction="none"``, where each row's gradient has its own factor, which cannot be applied to the weight's gradient
afterwards, and for float16, where gradients underflow unless the loss is scaled first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_ops.composite.linear_cross_entropy import check_accum_dtype, check_attributes, check_tensors
from cute_ops.composite.loss_loops import GRADIENTS, LOOPS
from cute_ops.errors import message
from cute_ops.ops.reduction.cross_entropy import FINISH, cross_entropy
from cute_ops_torch.composite import chunked_loss, gradient_scale, transforms
from cute_ops_torch.composite.transforms import Rows
from cute_ops_torch.library.autograd import refuse_tangents
from cute_ops_torch.library.no_gradient import once
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.library.tensors import arrays

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]  # hidden, weight, target, bias

# Declarations: for error messages, and for the dims that ranks may share.
_NAME = "linear_cross_entropy"
ROWS, ROWS_BWD = (LOOPS[name].declared(_NAME, LOOPS[name].outputs) for name in ("rows", "rows_bwd"))
STEP = LOOPS["step"]._replace(inputs={}).declared(_NAME, GRADIENTS)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean", accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """``torch.ops.cute.linear_cross_entropy``, in terms of the other ops."""
    tensors, attrs = (hidden, weight, target, bias), (ignore_index, label_smoothing, z_loss)
    check_call(tensors, attrs, reduction, accum_dtype)
    if forward_ad._current_level >= 0:
        refuse_tangents(ROWS, tensors)
    if transforms.differentiated(tensors):
        problem = (
            "gradients of torch.func are those of the function, cute_ops_torch.linear_cross_entropy, not of the op."
        )
        raise NotImplementedError(message(ROWS, problem, arrays(ROWS, tensors)))
    by_step, by_rows = torch.ops.cute.linear_cross_entropy_step, torch.ops.cute.linear_cross_entropy_rows
    return reduced_loss(by_step, by_rows, tensors, (*attrs, accum_dtype), reduction)


def check_call(tensors: Tensors, attrs: Sequence[Any], reduction: str, accum_dtype: torch.dtype | None) -> None:
    what = "linear_cross_entropy"
    FINISH.check(what, {"reduction": reduction})
    check_accum_dtype(what, accum_dtype, torch.float32, tensors[1].dtype)
    check_tensors(what, *tensors)
    # What a compiler keeps symbolic is checked when the program runs.
    named = zip(cross_entropy.attrs, attrs, strict=False)
    known = {name: value for name, value in named if not isinstance(value, torch.SymFloat)}
    check_attributes(*tensors[:3], known)


def reduced_loss(
    step: Callable[..., Any], rows: Callable[..., Any], tensors: Tensors, attrs: Sequence[Any], reduction: str
) -> Tensor:
    """The loss by one of two ops: by ``step`` together with its gradients, or by ``rows`` for each row."""
    hidden, weight, target, bias = tensors
    wanted = needs_gradients(hidden, weight, bias)
    loss: Tensor
    if computes_gradients(hidden, reduction, wanted):
        loss, *_ = step(*tensors, *attrs, reduction, wanted)
        return loss
    loss, *_ = rows(*tensors, *attrs)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != attrs[0]).sum()


def needs_gradients(*inputs: Tensor | None) -> list[bool]:
    return [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]


def computes_gradients(hidden: Tensor, reduction: str, wanted: Sequence[bool]) -> bool:
    """Whether the forward computes the gradients."""
    return reduction != "none" and any(wanted) and hidden.dtype != torch.float16


# --- autograd ------------------------------------------------------------------------------------------------------


def _save_step(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-4]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or cotangents of the gradients would be zeros of their size
    ctx.save_for_backward(*output[1:])


@once("linear_cross_entropy")
def _backward_step(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 13
    scale = torch.ops.cute.linear_cross_entropy_scale
    pairs = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    dhidden, dweight, dbias = (scale(g, dloss) if w else None for g, w in pairs)
    return dhidden, dweight, None, dbias, *[None] * 9


# --- registration --------------------------------------------------------------------------------------------------


def _fake_rows(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(target.new_empty(target.shape, dtype=torch.float32) for _ in range(3))


def _fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    none = [hidden.new_empty((0,)) for _ in wanted]
    dbias = none[2] if bias is None else hidden.new_empty(bias.shape)
    like = zip((hidden.new_empty(hidden.shape), torch.empty_like(weight), dbias), none, wanted, strict=True)
    return tuple(gradient if w else absent for gradient, absent, w in like)


def _fake_rows_bwd(*args: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(args[0], args[1], args[6], args[11])


def _fake_step(*args: Any) -> tuple[Tensor, ...]:
    return args[0].new_empty((), dtype=torch.float32), *_fake_gradients(args[0], args[1], args[3], args[9])


_library = torch.library.Library("cute", "FRAGMENT")


def _define(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # Exact strides: a weight's gradient has those of the weight, whatever they are.
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides
    _library.define(name + schema, tags=tags)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    register_fake(_library, name, fake)


def _register() -> None:
    layer, bias = "Tensor hidden, Tensor weight, Tensor target", "Tensor? bias"
    inputs = f"{layer}, {bias}"
    attrs = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0"
    accum = "ScalarType? accum_dtype=None"
    own = "int[] part=[], str group=''"  # arguments of `Slice.of`
    name = "linear_cross_entropy"
    _library.define(f"{name}({inputs}=None, {attrs}, str reduction='mean', {accum}) -> Tensor")
    _library.impl(name, linear_cross_entropy, "CompositeImplicitAutograd")
    schema = f"({inputs}, {attrs}, {accum}, {own}) -> (Tensor, Tensor, Tensor)"
    _define(f"{name}_rows", schema, chunked_loss.rows, _fake_rows)
    of_rows = "Tensor row_max, Tensor log_sum, Tensor dloss"
    schema = f"({layer}, {of_rows}, {bias}, {attrs}, {accum}, bool[] wanted=[], {own})"
    _define(f"{name}_rows_bwd", f"{schema} -> (Tensor, Tensor, Tensor)", chunked_loss.rows_bwd, _fake_rows_bwd)
    schema = f"({inputs}, {attrs}, {accum}, str reduction='mean', bool[] wanted=[], Tensor? count=None, {own})"
    _define(f"{name}_step", f"{schema} -> (Tensor, Tensor, Tensor, Tensor)", chunked_loss.step, _fake_step)
    # An op, so that gradients that are DTensors keep their placements.
    schema = "(Tensor gradient, Tensor dloss) -> Tensor"
    _define(f"{name}_scale", schema, gradient_scale.scale, lambda gradient, dloss: torch.empty_like(gradient))
    nodes = {"rows": (Rows.setup_context, Rows.backward), "step": (_save_step, _backward_step)}
    for op, (save, backward) in nodes.items():
        torch.library.register_autograd(f"cute::{name}_{op}", backward, setup_context=save, lib=_library)


_register()
