"""Embeddings: rows of the table, gradients beside float64, batches, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import finfo

from cute_ops.testing import numpy_dtype
from tests.contract.adapters import Adapter

# Tokens' shape, classes, columns: few and many tokens to a class, chunks of one class, unaligned rows, no token, no
# column, one token.
SIZES = [
    ((300,), 33, 257), ((700,), 5, 96), ((40,), 4000, 64), ((2000,), 3, 8), ((5,), 9, 7), ((0,), 11, 24), ((4,), 3, 0),
    ((40, 5), 3, 7), ((), 5, 8), ((0, 3), 4, 8),
]  # fmt: skip


def indices(kind: str, lead: tuple[int, ...], classes: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    index = rng.integers(0, classes, lead)
    if kind == "half":  # of the tokens have one class
        index = np.where(rng.random(lead) < 0.5, classes // 3, index)
    elif kind == "edges":
        index = np.where(rng.random(lead) < 0.5, np.where(rng.random(lead) < 0.5, 0, classes - 1), index)
    return index


@pytest.mark.drawn(0.15)
@pytest.mark.on_gpus
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["uniform", "half", "edges"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(adapter: Adapter, sizes: tuple[tuple[int, ...], int, int], kind: str, dtype: str) -> None:
    """The gradient is rounded once, and what adding in float32 loses; int32 and int64 indices are alike."""
    (lead, classes, n), rng, low = sizes, np.random.default_rng(1), numpy_dtype(dtype)
    index = indices(kind, lead, classes)
    weight, dout = rng.standard_normal((classes, n)).astype(low), rng.standard_normal((*lead, n)).astype(low)
    integers = [adapter.array(index, each) for each in (("int32", "int64") if adapter.name == "torch" else ("int32",))]
    calls = [(padding, each) for padding in (None, 1, -2) for each in integers]

    def run(*tables):
        return [adapter.ours.embedding(each, t, padding) for (padding, each), t in zip(calls, tables, strict=True)]

    found = adapter.value_and_gradients(adapter.usual(run), [adapter.array(weight)] * len(calls), [dout] * len(calls))
    for (padding, _), value, gradient in zip(calls, *found, strict=True):
        kept = index != (-1 if padding is None else padding % classes)
        exact, size = np.zeros((2, classes, n))
        rows = dout.astype(np.float64)[kept]
        np.add.at(exact, index[kept], rows)
        np.add.at(size, index[kept], np.abs(rows))
        # Subnormal float16 numbers have the unit of the smallest normal one.
        unit = float(finfo(dtype).eps) / 2 * np.maximum(np.abs(exact), float(finfo(dtype).tiny))
        np.testing.assert_array_equal(value, weight[index])
        assert (np.abs(gradient.astype(np.float64) - exact) <= 1.01 * unit + 4 * 2.0**-23 * size).all()
    alike = len(integers)
    for first, other in zip(found[1][::alike], found[1][alike - 1 :: alike], strict=True):
        np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_batches(adapter: Adapter, axes: tuple[int | None, int | None]) -> None:
    """Values, and gradients of each example's table."""
    rng = np.random.default_rng(0)
    index, weight = rng.integers(0, 7, (3, 5)), rng.standard_normal((3, 7, 4)).astype(np.float32)
    given = [a if axis == 0 else a[0] for a, axis in zip((index.astype(np.int32), weight), axes, strict=True)]
    arrays = adapter.arrays(given)
    each = [tuple(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True)) for i in range(3)]
    found = adapter.vmap(adapter.ours.embedding, axes)(*arrays)
    np.testing.assert_array_equal(adapter.numpy(found), np.stack([w[i] for i, w in each]))
    gradient = adapter.grad(lambda index, weight: adapter.loss(adapter.ours.embedding(index, weight)), (1,))
    (slopes,) = adapter.vmap(gradient, axes)(*arrays)
    expected = np.zeros((3, 7, 4))
    for k, (i, w) in enumerate(each):
        np.add.at(expected[k], i, np.cos(w[i]))
    np.testing.assert_allclose(adapter.numpy(slopes), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (("int16", "float32"), TypeError, "argument `index` has dtype int16, expected int64 or int32"),
        (("int32", "int32"), TypeError, "argument `weight` has dtype int32"),
        (("int32", "row"), ValueError, "argument `weight` has 1 dims, expected 2"),
        (("int32", "float32", 7), ValueError, "option `padding_idx` is 7, which is none of 7 classes"),
        (("int32", "float32", -8), ValueError, "option `padding_idx` is -8"),
        (("int32", "float32", 2.5), TypeError, "option `padding_idx` is 2.5, expected an int or None"),
    ],
)
def test_what_is_refused(adapter: Adapter, wrong: tuple[object, ...], kind: type[Exception], text: str) -> None:
    index = adapter.array(np.zeros((3, 5)), str(wrong[0]))
    weight = np.ones((7, 4), np.float32)
    table = adapter.array(weight[0] if wrong[1] == "row" else weight.astype(str(wrong[1])))
    with pytest.raises(kind, match=rf"^cute\.embedding: {text}"):
        adapter.ours.embedding(index, table, *wrong[2:])
