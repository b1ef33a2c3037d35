"""SwiGLU and GEGLU of packed halves, as a fused gate-up projection leaves them: expressions, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.activation.maths import APPROXIMATE, gelu, halves
from cute_ops.ops.expression.fused import fused, fused_again

X = {"x": "*m 2n"}
SWIGLU_CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("phi3-mini", {"m": (2, 33), "n": 8192}),
    Case("qwen3-moe-expert", {"m": (129,), "n": 768}),
)
GEGLU_CASES = (
    Case("odd", {"m": (3, 5), "n": 999}),
    Case("gemma3-4b", {"m": (67,), "n": 10240}),
    Case("modernbert-base", {"m": (129,), "n": 1152}, attrs={"approximate": "none"}),
)
PACKED = "x: ``T[*m 2n]``, gate then up; float32, float16 or bfloat16; any leading shape, any row stride."
HALVES = "gate, up = x[..., :n], x[..., n:]"
ODD = "a last dim that is odd or not contiguous"


def _swiglu(xp: Any, x: Any) -> Any:
    gate, up = halves(x)
    return xp.silu(gate) * up


def _geglu(xp: Any, x: Any, *, approximate: str) -> Any:
    gate, up = halves(x)
    return gelu(xp, gate, approximate) * up


swiglu = fused(
    _swiglu, name="swiglu", operands=X, cases=SWIGLU_CASES,
    grad_doc="Gradient of :func:`swiglu`: those of gate and up side by side, as in x.",
    doc=docs.elementwise(
        "SiLU of the first half of each row times the second.", f"gate * sigmoid(gate) * up`` with ``{HALVES}", PACKED,
        docs.GLU, wrong=ODD,
    ),
)  # fmt: skip

geglu = fused(
    _geglu, name="geglu", operands=X, attrs=APPROXIMATE, cases=GEGLU_CASES,
    grad_doc="Gradient of :func:`geglu`: those of gate and up side by side, as in x.",
    doc=docs.elementwise(
        "GELU of the first half of each row times the second.", f"gelu(gate) * up`` with ``{HALVES}",
        f"{PACKED}\n        {docs.APPROXIMATE}", docs.GLU, wrong=f"{ODD}, another ``approximate``",
    ),
)  # fmt: skip

swiglu_again = fused_again(
    _swiglu,
    name="swiglu_again",
    operands=X,
    cases=SWIGLU_CASES,
    doc=f"""Gradient of :func:`swiglu`, and its output again.

    ``dx`` as :func:`swiglu_bwd`, ``out = gate * sigmoid(gate) * up`` with ``{HALVES}``

    For a backward that needs the output, as that of the linear layer behind it does: the forward then need not keep it.
    The bits are those of the two ops.

    Args:
        {PACKED}
        dout: ``T[*m n]``, the cotangent of the output.

    Returns:
        ``(dx, out)``: ``T[*m 2n]`` and ``T[*m n]``, compact. Computed in float32, rounded once. Not differentiable.

    Raises:
        TypeError: a dtype that is not listed, or two different ones.
        ValueError: shapes that do not fit, a last dim that is odd or not contiguous.

    Source: {docs.GLU}
    """,
)
