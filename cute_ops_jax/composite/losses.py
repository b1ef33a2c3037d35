"""Cross entropy of a linear layer's output without all logits, :mod:`cute_ops.composite.linear_cross_entropy`, and
losses inside of a ``shard_map``, where every device has some of the classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite import linear_cross_entropy as declared
from cute_ops.composite.public import continued
from cute_ops.errors import shown
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_jax import _compat
from cute_ops_jax.primitive.arrays import checked
from cute_ops_jax.primitive.function import of_slices, register

Array = jax.Array
Axis = str | tuple[str, ...]
STATIC = "ignore_index", "label_smoothing", "z_loss", "reduction", "chunk_rows", "accum_dtype", "softcap", "logit_scale"


@checked
@partial(jax.jit, static_argnames=STATIC, inline=_compat.INLINE)
@continued(declared.DOC)
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: Any = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
) -> Array:
    """Cross entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy`.

    An input that is not differentiated, such as a frozen weight, costs no product. Where ``chunk_rows`` is None, a
    chunk has at least 2048 rows, as long as their logits take no more than four times the memory of the weight: larger
    products are faster where h is small.

    The loop carries the weight's gradient in ``accum_dtype``. In float32 it takes twice the memory of a 16-bit weight,
    beside that of the result, until it is rounded.

    Where rows are sharded, each device runs the loop on its own rows. Where classes are sharded, each device keeps its
    own, as in :func:`vocab_parallel_linear_cross_entropy`, which is for programs inside of a ``shard_map``.
    """
    attrs = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    options = {"reduction": reduction, "chunk_rows": chunk_rows, "accum_dtype": accum_dtype}
    return _loss(register, (hidden, weight, target, bias), attrs, options)


@checked
@partial(jax.jit, static_argnames=("axis_name", *STATIC), inline=_compat.INLINE)
def vocab_parallel_linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    axis_name: Axis,
    bias: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: Any = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
) -> Array:
    """:func:`linear_cross_entropy` inside ``jax.shard_map``, each device with its share of the weight's rows.

    Devices exchange three numbers per row, and the gradient of hidden is a sum over devices. Neither logits nor weights
    are gathered, and no device holds more than a chunk of its own logits.

    Args:
        hidden: ``T[*m h]``, the same on all devices of the axis; float32, float16 or bfloat16.
        weight: ``T[n h]``, the classes ``i * n`` to ``(i + 1) * n`` on device ``i`` of the axis.
        target: integers ``[*m]``, counted over the classes of all devices; the same on all of them.
        axis_name: the mesh axis that the classes are spread over, or several, the first one outermost.
        bias: ``T[n]``, sharded like the weight; -inf for classes that are padding.
        ignore_index, label_smoothing, z_loss: as in :func:`linear_cross_entropy`, over all classes.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, of the rows that this device has.
        chunk_rows, accum_dtype, softcap, logit_scale: as in :func:`linear_cross_entropy`.

    Returns:
        float32: a scalar, or ``[*m]``, the same on all devices of the axis. Gradients are those of the written-out
        program, with and without ``check_vma``.

    Raises:
        TypeError: dtypes that differ or are not listed.
        ValueError: shapes that do not fit, an unknown reduction, ``chunk_rows`` below 1, another ``accum_dtype``.
        NameError: no such axis of a ``shard_map``.
    """
    function = partial(of_slices, axis=axis_name, what="vocab_parallel_linear_cross_entropy")
    attrs = ignore_index, label_smoothing, z_loss, softcap, logit_scale
    options = {"reduction": reduction, "chunk_rows": chunk_rows, "accum_dtype": accum_dtype}
    return _loss(function, (hidden, weight, target, bias), attrs, options)


@checked
@partial(
    jax.jit,
    static_argnames=(
        "axis_name",
        "ignore_index",
        "label_smoothing",
        "z_loss",
        "reduction",
        "inplace_backward",
        "softcap",
        "logit_scale",
    ),
    inline=_compat.INLINE,
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
    softcap: float = 0.0,
    logit_scale: float = 1.0,
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
        softcap, logit_scale: as in :func:`cross_entropy`.

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
        inplace_backward=inplace_backward, softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip
    return loss


def _loss(function: Any, layer: tuple[Any, ...], attrs: tuple[Any, ...], options: dict[str, Any]) -> Array:
    """The loss, by the functions that ``function`` makes of the ops."""
    hidden, weight, target, bias = (None if a is None else jnp.asarray(a) for a in layer)
    rows, total = map(function, (declared.linear_cross_entropy_rows, declared.linear_cross_entropy_total))
    accum = options["accum_dtype"]
    try:
        options = {**options, "accum_dtype": str(jnp.dtype(jnp.float32 if accum is None else accum))}
    except (TypeError, ValueError):
        problem = f"option `accum_dtype` is {shown(accum)}, expected a dtype."
        raise TypeError(f"cute.linear_cross_entropy: {problem}") from None
    return declared.loss(rows, total, (hidden, weight, target, bias), attrs, **options)  # type: ignore[no-any-return]
