"""vmap: the batch dim becomes one more leading dim, which costs nothing.

That needs leading dims on every batched input and every output. Where a weight is batched, or a sum over
rows is asked for per example (``dweight`` in a vmap of grad), the op runs once per example in a loop:
right, but as many launches as examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cute_ops.binding import bind
from cute_ops.shapes import Array
from cute_ops_jax.primitive.arrays import spec

if TYPE_CHECKING:
    from cute_ops_jax.primitive.primitive import Attributes, Stage


def batch(
    stage: Stage,
    arrays: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    names: tuple[str, ...],
    attrs: Attributes,
    inplace: bool,
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of a stage's primitive: every result is batched in axis 0."""
    op = stage.op
    given = {name: (a, axis) for name, a, axis in zip(names, arrays, axes, strict=True)}
    batched = {name: jnp.moveaxis(a, axis, 0) for name, (a, axis) in given.items() if axis is not None}
    shared = {name: a for name, (a, axis) in given.items() if axis is None}
    size = next(iter(batched.values())).shape[0]

    def run(inputs: dict[str, Any]) -> list[jax.Array]:
        return [result for result in stage({**shared, **inputs}, dict(attrs), inplace).values() if result is not None]

    example = {name: Array(a.shape[1:], spec(a).dtype) for name, a in batched.items()}
    one = bind(op, {**{name: spec(a) for name, a in shared.items()}, **example}, dict(attrs))
    outputs, dims = one.outputs, one.dims
    folds = all(op.inputs[name].rows for name in batched)
    folds &= all(op.outputs[name].rows for name, out in outputs.items() if out is not None)
    if folds:
        # What broadcasts over leading dims does so over one more, unless one such input is batched: then all of them
        # get all leading dims.
        kept = not any(op.inputs[n].broadcast for n in batched)
        rows = {n: a for n, a in given.items() if op.inputs[n].rows and not (op.inputs[n].broadcast and kept)}
        whole = {n: _whole(*a, size, op.inputs[n].of(dims)) for n, a in rows.items()}
        results = run({**batched, **whole})
    else:
        results = jax.lax.map(run, batched)
    return results, [0] * len(results)


def _whole(array: jax.Array, axis: int | None, size: int, shape: tuple[int, ...]) -> jax.Array:
    """The array with the batch in axis 0 and all leading dims."""
    batch = 1 if axis is None else size
    one = array[None] if axis is None else jnp.moveaxis(array, axis, 0)
    ones = (1,) * (len(shape) + 1 - one.ndim)
    return jnp.broadcast_to(one.reshape(batch, *ones, *one.shape[1:]), (size, *shape))
