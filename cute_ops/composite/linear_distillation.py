"""The divergence of two linear heads' distributions, computed without ever holding all logits: composites.

A chunk of rows at a time, as :mod:`cute_ops.composite.linear_cross_entropy`. The weighted sum of the rows' losses has
its gradients computed in the forward: both heads' logits once, then two products. Where gradients would underflow, in
float16, each row's loss is an output, and the backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

from cute_ops.composite import linear_cross_entropy as linear
from cute_ops.composite.chunks import AUTO, Chunks
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import no_columns
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops.ops.reduction.divergence import (
    NUMBERS,
    check,
    distillation_step,
    divergence,
    divergence_bwd,
    divergence_saving,
    divergence_step,
)

Arrays: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[..., Arrays]
NAME = "linear_distillation_loss"
# Above it the number of a class is not exact in float32.
MOST_CLASSES = 1 << 24


# --- programs ------------------------------------------------------------------------------------------------------


def _rows(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The divergence of each row."""
    lead = inputs["hidden"].shape[:-1]
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, ())

    def body(loss: Any, at: Any) -> Any:
        return chunks.put(loss, at, call(divergence, _logits(chunks, at), _own(attrs))["loss"])

    return {"loss": chunks.each(chunks.new_rows(), body).reshape(lead)}


def _rows_bwd(wanted: Collection[str], xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The gradients for a cotangent of each row's loss, from logits that are computed again."""
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, wanted)

    def body(sums: dict[str, Any], at: Any) -> dict[str, Any]:
        logits, dloss = _logits(chunks, at), chunks.cut("dloss", at)
        saved = call(divergence_saving, logits, _own(attrs))
        given = {**logits, **{name: saved[name] for name in NUMBERS}, "dloss": dloss}
        return linear.add_chunk(chunks, sums, at, call(divergence_bwd, given, _own(attrs))["dstudent"])

    return linear.gradients(chunks, chunks.each(chunks.sums(), body), inputs)


