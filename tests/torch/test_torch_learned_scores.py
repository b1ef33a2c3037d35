"""Gradients of arrays that a change of scores reads, in PyTorch: against float64, and always with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import mods
from tests.torch.test_torch_attention import EITHER

Tensor = torch.Tensor


def of_head(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any) -> Any:
    return score + a[head, q - (k.size - q.size), k]


def of_tokens(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any, c: Any) -> Any:
    return score * a[batch, q] + c[head, k]


def in_buckets(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any) -> Any:
    return score + a[xp.where(k <= q, xp.minimum(q - k, 8), 8 + xp.minimum(xp.floor((k - q) / 16), 7)), head]


def by_place(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any, place: Any) -> Any:
    return score + a[place[q - (k.size - q.size), k], head]


def by_kind(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any, kind: Any) -> Any:
    return score + 2 * a[kind[batch, q], kind[batch, k]]


def with_slopes(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any) -> Any:
    return mods.alibi(xp, score, batch, head, q, k, a)


def by_distance(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any) -> Any:
    return mods.relative_bias(xp, score, batch, head, q, k, a)


def of_example(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, a: Any) -> Any:
    return mods.bias(xp, score, batch, head, q, k, a)


class Drawn:
    """A call: sizes, a change of scores, what it reads, and the same change of whole arrays of scores."""

    def __init__(self, seed: int, device: str) -> None:
        draw, self.device = random.Random(seed), device
        longest = 40 if device == "cpu" else 400
        torch.manual_seed(seed)
        self.b, self.g = draw.choice([1, 2, 5]), draw.randint(1, 2)
        self.h, self.t = self.g * draw.randint(1, 3), draw.randint(1, longest)
        self.s = draw.choice([self.t, draw.randint(1, self.t)])
        self.d = draw.choice([16, 32, 64, 64, 128, 128, 192, 256])
        self.e = self.d if draw.random() < 0.7 else 64
        self.causal = draw.random() < 0.4
        self.function = (of_head, of_tokens, in_buckets, by_place, by_kind, with_slopes, by_distance, of_example)[
            seed % 8
        ]
        self.more, n = draw.choice([0, 0, 3]), draw.choice([self.t, 7])  # elements behind the last one; distances

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).requires_grad_()

        def ints(*shape: int) -> Tensor:
            return torch.randint(9, shape, device=device)

        b, h, s, t, more = self.b, self.h, self.s, self.t, self.more
        self.captured: tuple[Tensor, ...] = {
            of_head: lambda: (floats(h, s + more, t + more),), of_tokens: lambda: (floats(b, t), floats(h, t + more)),
            in_buckets: lambda: (floats(16, h),), by_place: lambda: (floats(9, h), ints(s, t)),
            by_kind: lambda: (floats(9, 9), ints(b, t)), with_slopes: lambda: (floats(h),),
            by_distance: lambda: (floats(h, 2 * n + 1),), of_example: lambda: (floats(b, h, s, t),),
        }[self.function]()  # fmt: skip

    def changed(self, scores: Tensor, arrays: list[Tensor]) -> Tensor:
        """What the change makes of scores (b, h, s, t)."""
        a, *others = arrays
        q, k = (
            torch.arange(self.t - self.s, self.t, device=self.device)[:, None],
            torch.arange(self.t, device=self.device),
        )
        far = torch.where(k <= q, (q - k).clamp(max=8), 8 + ((k - q) // 16).clamp(max=7))
        middle = a.shape[-1] // 2
        made: dict[Any, Callable[[], Tensor]] = {
            of_head: lambda: scores + a[:, : self.s, : self.t],
            of_tokens: lambda: scores * a[:, None, self.t - self.s :, None] + others[0][:, None, : self.t],
            in_buckets: lambda: scores + a[far].permute(2, 0, 1),
            by_place: lambda: scores + a[others[0]].permute(2, 0, 1),
            by_kind: lambda: scores + 2 * a[others[0][:, self.t - self.s :, None], others[0][:, None]][:, None],
            with_slopes: lambda: scores - a[:, None, None] * (q - k).abs(),
            by_distance: lambda: scores + a[:, (q - k + middle).clamp(0, a.shape[-1] - 1)],
            of_example: lambda: scores + a,
        }
        return made[self.function]()


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("seed", range(32))
def test_gradients(seed: int, device: str) -> None:
    call = Drawn(seed, device)
    q, k, v = (
        torch.randn(call.b, length, heads, d, dtype=torch.bfloat16, device=device)
        for length, heads, d in ((call.s, call.h, call.d), (call.t, call.g, call.d), (call.t, call.g, call.e))
    )
    wanted = [x for x in call.captured if x.requires_grad]
    unwritten = torch.full((1 << 22,), float("nan"), device=device)
    del unwritten  # what is allocated next begins as NaN
    out, lse = cute_ops_torch.attention(q, k, v, causal=call.causal, score_mod=call.function, captured=call.captured)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found, again = (torch.autograd.grad([out, lse], wanted, [dout, dlse], retain_graph=True) for _ in range(2))
    with torch.enable_grad():
        wide = [x.detach().double() if x.requires_grad else x for x in call.captured]
        leaves = [x.requires_grad_() for x in wide if x.is_floating_point()]
        share = call.h // call.g
        keys, values = (x.double().repeat_interleave(share, 2) for x in (k, v))
        scores = call.changed(torch.einsum("bshd,bthd->bhst", q.double(), keys) * call.d**-0.5, wide)
    weights = (scores - lse.double()[..., None]).exp()
    if call.causal:
        weights = weights.tril(call.t - call.s)
    delta = (out.double() * dout.double()).sum(-1).transpose(1, 2) - dlse
    products = torch.einsum("bshe,bthe->bhst", dout.double(), values)
    right = torch.autograd.grad(scores, leaves, weights.detach() * (products - delta[..., None]).detach())
    for x, same, y in zip(found, again, right, strict=True):
        assert torch.equal(x, same)
        assert (x - y).norm() <= 1e-3 * y.norm() + 1e-5
