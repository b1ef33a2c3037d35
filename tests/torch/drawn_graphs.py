"""Random graphs as users write them: views, aliases, writes in place, casts, random numbers, autocast, dynamic rows.

Steps of :mod:`tests.torch.drawn_programs` and others run on a pool of tensors, of which results may be views of each
other, and a state and a cache that the graph writes to. A seed draws the steps and how they are compiled and called:
dtypes, autocast, checkpoints, modes, rows, empty ones among them, inputs that share memory, calls with the same state,
gradients that are computed twice. Both passes rewrite the graph; outputs, gradients and what was written to are those
of the graph that AOTAutograd makes without them. More of them than the suite runs: ``python -m tests.torch.drawn_graphs
--count 500``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cute_ops_torch import inductor
from cute_ops_torch.inductor import fusion_choice
from tests.drawing import check_seeds
from tests.torch.drawn_programs import STEPS, H, N, enabled, only_the_pass, with_graphs_after_autograd

Tensor = torch.Tensor


class Pool(NamedTuple):
    """What a step may read: two tiles ``[b, s, N]``, a row, a column ``[b, s, 1]``, a matrix, and what it may write to:
    a row, its halves ``[2, N / 2]``, which may be the same memory, and a tile.
    """

    x: Tensor
    y: Tensor
    r: Tensor
    c: Tensor
    m: Tensor
    state: Tensor
    halves: Tensor
    cache: Tensor


def _as(like: Tensor, made: Tensor) -> Tensor:
    return made.reshape(like.shape).to(like.dtype)


def _alias(p: Pool) -> Tensor:
    made = p.x * 1.5
    rows, turned = made.view(-1, N), made.transpose(0, 1)
    before = F.rms_norm(made, (N,), p.r)
    rows.add_(1.0)
    turned.mul_(0.5)
    return made + before


def _written_after_a_norm(p: Pool) -> Tensor:
    made = p.x + p.y
    normed = F.layer_norm(made, (N,), p.r)
    made[..., : N // 2] = normed[..., N // 2 :]
    return made * normed


def _written_operand(p: Pool) -> Tensor:
    gate = p.x * 2
    out = F.silu(gate + p.y) * p.y
    gate.clamp_(-1, 1)
    return out + F.silu(gate + p.y) * p.y


def _masked(p: Pool) -> Tensor:
    return (p.x * p.r).masked_fill_(p.y > 0.5, 0.25)


def _diagonal(p: Pool) -> Tensor:
    made = p.x.clone()
    made.diagonal(dim1=1, dim2=2).mul_(p.y[:, :, 0])
    return made.sin()


def _indexed(p: Pool) -> Tensor:
    made = p.x.clone()
    made[torch.arange(made.shape[0], device=made.device), 0] += p.r
    return F.gelu(made)


def _running(p: Pool) -> Tensor:
    p.state.mul_(0.9).add_(p.y.detach()[0, 0] * 0.1)
    return (p.x - p.state) * p.r


def _state_before_and_after(p: Pool) -> Tensor:
    first = F.silu(p.x + p.state) * p.y
    p.state.add_(1.0)
    return first + F.silu(p.x + p.state) * p.y


def _copied_state(p: Pool) -> Tensor:
    normed = F.rms_norm(p.x, (N,), p.r)
    p.state.copy_(normed.detach()[0, 0])
    return normed * p.state


def _heads(p: Pool) -> tuple[Tensor, Tensor, Tensor]:
    b, s, _ = p.x.shape
    made = F.linear(p.x, torch.cat((p.m, p.m.t(), p.m * 0.5)))
    q, k, v = made.view(b, s, 3, N // H, H).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _rotate(t: Tensor, angle: Tensor) -> Tensor:
    low, high = t.chunk(2, -1)
    return t * angle.cos() + torch.cat((-high, low), -1) * angle.sin()


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle))


def _attention(p: Pool) -> Tensor:
    q, k, v = _heads(p)
    angle = torch.arange(p.x.shape[1], dtype=torch.float32, device=p.x.device)[:, None] * p.r[:H].detach().float()
    q, k = (_rotate(F.rms_norm(t, (H,)), angle).to(v.dtype) for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(p.x.shape) + p.x


def _attention_with_mask(p: Pool) -> Tensor:
    q, k, v = _heads(p)
    s = p.x.shape[1]
    mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2) + p.y


def _written_attention(p: Pool) -> Tensor:
    q, k, v = _heads(p)
    scores = (q @ k.transpose(-1, -2)) * H**-0.5
    late = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(late, torch.finfo(scores.dtype).min)
    return (torch.softmax(scores.float(), -1).to(v.dtype) @ v).transpose(1, 2).reshape(p.x.shape)


def _loss_of_rows(p: Pool) -> Tensor:
    target = torch.arange(p.x.shape[1], device=p.x.device) % N
    loss = F.cross_entropy(F.linear(p.x, p.m).transpose(1, 2).float(), target.expand(p.x.shape[:2]), reduction="none")
    return p.x + 0.1 * loss[..., None].to(p.x.dtype)


def _loss(p: Pool) -> Tensor:
    rows = F.linear(p.x, p.m).flatten(0, 1).float()
    target = torch.arange(rows.shape[0], device=rows.device) * 7 % N
    target = target.masked_fill(target % 3 == 1, -100)
    return p.x * (1 + 0.1 * F.cross_entropy(rows, target)).to(p.x.dtype)


def _embedded(p: Pool) -> Tensor:
    tokens = torch.arange(p.x.shape[0] * p.x.shape[1], device=p.x.device).view(p.x.shape[:2]) * 5 % N
    return p.x + F.embedding(tokens, p.m)


def _autocast(p: Pool) -> Tensor:
    with torch.autocast(p.x.device.type, torch.bfloat16):
        made = F.gelu(F.linear(F.layer_norm(p.x.float(), (N,)), p.m.float()))
    return p.x + made.to(p.x.dtype)


def _without_autocast(p: Pool) -> Tensor:
    with torch.autocast(p.x.device.type, enabled=False):
        return F.rms_norm(p.x.float(), (N,), p.r.float()).to(p.x.dtype) * p.y


def _recomputed(p: Pool) -> Tensor:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(F.rms_norm(x, (N,), p.r), p.m)) * y, p.m.t())

    return p.x + checkpoint(body, p.x, p.y, use_reentrant=False)


class _Doubled(torch.autograd.Function):
    """A gradient that is not the function's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def _other_gradient(p: Pool) -> Tensor:
    made: Tensor = _Doubled.apply(p.x)
    return F.silu(made) * p.y


