"""The loss of a linear head, computed without ever holding all logits: composites.

Rows are taken a chunk at a time. A matrix product computes the logits of a chunk. Our kernel computes their loss and
overwrites them with their gradient, from which two more products compute the gradients of the hidden states and of the
weight.

For a sum or mean of the losses, the forward computes the gradients and the backward scales them. In two cases the
backward computes the logits again instead. With ``reduction="none"`` each row's gradient has a factor of its own, which
cannot be applied later to the weight's gradient, a sum over rows. In float16, gradients underflow unless the loss is
scaled, and a later factor cannot restore them.

If devices share the classes, each computes the logits of its own classes. They exchange a few numbers per row for the
losses; their gradients of the hidden states are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from cute_ops.composite.chunks import Chunks
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.split import Sharding, Split
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import shown
from cute_ops.ops.checks import no_columns
from cute_ops.ops.gemm.linear import linear, linear_dx
from cute_ops.ops.reduction.cross_entropy import (
    DTYPES,
    FINISH,
    ROW,
    check,
    cross_entropy,
    cross_entropy_bwd,
    cross_entropy_step,
)
from cute_ops.ops.reduction.kept_mean import kept_mean

Arrays: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[..., Arrays]
DOC = """Args:
    hidden: ``T[*m h]``; float32, float16 or bfloat16.
    weight: ``T[n h]``.
    target: int64 or int32 ``[*m]``, the class of each row.
    bias: ``T[n]``.
    ignore_index: rows with this target have loss 0 and gradient 0.
    label_smoothing: fraction of the target that is spread evenly over all classes.
    z_loss: weight of ``lse^2``.
    softcap: ``softcap * tanh(logits / softcap)`` takes the place of the logits, as in Gemma 2; 0 is none.
    logit_scale: positive factor of the logits, before the cap, as in Cohere's models.
    reduction: ``"mean"`` over the rows that are not ignored, ``"sum"`` or ``"none"``.
    chunk_rows: rows whose logits are held at a time; None chooses as described above.
    accum_dtype: dtype in which the weight's gradient is summed over chunks: float32 (None means this) or T. Sums in
        float32 are rounded once, and take four more bytes per element of the weight while the gradients are computed,
        unless T is float32 or all rows are one chunk. Sums in T are rounded with every chunk: in bfloat16 the error is
        about 0.2% of the gradient with one chunk, 0.5% with 16 and 2% with 256.

Returns:
    float32: a scalar, or ``[*m]``. Gradients are products of the logits' gradient, rounded to T. In float16 the
    backward computes the logits again, a third more products, so that their gradient is multiplied by the loss' scale
    before it is rounded.

Raises:
    TypeError: dtypes that differ or are not listed, ``chunk_rows`` that is no integer.
    ValueError: shapes that do not fit, an attribute out of its range, an unknown reduction, ``chunk_rows`` below 1,
        another ``accum_dtype``.

Source: computing gradients chunk by chunk in the forward: Hsu et al., Liger Kernel, 2024.
"""


def loss(
    rows: Callable[..., Any], total: Callable[..., Any], layer: tuple[Any, Any, Any, Any], attrs: tuple[Any, ...], *,
    reduction: str, chunk_rows: int | None, accum_dtype: str, count: Any = None, skip_ignored: bool = False,
    whole: bool = False,
) -> Any:  # fmt: skip
    """The public function, from a framework's functions of the two ops, the layer (hidden states, weight, target and
    bias) and the loss' attributes in the order of :data:`LOSS_ATTRS`. With ``count``, a number without dims, the sum is
    divided by it: gradients are computed for the quotient, so that the backward does not scale them. With
    ``skip_ignored`` the op may leave ignored rows out of its products: their number is read from the device, so only an
    adapter that can wait for it asks. ``whole``: no device has some of the rows only, so the op itself may count them.

    Raises:
        TypeError: ``chunk_rows`` that is no integer.
        ValueError: an unknown reduction, ``chunk_rows`` below 1.
    """
    mean = type(reduction) is str and reduction == "mean"
    if not mean:
        FINISH.check(NAME, {"reduction": reduction})
    if chunk_rows is not None and not isinstance(chunk_rows, int):
        raise TypeError(f"cute.{NAME}: option `chunk_rows` is {shown(chunk_rows)}, expected an int or None.")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"cute.{NAME}: option `chunk_rows` is {chunk_rows}, expected at least 1.")
    hidden, weight, target, bias = layer
    options = (*attrs, accum_dtype, chunk_rows or 0, skip_ignored)
    if reduction == "none" or str(hidden.dtype).removeprefix("torch.") == "float16":
        return _mean(rows(hidden, weight, target, bias, *options, reduction=reduction), count)
    if mean and whole:
        return total(hidden, weight, target, None, bias, *options, True)
    # JAX compares int32 with what int32 holds; the op refuses all else.
    ignore_index = attrs[0]
    held = str(target.dtype).endswith("int64") or not isinstance(ignore_index, int) or abs(ignore_index) < 2**31
    count = (target != (ignore_index if held else 0)).sum() if mean else count
    return total(hidden, weight, target, count, bias, *options)


# --- programs ------------------------------------------------------------------------------------------------------


def _rows(
    xp: Any, call: Call, inputs: Arrays, attrs: Arrays, wanted: Collection[str] = tuple(cross_entropy.outputs)
) -> Arrays:
    """Loss of each row, and its log-sum-exp as two numbers, as far as they are wanted."""
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, (), call=call)

    def body(found: dict[str, Any], at: Any) -> dict[str, Any]:
        given = {"logits": chunks.logits(at), "target": chunks.cut("target", at)}
        made = call(cross_entropy, given, _of_loss(attrs))
        return {name: chunks.put(array, at, made[name]) for name, array in found.items()}

    found = chunks.each({name: chunks.new_rows() for name in wanted}, body)
    return {name: chunks.all_rows(array).reshape(inputs["target"].shape) for name, array in found.items()}


def _rows_bwd(wanted: Collection[str], xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The gradients for a cotangent of each row's loss, from logits that are computed again."""
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, wanted, call=call, by="classes")

    def body(sums: dict[str, Any], at: Any) -> dict[str, Any]:
        rows = {name: chunks.cut(name, at) for name in ("target", *_SAVED)}
        given, own = chunks.of_chunk(cross_entropy_bwd, rows, _of_loss(attrs), at)
        found = call(cross_entropy_bwd, {"logits": chunks.logits(at), **given}, own, inplace=True)
        return add_chunk(chunks, sums, at, found["dlogits"])

    return gradients(chunks, chunks.each(chunks.sums(), body), inputs)


