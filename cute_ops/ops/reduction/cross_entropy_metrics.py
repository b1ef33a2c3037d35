"""Cross entropy with class weights, with classes that devices share, and with what metrics need: declaration, reference
maths, cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cute_ops.declaration.array_api import constant, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.finish import Finish
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.reduction import cross_entropy as plain
from cute_ops.ops.reduction.config import MAP, REDUCE, mapped, reduced_with_place

# Columns are counted in float32 while the largest logit is looked for.
MOST_CLASSES = 2**24
ALL = {"label_smoothing": 0.1, "z_loss": 1e-3}
SLICES = (
    Case("odd-small", {"m": (3, 5), "n": 7}, {"I": "int32"}, attrs={**ALL, "classes": 11}),
    Case("llama3-8b", {"m": (5,), "n": 16032}, attrs={"classes": 128256}),
    Case("capped", {"m": (33,), "n": 515}, attrs={**ALL, "classes": 1030, "softcap": 2.0, "logit_scale": 1.5}),
)
CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"I": "int32"}, attrs=ALL),
    Case("classes", {"m": (33,), "n": 1000}, {"W": "float32"}, attrs={"ignore_index": 3}),
    Case("weighted", {"m": (65,), "n": 1000}, {"W": "float32"}, attrs=ALL),
    Case("bert-base", {"m": (2, 5), "n": 30522}, absent=("weight",)),
    Case("llama3-8b", {"m": (2, 3), "n": 128256}, absent=("weight",)),
    Case("gemma2", {"m": (3,), "n": 256000}, {"W": "float32"},
         attrs={"softcap": 30.0, "label_smoothing": 0.1}),
    Case("capped", {"m": (2, 9), "n": 515}, absent=("weight",), attrs={"softcap": 2.0, "logit_scale": 1.5, **ALL}),
)  # fmt: skip


def _weights(xp: Any, weight: Any, x: Any) -> Any:
    """The classes' weights, ones where there are none."""
    return xp.ones_like(x[..., :1]) + xp.zeros_like(x) if weight is None else weight + xp.zeros_like(x)


def reference(
    xp: Any, logits: Any, target: Any, weight: Any = None, lse_partial: Any = None,
    *, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, classes: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    raw, w, partial = widen(xp, logits, weight, lse_partial)
    x, _ = plain.shaped(xp, raw, softcap, logit_scale)
    kept, known, at_target = plain.terms(xp, x, target, ignore_index, classes)
    zero = xp.sum(xp.zeros_like(x), axis=-1)
    m = xp.max(x, axis=-1)
    if partial is not None:
        m = xp.where(xp.isnan(partial) | (partial > m), partial, m)
    origin = plain.origin(xp, m)
    shifted = x - origin[..., None]
    total = xp.sum(xp.exp(shifted), axis=-1)
    if partial is not None:
        total = total + xp.exp(partial - origin)
    log_sum = xp.log(total)
    top = xp.where(xp.isnan(log_sum), log_sum, m)
    lse = top + log_sum
    weights = _weights(xp, w, x)
    own = xp.sum(xp.where(at_target, weights, xp.zeros_like(x)), axis=-1)  # 0 where it is another device's class
    here = xp.any(at_target, axis=-1) & kept
    difference = xp.sum(xp.where(at_target, x - m[..., None], xp.zeros_like(x)), axis=-1) - log_sum
    log_prob = xp.where(here, difference, zero if classes else zero + xp.nan)
    loss, slope = -(1 - label_smoothing) * log_prob, zero + (1 - label_smoothing)
    if z_loss:
        term = z_loss * lse * lse
        loss, slope = loss + (xp.where(here, term, zero) if classes else term), slope + 2 * z_loss * lse
    if w is not None:
        loss, slope = loss * xp.where(here, own, zero), slope * own
    if label_smoothing:
        share = label_smoothing / (classes or x.shape[-1])
        whole = xp.sum(weights, axis=-1)
        loss = loss + share * (whole * log_sum - xp.sum(weights * shifted, axis=-1))
        slope = slope + (share * whole if w is not None else label_smoothing)
    loss = xp.where(known, loss, zero + xp.nan)
    predicted = xp.argmax(xp.where(xp.isnan(raw), xp.zeros_like(raw) - xp.inf, raw), axis=-1)
    predicted = xp.astype(xp.where(kept, predicted, -1), xp.int32)
    own = own if w is not None else zero + 1
    found = [xp.where(kept, value, zero) for value in (loss, lse, log_prob, top, log_sum, own, slope)]
    return (*found[:3], predicted, *found[3:])


def reference_bwd(
    xp: Any, logits: Any, target: Any, *others: Any,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, classes: int = 0,
) -> Any:  # fmt: skip
    raw, m, s, own, factor, d, w, dl, dp = widen(xp, logits, *others)
    x, derivative = plain.shaped(xp, raw, softcap, logit_scale)
    kept, known, at_target = plain.terms(xp, x, target, ignore_index, classes)
    d = xp.where(known, d, d * 0 + xp.nan)
    factor, onehot = d * factor, -d * own * (1 - label_smoothing)
    factor = factor if dl is None else factor + dl
    factor, onehot = (factor, onehot) if dp is None else (factor - dp, onehot + dp)
    dx = xp.exp((x - m[..., None]) - s[..., None]) * factor[..., None]
    dx = dx + xp.where(at_target, onehot[..., None] + xp.zeros_like(x), xp.zeros_like(x))
    if label_smoothing:
        dx = dx - label_smoothing / (classes or x.shape[-1]) * d[..., None] * _weights(xp, w, x)
    dx = dx * derivative
    return xp.astype(xp.where(kept[..., None], dx, xp.zeros_like(dx)), logits.dtype)


def reference_of_slice(xp: Any, logits: Any, target: Any, lse_partial: Any, **attrs: Any) -> tuple[Any, ...]:
    return reference(xp, logits, target, None, lse_partial, **attrs)


def reference_of_slice_bwd(xp: Any, *arrays: Any, **attrs: Any) -> Any:
    *saved, dlse, dlog_prob = arrays
    of_whole: Any = reference_bwd
    return of_whole(xp, *saved, None, dlse, dlog_prob, **attrs)


def check(binding: Binding) -> str | None:
    n = binding.dims["n"]
    if isinstance(n, int) and n > MOST_CLASSES:
        return f"argument `logits` has n={n}, expected at most {MOST_CLASSES}."
    return plain.check(binding)


def reduce_rows(
    weights: str, xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any], attrs: Mapping[str, Any], *,
    reduction: str, token_scaling: bool,
) -> Mapping[str, Any]:  # fmt: skip
    """The losses, scaled by the targets' probabilities if asked for, their sum, or their mean; ``weights`` names the
    classes' weights among the inputs.
    """
    loss, target = outputs["loss"], inputs["target"]
    if token_scaling:
        loss = loss * constant(xp, xp.exp(outputs["log_prob"]))
    if reduction == "none":
        return {**outputs, "loss": loss}
    total = xp.sum(loss)
    if reduction == "mean":
        total = total / weight_of_rows(xp, target, inputs[weights], attrs["ignore_index"], loss)
    return {**outputs, "loss": total}


