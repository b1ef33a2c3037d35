"""Mamba 2's scan of a sequence in chunks: products within a chunk and between chunks, and expressions of their decays.

``state_t = exp(a dt_t) state_(t-1) + dt_t x_t B_t^T``, ``y_t = state_t C_t + D x_t`` for each head. Within a chunk this
is ``(C B^T * decay) x``, a matrix product whose decay is made in one pass; each chunk's sum of states, decayed, reaches
all later chunks by another product. Products are of the operands' dtype, decays and their sums of float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch.composite.fused import fused

Tensor = torch.Tensor
# Tokens of a chunk, whatever a model says: what is written within chunks grows with it, states of chunks shrink.
_CHUNK = 128
# Decays of what comes later.
_NEVER = -1e30


@fused
def _weights(xp: Any, scores: Any, to: Any, since: Any, dt: Any, before: Any, *, dtype: str) -> Any:
    """Of each token for each one before it in the chunk: how much of it arrives."""
    return xp.astype(scores * xp.exp(xp.where(before, to - since, _NEVER)) * dt, dtype)


@fused
def _scaled(xp: Any, x: Any, weight: Any) -> Any:
    return x * weight


@fused
def _summed(xp: Any, within: Any, before: Any, decay: Any, x: Any = None, skip: Any = None) -> Any:
    """Outputs: of the own chunk, of those before, and of the token itself."""
    total = within + before * decay
    return total if x is None else total + x * skip


def chunk_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, *,
    initial: Tensor | None = None, wants_last: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Outputs of all tokens, and the last state if it is wanted.

    Args:
        x: ``T[batch s h p]``; float32, float16 or bfloat16.
        dt: float32 ``[batch s h]``.
        a: float32 ``[h]``.
        b, c: ``T[batch s g n]``; a group's are shared by ``h/g`` heads.
        d: ``[h]``: how much of x is added to y.
        initial: ``[batch h p n]``: the state before x; zeros where None.

    Returns:
        ``T[batch s h p]`` and float32 ``[batch h p n]``.
    """
    batch, seqlen, heads, p = x.shape
    groups, n = b.shape[2:]
    size = min(_CHUNK, seqlen + -seqlen % 8)  # which tensor cores multiply
    missing = -seqlen % size
    if missing:
        x, b, c = (nn.functional.pad(t, (0, 0, 0, 0, 0, missing)) for t in (x, b, c))
        dt = nn.functional.pad(dt, (0, 0, 0, missing))
    chunks, each = (seqlen + missing) // size, heads // groups

    # (batch, chunks, groups, heads of a group, size): dt, and the logarithm of the decay since a chunk's begin
    dt = dt.view(batch, chunks, size, groups, each).permute(0, 1, 3, 4, 2).contiguous()
    since = (dt * a.view(groups, each, 1)).cumsum(-1)
    x = x.view(batch, chunks, size, groups, each, p)
    b, c = (t.view(batch, chunks, size, groups, n).transpose(2, 3) for t in (b, c))

    within = _within(x, b, c, dt, since)
    left = _scaled(x, (dt * (since[..., -1:] - since).exp()).permute(0, 1, 4, 2, 3)[..., None])
    left = left.transpose(2, 3).reshape(-1, size, each * p).transpose(1, 2)  # a group's heads side by side
    states = torch.bmm(left, b.reshape(-1, size, n)).view(batch, chunks, heads, p, n)
    states, last = _passed_on(states, since[..., -1].view(batch, chunks, heads), initial, wants_last)
    before = torch.bmm(c.reshape(-1, size, n), states.reshape(-1, each * p, n).transpose(1, 2))
    before = before.view(batch, chunks, groups, size, each, p).transpose(2, 3)

    decay = since.exp().permute(0, 1, 4, 2, 3)[..., None]
    skip = () if d is None else (x, d.view(groups, each, 1).float().expand(batch, chunks, size, groups, each, 1))
    out = _summed(within, before, decay, *skip)
    return out.view(batch, seqlen + missing, heads, p)[:, :seqlen], last


def _within(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, since: Tensor) -> Tensor:
    """The sums that the tokens of a chunk add to each other: (batch, chunks, size, groups, heads of a group, p)."""
    batch, chunks, size, groups, each, p = x.shape
    scores = torch.bmm(c.reshape(-1, size, c.shape[-1]), b.reshape(-1, size, b.shape[-1]).transpose(1, 2))
    # Of each head: what a tile's rows share is summed by the kernel of its gradient, beside a whole tile.
    scores = scores.view(batch, chunks, groups, 1, size, size).expand(-1, -1, -1, each, -1, -1).contiguous()
    before = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    weights = _weights(
        scores, since[..., None], since[..., None, :], dt[..., None, :], before,
        dtype=str(x.dtype).removeprefix("torch."),
    )  # fmt: skip
    tokens = x.permute(0, 1, 3, 4, 2, 5).reshape(-1, size, p)
    out = torch.bmm(weights.view(-1, size, size), tokens)
    return out.view(batch, chunks, groups, each, size, p).permute(0, 1, 4, 2, 3, 5)


def _passed_on(states: Tensor, decay: Tensor, initial: Tensor | None, wants_last: bool) -> tuple[Tensor, Tensor | None]:
    """The state before each chunk, of the states that each chunk leaves; and the last one, in float32.

    Args:
        states: (batch, chunks, heads, p, n).
        decay: its logarithm, over each chunk: (batch, chunks, heads).
        initial: (batch, heads, p, n).
    """
    batch, chunks, heads, p, n = states.shape
    # (batch, heads, chunks + 1), in float64: what differs little of long sums would be lost in float32
    since = nn.functional.pad(decay.transpose(1, 2).cumsum(-1, dtype=torch.float64), (1, 0))
    # Of the state that chunk j leaves, for i = 0 .. chunks - 1, when chunk i begins, and at the end.
    known = torch.ones(chunks + 1, chunks, dtype=torch.bool, device=states.device).tril(-1)
    share = (since[..., :, None] - since[..., None, 1:]).float().masked_fill(~known, _NEVER).exp()
    rows = states.transpose(1, 2).reshape(batch, heads, chunks, p * n)
    begins = torch.matmul(share[..., :-1, :].to(rows.dtype), rows)
    last = torch.matmul(share[..., -1:, :], rows.float()).view(batch, heads, p, n) if wants_last else None
    if initial is not None:
        # (batch, heads, chunks + 1, p * n)
        of_first = since.float().exp()[..., None] * initial.float().flatten(2)[:, :, None]
        begins = (begins + of_first[:, :, :-1]).to(rows.dtype)
        last = None if last is None else last + of_first[:, :, -1].view_as(last)
    return begins.view(batch, heads, chunks, p, n).transpose(1, 2), last
