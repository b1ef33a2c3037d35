"""SiLU, GELU and squared ReLU alone: expressions, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.activation import maths
from cute_ops.ops.expression.fused import fused

X = {"x": "*m n"}
GPT2 = Case("gpt2", {"m": (2, 33), "n": 3072})
CASES = (Case("odd", {"m": (37,), "n": 4097}), GPT2, Case("longest", {"m": (3,), "n": 262144}))
GELU_CASES = (*CASES, Case("bert-large", {"m": (67,), "n": 4096}, attrs={"approximate": "none"}))


def _silu(xp: Any, x: Any) -> Any:
    return xp.silu(x)


def _gelu(xp: Any, x: Any, *, approximate: str) -> Any:
    return maths.gelu(xp, x, approximate)


def _relu2(xp: Any, x: Any) -> Any:
    return xp.relu(x) ** 2


silu = fused(
    _silu, name="silu", operands=X, cases=CASES,
    doc=docs.elementwise(
        "Sigmoid linear unit, also called swish.", "x * sigmoid(x)", docs.X,
        "Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, 2017.",
    ),
    grad_doc="Gradient of :func:`silu`: ``dx = dout * (s + x * s * (1 - s))`` with ``s = sigmoid(x)``.",
)  # fmt: skip

gelu = fused(
    _gelu, name="gelu", operands=X, attrs=maths.APPROXIMATE, cases=GELU_CASES,
    doc=docs.elementwise(
        "Gaussian error linear unit.",
        "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2``, or ``x * (1 + erf(x / sqrt(2))) / 2",
        f"{docs.X}\n        approximate: ``tanh`` for the first formula, ``none`` for the second.",
        "Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.",
        wrong="a last dim that is not contiguous, another ``approximate``",
    ),
    grad_doc="Gradient of :func:`gelu`: ``dx = dout * gelu'(x)``.",
)  # fmt: skip

relu2 = fused(
    _relu2, name="relu2", operands=X, cases=CASES,
    doc=docs.elementwise(
        "Squared rectified linear unit.", "max(x, 0)^2", docs.X,
        "So et al., Primer: Searching for Efficient Transformers, 2021.",
    ),
    grad_doc="Gradient of :func:`relu2`: ``dx = dout * 2 * max(x, 0)``.",
)  # fmt: skip