def weight_of_rows(xp: Any, target: Any, weight: Any, ignore_index: int, like: Any) -> Any:
    """The sum of the weights of the targets that are not ignored, their number where there are none."""
    kept = target != ignore_index
    if weight is None:
        return xp.sum(kept, dtype=like.dtype)
    n = weight.shape[0]
    inside = kept & (target >= 0) & (target < n)
    # Flat: an index without dims, which frameworks read on the host, would wait for the GPU, and fail on a fake tensor.
    at = xp.reshape(xp.where(inside, target, 0), (-1,))
    found = xp.reshape(xp.astype(weight, like.dtype)[at], target.shape)
    return xp.sum(xp.where(inside, found, xp.zeros_like(found)))


def finish(weights: str) -> Finish:
    """The reduction of losses whose classes' weights are the input of this name."""
    options = {"reduction": ("mean", "sum", "none"), "token_scaling": (False, True)}
    return Finish(partial(reduce_rows, weights), options, {"reduction": "none", "token_scaling": False})


ROW = plain.ROW
HIDDEN, GIVEN = ROW._replace(hidden=True), ROW._replace(optional=True)
SAVED = ("row_max", "log_sum", "target_weight", "slope")
OUTPUTS = {
    "loss": ROW, "lse": ROW, "log_prob": ROW, "predicted": Tensor("*m", "int32"), **dict.fromkeys(SAVED, HIDDEN),
}  # fmt: skip
KERNEL = "cute_ops.kernels.reduction.cross_entropy_metrics:CrossEntropyMetrics"
BACKWARD_DOC = """Gradient of :func:`{}`, from numbers that the forward saved for each row.

    ``dlogits = (dloss * slope + dlse - dlog_prob) * exp(logits - row_max - log_sum) + dlog_prob * onehot(target)
    - dloss * ((1 - label_smoothing) * target_weight * onehot(target) + label_smoothing / n * weight)``, of the scaled
    and capped logits and times their derivative; zero in ignored rows. One read, one write.
    """


def saved_by_the_forward(xp: Any, arrays: dict[str, Any]) -> None:
    plain.saved_by_the_forward(xp, arrays)
    for name in SAVED[2:]:
        arrays[name][...] = abs(arrays[name])


def _declare(
    name: str, more: Mapping[str, Tensor], *, references: tuple[Any, Any], doc: str, finish: Finish | None = None,
    **common: Any,
) -> Op:  # fmt: skip
    """The op with ``more`` inputs, which have no gradient, and its gradient."""
    weights = {key: tensor for key, tensor in more.items() if not tensor.rows}
    backward = Op(
        f"{name}_bwd",
        inputs={**plain.INPUTS, **dict.fromkeys((*SAVED, "dloss"), ROW), **weights, "dlse": GIVEN, "dlog_prob": GIVEN},
        outputs={"dlogits": plain.DLOGITS}, reference=references[1], kernel=f"{KERNEL}Backward",
        tuning=Tuning(mapped, space=MAP), arrange=saved_by_the_forward, doc=BACKWARD_DOC.format(name), **common,
    )  # fmt: skip
    return Op(
        name, inputs={**plain.INPUTS, **more}, outputs=OUTPUTS, no_gradient=tuple(more), reference=references[0],
        kernel=KERNEL, tuning=Tuning(reduced_with_place, space=REDUCE), grad=backward, finish=finish, doc=doc, **common,
    )  # fmt: skip


