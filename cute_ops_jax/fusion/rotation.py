"""``rope`` and ``qkv_rope`` with gradients of their tables, which a program may learn."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

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
    kept = x.value if _are_learned(cos, sin) else jnp.zeros(0, x.value.dtype)
    return rotated(x.value, cos.value, sin.value, interleaved), (kept, cos.value, sin.value)


def _backward(interleaved: bool, saved: Any, dout: Any) -> Any:
    x, cos, sin = saved
    dx = register(declared.rope_bwd)(dout, cos, sin, interleaved=interleaved)
    if x.ndim == 1:
        return dx, None, None
    of_tables = jax.vjp(lambda c, s: declared.reference(jnp, x, c, s, interleaved=interleaved), cos, sin)[1]
    return (dx, *of_tables(dout))


def _are_learned(*tables: Any) -> bool:
    return any(table.perturbed for table in tables)


rotated.defvjp(_forward, _backward, symbolic_zeros=True)


class Projection(NamedTuple):
    """A projection to heads: columns of each, the layout of the weight, and how many are rotated, the first ones."""

    size: int
    transposed: bool
    heads: int

    def __call__(self, x: Any, weight: Any, cos: Any, sin: Any) -> Any:
        return register(projected.qkv_rope(self.size, self.transposed))(x, weight, cos, sin, heads=self.heads)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def qkv_rope(x: Any, weight: Any, cos: Any, sin: Any, of: Projection) -> Any:
    """The projection to rotated heads. Like :func:`rope` it has gradients of cos and sin."""
    return of(x, weight, cos, sin)


def _project(x: Any, weight: Any, cos: Any, sin: Any, of: Projection) -> Any:
    given = [each.value for each in (x, weight, cos, sin)]
    out, back = jax.vjp(lambda x, weight: of(x, weight, *given[2:]), *given[:2])
    # JAX needs one structure of what is saved.
    return out, (back, *given, jnp.zeros(int(_are_learned(cos, sin))))


def _project_back(of: Projection, saved: Any, dout: Any) -> Any:
    back, x, weight, cos, sin, mark = saved
    if not mark.size:
        return (*back(dout), None, None)
    n = of.heads * of.size

    def turned(cos: Any, sin: Any) -> Any:
        product = x @ (weight[:, :n] if of.transposed else weight[:n].T)
        by_head = jnp.reshape(product, (*product.shape[:-1], of.heads, of.size))
        made = declared.reference(jnp, by_head, cos, sin, interleaved=False)
        return jnp.reshape(made, product.shape)

    of_tables, back_to_tables = jax.vjp(turned, cos, sin)
    return (*back(dout), *back_to_tables(_placed_as(dout[..., :n], of_tables)))


def _placed_as(cotangent: Any, out: Any) -> Any:
    """A cotangent where a result lies: on an explicit mesh that is part of its type."""
    sharding = jax.typeof(out).sharding
    return cotangent if sharding.mesh.empty else jax.sharding.reshard(cotangent, sharding)


qkv_rope.defvjp(_project, _project_back, symbolic_zeros=True)
