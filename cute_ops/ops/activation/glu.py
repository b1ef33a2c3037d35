"""SwiGLU and GEGLU of packed halves, as a fused gate-up projection leaves them: declarations, maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, OneOf, Op, Tensor
from cute_ops.ops.activation.config import SPACE, packed
from cute_ops.ops.activation.maths import gelu, silu
from cute_ops.shapes import FLOATS

X, OUT = Tensor("*m 2n", "T"), Tensor("*m n", "T")
COMMON: dict[str, Any] = {"dtypes": {"T": FLOATS}, "tuning": Tuning(packed, space=SPACE)}
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
_DOC = """{what}

    ``out = {formula}`` with ``gate, up = x[..., :n], x[..., n:]``

    Args:
        x: ``T[*m 2n]``, gate then up; float32, float16 or bfloat16; any leading shape, any row stride.{attributes}

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is odd or not contiguous{errors}.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """


def _halves(x: Any) -> tuple[Any, Any]:
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


def _swiglu(xp: Any, x: Any) -> Any:
    gate, up = _halves(widen(xp, x)[0])
    return xp.astype(silu(xp, gate)[0] * up, x.dtype)


def _swiglu_bwd(xp: Any, x: Any, dout: Any) -> tuple[Any]:
    wide, dy = widen(xp, x, dout)
    gate, up = _halves(wide)
    y, slope = silu(xp, gate)
    return (xp.astype(xp.concat([dy * up * slope, dy * y], axis=-1), x.dtype),)


def _swiglu_again(xp: Any, x: Any, dout: Any) -> tuple[Any, Any]:
    return *_swiglu_bwd(xp, x, dout), _swiglu(xp, x)


def _geglu(xp: Any, x: Any, *, approximate: str) -> Any:
    gate, up = _halves(widen(xp, x)[0])
    return xp.astype(gelu(xp, gate, approximate)[0] * up, x.dtype)


def _geglu_bwd(xp: Any, x: Any, dout: Any, *, approximate: str) -> tuple[Any]:
    wide, dy = widen(xp, x, dout)
    gate, up = _halves(wide)
    y, slope = gelu(xp, gate, approximate)
    return (xp.astype(xp.concat([dy * up * slope, dy * y], axis=-1), x.dtype),)


swiglu = Op(
    "swiglu",
    inputs={"x": X},
    outputs={"out": OUT},
    **COMMON,
    reference=_swiglu,
    kernel="cute_ops.kernels.activation.glu:SwiGLU",
    grad=Op(
        "swiglu_bwd",
        inputs={"x": X, "dout": OUT},
        outputs={"dx": X},
        **COMMON,
        reference=_swiglu_bwd,
        kernel="cute_ops.kernels.activation.glu:SwiGLUBackward",
        cases=SWIGLU_CASES,
        doc="Gradient of :func:`swiglu`: those of gate and up side by side, as in x.",
    ),
    cases=SWIGLU_CASES,
    doc=_DOC.format(
        what="SiLU of the first half of each row times the second.",
        formula="gate * sigmoid(gate) * up",
        attributes="",
        errors="",
    ),
)

geglu = Op(
    "geglu",
    inputs={"x": X},
    outputs={"out": OUT},
    **COMMON,
    attrs={"approximate": OneOf("tanh", "none")},
    reference=_geglu,
    kernel="cute_ops.kernels.activation.glu:GEGLU",
    grad=Op(
        "geglu_bwd",
        inputs={"x": X, "dout": OUT},
        outputs={"dx": X},
        **COMMON,
        attrs={"approximate": OneOf("tanh", "none")},
        reference=_geglu_bwd,
        kernel="cute_ops.kernels.activation.glu:GEGLUBackward",
        cases=GEGLU_CASES,
        doc="Gradient of :func:`geglu`: those of gate and up side by side, as in x.",
    ),
    cases=GEGLU_CASES,
    doc=_DOC.format(
        what="GELU of the first half of each row times the second.",
        formula="gelu(gate) * up",
        attributes="\n        approximate: ``tanh``, or ``none`` for the error function, as :func:`gelu`.",
        errors=", another ``approximate``",
    ),
)

swiglu_again = Op(
    "swiglu_again",
    inputs={"x": X, "dout": OUT},
    outputs={"dx": X, "out": OUT},
    **COMMON,
    reference=_swiglu_again,
    kernel="cute_ops.kernels.activation.glu:SwiGLUAgain",
    cases=SWIGLU_CASES,
    doc="""Gradient of :func:`swiglu`, and its output again.

    ``dx`` as :func:`swiglu_bwd`, ``out = gate * sigmoid(gate) * up`` with ``gate, up = x[..., :n], x[..., n:]``

    For a backward that needs the output, as that of the linear layer behind it does: the forward then need not keep it.
    The bits are those of the two ops.

    Args:
        x: ``T[*m 2n]``, gate then up; float32, float16 or bfloat16; any leading shape, any row stride.
        dout: ``T[*m n]``, the cotangent of the output.

    Returns:
        ``(dx, out)``: ``T[*m 2n]`` and ``T[*m n]``, compact. Computed in float32, rounded once. Not differentiable.

    Raises:
        TypeError: a dtype that is not listed, or two different ones.
        ValueError: shapes that do not fit, a last dim that is odd or not contiguous.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """,
)
