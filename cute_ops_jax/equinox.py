"""``equinox`` modules over the functions: ``pip install 'cute-ops[equinox]'``.

They take one example, as ``equinox.nn``'s own norms do, or any leading dims; ``jax.vmap`` costs nothing. Their
parameters have the same names. The result has the dtype of ``x``, whatever the dtype of the parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import cute_ops_jax

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("cute_ops_jax.equinox needs equinox: pip install 'cute-ops[equinox]'") from error

Array = jax.Array


class RMSNorm(eqx.Module):
    """:func:`cute_ops_jax.rmsnorm` with a learned weight.

    Args:
        shape: size of the last dim.
        eps: added to the mean square.
        use_weight: learn a weight.
        use_bias: learn a bias.
        dtype: of the parameters; it need not be that of the input.
        weight_offset: added to the weight; the weight starts at ``1 - weight_offset``.
    """

    weight: Array | None
    bias: Array | None
    eps: float = eqx.field(static=True)
    weight_offset: float = eqx.field(static=True)

    def __init__(
        self,
        shape: int,
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = jnp.float32,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight = jnp.full(shape, 1 - weight_offset, dtype) if use_weight else None
        self.bias = jnp.zeros(shape, dtype) if use_bias else None
        self.eps, self.weight_offset = eps, weight_offset

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return cute_ops_jax.rmsnorm(x, self.weight, self.bias, self.eps, self.weight_offset)


class AddRMSNorm(RMSNorm):
    """:func:`cute_ops_jax.add_rmsnorm` with a learned weight: ``(x, residual) -> (out, residual_out)``."""

    def __call__(self, x: Array, residual: Array, *, key: Any = None) -> tuple[Array, Array]:  # type: ignore[override]
        return cute_ops_jax.add_rmsnorm(x, residual, self.weight, self.bias, self.eps, self.weight_offset)


class LayerNorm(eqx.Module):
    """:func:`cute_ops_jax.layernorm` with a learned weight and bias.

    Args:
        shape: size of the last dim.
        eps: added to the variance.
        use_weight: learn a weight.
        use_bias: learn a bias.
        dtype: of the parameters; it need not be that of the input.
    """

    weight: Array | None
    bias: Array | None
    eps: float = eqx.field(static=True)

    def __init__(
        self, shape: int, eps: float = 1e-5, use_weight: bool = True, use_bias: bool = True, dtype: Any = jnp.float32
    ) -> None:
        self.weight = jnp.ones(shape, dtype) if use_weight else None
        self.bias = jnp.zeros(shape, dtype) if use_bias else None
        self.eps = eps

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return cute_ops_jax.layernorm(x, self.weight, self.bias, self.eps)


class QKNormRope(eqx.Module):
    """:func:`cute_ops_jax.qk_norm_rope` with learned weights: ``(q, k, cos, sin) -> (q_out, k_out)``.

    Args:
        head_dim: elements of a head.
        eps: added to the mean square.
        dtype: of the parameters; it need not be that of the input.
    """

    q_weight: Array
    k_weight: Array
    eps: float = eqx.field(static=True)

    def __init__(self, head_dim: int, eps: float = 1e-6, dtype: Any = jnp.float32) -> None:
        self.q_weight, self.k_weight, self.eps = jnp.ones(head_dim, dtype), jnp.ones(head_dim, dtype), eps

    def __call__(self, q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        return cute_ops_jax.qk_norm_rope(q, k, self.q_weight, self.k_weight, cos, sin, self.eps)
