"""Functions of every kind in functions that torch.compile compiles whole: as epilogues, and behind ``fused``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch

X, WEIGHT, NORM = torch.randn(4, 6), torch.randn(8, 6), torch.ones(6)


class Scale:
    """A callable object, with methods of every kind."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, xp: Any, x: Any) -> Any:
        return x * self.by

    def method(self, xp: Any, x: Any) -> Any:
        return x * self.by

    def twice(self, xp: Any, x: Any, *, by: float) -> Any:
        return x * self.by * by

    @classmethod
    def of_class(cls, xp: Any, x: Any) -> Any:
        return x * 2.0

    @staticmethod
    def static(xp: Any, x: Any) -> Any:
        return x * 2.0


class Layer(nn.Module):
    """A module whose method is the epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.by = 2.0

    def epilogue(self, xp: Any, x: Any) -> Any:
        return x * self.by


def plain(xp: Any, x: Any) -> Any:
    return x * 2.0


def scaled(xp: Any, x: Any, *, by: float) -> Any:
    return x * by


SCALE, LAYER = Scale(2.0), Layer()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "function": plain, "method": SCALE.method, "module's": LAYER.epilogue, "class's": SCALE.of_class,
    "static": Scale.static, "object": SCALE, "partial": functools.partial(scaled, by=2.0),
    "partial method": functools.partial(SCALE.twice, by=1.0), "lambda": lambda xp, x: x * 2.0,
}  # fmt: skip


def closure(x: torch.Tensor) -> Callable[..., Any]:
    by = 2.0
    return lambda xp, acc: acc * by


def of_shape(x: torch.Tensor) -> Callable[..., Any]:
    by = x.shape[0] / 2

    def function(xp: Any, acc: Any) -> Any:
        return acc * by

    return function


def nested(x: torch.Tensor) -> Callable[..., Any]:
    inner = closure(x)
    return lambda xp, acc: inner(xp, acc)


def with_default(x: torch.Tensor) -> Callable[..., Any]:
    by = 2.0

    def function(xp: Any, acc: Any, *, by: float = by) -> Any:
        return acc * by

    return function


def partly(x: torch.Tensor) -> Callable[..., Any]:
    by = x.shape[0] / 2
    return functools.partial(scaled, by=by)


MADE_INSIDE = (closure, of_shape, nested, with_default, partly)


def linear(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return cute_ops_torch.linear(x, WEIGHT, epilogue=function)


def rmsnorm_linear(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return cute_ops_torch.rmsnorm_linear(x, NORM, WEIGHT, epilogue=function)


def check(run: Callable[[torch.Tensor], Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), run(X))


@pytest.mark.parametrize(
    ("call", "name"), [*((linear, name) for name in FUNCTIONS), (rmsnorm_linear, "method"), (rmsnorm_linear, "partial")]
)
def test_epilogues(call: Callable[..., Any], name: str) -> None:
    check(lambda x: call(FUNCTIONS[name], x))


@pytest.mark.parametrize("make", MADE_INSIDE, ids=lambda make: make.__name__)
def test_epilogues_that_are_made_inside(make: Callable[..., Any]) -> None:
    check(lambda x: linear(make(x), x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_epilogues_that_close_over_a_number_of_the_call(dynamic: bool | None) -> None:
    def run(x: torch.Tensor, by: float) -> Any:
        def inner(acc: Any) -> Any:
            return acc * by

        return linear(lambda xp, acc: inner(acc) + by, x)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=dynamic)
    for by in (0.5, 0.75, 3.0, 0.5):
        assert torch.equal(compiled(X, by), run(X, by))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_behind_fused(name: str) -> None:
    function = cute_ops_torch.fused(FUNCTIONS[name])
    check(lambda x: function(x))


@pytest.mark.slow
def test_a_number_that_changes_makes_another_graph() -> None:
    """That of an object whose method is the epilogue, alone or in a partial function."""
    for make in (lambda s: s.method, lambda s: functools.partial(s.twice, by=1.0), lambda s: s):
        torch._dynamo.reset()
        scale = Scale(2.0)
        compiled = torch.compile(lambda x, s=scale, m=make: linear(m(s), x), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X), X @ WEIGHT.T * 2.0)
        scale.by = 3.0
        torch.testing.assert_close(compiled(X), X @ WEIGHT.T * 3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda x: linear(Scale(2.0).method, x), "its `by` cannot be read: make it outside"),
        (lambda x: linear(Scale(2.0), x), "its `by` cannot be read: make it outside"),
        (lambda x: cute_ops_torch.fused(plain)(x), "cute_ops_torch.fused: call it outside of what torch.compile"),
    ],
)
def test_what_cannot_be_in_a_whole_graph_says_so(run: Callable[[torch.Tensor], Any], said: str) -> None:
    """Without ``fullgraph`` it runs."""
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        torch.compile(run, fullgraph=True, backend="eager")(X)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, backend="eager")(X), run(X))
