"""Reference maths of activations: the value and the derivative, in the accumulation dtype."""

from __future__ import annotations

import math
from typing import Any

from cute_ops.array_api import erfc, sigmoid

SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715


def silu(xp: Any, x: Any) -> tuple[Any, Any]:
    s = sigmoid(xp, x)
    return x * s, s + x * s * (1 - s)


def gelu(xp: Any, x: Any, approximate: str) -> tuple[Any, Any]:
    if approximate == "tanh":
        # (1 + tanh(u)) / 2 is a sigmoid, and this one is right in the far negative too.
        s = sigmoid(xp, 2 * SLOPE * (x + CUBE * x**3))
        # Where x^2 would overflow the slope is multiplied by zero.
        near = xp.clip(x, -16, 16)
        return x * s, s + x * s * (1 - s) * (2 * SLOPE * (1 + 3 * CUBE * near**2))
    cdf = erfc(xp, -x / math.sqrt(2)) / 2  # 1 + erf would cancel in the far negative
    return x * cdf, cdf + x * xp.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def relu2(xp: Any, x: Any) -> tuple[Any, Any]:
    positive = xp.where(x < 0, xp.zeros_like(x), x)  # NaN stays
    return positive * positive, 2 * positive
