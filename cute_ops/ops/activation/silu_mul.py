"""SiLU-gated product, the pointwise half of SwiGLU: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, Op, Sharding, Tensor
from cute_ops.ops import docs
from cute_ops.ops.activation.config import SPACE, pointwise
from cute_ops.ops.activation.maths import silu
from cute_ops.shapes import FLOATS

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 4096}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("llama3-8b", {"m": (2, 33), "n": 14336}),
    Case("qwen3-moe-expert", {"m": (129,), "n": 768}),
    Case("longest", {"m": (3,), "n": 262144}),
)


def reference(xp: Any, gate: Any, up: Any) -> Any:
    g, u = widen(xp, gate, up)
    return xp.astype(silu(xp, g)[0] * u, gate.dtype)


def reference_bwd(xp: Any, gate: Any, up: Any, dout: Any) -> tuple[Any, Any]:
    g, u, dy = widen(xp, gate, up, dout)
    y, slope = silu(xp, g)
    return xp.astype(dy * u * slope, gate.dtype), xp.astype(dy * y, up.dtype)


ROWS = Tensor("*m n", "T")
COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS}, "sharding": Sharding(parallel=("n",)), "tuning": Tuning(pointwise, space=SPACE),
    "cases": CASES,
}  # fmt: skip

silu_mul_bwd = Op(
    "silu_mul_bwd",
    inputs={"gate": ROWS, "up": ROWS, "dout": ROWS},
    outputs={"dgate": ROWS, "dup": ROWS},
    **COMMON,
    reference=reference_bwd,
    kernel="cute_ops.kernels.activation.silu_mul:SiluMulBackward",
    doc="""Gradients of :func:`silu_mul`.

    With ``s = sigmoid(gate)``: ``dgate = dout * up * s * (1 + gate * (1 - s))``, ``dup = dout * gate * s``.
    """,
)

silu_mul = Op(
    "silu_mul",
    inputs={"gate": ROWS, "up": ROWS},
    outputs={"out": ROWS},
    **COMMON,
    reference=reference,
    kernel="cute_ops.kernels.activation.silu_mul:SiluMul",
    grad=silu_mul_bwd,
    doc=f"""SiLU of the gate times up: the pointwise half of SwiGLU.

    ``out = gate * sigmoid(gate) * up``

    Args:
        gate: {docs.ROWS}.
        up: ``T[*m n]``.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed, or two different ones.
        ValueError: shapes that do not fit, a last dim that is not contiguous.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """,
)
