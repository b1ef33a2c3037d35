"""What reference implementations share."""

from __future__ import annotations

import math
import sys
from typing import Any


def widen(xp: Any, *arrays: Any) -> tuple[Any, ...]:
    """The arrays in the accumulation dtype: float64 stays, everything else becomes float32; None stays."""
    return tuple(None if a is None else a if a.dtype == xp.float64 else xp.astype(a, xp.float32) for a in arrays)


def columns(xp: Any, x: Any) -> Any:
    """``0 ... n - 1`` for the last dim of ``x``, where ``x`` is."""
    return xp.arange(x.shape[-1], **beside(xp, x))


def numbers(xp: Any, count: Any, x: Any) -> Any:
    """``0 ... count - 1`` in the dtype of ``x``, where ``x`` is."""
    return xp.arange(count, dtype=x.dtype, **beside(xp, x))


def beside(xp: Any, x: Any) -> dict[str, Any]:
    """Where a new array is made, so that it is where ``x`` is: torch alone must be told."""
    return {"device": x.device} if "torch" in xp.__name__ else {}


def sigmoid(xp: Any, x: Any) -> Any:
    """Both branches of the logistic function, so that neither exponential overflows."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))


def erfc(xp: Any, x: Any) -> Any:
    """One less the error function, which the array API lacks: the framework's own, or Python's on NumPy arrays."""
    if hasattr(xp, "erfc"):
        return xp.erfc(x)
    # jax.numpy has none, jax.lax has. The caller, who passes the namespace, has imported it.
    lax = getattr(sys.modules[xp.__name__.partition(".")[0]], "lax", None)
    if lax is not None:
        return lax.erfc(x)
    return xp.reshape(xp.asarray([math.erfc(v) for v in xp.reshape(x, (-1,)).tolist()], dtype=x.dtype), x.shape)


def cast(xp: Any, x: Any, dtype: str, like: Any) -> Any:
    """``x`` in the dtype of this name, of NumPy's or ml_dtypes'; float64 where ``like`` is, for exact values."""
    if like.dtype == xp.float64:
        return x
    if hasattr(xp, dtype):
        return xp.astype(x, getattr(xp, dtype))
    import ml_dtypes  # start-up time: few programs have such dtypes

    return xp.astype(x, getattr(ml_dtypes, dtype))