def _total(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The sum of the losses, or their mean: over ``count`` rows, or those that are not ignored."""
    return {"loss": _reduced(call, _rows(xp, call, inputs, attrs, ("loss",))["loss"], inputs, attrs)}


def _step(wanted: Collection[str], xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The loss of :func:`_total` with its gradients."""
    if attrs["mean"]:
        one = call(kept_mean, {"target": inputs["target"].reshape(-1)}, _ignoring(attrs))["out"]
    else:
        one = _mean(xp.ones((), inputs["hidden"]), inputs["count"])
    dloss = xp.broadcast_to(one, inputs["target"].shape)
    chunks: Chunks = xp.chunks(_flat({**inputs, "dloss": dloss}), attrs, wanted, share=True, call=call)

    def body(state: tuple[Any, dict[str, Any]], at: Any) -> tuple[Any, dict[str, Any]]:
        losses, sums = state
        given = {"logits": chunks.logits(at), "target": chunks.cut("target", at)}
        cotangents = {"dloss": chunks.cut("dloss", at)}
        if xp.shared:  # devices exchange losses before each computes its gradient
            found = call(cross_entropy, given, _of_loss(attrs))
            more = {name: found[name] for name in ("row_max", "log_sum")}
            gradient = call(cross_entropy_bwd, {**given, **more, **cotangents}, _of_loss(attrs), inplace=True)
            found = {**found, **gradient}
        else:
            found = call(cross_entropy_step, {**given, **cotangents}, _of_loss(attrs), inplace=True)
        return chunks.put(losses, at, found["loss"]), add_chunk(chunks, sums, at, found["dlogits"])

    losses, sums = chunks.each((chunks.new_rows(), chunks.sums()), body)
    found = gradients(chunks, sums, inputs)
    loss = _reduced(call, losses, chunks.inputs, attrs)
    return {"loss": loss, **{SCALED[name]: a for name, a in found.items()}}


def _reduced(call: Call, losses: Any, inputs: Arrays, attrs: Arrays) -> Any:
    """The sum of the rows' losses, or the mean that is asked for."""
    if not attrs["mean"]:
        return _mean(losses.sum(), inputs["count"])
    given = {"target": inputs["target"].reshape(-1), "loss": losses.reshape(-1)}
    return call(kept_mean, given, _ignoring(attrs))["out"]


def _ignoring(attrs: Arrays) -> Arrays:
    return {"ignore_index": attrs["ignore_index"]}


def _flat(inputs: Arrays) -> Arrays:
    """The inputs with one leading dim."""
    rows = {name: inputs[name].reshape(-1) for name in ("target", *_SAVED) if name in inputs}
    return {**inputs, **rows, "hidden": inputs["hidden"].reshape(-1, inputs["hidden"].shape[-1])}


def _of_loss(attrs: Arrays) -> Arrays:
    return {name: attrs[name] for name in LOSS_ATTRS}


def _mean(total: Any, count: Any) -> Any:
    return total if count is None else total / count


def add_chunk(chunks: Chunks, sums: dict[str, Any], at: Any, dlogits: Any) -> dict[str, Any]:
    """The gradients with those of one more chunk added."""
    found = dict(sums)
    if "dhidden" in sums:
        found["dhidden"] = chunks.put_product(sums["dhidden"], at, dlogits, chunks.inputs["weight"])
    if "dweight" in sums:
        found["dweight"] = chunks.add_product(sums["dweight"], at, dlogits.T, chunks.cut("hidden", at))
    if "dbias" in sums:
        found["dbias"] = chunks.add_rows(sums["dbias"], at, dlogits)
    return found


def gradients(chunks: Chunks, sums: dict[str, Any], inputs: Arrays) -> Arrays:
    found = chunks.rounded(sums)
    return {name: a.reshape(inputs["hidden"].shape) if name == "dhidden" else a for name, a in found.items()}


# --- declarations --------------------------------------------------------------------------------------------------

NAME = "linear_cross_entropy"
LOSS_ATTRS = "ignore_index", "label_smoothing", "z_loss", "softcap", "logit_scale"
_SAVED = ("row_max", "log_sum", "dloss")
_HIDDEN, _WEIGHT, _BIAS = Tensor("*m h", "T"), Tensor("n h", "T"), Tensor("n", "T", optional=True)
_LAYER = {"hidden": _HIDDEN, "weight": _WEIGHT, "target": Tensor("*m", "I", upper_bound="n")}
GRADIENTS = {
    "dhidden": _HIDDEN,
    "dweight": _WEIGHT._replace(strided_like="weight"),
    "dbias": Tensor("n", "T", given="bias"),
}
_COUNT, MEAN = {"count": Tensor("", "C", optional=True)}, {"mean": False}
_STEPS = cross_entropy, cross_entropy_bwd, cross_entropy_step, kept_mean
SCALED = {f"d{name}": f"{name}_gradient" for name in ("hidden", "weight", "bias")}


def check_chunk_rows(binding: Binding) -> str | None:
    rows = binding.attrs["chunk_rows"]
    return f"attribute `chunk_rows` is {rows}, expected 0, or at least 1." if rows < 0 else None


def check_accum(binding: Binding) -> str | None:
    accum, own = binding.attrs["accum_dtype"], binding.dtypes["T"]
    if accum not in ("float32", own):
        return f"option `accum_dtype` is {accum}, expected float32 or the dtype of `weight`, {own}."
    return None


def _check(binding: Binding) -> str | None:
    return check_accum(binding) or no_columns(binding, "weight") or check(binding)


def _declare(
    name: str, run: Callable[..., Arrays], ops: tuple[Op, ...], inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor], own: Mapping[str, Any] = MappingProxyType({}), **more: Any,
) -> Op:  # fmt: skip
    over_rows = () if all(t.rows for t in outputs.values()) else ("m",)
    merged = tuple(name for name in outputs if name in cross_entropy.outputs)
    return Op(
        name, inputs={**_LAYER, **inputs, "bias": _BIAS}, outputs=outputs,
        dtypes={**DTYPES, "C": ("int64", "int32", "float32")},
        attrs={
            **_of_loss(cross_entropy.attrs), "accum_dtype": "float32", "chunk_rows": 0, "skip_ignored": False, **own,
        },
        static=(),
        kernel=Program(run, ops), sharding=Sharding(contracted=over_rows, split=Split("n", merged=merged)),
        check=_check, called=NAME, **more,
    )  # fmt: skip


