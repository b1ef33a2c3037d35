"""Cross entropy of logits with a target class per row: declaration, reference maths, cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cute_ops.declaration.array_api import columns, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.finish import Finish
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding, Split
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import FINITE, NOT_NEGATIVE, TERM, factors, no_columns, within
from cute_ops.ops.reduction.config import MAP, REDUCE, mapped, normalised_in_place, reduced

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"I": "int32"}, attrs={"label_smoothing": 0.1, "z_loss": 1e-3}),
    Case("classes", {"m": (33,), "n": 1000}, attrs={"label_smoothing": 0.1, "ignore_index": 3}),
    Case("bert-base", {"m": (2, 5), "n": 30522}),
    Case("llama2-7b-padded", {"m": (17,), "n": 32001}, attrs={"z_loss": 1e-4}),
    Case("gpt2", {"m": (5,), "n": 50257}, attrs={"label_smoothing": 0.1}),
    Case("llama3-8b", {"m": (2, 3), "n": 128256}),
    Case("gemma3", {"m": (3,), "n": 262144}, attrs={"z_loss": 1e-4}),
    Case("gemma2", {"m": (3,), "n": 256000}, attrs={"softcap": 30.0}),
    Case("cohere", {"m": (7,), "n": 2049}, attrs={"logit_scale": 0.0625, "label_smoothing": 0.1}),
    Case("capped", {"m": (2, 9), "n": 515}, attrs={"softcap": 2.0, "logit_scale": 1.5, "z_loss": 1e-3}),
    Case("llama3-8b-slice", {"m": (5,), "n": 16032}, attrs={"label_smoothing": 0.1, "classes": 128256}),
)


def _valid(target: Any, n: int, classes: int) -> Any:
    """Whether a target may be a class."""
    return (target >= 0) & (target < n) | bool(classes)


def terms(xp: Any, x: Any, target: Any, ignore_index: int, classes: int) -> tuple[Any, Any, Any]:
    """Whether a row counts, whether its target may be a class, and where that is."""
    known = _valid(target, x.shape[-1], classes)
    return target != ignore_index, known, columns(xp, x) == target[..., None]


def shaped(xp: Any, x: Any, softcap: float, logit_scale: float) -> tuple[Any, Any]:
    """Scaled and capped logits, of which -inf stays -inf, and their derivative."""
    if not softcap:
        return x * logit_scale if logit_scale != 1 else x, logit_scale
    absent = x == -xp.inf
    part = xp.tanh(xp.where(absent, xp.zeros_like(x), x) * (logit_scale / softcap))
    return xp.where(absent, x, softcap * part), xp.where(absent, xp.zeros_like(x), logit_scale * (1 - part * part))


def origin(xp: Any, m: Any) -> Any:
    """The number that is subtracted in exponents beside the maximum ``m``."""
    return xp.where(m > -xp.inf, m, xp.zeros_like(m))


def reference(
    xp: Any, logits: Any, target: Any,
    *, ignore_index: int, label_smoothing: float, z_loss: float, classes: int, softcap: float, logit_scale: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The lse stays apart as a maximum and the rest, and all terms are differences from that maximum: a number that is
    common to all logits, however large, leaves no trace.
    """
    (x,) = widen(xp, logits)
    x, _ = shaped(xp, x, softcap, logit_scale)
    kept, known, at_target = terms(xp, x, target, ignore_index, classes)
    m = xp.max(x, axis=-1)
    shifted = x - origin(xp, m)[..., None]
    log_sum = xp.log(xp.sum(xp.exp(shifted), axis=-1))
    below = m[..., None] - x  # NaN in a row of nothing but -inf, as its loss is
    zero = xp.zeros_like(m)
    loss = log_sum + (1 - label_smoothing) * xp.sum(xp.where(at_target, below, xp.zeros_like(x)), axis=-1)
    if label_smoothing:
        loss = loss - label_smoothing / (classes or x.shape[-1]) * xp.sum(shifted, axis=-1)
    if z_loss:
        loss = loss + z_loss * (m + log_sum) * (m + log_sum)
    loss = xp.where(known, loss, zero + xp.nan)
    top = xp.where(xp.isnan(log_sum), log_sum, m)
    return xp.where(kept, loss, zero), xp.where(kept, top, zero), xp.where(kept, log_sum, zero)


