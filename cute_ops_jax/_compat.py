"""Every use of JAX that its documentation does not promise, in one place.

Written against jax 0.9.1 to 0.11.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.dispatch import apply_primitive
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["Primitive", "ShapedArray", "new_primitive", "register_lowering", "varying_axes"]


def new_primitive(
    name: str, abstract: Callable[..., Any], batch: Callable[..., Any], differentiate: Callable[..., Any]
) -> Primitive:
    """A primitive of several results.

    Args:
        abstract: ``abstract(*avals, **params) -> [ShapedArray]``.
        batch: ``batch(arrays, axes, **params) -> (arrays, axes)``; an axis is None where unbatched.
        differentiate: ``differentiate(primals, tangents, **params)``, the forward-mode rule.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **params: apply_primitive(primitive, *arrays, **params))
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = differentiate
    return primitive


def register_lowering(primitive: Primitive, body: Callable[..., Sequence[Any]], platform: str | None = None) -> None:
    """Lower a primitive to what tracing ``body(*arrays, **params)`` gives; on every platform where none is named."""
    mlir.register_lowering(primitive, mlir.lower_fun(body, multiple_results=True), platform=platform)


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes of a ``shard_map`` with replication checks over which a value varies."""
    manual = getattr(aval, "manual_axis_type", None)  # jax >= 0.10
    found = manual.varying if manual is not None else getattr(aval, "vma", ())
    return frozenset(found)


def jax_version() -> tuple[int, ...]:
    return tuple(jax.__version_info__)
