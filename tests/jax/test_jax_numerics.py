"""Values at the edges: infinities, NaN, the largest and the smallest numbers, empty rows, against jax.nn."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import testing
from cute_ops.ops.quantize.quantize_fp8 import quantize_fp8

INF, NAN = np.inf, np.nan
DTYPES = ["float32", "float16", "bfloat16"]


def compare(ours: Callable[..., Any], theirs: Callable[..., Any], x: Any, rtol: float) -> None:
    """Values and gradients agree, special ones included."""
    for function in (lambda f, x: f(x), lambda f, x: jax.grad(lambda x: jnp.sum(f(x)))(x)):
        got, expected = (np.asarray(function(f, x).astype(jnp.float32)) for f in (ours, theirs))
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-6)


def test_gelu_far_below_zero() -> None:
    """Inputs for which 1 + erf has no digits left. What rounds the exponent, x * x / 2, is relative to the value."""
    x = -np.arange(1.0, 13.0)
    normal = np.array([math.erfc(-a / math.sqrt(2)) / 2 for a in x])
    slope = normal + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    gelu = partial(cute_ops_jax.gelu, approximate="none")
    off = float(jnp.finfo(jnp.float32).eps) * (4 + x * x)
    for got, exact in ((gelu(jnp.float32(x)), x * normal), (jax.grad(lambda x: gelu(x).sum())(jnp.float32(x)), slope)):
        assert (np.abs(np.asarray(got, np.float64) - exact) <= off * np.abs(exact)).all()


@pytest.mark.slow
def test_cross_entropy_of_nothing_and_of_masked_classes() -> None:
    x = np.random.default_rng(1).standard_normal((4, 9), np.float32)
    x[:, 3] = -INF
    target = np.array([0, 1, 2, 4])
    loss = lambda x, **o: cute_ops_jax.cross_entropy(x, target, reduction="sum", **o)  # noqa: E731
    compare(loss, lambda x: -jnp.sum(jax.nn.log_softmax(x)[np.arange(4), target]), jnp.asarray(x), 1e-5)
    assert loss(x, label_smoothing=0.1) == INF
    ignored = np.full(4, -100)
    value, slope = jax.value_and_grad(lambda x: cute_ops_jax.cross_entropy(x, ignored))(jnp.asarray(x))
    assert np.isnan(value) and not np.any(slope)


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_and_quotients_are_rounded_once(dtype: str, block: int) -> None:
    """Bitwise what NumPy computes, and scales also what float64 does: XLA divides by a product with the reciprocal."""
    (x,) = testing.sample(quantize_fp8, (500,), 256, np.random.default_rng(5), dtype)
    x *= np.exp2(np.arange(500) % 20 - 10).astype(x.dtype)[:, None]
    expected = testing.run_reference(quantize_fp8, {"x": x}, {"block": block})
    for got, values in zip(cute_ops_jax.quantize_fp8(x, block), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), values.view(np.uint8))
    largest = np.abs(x.astype(np.float64)).reshape(500, -1, block or 256).max(-1)
    np.testing.assert_array_equal(np.asarray(got), (largest / 448).astype(np.float32))


def test_scales_of_what_an_op_computes_are_rounded_once() -> None:
    """Of rows that need no sum, so that both frameworks quantise the same numbers."""
    x = np.random.default_rng(6).standard_normal((400, 2), np.float32)
    fused, scale = cute_ops_jax.silu_mul_fp8(x, np.ones_like(x))
    separate, expected = cute_ops_jax.quantize_fp8(cute_ops_jax.silu_mul(x, np.ones_like(x)))
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(fused).view(np.uint8), np.asarray(separate).view(np.uint8))
    largest = np.asarray(cute_ops_jax.silu_mul(x, np.ones_like(x)), np.float64)
    np.testing.assert_array_equal(np.asarray(scale)[:, 0], (np.abs(largest).max(-1) / 448).astype(np.float32))
