"""What the core wants to know of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from cute_ops.shapes import Array


def spec(array: Any) -> Array:
    """Shape and dtype name of an array, tracer or abstract value."""
    return Array(tuple(array.shape), jnp.dtype(array.dtype).name)


def specs(arrays: Mapping[str, Any]) -> dict[str, Array | None]:
    """The same of several, by name."""
    return {name: spec(a) for name, a in arrays.items()}
