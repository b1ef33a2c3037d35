"""Softmax and its logarithm over the last dim: declarations, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops import docs
from cute_ops.ops.reduction.config import REDUCE, reduced_pairs
from cute_ops.ops.reduction.config import softmax as config

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("mixtral-experts", {"m": (2, 67), "n": 8}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("attention-4k", {"m": (2, 3, 5), "n": 4096}),
    Case("gpt2", {"m": (5,), "n": 50257}),
    Case("longest", {"m": (3,), "n": 262144}),
)
ROWS = Tensor("*m n", "T")


def _terms(xp: Any, x: Any) -> tuple[Any, Any]:
    """X less the maximum of its row, and the sum of the exponentials of that."""
    if isinstance(x.shape[-1], int) and x.shape[-1] == 0:  # nothing has no maximum
        return x, xp.sum(x, axis=-1, keepdims=True)
    m = xp.max(x, axis=-1, keepdims=True)
    shifted = x - xp.where(m > -xp.inf, m, xp.zeros_like(m))
    return shifted, xp.sum(xp.exp(shifted), axis=-1, keepdims=True)


def reference(xp: Any, x: Any) -> Any:
    shifted, total = _terms(xp, *widen(xp, x))
    return xp.astype(xp.exp(shifted) / total, x.dtype)


def reference_log(xp: Any, x: Any) -> Any:
    shifted, total = _terms(xp, *widen(xp, x))
    return xp.astype(shifted - xp.log(total), x.dtype)


def reference_bwd(xp: Any, out: Any, dout: Any) -> Any:
    y, dy = widen(xp, out, dout)
    return xp.astype(y * (dy - xp.sum(y * dy, axis=-1, keepdims=True)), out.dtype)


def reference_log_bwd(xp: Any, out: Any, dout: Any) -> Any:
    y, dy = widen(xp, out, dout)
    return xp.astype(dy - xp.exp(y) * xp.sum(dy, axis=-1, keepdims=True), out.dtype)


_DOC = """{what} over the last dim.

    ``out = {formula}``

    Args:
        {x}, any n.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once; deterministic. As torch's: -inf {special},
        a row of nothing but -inf, or with a NaN or +inf, is NaN.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is not contiguous.

    Source: online maximum and sum: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """


def _declare(name: str, kernel: str, references: tuple[Any, Any], formula_bwd: str, out: Tensor, **texts: str) -> Op:
    """A function of the exponentials of a row, and its gradient from its output."""
    where = f"cute_ops.kernels.reduction.softmax:{kernel}"
    common: dict[str, Any] = {"dtypes": {"T": FLOATS}, "cases": CASES}

    def saved_by_the_forward(xp: Any, arrays: dict[str, Any]) -> None:
        arrays["out"][...] = references[0](xp, arrays["out"].astype(xp.float64))

    backward = Op(
        f"{name}_bwd", inputs={"out": out, "dout": ROWS}, outputs={"dx": ROWS}, reference=references[1],
        kernel=f"{where}Backward", tuning=Tuning(reduced_pairs, space=REDUCE), arrange=saved_by_the_forward,
        doc=f"""Gradient of :func:`{name}`, from its output.

    ``dx = {formula_bwd}``
    """, **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": ROWS}, outputs={"out": ROWS}, reference=references[0], kernel=where,
        tuning=Tuning(config, space=REDUCE), grad=backward, doc=_DOC.format(x=f"x: {docs.ROWS}", **texts),
        **common,
    )  # fmt: skip


softmax = _declare(
    "softmax", "Softmax", (reference, reference_bwd), "out * (dout - sum(out * dout))", ROWS,
    what="Softmax", formula="exp(x - max(x)) / sum(exp(x - max(x)))", special="has probability 0",
)  # fmt: skip
log_softmax = _declare(
    "log_softmax", "LogSoftmax", (reference_log, reference_log_bwd), "dout - exp(out) * sum(dout)",
    ROWS._replace(at_most=0.0),
    what="Logarithm of the softmax", formula="x - max(x) - log(sum(exp(x - max(x))))", special="stays",
)  # fmt: skip
