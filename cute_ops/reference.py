"""What reference implementations share."""

from __future__ import annotations

from typing import Any


def widen(xp: Any, *arrays: Any) -> tuple[Any, ...]:
    """The arrays in the accumulation dtype: float64 stays, everything else becomes float32; None stays."""
    return tuple(None if a is None else a if a.dtype == xp.float64 else xp.astype(a, xp.float32) for a in arrays)
