"""``equinox`` modules over the functions: ``pip install 'cute-ops[equinox]'``.

They take one example, as ``equinox.nn``'s own norms do, or any leading dims; ``jax.vmap`` costs nothing. Their
parameters have the same names. The result has the dtype of ``x``, whatever the dtype of the parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

import cute_ops_jax
from cute_ops.ops.gemm.by_call import Epilogue

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


class Linear(eqx.nn.Linear):
    """:func:`cute_ops_jax.linear` with a learned weight and bias: ``(x, *operands) -> out``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product.
        use_bias, dtype: as ``equinox.nn.Linear`` has them.
        epilogue: the function's: ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"add"`` or a function. It reads the bias,
            None where it is not learned, then what the module is called with.
        key: for the initial values.
        options: other options of the function, and attributes of the epilogue.
    """

    epilogue: Epilogue = eqx.field(static=True)
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(
        self, in_features: int, out_features: int, use_bias: bool = True, dtype: Any = None, *,
        epilogue: Epilogue = "bias", key: Any, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        self.epilogue, self.options = epilogue, tuple(options.items())

    @classmethod
    def from_linear(cls, layer: eqx.nn.Linear, **options: Any) -> Self:
        """A layer with the parameters of another one."""
        shape = partial(cls, layer.in_features, layer.out_features, layer.use_bias, **options)
        made = eqx.filter_eval_shape(shape, key=jax.random.key(0))
        parameters = layer.weight, layer.bias
        found: Self = eqx.tree_at(lambda m: (m.weight, m.bias), made, parameters, is_leaf=lambda x: x is None)
        return found

    def __call__(self, x: Array, *operands: Array | None, key: Any = None) -> Any:
        options = dict(self.options)
        return cute_ops_jax.linear(x, self.weight, self.bias, *operands, epilogue=self.epilogue, **options)


class GatedMLP(eqx.Module):
    """:func:`cute_ops_jax.gated_mlp` with learned weights: ``gate_up``, packed, and ``down``.

    Args:
        in_features: size of x's last dim, and of the output's.
        hidden_features: size between.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
        dtype: of the weights.
        fused, save: the function's.
        key: for the initial values.
    """

    gate_up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)
    fused: str = eqx.field(static=True)
    save: str = eqx.field(static=True)

    def __init__(
        self, in_features: int, hidden_features: int, activation: str = "silu", dtype: Any = None, *,
        fused: str = "auto", save: str = "pre", key: Any,
    ) -> None:  # fmt: skip
        first, second = jax.random.split(key)
        self.gate_up = eqx.nn.Linear(in_features, 2 * hidden_features, False, dtype, key=first)
        self.down = eqx.nn.Linear(hidden_features, in_features, False, dtype, key=second)
        self.activation, self.fused, self.save = activation, fused, save

    @classmethod
    def from_linear(cls, gate: eqx.nn.Linear, up: eqx.nn.Linear, down: eqx.nn.Linear, **options: Any) -> Self:
        """The MLP of three layers without biases."""
        shape = partial(cls, gate.in_features, gate.out_features, **options)
        made = eqx.filter_eval_shape(shape, key=jax.random.key(0))
        weights = jnp.concatenate([gate.weight, up.weight]), down.weight
        found: Self = eqx.tree_at(lambda mlp: (mlp.gate_up.weight, mlp.down.weight), made, weights)
        return found

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        weights = self.gate_up.weight, self.down.weight
        return cute_ops_jax.gated_mlp(x, *weights, self.activation, fused=self.fused, save=self.save)
