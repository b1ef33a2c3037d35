"""Ops with the code that finishes their outputs, as composites: a call of the function is one of a few kernels.

A function's :class:`cute_ops.Finish` runs the framework's functions on the outputs, four launches for the mean of a
loss and as many for its gradient. A composite of the default options takes its place where one device has all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.reduction import cross_entropy as rows
from cute_ops.ops.reduction.kept_mean import kept_mean

Arrays: TypeAlias = Mapping[str, Any]


def _mean(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    found = dict(call(rows.cross_entropy, inputs, attrs))
    given = {"target": inputs["target"].reshape(-1), "loss": found["loss"].reshape(-1)}
    return {**found, "loss": call(kept_mean, given, _ignoring(attrs))["out"]}


def _mean_bwd(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    given = {"target": inputs["target"].reshape(-1), "factor": inputs["dloss"]}
    of_each = xp.broadcast_to(call(kept_mean, given, _ignoring(attrs))["out"], inputs["target"].shape)
    return call(rows.cross_entropy_bwd, {**inputs, "dloss": of_each}, attrs)


def _ignoring(attrs: Arrays) -> Arrays:
    return {"ignore_index": attrs["ignore_index"]}


_COMMON: dict[str, Any] = {
    "dtypes": rows.DTYPES, "attrs": rows.ATTRS, "static": (), "check": rows.check, "called": rows.cross_entropy.name,
}  # fmt: skip
_SAVED = {"row_max": rows.ROW, "log_sum": rows.ROW}
_LOSS = Tensor("", "float32")
cross_entropy_mean = Op(
    "cross_entropy_mean",
    inputs=rows.INPUTS,
    outputs={"loss": _LOSS, **{name: t._replace(hidden=True) for name, t in _SAVED.items()}},
    kernel=Program(_mean, (rows.cross_entropy, kept_mean)),
    grad=Op(
        "cross_entropy_mean_bwd",
        inputs={**rows.INPUTS, **_SAVED, "dloss": _LOSS},
        outputs={"dlogits": rows.DLOGITS._replace(donates=None)},
        kernel=Program(_mean_bwd, (kept_mean, rows.cross_entropy_bwd)),
        **_COMMON,
    ),
    **_COMMON,
)
# By the op whose outputs they finish, with the options' defaults.
FINISHED: Mapping[Op, Op] = {rows.cross_entropy: cross_entropy_mean}
