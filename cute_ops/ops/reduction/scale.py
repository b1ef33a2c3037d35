"""Rows times a number each: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.reduction import config

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 8192}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("rows", {"m": (129,), "n": 1024}),
    Case("longest", {"m": (3,), "n": 262144}),
)


def reference(xp: Any, x: Any, factor: Any) -> Any:
    wide, f = widen(xp, x, factor)
    return xp.astype(wide * f[..., None], x.dtype)


scale = Op(
    "scale",
    inputs={"x": Tensor("*m n", "T"), "factor": Tensor("*m", "float32")},
    outputs={"out": Tensor("*m n", "T", donates="x")},
    dtypes={"T": FLOATS},
    static=(),
    sharding=Sharding(parallel=("n",)),
    reference=reference,
    kernel="cute_ops.kernels.reduction.scale:Scale",
    tuning=Tuning(config.scale),
    cases=CASES,
    doc="""Rows times a number each.

    ``out = x * factor[..., None]``

    Where the output is x itself, rows whose factor is one are left alone: that costs no more than the launch, and the
    host does not wait for the device to know it.

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride.
        factor: float32 ``[*m]``, of any strides.

    Returns:
        ``T[*m n]``, compact. A product in float32, rounded once; no gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
)
