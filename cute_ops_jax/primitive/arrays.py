"""JAX arrays in the core's terms: shape and dtype name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.errors import shown, suggesting

Arrays: TypeAlias = Mapping[str, Any]
P = ParamSpec("P")
R = TypeVar("R")
# What JAX makes arrays of.
_KNOWN = jax.Array, np.generic, int, float, complex, list, tuple
# An op's attributes as a parameter of its primitive, which must be hashable.
Attributes: TypeAlias = tuple[tuple[str, Any], ...]


def as_array(x: Any) -> jax.Array:
    """An array of a value that JAX takes for one. ``jnp.asarray`` takes some 8 us to return an array itself."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def spec(array: Any) -> Array:
    """Shape and dtype name of an array, tracer or abstract value."""
    return Array(tuple(array.shape), jnp.dtype(array.dtype).name)


def specs(arrays: Arrays) -> dict[str, Array | None]:
    """Shapes and dtype names of several arrays, by name."""
    return {name: spec(a) for name, a in arrays.items()}


def in_order(op: Op, inputs: Arrays) -> dict[str, Any]:
    """The inputs that are there, in declared order. What says how it becomes an array does, flax's ``Param``.

    Raises:
        TypeError: an input that is no array: a list, a dictionary.
    """
    given = {name: inputs[name] for name in op.inputs if inputs.get(name) is not None}
    for name, a in given.items():
        if not (hasattr(a, "shape") and hasattr(a, "dtype")):
            raise TypeError(message(op, f"argument `{name}` must be one array, got {type(a).__name__}."))
        given[name] = unwrapped(a)
    return given


def unwrapped(array: Any) -> Any:
    """The array that a value says it is, flax's ``Param``; any other value as it is."""
    if isinstance(array, jax.Array) or not hasattr(array, "__jax_array__"):
        return array
    return array.__jax_array__()


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: misspelt arguments of a function are named, and those that are no arrays."""
    return suggesting(promoting(function), wrong_array)


def promoting(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: ranks and dtypes are promoted inside of a function, whatever the program asks of its own code."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call


def wrong_array(value: Any) -> str:
    """The error text for a value that is to be an array: ``one array, got BCOO``; empty if JAX makes one of it."""
    came = _no_array(value)
    return came and f"one array, got {came}"


def _no_array(value: Any) -> str:
    """Name a value of which JAX makes no array of numbers, or another array than it seems; empty for others."""
    if isinstance(value, np.ma.MaskedArray):
        return "a masked NumPy array"
    if isinstance(value, np.ndarray):
        plain = value.dtype.isnative and value.dtype.fields is None and value.dtype.kind not in "OSUMm"
        return "" if plain else f"a NumPy array of dtype {value.dtype}"
    if isinstance(value, jax.Ref):
        return "a mutable reference: read it, ref[...]"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return f"PRNG keys, {value.dtype}{list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return shown(value)
    if value is None or isinstance(value, _KNOWN) or hasattr(value, "__jax_array__"):
        return ""
    package = type(value).__module__.partition(".")[0]
    return f"{f'{package}.' if package == 'torch' else ''}{type(value).__name__}"
