"""Attributes and captured numbers: no call gets the answer of another one."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cute_ops import FLOATS, Op, Tensor
from tests.contract.adapters import Adapter
from tests.fuzz.constants import fuzz

RNG = np.random.default_rng(0)
X, W = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (8, 6)))
ONES = np.ones((1, 2), np.float32)
SCALE, NUMPY = 2.0, np.float32(5)


@pytest.fixture
def product(adapter: Adapter) -> Callable[..., np.ndarray]:
    """``product(epilogue, **attrs)``: of X and W."""
    x, w = adapter.array(X), adapter.array(W)
    return lambda function, **attrs: adapter.numpy(adapter.ours.linear(x, w, epilogue=function, **attrs))


@pytest.fixture
def normed(adapter: Adapter) -> Callable[..., np.ndarray]:
    x, w = adapter.array(X), adapter.array(W)
    return lambda f, **attrs: adapter.numpy(adapter.ours.rmsnorm_linear(x, None, w, epilogue=f, **attrs))


def factor(out: np.ndarray, of: np.ndarray) -> float:
    """By which the largest element was multiplied."""
    place = np.abs(of).argmax()
    return float(out.flatten()[place] / of.flatten()[place])


def is_negative(k: float) -> bool:
    return math.copysign(1, k) < 0


def by_flag(xp: Any, acc: Any, *, flag: Any = False) -> Any:
    return acc * 10 if flag is True else acc * 5.5 if isinstance(flag, float) else acc * flag


@pytest.mark.parametrize("order", [(1, True, 1.0), (True, 1.0, 1), (1.0, 1, True)])
def test_an_epilogues_attributes_are_told_apart_by_type(
    product: Callable[..., np.ndarray], normed: Callable[..., np.ndarray], order: Any
) -> None:
    wanted = {int: 1.0, bool: 10.0, float: 5.5}
    for run in (product, normed):
        plain = run(by_flag, flag=1)
        for flag in (*order, *order):
            assert factor(run(by_flag, flag=flag), plain) == pytest.approx(wanted[type(flag)], rel=1e-5)


def test_minus_zero_is_another_attribute_than_zero(adapter: Adapter, product: Callable[..., np.ndarray]) -> None:
    def scaled(xp: Any, acc: Any, *, k: float) -> Any:
        return xp.abs(acc) * k

    def times(xp: Any, x: Any, *, k: float = 1.0) -> Any:
        return x * k

    function, ones = adapter.ours.fused(times), adapter.array(ONES)
    for k in (0.0, -0.0, 0.0, -0.0):
        usual = adapter.usual(lambda x, k=k: function(x, k=k))
        for out in (adapter.numpy(function(ones, k=k)), adapter.numpy(usual(ones)), product(scaled, k=k)):
            assert (np.signbit(out) == is_negative(k)).all()


class Layer:
    scale = 2.0

    def epilogue(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale

    def __call__(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale


@pytest.mark.slow
def test_a_number_of_numpy_is_an_attribute_of_its_own_type(
    adapter: Adapter, product: Callable[..., np.ndarray]
) -> None:
    def scaled(xp: Any, acc: Any, *, k: Any = NUMPY) -> Any:
        return acc * k + (1 if isinstance(k, np.generic) else 0)

    function, ones, plain = adapter.ours.fused(scaled, name="numbers_of_numpy"), adapter.array(ONES), X @ W.T
    numbers = (
        2.0, np.float32(2), np.float64(2), 3, np.int8(3), np.bool_(True), ml_dtypes.bfloat16(2), np.float32(3), 2.0,
    )  # fmt: skip
    for k in numbers:
        more = float(isinstance(k, np.generic))
        for out in (function(ones, k=k), adapter.ours.fused(functools.partial(scaled, k=k))(ones)):
            np.testing.assert_array_equal(adapter.numpy(out), float(k) + more)
        for out in (product(scaled, k=k), product(functools.partial(scaled, k=k))):
            np.testing.assert_allclose(out, plain * float(k) + more, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(adapter.numpy(function(ones)), 6.0)
    for wrong in (np.array(2.0), np.ones(2)):
        with pytest.raises(TypeError, match="attribute `k` is a kernel's constant: give a number or text, not ndarray"):
            function(ones, k=wrong)
        with pytest.raises(TypeError, match="attribute `k` is a kernel's constant: give a number or text, not ndarray"):
            product(scaled, k=wrong)
    calls = (lambda x: function(x, k=np.float32(5))), (lambda x: adapter.ours.linear(x, x, epilogue=scaled, k=NUMPY))
    for call in calls:
        if adapter.name == "torch":  # which takes it as an array
            with pytest.raises(Exception, match="attribute `k` is an array to torch"):
                adapter.compiled(call)(ones)
        else:
            adapter.compiled(call)(ones)


def test_a_method_has_the_numbers_that_its_object_has_now(product: Callable[..., np.ndarray]) -> None:
    first, second, plain = Layer(), Layer(), X @ W.T
    for scale in (2.0, 3.0, 2.0):
        first.scale, second.scale = scale, scale + 1
        for layer in (first, second):
            for epilogue in (layer.epilogue, layer):
                assert factor(product(epilogue), plain) == pytest.approx(layer.scale, rel=1e-5)


def test_a_changed_global_is_never_half_seen(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    @adapter.ours.fused
    def scaled(xp: Any, x: Any, bias: Any = None) -> Any:
        return x * SCALE if bias is None else x * SCALE + bias

    x, zeros = adapter.array(X), adapter.array(np.zeros(6, np.float32))
    for scale in (2.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        outputs = scaled(x), scaled(x, zeros), adapter.usual(lambda x: scaled(x))(x)
        assert [factor(adapter.numpy(out), X) for out in outputs] == [scale] * 3


def test_gradients_have_the_number_of_their_forward(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    @adapter.ours.fused
    def scaled(xp: Any, x: Any) -> Any:
        return x * SCALE

    monkeypatch.setitem(globals(), "SCALE", 3.0)
    _, pull = adapter.vjp(scaled, adapter.array(X))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    (gradient,) = pull(adapter.array(np.ones_like(X)))
    assert (adapter.numpy(gradient) == 3).all()


def test_a_declared_ops_attributes_are_told_apart(adapter: Adapter) -> None:
    def reference(xp: Any, x: Any, *, k: float, flag: bool, count: int) -> Any:
        return x * k + 10.0 * count if flag is True else x * k

    rows = Tensor("*m n", "T")
    op = Op(
        "told_apart", inputs={"x": rows}, outputs={"out": rows}, dtypes={"T": FLOATS}, reference=reference,
        attrs={"k": 1.0, "flag": False, "count": 1}, kernel="nowhere:K",
    )  # fmt: skip
    run, x = adapter.register(op), adapter.array(ONES)
    for k in (0.0, -0.0, 0, 0.0, -0.0):
        for out in (run(x, k), run(x, k=k), adapter.usual(lambda x, k=k: run(x, k))(x)):
            assert (np.signbit(adapter.numpy(out)) == is_negative(k)).all()
    both = adapter.usual(lambda x: (run(x, k=0.0), run(x, k=-0.0)))(x)
    assert [bool(np.signbit(adapter.numpy(out)).any()) for out in both] == [False, True]
    # PyTorch's dispatcher itself converts bools and numbers that a schema can hold.
    refused = [{"count": 1.0}, *([{"k": True}, {"flag": 1}, {"count": True}] if adapter.name == "jax" else [])]
    for wrong in refused:
        run(x, k=1.0, flag=True, count=1)
        with pytest.raises(TypeError, match="must be"):
            run(x, **wrong)


def test_random_calls_compute_what_plain_python_does(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn part; ``tests/fuzz/constants.py`` makes as many calls as one likes."""
    seed, calls = 20261128, {"torch": 60, "jax": 40}[adapter.name]  # the same in every run: a failure is the change's
    print("seed", seed)
    monkeypatch.setenv("NUMBER_OF_THE_FUZZ", "1.0")
    with contextlib.ExitStack() as changed:
        if adapter.name == "torch":
            limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 1000}
            changed.enter_context(adapter.torch._dynamo.config.patch(**limits))
        assert sum(fuzz(adapter, calls, seed).values()) == calls
