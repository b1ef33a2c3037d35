"""Attributes and captured numbers in PyTorch: no call gets the answer of another one."""

from __future__ import annotations

import enum
import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ops_torch as ct
from cute_ops import FLOATS, Op, Tensor
from tests.fuzz.constants import fuzz

X, W = torch.randn(4, 6), torch.randn(8, 6)
SCALE = 2.0


def factor(out: torch.Tensor, of: torch.Tensor) -> float:
    """By which the largest element was multiplied."""
    place = of.abs().argmax()
    return (out.flatten()[place] / of.flatten()[place]).item()


def by_flag(xp: Any, acc: Any, *, flag: Any = False) -> Any:
    return acc * 10 if flag is True else acc * 5.5 if isinstance(flag, float) else acc * flag


def product(function: Callable[..., Any], **attrs: Any) -> torch.Tensor:
    return ct.linear(X, W, epilogue=function, **attrs)


def normed(function: Callable[..., Any], **attrs: Any) -> torch.Tensor:
    return ct.rmsnorm_linear(X, None, W, epilogue=function, **attrs)


@pytest.mark.parametrize("order", [(1, True, 1.0), (True, 1.0, 1), (1.0, 1, True)])
@pytest.mark.parametrize("run", [product, normed])
def test_an_epilogues_attributes_are_told_apart_by_type(run: Callable[..., Any], order: Any) -> None:
    wanted = {int: 1.0, bool: 10.0, float: 5.5}
    plain = run(by_flag, flag=1)
    for flag in (*order, *order):
        assert factor(run(by_flag, flag=flag), plain) == pytest.approx(wanted[type(flag)])


def test_minus_zero_is_another_attribute_than_zero() -> None:
    @ct.fused
    def times(xp: Any, x: Any, *, k: float = 1.0) -> Any:
        return x * k

    def scaled(xp: Any, acc: Any, *, k: float) -> Any:
        return xp.abs(acc) * k

    for k in (0.0, -0.0, 0.0, -0.0):
        for out in (times(torch.ones(1, 2), k=k), product(scaled, k=k)):
            assert (torch.signbit(out) == (math.copysign(1, k) < 0)).all()


