"""What declarations of activations share, as expressions."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.attributes import OneOf

APPROXIMATE = {"approximate": OneOf("tanh", "none")}


def gelu(xp: Any, x: Any, approximate: str) -> Any:
    return xp.gelu_tanh(x) if approximate == "tanh" else xp.gelu(x)


def halves(x: Any) -> tuple[Any, Any]:
    """Gate and up of packed rows."""
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]
