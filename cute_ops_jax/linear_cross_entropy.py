"""Cross entropy of a linear layer's output that never holds all logits.

Rows go in chunks: their logits by a matrix product, loss and lse by our kernel, the logits' gradient by our kernel in
the logits' own memory, the gradients of the inputs by two more products. So the gradients are there when the forward is
over, and the backward scales them. With ``reduction="none"`` each row's gradient has a factor of its own, which the
weight's gradient cannot be given afterwards: there the backward makes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops import chunks
from cute_ops.ops.cross_entropy import FINISH
from cute_ops.ops.cross_entropy import cross_entropy as op
from cute_ops.ops.cross_entropy import cross_entropy_bwd as op_bwd
from cute_ops_jax.primitive import stage

Array = jax.Array


class Setting(NamedTuple):
    """What is static in a call."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str

    @property
    def attrs(self) -> dict[str, Any]:
        return {name: getattr(self, name, default) for name, default in op.attrs.items()}


@partial(jax.jit, static_argnames=("ignore_index", "label_smoothing", "z_loss", "reduction"), inline=True)
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Array:
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
        added up in T, chunk after chunk.

    Raises:
        TypeError: dtypes that differ or are not listed.
        ValueError: shapes that do not fit, an unknown reduction.

    Source: computing gradients chunk by chunk in the forward: Hsu et al., Liger Kernel, 2024.
    """
    hidden, weight, target = jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(target)
    bias = None if bias is None else jnp.asarray(bias)
    _check(hidden, weight, target, bias, reduction)
    setting = Setting(ignore_index, label_smoothing, z_loss, reduction)
    loss = _loss(setting, (hidden.reshape(-1, hidden.shape[-1]), weight, bias), target.reshape(-1))
    return loss.reshape(target.shape) if reduction == "none" else loss


def _check(hidden: Array, weight: Array, target: Array, bias: Array | None, reduction: str) -> None:
    def fail(kind: type[Exception], problem: str) -> Exception:
        return kind(f"cute.linear_cross_entropy: {problem}")

    if reduction not in FINISH.options["reduction"]:
        raise fail(ValueError, f"option `reduction` is {reduction!r}, expected 'mean', 'sum' or 'none'.")
    for name, a in (("weight", weight), ("bias", bias)):
        if a is not None and a.dtype != hidden.dtype:
            raise fail(TypeError, f"argument `{name}` has dtype {a.dtype}, but `hidden` has {hidden.dtype}.")
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        problem = f"argument `weight` has shape {weight.shape}, expected (n, h) with `hidden` [*m h]"
        raise fail(ValueError, f"{problem} = {hidden.shape}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise fail(ValueError, f"argument `bias` has shape {bias.shape}, expected {weight.shape[:1]}.")
    if target.shape != hidden.shape[:-1]:
        problem = f"argument `target` has shape {target.shape}, expected {hidden.shape[:-1]}"
        raise fail(ValueError, f"{problem}: the leading dims of `hidden`.")


# --- chunks --------------------------------------------------------------------------------------------------------

Inputs = tuple[Any, Any, Any]


def _each(inputs: Inputs, start: Any, body: Callable[[Any, Any, int], Any]) -> Any:
    """``state = body(state, first row, rows)`` for every chunk: a loop over whole ones, then the rest."""
    hidden, weight, _ = inputs
    rows = hidden.shape[0]
    size = chunks.rows_per_chunk(rows, hidden.shape[1], weight.shape[0], hidden.dtype.itemsize)
    whole, rest = divmod(rows, size)
    state = start
    if whole == 1:
        state = body(state, 0, size)
    elif whole:
        state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, i * size, size), state)
    return body(state, whole * size, rest) if rest else state


def _cut(a: Array, first: Any, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(a, first, rows)


def _put(a: Array, part: Any, first: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(a, part.astype(a.dtype), first, 0)


def _logits(inputs: Inputs, first: Any, rows: int) -> Array:
    hidden, weight, bias = inputs
    logits = _cut(hidden, first, rows) @ weight.T
    return logits if bias is None else logits + bias


def _add(gradients: Inputs, inputs: Inputs, first: Any, rows: int, dlogits: Any) -> Inputs:
    """The gradients of the inputs with those of one more chunk."""
    hidden, weight, _ = inputs
    dhidden, dweight, dbias = gradients
    if dbias is not None:
        dbias = dbias + jnp.sum(dlogits, axis=0, dtype=jnp.float32)
    return _put(dhidden, dlogits @ weight, first), dweight + dlogits.T @ _cut(hidden, first, rows), dbias


def _nothing(inputs: Inputs) -> Inputs:
    hidden, weight, bias = inputs
    # A sum over rows, one rounding at the end.
    dbias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    return jnp.zeros_like(hidden), jnp.zeros_like(weight), dbias


def _rows(setting: Setting, inputs: Inputs, target: Array) -> tuple[Array, Array]:
    """Loss and lse of each row."""

    def body(state: tuple[Array, Array], first: Any, rows: int) -> tuple[Array, Array]:
        given: dict[str, Any] = {"logits": _logits(inputs, first, rows), "target": _cut(target, first, rows)}
        found: dict[str, Any] = stage(op)(given, setting.attrs)
        loss, lse = (_put(s, found[name], first) for s, name in zip(state, ("loss", "lse"), strict=True))
        return loss, lse

    zeros = jnp.zeros(target.shape, jnp.float32)
    return _each(inputs, (zeros, zeros), body)


def _reduced(setting: Setting, loss: Array, target: Array) -> Array:
    found = FINISH.apply(jnp, {"target": target}, {"loss": loss}, setting.attrs, reduction=setting.reduction)
    return found["loss"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(setting: Setting, inputs: Inputs, target: Array) -> Array:
    return _reduced(setting, _rows(setting, inputs, target)[0], target)


def _forward(setting: Setting, inputs: Inputs, target: Array) -> tuple[Array, Any]:
    if setting.reduction == "none":
        loss, lse = _rows(setting, inputs, target)
        return loss, (inputs, target, lse)
    share = jnp.ones((), jnp.float32)
    if setting.reduction == "mean":
        share = share / jnp.sum(target != setting.ignore_index)

    def body(state: tuple[Array, Inputs], first: Any, rows: int) -> tuple[Array, Inputs]:
        losses, gradients = state
        given: dict[str, Any] = {"logits": _logits(inputs, first, rows), "target": _cut(target, first, rows)}
        found: dict[str, Any] = stage(op)(given, setting.attrs)
        given |= {"lse": found["lse"], "dloss": jnp.broadcast_to(share, (rows,))}
        dlogits = stage(op_bwd)(given, setting.attrs, inplace=True)["dlogits"]
        return _put(losses, found["loss"], first), _add(gradients, inputs, first, rows, dlogits)

    losses, gradients = _each(inputs, (jnp.zeros(target.shape, jnp.float32), _nothing(inputs)), body)
    return _reduced(setting, losses, target), gradients


def _backward(setting: Setting, saved: Any, dloss: Array) -> tuple[Inputs, None]:
    if setting.reduction != "none":
        scaled: list[Any] = [None if g is None else g * dloss.astype(g.dtype) for g in saved]
        dhidden, dweight, dbias = scaled
        return (dhidden, dweight, None if dbias is None else dbias.astype(dweight.dtype)), None
    inputs, target, lse = saved

    def body(gradients: Inputs, first: Any, rows: int) -> Inputs:
        given = {"logits": _logits(inputs, first, rows)}
        given |= {n: _cut(a, first, rows) for n, a in (("target", target), ("lse", lse), ("dloss", dloss))}
        dlogits = stage(op_bwd)(given, setting.attrs, inplace=True)["dlogits"]
        return _add(gradients, inputs, first, rows, dlogits)

    dhidden, dweight, dbias = _each(inputs, _nothing(inputs), body)
    return (dhidden, dweight, None if dbias is None else dbias.astype(dweight.dtype)), None


_loss.defvjp(_forward, _backward)
