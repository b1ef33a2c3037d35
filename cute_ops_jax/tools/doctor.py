"""The part of ``python -m cute_ops doctor`` that examines JAX."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

import cute_ops_jax
from cute_ops.jit.target import device_count
from cute_ops.tools.doctor import Finding


def examine() -> Iterator[Finding]:
    yield Finding("ok", f"jax {jax.__version__} on {jax.default_backend()}")
    for problem in cute_ops_jax.probe():
        yield Finding("bad", problem, "pip install 'cute-ops[jax]' with the versions of constraints.txt")
    if jax.default_backend() == "cpu" and device_count():
        yield Finding("bad", "a GPU is here but this jax cannot use it", "pip install 'jax[cuda13]'")
    x = jax.random.normal(jax.random.key(0), (33, 1024))
    weight = jnp.linspace(0.5, 1.5, 1024)
    got = cute_ops_jax.rmsnorm(x, weight)
    exact = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight
    error = float(jnp.abs(got - exact).max())
    if error < 1e-4:
        yield Finding("ok", f"cute_ops_jax.rmsnorm runs on {jax.default_backend()}")
    else:
        yield Finding("bad", f"cute_ops_jax.rmsnorm is wrong by {error:.2g}", "python -m cute_ops cache clear")
