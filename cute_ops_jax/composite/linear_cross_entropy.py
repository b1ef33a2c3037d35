"""Cross entropy of a linear layer's output that never holds all logits, and its derivative.

The loop over chunks of rows computes the gradients together with the loss, so they exist when the forward is over, and
the backward scales them. Two cases need a backward that computes the logits again. With ``reduction="none"`` each row's
gradient has a factor of its own, which the weight's gradient, a sum over rows, cannot be given afterwards. In float16,
gradients underflow unless the loss is scaled, and no later factor brings them back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cute_ops.composite.docstrings import continued
from cute_ops.composite.linear_cross_entropy import (
    DOC,
    check_accum_dtype,
    check_attributes,
    check_chunk_rows,
    check_tensors,
)
from cute_ops.composite.loss_loops import LAYER
from cute_ops.ops.reduction.cross_entropy import FINISH, cross_entropy
from cute_ops_jax.composite.linear_ops import run
from cute_ops_jax.composite.losses import Axis, Setting, check_axis, of_rows, reduced, spread, summed
from cute_ops_jax.primitive.arrays import Arrays

Array = jax.Array
STATIC = "ignore_index", "label_smoothing", "z_loss", "reduction", "chunk_rows", "accum_dtype"


@partial(jax.jit, static_argnames=STATIC, inline=True)
@continued(DOC)
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
    what, accum = "linear_cross_entropy", _name(accum_dtype)
    setting = Setting(ignore_index, label_smoothing, z_loss, reduction, chunk_rows=chunk_rows, accum_dtype=accum)
    return _checked(what, setting, hidden, weight, target, bias)


@partial(jax.jit, static_argnames=("axis_name", *STATIC), inline=True)
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
        chunk_rows, accum_dtype: as in :func:`linear_cross_entropy`.

    Returns:
        float32: a scalar, or ``[*m]``, the same on all devices of the axis. Gradients are those of the written-out
        program, with and without ``check_vma``.

    Raises:
        TypeError: dtypes that differ or are not listed.
        ValueError: shapes that do not fit, an unknown reduction, ``chunk_rows`` below 1, another ``accum_dtype``.
        NameError: no such axis of a ``shard_map``.
    """
    what, accum = "vocab_parallel_linear_cross_entropy", _name(accum_dtype)
    setting = Setting(
        ignore_index, label_smoothing, z_loss, reduction, axis_name, chunk_rows=chunk_rows, accum_dtype=accum
    )
    return _checked(what, setting, hidden, weight, target, bias)


def _name(accum_dtype: Any) -> str:
    return str(jnp.dtype(jnp.float32 if accum_dtype is None else accum_dtype))


def _checked(what: str, setting: Setting, hidden: Array, weight: Array, target: Array, bias: Array | None) -> Array:
    hidden, weight, target = (jnp.asarray(a) for a in (hidden, weight, target))
    bias = None if bias is None else jnp.asarray(bias)
    FINISH.check(what, {"reduction": setting.reduction})
    check_chunk_rows(what, setting.chunk_rows)
    check_accum_dtype(what, setting.accum_dtype, "float32", weight.dtype.name)
    check_tensors(what, hidden, weight, target, bias)
    check_attributes(hidden, weight, target, setting.attrs)
    if setting.axis is not None:
        check_axis(setting.axis, what)
    layer, target = spread((hidden, weight, bias), target, setting.axis)
    return _loss(setting, {n: a for n, a in zip(LAYER, layer, strict=True) if a is not None}, target)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(setting: Setting, layer: Arrays, target: Array) -> Array:
    return reduced(setting, run("rows", setting, {**layer, "target": target})["loss"], target)


# In place of a gradient that is not wanted. JAX needs one structure of what a forward saves, whichever inputs are
# differentiated; shapes may differ.
NOT_WANTED = (0,)


def _forward(setting: Setting, layer: Any, target: Any) -> tuple[Array, Any]:
    """The loss and, where the backward need only scale them, the gradients of the inputs that are differentiated; else
    marks in their place, and what the backward computes them from.
    """
    wanted = tuple(f"d{n}" for n, a in layer.items() if a.perturbed)
    inputs = {n: a.value for n, a in {**layer, "target": target}.items()}
    setting, target = setting._replace(wanted=wanted), inputs["target"]
    if setting.reduction == "none" or inputs["hidden"].dtype == jnp.float16:
        found = {**run("rows", setting, inputs), **dict.fromkeys(wanted, jnp.zeros((0, 0)))}
        lse = {n: found[n] for n in cross_entropy.outputs if n != "loss"}
        again = {**inputs, **lse}
    else:
        ones = of_rows(setting, jnp.ones((), jnp.float32), target)
        found, again = dict(run("step", setting, {**inputs, "dloss": ones})), {}
    gradients = {f"d{n}": found.get(f"d{n}", jnp.zeros(NOT_WANTED)) for n in layer}
    return reduced(setting, found["loss"], target), (gradients, again)


def _backward(setting: Setting, saved: Any, dloss: Any) -> tuple[Arrays, None]:
    gradients, again = saved
    found: Arrays = {}
    if not isinstance(dloss, SymbolicZero):
        dloss, wanted = summed(setting, dloss), tuple(n for n, a in gradients.items() if a.shape != NOT_WANTED)
        if again:
            inputs = {**again, "dloss": of_rows(setting, dloss, again["target"])}
            found = run("rows_bwd", setting._replace(wanted=wanted), inputs)
        else:
            # Multiplied in float32, the dtype of dloss: rounded to 16 bits, the factor would add more error than the
            # final rounding.
            found = {n: (gradients[n] * dloss).astype(gradients[n].dtype) for n in wanted}
    return {n.removeprefix("d"): found.get(n) for n in gradients}, None


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
