"""The loops over chunks of rows behind :func:`linear_cross_entropy`.

For each chunk: its logits by a matrix product, the loss and, in the logits' own memory, their gradient by our kernel,
and the gradients of the inputs by two more products. All arrays have one leading dim here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from cute_ops.composite import chunks
from cute_ops_jax.composite.losses import Setting, gradient, loss_and_gradient, losses
from cute_ops_jax.distributed.varying import varying_like
from cute_ops_jax.primitive.primitive import Call

Array = jax.Array
State = TypeVar("State")


class Layer(NamedTuple):
    """What is differentiated, or its gradients; None where absent."""

    hidden: Any
    weight: Any
    bias: Any


def rows(setting: Setting, layer: Layer, target: Array, *, call: Call) -> tuple[Array, ...]:
    """Loss of each row, and its lse in two parts."""

    def body(state: tuple[Array, ...], first: Any, size: int) -> tuple[Array, ...]:
        found = losses(setting, _logits(layer, first, size), _cut(target, first, size), call)
        return tuple(_put(s, a, first) for s, a in zip(state, found, strict=True))

    return _each_chunk(setting, layer, (_zeros(target),) * 3, body)


def step(setting: Setting, layer: Layer, target: Array, dloss: Array, *, call: Call) -> tuple[Array, Layer]:
    """Loss of each row, and the gradients of the layer."""

    def body(state: tuple[Array, Layer], first: Any, size: int) -> tuple[Array, Layer]:
        total, gradients = state
        logits, classes, share = _logits(layer, first, size), _cut(target, first, size), _cut(dloss, first, size)
        loss, dlogits = loss_and_gradient(setting, logits, classes, share, call)
        return _put(total, loss, first), _add(gradients, layer, first, dlogits)

    loss, gradients = _each_chunk(setting, layer, (_zeros(target), _no_gradients(setting, layer)), body)
    return loss, _rounded(gradients, layer)


def rows_bwd(
    setting: Setting, layer: Layer, target: Array, row_max: Array, log_sum: Array, dloss: Array, *, call: Call
) -> Layer:
    """The gradients of the layer, from logits that are computed again."""

    def body(gradients: Layer, first: Any, size: int) -> Layer:
        classes, *lse, share = (_cut(a, first, size) for a in (target, row_max, log_sum, dloss))
        logits = _logits(layer, first, size)
        dlogits = gradient(setting, logits, classes, lse, share, inplace=True, call=call)
        return _add(gradients, layer, first, dlogits)

    return _rounded(_each_chunk(setting, layer, _no_gradients(setting, layer), body), layer)


def _each_chunk(setting: Setting, layer: Layer, start: State, body: Callable[[State, Any, int], State]) -> State:
    """``state = body(state, first row, rows)`` for every chunk: a loop over the whole ones, then the rest."""
    count, width = layer.hidden.shape
    size = setting.chunk_rows or chunks.rows_per_chunk(
        count, width, layer.weight.shape[0], layer.hidden.dtype.itemsize, chunks.ENOUGH
    )
    size = min(size, count)
    whole, rest = divmod(count, size)
    state = start
    if whole == 1:
        state = body(state, 0, size)
    elif whole:
        state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, i * size, size), state)
    return body(state, whole * size, rest) if rest else state


def _cut(a: Array, first: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(a, first, size)


def _put(a: Array, part: Array, first: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(a, part.astype(a.dtype), first, 0)


def _logits(layer: Layer, first: Any, size: int) -> Array:
    logits: Array = _cut(layer.hidden, first, size) @ layer.weight.T
    return logits if layer.bias is None else logits + layer.bias


def _no_gradients(setting: Setting, layer: Layer) -> Layer:
    """The gradients before the first chunk, None for those that are not wanted."""

    def zeros(name: str, a: Any, dtype: Any = None) -> Any:
        return varying_like(jnp.zeros(a.shape, dtype or a.dtype), a) if name in setting.wanted else None

    # Those of weight and bias are sums over rows, rounded once at the end.
    dbias = None if layer.bias is None else zeros("dbias", layer.bias, jnp.float32)
    return Layer(zeros("dhidden", layer.hidden), zeros("dweight", layer.weight, setting.accum_dtype), dbias)


def _add(gradients: Layer, layer: Layer, first: Any, dlogits: Array) -> Layer:
    """The gradients with those of one more chunk."""
    dhidden, dweight, dbias = gradients
    if dhidden is not None:
        dhidden = _put(dhidden, dlogits @ layer.weight, first)
    if dweight is not None:
        product = partial(jnp.matmul, preferred_element_type=dweight.dtype)
        dweight = dweight + product(dlogits.T, _cut(layer.hidden, first, dlogits.shape[0]))
    if dbias is not None:
        dbias = dbias + jnp.sum(dlogits, axis=0, dtype=jnp.float32)
    return Layer(dhidden, dweight, dbias)


def _zeros(target: Array) -> Array:
    zeros: Array = varying_like(jnp.zeros(target.shape, jnp.float32), target)
    return zeros


def _rounded(gradients: Layer, layer: Layer) -> Layer:
    """The gradients in the dtypes of the layer."""
    return Layer(*(None if g is None else g.astype(a.dtype) for g, a in zip(gradients, layer, strict=True)))