def _mixture(p: Pool) -> Tensor:
    weights, chosen = torch.softmax(F.linear(p.x, p.m[:4]).float(), -1).topk(2, dim=-1)
    made = torch.stack([F.linear(p.x, p.m * (k + 1)) for k in range(4)], dim=2)
    picked = made.gather(2, chosen[..., None].expand(*chosen.shape, N))
    return (picked * weights[..., None].to(p.x.dtype)).sum(2)


def _lora(p: Pool) -> Tensor:
    return F.linear(p.x, p.m, p.r) + F.linear(F.linear(p.x, p.m[:3]), p.m[:, :3]) * 0.5


def _residual_in_place(p: Pool) -> Tensor:
    made = p.x * 1
    made += F.linear(F.rms_norm(made, (N,), p.r), p.m)
    made += F.linear(F.gelu(F.linear(F.rms_norm(made, (N,), p.r), p.m)), p.m.t())
    return F.rms_norm(made, (N,), p.r)


def _normed_over_two_dims(p: Pool) -> Tensor:
    return F.layer_norm(p.x, p.x.shape[1:]) + p.y


def _statistics(p: Pool) -> Tensor:
    variance, mean = torch.var_mean(p.x.float(), -1, keepdim=True, correction=0)
    return ((p.x - mean) * torch.rsqrt(variance + 1e-5)).to(p.x.dtype) * (1 + p.r)


