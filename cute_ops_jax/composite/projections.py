"""Linear layers with what a transformer does next: the norm of the residual stream, the rotation of heads."""

from __future__ import annotations

import jax

from cute_ops.composite import linear_add_rmsnorm as add_rmsnorm
from cute_ops.composite import qkv_rope as rotation
from cute_ops.composite.docstrings import continued
from cute_ops_jax.primitive.function import register

Array = jax.Array


@continued(add_rmsnorm.DOC)
def linear_add_rmsnorm(
    x: Array, weight: Array, residual: Array, norm_weight: Array, eps: float = 1e-6, *, fused: str = "auto"
) -> tuple[Array, Array]:
    """The last layer of a transformer's block, and the norm that comes next."""
    out: tuple[Array, Array] = register(add_rmsnorm.linear_add_rmsnorm())(x, weight, residual, norm_weight, eps, fused)
    return out


@continued(rotation.DOC)
def qkv_rope(x: Array, weight: Array, cos: Array, sin: Array, heads: int, *, fused: str = "auto") -> Array:
    """The projection to queries, keys and values, and the rotary embedding of queries and keys."""
    size = rotation.head_size(cos.shape)
    out: Array = register(rotation.qkv_rope(size))(x, weight, cos, sin, heads, fused)
    return out
