"""Sum and mean over the last dim: declarations, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops import docs
from cute_ops.ops.checks import no_columns
from cute_ops.ops.reduction.config import MAP, REDUCE, filled, reduced

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}),
    Case("longest", {"m": (3,), "n": 262144}),
)
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


_DOC = """{what} over the last dim.

    ``out = {formula}``

    Args:
        x: {x}, any n of 1 or more.

    Returns:
        ``T[*m]``. Accumulated in float32 in a fixed order, rounded once. The gradient is written out; PyTorch's own is
        an expanded view, which moves nothing until something reads it.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: n = 0, a last dim that is not contiguous.

    Source: the running example of the CuTe DSL introduction.
    """


def _declare(name: str, kernel: str, references: tuple[Any, Any], formula: str, formula_bwd: str, what: str) -> Op:
    """A number of each row, and its gradient, which reads no rows."""
    where = f"cute_ops.kernels.reduction.sum_mean:{kernel}"
    common: dict[str, Any] = {"dtypes": {"T": FLOATS}, "check": check, "cases": CASES}
    backward = Op(
        f"{name}_bwd", inputs={"x": ROWS._replace(unread=True), "dout": ROW}, outputs={"dx": ROWS},
        reference=references[1], kernel=f"{where}Backward", tuning=Tuning(filled, space=MAP),
        doc=f"Gradient of :func:`{name}`: ``dx = {formula_bwd}`` in every column. Of x only the shape is used; it is "
        "not read.", **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": ROWS}, outputs={"out": ROW}, reference=references[0], kernel=where,
        tuning=Tuning(reduced, space=REDUCE), grad=backward,
        doc=_DOC.format(what=what, formula=formula, x=docs.ROWS), **common,
    )  # fmt: skip


row_sum = _declare("sum", "RowTotal", (reference, reference_bwd), "sum(x)", "dout", "Sum")
row_mean = _declare("mean", "RowMean", (reference_mean, reference_mean_bwd), "sum(x) / n", "dout / n", "Mean")
