"""Rows divided by their length, whose reciprocal is kept for the gradient, as in docs/row_kernel.md."""

from __future__ import annotations

from typing import Any

from cute_ops import widen


def unit(xp: Any, x: Any, *, eps: float) -> Any:
    (wide,) = widen(xp, x)
    scale = 1 / xp.sqrt(xp.sum(wide * wide, axis=-1) + eps)
    return xp.astype(wide * scale[..., None], x.dtype), scale


def unit_gradient(xp: Any, out: Any, scale: Any, dout: Any) -> Any:
    y, s, dy = widen(xp, out, scale, dout)
    return xp.astype(s[..., None] * (dy - y * xp.sum(y * dy, axis=-1, keepdims=True)), out.dtype)
