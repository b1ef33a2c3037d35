"""Cross entropy where every device has some of the classes: a ``shard_map`` program of our kernels and small sums.

Each device runs the kernels on its own classes; the declaration says what such a call is and how the outputs of all are
combined (:class:`cute_ops.Split`). Devices exchange a few numbers per row, never logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops.errors import message
from cute_ops.ops.reduction.cross_entropy import FINISH
from cute_ops.ops.reduction.cross_entropy import cross_entropy as op
from cute_ops.ops.reduction.cross_entropy import cross_entropy_bwd as op_bwd
from cute_ops.ops.reduction.cross_entropy import cross_entropy_step as op_step
from cute_ops_jax.composite.primitive import Call, by_stage
from cute_ops_jax.distributed import sharding
from cute_ops_jax.primitive.arrays import specs

Array = jax.Array
Arrays = Mapping[str, Any]
Axis = str | tuple[str, ...]


class Setting(NamedTuple):
    """What is static in a call; without an axis every device has all classes."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    axis: Axis | None = None
    inplace: bool = True
    # Of linear_cross_entropy: rows of a chunk, where it is not to choose, what the weight's gradient is summed in, and
    # the gradients that somebody wants.
    chunk_rows: int | None = None
    accum_dtype: str = "float32"
    wanted: tuple[str, ...] = ()

    @property
    def attrs(self) -> dict[str, Any]:
        return {name: getattr(self, name, default) for name, default in op.attrs.items()}


def check_axis(axis: Axis, what: str) -> None:
    """Raise NameError unless the axis is one of an enclosing ``shard_map``: gradients follow its conventions."""
    missing = [a for a in sharding.as_axes(axis) if a not in sharding.manual()]
    if missing:
        axes = ", ".join(map(repr, sorted(sharding.manual()))) or "none"
        problem = f"axis {missing[0]!r} is no axis of a jax.shard_map that this is called in"
        raise NameError(f"cute.{what}: {problem}; there: {axes}.")


def reduced(setting: Setting, loss: Array, target: Array) -> Array:
    found = FINISH.apply(jnp, {"target": target}, {"loss": loss}, setting.attrs, reduction=setting.reduction)
    return found["loss"]


def losses(setting: Setting, logits: Array, target: Array, call: Call = by_stage) -> tuple[Array, ...]:
    """Loss of each row of ``logits: T[m n]``, over all classes, and its lse in two parts."""
    given: Arrays = {"logits": logits, "target": target}
    if setting.axis is None:
        found: Arrays = call(op, given, setting.attrs)
    else:
        found = sharding.on_slices(op, given, setting.attrs, setting.axis, partial(call, op))
    return tuple(found[name] for name in op.outputs)


def gradient(
    setting: Setting, logits: Array, target: Array, lse: Sequence[Array], dloss: Array, inplace: bool,
    call: Call = by_stage,
) -> Array:  # fmt: skip
    """Gradient of the logits that this device has; ``inplace``: in their memory."""
    arrays = (logits, target, *lse, dloss)
    given: Arrays = dict(zip(op_bwd.inputs, arrays, strict=True))
    backward = partial(call, op_bwd, inplace=inplace)
    if setting.axis is None:
        found: Arrays = backward(given, setting.attrs)
    else:
        found = sharding.on_slices(op_bwd, given, setting.attrs, setting.axis, backward)
    return found["dlogits"]


def loss_and_gradient(
    setting: Setting, logits: Array, target: Array, dloss: Array, call: Call = by_stage
) -> tuple[Array, Array]:
    """Loss of each row over all classes, and the gradient of the logits that this device has, in their memory."""
    if setting.axis is None:
        given: Arrays = {"logits": logits, "target": target, "dloss": dloss}
        found: Arrays = call(op_step, given, {n: setting.attrs[n] for n in op_step.attrs}, inplace=True)
        return found["loss"], found["dlogits"]
    loss, *lse = losses(setting, logits, target, call)
    return loss, gradient(setting, logits, target, lse, dloss, inplace=True, call=call)


