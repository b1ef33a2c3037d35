"""The loss of a linear head with class weights and metrics, computed without ever holding all logits: a composite.

As :mod:`cute_ops.composite.linear_cross_entropy`, a chunk of rows at a time; the backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

from cute_ops.composite import linear_cross_entropy as linear
from cute_ops.composite.chunks import Chunks
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import no_columns
from cute_ops.ops.reduction import cross_entropy as plain
from cute_ops.ops.reduction import cross_entropy_metrics as rows

Arrays: TypeAlias = Mapping[str, Any]
NAME = "linear_cross_entropy_metrics"
_BY_ROW = ("target", *rows.SAVED, "dloss", "dlse", "dlog_prob")
CASES = (
    Case("odd-small", {"m": (3, 5), "h": 7, "n": 11}, {"W": "float32"}, attrs=rows.ALL),
    Case("unweighted", {"m": (33,), "h": 16, "n": 100}, absent=("bias", "class_weight")),
    Case("capped", {"m": (9,), "h": 64, "n": 515}, absent=("bias",), attrs={"softcap": 2.0, "chunk_rows": 4}),
)


def _run(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, ())

    def body(found: dict[str, Any], at: Any) -> dict[str, Any]:
        given = {"logits": chunks.logits(at), "target": chunks.cut("target", at), "weight": inputs["class_weight"]}
        made = call(rows.cross_entropy_metrics, given, _of_loss(attrs))
        return {name: chunks.put(array, at, made[name]) for name, array in found.items()}

    found = chunks.each({name: chunks.new_rows() for name in rows.OUTPUTS}, body)
    found["predicted"] = xp.whole(found["predicted"])  # below 2^24, which float32 holds
    return {name: array.reshape(inputs["target"].shape) for name, array in found.items()}


def _run_bwd(wanted: Collection[str], xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    chunks: Chunks = xp.chunks(_flat(inputs), attrs, wanted)
    present = [name for name in _BY_ROW if inputs[name] is not None]

    def body(sums: dict[str, Any], at: Any) -> dict[str, Any]:
        given = {**dict.fromkeys(_BY_ROW), **{name: chunks.cut(name, at) for name in present}}
        given |= {"logits": chunks.logits(at), "weight": inputs["class_weight"]}
        found = call(rows.cross_entropy_metrics.grad, given, _of_loss(attrs), inplace=True)
        return linear.add_chunk(chunks, sums, at, found["dlogits"])

    return linear.gradients(chunks, chunks.each(chunks.sums(), body), inputs)


def _flat(inputs: Arrays) -> Arrays:
    """The inputs with one leading dim."""
    flat = {name: inputs[name].reshape(-1) for name in _BY_ROW if inputs.get(name) is not None}
    return {**inputs, **flat, "hidden": inputs["hidden"].reshape(-1, inputs["hidden"].shape[-1])}


def _of_loss(attrs: Arrays) -> Arrays:
    return {name: attrs[name] for name in linear.LOSS_ATTRS}


def _check(binding: Binding) -> str | None:
    own = linear.check_chunk_rows(binding) or no_columns(binding, "weight")
    return own or linear.check_accum(binding) or rows.check(binding)


_LAYER = {"hidden": Tensor("*m h", "T"), "weight": Tensor("n h", "T"), "target": Tensor("*m", "I", upper_bound="n")}
_MORE = {"bias": Tensor("n", "T", optional=True), "class_weight": Tensor("n", "W", optional=True)}
_COMMON: dict[str, Any] = {
    "dtypes": {**plain.DTYPES, "W": FLOATS},
    "attrs": {**_of_loss(plain.ATTRS), "accum_dtype": "float32", "chunk_rows": 0}, "static": (),
    "check": _check, "called": NAME, "cases": CASES,
}  # fmt: skip


def _declare_bwd(name: str, outputs: Collection[str]) -> Op:
    by_row = dict.fromkeys((*rows.SAVED, "dloss"), rows.ROW)
    program = Program(partial(_run_bwd, outputs), (rows.cross_entropy_metrics.grad,))
    return Op(
        name, inputs={**_LAYER, **by_row, **_MORE, "dlse": rows.GIVEN, "dlog_prob": rows.GIVEN},
        outputs=linear.wanted_gradients(outputs), kernel=program,
        sharding=Sharding(contracted=("m",)), narrow=_declare_bwd,
        doc="""Gradients of :func:`linear_cross_entropy_metrics`, chunk by chunk; logits are computed again.""",
        **_COMMON,
    )  # fmt: skip


linear_cross_entropy_metrics = Op(
    "linear_cross_entropy_metrics",
    inputs={**_LAYER, **_MORE},
    outputs=rows.OUTPUTS,
    kernel=Program(_run, (rows.cross_entropy_metrics,)),
    grad=_declare_bwd(f"{NAME}_bwd", linear.GRADIENTS),
    no_gradient=("class_weight",),
    finish=rows.finish("class_weight"),
    doc="""Cross entropy of a linear head with a weight per class and with metrics, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy_metrics`

    The backward computes the logits again, a third more products than :func:`linear_cross_entropy`.

    Args:
        hidden: ``T[*m h]``; float32, float16 or bfloat16.
        weight: ``T[n h]``.
        target: int64 or int32 ``[*m]``, the class of each row.
        bias: ``T[n]``.
        class_weight: ``W[n]``, a float dtype of its own: the weight of each class; ones where None. No gradient.
        ignore_index: rows with this target have loss 0, gradient 0 and prediction -1.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        z_loss: weight of ``lse^2``.
        softcap: bound of the logits; 0 is none.
        logit_scale: factor of the logits, before the cap; positive.
        accum_dtype: dtype in which the weight's gradient is summed over chunks, ``"float32"`` or that of the weight.
        chunk_rows: rows whose logits are held at a time; 0 chooses.
        reduction: ``"mean"``, with class weights the weighted mean, ``"sum"`` or ``"none"``: of the loss alone.
        token_scaling: multiply each row's loss by the probability of its target, a constant to the gradient.

    Returns:
        ``(loss, lse, log_prob, predicted)`` as :func:`cross_entropy_metrics`.

    Raises:
        TypeError: dtypes that differ or are not listed.
        ValueError: shapes that do not fit, an attribute out of its range, an unknown reduction.

    Source: computing losses chunk by chunk: Hsu et al., Liger Kernel, 2024.
    """,
    **_COMMON,
)
