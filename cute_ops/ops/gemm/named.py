"""Products with the epilogues that models have most, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.case import Case
from cute_ops.ops.activation.maths import halves
from cute_ops.ops.gemm.fused import fused_linear

_F = TypeVar("_F", bound=Callable[..., Any])
ACTIVATIONS = OneOf("silu", "gelu", "gelu_tanh")
ODD = Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200})
UP = (
    ODD, Case("bert-base-up", {"m": (8, 128), "n": 3072, "k": 768}),
    Case("vit-base-up", {"m": (64, 197), "n": 3072, "k": 768}),
)  # fmt: skip
GPT2_UP = Case("gpt2-up", {"m": (2, 1024), "n": 3072, "k": 768}, attrs={"approximate": "tanh"})
DOWN = (
    ODD, Case("llama3-1b-out", {"m": (4, 4096), "n": 2048, "k": 2048}),
    Case("llama3-8b-down", {"m": (2, 4096), "n": 4096, "k": 14336}),
)  # fmt: skip
GATED = (
    ODD, Case("llama3-1b-gate-up", {"m": (4, 4096), "n": 8192, "k": 2048}),
    Case("llama3-8b-gate-up", {"m": (2, 4096), "n": 14336, "k": 4096}),
    Case("gemma-2b-gate-up", {"m": (4096,), "n": 16384, "k": 2048}, attrs={"activation": "gelu_tanh"}),
)  # fmt: skip


def _biased(acc: Any, bias: Any) -> Any:
    return acc if bias is None else acc + bias


def bias(xp: Any, acc: Any, bias: Any = None) -> Any:
    return _biased(acc, bias)


def bias_gelu(xp: Any, acc: Any, bias: Any = None) -> Any:
    return xp.gelu(_biased(acc, bias))


def bias_gelu_tanh(xp: Any, acc: Any, bias: Any = None) -> Any:
    return xp.gelu_tanh(_biased(acc, bias))


def bias_silu(xp: Any, acc: Any, bias: Any = None) -> Any:
    return xp.silu(_biased(acc, bias))


def bias_add(xp: Any, acc: Any, bias: Any, residual: Any) -> Any:
    return _biased(acc, bias) + residual


# What ``epilogue="gelu"`` stands for; the bias may be left out.
EPILOGUES: dict[str, Callable[..., Any]] = {
    "bias": bias, "gelu": bias_gelu, "gelu_tanh": bias_gelu_tanh, "silu": bias_silu, "add": bias_add,
}  # fmt: skip


def gelu_epilogue(approximate: str) -> str:
    """The epilogue of layers with GELU.

    Raises:
        ValueError: another approximation than ``"tanh"``, or ``"none"``.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"LinearGELU: approximate is {approximate!r}, expected 'none' or 'tanh'.")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


BIAS = "bias: ``[n]``; float32, bfloat16 or float16."


def _documented(
    what: str, formula: str, operands: str, source: str, *, weight: str = "``T[n k]``.", rounded: str = ""
) -> Callable[[_F], _F]:
    """Give an epilogue the docstring of its layer."""

    def give(epilogue: _F) -> _F:
        epilogue.__doc__ = f"""{what}

    ``out = {formula}``

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        weight: {weight}
        {operands}
        fused: as in :func:`linear`.

    Returns:
        ``T[*m n]``, compact. Summed up in float32, rounded once{rounded}.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together.

    Source: {source}
    """
        return epilogue

    return give


@_documented(
    "A linear layer and GELU.", "gelu(x @ weight.T + bias)",
    f"{BIAS}\n        approximate: ``\"none\"`` for the error function, ``\"tanh\"`` for the approximation by it.",
    "Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.",
)  # fmt: skip
def gelu(xp: Any, acc: Any, bias: Any, *, approximate: str) -> Any:
    return (xp.gelu_tanh if approximate == "tanh" else xp.gelu)(acc + bias)


@_documented(
    "A linear layer and SiLU.", "silu(x @ weight.T + bias)", BIAS,
    "Elfwing et al., Sigmoid-Weighted Linear Units, 2017.",
)  # fmt: skip
def silu(xp: Any, acc: Any, bias: Any) -> Any:
    return xp.silu(acc + bias)


@_documented(
    "A linear layer and the residual stream that its output is added to.", "x @ weight.T + residual",
    "residual: ``[*m n]``; float32, bfloat16 or float16.",
    "He et al., Deep Residual Learning for Image Recognition, 2015.",
)  # fmt: skip
def add(xp: Any, acc: Any, residual: Any) -> Any:
    return acc + residual


@_documented(
    "A linear layer of packed weights, gated: the first half of an MLP.",
    "activation(x @ gate.T) * (x @ up.T)`` with ``gate, up = weight[:n], weight[n:]",
    "activation: ``\"silu\"`` (SwiGLU), ``\"gelu\"`` (by the error function) or ``\"gelu_tanh\"`` (GeGLU).",
    "Shazeer, GLU Variants Improve Transformer, 2020.",
    weight="``T[2n k]``, ``[gate | up]``.", rounded=": neither half is stored",
)  # fmt: skip
def gated(xp: Any, acc: Any, *, activation: str) -> Any:
    gate, up = halves(acc)
    return getattr(xp, activation)(gate) * up


linear_gelu = fused_linear(
    gelu, name="linear_gelu", operands={"bias": "n"}, attrs={"approximate": OneOf("none", "tanh")},
    cases=(*UP, GPT2_UP),
)  # fmt: skip
linear_silu = fused_linear(silu, name="linear_silu", operands={"bias": "n"}, cases=UP)
linear_add = fused_linear(add, name="linear_add", operands={"residual": "*m n"}, cases=DOWN)
gated_linear = fused_linear(gated, name="gated_linear", weight="2n k", attrs={"activation": ACTIVATIONS}, cases=GATED)
