"""``rope`` and ``qkv_rope`` with gradients of their tables, which a program may learn."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite import qkv_rope as projected
from cute_ops.ops.rotary import rope as declared
from cute_ops_jax.primitive.function import register


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    return register(declared.rope)(x, cos, sin, interleaved=interleaved)


def rope(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    """Rotary position embedding. The gradients of cos and sin are computed where a program needs them."""
    return rotated(x, cos, sin, interleaved)


def _forward(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    return rotated(x, cos, sin, interleaved), (x, cos, sin)


def _backward(interleaved: bool, saved: Any, dout: Any) -> Any:
    x, cos, sin = saved
    dx = register(declared.rope_bwd)(dout, cos, sin, interleaved=interleaved)
    of_tables = jax.vjp(lambda c, s: declared.reference(jnp, x, c, s, interleaved=interleaved), cos, sin)[1]
    return (dx, *of_tables(dout))


rotated.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def qkv_rope(x: Any, weight: Any, cos: Any, sin: Any, size: int, transposed: bool, heads: int) -> Any:
    """The projection to heads of so many columns, of which the first ``heads`` are rotated. Like :func:`rope` it has
    gradients of cos and sin.
    """
    return register(projected.qkv_rope(size, transposed))(x, weight, cos, sin, heads=heads)


def _project(x: Any, weight: Any, cos: Any, sin: Any, size: int, transposed: bool, heads: int) -> Any:
    function = register(projected.qkv_rope(size, transposed))
    out, back = jax.vjp(lambda x, weight: function(x, weight, cos, sin, heads=heads), x, weight)
    return out, (back, x, weight, cos, sin)


def _project_back(size: int, transposed: bool, heads: int, saved: Any, dout: Any) -> Any:
    back, x, weight, cos, sin = saved

    def turned(cos: Any, sin: Any) -> Any:
        product = x @ (weight[:, : heads * size] if transposed else weight[: heads * size].T)
        by_head, tables = (
            jnp.reshape(product, (*product.shape[:-1], heads, size)),
            (cos[..., None, :], sin[..., None, :]),
        )
        made = declared.reference(jnp, by_head, *tables, interleaved=False)
        return jnp.reshape(made, product.shape)

    return (*back(dout), *jax.vjp(turned, cos, sin)[1](dout[..., : heads * size]))


qkv_rope.defvjp(_project, _project_back)
