"""Cross entropy of a linear layer's output that never holds all logits.

Rows go in chunks: their logits by a matrix product, loss and lse by our kernel, the logits' gradient by our kernel in
the logits' own memory, the gradients of the inputs by two more products. So the gradients are there when the forward is
over, and the backward scales them. With ``reduction="none"`` each row's gradient has a factor of its own, which the
weight's gradient cannot be given afterwards: there the backward makes the logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_ops import chunks
from cute_ops.ops.cross_entropy import FINISH
from cute_ops_torch.autograd import inplace_gradient
from cute_ops_torch.front import watched
from cute_ops_torch.registry import family

Tensor = torch.Tensor
_REDUCTIONS = FINISH.options["reduction"]
_library = torch.library.Library("cute", "FRAGMENT")
_ATTRS = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0"
_INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy`.

    Args:
        hidden: ``T[*m h]``; float32, float16 or bfloat16.
        weight: ``T[n h]``.
        target: int64 or int32 ``[*m]``, the class of each row.
        bias: ``T[n]``.
        ignore_index: rows with this target have loss 0 and gradient 0.
        label_smoothing: part of the target that is spread evenly over all classes.
        z_loss: weight of ``lse^2``.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"`` or ``"none"``.

    Returns:
        float32: a scalar, or ``[*m]``. Gradients are products of the logits' gradient, rounded to T; the weight's is
        added up in T, chunk after chunk. Deterministic where the framework's matrix products are.

    Raises:
        TypeError: dtypes that differ or are not listed.
        ValueError: shapes that do not fit, an unknown reduction.

    Source: computing gradients chunk by chunk in the forward: Hsu et al., Liger Kernel, 2024.
    """
    arguments = (hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction)
    inputs = (hidden, weight, bias)
    wanted = [t is not None and t.requires_grad for t in inputs]
    if (
        torch.compiler.is_compiling()
        or watched()
        or reduction == "none"
        or not (any(wanted) and torch.is_grad_enabled())
    ):
        return torch.ops.cute.linear_cross_entropy(*arguments)
    _check(hidden, weight, target, bias, reduction)
    return _Direct.apply(*arguments, wanted)


