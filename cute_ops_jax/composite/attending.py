"""JAX's functions on the arrays of :class:`cute_ops.composite.attention.Attention`."""

from __future__ import annotations

from typing import Any

import jax

from cute_ops.composite.attention import Attention, Function
from cute_ops.declaration.op import Op
from cute_ops_jax.primitive.arrays import as_array
from cute_ops_jax.primitive.function import register


class JaxAttention(Attention[jax.Array]):
    """The attention of arrays, and of what JAX makes arrays of."""

    def function(self, op: Op) -> Function:
        return register(op)

    def array(self, array: Any) -> jax.Array:
        return as_array(array)


attend = JaxAttention()
