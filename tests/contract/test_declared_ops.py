"""Ops of one's own: registered by many threads, outputs whose dtype is named, products of nothing, names of dims."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Op, Tensor
from cute_ops.testing import numpy_dtype
from tests.contract.adapters import Adapter
from tests.ops import rounding
from tests.ops.crossed import CROSS
from tests.ops.product import product


@pytest.mark.fault(
    "16 threads register one declaration at the same time", "all get the same function", "nothing",
)  # fmt: skip
def test_threads_that_register_at_once_get_one_function(adapter: Adapter) -> None:
    rows = Tensor("*m n", "T")
    fields: Any = {"inputs": {"x": rows}, "outputs": {"out": rows}, "dtypes": {"T": FLOATS}, "kernel": "a:B"}
    ops = [Op(f"threaded_{k}", reference=lambda xp, x: 2 * x, **fields) for k in range(20)]
    start, interval = threading.Barrier(16), sys.getswitchinterval()

    def work(_: int) -> list[Any]:
        start.wait()
        return list(map(adapter.register, ops))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(work, range(16)))
    finally:
        sys.setswitchinterval(interval)
    assert all(functions == found[0] for functions in found)
    assert (adapter.numpy(found[0][0](adapter.array(np.ones((2, 3), np.float32)))) == 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_an_attribute_names_the_dtype_of_an_output(adapter: Adapter, way: str) -> None:
    double, x = adapter.register(rounding.double), adapter.array(np.ones((3, 8), np.float32))
    for dtype in rounding.double.choices["out_dtype"]:
        function = partial(double, out_dtype=dtype)
        run = function if way == "plain" else adapter.compiled(function)
        (out,), (gradient,) = adapter.value_and_gradients(run, [x])
        assert out.dtype == numpy_dtype(dtype) and gradient.dtype == np.float32
        np.testing.assert_array_equal(gradient, np.full((3, 8), 2.0))


NOTHING = {
    "k": ((2, 3, 0), (2, 4, 0)), "m": ((2, 0, 5), (2, 4, 5)), "n": ((2, 3, 5), (2, 0, 5)), "b": ((0, 3, 5), (0, 4, 5)),
}  # fmt: skip


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("way", ["plain", "compiled", "vmap"])
@pytest.mark.parametrize("dim", NOTHING)
def test_a_product_of_nothing_is_its_epilogue(adapter: Adapter, dim: str, way: str) -> None:
    """A sum over no ``k`` is zero, to which the bias is added; gradients are as large as what they are of."""
    rng, function = np.random.default_rng(0), adapter.register(product)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in NOTHING[dim])
    bias = rng.standard_normal(w.shape[1]).astype(np.float32)
    run = adapter.vmap(function, (0, 0, None)) if way == "vmap" else function
    run = adapter.compiled(function) if way == "compiled" else run
    expected = x @ np.swapaxes(w, -1, -2) + bias
    cotangent = np.cos(expected)
    exact = cotangent @ w, np.swapaxes(cotangent, -1, -2) @ x, cotangent.sum((0, 1))
    (out,), gradients = adapter.value_and_gradients(run, adapter.arrays([x, w, bias]), [cotangent])
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    for got, wanted in zip(gradients, exact, strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (2, 0)], ids=str)
def test_batches_of_leading_dims_of_two_names(adapter: Adapter, axes: tuple[int | None, ...]) -> None:
    """Each example of ``*m`` sees its own ``*p``."""
    function, rng = adapter.register(CROSS), np.random.default_rng(0)
    given = [rng.standard_normal((2, 3, 4) if a is None else (3, 3, 3, 4)).astype(np.float32) for a in axes]
    each = [[a if d is None else np.take(a, i, d) for a, d in zip(given, axes, strict=True)] for i in range(3)]
    found = adapter.vmap(function, axes)(*adapter.arrays(given))
    expected = [x * y.reshape(-1, 4).sum(0) for x, y in each]
    np.testing.assert_allclose(adapter.numpy(found), np.stack(expected), rtol=1e-5, atol=1e-5)
    gradients = adapter.vmap(adapter.grad(lambda x, y: adapter.loss(function(x, y)), (0, 1)), axes)
    for got, k in zip(gradients(*adapter.arrays(given)), range(2), strict=True):
        cosines = [np.cos(out) for out in expected]
        exact = [
            c * y.reshape(-1, 4).sum(0) if k == 0 else np.broadcast_to((c * x).reshape(-1, 4).sum(0), y.shape)
            for c, (x, y) in zip(cosines, each, strict=True)
        ]
        np.testing.assert_allclose(adapter.numpy(got), np.stack(exact), rtol=1e-4, atol=1e-4)