cross_entropy_metrics = _declare(
    "cross_entropy_metrics",
    {"weight": Tensor("n", "W", optional=True)},
    dtypes={**plain.DTYPES, "W": FLOATS},
    attrs={name: value for name, value in plain.ATTRS.items() if name != "classes"},
    references=(reference, reference_bwd),
    check=check,
    finish=finish("weight"),
    cases=CASES,
    doc="""Cross entropy with a weight per class, and what metrics of a training step need, in one read of the logits.

    ``loss = weight[target] * ((1 - label_smoothing) * (lse - logits[target]) + z_loss * lse^2)
    + label_smoothing / n * sum(weight * (lse - logits))``, ``log_prob = logits[target] - lse``,
    ``predicted = argmax(logits)``

    The accuracy of tokens is the mean of ``predicted == target`` over the rows that are not ignored, the z-loss
    ``z_loss * lse**2``. :func:`cross_entropy` writes less where only the loss is asked for.

    Args:
        logits: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride, n up to 2^24.
        target: ``I[*m]``, int64 or int32, the class of each row; any strides.
        weight: ``W[n]``, a float dtype of its own: the weight of each class; ones where None. No gradient.
        ignore_index: rows with this target have loss 0, gradient 0 and prediction -1, and are not read; a compile-time
            constant, as the next four.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        z_loss: weight of ``lse^2``.
        softcap: bound of the logits, ``softcap * tanh(logits / softcap)``; 0 is none.
        logit_scale: factor of the logits, before the cap; positive.
        reduction: ``"mean"``, with class weights the weighted mean, ``"sum"`` or ``"none"``: of the loss alone.
        token_scaling: multiply each row's loss by the probability of its target, a constant to the gradient.
        inplace_backward: overwrite the logits with their gradient, as :func:`cross_entropy` does.

    Returns:
        ``(loss, lse, log_prob, predicted)``: float32, a scalar or ``[*m]``; float32 ``[*m]`` twice; int32 ``[*m]``. All
        but the last have gradients. Of equal logits the first one is predicted; NaN never is, unless a row has nothing
        else. Special values of the loss as :func:`cross_entropy`. Accumulated in float32, deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, n = 0, a last dim that is not contiguous, an
            unknown reduction.

    Source: z-loss: Chowdhery et al., PaLM, 2022; scaling by the target's probability: Wu et al., On the Generalization
    of SFT, 2025.
    """,
)

cross_entropy_of_slice = _declare(
    "cross_entropy_of_slice",
    {"lse_partial": ROW},
    dtypes=plain.DTYPES,
    attrs=plain.ATTRS,
    references=(reference_of_slice, reference_of_slice_bwd),
    check=check,
    cases=SLICES,
    doc="""Cross entropy of a slice of the classes, where the log-sum-exp of the other classes is known.

    ``lse = log(exp(lse_partial) + sum(exp(logits)))``; the rest as :func:`cross_entropy_metrics`, of the classes here

    For devices that share the classes and exchange the lse themselves: the loss of a row is the sum of the devices'
    losses. DTensors, ``shard_map`` and JAX's ``vocab_parallel_cross_entropy`` do all of this by themselves.

    Args:
        logits: ``T[*m n]``, the slice; float32, float16 or bfloat16; any leading shape, any row stride.
        target: ``I[*m]``, int64 or int32, counted from the slice's first class; any number outside of ``[0, n)`` is a
            class of another slice.
        lse_partial: float32 ``[*m]``: the log-sum-exp of all other classes, scaled and capped as here; -inf where there
            are none. A constant to the gradient, which is that of the whole row's loss.
        ignore_index: rows with this target have loss 0, gradient 0 and prediction -1, and are not read; a compile-time
            constant, as the next five.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        z_loss: weight of ``lse^2``, which the device with the target's class counts.
        classes: the number of all classes; with 0 there are no others, and a target outside of ``[0, n)`` gives NaN.
        softcap: bound of the logits, ``softcap * tanh(logits / softcap)``; 0 is none.
        logit_scale: factor of the logits, before the cap; positive.
        inplace_backward: overwrite the logits with their gradient, as :func:`cross_entropy` does.

    Returns:
        ``(loss, lse, log_prob, predicted)``, each ``[*m]``: ``lse`` of all classes; ``log_prob`` 0 where the target is
        another slice's; ``predicted`` counted from the slice's first class. Accumulated in float32, deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, ``classes`` below n, n = 0, a last dim that
            is not contiguous.

    Source: Shoeybi et al., Megatron-LM, 2019.
    """,
)
