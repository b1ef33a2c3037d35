"""SiLU, GELU and squared ReLU alone: declarations, reference maths, cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, OneOf, Op, Sharding, Tensor
from cute_ops.ops.activation import maths
from cute_ops.ops.activation.config import SPACE, pointwise
from cute_ops.shapes import FLOATS

GPT2 = Case("gpt2", {"m": (2, 33), "n": 3072})
CASES = (Case("odd", {"m": (37,), "n": 4097}), GPT2, Case("longest", {"m": (3,), "n": 262144}))
GELU_CASES = (*CASES, Case("bert-large", {"m": (67,), "n": 4096}, attrs={"approximate": "none"}))

_DOC = """{what}

    ``out = {formula}``

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride.{attributes}

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is not contiguous{errors}.

    Source: {source}
    """


def _declare(
    name: str, activation: Callable[..., Any], attrs: dict[str, Any], cases: tuple[Case, ...], doc: str, derivative: str
) -> Op:
    """An activation and its gradient."""

    def reference(xp: Any, x: Any, **attrs: Any) -> Any:
        (wide,) = widen(xp, x)
        return xp.astype(activation(xp, wide, **attrs)[0], x.dtype)

    def reference_bwd(xp: Any, x: Any, dout: Any, **attrs: Any) -> tuple[Any]:
        wide, dy = widen(xp, x, dout)
        return (xp.astype(dy * activation(xp, wide, **attrs)[1], x.dtype),)

    kernel = f"cute_ops.kernels.activation.unary:{name.capitalize()}"
    rows = Tensor("*m n", "T")
    common: dict[str, Any] = {
        "dtypes": {"T": FLOATS}, "sharding": Sharding(parallel=("n",)), "attrs": attrs,
        "tuning": Tuning(pointwise, space=SPACE), "cases": cases,
    }  # fmt: skip
    backward = Op(
        f"{name}_bwd", inputs={"x": rows, "dout": rows}, outputs={"dx": rows}, reference=reference_bwd,
        kernel=f"{kernel}Backward", doc=f"Gradient of :func:`{name}`: ``dx = dout * {derivative}``.", **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": rows}, outputs={"out": rows}, reference=reference, kernel=kernel, grad=backward, doc=doc,
        **common,
    )  # fmt: skip


silu = _declare(
    "silu", maths.silu, {}, CASES,
    _DOC.format(
        what="Sigmoid linear unit, also called swish.", formula="x * sigmoid(x)", attributes="", errors="",
        source="Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, 2017.",
    ),
    "(s + x * s * (1 - s))`` with ``s = sigmoid(x)",
)  # fmt: skip

gelu = _declare(
    "gelu", maths.gelu, {"approximate": OneOf("tanh", "none")}, GELU_CASES,
    _DOC.format(
        what="Gaussian error linear unit.",
        formula="x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2``, or ``x * (1 + erf(x / sqrt(2))) / 2",
        attributes="\n        approximate: ``tanh`` for the first formula, ``none`` for the second.",
        errors=", another ``approximate``", source="Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.",
    ),
    "gelu'(x)",
)  # fmt: skip

relu2 = _declare(
    "relu2", maths.relu2, {}, CASES,
    _DOC.format(
        what="Squared rectified linear unit.", formula="max(x, 0)^2", attributes="", errors="",
        source="So et al., Primer: Searching for Efficient Transformers, 2021.",
    ),
    "2 * max(x, 0)",
)  # fmt: skip
