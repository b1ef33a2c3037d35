"""JAX arrays in the core's terms: shape and dtype name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp

from cute_ops.errors import message
from cute_ops.op import Op
from cute_ops.shapes import Array

Arrays: TypeAlias = Mapping[str, Any]
# An op's attributes as a parameter of its primitive, which must be hashable.
Attributes: TypeAlias = tuple[tuple[str, Any], ...]


def spec(array: Any) -> Array:
    """Shape and dtype name of an array, tracer or abstract value."""
    return Array(tuple(array.shape), jnp.dtype(array.dtype).name)


def specs(arrays: Arrays) -> dict[str, Array | None]:
    """The same for several arrays, by name."""
    return {name: spec(a) for name, a in arrays.items()}


def in_order(op: Op, inputs: Arrays) -> dict[str, Any]:
    """The inputs that are there, in declared order.

    Raises:
        TypeError: an input that is no array: a list, a dictionary.
    """
    given = {name: inputs[name] for name in op.inputs if inputs.get(name) is not None}
    for name, a in given.items():
        if not (hasattr(a, "shape") and hasattr(a, "dtype")):
            raise TypeError(message(op, f"argument `{name}` must be one array, got {type(a).__name__}."))
    return given