def wanted_gradients(names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of these gradients, skippable if they are all."""
    return {n: GRADIENTS[n]._replace(skippable=len(names) == len(GRADIENTS)) for n in names}


def _declare_rows_bwd(name: str, outputs: Collection[str]) -> Op:
    return _declare(
        name, partial(_rows_bwd, outputs), (linear, linear_dx, cross_entropy_bwd), dict.fromkeys(_SAVED, ROW),
        wanted_gradients(outputs), narrow=_declare_rows_bwd,
    )  # fmt: skip


def _declare_step(name: str, outputs: Collection[str]) -> Op:
    wanted = [n for n, gradient in SCALED.items() if gradient in outputs]
    return _declare(
        name, partial(_step, wanted), (linear, linear_dx, *_STEPS), _COUNT,
        {**_LOSS, **{SCALED[n]: t for n, t in wanted_gradients(wanted).items()}}, MEAN, narrow=_declare_step,
        scaled={n.removeprefix("d"): SCALED[n] for n in wanted},
        no_gradient=("count", *(n.removeprefix("d") for n in SCALED if n not in wanted)) if wanted else (),
    )  # fmt: skip


_LOSS = {"loss": Tensor("", "float32")}
linear_cross_entropy_rows = _declare(
    "linear_cross_entropy_rows", _rows, (linear, cross_entropy), {}, cross_entropy.outputs, finish=FINISH,
    grad=_declare_rows_bwd("linear_cross_entropy_rows_bwd", tuple(GRADIENTS)),
)  # fmt: skip
linear_cross_entropy_total = _declare(
    "linear_cross_entropy_total", _total, (linear, cross_entropy, kept_mean), _COUNT, _LOSS, MEAN,
    saving=_declare_step("linear_cross_entropy_step", ("loss", *SCALED.values())),
    scaled={name.removeprefix("d"): gradient for name, gradient in SCALED.items()}, no_gradient=("count",),
)  # fmt: skip
