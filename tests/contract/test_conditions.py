"""Operands of bools and of whole numbers in both frameworks: drawn shapes and dtypes against float64."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.testing import EPS
from tests.contract.adapters import Adapter

SEED = int(os.environ.get("CUTE_OPS_SEED", "47"))


def masked(xp: Any, x: Any, mask: Any, scale: Any) -> Any:
    return xp.where(mask, x * scale, 0.0)


def softmax(xp: Any, x: Any, mask: Any, scale: Any) -> Any:
    y = xp.where(mask, x * scale, -1e4)
    terms = xp.exp(y - xp.max(y, axis=-1, keepdims=True))
    return terms / xp.sum(terms, axis=-1, keepdims=True)


def chosen(xp: Any, x: Any, ids: Any, scale: Any) -> Any:
    return xp.where(ids > 3, x * scale, x - ids)


def exact(name: str, x: Any, given: Any, scale: Any) -> Any:
    """The functions in torch, in float64."""
    import torch

    if name == "masked":
        return torch.where(given, x * scale, 0.0)
    if name == "softmax":
        return torch.softmax(torch.where(given, x * scale, -1e4), -1)
    return torch.where(given > 3, x * scale, x - given)


FUNCTIONS = {"masked": masked, "softmax": softmax, "chosen": chosen}


@pytest.mark.on_gpus
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(adapter: Adapter, name: str, number: int) -> None:
    """Of a tile, a row vector, a column vector and a scalar; of fewer leading dims than the result has."""
    torch = pytest.importorskip("torch")
    print("seed", SEED)
    rng = np.random.default_rng((SEED, number, *name.encode()))
    batch, rows, n = (int(rng.integers(2, most)) for most in (4, 6, 40))
    shape = ((batch, rows, n), (n,), (rows, 1), (1, rows, n))[number]
    dtype = testing.numpy_dtype(("float32", "bfloat16", "float16", "float32")[number])
    x, dout = (rng.standard_normal((batch, rows, n)).astype(dtype) for _ in range(2))
    scale = rng.standard_normal(n).astype(np.float32)
    if name == "chosen":
        given = rng.integers(-2 if number else 0, 9, shape).astype(("uint8", "int32", "int64", "int32")[number])
    else:
        given = rng.random(shape) < 0.5
    ours = adapter.ours.fused(FUNCTIONS[name])

    def of(x: Any, scale: Any) -> Any:
        return ours(x, adapter.array(given), scale)

    arrays = [adapter.array(x), adapter.array(scale)]
    values, slopes = adapter.value_and_gradients(adapter.usual(of), arrays, [dout])
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, scale)]
    wanted = exact(name, leaves[0], torch.from_numpy(given), leaves[1])
    right = torch.autograd.grad(wanted, leaves, torch.from_numpy(dout.astype(np.float64)))
    for got, expected in zip((*values, *slopes), (wanted.detach(), *right), strict=True):
        limit = 8 * max(EPS[str(got.dtype)], 4 * EPS["float32"]) * max(1.0, float(expected.abs().max()))
        assert np.abs(got.astype(np.float64) - expected.numpy()).max() <= limit


def test_programs_and_batches(adapter: Adapter) -> None:
    """Compiled and under vmap a call is what it is; floats of the same shape are another function's operands."""
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 3, 8)).astype(np.float32), adapter.array(np.ones(8, np.float32))
    mask = rng.random((2, 3, 8)) < 0.5
    ours = adapter.ours.fused(masked)

    def of(x: Any, mask: Any) -> Any:
        return ours(x, mask, scale)

    given = adapter.array(x), adapter.array(mask)
    wanted = np.where(mask, x, 0.0)
    for function in (of, adapter.compiled(of), adapter.vmap(of)):
        np.testing.assert_array_equal(adapter.numpy(function(*given)), wanted)

    @adapter.ours.fused
    def clipped(xp: Any, x: Any, limit: Any) -> Any:
        return xp.where(limit > 0, x, -x)

    for shape in ((3, 8), (8,)):
        limit = rng.standard_normal(shape).astype(np.float32)
        for kind in ("float32", "int32", "float32"):
            given = limit.astype(kind) * 2
            expected = np.where(given > 0, x[0], -x[0])
            got = clipped(adapter.array(x[0]), adapter.array(given))
            np.testing.assert_array_equal(adapter.numpy(got), expected)


def test_what_is_refused(adapter: Adapter) -> None:
    ours = adapter.ours.fused(masked)
    one, row = adapter.array(np.ones((3, 8), bool)), adapter.array(np.ones(8, np.float32))
    with pytest.raises(ValueError, match="no argument of floats has the shape of the result"):
        ours(row, one, row)
    with pytest.raises(Exception, match="no bool"):
        ours(adapter.array(np.ones((3, 8), np.float32)), row, row)
