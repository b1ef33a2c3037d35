"""Captured numbers in compiled graphs of PyTorch; those of plain calls are in tests/contract."""

from __future__ import annotations

import enum
import functools
import gc
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


NUMBER: Any = 2.0


def of_defaults(x: Any, k: float = 2.0, *, by: float = 1.0) -> Any:
    return x * k * by


PARTLY = functools.partial(of_defaults, k=2.0)


class Held:
    scale = np.float64(2.0)

    def epilogue(self, xp: Any, acc: Any) -> Any:
        return acc * self.scale


HELD = Held()


def _numbers(kind: Callable[[float], Any]) -> tuple[Callable[..., Any], list[Callable[[], Any]]]:
    return lambda xp, acc: acc * NUMBER, [lambda k=k: globals().update(NUMBER=kind(k)) for k in (2, 5, 2)]


# An epilogue, and what makes it multiply by 2, by 5 and by 2 again.
READ: dict[str, tuple[Callable[..., Any], list[Callable[[], Any]]]] = {
    "float64": _numbers(np.float64),
    "float32": _numbers(np.float32),
    "int64": _numbers(np.int64),
    "numbers of an object": (HELD.epilogue, [lambda k=k: setattr(HELD, "scale", np.float32(k)) for k in (2, 5, 2)]),
    "defaults of a helper": (
        lambda xp, acc: of_defaults(acc), [lambda k=k: setattr(of_defaults, "__defaults__", (k,)) for k in (2, 5, 2)],
    ),
    "keyword defaults of a helper": (
        lambda xp, acc: of_defaults(acc, 1.0),
        [lambda k=k: setattr(of_defaults, "__kwdefaults__", {"by": float(k)}) for k in (2, 5, 2)],
    ),
    "a partial that is rebound": (
        lambda xp, acc: PARTLY(acc),
        [lambda k=k: globals().update(PARTLY=functools.partial(of_defaults, k=k, by=1.0)) for k in (2, 5, 2)],
    ),
    "a partial's keywords": (
        lambda xp, acc: PARTLY(acc, by=1.0), [lambda k=k: PARTLY.keywords.update(k=k) for k in (2, 5, 2)],
    ),
    "members of enumerations": (
        lambda xp, acc: acc * (2 if len(repr(NUMBER)) > 3 else 5),
        [lambda k=k: globals().update(NUMBER=k) for k in (Level.LOW, 3, Level.LOW)],
    ),
    "the sign of zero": (
        lambda xp, acc: acc * (5 if math.copysign(1, NUMBER) < 0 else 2),
        [lambda k=k: globals().update(NUMBER=k) for k in (0.0, -0.0, 0.0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_compiled_graph_sees_what_eager_calls_see(name: str) -> None:
    epilogue, changes = READ[name]
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(lambda x, w: ct.linear(x, w, epilogue=epilogue), fullgraph=True, backend=graphs)
    try:
        for change, wanted in zip(changes, (2, 5, 2), strict=True):
            change()
            for run in (compiled, lambda x, w: ct.linear(x, w, epilogue=epilogue)):
                assert factor(run(X, W), X @ W.T) == pytest.approx(wanted, rel=1e-5)
    finally:
        of_defaults.__defaults__, of_defaults.__kwdefaults__ = (2.0,), {"by": 1.0}
    assert graphs.frame_count == 2  # that of 2 is found again


@pytest.mark.parametrize("name", ["linear", "fused"])
def test_the_sign_of_an_attribute_that_is_zero_is_compiled(name: str) -> None:
    def by_sign(xp: Any, x: Any, *, k: float = 1.0) -> Any:
        return x * (-1.0 if math.copysign(1, k) < 0 else 1.0)

    by_sign_of = ct.fused(by_sign)

    def call(x: torch.Tensor, w: torch.Tensor, k: float) -> Any:
        return by_sign_of(x, k=k) if name == "fused" else ct.linear(x, w, epilogue=by_sign, k=k)

    torch._dynamo.reset()
    compiled, plain = torch.compile(call, fullgraph=True, backend="eager"), call(X, W, 1.0)
    for k in (0.0, -0.0, 0.0, -0.0):
        assert factor(compiled(X, W, k), plain) == math.copysign(1, k)


def test_what_a_graph_keeps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What a function reads of the environment cannot be guarded."""

    def of_environment(xp: Any, acc: Any) -> Any:
        return acc * float(os.environ.get("NO_SUCH_NUMBER", "2"))

    torch._dynamo.reset()
    with caplog.at_level("INFO", "cute_ops"):
        torch.compile(lambda x, w: ct.linear(x, w, epilogue=of_environment), backend="eager")(X, W)
    said = [record.getMessage() for record in caplog.records if "of_environment" in record.getMessage()]
    assert "of_environment keeps in a compiled graph what it reads now: it uses `" in said[0]


@pytest.mark.slow
def test_no_graph_keeps_an_object_alive() -> None:
    def use() -> weakref.ref[Layer]:
        layer = Layer()
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, w, of: ct.linear(x, w, epilogue=of.epilogue), fullgraph=True, backend="eager"
        )
        compiled(X, W, layer)
        return weakref.ref(layer)

    gone = use()
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_an_object_that_is_changed_in_what_is_compiled_is_refused() -> None:
    layer = Layer()

    def change(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        layer.scale = 5.0
        return ct.linear(x, w, epilogue=layer.epilogue)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="its `scale` cannot be read: make it outside"):
        torch.compile(change, fullgraph=True, backend="eager")(X, W)
    torch._dynamo.reset()
    layer.scale = 2.0
    assert factor(torch.compile(change, backend="eager")(X, W), X @ W.T) == pytest.approx(5.0, rel=1e-5)


def _with_cell() -> tuple[Callable[..., Any], Callable[[float], None]]:
    k = 1.0

    def change(number: float) -> None:
        nonlocal k
        k = number

    return (lambda xp, x: x * k), change


def _with_global() -> tuple[Callable[..., Any], Callable[[float], None]]:
    def change(number: float) -> None:
        global SCALE
        SCALE = number

    return (lambda xp, x: x * SCALE), change


def _with_list() -> tuple[Callable[..., Any], Callable[[float], None]]:
    held = [1.0]

    def change(number: float) -> None:
        held[0] = number

    return (lambda xp, x: x * sum(held)), change


def _with_object() -> tuple[Callable[..., Any], Callable[[float], None]]:
    layer = Layer()

    def change(number: float) -> None:
        layer.scale = number

    return (lambda xp, x: layer.epilogue(xp, x)), change


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("make", "said"),
    [(_with_cell, "`k`"), (_with_global, "`SCALE`"), (_with_list, "`held`"), (_with_object, "`layer`")],
)
def test_what_compiled_code_changes_before_a_call_is_refused_or_seen(
    make: Callable[[], Any], said: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo makes such changes when a graph has run."""
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    epilogue, change = make()
    of_rows = ct.fused(epilogue)
    first, second = torch.rand(2).add(1.0).tolist()

    def layer(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        outs = []
        for number in (first, second):
            change(number)
            outs.append(of_rows(x) if fused else ct.linear(x, w, epilogue=epilogue))
        return outs

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"an epilogue reads {said}, which is changed in"):
        torch.compile(layer, fullgraph=True, backend="eager")(X, W)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        for out, number in zip(compiled(X, W), (first, second), strict=True):
            assert factor(out, X if fused else X @ W.T) == pytest.approx(number, rel=1e-5)


def test_an_object_that_is_made_in_what_is_compiled_is_refused() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        own = Layer()
        return ct.linear(x, w, epilogue=lambda xp, acc: acc * own.scale)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="closes over an object that is made in a function that"):
        torch.compile(layer, fullgraph=True, backend="eager")(X, W)
    torch._dynamo.reset()
    assert factor(torch.compile(layer, backend="eager")(X, W), X @ W.T) == pytest.approx(2.0, rel=1e-5)
