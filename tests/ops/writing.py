"""Small ops that write their inputs or take run-time scalars, for the tests of both frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_ops import FLOATS, Case, Op, Tensor
from cute_ops.declaration.array_api import columns, widen

ROWS = Tensor("*m n", "T")


def _stored(xp: Any, cache: Any, rows: Any, index: Any) -> Any:
    hit = xp.reshape(index, (-1, 1)) == columns(xp, cache[:, 0])  # (rows, c)
    found = xp.astype(hit, rows.dtype).T @ xp.reshape(rows, (-1, rows.shape[-1]))
    return xp.where(xp.any(hit, axis=0)[:, None], found, cache)


def _apart(xp: Any, arrays: dict[str, Any]) -> None:
    index = arrays["index"]
    index[...] = np.arange(index.size)[::-1].reshape(index.shape)


store = Op(
    "store",
    inputs={"cache": Tensor("c n", "T"), "rows": ROWS, "index": Tensor("*m", "int32", upper_bound="c")},
    outputs={},
    mutates=("cache",),
    dtypes={"T": FLOATS},
    reference=_stored,
    kernel="tests.ops.writing_kernels:Store",
    cases=(Case("rows", {"c": 12, "m": (2, 3), "n": 8}),),
    arrange=_apart,
    doc="Rows into places of a cache.",
)


def _followed(xp: Any, state: Any, x: Any, gain: Any, *, keep: float) -> tuple[Any, Any]:
    s, a, g = widen(xp, state, x, gain)
    return xp.astype(keep * s + g * a, state.dtype), xp.astype(keep * s, state.dtype)


follow = Op(
    "follow",
    inputs={"state": ROWS, "x": ROWS, "gain": Tensor("", "float32")},
    outputs={"out": ROWS},
    mutates=("state",),
    dtypes={"T": FLOATS},
    scalars={"keep": 0.5},
    reference=_followed,
    kernel="tests.ops.writing_kernels:Follow",
    cases=(Case("rows", {"m": (2, 3), "n": 8}),),
    doc="A leaky sum: what is kept of it is returned.",
)


def _added(xp: Any, x: Any, y: Any, *, alpha: float, first: int) -> Any:
    a, b = widen(xp, x, y)
    return xp.astype(b + xp.where(columns(xp, a) >= first, alpha * a, xp.zeros_like(a)), x.dtype)


def _added_bwd(xp: Any, dout: Any, *, alpha: float, first: int) -> tuple[Any, Any]:
    (d,) = widen(xp, dout)
    return xp.astype(xp.where(columns(xp, d) >= first, alpha * d, xp.zeros_like(d)), dout.dtype), dout


NUMBERS: dict[str, float] = {"alpha": 2.0, "first": 0}
axpy = Op(
    "axpy",
    inputs={"x": ROWS, "y": ROWS},
    outputs={"out": ROWS},
    dtypes={"T": FLOATS},
    scalars=NUMBERS,
    reference=_added,
    kernel="tests.ops.writing_kernels:Axpy",
    grad=Op(
        "axpy_bwd",
        inputs={"dout": ROWS},
        outputs={"dx": ROWS, "dy": ROWS},
        dtypes={"T": FLOATS},
        scalars=NUMBERS,
        reference=_added_bwd,
        kernel="tests.ops.writing_kernels:AxpyBwd",
        cases=(Case("rows", {"m": (2, 3), "n": 8}),),
    ),
    cases=(Case("rows", {"m": (2, 3), "n": 8}),),
    doc="``out = alpha * x + y`` from column ``first`` on, y before it.",
)
