"""The loops of :func:`linear_cross_entropy` (:mod:`cute_ops.composite.loss_loops`) in JAX: what they are made of, and
how each device runs the whole loop on its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from cute_ops.composite import chunks
from cute_ops.composite.loss_loops import GRADIENTS, LAYER, LOOPS
from cute_ops.op import Op
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_jax.composite.losses import Setting, spread
from cute_ops_jax.distributed.varying import Axes, varying_like
from cute_ops_jax.primitive.arrays import Arrays
from cute_ops_jax.primitive.primitive import Call, Composite, by_stage

Array = jax.Array
State = TypeVar("State")
# A chunk: its first row, and how many.
At: TypeAlias = tuple[Any, int]


def run(name: str, setting: Setting, inputs: Arrays) -> Arrays:
    """The outputs of a loop by name."""
    if setting.axis is not None:  # inside of a shard_map, where the exchange is written out
        return _on_flat_rows(name, setting, inputs, by_stage)
    wanted = tuple(n for n in setting.wanted if n in LOOPS[name].outputs)
    composite = _composite(name, wanted, setting.chunk_rows, setting.accum_dtype)
    return composite(inputs, {n: setting.attrs[n] for n in composite.op.attrs})


@cache
def _composite(name: str, wanted: tuple[str, ...], chunk_rows: int | None, accum_dtype: str) -> Composite:
    loop = LOOPS[name]

    def body(call: Call, given: Arrays, attrs: Arrays, axes: Axes = ()) -> Arrays:
        setting = Setting(
            **attrs, reduction="none", axis=axes or None, chunk_rows=chunk_rows, accum_dtype=accum_dtype, wanted=wanted
        )
        if not axes:
            return _on_flat_rows(name, setting, given, call)
        layer, target = spread(tuple(given[n] for n in LAYER), given["target"], axes)
        of_rows = {n: varying_like(given[n], layer[0], axes) for n in loop.inputs}
        given = {**dict(zip(LAYER, layer, strict=True)), "target": target, **of_rows}
        found = _on_flat_rows(name, setting, given, call)
        # dhidden alone is a sum over classes.
        return {n: jax.lax.psum(a, axes) if n == "dhidden" else a for n, a in found.items()}

    # XLA's cache sees nothing of the program but this name.
    names = ["linear_cross_entropy", name, *wanted, accum_dtype, *([f"rows{chunk_rows}"] if chunk_rows else [])]
    outputs = [n for n in loop.outputs if n not in GRADIENTS or n in wanted]
    return Composite(loop.declared("_".join(names), outputs, body), body)


def _on_flat_rows(name: str, setting: Setting, given: Arrays, call: Call) -> Arrays:
    """A loop on rows with one leading dim; its outputs have the leading dims that were there."""
    loop, lead = LOOPS[name], given["target"].shape
    flat = {n: given[n].reshape(-1) for n in ("target", *loop.inputs)}
    hidden = given["hidden"].reshape(-1, given["hidden"].shape[-1])
    found = loop.run(Chunks(setting, {**given, "hidden": hidden, **flat}, call))
    shapes = {"dhidden": given["hidden"].shape, **dict.fromkeys(cross_entropy.outputs, lead)}
    return {n: a.reshape(shapes.get(n, a.shape)) for n, a in found.items()}


class Chunks:
    """The chunks of a call: :class:`cute_ops.composite.loss_loops.Chunks`.

    Args:
        setting: what is static in the call.
        inputs: of the loop, by name.
        call: runs an op.
    """

    def __init__(self, setting: Setting, inputs: Arrays, call: Call) -> None:
        self.setting, self.inputs, self._call = setting, inputs, call
        self.hidden, self.weight, self.bias = inputs["hidden"], inputs["weight"], inputs.get("bias")
        self.classes_shared = setting.axis is not None

    def each(self, state: State, body: Callable[[State, At], State]) -> State:
        """A loop over the chunks of one size, then the rest."""
        count, width = self.hidden.shape
        size = self.setting.chunk_rows or chunks.rows_per_chunk(
            count, width, self.weight.shape[0], self.hidden.dtype.itemsize, chunks.ENOUGH
        )
        size = max(min(size, count), 1)
        whole, rest = divmod(count, size)
        if whole == 1:
            state = body(state, (0, size))
        elif whole:
            state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, (i * size, size)), state)
        return body(state, (whole * size, rest)) if rest else state

    def call(self, op: Op, inputs: Arrays, *, inplace: bool = False, into: Arrays | None = None) -> Arrays:
        return self.setting.run(op, inputs, inplace, self._call)

    def new_rows(self) -> Array:
        target = self.inputs["target"]
        return varying_like(jnp.zeros(target.shape, jnp.float32), target)  # type: ignore[no-any-return]

    def cut(self, array: Array, at: At) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, *at)

    def put(self, array: Array, at: At, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), at[0], 0)

    def logits(self, at: At) -> Array:
        logits: Array = self.cut(self.hidden, at) @ self.weight.T
        return logits if self.bias is None else logits + self.bias

    def sums(self) -> dict[str, Array]:
        # Those of weight and bias are rounded once at the end.
        dtypes, found = {"dweight": self.setting.accum_dtype, "dbias": jnp.float32}, {}
        for name in self.setting.wanted:
            a = self.inputs[name.removeprefix("d")]
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
