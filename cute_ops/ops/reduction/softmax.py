"""Softmax and its logarithm over the last dim: declarations, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, Op, Tensor
from cute_ops.ops.reduction.config import REDUCE, normalised, reduced_pairs
from cute_ops.shapes import FLOATS

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("mixtral-experts", {"m": (2, 67), "n": 8}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("attention-4k", {"m": (2, 3, 5), "n": 4096}),
    Case("gpt2", {"m": (5,), "n": 50257}),
    Case("longest", {"m": (3,), "n": 262144}),
)
DTYPES = {"T": FLOATS}
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


softmax_bwd = Op(
    "softmax_bwd",
    inputs={"out": ROWS, "dout": ROWS},
    outputs={"dx": ROWS},
    dtypes=DTYPES,
    reference=reference_bwd,
    kernel="cute_ops.kernels.reduction.softmax:SoftmaxBackward",
    tuning=Tuning(reduced_pairs, space=REDUCE),
    cases=CASES,
    doc="""Gradient of :func:`softmax`, from its output.

    ``dx = out * (dout - sum(out * dout))``
    """,
)

log_softmax_bwd = Op(
    "log_softmax_bwd",
    inputs={"out": ROWS._replace(at_most=0.0), "dout": ROWS},
    outputs={"dx": ROWS},
    dtypes=DTYPES,
    reference=reference_log_bwd,
    kernel="cute_ops.kernels.reduction.softmax:LogSoftmaxBackward",
    tuning=Tuning(reduced_pairs, space=REDUCE),
    cases=CASES,
    doc="""Gradient of :func:`log_softmax`, from its output.

    ``dx = dout - exp(out) * sum(dout)``
    """,
)

softmax = Op(
    "softmax",
    inputs={"x": ROWS},
    outputs={"out": ROWS},
    dtypes=DTYPES,
    reference=reference,
    kernel="cute_ops.kernels.reduction.softmax:Softmax",
    tuning=Tuning(normalised, space=REDUCE),
    grad=softmax_bwd,
    cases=CASES,
    doc="""Softmax over the last dim.

    ``out = exp(x - max(x)) / sum(exp(x - max(x)))``

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride, any n.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once; deterministic. As torch's: -inf has probability 0, a
        row of nothing but -inf, or with a NaN or +inf, is NaN.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is not contiguous.

    Source: online maximum and sum: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """,
)

log_softmax = Op(
    "log_softmax",
    inputs={"x": ROWS},
    outputs={"out": ROWS},
    dtypes=DTYPES,
    reference=reference_log,
    kernel="cute_ops.kernels.reduction.softmax:LogSoftmax",
    tuning=Tuning(normalised, space=REDUCE),
    grad=log_softmax_bwd,
    cases=CASES,
    doc="""Logarithm of the softmax over the last dim.

    ``out = x - max(x) - log(sum(exp(x - max(x))))``

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride, any n.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once; deterministic. As torch's: -inf stays, a row of nothing
        but -inf, or with a NaN or +inf, is NaN.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is not contiguous.

    Source: online maximum and sum: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """,
)
