"""Cross entropy inside of a ``shard_map``, where every device has some of the classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.errors import message
from cute_ops.ops.reduction.cross_entropy import FINISH, cross_entropy_bwd
from cute_ops.ops.reduction.cross_entropy import cross_entropy as op
from cute_ops_jax.composite.losses import Axis, Setting, check_axis, of_rows, reduced, spread, summed
from cute_ops_jax.primitive.arrays import specs

Array = jax.Array


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
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, of the rows that this device has. Where rows are sharded over
            another axis and some are ignored, use ``"sum"`` and divide by the ``psum`` of the number of the others.
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(setting: Setting, logits: Array, target: Array) -> Array:
    return _forward(setting, logits, target)[0]


def _forward(setting: Setting, logits: Array, target: Array) -> tuple[Array, Any]:
    found = dict(setting.run(op, {"logits": logits, "target": target}))
    return reduced(setting, found.pop("loss"), target), {"logits": logits, "target": target, **found}


def _backward(setting: Setting, saved: Any, dloss: Array) -> tuple[Array, None]:
    dloss = of_rows(setting, summed(setting, dloss), saved["target"])
    return setting.run(cross_entropy_bwd, {**saved, "dloss": dloss}, setting.inplace)["dlogits"], None


_loss.defvjp(_forward, _backward)