class Layer:
    scale = 2.0

    def epilogue(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale

    def __call__(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale


def test_a_method_has_the_numbers_that_its_object_has_now() -> None:
    first, second, plain = Layer(), Layer(), X @ W.T
    for scale in (2.0, 3.0, 2.0):
        first.scale, second.scale = scale, scale + 1
        for layer in (first, second):
            for epilogue in (layer.epilogue, layer):
                assert factor(product(epilogue), plain) == pytest.approx(layer.scale, rel=1e-5)
    gone = weakref.ref(first)
    del first, layer, epilogue
    gc.collect()
    assert gone() is None


def test_a_changed_global_is_never_half_seen() -> None:
    @ct.fused
    def scaled(xp: Any, x: Any, bias: Any = None) -> Any:
        return x * SCALE if bias is None else x * SCALE + bias

    for scale in (2.0, 5.0, 2.0):
        globals()["SCALE"] = scale
        assert factor(scaled(X), X) == factor(scaled(X, torch.zeros(6)), X) == scale


def test_gradients_have_the_number_of_their_forward() -> None:
    @ct.fused
    def scaled(xp: Any, x: Any) -> Any:
        return x * SCALE

    x = X.clone().requires_grad_()
    globals()["SCALE"] = 3.0
    out = scaled(x)
    globals()["SCALE"] = 2.0
    out.sum().backward()
    assert x.grad is not None and (x.grad == 3).all()


@ct.fused
def of_global(xp: Any, x: Any, *, k: float = 1.0) -> Any:
    return x * SCALE * k


def test_a_compiled_graph_is_compiled_anew_for_a_changed_number() -> None:
    layer, plain = Layer(), X @ W.T
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return of_global(x), ct.linear(x, w, epilogue=layer.epilogue), ct.linear(x, w, epilogue=layer)

    for scale in (2.0, 3.0, 4.0, 2.0):
        globals()["SCALE"], layer.scale = scale, scale + 1
        fused, *products = both(X, W)
        assert factor(fused, X) == pytest.approx(scale, rel=1e-5)
        for out in products:
            assert factor(out, plain) == pytest.approx(scale + 1, rel=1e-5)
    globals()["SCALE"] = 2.0


def helper(x: Any) -> Any:
    return x * 2.0


@ct.fused
def of_helper(xp: Any, x: Any) -> Any:
    return helper(x)


def test_a_compiled_graph_is_compiled_anew_for_a_changed_helper() -> None:
    kept = helper
    compiled = torch.compile(lambda x: of_helper(x), fullgraph=True, backend="eager")
    try:
        assert factor(compiled(X), X) == pytest.approx(2.0)
        globals()["helper"] = lambda x: x * 3.0
        assert factor(of_helper(X), X) == pytest.approx(3.0)
        assert factor(compiled(X), X) == pytest.approx(3.0)
    finally:
        globals()["helper"] = kept


def own_op(name: str) -> Any:
    """An op with attributes that look at what they are."""

    def reference(xp: Any, x: Any, *, k: float, flag: bool, count: int) -> Any:
        return x * k + 10.0 * count if flag is True else x * k

    rows = Tensor("*m n", "T")
    attrs = {"k": 1.0, "flag": False, "count": 1}
    return Op(
        name, inputs={"x": rows}, outputs={"out": rows}, dtypes={"T": FLOATS}, attrs=attrs, reference=reference,
        kernel="nowhere:K",
    )  # fmt: skip


def test_a_declared_ops_attributes_are_told_apart() -> None:
    run, x = ct.register(own_op("told_apart")), torch.ones(1, 2)
    for k in (0.0, -0.0, 0, 0.0, -0.0):
        assert (torch.signbit(run(x, k)) == (math.copysign(1, k) < 0)).all()


def test_random_calls_compute_what_plain_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn part; ``tests/fuzz/constants.py`` makes as many calls as one likes."""
    seed = 20261128  # the same calls in every run: a failure is the change's
    print("seed", seed)
    monkeypatch.setenv("NUMBER_OF_THE_FUZZ", "1.0")
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        assert sum(fuzz("torch", 60, seed).values()) == 60


def by_factor(xp: Any, x: Any, *, by: Any) -> Any:
    return x * by


def test_a_partial_function_is_compiled_with_its_arguments() -> None:
    for by in (2.0, 3.0, 4.0):
        given = functools.partial(by_factor, by=by)
        run = ct.fused(given)

        def both(x: Any, w: Any, f: Any = given, run: Any = run) -> Any:
            return run(x), ct.linear(x, w, epilogue=f)

        fused, out = torch.compile(both, fullgraph=True, backend="eager")(X, W)
        assert factor(fused, X) == pytest.approx(by) and factor(out, X @ W.T) == pytest.approx(by, rel=1e-5)


def test_a_function_that_is_made_in_what_is_compiled_has_the_numbers_of_now() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> Any:
        k = 3.0
        return ct.linear(x, w, epilogue=lambda xp, acc: acc * k * SCALE)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for scale in (2.0, 5.0, 4.0, 2.0):
        globals()["SCALE"] = scale
        assert factor(compiled(X, W), X @ W.T) == pytest.approx(3 * scale, rel=1e-5)
    globals()["SCALE"] = 2.0


class Level(enum.IntEnum):
    LOW, HIGH = 3, 5


class Power(enum.IntEnum):
    FIVE = 5


def by_level(xp: Any, x: Any, *, by: Any = Level.LOW) -> Any:
    return x * by.value * TABLE["a, b"]


TABLE = {"a, b": 1.0}


def test_members_and_texts_with_commas_are_compiled() -> None:
    fused_by_level = ct.fused(by_level)

    def both(x: Any, w: Any, by: Any) -> Any:
        made = ct.linear(x, w, epilogue=lambda xp, acc: acc * TABLE["a, b"] * sum(NUMBERS) * Power.FIVE)
        return fused_by_level(x, by=by), ct.linear(x, w, epilogue=by_level, by=by), made

    run = torch.compile(both, fullgraph=True, backend="eager")
    for by, number in ((Level.HIGH, 1.0), (Level.LOW, 1.0), (Level.LOW, 2.0)):
        TABLE["a, b"] = NUMBERS[0] = number
        fused, out, made = run(X, W, by)
        assert factor(fused, X) == pytest.approx(by * number)
        assert factor(out, X @ W.T) == pytest.approx(by * number, rel=1e-5)
        assert factor(made, X @ W.T) == pytest.approx(5 * number * (number + 1), rel=1e-5)
    TABLE["a, b"] = NUMBERS[0] = 1.0


NUMBERS = [1.0, 1.0]
