"""RMSNorm: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.checks import FINITE, NOT_NEGATIVE, within
from cute_ops.ops.norm.declare import declare

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 4096}, {"W": "float32"}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("qk-norm", {"m": (2, 33, 8), "n": 128}, absent=("bias",)),
    Case("minilm", {"m": (8, 31), "n": 384}),
    Case("gemma2-2b", {"m": (2, 17), "n": 2304}, absent=("bias",), attrs={"weight_offset": 1.0}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}, {"W": "float32"}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("llama3-405b", {"m": (19,), "n": 16384}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("no-weight", {"m": (65,), "n": 1024}, absent=("weight", "bias")),
    Case("bias-only", {"m": (65,), "n": 1000}, absent=("weight",)),
    Case("gpt2-vocabulary", {"m": (5,), "n": 50257}, absent=("bias",)),
    Case("longest", {"m": (3,), "n": 262144}, absent=("bias",)),
)
CHECK = within(eps=NOT_NEGATIVE, weight_offset=FINITE)


def reference(xp: Any, x: Any, weight: Any = None, bias: Any = None, *, eps: float, weight_offset: float) -> Any:
    wide, w, b = widen(xp, x, weight, bias)
    out = wide / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if w is not None:
        out = out * (w + weight_offset)
    if b is not None:
        out = out + b
    return xp.astype(out, x.dtype)


def backward_terms(xp: Any, x: Any, w: Any, dout: Any, eps: float, weight_offset: float) -> tuple[Any, Any]:
    """Gradient of the normalised rows to x, and x normalised; all in the accumulation dtype."""
    rstd = 1 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)
    normed = x * rstd
    dnormed = dout if w is None else dout * (w + weight_offset)
    return rstd * (dnormed - normed * xp.mean(normed * dnormed, axis=-1, keepdims=True)), normed


def sum_rows(xp: Any, a: Any, like: Any) -> Any:
    """Sum over all leading dims, in ``like``'s dtype; None where ``like`` is absent."""
    return None if like is None else xp.astype(xp.sum(a, axis=tuple(range(a.ndim - 1))), like.dtype)


def reference_bwd(
    xp: Any, x: Any, dout: Any, weight: Any = None, bias: Any = None, *, eps: float, weight_offset: float
) -> tuple[Any, Any, Any]:
    wide, w, dy = widen(xp, x, weight, dout)
    dx, normed = backward_terms(xp, wide, w, dy, eps, weight_offset)
    return xp.astype(dx, x.dtype), sum_rows(xp, dy * normed, weight), sum_rows(xp, dy, bias)


rmsnorm = declare(
    "rmsnorm",
    "RMSNorm",
    attrs={"eps": 1e-6, "weight_offset": 0.0},
    check=CHECK,
    reference=reference,
    reference_bwd=reference_bwd,
    cases=CASES,
    doc=f"""Root mean square normalisation of the last dim.

    ``out = x * rsqrt(mean(x^2) + eps) * (weight_offset + weight) + bias``

    Args:
        {docs.X}
        {docs.RMS}

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """,
    doc_bwd="""Gradients of :func:`rmsnorm`.

    With ``r = rsqrt(mean(x^2) + eps)``, ``y = x * r`` and ``g = dout * (weight_offset + weight)``:
    ``dx = r * (g - y * mean(g * y))``, ``dweight = sum_rows(dout * y)``, ``dbias = sum_rows(dout)``.
    ``r`` is recomputed from x. Sums are in float32, in a fixed order: results are deterministic.
    """,
)
