"""SwiGLU and GEGLU of packed halves, as a fused gate-up projection leaves them: declarations, maths, cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def _gated(activation: Callable[..., Any], xp: Any, x: Any, **attrs: Any) -> Any:
    gate, up = _halves(widen(xp, x)[0])
    return xp.astype(activation(xp, gate, **attrs)[0] * up, x.dtype)


def _gated_bwd(activation: Callable[..., Any], xp: Any, x: Any, dout: Any, **attrs: Any) -> tuple[Any]:
    wide, dy = widen(xp, x, dout)
    gate, up = _halves(wide)
    y, slope = activation(xp, gate, **attrs)
    return (xp.astype(xp.concat([dy * up * slope, dy * y], axis=-1), x.dtype),)


def _swiglu_again(xp: Any, x: Any, dout: Any) -> tuple[Any, Any]:
    return *_gated_bwd(silu, xp, x, dout), _gated(silu, xp, x)


def _declare(
    name: str, activation: Callable[..., Any], attrs: dict[str, Any], cases: tuple[Case, ...], kernel: str, doc: str
) -> Op:  # fmt: skip
    """An activation of gate, times up, and its gradient."""
    kernel = f"cute_ops.kernels.activation.glu:{kernel}"
    common = {**COMMON, "attrs": attrs, "cases": cases}
    backward = Op(
        f"{name}_bwd", inputs={"x": X, "dout": OUT}, outputs={"dx": X}, reference=partial(_gated_bwd, activation),
        kernel=f"{kernel}Backward", doc=f"Gradient of :func:`{name}`: those of gate and up side by side, as in x.",
        **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": X}, outputs={"out": OUT}, reference=partial(_gated, activation), kernel=kernel,
        grad=backward, doc=doc, **common,
    )  # fmt: skip


swiglu = _declare(
    "swiglu", silu, {}, SWIGLU_CASES, "SwiGLU",
    _DOC.format(
        what="SiLU of the first half of each row times the second.", formula="gate * sigmoid(gate) * up",
        attributes="", errors="",
    ),
)  # fmt: skip

geglu = _declare(
    "geglu", gelu, {"approximate": OneOf("tanh", "none")}, GEGLU_CASES, "GEGLU",
    _DOC.format(
        what="GELU of the first half of each row times the second.", formula="gelu(gate) * up",
        attributes="\n        approximate: ``tanh``, or ``none`` for the error function, as :func:`gelu`.",
        errors=", another ``approximate``",
    ),
)  # fmt: skip

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
