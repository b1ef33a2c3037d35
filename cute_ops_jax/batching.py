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
from cute_ops.op import Array
from cute_ops_jax.arrays import spec

if TYPE_CHECKING:
    from cute_ops_jax.primitive import Attributes, Stage


def batch(
    stage: Stage,
    arrays: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    names: tuple[str, ...],
    attrs: Attributes,
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule of a stage's primitive: every result is batched in axis 0."""
    op = stage.op
    given = {name: (a, axis) for name, a, axis in zip(names, arrays, axes, strict=True)}
    batched = {name: jnp.moveaxis(a, axis, 0) for name, (a, axis) in given.items() if axis is not None}
    shared = {name: a for name, (a, axis) in given.items() if axis is None}
    size = next(iter(batched.values())).shape[0]

    def run(inputs: dict[str, Any]) -> list[jax.Array]:
        return [result for result in stage({**shared, **inputs}, dict(attrs)).values() if result is not None]

    example = {name: Array(a.shape[1:], spec(a).dtype) for name, a in batched.items()}
    one = bind(op, {**{name: spec(a) for name, a in shared.items()}, **example}, dict(attrs))
    outputs, dims = one.outputs, one.dims
    folds = all(op.inputs[name].rows for name in batched)
    folds &= all(op.outputs[name].rows for name, out in outputs.items() if out is not None)
    if folds:
        # What broadcasts over leading dims broadcasts over one more, unless it is batched: then it needs them all.
        rows = {
            n: jnp.broadcast_to(a, (size, *a.shape))
            for n, a in shared.items()
            if op.inputs[n].rows and not op.inputs[n].broadcast
        }
        for n, a in batched.items():
            declared = op.inputs[n]
            if declared.broadcast:
                whole = declared.of(dims)
                ones = (1,) * (len(whole) + 1 - a.ndim)
                rows[n] = jnp.broadcast_to(a.reshape(size, *ones, *a.shape[1:]), (size, *whole))
        results = run({**batched, **rows})
    else:
        results = jax.lax.map(run, batched)
    return results, [0] * len(results)
