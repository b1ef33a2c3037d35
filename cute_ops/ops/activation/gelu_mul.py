"""GELU-gated product, the pointwise half of GEGLU: expression, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.activation.maths import APPROXIMATE, gelu
from cute_ops.ops.expression.fused import fused

CASES = (
    Case("one-row", {"m": (), "n": 2304}),
    Case("odd", {"m": (37,), "n": 4097}, attrs={"approximate": "none"}),
    Case("gemma2-2b", {"m": (2, 33), "n": 9216}),
    Case("t5-v1.1-base", {"m": (129,), "n": 2048}, attrs={"approximate": "none"}),
)


def gated(xp: Any, gate: Any, up: Any, *, approximate: str) -> Any:
    return gelu(xp, gate, approximate) * up


gelu_mul = fused(
    gated,
    name="gelu_mul",
    operands={"gate": "*m n", "up": "*m n"},
    attrs=APPROXIMATE,
    cases=CASES,
    grad_doc="Gradients of :func:`gelu_mul`: ``dgate = dout * up * gelu'(gate)``, ``dup = dout * gelu(gate)``.",
    doc=docs.elementwise(
        "GELU of the gate times up: the pointwise half of GEGLU.",
        "gelu(gate) * up",
        f"{docs.PAIR}\n        {docs.APPROXIMATE}",
        docs.GLU,
        other_dtypes=", or two different ones",
        wrong="shapes that do not fit, a last dim that is not contiguous, another ``approximate``",
    ),
)