def _total(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The weighted sum of the rows' losses."""
    flat = _flat(inputs)
    chunks: Chunks = xp.chunks(flat, attrs, ())

    def body(losses: Any, at: Any) -> Any:
        given = _logits(chunks, at)
        loss = _weighted(xp, chunks.cut("soft", at), call(divergence, given, _own(attrs))["loss"])
        if flat["hard"] is not None:
            found = call(cross_entropy, {"logits": given["student"], "target": chunks.cut("target", at)}, {})["loss"]
            loss = loss + _weighted(xp, chunks.cut("hard", at), found)
        return chunks.put(losses, at, loss)

    return {"loss": chunks.each(chunks.new_rows(), body).sum()}


def _weighted(xp: Any, weight: Any, loss: Any) -> Any:
    """A loss times its weight, nothing where that is 0, whatever the loss is."""
    return xp.where(weight == 0, weight, weight * loss)


def _step(wanted: Collection[str], xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """The loss of :func:`_total` with its gradients."""
    flat = _flat(inputs)
    chunks: Chunks = xp.chunks(flat, attrs, wanted, by="halves")
    op, rows = (divergence_step, ("soft",)) if flat["hard"] is None else (distillation_step, _ROWS[:3])

    def body(state: tuple[Any, dict[str, Any]], at: Any) -> tuple[Any, dict[str, Any]]:
        losses, sums = state
        given = {**_logits(chunks, at), **{name: chunks.cut(name, at) for name in rows}}
        found = call(op, given, _own(attrs), inplace=True)
        return chunks.put(losses, at, found["loss"]), linear.add_chunk(chunks, sums, at, found["dstudent"])

    losses, sums = chunks.each((chunks.new_rows(), chunks.sums()), body)
    found = linear.gradients(chunks, sums, inputs)
    return {"loss": losses.sum(), **{linear.SCALED[name]: a for name, a in found.items()}}


def _logits(chunks: Chunks, at: Any) -> Arrays:
    return {"teacher": chunks.logits(at, "teacher_"), "student": chunks.logits(at)}


def _flat(inputs: Arrays) -> Arrays:
    """The inputs with one leading dim."""
    tokens = {name: inputs[name].reshape(-1, inputs[name].shape[-1]) for name in ("hidden", "teacher_hidden")}
    rows = {name: inputs[name].reshape(-1) for name in _ROWS if inputs.get(name) is not None}
    return {**inputs, **tokens, **rows}


def _own(attrs: Arrays) -> Arrays:
    return {name: attrs[name] for name in ("beta", "temperature")}


# --- declarations --------------------------------------------------------------------------------------------------


def _check(binding: Binding) -> str | None:
    if problem := linear.check_chunk_rows(binding):
        return problem
    accum = None if binding.attrs["accum_dtype"] == AUTO else linear.check_accum(binding)
    return check(binding) or no_columns(binding, "weight") or accum or _check_target(binding) or _check_sizes(binding)


def _check_sizes(binding: Binding) -> str | None:
    for name, dim in (("hidden", "h"), ("teacher_hidden", "i")):
        size = binding.dims[dim]
        if isinstance(size, int) and size < 1:
            return f"argument `{name}` has {dim}=0, expected at least 1."
    return None


def _check_target(binding: Binding) -> str | None:
    n = binding.dims["n"]
    if "hard" in binding.dtypes and isinstance(n, int) and n > MOST_CLASSES:
        return f"argument `weight` has n={n} classes, expected at most {MOST_CLASSES} beside `hard`."
    return None


_ROWS = "target", "soft", "hard", "dloss"
_INPUTS = {
    "hidden": Tensor("*m h", "T"), "weight": Tensor("n h", "T"), "teacher_hidden": Tensor("*m i", "T"),
    "teacher_weight": Tensor("n i", "T"),
}  # fmt: skip
_WEIGHTS = {
    "soft": Tensor("*m", "float32"), "hard": Tensor("*m", "float32", optional=True),
    "target": Tensor("*m", "I", optional=True, upper_bound="n"),
}  # fmt: skip
_BIASES = {"bias": Tensor("n", "T", optional=True), "teacher_bias": Tensor("n", "T", optional=True)}
_TEACHER, _WEIGHED = ("teacher_hidden", "teacher_weight", "teacher_bias"), ("soft", "hard")
_LOSS = {"loss": Tensor("", "float32")}
_COMMON: dict[str, Any] = {
    "static": (), "check": _check, "called": NAME,
    "attrs": {"beta": 0.5, "temperature": 1.0, "accum_dtype": AUTO, "chunk_rows": 0},
}  # fmt: skip


def _declare_bwd(name: str, outputs: Collection[str]) -> Op:
    return Op(
        name, inputs={**_INPUTS, "dloss": Tensor("*m", "float32"), **_BIASES}, outputs=linear.wanted_gradients(outputs),
        kernel=Program(partial(_rows_bwd, outputs), (divergence_saving, divergence_bwd)),
        sharding=Sharding(contracted=("m",)), narrow=_declare_bwd, dtypes={"T": FLOATS}, **_COMMON,
    )  # fmt: skip


def _declare_total(
    name: str, run: Callable[..., Arrays], ops: tuple[Op, ...], outputs: Mapping[str, Tensor], **more: Any
) -> Op:
    return Op(
        name, inputs={**_INPUTS, **_WEIGHTS, **_BIASES}, outputs=outputs, kernel=Program(run, ops),
        sharding=Sharding(contracted=("m",)), dtypes={"T": FLOATS, "I": ("int64", "int32")}, **more, **_COMMON,
    )  # fmt: skip


def _declare_step(name: str, outputs: Collection[str]) -> Op:
    wanted = [n for n, gradient in linear.SCALED.items() if gradient in outputs]
    idle = [n.removeprefix("d") for n in linear.SCALED if n not in wanted]
    return _declare_total(
        name, partial(_step, wanted), (divergence_step, distillation_step),
        {**_LOSS, **{linear.SCALED[n]: t for n, t in linear.wanted_gradients(wanted).items()}}, narrow=_declare_step,
        scaled={n.removeprefix("d"): linear.SCALED[n] for n in wanted},
        no_gradient=(*_TEACHER, *_WEIGHED, *idle) if wanted else (),
    )  # fmt: skip


linear_distillation_rows = Op(
    "linear_distillation_rows",
    inputs={**_INPUTS, **_BIASES},
    outputs={"loss": Tensor("*m", "float32")},
    kernel=Program(_rows, (divergence,)),
    grad=_declare_bwd("linear_distillation_rows_bwd", linear.GRADIENTS),
    no_gradient=_TEACHER,
    dtypes={"T": FLOATS},
    **_COMMON,
)
linear_distillation_total = _declare_total(
    "linear_distillation_total", _total, (divergence, cross_entropy), _LOSS,
    saving=_declare_step("linear_distillation_step", ("loss", *linear.SCALED.values())),
    scaled={name.removeprefix("d"): gradient for name, gradient in linear.SCALED.items()},
    no_gradient=(*_TEACHER, *_WEIGHED),
)  # fmt: skip
