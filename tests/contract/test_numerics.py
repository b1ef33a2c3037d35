"""Values at the edges against the framework's own: infinities, NaN, the largest and smallest numbers, empty rows."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from ml_dtypes import finfo

from cute_ops.testing import numpy_dtype
from tests.contract.adapters import Adapter

DTYPES = ["float32", "float16", "bfloat16"]


def compare(adapter: Adapter, ours: Any, theirs: Any, given: list[np.ndarray], rtol: float, atol: float) -> None:
    """Values and gradients, special ones included, against theirs in float64."""
    found = adapter.value_and_gradients(adapter.usual(ours), adapter.arrays(given))
    exact = adapter.exact(theirs, given)
    for got, wanted in zip((*found[0], *found[1]), (*exact[0], *exact[1]), strict=True):
        with np.errstate(over="ignore"):
            rounded = np.asarray(wanted).astype(got.dtype).astype(np.float64)
        np.testing.assert_allclose(got.astype(np.float64), rounded, rtol=rtol, atol=atol)


def special_rows(dtype: str) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((8, 33))
    largest, least = float(finfo(dtype).max), float(finfo(dtype).smallest_normal)
    x[0], x[1, 3:], x[2, 4], x[3, 5] = -inf, -inf, inf, nan
    x[4], x[5] = largest, least * x[5]
    x[4, ::2] = -largest
    x[6] += 1e4
    return x.astype(numpy_dtype(dtype))


def softmaxes(adapter: Adapter) -> list[tuple[Any, Any]]:
    last, names = {"axis" if adapter.name == "jax" else "dim": -1}, ("softmax", "log_softmax")
    return [(getattr(adapter.ours, name), partial(getattr(adapter.own, name), **last)) for name in names]


@pytest.mark.on_gpus
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_special_rows(adapter: Adapter, dtype: str) -> None:
    unit = float(finfo(dtype).eps)
    for ours, theirs in softmaxes(adapter):
        compare(adapter, ours, theirs, [special_rows(dtype)], 4 * unit, 1e-6 if dtype == "float32" else 4 * unit)


@pytest.mark.fault("softmax of rows without columns", "the result has no columns either", "nothing")
@pytest.mark.on_gpus
def test_softmax_of_rows_without_columns(adapter: Adapter) -> None:
    for ours, theirs in softmaxes(adapter):
        compare(adapter, ours, theirs, [np.zeros((3, 0), np.float32)], 0, 0)


EXTREMES = (
    0, -0.0, 1e-45, -1e-40, 1e-20, 0.5, -0.5, 3, -3, 10, 30, -30, 89, -89, 104, -104, 1e4, -1e4, 65504, -65504, 1e13,
    -1e13, 2e19, -2e19, 1e30, -1e30, 3.4e38, -3.4e38, inf, -inf, nan,
)  # fmt: skip


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.on_gpus
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_at_the_extremes(adapter: Adapter, dtype: str) -> None:
    """In float64: a framework's own derivative of GELU in float32 may be NaN beyond 1e19."""
    with np.errstate(over="ignore"):
        x = np.array([EXTREMES]).astype(numpy_dtype(dtype))
    ours, own, up = adapter.ours, adapter.own, np.full_like(x, 1.5)
    limits = 4 * float(finfo(dtype).eps), 1e-6

    def gelu(x: Any, approximate: str) -> Any:
        return own.gelu(x, approximate=approximate if adapter.name == "torch" else approximate == "tanh")

    compare(adapter, ours.silu, own.silu, [x], *limits)
    compare(adapter, ours.silu_mul, lambda x, up: own.silu(x) * up, [x, up], *limits)
    numbers = x if adapter.name == "torch" else x[:, :-1]  # JAX's own relu has the slope 0 at NaN
    compare(adapter, ours.relu2, lambda x: own.relu(x) ** 2, [numbers], *limits)
    for way in ("tanh", "none"):
        compare(
            adapter, lambda x, way=way: ours.gelu(x, approximate=way), lambda x, way=way: gelu(x, way), [x], *limits
        )


@pytest.mark.fault(
    "a float16 loss of a linear layer, a mean over 2048 rows, is scaled as by GradScaler",
    "its gradients do not underflow", "nothing",
)  # fmt: skip
@pytest.mark.on_gpus
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_do_not_underflow_where_the_loss_is_scaled(adapter: Adapter, reduction: str) -> None:
    rng, rows = np.random.default_rng(2), 2048
    hidden, weight = (rng.standard_normal(s).astype(np.float16) for s in ((rows, 32), (1024, 32)))
    weight /= np.float16(32**0.5)
    target, scale = rng.integers(0, 1024, rows), 65536.0
    factor = scale if reduction == "mean" else scale / rows
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    slope = np.exp(logits - logits.max(-1, keepdims=True))
    slope /= slope.sum(-1, keepdims=True)
    slope[np.arange(rows), target] -= 1
    slope /= rows
    exact = slope @ weight.astype(np.float64), slope.T @ hidden.astype(np.float64)
    classes = adapter.array(target.astype(np.int32 if adapter.name == "jax" else np.int64))

    def loss(hidden: Any, weight: Any) -> Any:
        return adapter.ours.linear_cross_entropy(hidden, weight, classes, reduction=reduction) * factor

    given = adapter.arrays([hidden, weight])
    for gradient, wanted in zip(adapter.value_and_gradients(adapter.usual(loss), given)[1], exact, strict=True):
        error = np.linalg.norm(gradient.astype(np.float64) / scale - wanted)
        assert error < 1e-3 * np.linalg.norm(wanted)


@pytest.mark.on_gpus
def test_scales_that_are_powers_of_two(adapter: Adapter) -> None:
    """The least one by which nothing exceeds 448, at both sides of each power of two."""
    powers = np.float32(448) * np.exp2(np.arange(-100, 60, dtype=np.float32))[:, None]
    x = (powers * np.array([1.0, 1 + 2.0**-22, 1 - 2.0**-23], np.float32)).reshape(-1, 1)
    out, scale = map(adapter.numpy, adapter.ours.quantize_fp8(adapter.array(x), power_of_two=True))
    np.testing.assert_array_equal(np.log2(scale), np.round(np.log2(scale)))
    assert (scale * 448 >= x).all() and (scale * 224 < x).all()
    np.testing.assert_allclose(out.astype(np.float32) * scale, x, rtol=2.0**-4)
