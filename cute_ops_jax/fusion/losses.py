"""Replacements of a cross entropy, and their results for targets that are no class.

For such a target our ops give NaN and no gradient, where JAX's gathers and one-hot rows give numbers and gradients in
ways of their own. So our op runs if all rows have a class or are masked; else JAX computes the losses, some rows at a
time. Which of the two is chosen when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite.chunks import ENOUGH, rows_per_chunk
from cute_ops.composite.linear_cross_entropy_metrics import linear_cross_entropy_metrics
from cute_ops.fusion.loss_metrics import What
from cute_ops.ops.reduction.cross_entropy import cross_entropy, shaped
from cute_ops.ops.reduction.cross_entropy_metrics import cross_entropy_metrics
from cute_ops_jax.composite.losses import linear_cross_entropy
from cute_ops_jax.distributed.explicit import as_typed, is_explicit, whole
from cute_ops_jax.fusion.wide_head import product, wide_head, wide_sum
from cute_ops_jax.primitive.any_size import is_symbolic
from cute_ops_jax.primitive.function import register

# Bytes of logits that are held where the program reads metrics of them, or the loss of each row: their gradient needs
# them, and to compute them again is a third more products. For a sum of losses nothing is computed twice.
MOST_HELD = 4 << 30


def loss(logits: Any, target: Any, *, sign: float, outside: str, of: str, **attrs: float) -> Any:
    """The loss of each row of logits, times ``sign``.

    Args:
        outside: what stands for the target's logit, or the logarithm of its probability, if it is no class. ``clip``:
            that of the nearest class. ``promised``: the same number without a gradient. ``nan``, ``zero``: the number.
        of: which of the two, ``logit`` or ``log_prob``. ``whole``: the latter, but the gradient is that of the former.
    """
    target, known = _classes(target, logits.shape[-1], outside)

    def ours(logits: Any, target: Any) -> Any:
        return register(cross_entropy)(logits, _ignored(target, known), ignore_index=-1, reduction="none", **attrs)

    def careful(logits: Any, target: Any) -> Any:
        return _of_rows(logits, target, outside, of, **attrs)

    return sign * _chosen(None if _are_ignored(outside, of, attrs) else known, ours, careful, (logits, target))


def loss_with_metrics(
    logits: Any, target: Any, *, sign: float, outside: str, of: str, beside: Sequence[What], **attrs: float
) -> list[Any]:
    """:func:`loss`, and what the program reads of the logits beside it."""
    target, known = _classes(target, logits.shape[-1], outside)
    run = partial(register(cross_entropy_metrics), logits, reduction="none", **attrs)
    return _with_metrics(
        run, target, logits.shape[-1], known, sign=sign, outside=outside, of=of, beside=beside, attrs=attrs,
        predict=lambda: jnp.argmax(logits, -1).astype("int32"),
    )  # fmt: skip


def linear_loss_with_metrics(
    hidden: Any, weight: Any, target: Any, *, bias: Any = None, sign: float, outside: str, of: str, transposed: bool,
    total: bool, sliced: Sequence[tuple[int, ...]] = (), wide: bool = False, beside: Sequence[What], **attrs: float,
) -> list[Any]:  # fmt: skip
    """:func:`linear_loss` of each row, and what the program reads of the logits beside it. Beyond :data:`MOST_HELD` no
    logits are held.
    """
    hidden, weight = _layer(hidden, weight, transposed, sliced)
    if _are_held(hidden, weight, wide):
        logits = _held(hidden, weight, bias, wide)
        return loss_with_metrics(logits, target, sign=sign, outside=outside, of=of, beside=beside, **attrs)
    target, known = _classes(target, weight.shape[0], outside)

    def run(target: Any) -> Any:
        if wide:
            return wide_head(cross_entropy_metrics, hidden, weight, bias, target, attrs)
        return register(linear_cross_entropy_metrics)(hidden, weight, target, bias, reduction="none", **attrs)

    def predicted(row: Any) -> Any:
        return jnp.argmax(_logits(row, weight, bias, wide), -1).astype("int32")

    def predict() -> Any:
        rows = whole(hidden).reshape(-1, hidden.shape[-1])
        return _by_chunks(predicted, hidden, weight)(rows).reshape(target.shape)

    return _with_metrics(
        run, target, weight.shape[0], known, sign=sign, outside=outside, of=of, beside=beside, attrs=attrs,
        predict=predict,
    )  # fmt: skip


def linear_loss(
    hidden: Any, weight: Any, target: Any, *, bias: Any = None, mask: Any = None, sign: float, outside: str,
    of: str, transposed: bool, total: bool, sliced: Sequence[tuple[int, ...]] = (), wide: bool = False, **attrs: float,
) -> Any:  # fmt: skip
    """The loss of a linear head, times ``sign``; ``total``: the sum over the rows, of which ``mask`` has some;
    ``wide``: of logits in float32. Logits are held for losses of rows up to :data:`MOST_HELD`.
    """
    hidden, weight = _layer(hidden, weight, transposed, sliced)
    if not total and _are_held(hidden, weight, wide):
        return loss(_held(hidden, weight, bias, wide), target, sign=sign, outside=outside, of=of, **attrs)
    target, known = _classes(target, weight.shape[0], outside)

    def ours(hidden: Any, weight: Any, bias: Any, target: Any, mask: Any) -> Any:
        target = _ignored(_ignored(target, known), mask)
        if wide:
            own = {"ignore_index": -1, **attrs}
            if total and hidden.dtype != jnp.float16:  # in which a gradient may vanish before it is scaled
                return wide_sum(hidden, weight, bias, target, own)
            (losses,) = wide_head(cross_entropy, hidden, weight, bias, target, own)
            return jnp.sum(losses) if total else losses
        options = {"ignore_index": -1, "reduction": "sum" if total else "none", **attrs}
        return linear_cross_entropy(hidden, weight, target, bias, **options)

    def careful(hidden: Any, weight: Any, bias: Any, target: Any, mask: Any) -> Any:
        weight, bias = whole(weight), None if bias is None else whole(bias)

        @jax.checkpoint
        def of_row(given: Any) -> Any:
            row, at = given
            return _of_rows(_logits(row, weight, bias, wide), at, outside, of, **attrs)

        rows = whole(hidden).reshape(-1, hidden.shape[-1]), whole(target).reshape(-1)
        losses = _by_chunks(of_row, hidden, weight)(rows).reshape(target.shape)
        return jnp.sum(losses if mask is None else jnp.where(mask, losses, 0)) if total else losses

    fine = None if known is None or _are_ignored(outside, of, attrs) else known if mask is None else known | ~mask
    return sign * _chosen(fine, ours, careful, (hidden, weight, bias, target, mask))


def _layer(hidden: Any, weight: Any, transposed: bool, sliced: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
    """The rows of a head and its weight, ``[n h]``."""
    for axis, start, stop, step in sliced:
        hidden = jax.lax.slice_in_dim(hidden, start, stop, step, axis)
    return hidden, weight.T if transposed else weight


def _held(hidden: Any, weight: Any, bias: Any, wide: bool) -> Any:
    logits = product(hidden, weight.astype(jnp.float32)) if wide else jnp.matmul(hidden, weight.T)
    return logits if bias is None else logits + bias


def _are_held(hidden: Any, weight: Any, wide: bool) -> bool:
    rows = prod(hidden.shape[:-1])
    if is_symbolic(rows) or is_explicit(hidden):  # JAX cannot look up a logit of classes that devices share
        return False
    return bool(rows * weight.shape[0] * (4 if wide else hidden.dtype.itemsize) <= MOST_HELD)


def _logits(rows: Any, weight: Any, bias: Any, wide: bool) -> Any:
    logits = jnp.matmul(rows, weight.T, preferred_element_type=jnp.float32 if wide else None)
    return logits if bias is None else logits + bias


def _by_chunks(of_row: Callable[..., Any], hidden: Any, weight: Any) -> Callable[..., Any]:
    """A function of one row, run for as many rows at a time as a head's loss holds logits of."""
    n, k = weight.shape
    rows, size = prod(hidden.shape[:-1]), None  # one at a time where their number is not known
    if not is_symbolic(rows):
        size = rows_per_chunk(rows, k, n, hidden.dtype.itemsize, ENOUGH)
    return lambda given: jax.lax.map(of_row, jax.tree.map(whole, given), batch_size=size)


