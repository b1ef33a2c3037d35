"""Cross entropy inside of a ``shard_map``, where every device has some of the classes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_jax.primitive.arrays import checked
from cute_ops_jax.primitive.function import of_slices

Array = jax.Array
Axis = str | tuple[str, ...]


@checked
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
    function = of_slices(cross_entropy, axis_name, "vocab_parallel_cross_entropy")
    loss: Array = function(
        jnp.asarray(logits), jnp.asarray(target), ignore_index, label_smoothing, z_loss, reduction=reduction,
        inplace_backward=inplace_backward,
    )  # fmt: skip
    return loss
