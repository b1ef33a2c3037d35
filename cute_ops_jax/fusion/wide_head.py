"""The loss of a linear head whose logits are float32 although its operands are not: a chunk of rows at a time.

The ops of :mod:`cute_ops.composite.linear_cross_entropy` round logits to the operands' dtype; a program that asks for a
product in float32 means them not to be. Their gradient is rounded before its products, as it is there, but not to
float16, in which it may vanish.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops.composite.chunks import ENOUGH, rows_per_chunk
from cute_ops.declaration.op import Op
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_jax.distributed.explicit import as_typed, whole
from cute_ops_jax.distributed.varying import alike, varying_like
from cute_ops_jax.primitive.any_size import is_symbolic
from cute_ops_jax.primitive.function import register

WIDE = jnp.float32
IGNORED = -1


def wide_head(op: Op, hidden: Any, weight: Any, bias: Any, target: Any, attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results of an op of logits and targets for each row. The backward computes the logits again."""
    bias = bias if bias is None else whole(bias)
    chunks = Chunks.of(hidden, weight, target)
    wide = whole(weight).astype(WIDE)  # its gradient is summed in float32

    @jax.checkpoint
    def of_chunk(given: tuple[Any, Any]) -> tuple[Any, ...]:
        made = _of_rows(op, attrs, given[0], wide, bias, given[1])
        return made if isinstance(made, tuple) else (made,)

    made = jax.lax.map(of_chunk, (chunks.cut(whole(hidden)), chunks.cut(whole(target))))
    flat = map(chunks.joined, made)
    return tuple(as_typed(each.reshape(target.shape), jax.typeof(target)) for each in flat)


def wide_sum(hidden: Any, weight: Any, bias: Any, target: Any, attrs: Mapping[str, Any]) -> Any:
    """The sum of the cross entropies of rows whose target is not -1. Their gradients are computed with it, so logits
    are not computed twice.
    """
    here = [each for each in (hidden, weight, target, bias) if each is not None]
    hidden, weight, target, *biases = alike([whole(each) for each in here])
    return _sum(tuple(attrs.items()), hidden, weight, biases[0] if biases else None, target)


class Chunks(NamedTuple):
    """How rows are cut into chunks. A chunk has rows of all places: where devices share the rows, each has some of
    every chunk.

    Attributes:
        rows: how many there are.
        size, count: rows of a chunk, and the number of chunks.
        rank: dims of the rows.
    """

    rows: Any
    size: Any
    count: Any
    rank: int

    @classmethod
    def of(cls, hidden: Any, weight: Any, target: Any) -> Chunks:
        rows, (n, k) = prod(hidden.shape[:-1]), weight.shape
        if is_symbolic(rows):
            return cls(rows, 1, rows, target.ndim)
        count = max(-(-rows // rows_per_chunk(rows, k, n, 4, ENOUGH)), 1)
        return cls(rows, -(-rows // count), count, target.ndim)

    def cut(self, array: Any) -> Any:
        """The chunks of an array with rows, ``[count, size, ...]``. What is added to the last are ignored targets."""
        flat, more = array.reshape(self.rows, *array.shape[self.rank :]), 0
        if not is_symbolic(self.rows):
            more = self.size * self.count - self.rows
        if more:
            flat = jnp.pad(flat, [(0, more), *[(0, 0)] * (flat.ndim - 1)], constant_values=IGNORED)
        return jnp.swapaxes(flat.reshape(self.size, self.count, *flat.shape[1:]), 0, 1)

    def joined(self, array: Any) -> Any:
        """The rows of an array of chunks."""
        return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])[: self.rows]


def _of_rows(op: Op, attrs: Mapping[str, Any], rows: Any, weight: Any, bias: Any, target: Any) -> Any:
    logits = product(rows, weight)
    return register(op)(logits if bias is None else logits + bias, target, reduction="none", **attrs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(attrs: tuple[Any, ...], hidden: Any, weight: Any, bias: Any, target: Any) -> Any:
    (losses,) = wide_head(cross_entropy, hidden, weight, bias, target, dict(attrs))
    return jnp.sum(losses)


def _sum_forward(attrs: tuple[Any, ...], hidden: Any, weight: Any, bias: Any, target: Any) -> Any:
    chunks, wide = Chunks.of(hidden, weight, target), weight.astype(WIDE)

    def of_chunk(sums: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
        rows, at = given

        def of_rows(rows: Any, wide: Any, bias: Any) -> Any:
            return jnp.sum(_of_rows(cross_entropy, dict(attrs), rows, wide, bias, at))

        loss, (drows, *gradients) = jax.value_and_grad(of_rows, (0, 1, 2))(rows, wide, bias)
        return jax.tree.map(jnp.add, sums, (loss, *gradients)), drows

    zeros = jax.tree.map(lambda a: varying_like(jnp.zeros(a.shape, WIDE), hidden), (jnp.zeros(()), wide, bias))
    (loss, *gradients), drows = jax.lax.scan(of_chunk, zeros, (chunks.cut(hidden), chunks.cut(target)))
    return loss, (chunks.joined(drows).reshape(hidden.shape), gradients, weight, bias)


def _sum_backward(attrs: tuple[Any, ...], saved: Any, dloss: Any) -> Any:
    dhidden, gradients, weight, bias = saved

    def scaled(gradient: Any, like: Any) -> Any:
        return (gradient * dloss).astype(like.dtype)

    return scaled(dhidden, dhidden), *jax.tree.map(scaled, tuple(gradients), (weight, bias)), None


_sum.defvjp(_sum_forward, _sum_backward)


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
