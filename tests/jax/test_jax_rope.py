"""Rotary tables that broadcast over any leading dims of x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops.ops import OPS

LEADS = [(5, 1), (1, 3), (5, 3), (3,), (1,), (1, 1), ()]
rope = next(op for op in OPS if op.name == "rope")


def problem(lead: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """3 sequences of 5 positions, tables with the given leading dims, and the same tables broadcast."""
    rng = np.random.default_rng(0)
    x, angles = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((5, 3, 2, 8), (*lead, 4)))
    whole = jnp.broadcast_to(angles, (5, 3, 4))
    return x, (jnp.cos(angles), jnp.sin(angles)), (jnp.cos(whole), jnp.sin(whole))


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_tables_broadcast_along_any_leading_dim(
    lead: tuple[int, ...], through_ffi: Callable[..., Any], fake_kernels: Any, close: Callable[..., Any]
) -> None:
    """The reference and the fake kernels agree: forward, backward and under vmap."""
    x, tables, whole = problem(lead)
    expected, pull = jax.vjp(lambda x: cute_ops_jax.rope(x, *whole), x)
    (dx,) = pull(jnp.cos(expected))
    kernel = through_ffi(rope)
    for function in (cute_ops_jax.rope, kernel):
        found, pull = jax.vjp(lambda x, f=function: f(x, *tables), x)
        close((found, pull(jnp.cos(found))), (expected, (dx,)))
        several = jnp.stack([x, 2 * x])
        close(jax.vmap(lambda x, f=function: f(x, *tables))(several), jnp.stack([expected, 2 * expected]))
        both = [jnp.stack([t, t]) for t in tables]
        close(jax.vmap(lambda *t, f=function: f(x, *t))(*both), jnp.stack([expected, expected]))
    assert fake_kernels.calls
