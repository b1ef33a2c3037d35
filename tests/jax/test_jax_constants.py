"""Attributes of a jitted function; what holds in both frameworks is in tests/contract."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import cute_ops_jax


def test_static_attributes_are_told_apart() -> None:
    @cute_ops_jax.fused
    def times(xp: Any, x: Any, *, k: float = 1.0) -> Any:
        return x * k

    run = jax.jit(times, static_argnames="k")
    for k in (0.0, 2.0, 0.0, 3.0):
        out = run(jnp.ones((1, 2)), k=k)
        assert (out == k).all() and not jnp.signbit(out).any()