@partial(
    jax.jit,
    static_argnames=("axis_name", "ignore_index", "label_smoothing", "z_loss", "reduction", "inplace_backward"),
    inline=True,
)
def vocab_parallel_cross_entropy(
    logits: Array,
    target: Array,
    axis_name: Axis,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
) -> Array:
    """:func:`cross_entropy` inside ``jax.shard_map``, each device with its share of the classes.

    ``loss`` is that of the logits of all devices along ``axis_name``, side by side; they are never gathered. Devices
    exchange three numbers per row in the forward and none in the backward.

    Args:
        logits: ``T[*m n]``, the classes ``i * n`` to ``(i + 1) * n`` on device ``i`` of the axis.
        target: integers ``[*m]``, counted over the classes of all devices; the same on all of them.
        axis_name: the mesh axis that the classes are spread over, or several, the first one outermost.
        ignore_index, label_smoothing, z_loss: as in :func:`cross_entropy`, over all classes.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, of the rows that this device has. Where rows are spread over
            another axis and some are ignored, take ``"sum"`` and divide by the ``psum`` of those that are not.
        inplace_backward: overwrite the logits with their gradient.

    Returns:
        float32: a scalar, or ``[*m]``, the same on all devices of the axis. Gradients are those of the written-out
        program, with and without ``check_vma``.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an unknown reduction.
        NameError: no such axis of a ``shard_map``.

    Source: Shoeybi et al., Megatron-LM, 2019.
    """
    logits, target = jnp.asarray(logits), jnp.asarray(target)
    FINISH.check("vocab_parallel_cross_entropy", {"reduction": reduction})
    if logits.ndim < 1 or target.shape != logits.shape[:-1] or not logits.shape[-1]:
        given = specs({"logits": logits, "target": target})
        problem = "expected the leading dims of `logits`, which have at least one class"
        raise ValueError(message(op, f"argument `target` has shape {target.shape}, {problem}.", given))
    setting = Setting(ignore_index, label_smoothing, z_loss, reduction, axis_name, inplace_backward)
    check_axis(axis_name, "vocab_parallel_cross_entropy")
    (logits,), target = spread((logits,), target, axis_name)
    loss = _loss(setting, logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
    return loss.reshape(target.shape) if reduction == "none" else loss


def spread(inputs: tuple[Any, ...], target: Array, axis: Axis | None) -> tuple[tuple[Any, ...], Array]:
    """The inputs of a loss as values that vary over every axis that one of them varies over, and over ``axis``.

    So JAX adds up the gradients of what devices share. The target varies like the loss: not over ``axis``.
    """
    given = [a for a in (*inputs, target) if a is not None]
    if axis is not None:
        given.append(jax.lax.axis_index(axis))  # varies over the axis, where JAX minds
        if sharding.varies(target, axis):
            # Of gathered rows all devices have the same ones: now JAX knows.
            target = jax.lax.pmax(jax.lax.stop_gradient(target), axis)
    alike = iter(sharding.alike(given))
    found = tuple(None if a is None else next(alike) for a in inputs)
    return found, sharding.varying_like(target, found[0], axis)


def summed(setting: Setting, dloss: Array) -> Array:
    """The loss's cotangent: without replication checks devices have parts of it, as with any ``psum``."""
    checked = setting.axis is None or sharding.varies(jax.lax.axis_index(setting.axis), setting.axis)
    return dloss if checked else jax.lax.psum(dloss, setting.axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(setting: Setting, logits: Array, target: Array) -> Array:
    return reduced(setting, losses(setting, logits, target)[0], target)


def _forward(setting: Setting, logits: Array, target: Array) -> tuple[Array, Any]:
    loss, *lse = losses(setting, logits, target)
    return reduced(setting, loss, target), (logits, target, lse)


def _backward(setting: Setting, saved: Any, dloss: Array) -> tuple[Array, None]:
    logits, target, lse = saved
    dloss = summed(setting, dloss)
    if setting.reduction == "mean":
        dloss = dloss / jnp.sum(target != setting.ignore_index)
    dloss = jnp.broadcast_to(dloss, target.shape)
    return gradient(setting, logits, target, lse, dloss, setting.inplace), None


_loss.defvjp(_forward, _backward)
