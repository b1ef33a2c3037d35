"""The internal op that multiplies each row by a number, with which the loss's backward scales its gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ops_torch
from cute_ops.declaration.shapes import FLOATS
from cute_ops.ops import scale
from cute_ops.tools.verify import installed, verify
from cute_ops_torch.library import scaled_gradient
from cute_ops_torch.library.inplace import inplace_gradient, overwriting
from cute_ops_torch.library.scaled_gradient import scale as scale_gradient
from cute_ops_torch.library.scaled_gradient import scale_ as scale_gradient_
from cute_ops_torch.registry import family

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUMBERS = (1.0, -1.7, 1 / 3, 0.0, 1e30, 1e-30, math.nan, math.inf)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.stride() == b.stride()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_every_case(device: str) -> None:
    """Kernels where there is a GPU, the reference elsewhere."""
    verdicts = list(verify([scale], installed(["torch"]), repeats=2))
    assert len(verdicts) == len(scale.cases) * len(FLOATS)
    assert not [v for v in verdicts if v.problem]
    assert device == "cpu" or {v.device for v in verdicts} == {"cuda"}


def test_as_torch_wants_ops_to_be() -> None:
    x, factor = torch.randn(3, 5, 7), torch.randn(3, 5)
    torch.library.opcheck(torch.ops.cute.scale.default, (x, factor))
    with pytest.raises(ValueError, match=r"^cute\.scale: argument `factor` has leading dims \(3,\), but \*m=\(3, 5\)"):
        torch.ops.cute.scale(x, factor[:, 0])
    with pytest.raises(NotImplementedError, match=r"^cute\.scale: has no gradient of its own"):
        torch.ops.cute.scale(x.requires_grad_(), factor).sum().backward()


class OnDevice(torch.Tensor):
    """A stand-in for what kernels run on."""

    is_cuda = True


def test_kernels_in_place_get_no_negated_views() -> None:
    """Their memory is that of what they negate; only the dispatcher knows."""
    x, factor = torch.randn(2, 4), torch.tensor([2.0, -0.5])
    launched: list[torch.Tensor] = []

    def into(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        launched.append(out.copy_(x * factor[:, None]))

    for times in (factor, torch._neg_view(factor)):
        for rows in (x.clone().as_subclass(OnDevice), torch._neg_view(x.clone()).as_subclass(OnDevice)):
            expected = rows * times[:, None]
            torch.testing.assert_close(
                inplace_gradient(scale, torch.ops.cute.scale, SimpleNamespace(into=into))(rows, times), expected
            )
            torch.testing.assert_close(rows, expected)
            assert len(launched) == 1, "of all, only numbers that are what is in memory"


def test_some_outputs_in_place_and_others_new() -> None:
    """A kernel gets None for those that it makes; what no kernel runs on is copied to where it goes."""
    launched: list[int] = []

    def call(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + y, x * y, x - y

    def into(x: torch.Tensor, y: torch.Tensor, *outputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        launched.append(len([out for out in outputs if out is None]))
        made = call(x, y)
        return tuple(new if out is None else out.copy_(new) for new, out in zip(made, outputs, strict=True))[1:]

    for kind in (torch.Tensor, OnDevice):
        x, y = (torch.arange(4.0).add(k).as_subclass(kind) for k in range(2))
        expected, version = call(x.clone(), y), x._version
        found = overwriting(call, into, (0, None, None))(x, y)
        torch.testing.assert_close(found, expected)
        assert found[0].data_ptr() == x.data_ptr() and x._version > version
    assert launched == [2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_place(dtype: torch.dtype, device: str) -> None:
    """Each has a number of its own; those with one stay, whatever is in them."""
    x = torch.randn(len(NUMBERS), 3, 1000, device=device).to(dtype)
    x[..., :3] = torch.tensor([math.nan, -math.inf, -0.0])
    factor = torch.tensor(NUMBERS, device=device)[:, None].expand(-1, 3)
    expected, place = (x.float() * factor[..., None]).to(dtype), x.data_ptr()
    bits = x[0].clone().view(torch.uint8)
    declared, run, into = family("cute", "scale")
    out = inplace_gradient(declared, run, SimpleNamespace(into=into))(x, factor)
    same(out, expected)
    assert out.data_ptr() == x.data_ptr() == place
    assert torch.equal(x[0].view(torch.uint8), bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", NUMBERS)
def test_gradients(number: float, dtype: torch.dtype, device: str) -> None:
    """Of any shape, strides and start: the product in float32, rounded once."""
    line = (3 * torch.randn(9000, device=device)).to(dtype)
    line[5:8] = torch.tensor([math.nan, math.inf, 6e-8])
    factor = torch.tensor(number, device=device)
    for gradient in (
        line[:1], line, line[1:8], line[:8193].view(3, 2731), line[1:106].view(3, 5, 7), line[:0].view(0, 3),
        line[:64].view(8, 8).t(), line[1:8].view(1, 1, 7), line[:60].view(6, 10)[:, ::2], line[:12].view(3, 4)[:, :3],
    ):  # fmt: skip
        expected = (gradient.float() * factor).to(dtype)
        same(scale_gradient(gradient, factor), expected)
        copy = line.clone()
        mine = copy.as_strided(gradient.shape, gradient.stride(), gradient.storage_offset())
        assert scale_gradient_(mine, factor) is mine
        same(mine.clone(memory_format=torch.preserve_format), expected)
        # And nothing beside it.
        mine.copy_(gradient)
        torch.testing.assert_close(copy, line, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_nobody_waits_for_the_device() -> None:
    gradient, factor = torch.randn(512, 2048, device="cuda"), torch.ones((), device="cuda")
    before = gradient.clone()
    scale_gradient_(gradient, factor)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scale_gradient_(gradient, factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(gradient, before)


def test_modes_see_the_scaling_of_gradients_that_are_known() -> None:
    """Calls without a mode before and after scale in place, past the dispatcher; their guard asks for modes."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    hidden, weight, target = torch.randn(6, 16), torch.randn(24, 16), torch.arange(6)

    def gradients(mode: Any) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss = cute_ops_torch.linear_cross_entropy(*leaves, target)
        with mode:
            return torch.autograd.grad(loss, leaves, torch.tensor(-1.7))

    expected = [gradients(contextlib.nullcontext()) for _ in range(3)][-1]
    for mode, times in ((Watch(), 2), (contextlib.nullcontext(), 0)):
        seen.clear()
        torch.testing.assert_close(gradients(mode), expected, rtol=1e-6, atol=1e-6)
        assert seen.count("scaled_gradient.default") == times


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_2_31_elements() -> None:
    gradient = torch.full((2**31 + 4099,), 3.0, dtype=torch.bfloat16, device="cuda")
    assert (scale_gradient_(gradient, torch.tensor(0.5, device="cuda")) == 1.5).all()


