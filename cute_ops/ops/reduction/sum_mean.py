"""Sum and mean over the last dim: declarations, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.binding import Binding
from cute_ops.config import Tuning
from cute_ops.op import Case, Op, Tensor
from cute_ops.ops.checks import no_columns
from cute_ops.ops.reduction.config import MAP, REDUCE, filled, reduced
from cute_ops.shapes import FLOATS

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}),
    Case("longest", {"m": (3,), "n": 262144}),
)
DTYPES = {"T": FLOATS}
ROWS, ROW = Tensor("*m n", "T"), Tensor("*m", "T")


def reference(xp: Any, x: Any) -> Any:
    return xp.astype(xp.sum(widen(xp, x)[0], axis=-1), x.dtype)


def reference_mean(xp: Any, x: Any) -> Any:
    return xp.astype(xp.mean(widen(xp, x)[0], axis=-1), x.dtype)


def reference_bwd(xp: Any, x: Any, dout: Any) -> Any:
    return xp.zeros_like(x) + dout[..., None]


def reference_mean_bwd(xp: Any, x: Any, dout: Any) -> Any:
    return xp.astype(widen(xp, xp.zeros_like(x) + dout[..., None])[0] / x.shape[-1], x.dtype)


def check(binding: Binding) -> str | None:
    return no_columns(binding, "x")


COMMON: dict[str, Any] = {"dtypes": DTYPES, "check": check, "cases": CASES}

sum_bwd = Op(
    "sum_bwd",
    inputs={"x": Tensor("*m n", "T", unread=True), "dout": ROW},
    outputs={"dx": ROWS},
    **COMMON,
    reference=reference_bwd,
    kernel="cute_ops.kernels.reduction.sum_mean:RowTotalBackward",
    tuning=Tuning(filled, space=MAP),
    doc="""Gradient of :func:`sum`: ``dx = dout`` in every column. Of x only the shape is used; it is not read.""",
)

mean_bwd = Op(
    "mean_bwd",
    inputs={"x": Tensor("*m n", "T", unread=True), "dout": ROW},
    outputs={"dx": ROWS},
    **COMMON,
    reference=reference_mean_bwd,
    kernel="cute_ops.kernels.reduction.sum_mean:RowMeanBackward",
    tuning=Tuning(filled, space=MAP),
    doc="""Gradient of :func:`mean`: ``dx = dout / n`` in every column. Of x only the shape is used; it is not read.""",
)

_DOC = """{what} over the last dim.

    ``out = {formula}``

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride, any n of 1 or more.

    Returns:
        ``T[*m]``. Accumulated in float32 in a fixed order, rounded once. The gradient is written out; PyTorch's own is
        an expanded view, which moves nothing until something reads it.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: n = 0, a last dim that is not contiguous.

    Source: the running example of the CuTe DSL introduction.
    """

row_sum = Op(
    "sum",
    inputs={"x": ROWS},
    outputs={"out": ROW},
    **COMMON,
    reference=reference,
    kernel="cute_ops.kernels.reduction.sum_mean:RowTotal",
    tuning=Tuning(reduced, space=REDUCE),
    grad=sum_bwd,
    doc=_DOC.format(what="Sum", formula="sum(x)"),
)

row_mean = Op(
    "mean",
    inputs={"x": ROWS},
    outputs={"out": ROW},
    **COMMON,
    reference=reference_mean,
    kernel="cute_ops.kernels.reduction.sum_mean:RowMean",
    tuning=Tuning(reduced, space=REDUCE),
    grad=mean_bwd,
    doc=_DOC.format(what="Mean", formula="sum(x) / n"),
)
