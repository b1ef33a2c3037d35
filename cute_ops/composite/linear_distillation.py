"""The divergence of two linear heads' distributions, computed without ever holding all logits: a composite.

A chunk of rows at a time, as :mod:`cute_ops.composite.linear_cross_entropy`; the backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

from cute_ops.composite import linear_cross_entropy as linear
from cute_ops.composite.chunks import Chunks
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import no_columns
from cute_ops.ops.reduction.divergence import check, divergence

Arrays: TypeAlias = Mapping[str, Any]
NAME = "linear_distillation_loss"


def _given(xp: Any, chunks: Chunks, at: Any, inputs: Arrays) -> Arrays:
    teacher = xp.product(chunks.cut("teacher_hidden", at), inputs["teacher_weight"].T)
    return {"student": chunks.logits(at), "teacher": teacher}


def _run(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    lead = inputs["hidden"].shape[:-1]
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, ())

    def body(loss: Any, at: Any) -> Any:
        return chunks.put(loss, at, call(divergence, _given(xp, chunks, at, inputs), _own(attrs))["loss"])

    return {"loss": chunks.each(chunks.new_rows(), body).reshape(lead)}


def _run_bwd(wanted: Collection[str], xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, wanted)

    def body(sums: dict[str, Any], at: Any) -> dict[str, Any]:
        given = {**_given(xp, chunks, at, inputs), "dloss": chunks.cut("dloss", at)}
        return linear.add_chunk(chunks, sums, at, call(divergence.steps[0], given, _own(attrs))["dstudent"])

    return linear.gradients(chunks, chunks.each(chunks.sums(), body), inputs)


def _flat(inputs: Arrays) -> Arrays:
    """The inputs with one leading dim."""
    tokens = {name: inputs[name].reshape(-1, inputs[name].shape[-1]) for name in ("hidden", "teacher_hidden")}
    rows = {"dloss": inputs["dloss"].reshape(-1)} if "dloss" in inputs else {}
    return {**inputs, **tokens, **rows}


def _own(attrs: Arrays) -> Arrays:
    return {name: attrs[name] for name in ("beta", "temperature")}


def _check(binding: Binding) -> str | None:
    return check(binding) or no_columns(binding, "weight") or linear.check_accum(binding)


_INPUTS = {
    "hidden": Tensor("*m h", "T"), "weight": Tensor("n h", "T"), "teacher_hidden": Tensor("*m i", "T"),
    "teacher_weight": Tensor("n i", "T"),
}  # fmt: skip
_BIAS = {"bias": Tensor("n", "T", optional=True)}
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS}, "static": (), "check": _check, "called": NAME,
    "attrs": {"beta": 0.5, "temperature": 1.0, "accum_dtype": "float32", "chunk_rows": 0},
}  # fmt: skip


def _declare_bwd(name: str, outputs: Collection[str]) -> Op:
    return Op(
        name, inputs={**_INPUTS, "dloss": Tensor("*m", "float32"), **_BIAS}, outputs=linear.wanted_gradients(outputs),
        kernel=Program(partial(_run_bwd, outputs), (divergence.steps[0],)), sharding=Sharding(contracted=("m",)),
        narrow=_declare_bwd, **_COMMON,
    )  # fmt: skip


linear_distillation_rows = Op(
    "linear_distillation_rows",
    inputs={**_INPUTS, **_BIAS},
    outputs={"loss": Tensor("*m", "float32")},
    kernel=Program(_run, (divergence,)),
    grad=_declare_bwd("linear_distillation_rows_bwd", linear.GRADIENTS),
    no_gradient=("teacher_hidden", "teacher_weight"),
    **_COMMON,
)
