"""The kernels of cross entropy on a chunk of logits, where each device has all classes or some of them.

With some of the classes, each device runs the kernels on its own; :class:`cute_ops.Split` of the declaration says what
such a call is and how the outputs of all devices merge. Devices exchange a few numbers per row, never logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from cute_ops.op import Op
from cute_ops.ops.reduction.cross_entropy import FINISH, cross_entropy
from cute_ops_jax.distributed.slices import on_slices
from cute_ops_jax.distributed.varying import alike, as_axes, manual, varies, varying_like
from cute_ops_jax.primitive.arrays import Arrays
from cute_ops_jax.primitive.primitive import Call, by_stage

Array = jax.Array
Axis: TypeAlias = str | tuple[str, ...]


class Setting(NamedTuple):
    """What is static in a call; without an axis every device has all classes.

    Attributes:
        inplace: the gradient of the logits takes their memory.
        chunk_rows: of :func:`linear_cross_entropy`: rows of a chunk, None where the heuristic chooses.
        accum_dtype: of :func:`linear_cross_entropy`: the dtype in which the weight's gradient is summed.
        wanted: of :func:`linear_cross_entropy`: the gradients to compute, ``"dweight"``.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    axis: Axis | None = None
    inplace: bool = True
    chunk_rows: int | None = None
    accum_dtype: str = "float32"
    wanted: tuple[str, ...] = ()

    @property
    def attrs(self) -> dict[str, Any]:
        return {name: getattr(self, name, default) for name, default in cross_entropy.attrs.items()}

    def run(self, op: Op, inputs: Arrays, inplace: bool = False, call: Call = by_stage) -> Arrays:
        """An op on logits, over the classes of all devices; with ``inplace`` in their memory."""
        attrs, each = {name: self.attrs[name] for name in op.attrs}, partial(call, op, inplace=inplace)
        return each(inputs, attrs) if self.axis is None else on_slices(op, inputs, attrs, self.axis, each)


def check_axis(axis: Axis, what: str) -> None:
    """Raise NameError unless the axis is one of an enclosing ``shard_map``: gradients follow its conventions."""
    missing = [a for a in as_axes(axis) if a not in manual()]
    if missing:
        axes = ", ".join(map(repr, sorted(manual()))) or "none"
        problem = f"axis {missing[0]!r} is no axis of a jax.shard_map that this is called in"
        raise NameError(f"cute.{what}: {problem}; there: {axes}.")


def spread(inputs: Sequence[Any], target: Array, axis: Axis | None) -> tuple[tuple[Any, ...], Array]:
    """The inputs of a loss, made to vary over ``axis`` and every axis that one of them varies over; the target, made to
    vary like the loss, which is the same along ``axis``.

    So JAX adds up the gradients of inputs that devices share.
    """
    given = [a for a in (*inputs, target) if a is not None]
    if axis is not None:
        given.append(jax.lax.axis_index(axis))  # varies over the axis, if replication is checked
        if varies(target, axis):
            # The gathered rows are the same on all devices; a maximum over them tells JAX so.
            target = jax.lax.pmax(jax.lax.stop_gradient(target), axis)
    varying = iter(alike(given))
    found = tuple(None if a is None else next(varying) for a in inputs)
    return found, varying_like(target, found[0], axis)


def reduced(setting: Setting, loss: Array, target: Array) -> Array:
    """The mean or the sum of the rows' losses, or the losses themselves."""
    found = FINISH.apply(jnp, {"target": target}, {"loss": loss}, setting.attrs, reduction=setting.reduction)
    total: Array = found["loss"]
    return total


def of_rows(setting: Setting, dloss: Array, target: Array) -> Array:
    """The cotangent of each row's loss, from that of :func:`reduced`."""
    if setting.reduction == "mean":
        dloss = dloss / jnp.sum(target != setting.ignore_index)
    return jnp.broadcast_to(dloss, target.shape)


def summed(setting: Setting, dloss: Array) -> Array:
    """The whole cotangent of the loss: without replication checks each device has a part of it, as of any ``psum``."""
    checked = setting.axis is None or varies(jax.lax.axis_index(setting.axis), setting.axis)
    return dloss if checked else jax.lax.psum(dloss, setting.axis)
