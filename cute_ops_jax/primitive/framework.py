"""JAX's functions for the programs of composites: see :class:`cute_ops.declaration.program.Program`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.declaration.array_api import count_up_to
from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops_jax.distributed.varying import varying_like
from cute_ops_jax.primitive import lowering
from cute_ops_jax.primitive.any_size import is_symbolic
from cute_ops_jax.primitive.arrays import specs
from cute_ops_jax.primitive.row_chunks import Chunks

Array = jax.Array
where = jnp.where
broadcast_to = jnp.broadcast_to
chunks = Chunks

shared = False


def ones(shape: tuple[int, ...], like: Array) -> Array:
    return varying_like(jnp.ones(shape, jnp.float32), like)  # type: ignore[no-any-return]


def number(value: float, like: Array) -> Array:
    return varying_like(jnp.full((), value, jnp.float32), like)  # type: ignore[no-any-return]


def rows_of(table: Array, index: Array) -> Array:
    """Rows of a table by index: negative ones count from the end, rows of one out of range are NaN."""
    return jnp.take(table, index, axis=0)


def named_rows(index: Array, count: int) -> tuple[Array, bool]:
    """(index, whether one that is no row is an error) for kernels that copy rows as :func:`rows_of` does."""
    return classes_of(index, count), False


def classes_of(index: Array, count: int) -> Array:
    index = jnp.where(index < 0, index + count, index)
    return jnp.where((index >= 0) & (index < count), index, count).astype(jnp.int32)


def sort(keys: Array) -> tuple[Array, Array]:
    found, order = jax.lax.sort_key_val(keys, varying_like(jnp.arange(keys.size, dtype=jnp.int32), keys))
    return found, order


def whole(x: Array) -> Array:
    return x.astype(jnp.int32)


def scattered(values: Array, index: Array, like: Array) -> Array:
    # jnp.put_along_axis takes no symbolic sizes.
    rows = (jax.lax.broadcasted_iota(index.dtype, index.shape, axis) for axis in range(index.ndim - 1))
    return jnp.zeros_like(like).at[(*rows, index)].set(values)


def picked(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=-1)


def cast(x: Array, like: Array) -> Array:
    return x.astype(like.dtype)


def offsets(starts: Array, count: int) -> Array:
    return starts[..., None] + jnp.arange(count, dtype=starts.dtype)


def with_rows(x: Array, index: Array, rows: Array) -> Array:
    return x.at[index].set(rows)


def plus_rows(x: Array, index: Array, rows: Array) -> Array:
    return x.at[index].add(rows)


def ends(keys: Array, count: int) -> Array:
    every = jnp.arange(count, dtype=jnp.int32)
    if is_symbolic(keys.size):
        return count_up_to(jnp, keys, every)  # type: ignore[no-any-return]
    return jnp.searchsorted(keys, every, side="right", method="scan_unrolled").astype(jnp.int32)


def joined(arrays: tuple[Array, ...], axis: int) -> Array:
    return jnp.concatenate(arrays, axis)


def product(a: Array, b: Array, dtype: str | None = None) -> Array:
    """Of float32 the factors are rounded only if ``jax_default_matmul_precision`` says so."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    precision = "highest" if a.dtype == jnp.float32 and asked is None else None
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype or a.dtype)


def sums(x: Array, axes: tuple[int, ...], like: Array) -> Array:
    return jnp.sum(x, axes, dtype=jnp.float32).astype(like.dtype)


def add_product(total: Array, a: Array, b: Array) -> Array:
    return (total.astype(jnp.float32) + product(a, b, "float32")).astype(total.dtype)


def added(total: Array, index: tuple[Any, ...], value: Array) -> Array:
    return total.at[index].add(value)


def repeat(count: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    return jax.lax.fori_loop(0, count, step, state)


def kernel_is_faster(op: Op, inputs: Mapping[str, Array], attrs: Mapping[str, Any]) -> bool:
    return lowering.kernel_is_faster(bind(op, specs(inputs), attrs))
