"""Rows of a linear layer a chunk at a time: :class:`cute_ops.composite.chunks.Chunks` in JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from cute_ops.composite import chunks
from cute_ops_jax.distributed.varying import varying_like
from cute_ops_jax.primitive.arrays import Arrays

Array = jax.Array
State = TypeVar("State")
# A chunk: its first row, and how many.
At: TypeAlias = tuple[Any, int]


class Chunks:
    """The chunks of a call.

    Args:
        inputs: hidden, weight, bias and what else has rows, by name.
        attrs: ``accum_dtype`` and ``chunk_rows``, 0 where the heuristic chooses.
        wanted: the gradients to sum up.
        share: means nothing here: XLA places arrays.
    """

    def __init__(self, inputs: Arrays, attrs: Mapping[str, Any], wanted: Collection[str], share: bool = False) -> None:
        self.inputs, self.attrs, self.wanted = inputs, attrs, wanted
        self.hidden, self.weight, self.bias = inputs["hidden"], inputs["weight"], inputs["bias"]

    def each(self, state: State, body: Callable[[State, At], State]) -> State:
        """A loop over the chunks of one size, then the rest."""
        count, width = self.hidden.shape
        size = self.attrs["chunk_rows"] or chunks.rows_per_chunk(
            count, width, self.weight.shape[0], self.hidden.dtype.itemsize, chunks.ENOUGH
        )
        size = max(min(size, count), 1)
        whole, rest = divmod(count, size)
        if whole == 1:
            state = body(state, (0, size))
        elif whole:
            state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, (i * size, size)), state)
        return body(state, (whole * size, rest)) if rest else state

    def new_rows(self) -> Array:
        target = self.inputs["target"]
        return varying_like(jnp.zeros(target.shape, jnp.float32), target)  # type: ignore[no-any-return]

    def cut(self, name: str, at: At) -> Array:
        return jax.lax.dynamic_slice_in_dim(self.inputs[name], *at)

    def put(self, array: Array, at: At, rows: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), at[0], 0)

    def logits(self, at: At) -> Array:
        logits: Array = self.cut("hidden", at) @ self.weight.T
        return logits if self.bias is None else logits + self.bias

    def sums(self) -> dict[str, Array]:
        # Those of weight and bias are rounded once at the end.
        dtypes, found = {"dweight": self.attrs["accum_dtype"], "dbias": jnp.float32}, {}
        for name in self.wanted:
            if (a := self.inputs[name.removeprefix("d")]) is not None:
                found[name] = varying_like(jnp.zeros(a.shape, dtypes.get(name, a.dtype)), a)
        return found

    def put_product(self, array: Array, at: At, a: Array, b: Array) -> Array:
        return self.put(array, at, a @ b)

    def add_product(self, total: Array, at: At, a: Array, b: Array) -> Array:
        return total + jnp.matmul(a, b, preferred_element_type=total.dtype)

    def add_rows(self, total: Array, rows: Array) -> Array:
        return total + jnp.sum(rows, axis=0, dtype=jnp.float32)

    def rounded(self, sums: Arrays) -> Arrays:
        return {name: total.astype(self.hidden.dtype) for name, total in sums.items()}