def _with_metrics(
    run: Callable[..., Any], target: Any, n: int, known: Any, *, sign: float, outside: str, of: str,
    beside: Sequence[What], attrs: Mapping[str, float], predict: Callable[[], Any],
) -> list[Any]:  # fmt: skip
    """The loss of each row times ``sign``, and the other values, by an op that computes all of them. For a target that
    is no class it computes those of a class near it, whose term is exchanged.

    Args:
        run: the op, of targets that are classes.
        predict: computes the predicted classes of rows that have a NaN, of which the op takes the others.
    """
    loss, lse, log_prob, predicted = run(jnp.clip(target, 0, n - 1))
    if known is not None:
        other = {"nan": jnp.nan, "promised": jax.lax.stop_gradient(log_prob)}.get(outside, 0.0)
        if of == "logit":
            other -= lse if outside != "promised" else lse - jax.lax.stop_gradient(lse)
        elif of == "whole":
            other -= lse - jax.lax.stop_gradient(lse)
        loss += jnp.where(known, 0, (1 - attrs["label_smoothing"]) * (log_prob - other))
    made = [sign * loss]
    for kind, a, b in beside:
        if kind == "predicted":
            fine = ~jnp.isnan(lse)
            made.append(_chosen(fine, lambda each: each, lambda each: predict(), (predicted,)))
        else:
            made.append(lse if kind == "lse" else jax.lax.stop_gradient(lse * (a + b * lse)))
    return made


