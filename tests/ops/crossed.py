"""An op with leading dims of two names, for the tests of all frameworks."""

from __future__ import annotations

from typing import Any

from cute_ops import FLOATS, Op, Tensor


def total(xp: Any, rows: Any) -> Any:
    return xp.sum(xp.reshape(rows, (-1, rows.shape[-1])), axis=0)


ROWS_M, ROWS_P = Tensor("*m n", "T"), Tensor("*p n", "T")
CROSS_BWD = Op(
    "cross_bwd", inputs={"dout": ROWS_M, "x": ROWS_M, "y": ROWS_P}, outputs={"dx": ROWS_M, "dy": ROWS_P},
    dtypes={"T": FLOATS}, kernel="cute_ops.kernels:K",
    reference=lambda xp, dout, x, y: (dout * total(xp, y), xp.zeros_like(y) + total(xp, dout * x)),
)  # fmt: skip
CROSS = Op(
    "cross", inputs={"x": ROWS_M, "y": ROWS_P}, outputs={"out": ROWS_M}, dtypes={"T": FLOATS}, grad=CROSS_BWD,
    kernel="cute_ops.kernels:K", reference=lambda xp, x, y: x * total(xp, y),
)  # fmt: skip
