"""``rope`` with gradients of its tables, which a program may learn."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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
