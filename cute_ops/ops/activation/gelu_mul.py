"""GELU-gated product, the pointwise half of GEGLU: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, OneOf, Op, Sharding, Tensor
from cute_ops.ops import docs
from cute_ops.ops.activation.config import SPACE, pointwise
from cute_ops.ops.activation.maths import gelu
from cute_ops.shapes import FLOATS

CASES = (
    Case("one-row", {"m": (), "n": 2304}),
    Case("odd", {"m": (37,), "n": 4097}, attrs={"approximate": "none"}),
    Case("gemma2-2b", {"m": (2, 33), "n": 9216}),
    Case("t5-v1.1-base", {"m": (129,), "n": 2048}, attrs={"approximate": "none"}),
)


def reference(xp: Any, gate: Any, up: Any, *, approximate: str) -> Any:
    g, u = widen(xp, gate, up)
    return xp.astype(gelu(xp, g, approximate)[0] * u, gate.dtype)


def reference_bwd(xp: Any, gate: Any, up: Any, dout: Any, *, approximate: str) -> tuple[Any, Any]:
    g, u, dy = widen(xp, gate, up, dout)
    y, slope = gelu(xp, g, approximate)
    return xp.astype(dy * u * slope, gate.dtype), xp.astype(dy * y, up.dtype)


ROWS = Tensor("*m n", "T")
COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS}, "attrs": {"approximate": OneOf("tanh", "none")}, "sharding": Sharding(parallel=("n",)),
    "tuning": Tuning(pointwise, space=SPACE), "cases": CASES,
}  # fmt: skip

gelu_mul_bwd = Op(
    "gelu_mul_bwd",
    inputs={"gate": ROWS, "up": ROWS, "dout": ROWS},
    outputs={"dgate": ROWS, "dup": ROWS},
    **COMMON,
    reference=reference_bwd,
    kernel="cute_ops.kernels.activation.gelu_mul:GeluMulBackward",
    doc="""Gradients of :func:`gelu_mul`: ``dgate = dout * up * gelu'(gate)``, ``dup = dout * gelu(gate)``.""",
)

gelu_mul = Op(
    "gelu_mul",
    inputs={"gate": ROWS, "up": ROWS},
    outputs={"out": ROWS},
    **COMMON,
    reference=reference,
    kernel="cute_ops.kernels.activation.gelu_mul:GeluMul",
    grad=gelu_mul_bwd,
    doc=f"""GELU of the gate times up: the pointwise half of GEGLU.

    ``out = gelu(gate) * up``

    Args:
        gate: {docs.ROWS}.
        up: ``T[*m n]``.
        approximate: ``tanh``, or ``none`` for the error function, as :func:`gelu`.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed, or two different ones.
        ValueError: shapes that do not fit, a last dim that is not contiguous, another ``approximate``.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """,
)