def _accumulated(p: Pool) -> Tensor:
    made = torch.zeros_like(p.x)
    for k in range(3):
        made = torch.addcmul(made, p.x, p.y, value=0.3) + p.m[k]
    return made


def _loss_with_metrics(p: Pool) -> Tensor:
    """As training loops write them: a z-loss and the share of right answers beside the loss, of logits in float32."""
    rows = F.linear(p.x, p.m).flatten(0, 1).float()
    target = torch.arange(rows.shape[0], device=rows.device) * 5 % N
    loss, z = F.cross_entropy(rows, target), 1e-2 * rows.logsumexp(-1).square().mean()
    right = (rows.detach().argmax(-1) == target).float().mean()
    return p.x * (1 + 0.1 * (loss + z + right)).to(p.x.dtype)


def _written_logits(p: Pool) -> Tensor:
    """Logits that a loss has read, and need not keep: torch's own keeps their logarithms."""
    rows = F.linear(p.x, p.m).flatten(0, 1) * 2
    loss = F.cross_entropy(rows.float(), torch.arange(rows.shape[0], device=rows.device) * 3 % N)
    rows.mul_(0.5)
    return rows.view(p.x.shape) + loss.to(rows.dtype)


def _gradients_inside(p: Pool) -> Tensor:
    """Gradients of each row's loss, computed by torch.func in the graph."""

    def loss(m: Tensor, x: Tensor, r: Tensor) -> Tensor:
        normed = F.rms_norm(x, (N,), r)
        return F.cross_entropy(F.linear(F.silu(normed) * x, m), torch.arange(x.shape[0], device=x.device) % N)

    given = p.m.detach(), p.x.detach(), p.r.detach()
    made = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, 0, None))(*given)
    return F.silu(p.x) * p.y + made[0].sum(1)[:, None] + made[1]


def _state_by_halves(p: Pool) -> Tensor:
    """The state may be what is written to here."""
    before = F.silu(p.x + p.state) * p.y
    p.halves.mul_(0.5).add_(p.r.detach().view(2, -1))
    return before + F.rms_norm(p.x, (N,), p.state) * p.y


def _cached_state(p: Pool) -> Tensor:
    """As caches of keys are filled: the rows before stay."""
    p.cache[:, :1] = F.rms_norm(p.x, (N,), p.r).detach()[:, :1]
    scores = torch.softmax(p.x @ p.cache.transpose(1, 2) * N**-0.5, -1)
    return scores @ p.cache + p.y


def _state_of_views(p: Pool) -> Tensor:
    rows = p.cache.view(-1, N)
    rows[..., ::2] += 1
    made = F.layer_norm(p.x + p.cache, (N,), p.r)
    p.cache.copy_(made.detach())
    return made * rows.view(p.x.shape)


