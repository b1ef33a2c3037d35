"""Rows of a linear layer a chunk at a time: :class:`cute_ops.composite.chunks.Chunks` in JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from cute_ops.composite import chunks
from cute_ops.declaration.op import Op
from cute_ops.ops.gemm.linear import linear, linear_dx
from cute_ops_jax.distributed.varying import varying_like
from cute_ops_jax.primitive.any_size import is_symbolic
from cute_ops_jax.primitive.arrays import Arrays

Array = jax.Array
State = TypeVar("State")
_AUTO = {"fused": "auto"}
# Up to so many 16-bit rows our products may be faster than XLA's: 0.86 to 1.00 of the whole loss's time on an H200.
FEW = 256
# A chunk: its first row, and how many.
At: TypeAlias = tuple[Any, int]


class Chunks:
    """The chunks of a call.

    Args:
        inputs: hidden, weight, bias and what else has rows, by name; those of another head with a word before each.
        attrs: ``accum_dtype`` and ``chunk_rows``, 0 where the heuristic chooses.
        wanted: the gradients to sum up.
        share: means nothing here: XLA places arrays.
        call: multiplies all rows at once where they are few, by our kernel or XLA's, whichever is faster. XLA makes all
            other products.
        by: chunks are always of rows: a loop over blocks of classes would carry the weight's gradient as well.
    """

    def __init__(
        self, inputs: Arrays, attrs: Mapping[str, Any], wanted: Collection[str], share: bool = False,
        call: Any = None, by: str = "rows",
    ) -> None:  # fmt: skip
        self.inputs, self.attrs, self.wanted = inputs, attrs, wanted
        self.hidden, self.weight, self.bias = inputs["hidden"], inputs["weight"], inputs["bias"]
        # In an exported program. Rows are then gathered and scattered, since it is not known that a chunk's fit.
        self.symbolic = is_symbolic(self.hidden.shape[0])
        self.size = self._rows_per_chunk()
        few = not self.symbolic and self.hidden.shape[0] <= min(self.size, FEW) and self.hidden.dtype.itemsize == 2
        self._call = call if few else None

    def each(self, state: State, body: Callable[[State, At], State]) -> State:
        """A loop over the chunks of one size, then the rest."""
        count, size = self.hidden.shape[0], self.size
        if self.symbolic:
            # The last chunk has the rest, at least one row: no kernel takes none.
            whole, rest = (count - 1) // size, (count - 1) % size + 1
            state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, (i * size, size)), state)
            return body(state, (whole * size, rest))
        size = max(min(size, count), 1)
        whole, rest = divmod(count, size)
        if whole == 1:
            state = body(state, (0, size))
        elif whole:
            state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, (i * size, size)), state)
        return body(state, (whole * size, rest)) if rest else state

    def of_chunk(self, op: Op, inputs: Arrays, attrs: Mapping[str, Any], at: At) -> tuple[Arrays, Mapping[str, Any]]:
        return inputs, attrs

    def _rows_per_chunk(self) -> int:
        (rows, width), vocab = self.hidden.shape, self.weight.shape[0]
        if given := self.attrs["chunk_rows"]:
            return given  # type: ignore[no-any-return]
        if is_symbolic(width) or is_symbolic(vocab):
            return chunks.ENOUGH
        rows = chunks.MAX_ROWS if self.symbolic else rows
        heads = sum(name.endswith("hidden") for name in self.inputs)
        return chunks.rows_per_chunk(rows, width, heads * vocab, self.hidden.dtype.itemsize, chunks.ENOUGH // heads)

    def new_rows(self) -> Array:
        like = self.inputs.get("target", self.hidden)  # which devices may share differently than hidden states
        return varying_like(jnp.zeros(self.hidden.shape[:1], jnp.float32), like)  # type: ignore[no-any-return]

    def all_rows(self, array: Array) -> Array:
        return array

    def cut(self, name: str, at: At) -> Array:
        if self.symbolic:
            return jnp.take(self.inputs[name], _places(at), axis=0, mode="clip")
        return jax.lax.dynamic_slice_in_dim(self.inputs[name], *at)

    def put(self, array: Array, at: At, rows: Array) -> Array:
        if self.symbolic:
            there = array.at[_places(at)]
            return there.set(
                rows.astype(array.dtype), indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
            )
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), at[0], 0)

    def logits(self, at: At, head: str = "") -> Array:
        hidden, weight, bias = (self.inputs[f"{head}{name}"] for name in ("hidden", "weight", "bias"))
        if self._call and bias is None:
            return self._call(linear, {"x": hidden, "weight": weight}, _AUTO)["out"]  # type: ignore[no-any-return]
        logits: Array = self.cut(f"{head}hidden", at) @ weight.T
        return logits if bias is None else logits + bias

    def sums(self) -> dict[str, Array]:
        # Sums of the gradients of weight and bias over chunks are rounded once at the end. The weight's gradient of one
        # chunk is a product, which rounds it.
        accum = self.attrs["accum_dtype"]
        dtypes: dict[str, Any] = {"dweight": jnp.float32 if accum == chunks.AUTO else accum, "dbias": jnp.float32}
        if not self.symbolic and self.size >= self.hidden.shape[0]:
            del dtypes["dweight"]
        found = {}
        for name in self.wanted:
            if (a := self.inputs[name.removeprefix("d")]) is not None:
                found[name] = varying_like(jnp.zeros(a.shape, dtypes.get(name, a.dtype)), a)
        return found

    def put_product(self, array: Array, at: At, a: Array, b: Array) -> Array:
        if self._call:
            return self._call(linear_dx, {"dout": a, "weight": b}, _AUTO)["dx"]  # type: ignore[no-any-return]
        return self.put(array, at, a @ b)

    def add_product(self, total: Array, at: At, a: Array, b: Array) -> Array:
        return total + jnp.matmul(a, b, preferred_element_type=total.dtype)

    def add_rows(self, total: Array, at: At, rows: Array) -> Array:
        return total + jnp.sum(rows, axis=0, dtype=jnp.float32)

    def rounded(self, sums: Arrays) -> Arrays:
        return {name: total.astype(self.hidden.dtype) for name, total in sums.items()}


def _places(at: At) -> Array:
    """The rows of a chunk."""
    places: Array = at[0] + jnp.arange(at[1], dtype=jnp.int32)
    return places
