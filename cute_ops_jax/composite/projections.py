"""Linear layers with what a transformer does next: the norm of the residual stream, the rotation of heads; or with
what it does before, that norm.
"""

from __future__ import annotations

import jax

from cute_ops.composite import linear_add_rmsnorm as add_rmsnorm
from cute_ops.composite import qkv_rope as rotation
from cute_ops.composite import rmsnorm_linear as norm_before
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


@continued(norm_before.DOC)
def rmsnorm_linear(
    x: Array, norm_weight: Array | None, weight: Array, bias: Array | None = None, eps: float = 1e-6,
    *, epilogue: str = "bias", fused: str = "auto",
) -> Array:  # fmt: skip
    """The norm before a linear layer, and the layer."""
    given = (x, weight) if bias is None else (x, weight, bias)
    op = norm_before.rmsnorm_linear(epilogue, bias is not None)
    out: Array = register(op)(*given, norm_weight, eps, fused)
    return out


@continued(rotation.DOC)
def qkv_rope(x: Array, weight: Array, cos: Array, sin: Array, heads: int, *, fused: str = "auto") -> Array:
    """The projection to queries, keys and values, and the rotary embedding of queries and keys."""
    size = rotation.head_size(cos.shape)
    out: Array = register(rotation.qkv_rope(size))(x, weight, cos, sin, heads, fused)
    return out