def reference_bwd(
    xp: Any, logits: Any, target: Any, row_max: Any, log_sum: Any, dloss: Any,
    *, ignore_index: int, label_smoothing: float, z_loss: float, classes: int, softcap: float, logit_scale: float,
) -> Any:  # fmt: skip
    x, m, s, d = widen(xp, logits, row_max, log_sum, dloss)
    x, derivative = shaped(xp, x, softcap, logit_scale)
    kept, known, at_target = terms(xp, x, target, ignore_index, classes)
    slope = xp.exp((x - m[..., None]) - s[..., None]) * (1 + 2 * z_loss * (m + s))[..., None]
    slope = slope - xp.where(at_target, xp.ones_like(x), xp.zeros_like(x)) * (1 - label_smoothing)
    dx = (
        (slope - label_smoothing / (classes or x.shape[-1]))
        * xp.where(known, d, d * 0 + xp.nan)[..., None]
        * derivative
    )
    return xp.astype(xp.where(kept[..., None], dx, xp.zeros_like(dx)), logits.dtype)


def reference_step(xp: Any, logits: Any, target: Any, dloss: Any, **attrs: Any) -> tuple[Any, Any]:
    loss, row_max, log_sum = reference(xp, logits, target, **attrs, classes=0)
    return reference_bwd(xp, logits, target, row_max, log_sum, dloss, **attrs, classes=0), loss


def check(binding: Binding) -> str | None:
    n, classes = binding.dims["n"], binding.attrs.get("classes", 0)
    problem = no_columns(binding, "logits") or _in_range(binding)
    if not problem and classes and isinstance(n, int) and classes < n:
        problem = f"attribute `classes` is {classes}, expected 0, or at least n={n}, of which `logits` is a slice."
    scale = binding.attrs["logit_scale"]
    if not problem and scale <= 0:
        problem = f"attribute `logit_scale` is {scale}, expected a positive number."
    problem = problem or _as_float32(binding)
    ignored, bits = binding.attrs["ignore_index"], 31 if binding.dtypes["I"] == "int32" else 63
    if not problem and not -(2**bits) <= ignored < 2**bits:
        problem = f"attribute `ignore_index` is {ignored}, which no target of {binding.dtypes['I']} can be."
    return problem


_in_range = within(label_smoothing=(0.0, 1.0), z_loss=TERM, softcap=NOT_NEGATIVE, logit_scale=FINITE)
_as_float32 = factors("softcap", "logit_scale")


def reduce_rows(
    xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any], attrs: Mapping[str, Any], *, reduction: str
) -> Mapping[str, Any]:
    """The losses, their sum, or their mean over the rows that are not ignored."""
    loss = outputs["loss"]
    if reduction == "none":
        return outputs
    total = xp.sum(loss)
    if reduction == "mean":
        total = total / xp.sum(inputs["target"] != attrs["ignore_index"], dtype=loss.dtype)
    return {"loss": total}


