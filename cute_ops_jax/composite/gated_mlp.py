"""The gated MLP, whose backward has the activation's gradient in a product: :mod:`cute_ops.composite.gated_mlp`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cute_ops.composite import gated_mlp as declared
from cute_ops.composite.docstrings import continued
from cute_ops_jax.primitive.arrays import checked
from cute_ops_jax.primitive.function import register

Array = jax.Array


@checked
@continued(declared.DOC)
def gated_mlp(
    x: Array, w_gate_up: Array, w_down: Array, activation: str = "silu", *, fused: str = "auto", save: str = "pre",
    transposed: bool = False, halves: bool = False,
) -> Array:  # fmt: skip
    """``out = (activation(x @ gate.T) * (x @ up.T)) @ w_down.T`` with ``gate, up = w_gate_up[:n], w_gate_up[n:]``."""
    op = declared.gated_mlp(save, transposed, jnp.ndim(w_gate_up) > 2 and not halves, halves)
    out: Array = register(op)(x, w_gate_up, w_down, activation, fused)
    return out