@pytest.mark.slow
@pytest.mark.parametrize(("owns", "classes"), [(True, 40), (False, 48)], ids=("owned", "kept"))
def test_a_compiled_backward_scales_what_it_owns(owns: bool, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd gives a backward what its forward saved, unless it may run again."""
    seen: list[int] = []
    in_place = scaled_gradient.scale_
    monkeypatch.setattr(scaled_gradient, "scale_", lambda g, d: (seen.append(g.data_ptr()), in_place(g, d))[1])
    hidden, weight, target = torch.randn(24, 16), torch.randn(classes, 16), torch.randint(0, classes, (24,))

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.linear_cross_entropy(hidden, weight, target, reduction="sum")

    def gradients(factor: float, run: Callable[..., torch.Tensor], times: int) -> Iterator[list[torch.Tensor]]:
        given = [x.clone().requires_grad_() for x in (hidden, weight)]
        whole = factor * run(*given)
        for _ in range(times):
            for each in given:
                each.grad = None
            seen.clear()
            whole.backward(retain_graph=not owns)
            yield [each.grad for each in given if each.grad is not None]

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    for factor in (1.0, -1.7):
        (want,) = gradients(factor, loss, 1)
        for found in gradients(factor, compiled, 1 if owns else 2):
            assert all(map(torch.equal, found, want))
            assert [each.data_ptr() in seen for each in found] == [owns] * 2
