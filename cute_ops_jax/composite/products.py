"""JAX's functions on the arrays of :class:`cute_ops.composite.products.Products`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite.products import Caller, Function, Products
from cute_ops.composite.public import flags_checked
from cute_ops.declaration.op import Op
from cute_ops.ops.expression.broadcast import Fit
from cute_ops.ops.gemm.by_call import Epilogue
from cute_ops_jax.primitive.arrays import as_array, spec
from cute_ops_jax.primitive.function import register

Array = jax.Array


class JaxProducts(Products[Array]):
    """Linear layers of arrays, and of what JAX makes arrays of."""

    converts, tracing = staticmethod(lambda: True), staticmethod(lambda: False)
    spec, shape = staticmethod(spec), staticmethod(jnp.shape)

    def operands(self, *arrays: Array) -> tuple[Array, ...]:
        return tuple(map(as_array, arrays))

    def function(self, op: Op) -> Function:
        return register(op)

    def functions(self, make: Callable[..., Op]) -> Callable[..., Function]:
        checked = flags_checked(make)
        return cache(lambda *options: register(checked(*options)))

    def expanded(self, array: Array, fit: Fit) -> Array:
        return jnp.broadcast_to(array.reshape(fit.own), fit.sizes)

    def with_epilogue(
        self, caller: Caller, epilogue: Epilogue, arrays: Sequence[Any], layout: str, save: str,
        attrs: Mapping[str, Any],
    ) -> tuple[Function, Sequence[Any]]:  # fmt: skip
        given = [None if a is None else as_array(a) for a in arrays]
        return super().with_epilogue(caller, epilogue, given, layout, save, attrs)


products = JaxProducts()
