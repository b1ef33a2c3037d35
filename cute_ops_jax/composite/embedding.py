"""Embedding lookup, whose weight gradient is written in one pass.

The forward is XLA's gather. The backward sorts the tokens by class with XLA's sort and finds where each class's tokens
end; our kernel then writes each row of the weight's gradient once. The backward is a :class:`.primitive.Composite`, so
devices that share the tokens each do this for their own, and the results are added up.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from cute_ops.binding import bind
from cute_ops.composite import embedding as declared
from cute_ops.composite.docstrings import continued
from cute_ops.ops.parts.embedding import sorted_embedding_bwd
from cute_ops_jax.composite.primitive import Call, Composite
from cute_ops_jax.distributed import explicit, slices
from cute_ops_jax.distributed.varying import Axes, alike, varying_like
from cute_ops_jax.primitive.arrays import Arrays, specs

Array = jax.Array


@partial(jax.jit, static_argnames=("padding_idx",), inline=True)
@continued(declared.DOC)
def embedding(index: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """Rows of a table: ``out = weight[index]``.

    As in ``jnp.take``, a negative index counts from the end; an index out of range gives NaN and has no gradient.
    """
    index, weight = jnp.asarray(index), jnp.asarray(weight)
    bind(declared.embedding, specs({"index": index, "weight": weight}))
    # Before custom_vjp, so that a replicated weight gets the sum of the devices' gradients.
    index, weight = alike([index, weight])
    return _rows(declared.padding(padding_idx, weight.shape[0]), index, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(padding_idx: int, index: Array, weight: Array) -> Array:
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return _take(index, weight)
    # With explicit axes a gather must be told the sharding of its result.
    given = {"index": index, "weight": weight}
    binding = bind(declared.embedding, specs(given))
    out: Array
    (out,) = explicit.by_type(lambda a, _: {"out": _take(**a)}, slices.on_slices, given, binding)
    return out


def _take(index: Array, weight: Array) -> Array:
    return jnp.take(weight, index, axis=0)


def _forward(padding_idx: int, index: Any, weight: Any) -> tuple[Array, Any]:
    return _rows(padding_idx, index.value, weight.value), (index.value, weight.value)


def _backward(padding_idx: int, saved: tuple[Array, Array], dout: Any) -> tuple[None, Array | None]:
    if isinstance(dout, SymbolicZero):
        return None, None
    index, weight = saved
    given = {"index": index, "weight": weight, "dout": dout}
    return None, _gradient()(given, {"padding_idx": padding_idx})["dweight"]


_rows.defvjp(_forward, _backward, symbolic_zeros=True)


def _program(call: Call, given: Arrays, attrs: Arrays, axes: Axes = ()) -> Arrays:
    index, dout = given["index"].reshape(-1), given["dout"]
    classes, n = given["weight"].shape
    if index.size == 0:
        return {"dweight": varying_like(jnp.zeros((classes, n), dout.dtype), dout)}
    index = jnp.where(index < 0, index + classes, index)
    has_gradient = (index >= 0) & (index < classes) & (index != attrs["padding_idx"])
    # Tokens without a gradient are sorted behind all classes, where the kernel reads nothing.
    key = jnp.where(has_gradient, index, classes).astype(jnp.int32)
    key, order = jax.lax.sort_key_val(key, varying_like(jnp.arange(key.size, dtype=jnp.int32), key))
    every = jnp.arange(classes, dtype=jnp.int32)
    ends = jnp.searchsorted(key, every, side="right", method="scan_unrolled").astype(jnp.int32)
    rows = {"ends": ends, "classes": key, "order": order, "dout": dout.reshape(key.size, n)}
    return call(sorted_embedding_bwd, rows, {})


@cache
def _gradient() -> Composite:
    return Composite(declared.embedding_bwd, _program)
