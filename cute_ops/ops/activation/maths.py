"""Expressions that declarations of activations share."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.attributes import OneOf
from cute_ops.expressions.derivative import DERIVATIVE

# The factor of QuickGELU.
QUICK = 1.702
APPROXIMATE = {"approximate": OneOf("tanh", "none")}


def gelu(xp: Any, x: Any, approximate: str) -> Any:
    return xp.gelu_tanh(x) if approximate == "tanh" else xp.gelu(x)


def halves(x: Any) -> tuple[Any, Any]:
    """Gate and up of packed rows."""
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


def activated(xp: Any, x: Any, activation: str) -> Any:
    """The activation of this name."""
    if activation == "relu2":
        return xp.square(xp.relu(x))
    if activation == "quick_gelu":
        return x * xp.sigmoid(QUICK * x)
    return getattr(xp, activation)(x)


def value_and_gradient(xp: Any, x: Any, dout: Any, activation: str) -> tuple[Any, Any]:
    """The activation of this name, and the gradient of x."""
    value = activated(xp, x, activation)
    if activation == "relu2":
        return value, dout * (2 * xp.relu(x))
    if activation in ("quick_gelu", "silu"):  # with the value at hand, one multiplication less than the rule takes
        factor = QUICK if activation == "quick_gelu" else 1.0
        s = xp.sigmoid(factor * x)
        return value, dout * (factor * value * (1 - s) + s)
    (dx,) = DERIVATIVE[activation](xp, dout, value, x)
    return value, dx