def _composite(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    _check(hidden, weight, target, bias, reduction)
    attrs = (ignore_index, label_smoothing, z_loss)
    inputs = (hidden, weight, bias)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
    if reduction != "none" and any(wanted):
        return torch.ops.cute.linear_cross_entropy_step(hidden, weight, target, bias, *attrs, reduction, wanted)[0]
    loss = torch.ops.cute.linear_cross_entropy_rows(hidden, weight, target, bias, *attrs)[0]
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (target != ignore_index).sum()


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str) -> None:
    def fail(kind: type[Exception], problem: str) -> Exception:
        return kind(f"cute.linear_cross_entropy: {problem}")

    if reduction not in _REDUCTIONS:
        raise fail(ValueError, f"option `reduction` is {reduction!r}, expected 'mean', 'sum' or 'none'.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise fail(TypeError, f"argument `{name}` has dtype {t.dtype}, but `hidden` has {hidden.dtype}.")
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        problem = f"argument `weight` has shape {tuple(weight.shape)}, expected (n, h) with `hidden` [*m h]"
        raise fail(ValueError, f"{problem} = {tuple(hidden.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise fail(ValueError, f"argument `bias` has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}.")
    if target.shape != hidden.shape[:-1]:
        problem = f"argument `target` has shape {tuple(target.shape)}, expected {tuple(hidden.shape[:-1])}"
        raise fail(ValueError, f"{problem}: the leading dims of `hidden`.")


class _Direct(torch.autograd.Function):
    """The same past the dispatcher, where gradients can be scaled in their own memory."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, *gradients = _step(*arguments)
        ctx.wanted = arguments[-1]
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        (dloss,) = cotangents
        # No second buffer of the weight's size; another backward through this loss gets autograd's error.
        found = [g.mul_(dloss.to(g.dtype)) if w else None for g, w in zip(ctx.saved_tensors, ctx.wanted, strict=True)]
        return found[0], found[1], None, found[2], None, None, None, None, None


# --- chunks --------------------------------------------------------------------------------------------------------


def _slices(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    rows, width = hidden.shape
    size = chunks.rows_per_chunk(rows, width, weight.shape[0], hidden.dtype.itemsize)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _Logits:
    """The logits of one chunk after another, in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.memory: Tensor | None = None

    def __getitem__(self, at: slice) -> Tensor:
        if self.memory is None:
            self.memory = self.hidden.new_empty((at.stop - at.start, self.weight.shape[0]))
        logits = self.memory[: at.stop - at.start]
        if self.bias is None:
            return torch.mm(self.hidden[at], self.weight.t(), out=logits)
        return torch.addmm(self.bias, self.hidden[at], self.weight.t(), out=logits)


class _Gradients:
    """Gradients of the inputs, chunk after chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self.hidden, self.weight, self.empty = hidden, weight, hidden.shape[0] == 0
        like = (hidden, weight, bias)
        made = [torch.empty_like(t) if w and t is not None else None for t, w in zip(like, wanted, strict=True)]
        self.dhidden, self.dweight, _ = made
        # A sum over rows, one rounding at the end.
        self.dbias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=torch.float32)
        if self.empty and self.dweight is not None:
            self.dweight.zero_()

    def add(self, at: slice, dlogits: Tensor) -> None:
        if self.dhidden is not None:
            torch.mm(dlogits, self.weight, out=self.dhidden[at])
        if self.dweight is not None:
            if at.start == 0:
                torch.mm(dlogits.t(), self.hidden[at], out=self.dweight)
            else:
                self.dweight.addmm_(dlogits.t(), self.hidden[at])
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        none = self.hidden.new_empty((0,))
        dhidden = none if self.dhidden is None else self.dhidden.view(shape)
        # Outputs of an op share no memory, so each absent one is an empty tensor of its own.
        dweight = none.clone() if self.dweight is None else self.dweight
        return dhidden, dweight, none.clone() if self.dbias is None else self.dbias.to(self.hidden.dtype)


def _flat(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)


def _rows(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *attrs: Any) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row."""
    h, t = _flat(hidden, target)
    logits = _Logits(h, weight, bias)
    loss, lse = h.new_empty(t.shape, dtype=torch.float32), h.new_empty(t.shape, dtype=torch.float32)
    for at in _slices(h, weight):
        loss[at], lse[at] = torch.ops.cute.cross_entropy(logits[at], t[at], *attrs)
    return loss.view(target.shape), lse.view(target.shape)


def _rows_bwd(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lse: Tensor, dloss: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for a cotangent of each row's loss; the logits are made again."""
    *attrs, wanted = rest
    h, t = _flat(hidden, target)
    logits, gradients, inplace = _Logits(h, weight, bias), _Gradients(h, weight, bias, wanted), _inplace()
    s, d = lse.reshape(-1), dloss.reshape(-1)
    for at in _slices(h, weight):
        gradients.add(at, inplace(logits[at], t[at], s[at], d[at], *attrs, 0))
    return gradients.results(hidden.shape)


def _step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reduced loss and its gradients, together."""
    *attrs, reduction, wanted = rest
    h, t = _flat(hidden, target)
    logits, gradients, inplace = _Logits(h, weight, bias), _Gradients(h, weight, bias, wanted), _inplace()
    losses = h.new_empty(t.shape, dtype=torch.float32)
    one = torch.ones((), dtype=torch.float32, device=h.device)
    share = one / (t != attrs[0]).sum() if reduction == "mean" else one
    for at in _slices(h, weight):
        chunk, classes = logits[at], t[at]
        losses[at], lse = torch.ops.cute.cross_entropy(chunk, classes, *attrs)
        gradients.add(at, inplace(chunk, classes, lse, share.expand(classes.shape), *attrs, 0))
    return losses.sum() * share, *gradients.results(hidden.shape)


def _inplace() -> Any:
    """The gradient of the logits, over the logits."""
    grad, gradient, into = family("cute", "cross_entropy_bwd")
    return inplace_gradient(grad, gradient, into)


# --- registration --------------------------------------------------------------------------------------------------


def _fake_rows(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return tuple(target.new_empty(target.shape, dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def _fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    like = zip((hidden, weight, bias), wanted, strict=True)
    return tuple(hidden.new_empty(t.shape if w and t is not None else (0,)) for t, w in like)  # type: ignore[return-value]


def _fake_rows_bwd(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(hidden, weight, bias, rest[-1])


def _fake_step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), *_fake_gradients(hidden, weight, bias, rest[-1])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, *ctx.attrs = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, target, bias, output[1])


def _backward_rows(ctx: Any, dloss: Tensor, _: Any) -> tuple[Any, ...]:
    hidden, weight, target, bias, lse = ctx.saved_tensors
    needed = ctx.needs_input_grad
    wanted = [needed[0], needed[1], needed[3]]
    found = torch.ops.cute.linear_cross_entropy_rows_bwd(
        hidden, weight, target, bias, lse, dloss.contiguous(), *ctx.attrs, wanted
    )
    dhidden, dweight, dbias = (g if w else None for g, w in zip(found, wanted, strict=True))
    return dhidden, dweight, None, dbias, None, None, None


def _save_step(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _backward_step(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Any, ...]:
    pairs = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    dhidden, dweight, dbias = (g * dloss.to(g.dtype) if w else None for g, w in pairs)
    return dhidden, dweight, None, dbias, None, None, None, None, None


def _register() -> None:
    _library.define(f"linear_cross_entropy({_INPUTS}=None, {_ATTRS}, str reduction='mean') -> Tensor")
    _library.impl("linear_cross_entropy", _composite, "CompositeImplicitAutograd")
    inner: dict[str, tuple[str, Any, Any]] = {
        "linear_cross_entropy_rows": (f"({_INPUTS}, {_ATTRS}) -> (Tensor, Tensor)", _rows, _fake_rows),
        "linear_cross_entropy_rows_bwd": (
            f"({_INPUTS}, Tensor lse, Tensor dloss, {_ATTRS}, bool[] wanted=[]) -> (Tensor, Tensor, Tensor)",
            _rows_bwd,
            _fake_rows_bwd,
        ),
        "linear_cross_entropy_step": (
            f"({_INPUTS}, {_ATTRS}, str reduction='mean', bool[] wanted=[]) -> (Tensor, Tensor, Tensor, Tensor)",
            _step,
            _fake_step,
        ),
    }
    for name, (schema, implementation, fake) in inner.items():
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cute::{name}", fake, lib=_library)
    for name, save, backward in (
        ("linear_cross_entropy_rows", _save_rows, _backward_rows),
        ("linear_cross_entropy_step", _save_step, _backward_step),
    ):
        torch.library.register_autograd(f"cute::{name}", backward, setup_context=save, lib=_library)


_register()
