"""Captured numbers in compiled graphs of PyTorch; those of plain calls are in tests/contract."""

from __future__ import annotations

import enum
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ops_torch as ct

X, W = torch.randn(4, 6), torch.randn(8, 6)
SCALE = 2.0


def factor(out: torch.Tensor, of: torch.Tensor) -> float:
    """By which the largest element was multiplied."""
    place = of.abs().argmax()
    return (out.flatten()[place] / of.flatten()[place]).item()


def product(function: Callable[..., Any], **attrs: Any) -> torch.Tensor:
    return ct.linear(X, W, epilogue=function, **attrs)


class Layer:
    scale = 2.0

    def epilogue(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale

    def __call__(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale


def test_an_object_whose_method_was_an_epilogue_is_freed() -> None:
    layer = Layer()
    for epilogue in (layer.epilogue, layer):
        product(epilogue)
    gone = weakref.ref(layer)
    del layer, epilogue
    gc.collect()
    assert gone() is None


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
