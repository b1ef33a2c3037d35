"""Rotations of one tensor in the graph pass, as models write them: pairs, halves, complex numbers, angles of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_ops_torch import inductor
from cute_ops_torch.inductor import choice
from tests.torch.drawn_programs import enabled, through_autograd

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    inductor.replaced.clear()
    with enabled():
        yield


# Of heads x, [batch, positions, heads, columns], and angles, [positions, columns / 2].


def by_complex(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    table = torch.polar(torch.ones_like(angles), angles).view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def by_conjugate(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    table = torch.polar(torch.ones_like(angles), -angles)[None, :, None].conj()
    return torch.view_as_real(table * pairs).to(x.dtype).flatten(-2)


def by_stored_pairs(x: Tensor, angles: Tensor) -> Tensor:
    table = torch.stack((angles.cos(), angles.sin()), -1)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.view_as_complex(table)[None, :, None]).flatten(3).type_as(x)


def of_chunked_halves(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(torch.stack(torch.chunk(x.transpose(1, 2).float(), 2, dim=-1), dim=-1))
    made = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).type_as(x)
    made = torch.cat(torch.chunk(made, 2, dim=-1), dim=-2)
    return made.reshape(made.shape[0], made.shape[1], made.shape[2], -1).transpose(1, 2)


def by_stack(x: Tensor, angles: Tensor) -> Tensor:
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    wide = x.float().reshape(*x.shape[:-1], -1, 2)
    c = table.view(1, wide.size(1), 1, wide.size(3), 2)
    first = wide[..., 0] * c[..., 0] - wide[..., 1] * c[..., 1]
    second = wide[..., 1] * c[..., 0] + wide[..., 0] * c[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


def by_unbind(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype).flatten(-2)


def by_strided_slices(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., ::2].float(), x[..., 1::2].float()
    cos, sin = (t[None, :, None] for t in (angles.cos(), angles.sin()))
    return torch.stack((cos * a - sin * b, cos * b + sin * a), dim=-1).reshape(x.shape).to(x.dtype)


def by_repeated_pairs(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (t.repeat_interleave(2, dim=1).float()[None, :, None] for t in (angles.cos(), angles.sin()))
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def by_stacked_angles(x: Tensor, angles: Tensor) -> Tensor:
    twice = torch.stack((angles, angles), -1).flatten(-2)[:, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * twice.cos() + turned * twice.sin()).to(x.dtype)


def by_chunks(x: Tensor, angles: Tensor) -> Tensor:
    a, b = torch.chunk(x.float(), 2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


def by_negative_angles(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[None, :, None], (-angles).sin()[None, :, None]
    a, b = x.float().chunk(2, dim=3)
    return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), 3).type_as(x)


def by_repeated_halves(x: Tensor, angles: Tensor) -> Tensor:
    twice, h = angles.repeat(1, 2)[None, :, None], x.size(-1) // 2
    turned = torch.cat((-x[..., h:], x[..., :h]), -1)
    return (x * twice.cos() + turned * twice.sin()).to(x.dtype)


def heads_first(x: Tensor, angles: Tensor) -> Tensor:
    return by_stack(x, angles) if x.shape[1] < 2 else by_halves_of_heads(x.transpose(1, 2), angles).transpose(1, 2)


def by_halves_of_heads(x: Tensor, angles: Tensor) -> Tensor:
    twice = torch.cat((angles, angles), -1)
    a, b = x.chunk(2, -1)
    return (x * twice.cos() + torch.cat((-b, a), -1) * twice.sin()).to(x.dtype)


PAIRS = (
    by_complex, by_conjugate, by_stored_pairs, by_stack, by_unbind, by_strided_slices, by_repeated_pairs,
    by_stacked_angles,
)  # fmt: skip
HALVES = (of_chunked_halves, by_chunks, by_negative_angles, by_repeated_halves, heads_first)
COMPLEX = (by_complex, by_conjugate, by_stored_pairs, of_chunked_halves)


def exactly(x: Tensor, angles: Tensor, pairs: bool) -> Tensor:
    """In float64."""
    x, cos, sin = x.double(), angles.double().cos()[:, None], angles.double().sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    both = a * cos - b * sin, b * cos + a * sin
    return torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)


def drawn(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads, perhaps a part of a packed projection or with positions behind them, and angles."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    b, s, h, d = rng.randint(1, 3), rng.choice((1, 2, 7, 33)), rng.randint(1, 5), 2 * rng.choice((2, 4, 5, 32))
    layout = rng.choice(("rows", "packed", "heads first"))
    x = torch.randn((b, h, s, d) if layout == "heads first" else (b, s, h, d), generator=generator)
    if layout == "packed":
        x = torch.randn(b, s, h + 2, d, generator=generator)
    return x.to(dtype), 3 * torch.randn(s, d // 2, generator=generator)


def results(function: Callable[..., Any], x: Tensor, angles: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The function's value of heads and the gradient to the tensor that they are a part of."""
    whole = x.detach().clone().requires_grad_()
    part = whole.transpose(1, 2) if whole.shape[2] == len(angles) and whole.shape[1] != len(angles) else whole
    out = function(part[:, :, :heads], angles)
    weights = (3 * torch.arange(out.numel()).reshape(out.shape) % 7 - 3).to(out.dtype)
    (out * weights).sum().backward()
    assert whole.grad is not None
    return out.detach(), whole.grad


