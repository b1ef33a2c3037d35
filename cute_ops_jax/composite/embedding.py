"""Embedding lookup, whose weight gradient is written in one pass: :mod:`cute_ops.composite.embedding`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from cute_ops.composite import embedding as declared
from cute_ops.composite.public import continued
from cute_ops_jax import _compat
from cute_ops_jax.primitive.arrays import checked
from cute_ops_jax.primitive.function import register

Array = jax.Array


@checked
@partial(jax.jit, static_argnames=("padding_idx",), inline=_compat.INLINE)
@continued(declared.DOC)
def embedding(index: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """Rows of a table: ``out = weight[index]``.

    As in ``jnp.take``, a negative index counts from the end; an index out of range gives NaN and has no gradient.
    """
    index, weight = jnp.asarray(index), jnp.asarray(weight)
    out: Array = register(declared.embedding)(index, weight, declared.padding(padding_idx, weight.shape))
    return out
