"""The loss of a linear head whose logits are float32 although its operands are not: a chunk of rows at a time.

The ops of :mod:`cute_ops.composite.linear_cross_entropy` round logits to the operands' dtype; a program that asks for a
product in float32 means them not to be. Their gradient is rounded before its products, as it is there, but not to
float16, in which it may vanish.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite.chunks import ENOUGH, rows_per_chunk
from cute_ops.declaration.op import Op
from cute_ops_jax.distributed.explicit import as_typed, whole
from cute_ops_jax.primitive.any_size import is_symbolic
from cute_ops_jax.primitive.function import register

WIDE = jnp.float32


def wide_head(op: Op, hidden: Any, weight: Any, bias: Any, target: Any, attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results of an op of logits and targets for each row. The backward computes the logits again."""
    bias = bias if bias is None else whole(bias)
    rows, (n, k) = prod(hidden.shape[:-1]), weight.shape
    if is_symbolic(rows):
        size, chunks = 1, rows
    else:
        chunks = max(-(-rows // rows_per_chunk(rows, k, n, 4, ENOUGH)), 1)
        size = -(-rows // chunks)
    wide = whole(weight).astype(WIDE)  # its gradient is summed in float32

    @jax.checkpoint
    def of_chunk(given: tuple[Any, Any]) -> tuple[Any, ...]:
        some, at = given
        logits = product(some, wide)
        made = register(op)(logits if bias is None else logits + bias, at, reduction="none", **attrs)
        return made if isinstance(made, tuple) else (made,)

    # A chunk has rows of all places: where devices share the rows, each has some of every chunk.
    def cut(array: Any) -> Any:
        flat = array.reshape(rows, *array.shape[target.ndim :])
        if not is_symbolic(rows) and size * chunks > rows:
            flat = jnp.pad(flat, [(0, size * chunks - rows), *[(0, 0)] * (flat.ndim - 1)])
        return jnp.swapaxes(flat.reshape(size, chunks, *flat.shape[1:]), 0, 1)

    made = jax.lax.map(of_chunk, (cut(whole(hidden)), cut(whole(target))))
    flat = (jnp.swapaxes(each, 0, 1).reshape(-1)[:rows] for each in made)
    return tuple(as_typed(each.reshape(target.shape), jax.typeof(target)) for each in flat)


@jax.custom_vjp
def product(rows: Any, weight: Any) -> Any:
    """``rows @ weight.T`` in float32, of a weight that is held in float32 and multiplied in the rows' dtype."""
    return jnp.matmul(rows, weight.astype(rows.dtype).T, preferred_element_type=WIDE)


def _forward(rows: Any, weight: Any) -> Any:
    return product(rows, weight), (rows, weight)


def _backward(saved: Any, dout: Any) -> Any:
    rows, weight = saved
    if rows.dtype != jnp.float16:
        dout = dout.astype(rows.dtype)
    drows = jnp.matmul(dout, weight.astype(rows.dtype))
    both = (tuple(range(rows.ndim - 1)),) * 2
    return drows.astype(rows.dtype), jax.lax.dot_general(dout, rows, (both, ((), ())), preferred_element_type=WIDE)


product.defvjp(_forward, _backward)