def _strided(p: Pool) -> Tensor:
    made = p.x.contiguous() * p.r
    even = made.as_strided((made.shape[0], made.shape[1], N // 2), (made.stride(0), made.stride(1), 2))
    normed = F.rms_norm(made, (N,))
    even.mul_(2.0)
    return made + normed


def _written_without_gradients(p: Pool) -> Tensor:
    made = F.silu(p.x) * p.y
    shown = made.detach()
    with torch.no_grad():
        shown.mul_(0.5)
    return F.rms_norm(made, (N,), p.r)


def _masks(p: Pool) -> Tensor:
    late = torch.arange(N, device=p.x.device) > N // 2
    kept = torch.logical_and(~late, p.r.detach().abs() < 3) | (p.y.detach() > 1)
    return torch.where(kept, F.silu(p.x), p.x * 0.5).masked_fill(late & ~kept, 0.25)


def _masked_whole(p: Pool) -> Tensor:
    """Rows that a softmax leaves as NaN, which go on as zeros."""
    scores = p.x.masked_fill(p.c.detach() > 0, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) + p.y


def _scattered(p: Pool) -> Tensor:
    order = torch.arange(N, device=p.x.device).flip(0)
    made = torch.zeros_like(p.x).scatter_add(-1, (order // 2).expand(p.x.shape), p.x)
    return made.index_select(-1, order) + p.y.gather(-1, order.expand(p.y.shape)) * p.r


def _written_products(p: Pool) -> Tensor:
    made = F.relu(F.linear(p.x, p.m, p.r), inplace=True)
    out = F.linear(made, p.m)
    out += p.y
    F.dropout(out, 0.0, True, inplace=True)
    return F.hardtanh_(out.mul_(0.5), -2, 2)


def _wide_products(p: Pool) -> Tensor:
    made = p.x.float() @ p.m.float().t()
    return (F.linear(F.silu(made), p.m.float()) + p.y.float()).to(p.x.dtype)


def _products_of_batches(p: Pool) -> Tensor:
    scores = torch.einsum("bsn,btn->bst", p.x, p.y) * N**-0.5
    return torch.bmm(torch.softmax(scores, -1), p.y) + torch.matmul(p.x, p.m)


def _two_results(p: Pool) -> Tensor:
    """A norm whose sum goes on, is split, and is read again after a write to a part of the result."""
    total = p.x + F.linear(p.y, p.m)
    low, high = F.rms_norm(total, (N,), p.r).chunk(2, -1)
    made = torch.cat((low * 2, high), -1)
    made[..., 0] = 1
    return made + total


GRAPH_STEPS: dict[str, Callable[[Pool], Tensor]] = {
    "alias": _alias, "written after a norm": _written_after_a_norm, "written operand": _written_operand,
    "masked in place": _masked, "diagonal": _diagonal, "indexed": _indexed, "running": _running,
    "state before and after": _state_before_and_after, "copied state": _copied_state, "attention": _attention,
    "attention with a mask": _attention_with_mask, "written attention": _written_attention,
    "loss of rows": _loss_of_rows, "loss": _loss, "embedded": _embedded, "autocast": _autocast,
    "without autocast": _without_autocast, "recomputed": _recomputed, "other gradient": _other_gradient,
    "loss with metrics": _loss_with_metrics, "state by halves": _state_by_halves, "cached state": _cached_state,
    "state of views": _state_of_views, "strided": _strided, "written without gradients": _written_without_gradients,
    "masks": _masks, "masked whole": _masked_whole, "scattered": _scattered, "written products": _written_products,
    "wide products": _wide_products, "products of batches": _products_of_batches, "two results": _two_results,
    "mixture": _mixture, "lora": _lora, "residual in place": _residual_in_place,
    "normed over two dims": _normed_over_two_dims, "statistics": _statistics, "accumulated": _accumulated,
    "written logits": _written_logits, "gradients inside": _gradients_inside,
    "expanded": lambda p: p.x * p.y[:, :1].expand(p.x.shape),
    "repeated": lambda p: p.x + p.y[:1].repeat(p.x.shape[0], 1, 1),
    "halves exchanged": lambda p: torch.cat(tuple(reversed(p.x.chunk(2, -1))), -1) * p.r,
    "parts": lambda p: torch.cat([F.silu(t) for t in p.x.split([N // 4, N // 4, N // 2], -1)], -1),
    "stacked": lambda p: torch.stack([F.rms_norm(t, (N,), p.r) for t in p.x.unbind(0)]),
    "groups": lambda p: F.rms_norm(p.x.reshape(*p.x.shape[:-1], -1, H), (H,), p.r[:H]).flip(-2).flatten(-2),
    "turned": lambda p: (p.x.permute(2, 0, 1).contiguous() * 2).permute(1, 2, 0) + p.y,
    "rows turned": lambda p: F.layer_norm(p.x.transpose(0, 1), (N,), p.r).transpose(0, 1),
    "columns turned": lambda p: torch.softmax(p.x.transpose(1, 2), -1).transpose(1, 2),
    "flat": lambda p: F.gelu(F.linear(p.x.reshape(-1, N), p.m, p.r)).view(p.x.shape),
    "whole": lambda p: p.x.flatten().sin().view(p.x.shape) * p.c,
    "pairs": lambda p: _as(p.x, torch.stack((-p.x[..., 1::2], p.x[..., ::2]), -1).flatten(-2)) * p.r + p.x,
    "complex": lambda p: _as(p.x, _turned(p.x.float(), p.r[: N // 2].float())),
    "double": lambda p: F.layer_norm(p.x.double(), (N,)).to(p.x.dtype) + p.r,
    "integers": lambda p: p.x + (p.y * 3).round().to(torch.int32).to(p.x.dtype),
    "floor": lambda p: p.x * (p.y.bfloat16() * 4).floor().to(p.x.dtype),
    "compared": lambda p: torch.where(p.x.bfloat16() > p.y.bfloat16(), p.x, p.y * p.r),
    "one hot": lambda p: p.x * F.one_hot(p.y.argmax(-1), N).to(p.x.dtype) + p.r,
    "half": lambda p: (F.rms_norm(p.x.half(), (N,), p.r.half()) * 0.5).to(p.x.dtype),
    "logsumexp": lambda p: p.x - torch.logsumexp(p.y.float(), -1, keepdim=True).to(p.x.dtype),
    "log softmax": lambda p: F.log_softmax(F.linear(p.x, p.m), -1) * 0.2,
    "norm of rows": lambda p: p.x / p.y.norm(dim=-1, keepdim=True).clamp_min(1e-3),
    "normalized": lambda p: F.normalize(p.x, dim=-1) * p.r,
    "group norm": lambda p: F.group_norm(p.x.transpose(1, 2), 4, p.r).transpose(1, 2),
    "glu": lambda p: F.glu(F.linear(p.x, torch.cat((p.m, p.m.t()))), -1) + p.y,
    "einsum": lambda p: torch.einsum("bsn,nk->bsk", p.x, p.m) * p.y.sigmoid(),
    "batched": lambda p: torch.baddbmm(p.y, p.x, p.m.expand(p.x.shape[0], N, N)),
    "outer": lambda p: p.x * (p.r[:, None] * p.r[None]).sum(0),
    "rolled": lambda p: torch.roll(p.x, 1, -1) * p.r + torch.roll(p.y, 1, 1),
    "padded": lambda p: F.pad(p.x, (1, -1)) + F.pad(p.y[..., 1:], (0, 1), value=0.5),
    "windows": lambda p: _as(p.x, p.x.unfold(-1, 4, 2).sum(-1).repeat_interleave(2, -1).mean(-1, True).expand_as(p.y)),
    "moved": lambda p: F.silu(p.x.movedim(-1, 0)).movedim(0, -1) * p.y.mT.mT,
    "counted": lambda p: p.x * (torch.arange(N, device=p.x.device) % 3 - 1).to(p.x.dtype) + p.y,
    "unflattened": lambda p: F.layer_norm(p.x.unflatten(-1, (2, -1)), (N // 2,)).flatten(-2) + p.y,
    "squeezed": lambda p: F.rms_norm(p.x[:, None], (N,), p.r).squeeze(1) + p.y.unsqueeze(-1).squeeze(-1),
    "lerp": lambda p: torch.lerp(p.x, p.y, 0.3),
    "softplus": lambda p: F.softplus(p.x) * F.hardswish(p.y),
    "powers": lambda p: (p.x**2).mean(-1, keepdim=True).add(1e-6).pow(-0.5) * p.x,
    "sizes": lambda p: p.x / p.x.shape[1] + p.y * p.x.size(-1) ** -0.5,
    "random": lambda p: p.x + 0.1 * torch.randn_like(p.y),
    "dropped rows": lambda p: p.x * torch.bernoulli(torch.full_like(p.c, 0.7)),
    "dropped": lambda p: F.dropout(F.linear(p.x, p.m, p.r), 0.2, True) + p.y,
    "adapter": lambda p: F.linear(p.x, p.m) + F.linear(F.linear(F.dropout(p.x, 0.1, True), p.m[:3]), p.m[:, :3]),
}  # fmt: skip
# Steps with sizes, or dtypes, of their own.
_FIXED = ("addmm", "heads", "flat", "view that is written", "narrow")
GRAPH_STEPS |= {
    f"plain {name}": (lambda p, step=step: step(p.x, p.y, p.r, p.c, p.m))
    for name, step in STEPS.items() if name not in _FIXED
}  # fmt: skip
RANDOM = ("random", "dropped rows", "dropped", "adapter", "plain dropout", "plain noise")
JUMPS = ("floor", "compared", "integers", "one hot", "mixture", "plain greatest", "masks", "loss with metrics")
"""Steps that jump where a value moves by what roundings move it."""
CASTS = ("autocast", "half")


class DrawnGraph:
    """A graph, drawn from a seed, and how it is compiled and called.

    Attributes:
        steps: the names of its steps.
        dtype: of its inputs.
        autocast, checkpointed: whether all of it runs under autocast, and is computed again in its backward.
        exact, dynamic: options of the pass and of Dynamo.
        marked: whether the rows of its inputs are marked as dynamic.
        aliased: whether the halves of its state are the state.
        kept: whether it also returns what it was given, and a result twice.
        mode: what it runs in: with gradients, or in one of torch's modes without.
        calls: how often it is called with the same inputs.
        twice: whether gradients are computed twice.
        after: whether AOTAutograd traces it, too, and the pass after it rewrites what that makes.
        timed: whether that is in max-autotune, where a stub says which form of each part is the faster one.
        sizes: of the batches that it is called with.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed, self.steps = seed, [rng.choice([*GRAPH_STEPS]) for _ in range(rng.randint(2, 8))]
        self.places = [[rng.random() for _ in range(2)] for _ in self.steps]
        self.outputs, self.views = rng.randint(1, 3), rng.random() < 0.3
        self.autocast, self.checkpointed, self.exact = (rng.random() < share for share in (0.2, 0.2, 0.3))
        self.dtype = torch.bfloat16 if not self.autocast and rng.random() < 0.3 else torch.float32
        self.dynamic = rng.random() < 0.35
        if self.autocast or self.dtype != torch.float32:  # a jump is another value where a sum is rounded otherwise
            self.steps = [s for s in self.steps if s not in JUMPS] or ["alias"]
        if self.checkpointed:  # what is computed again must not write to a state
            self.steps = [s for s in self.steps if "state" not in s and s not in ("running", "recomputed")] or ["alias"]
        if self.dynamic:
            self.steps = [s for s in self.steps if s != "stacked"] or ["alias"]
        self.after = rng.random() < 0.25
        self.trained = [rng.random() < 0.85 for _ in range(5)]
        self.trained[rng.randrange(5)] = True
        self.timed = self.after and rng.random() < 0.5
        if self.dtype != torch.float32 and rng.random() < 0.4:
            self.dtype = torch.float16
        self.marked = self.dynamic and rng.random() < 0.3
        rows = [(2, 3), (5, 3), (3, 7)] if self.marked else [(2, 3), (5, 3), (1, 7), (3, 1), (0, 3), (2, 0)]
        self.sizes = [(2, 3), *rng.sample(rows, 2)] if self.dynamic else [rng.choice((*[(2, 3)] * 4, (1, 3), (2, 1)))]
        self.aliased, self.kept, self.twice = (rng.random() < share for share in (0.3, 0.15, 0.2))
        self.calls = 2 if rng.random() < 0.2 else 1
        self.mode = rng.choice((torch.no_grad, torch.inference_mode)) if rng.random() < 0.1 else nullcontext

    def body(self, x: Tensor, y: Tensor, rows: Tensor, column: Tensor, matrices: Tensor, *written: Tensor) -> Any:
        pool = [x, y]
        for k, (name, (first, second)) in enumerate(zip(self.steps, self.places, strict=False)):
            one, other = pool[-1 - int(first * first * len(pool))], pool[int(second * len(pool))]
            made = GRAPH_STEPS[name](Pool(one, other, rows[k % 3], column, matrices[k % 2], *written))
            pool.append(made.to(x.dtype))
        outs = tuple(pool[-self.outputs :])
        views = (outs[-1].view(-1, N), outs[0].transpose(0, 1)) if self.views else ()
        return (*outs, *views, *((x, written[0], y.transpose(0, 1), outs[0]) if self.kept else ()))

    def __call__(self, *given: Tensor) -> Any:
        with torch.autocast(given[0].device.type, torch.bfloat16) if self.autocast else nullcontext():
            return checkpoint(self.body, *given, use_reentrant=False) if self.checkpointed else self.body(*given)

    def inputs(self, b: int, s: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        kind, device = dtype or self.dtype, torch.get_default_device()

        def draw(k: int, *shape: int, scale: float = 1.0) -> Tensor:
            made = (torch.randn(shape, generator=generator, device="cpu") * scale).to(self.dtype).to(device, kind)
            if self.marked and k in (0, 1, 3):
                torch._dynamo.mark_dynamic(made, (0, 1))
            return made.requires_grad_(self.trained[k])

        tiles = [draw(0, b, s, N), draw(1, b, s, N), draw(2, 3, N), draw(3, b, s, 1), draw(4, 2, N, N, scale=N**-0.5)]
        state, halves = torch.zeros(N, dtype=kind), torch.ones(2, N // 2, dtype=kind)
        cache = torch.ones(b, s, N, dtype=kind)
        if self.marked:
            torch._dynamo.mark_dynamic(cache, (0, 1))
        return [*tiles, state, state.view(2, -1) if self.aliased else halves, cache]

    def results(self, run: Callable[..., Any], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Outputs, gradients and what was written to, of all batches."""
        found: list[Tensor] = []
        for b, s in self.sizes:
            given = self.inputs(b, s, dtype)
            torch.manual_seed(self.seed)
            for _ in range(self.calls):
                with self.mode():
                    outs = run(*given)
                found += [t.detach().clone() for t in (*outs, *given[-3:])]
                total = sum((out.float() * (0.5 + i + _pattern(out))).sum() for i, out in enumerate(outs))
                leaves = [t for t in given if t.requires_grad]
                wanted = isinstance(total, Tensor) and total.requires_grad
                for k in range(1 + self.twice if wanted else 0):
                    gradients = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=self.twice and not k)
                    zeros = zip(gradients, leaves, strict=True)
                    found += [torch.zeros_like(leaf) if g is None else g.clone() for g, leaf in zeros]
        return found

    def runs(self, size: tuple[int, int]) -> bool:
        """Whether torch itself runs it on a batch: autograd may refuse a write, a view its strides."""
        try:
            self.of_size(size).results(self)
        except Exception as error:
            print(f"refused at {size}: {type(error).__name__}")
            return False
        return True

    def of_size(self, size: tuple[int, int]) -> DrawnGraph:
        """Itself with batches of one size."""
        made = copy.copy(self)
        made.sizes = [size]
        return made

    @property
    def rounds(self) -> bool:
        """Whether values are rounded to 16 bits in it."""
        return self.autocast or self.dtype != torch.float32 or not {*CASTS}.isdisjoint(self.steps)

    @property
    def jumps(self) -> bool:
        """Whether a graph of float32 values has other values than one that rounds them in other places."""
        return self.rounds and not {*JUMPS, *RANDOM}.isdisjoint(self.steps)

    def __repr__(self) -> str:
        options = (
            "autocast", "checkpointed", "exact", "dynamic", "marked", "views", "kept", "aliased", "after", "timed",
            "twice",
        )  # fmt: skip
        how = [name for name in options if getattr(self, name)]
        how += [f"{self.calls} calls", *map(str, self.sizes)] + [self.mode.__name__] * (self.mode is not nullcontext)
        return f"graph {self.seed} of {self.dtype} ({', '.join(how) or 'plain'}): {', '.join(self.steps)}"


def _pattern(like: Tensor) -> Tensor:
    """Numbers of this shape."""
    return (torch.arange(like.numel(), device=like.device) * 0.7).cos().view(like.shape)


def both_passes(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that runs the graphs which Inductor gets, after both passes."""
    torch._inductor.config.pre_grad_custom_pass(module.graph)
    module.recompile()
    return with_graphs_after_autograd(True)(module, inputs)


def check(seed: int) -> None:
    drawn = DrawnGraph(seed)
    print(f"seed {seed}: {said(seed)}")
    backend = with_graphs_after_autograd(False) if drawn.after else "eager"
    drawn.sizes = [size for size in drawn.sizes if drawn.runs(size)]
    try:
        exact = drawn.results(drawn, torch.float32) if drawn.rounds else None
        # Of random numbers Dynamo's checkpoints draw others than torch's own.
        plain = _compiled(drawn, backend) if drawn.after or drawn.checkpointed else drawn.results(drawn)
    except Exception as error:  # no program: autograd refuses it, or torch a view
        print(f"refused: {type(error).__name__}")
        return
    ours = _compiled(drawn, both_passes if drawn.after else only_the_pass)
    exact = exact or plain
    for i, (got, want, right) in enumerate(zip(ours, plain, exact, strict=True)):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{drawn}: value {i}"
        error, allowed = _off(got, want), 5e-5
        if drawn.rounds:
            error = error if drawn.jumps else _off(got, right)
            allowed = 0.15 if drawn.jumps else 3 * _off(want, right) + 0.02
        assert error <= allowed, f"{drawn}: value {i} is {error:.3g} of its norm off, {allowed:.3g} allowed"


def _compiled(drawn: DrawnGraph, backend: Any) -> list[Tensor]:
    torch._dynamo.reset()
    dynamic = (drawn.dynamic and not drawn.marked) or None
    with enabled(exact=drawn.exact), _timed(drawn.seed) if drawn.timed else nullcontext():
        run = torch.compile(drawn.__call__, backend=backend, fullgraph=True, dynamic=dynamic)
        found = drawn.results(run)
        graphs = [entry for entry in inductor.report() if entry.what == "a graph"]
    assert not graphs, f"{drawn}: {graphs}"
    return found


@contextmanager
def _timed(seed: int) -> Iterator[None]:
    """In max-autotune, with times that a seed draws."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(max_autotune=True):
        patch.setattr(fusion_choice, "DEVICES", {"cuda", "cpu"})
        patch.setattr(fusion_choice, "compared", lambda ours, theirs: (rng.random(), rng.random()))
        yield


def _off(got: Tensor, want: Tensor) -> float:
    """The error as a part of the norm of the right values; NaNs and infinities must be where those are."""
    alike = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(alike, 0, got.double() - want.double()).norm()
    size = want.double().nan_to_num(0, 0, 0).norm().clamp(min=want.numel() ** 0.5 * 0.1)
    return (error / size).item() if error else 0.0


def said(seed: int) -> str:
    return repr(DrawnGraph(seed))


if __name__ == "__main__":
    check_seeds(check, "graphs")
