"""Operands that lie as their declarations say: read in place, copied or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import lookup
from cute_ops.ops.gemm.linear import linear
from cute_ops_torch.host import launch
from cute_ops_torch.host.launch import Launcher

LYING = lookup.load(str(Path(__file__).parents[1] / "core" / "kernels" / "lying.py"))
by_columns, aligned = (cute_ops_torch.register(op) for op in (LYING.by_columns, LYING.aligned))


def columns(*shape: int) -> torch.Tensor:
    """A matrix whose columns are contiguous."""
    return torch.randn(shape[::-1]).t()


def operands(*lead: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(*lead, 8), columns(8, 4), torch.randn(4, 3)[:, 1]


def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ w + bias


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> list[tuple[Any, ...]]:
    """The arguments of kernels."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch.cache, "get", lambda variant: lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize("x", [torch.randn(6, 8), columns(6, 8), torch.randn(8, 9).t()[:6], torch.randn(6, 12)[:, :8]])
def test_transposed_operands_are_read_in_place(x: torch.Tensor, seen: list[tuple[Any, ...]]) -> None:
    _, w, bias = operands()
    launcher = Launcher(LYING.by_columns)
    for _ in range(2):
        launcher.launch(x, w, bias)
    for given in seen:
        assert [t.data_ptr() for t in given[:3]] == [x.data_ptr(), w.data_ptr(), bias.data_ptr()]
        # A kernel takes the contiguous dim last, and its entry turns that back.
        assert given[0].stride(-1) == given[1].stride(-1) == 1 and given[1].shape == (4, 8)
    assert len(seen) == 2


def test_weight_of_a_product_by_its_transpose(seen: list[tuple[Any, ...]]) -> None:
    x, weight = torch.randn(3, 5, 8).bfloat16(), torch.randn(8, 16).bfloat16()
    out = Launcher(linear).launch(x, weight.t())
    ((first, second, third),) = seen
    assert [t.data_ptr() for t in (x, weight, out)] == [t.data_ptr() for t in (first, second, third)]
    torch.testing.assert_close(cute_ops_torch.register(linear)(x, weight.t()), x @ weight)


def test_values_through_kernels(compiled: Any) -> None:
    compiled.ops["by_columns"] = LYING.by_columns
    for x in (torch.randn(2, 3, 8), torch.randn(8, 6).t().view(2, 3, 8), torch.randn(8, 2, 3).permute(1, 2, 0)):
        _, w, bias = operands()
        torch.testing.assert_close(Launcher(LYING.by_columns).launch(x, w, bias), plain(x, w, bias))


def test_a_dim_that_must_be_contiguous() -> None:
    x, w, bias = operands(6)
    with pytest.raises(ValueError, match=r"`w` has strides \(4, 1\), expected 1 in k\.\n"):
        by_columns(x, w.contiguous(), bias)
    with pytest.raises(ValueError, match=r"`x` has strides \(16, 2\), expected 1 in k or m\.\n"):
        by_columns(torch.randn(6, 16)[:, ::2], w, bias)


def ways(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "eager": function,
        "compile": torch.compile(function, fullgraph=True),
        "dynamic": torch.compile(function, fullgraph=True, dynamic=True),
        "vmap": lambda x, *more: torch.vmap(function, (0, None, None))(x[:, None], *more)[:, 0],
        "vmap of columns": lambda x, *more: torch.vmap(function, (1, None, None), 1)(x[:, None], *more)[:, 0],
        "vmap of a weight": lambda x, w, b: torch.vmap(function, (None, 0, None))(x, w[None], b)[0],
    }


@pytest.mark.parametrize("way", ways(by_columns))
@pytest.mark.parametrize("turned", [False, True])
def test_gradients(way: str, turned: bool) -> None:
    """The backward wants a cotangent by columns: one that lies otherwise is copied, since nobody chose its strides."""
    torch._dynamo.reset()
    x, w, bias = (t.requires_grad_() for t in operands(6))
    x = (x.detach().t().contiguous().t() if turned else x.detach()).requires_grad_()
    for finish in (lambda out: out.sin().sum(), lambda out: out.sum(), lambda out: (out.t() * columns(6, 4).t()).sum()):
        torch.manual_seed(0)
        expected = torch.autograd.grad(finish(plain(x, w, bias)), (x, w, bias))
        torch.manual_seed(0)
        found = torch.autograd.grad(finish(ways(by_columns)[way](x, w, bias)), (x, w, bias))
        torch.testing.assert_close(found, expected)


def test_torch_checks_the_registration() -> None:
    torch.library.opcheck(torch.ops.cute.by_columns.default, operands(6))


def test_what_is_not_aligned(compiled: Any) -> None:
    compiled.ops["aligned"] = LYING.aligned
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    launcher = Launcher(LYING.aligned)
    for other in (columns(4, 8), y, torch.randn(8, 5).t()[:4], torch.randn(33)[1:].view(8, 4).t()):
        for _ in range(2):
            torch.testing.assert_close(launcher.launch(x, other), x + other)
        out = torch.empty(4, 8)
        launcher.into(x, other, out)
        torch.testing.assert_close(out, x + other)
    odd = torch.randn(33)[1:].view(4, 8)
    for wrong, problem in ((odd, "lies 4 bytes off a multiple of 16"), (torch.randn(4, 9)[:, :8], "stride of 9 elem")):
        for call in (launcher.launch, aligned):
            with pytest.raises(ValueError, match=f"`x` .*{problem}"):
                call(wrong, y)
    with pytest.raises(ValueError, match="`y` has a stride of 3 elements, expected a multiple of 4: pad its rows"):
        aligned(x[:3], y[:3])
