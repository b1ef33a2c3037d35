"""The batching rule: the batch dim becomes one more leading dim, at no cost.

This needs leading dims of one name on every batched input and on every output. Where a weight or leading dims of
another name are batched, or where a sum over rows is wanted per example (``dweight`` in a vmap of grad), an op of
batches runs where the declaration has one. Else the op runs once per example in a loop: correct, but one launch per
example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from cute_ops.binding import Binding
from cute_ops.op import Op, Tensor
from cute_ops_jax.distributed.slices import present
from cute_ops_jax.primitive.arrays import Arrays, Attributes


class SupportsBatching(Protocol):
    """What the rule needs of an op's primitive (:class:`cute_ops_jax.primitive.primitive.OpPrimitive`)."""

    op: Op

    @property
    def batched(self) -> SupportsBatching | None: ...

    def bound(self, arrays: Arrays, attrs: Mapping[str, Any]) -> Binding: ...

    def __call__(
        self, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False
    ) -> Mapping[str, jax.Array | None]: ...


def batch(
    primitive: SupportsBatching,
    arrays: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    names: tuple[str, ...],
    attrs: Attributes,
    inplace: bool,
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of a primitive: every result is batched in axis 0."""
    op = primitive.op
    given = {name: (a, axis) for name, a, axis in zip(names, arrays, axes, strict=True)}
    batched = {name: jnp.moveaxis(a, axis, 0) for name, (a, axis) in given.items() if axis is not None}
    shared = {name: a for name, (a, axis) in given.items() if axis is None}
    size = next(iter(batched.values())).shape[0]

    def run(inputs: dict[str, jax.Array]) -> list[jax.Array]:
        return list(present(primitive({**shared, **inputs}, dict(attrs), inplace)).values())

    example = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in batched.items()}
    one = primitive.bound({name: example.get(name, a) for name, (a, _) in given.items()}, dict(attrs))
    groups = {op.inputs[name].rows for name in batched} | {op.results[name].rows for name in present(one.results)}
    group = next(iter(groups))
    if len(groups) == 1 and group:
        # Inputs that broadcast over leading dims broadcast over one more, unless one of them is batched: then all of
        # them are given all leading dims.
        kept = not any(op.inputs[n].broadcast for n in batched)
        rows = {n: a for n, a in given.items() if op.inputs[n].rows == group and not (op.inputs[n].broadcast and kept)}
        whole = {n: _with_all_leading_dims(*a, size, op.inputs[n].of(one.dims)) for n, a in rows.items()}
        results = run({**batched, **whole})
    elif primitive.batched is not None:
        lead = one.dims[next(t.rows for t in op.inputs.values() if t.rows)]
        matrices = {n: _example_rows(*a, size, op.inputs[n], lead) for n, a in given.items()}
        found = primitive.batched(matrices, dict(attrs), inplace)
        # A program makes outputs of its own also of those that another one serves for.
        every = {n: a for n, a in present(found).items() if one.results[n] is not None}
        results = [a.reshape(size, *lead, *a.shape[2:]) if op.results[n].rows else a for n, a in every.items()]
    else:
        results = jax.lax.map(run, batched)
    return results, [0] * len(results)


def _example_rows(array: jax.Array, axis: int | None, size: int, tensor: Tensor, lead: tuple[int, ...]) -> jax.Array:
    """The array of each example with one dim of rows."""
    each = array[None] if axis is None else jnp.moveaxis(array, axis, 0)
    if tensor.rows:
        each = each.reshape(each.shape[0], math.prod(lead), *each.shape[1 + len(lead) :])
    return jnp.broadcast_to(each, (size, *each.shape[1:]))


def _with_all_leading_dims(array: jax.Array, axis: int | None, size: int, shape: tuple[int, ...]) -> jax.Array:
    """The array broadcast to ``(size, *shape)``, its batch in axis 0."""
    batch = 1 if axis is None else size
    one = array[None] if axis is None else jnp.moveaxis(array, axis, 0)
    ones = (1,) * (len(shape) + 1 - one.ndim)
    return jnp.broadcast_to(one.reshape(batch, *ones, *one.shape[1:]), (size, *shape))