def picked(x: Any, index: Any, outside: str) -> Any:
    """The element of each row of x at an index, ``[*rows, 1]``; one that is negative is none."""
    index, known = _classes(index, x.shape[-1], outside)
    return _picked(x, index, known, outside)


def _classes(target: Any, n: int, outside: str) -> tuple[Any, Any]:
    """The targets, -1 or n for each that is no class, and a mask of those that are; None where all are."""
    if target.dtype.itemsize < 4:  # n may be more than its dtype holds
        target = target.astype("int32")
    wide = "int64" if target.dtype.itemsize > 4 else "int32"
    if outside == "clip":
        return jnp.clip(target, 0, n - 1).astype(wide), None
    below, above = target < 0, target >= n
    return jnp.where(below, -1, jnp.where(above, n, target.astype(wide))), ~(below | above)


def _ignored(target: Any, kept: Any) -> Any:
    """The targets, of which our op ignores those that are not kept."""
    return target if kept is None else jnp.where(kept, target, -1)


def _are_ignored(outside: str, of: str, attrs: dict[str, float]) -> bool:
    """Whether a row of no class has neither a loss nor a gradient."""
    return (outside, of) == ("zero", "log_prob") and not (attrs["label_smoothing"] or attrs["z_loss"])


def _chosen(fine: Any, ours: Callable[..., Any], careful: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """The results of our op if all rows are fine, else JAX's, on explicit meshes placed as our op's."""
    if fine is None:
        return ours(*operands)

    def placed(*operands: Any) -> Any:
        return as_typed(careful(*operands), jax.eval_shape(ours, *operands))

    explicit = any(is_explicit(each) for each in jax.tree.leaves(operands))
    return jax.lax.cond(_all(fine), ours, placed if explicit else careful, *operands)


@jax.custom_batching.custom_vmap
def _all(fine: Any) -> Any:
    return jnp.all(fine)


@_all.def_vmap
def _all_examples(size: int, batched: Sequence[bool], fine: Any) -> tuple[Any, bool]:
    """One answer for all examples, so that ``vmap`` computes one branch."""
    return _all(fine), False


def _of_rows(
    logits: Any, target: Any, outside: str, of: str, *, label_smoothing: float, z_loss: float, softcap: float = 0.0,
    logit_scale: float = 1.0,
) -> Any:  # fmt: skip
    x, _ = shaped(jnp, logits.astype(jnp.float32), softcap, logit_scale)
    lse, known = jax.nn.logsumexp(x, -1), (target >= 0) & (target < x.shape[-1])
    if of == "logit":
        below = lse - _picked(x, target[..., None], known[..., None], outside)[..., 0]
    else:
        below = -_picked(x - lse[..., None], target[..., None], known[..., None], outside)[..., 0]
        if of == "whole":
            below += jnp.where(known, 0, lse - jax.lax.stop_gradient(lse))
    if label_smoothing:
        below = (1 - label_smoothing) * below + label_smoothing * (lse - jnp.mean(x, -1))
    return below + z_loss * lse * lse


def _picked(x: Any, index: Any, known: Any, outside: str) -> Any:
    at = jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[-1] - 1), -1)
    unknown: Any = {"nan": jnp.nan, "promised": jax.lax.stop_gradient(at)}.get(outside, 0)
    return at if known is None else jnp.where(known, at, unknown)
