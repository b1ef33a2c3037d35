"""Functions that reference implementations share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any


def widen(xp: Any, *arrays: Any) -> tuple[Any, ...]:
    """The arrays in the dtype of sums: float64 stays, all others become float32; None stays None."""
    return tuple(None if a is None else a if a.dtype == xp.float64 else xp.astype(a, xp.float32) for a in arrays)


def columns(xp: Any, x: Any) -> Any:
    """``0 ... n - 1`` for the last dim of ``x``, on its device."""
    return xp.arange(x.shape[-1], **beside(xp, x))


def numbers(xp: Any, count: Any, x: Any) -> Any:
    """``0 ... count - 1`` in the dtype of ``x``, on its device."""
    return xp.arange(count, dtype=x.dtype, **beside(xp, x))


def beside(xp: Any, x: Any) -> dict[str, Any]:
    """The argument that puts a new array on the device of ``x``, which only torch needs."""
    return {"device": x.device} if "torch" in xp.__name__ else {}


def sigmoid(xp: Any, x: Any) -> Any:
    """The logistic function, by two formulas, so that neither exponential overflows."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))


def doubling(xp: Any, limit: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """``state = body(step, state)`` for the steps 1, 2, 4, ... below a limit, which may be symbolic in JAX."""
    if "jax" not in xp.__name__:
        step = 1
        while step < limit:
            state, step = body(step, state), 2 * step
        return state
    # A loop of the program: unrolled, XLA's fusions would compute what two steps read twice, and that again.
    lax = sys.modules["jax"].lax
    return lax.while_loop(lambda s: s[0] < limit, lambda s: (2 * s[0], body(*s)), (xp.int32(1), state))[1]


def count_up_to(xp: Any, ordered: Any, values: Any) -> Any:
    """How many of some ascending integers are at most each value; how many there are may be symbolic in JAX."""
    count = ordered.shape[0]
    if isinstance(count, int) or "jax" not in xp.__name__:
        return xp.searchsorted(ordered, values, side="right")

    def halve(step: Any, between: Any) -> Any:
        low, high = between
        middle = (low + high) // 2
        up = (low < high) & (xp.take(ordered, middle, axis=0, mode="clip") <= values)
        return xp.where(up, middle + 1, low), xp.where(up, high, middle)

    low = xp.zeros_like(values)
    return doubling(xp, count + 1, halve, (low, low + count))[0]


def constant(xp: Any, x: Any) -> Any:
    """``x`` without a gradient."""
    if "torch" in xp.__name__:
        return x.detach()
    return sys.modules["jax"].lax.stop_gradient(x) if "jax" in xp.__name__ else x


def divide(xp: Any, x: Any, by: Any) -> Any:
    """``x / by``, rounded once, for a number or an array that broadcasts. XLA multiplies by the reciprocal of such a
    divisor, which is one unit in the last place off in half of all cases; not by that of one that depends on ``x``.
    """
    return x / xp.where(x == x, xp.zeros_like(x) + by, xp.ones_like(x))  # where x is NaN, so is any quotient


def erf(xp: Any, x: Any, name: str = "erf") -> Any:
    """The error function, which the array API lacks: the framework's own, or Python's for NumPy arrays."""
    # jax.lax has it, jax.numpy has not. The caller has imported jax, since it passes the namespace.
    home = xp if hasattr(xp, name) else getattr(sys.modules[xp.__name__.partition(".")[0]], "lax", None)
    if home is not None:
        return getattr(home, name)(x)
    values = [getattr(math, name)(v) for v in xp.reshape(x, (-1,)).tolist()]
    return xp.reshape(xp.asarray(values, dtype=x.dtype), x.shape)


def erfc(xp: Any, x: Any) -> Any:
    """One minus the error function."""
    return erf(xp, x, "erfc")


def cast(xp: Any, x: Any, dtype: str, like: Any) -> Any:
    """``x`` in the dtype of this name, NumPy's or ml_dtypes'; in float64 if ``like`` is, for exact values."""
    if like.dtype == xp.float64:
        return x
    if hasattr(xp, dtype):
        return xp.astype(x, getattr(xp, dtype))
    import ml_dtypes  # start-up time: few programs have such dtypes

    return xp.astype(x, getattr(ml_dtypes, dtype))