def slice_of_classes(
    xp: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any], start: Any, size: Any, whole: int
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Targets count from the slice's first class, those of other slices are -1; without z-loss, which needs the lse of
    all slices, unless that is given. A slice's loss is relative to its own maximum.
    """
    target, ignored = inputs["target"], attrs["ignore_index"]
    here = (target >= start) & (target < start + size)
    kept = target != ignored
    # Counted from the slice's start, a target could come to be the caller's ignore_index.
    local = xp.where(kept, xp.where(here, target - start, -1), IGNORE_INDEX)
    inputs = {**inputs, "target": local}
    chosen = {**attrs, "ignore_index": IGNORE_INDEX, "classes": attrs["classes"] or whole}
    if "dloss" not in inputs:
        return inputs, {**chosen, "z_loss": 0.0}
    valid = _valid(target, whole, attrs["classes"]) | ~kept
    return {**inputs, "dloss": xp.where(valid, inputs["dloss"], xp.nan)}, chosen


def merge_slices(
    xp: Any, stacked: Mapping[str, Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any],
    sizes: Sequence[int], whole: int,
) -> Mapping[str, Any]:  # fmt: skip
    """The maximum and log-sum of all slices; their losses, each relative to its own maximum, moved to that."""
    own, maxima, log_sums, target = stacked["loss"], stacked["row_max"], stacked["log_sum"], inputs["target"]
    smoothing, classes = attrs["label_smoothing"], attrs["classes"] or whole
    m = xp.max(maxima, axis=0)
    base = origin(xp, m)
    log_sum = xp.log(xp.sum(xp.exp((maxima - base) + log_sums), axis=0))
    loss, start = log_sum, 0
    for k, size in enumerate(sizes):
        here = (target >= start) & (target < start + size)
        # How much of the target, which is one, lies in this slice.
        share = xp.astype(here, loss.dtype) * (1 - smoothing) + smoothing * size / classes
        moved = (own[k, ...] - log_sums[k, ...]) + share * (m - maxima[k, ...])
        # Of a slice of nothing but -inf the difference is lost.
        linear = xp.where(maxima[k, ...] > -xp.inf, moved, xp.inf)
        loss = loss + xp.where(share > 0, linear, 0.0)
        start += size
    if attrs["z_loss"]:
        loss = loss + attrs["z_loss"] * (m + log_sum) * (m + log_sum)
    loss = xp.where(_valid(target, whole, attrs["classes"]), loss, xp.nan)
    kept = target != attrs["ignore_index"]
    found = {"loss": loss, "row_max": m, "log_sum": log_sum}
    return {name: xp.where(kept, value, 0.0) for name, value in found.items()}


FINISH = Finish(reduce_rows, {"reduction": ("mean", "sum", "none")}, {"reduction": "none"})
IGNORE_INDEX = -100
ATTRS = {
    "ignore_index": IGNORE_INDEX, "label_smoothing": 0.0, "z_loss": 0.0, "classes": 0, "softcap": 0.0,
    "logit_scale": 1.0,
}  # fmt: skip

DTYPES = {"T": FLOATS, "I": ("int64", "int32")}
INPUTS = {"logits": Tensor("*m n", "T"), "target": Tensor("*m", "I", upper_bound="n")}
DLOGITS, ROW = Tensor("*m n", "T", donates="logits"), Tensor("*m", "float32")


def saved_by_the_forward(xp: Any, arrays: dict[str, Any]) -> None:
    """The maximum and log-sum of each row, as the backward op gets them."""
    x = arrays["logits"].astype(xp.float64)
    m = x.max(axis=-1)
    arrays["row_max"][...] = m
    arrays["log_sum"][...] = xp.log(xp.exp(x - m[..., None]).sum(axis=-1))


cross_entropy_bwd = Op(
    "cross_entropy_bwd",
    inputs={**INPUTS, "row_max": ROW, "log_sum": ROW, "dloss": ROW},
    outputs={"dlogits": DLOGITS},
    dtypes=DTYPES,
    attrs=ATTRS,
    reference=reference_bwd,
    kernel="cute_ops.kernels.reduction.cross_entropy:CrossEntropyBackward",
    tuning=Tuning(mapped, space=MAP),
    sharding=Sharding(split=Split("n", slice_of_classes)),
    check=check,
    cases=CASES,
    arrange=saved_by_the_forward,
    doc="""Gradient of :func:`cross_entropy`, from the lse that the forward gave as two numbers, ``row_max + log_sum``.

    ``dlogits = dloss * (exp(logits - row_max - log_sum) * (1 + 2 * z_loss * lse)
    - (1 - label_smoothing) * onehot(target) - label_smoothing / n)``, of the scaled and capped logits and times their
    derivative; zero in ignored rows, whatever their logits are.
    One read, one write.
    """,
)

cross_entropy = Op(
    "cross_entropy",
    inputs=INPUTS,
    outputs={"loss": ROW, "row_max": ROW._replace(hidden=True), "log_sum": ROW._replace(hidden=True)},
    dtypes=DTYPES,
    attrs=ATTRS,
    reference=reference,
    kernel="cute_ops.kernels.reduction.cross_entropy:CrossEntropy",
    tuning=Tuning(reduced, space=REDUCE),
    grad=cross_entropy_bwd,
    finish=FINISH,
    sharding=Sharding(split=Split("n", slice_of_classes, merge_slices)),
    check=check,
    cases=CASES,
    doc="""Cross entropy of logits with a target class per row.

    ``y = softcap * tanh(logit_scale * logits / softcap)``, or ``logit_scale * logits``; ``lse = log(sum(exp(y)))``
    ``loss = lse - (1 - label_smoothing) * y[target] - label_smoothing * mean(y) + z_loss * lse^2``

    Args:
        logits: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride, any n.
        target: ``I[*m]``, int64 or int32, the class of each row; any strides.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever their logits are, and are not read;
            a compile-time constant, as the next five.
        label_smoothing: fraction of the target that is spread evenly over all n classes.
        z_loss: weight of ``lse^2``, which keeps logits from drifting.
        classes: where the logits are a slice of so many classes (a vocabulary shard): a target that is not in it then
            adds nothing and the mean is ``sum(logits) / classes``; what the slices give is yet to be combined: the loss
            is relative to the slice's maximum as far as the target lies in other slices. 0: these are all classes.
        softcap: bound of the logits, as in Gemma 2; 0 is none. A logit of -inf stays a class of no probability.
        logit_scale: factor of the logits, as in Cohere's models; positive.
        reduction: ``"mean"`` over the rows that are not ignored (NaN where there are none, as in PyTorch), ``"sum"``,
            or ``"none"``, the loss of each row. ``torch.ops.cute.cross_entropy`` has no such argument: it returns
            the losses, maxima and log-sums of each row: the lse as two numbers, since one float32 cannot hold both.
        inplace_backward: overwrite the logits with their gradient, so that no second (rows x n) buffer exists. The
            logits must not be read afterwards: PyTorch raises where autograd would, XLA copies them first.

    Returns:
        float32: a scalar, or ``[*m]``. Accumulated in float32, deterministic; a number that is common to a row's logits
        costs no digits. As torch's: -inf logits are classes of
        no probability, a row of nothing but -inf, or with a NaN or +inf, is NaN. A target that is neither a class nor
        ``ignore_index`` gives NaN, loss and gradient, and reads nothing out of bounds (PyTorch's aborts the context).

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, n = 0, a last dim that is not contiguous, an
            unknown reduction.

    Source: z-loss: Chowdhery et al., PaLM, 2022; label smoothing: Szegedy et al., 2015.
    """,
)

cross_entropy_step = Op(
    "cross_entropy_step",
    inputs={**INPUTS, "dloss": ROW},
    outputs={"dlogits": DLOGITS, "loss": ROW},
    dtypes=DTYPES,
    attrs={name: value for name, value in ATTRS.items() if name != "classes"},
    reference=reference_step,
    kernel="cute_ops.kernels.reduction.cross_entropy:CrossEntropyStep",
    tuning=Tuning(normalised_in_place, space=REDUCE),
    check=check,
    cases=CASES[1:3] + CASES[4:6] + CASES[-1:],
    doc="""Loss and gradient of :func:`cross_entropy` in one pass, where each loss's cotangent is known beforehand.

    ``loss`` and ``dlogits`` as :func:`cross_entropy` and its gradient for ``dloss``.

    As at the end of a model, whose loss is a mean: the logits are read once, and on Hopper and later wait on the chip
    for their gradient.

    Args:
        logits: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride, any n.
        target: ``I[*m]``, int64 or int32, the class of each row; any strides.
        dloss: float32 ``[*m]``; any strides.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever their logits are, and are not read;
            a compile-time constant, as the next four.
        label_smoothing: fraction of the target that is spread evenly over all n classes.
        z_loss: weight of ``lse^2``.
        softcap, logit_scale: bound and factor of the logits.

    Returns:
        ``(dlogits, loss)``: ``T[*m n]`` and float32 ``[*m]``. Accumulated in float32, deterministic; special values as
        :func:`cross_entropy`. Not differentiable.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, n = 0, a last dim that is not contiguous.

    Source: gradients computed with the loss: Hsu et al., Liger Kernel, 2024.
    """,
)
