"""Layer norm: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.norm.declare import declare
from cute_ops.ops.norm.rmsnorm import sum_rows

CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("minilm", {"m": (8, 31), "n": 384}, attrs={"eps": 1e-12}),
    Case("gpt2", {"m": (2, 33), "n": 768}),
    Case("bert-large", {"m": (65,), "n": 1024}, {"W": "float32", "B": "float32"}),
    Case("whisper-large", {"m": (2, 75), "n": 1280}),
    Case("no-bias", {"m": (37,), "n": 4097}, absent=("bias",)),
    Case("no-weight", {"m": (300,), "n": 4096}, absent=("weight", "bias")),
    Case("gpt2-vocabulary", {"m": (5,), "n": 50257}, {"W": "float32", "B": "float32"}),
    Case("many-odd", {"m": (600,), "n": 4097}),
    Case("longest", {"m": (3,), "n": 262144}, absent=("bias",)),
)


def normalise(xp: Any, x: Any, eps: float) -> tuple[Any, Any]:
    """Normalised x, and one over its deviation."""
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    rstd = 1 / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred * rstd, rstd


def reference(xp: Any, x: Any, weight: Any = None, bias: Any = None, *, eps: float) -> Any:
    wide, w, b = widen(xp, x, weight, bias)
    out, _ = normalise(xp, wide, eps)
    if w is not None:
        out = out * w
    if b is not None:
        out = out + b
    return xp.astype(out, x.dtype)


def reference_bwd(
    xp: Any, x: Any, dout: Any, weight: Any = None, bias: Any = None, *, eps: float
) -> tuple[Any, Any, Any]:
    wide, w, dy = widen(xp, x, weight, dout)
    normed, rstd = normalise(xp, wide, eps)
    g = dy if w is None else dy * w
    g = g - xp.mean(g, axis=-1, keepdims=True)
    dx = rstd * (g - normed * xp.mean(normed * g, axis=-1, keepdims=True))
    return xp.astype(dx, x.dtype), sum_rows(xp, dy * normed, weight), sum_rows(xp, dy, bias)


layernorm = declare(
    "layernorm",
    "LayerNorm",
    centred=True,
    attrs={"eps": 1e-5},
    check=within(eps=NOT_NEGATIVE),
    reference=reference,
    reference_bwd=reference_bwd,
    cases=CASES,
    doc=f"""Layer normalisation of the last dim.

    ``out = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias``, ``var`` divided by n

    Args:
        {docs.X}
        weight: ``W[n]``, a float dtype of its own; ones where None.
        {docs.BIAS}
        eps: added to the variance; a compile-time constant.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once; deterministic. The variance is that of the
        deviations from the mean, so a mean that is large beside them costs no accuracy.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """,
    doc_bwd="""Gradients of :func:`layernorm`.

    With ``r = rsqrt(var(x) + eps)``, ``y = (x - mean(x)) * r`` and ``g = dout * weight``:
    ``dx = r * (g - mean(g) - y * mean(g * y))``, ``dweight = sum_rows(dout * y)``, ``dbias = sum_rows(dout)``.
    Mean and ``r`` are recomputed from x. Sums are in float32, in a fixed order: results are deterministic.
    """,
)