def lies(x: Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("form", [*PAIRS, *HALVES], ids=lambda form: form.__name__)
def test_rotations(form: Callable[..., Tensor]) -> None:
    """Values and gradients beside float64, no worse than the program's own; one op."""
    rng = random.Random(form.__name__)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, angles = drawn(rng.randrange(1000), dtype)
        heads = max(1, min(x.shape[1:3]) - 2)
        torch._dynamo.reset()
        inductor.replaced.clear()
        got = results(torch.compile(form, backend=through_autograd, fullgraph=True), x, angles, heads)
        assert dict(inductor.replaced) == {"rope": 1}, (dtype, x.shape, inductor.report())
        plain = results(form, x, angles, heads)
        exact = results(lambda x, angles: exactly(x, angles, form in PAIRS), x.double(), angles, heads)
        for ours, own, want in zip(got, plain, exact, strict=True):
            assert (ours.dtype, ours.shape, lies(ours)) == (own.dtype, own.shape, lies(own))
            error, theirs = ((each.double() - want).norm().item() for each in (ours, own))
            assert error <= 1.1 * theirs + 3e-7 * want.norm().item(), (form, dtype, x.shape)


def hyperbolic(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos + a * sin), -1)


def exchanged(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((b * cos + a * sin, a * cos - b * sin), -1).flatten(-2)


def pairs_by_halves(x: Tensor, angles: Tensor) -> Tensor:
    twice = angles.repeat(1, 2)[:, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * twice.cos() + turned * twice.sin()


def halves_by_pairs(x: Tensor, angles: Tensor) -> Tensor:
    twice = angles.repeat_interleave(2, dim=-1)[:, None]
    a, b = x.chunk(2, -1)
    return x * twice.cos() + torch.cat((-b, a), -1) * twice.sin()


def unequal_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    both = torch.stack((angles, angles + 0.5), -1).flatten(-2)[:, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * both.cos() + turned * both.sin()


def by_scaled_complex(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    table = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(pairs * table + pairs).flatten(3)


def by_inverse(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * pairs).flatten(3)


OTHERS = (hyperbolic, exchanged, pairs_by_halves, halves_by_pairs, unequal_neighbours, by_scaled_complex, by_inverse)


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_what_is_no_rotation(form: Callable[..., Tensor]) -> None:
    x, angles = torch.randn(2, 7, 3, 8), 3 * torch.randn(7, 4)
    got = results(torch.compile(form, backend=through_autograd, fullgraph=True), x, angles, 3)
    assert "rope" not in inductor.replaced
    for ours, own in zip(got, results(form, x, angles, 3), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [by_complex, by_stack, by_repeated_halves])
def test_angles_that_are_learned_keep_the_program(form: Callable[..., Tensor]) -> None:
    x, angles = torch.randn(2, 7, 3, 8), torch.randn(7, 4).requires_grad_()
    compiled = torch.compile(form, backend=through_autograd, fullgraph=True)
    ours, own = (torch.autograd.grad(run(x, angles).cos().sum(), angles)[0] for run in (compiled, form))
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)
    assert "rope" not in inductor.replaced
    assert "its angles have a gradient" in {entry.why for entry in inductor.report()}


@pytest.mark.parametrize("form", [by_complex, by_repeated_pairs, heads_first])
def test_lengths_that_are_not_known(form: Callable[..., Tensor]) -> None:
    compiled = torch.compile(form, backend=through_autograd, fullgraph=True)
    for s in (7, 9, 12):
        x, angles = torch.randn(2, s, 3, 8), torch.randn(s, 4)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(angles, 0)
        torch.testing.assert_close(compiled(x, angles), form(x, angles), rtol=1e-5, atol=1e-5)
    assert dict(inductor.replaced) == {"rope": 1}


@pytest.mark.parametrize("form", [by_stack, by_chunks, *COMPLEX])
def test_a_gpu_keeps_what_inductor_has_in_one_pass(form: Callable[..., Tensor], monkeypatch: Any) -> None:
    """On a GPU rotations of complex numbers are ours, of which Inductor has no code; others if both forms are timed."""
    for timed in (False, True):
        torch._dynamo.reset()
        inductor.replaced.clear()
        inductor.disable()
        monkeypatch.setattr(choice, "asked_for", lambda device, timed=timed: timed)
        monkeypatch.setattr(choice, "DEVICE", "cpu")
        with enabled():
            torch.compile(form, backend=through_autograd, fullgraph=True)(torch.randn(2, 7, 3, 8), torch.randn(7, 4))
            assert dict(inductor.replaced) == ({"rope": 1} if timed or form in COMPLEX else {})
            reasons = [entry.why for entry in inductor.report() if "cos" in entry.what]
            assert timed or form in COMPLEX or choice._STAYS in reasons
