"""SiLU-gated product, the pointwise half of SwiGLU: expression, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.expression.fused import fused

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 4096}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("llama3-8b", {"m": (2, 33), "n": 14336}),
    Case("qwen3-moe-expert", {"m": (129,), "n": 768}),
    Case("longest", {"m": (3,), "n": 262144}),
)


def gated(xp: Any, gate: Any, up: Any) -> Any:
    return xp.silu(gate) * up


silu_mul = fused(
    gated,
    name="silu_mul",
    operands={"gate": "*m n", "up": "*m n"},
    cases=CASES,
    grad_doc="""Gradients of :func:`silu_mul`.

    With ``s = sigmoid(gate)``: ``dgate = dout * up * s * (1 + gate * (1 - s))``, ``dup = dout * gate * s``.
    """,
    doc=docs.elementwise(
        "SiLU of the gate times up: the pointwise half of SwiGLU.",
        "gate * sigmoid(gate) * up",
        docs.PAIR,
        docs.GLU,
        other_dtypes=", or two different ones",
        wrong="shapes that do not fit, a last dim that is not contiguous",
    ),
)
