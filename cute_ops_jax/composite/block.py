"""Parts of a transformer's block: linear layers with the norm of the residual stream before or after them, or with the
rotation of heads after them; and the gated MLP.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite import gated_mlp as mlp
from cute_ops.composite import linear_add_rmsnorm as add_rmsnorm
from cute_ops.composite import qkv_rope as rotation
from cute_ops.composite import rmsnorm_linear as norm_before
from cute_ops.composite.docstrings import continued
from cute_ops.ops.gemm.by_call import Epilogue, weight_shape
from cute_ops_jax.composite.linear import call_with_epilogue
from cute_ops_jax.primitive.arrays import checked
from cute_ops_jax.primitive.function import register

Array = jax.Array


@checked
@continued(add_rmsnorm.DOC)
def linear_add_rmsnorm(
    x: Array, weight: Array, residual: Array, norm_weight: Array, eps: float = 1e-6, *, fused: str = "auto",
    transposed: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """The last layer of a transformer's block, and the norm that comes next."""
    function = register(add_rmsnorm.linear_add_rmsnorm(transposed))
    out: tuple[Array, Array] = function(x, weight, residual, norm_weight, eps, fused)
    return out


@checked
@continued(norm_before.DOC)
def rmsnorm_linear(
    x: Array, norm_weight: Array | None, weight: Array, *operands: Array | None, eps: float = 1e-6,
    epilogue: Epilogue = "bias", fused: str = "auto", packed: bool = False, transposed: bool = False,
    halves: bool = False, save: str = "pre", **attrs: Any,
) -> Any:  # fmt: skip
    """The norm before a linear layer, the layer, and what happens to its product before that is stored."""
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    layout = weight_shape(packed, transposed, halves, "rmsnorm_linear")
    function, given = call_with_epilogue("rmsnorm_linear", epilogue, (x, weight, *operands), layout, save, attrs)
    return function(x, weight, *given, norm_weight, eps, fused)


@checked
@continued(rotation.DOC)
def qkv_rope(
    x: Array, weight: Array, cos: Array, sin: Array, heads: int, *, fused: str = "auto", transposed: bool = False
) -> Array:
    """The projection to queries, keys and values, and the rotary embedding of queries and keys."""
    size = rotation.head_size(jnp.shape(cos))
    out: Array = register(rotation.qkv_rope(size, transposed))(x, weight, cos, sin, heads, fused)
    return out


@checked
@continued(mlp.DOC)
def gated_mlp(
    x: Array, w_gate_up: Array, w_down: Array, activation: str = "silu", *, fused: str = "auto", save: str = "pre",
    transposed: bool = False, halves: bool = False,
) -> Array:  # fmt: skip
    """``out = (activation(x @ gate.T) * (x @ up.T)) @ w_down.T`` with ``gate, up = w_gate_up[:n], w_gate_up[n:]``."""
    op = mlp.gated_mlp(save, transposed, jnp.ndim(w_gate_up) > 2 and not halves, halves)
    out: Array = register(op)(x, w_gate_up, w_down, activation, fused)
    return out
