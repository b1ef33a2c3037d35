"""An op on a device's slices of its inner dims: a product with an epilogue, whose terms devices share.

No kernel can stop between the product and the epilogue to add up what devices have, so the op's program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from cute_ops.op import Op
from cute_ops_jax.distributed.slices import Arrays, Cuts
from cute_ops_jax.primitive import framework


def run_on_terms(op: Op, inputs: Arrays, attrs: Mapping[str, Any], terms: Cuts, call: Callable[..., Arrays]) -> Arrays:
    """The op's outputs.

    Args:
        op: the declaration.
        inputs: the device's slices, None where absent.
        attrs: the attributes.
        terms: the axes along which devices have slices of each inner dim.
        call: ``call(op, inputs, attrs)``: another op on this device.
    """

    def nested(called: Op, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        if not terms.keys().isdisjoint(called.inner):
            return run_on_terms(called, inputs, {**called.keywords, **attrs}, terms, call)
        found = call(called, inputs, attrs)
        axes = tuple(axis for dim in called.contracted for axis in terms.get(dim, ()))
        return {name: jax.lax.psum(a, axes) for name, a in found.items()} if axes else found

    instead = op.without_kernel
    assert instead is not None  # a declaration with inner dims has one
    return instead.run(_Adding(tuple(axis for axes in terms.values() for axis in axes)), nested, inputs, attrs)


class _Adding:
    """What JAX offers to programs, with products that devices add up."""

    def __init__(self, axes: tuple[str, ...]) -> None:
        self._axes = axes

    def __getattr__(self, name: str) -> Any:
        return getattr(framework, name)

    def product(self, a: jax.Array, b: jax.Array, dtype: str | None = None) -> jax.Array:
        added: jax.Array = jax.lax.psum(framework.product(a, b, dtype), self._axes)
        return added
