"""FlashAttention's and causal-conv1d's functions on our ops: values, gradients, caches and states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cute_ops_torch.compat import causal_conv1d, flash_attn
from tests.torch.compat_checks import alike, drawn

Tensor = torch.Tensor


def attended(
    q: Tensor, k: Tensor, v: Tensor, left: int = -1, right: int = -1, scale: float | None = None, cap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores written out, in float64; the last query is beside the last key."""
    heads, groups, s, t = q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // groups, 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    apart = torch.arange(s)[:, None] + t - s - torch.arange(t)  # how far a key is before its query
    if slopes is not None:
        scores = scores - slopes.double().reshape(-1, heads, 1, 1) * apart.abs()
    out_of_reach = ((apart > left) & (left >= 0)) | ((-apart > right) & (right >= 0))
    scores = scores.masked_fill(out_of_reach, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("bhst,bthe->bshe", weights, v), scores.logsumexp(-1)


@pytest.mark.parametrize(("size", "given", "wanted"), [
    (16, {}, {}),
    (16, {"causal": True, "window_size": (2, 5), "softcap": 3.0, "deterministic": True},
     {"left": 2, "right": 0, "cap": 3.0}),
    (16, {"window_size": (1, 2), "softmax_scale": 0.3, "softcap": -1.0}, {"left": 1, "right": 2, "scale": 0.3}),
    (16, {"window_size": (-2, -7)}, {}),
    (24, {"causal": True}, {"right": 0}),
    (16, {"alibi_slopes": drawn(4).abs()}, {"slopes": drawn(4).abs()}),
    (16, {"alibi_slopes": drawn(2, 4).abs(), "causal": True}, {"slopes": drawn(2, 4).abs(), "right": 0}),
])  # fmt: skip
def test_flash_attention(size: int, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    q, k, v = drawn(2, 5, 4, size), drawn(2, 7, 2, size), drawn(2, 7, 2, size, seed=9)
    near = {"rtol": 1e-3, "atol": 1e-4}
    alike(lambda *x: flash_attn.flash_attn_func(*x, **given), lambda *x: attended(*x, **wanted)[0], q, k, v, **near)
    alike(
        lambda q, kv: flash_attn.flash_attn_kvpacked_func(q, kv, **given),
        lambda q, kv: attended(q, *kv.unbind(2), **wanted)[0], q, torch.stack((k, v), 2), **near,
    )  # fmt: skip
    qkv = drawn(2, 6, 3, 4, size)
    alike(
        lambda x: flash_attn.flash_attn_qkvpacked_func(x, **given), lambda x: attended(*x.unbind(2), **wanted)[0], qkv,
        **near,
    )  # fmt: skip
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    _, log_sums = attended(*(x.double() for x in (q, k, v)), **wanted)
    assert probabilities is None and out.shape == q.shape
    torch.testing.assert_close(lse.double(), log_sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("given", "wanted"), [
    ({}, {}),
    ({"causal": True, "window_size": (2, 0), "softcap": 3.0}, {"left": 2, "right": 0, "cap": 3.0}),
    ({"alibi_slopes": drawn(2, 4).abs(), "causal": True}, {"slopes": drawn(2, 4).abs(), "right": 0}),
])  # fmt: skip
@pytest.mark.parametrize("size", [16, 24])
def test_flash_attention_of_packed_sequences(size: int, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """As if each sequence were attended to alone."""
    q, k, v = drawn(7, 4, size), drawn(9, 2, size), drawn(9, 2, size, seed=9)
    of_q, of_k = torch.tensor([0, 2, 7], dtype=torch.int32), torch.tensor([0, 3, 9], dtype=torch.int32)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outs, sums = [], []
        for i in range(2):
            rows = (x[None, of[i] : of[i + 1]] for x, of in ((q, of_q), (k, of_k), (v, of_k)))
            own = wanted | ({"slopes": wanted["slopes"][i]} if "slopes" in wanted else {})
            out, lse = attended(*rows, **own)
            outs.append(out[0])
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, -1)

    near = {"rtol": 1e-3, "atol": 1e-4}
    alike(
        lambda *x: flash_attn.flash_attn_varlen_func(*x, of_q, of_k, 5, 6, return_attn_probs=True, **given)[:2],
        alone, q, k, v, **near,
    )  # fmt: skip
    alike(
        lambda q, kv: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, of_q, of_k, 5, 6, **given),
        lambda q, kv: alone(q, *kv.unbind(1))[0], q, torch.stack((k, v), 1), **near,
    )  # fmt: skip
    of_k = of_q  # which `alone` reads, too
    alike(
        lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, of_q, 5, **given),
        lambda x: alone(*x.unbind(1))[0], drawn(7, 3, 4, size), **near,
    )  # fmt: skip


def test_queries_without_keys_are_zero() -> None:
    """The last query is beside the last key, so the first two of five have none of three."""
    q, k = drawn(1, 5, 2, 16), drawn(1, 3, 2, 16)
    out = flash_attn.flash_attn_func(q, k, k, causal=True)
    assert not out[:, :2].any() and out[:, 2:].all()
    torch.testing.assert_close(out.double(), attended(q.double(), k.double(), k.double(), right=0)[0])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_flash_attention_with_a_cache(queries: int, paged: bool) -> None:
    """New keys are rotated and written behind the others; queries see all up to their own."""
    lengths = torch.tensor([4, 9], dtype=torch.int32)
    held = [drawn(2, 16, 2, 32, seed=i).half() for i in (1, 2)]
    q, k, v = (drawn(2, queries, heads, 32).half() for heads in (4, 2, 2))
    angles = drawn(16, 8)
    cos, sin = angles.cos(), angles.sin()
    places = lengths[:, None] + torch.arange(queries)

    def rotated(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(16, 8), angles)[places][:, :, None]
        pairs = torch.view_as_complex(x[..., :16].float().unflatten(-1, (8, 2))) * turn
        return torch.cat((torch.view_as_real(pairs).flatten(-2), x[..., 16:].float()), -1)

    caches, table = [x.clone() for x in held], None
    if paged:
        table = torch.tensor([[5, 0, 3, 2], [1, 4, 7, 6]], dtype=torch.int32)
        pages = [torch.zeros(8, 4, 2, 32, dtype=torch.float16) for _ in held]
        for page, x in zip(pages, held, strict=True):
            page[table.long()] = x.unflatten(1, (4, 4))
        caches = pages
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, lengths, block_table=table, causal=True, window_size=(5, -1), softcap=2.0,
        return_softmax_lse=True,
    )  # fmt: skip
    for i, length in enumerate(lengths.tolist()):
        keys, values = (x[i].double() for x in held)
        keys[length : length + queries], values[length : length + queries] = rotated(k)[i].half(), v[i]
        upto = length + queries
        rows = (rotated(q)[i : i + 1].half().double(), keys[None, :upto], values[None, :upto])
        wanted, log_sums = attended(*rows, left=5, right=0, cap=2.0)
        torch.testing.assert_close(out[i].double(), wanted[0], rtol=2e-2, atol=4e-3)
        torch.testing.assert_close(lse[i].double(), log_sums[0], rtol=1e-3, atol=2e-3)
    unchanged = flash_attn.flash_attn_with_kvcache(q[:, -1:], *caches, cache_seqlens=3, block_table=table)
    again = flash_attn.flash_attn_with_kvcache(
        q[:, -1:], *caches, cache_seqlens=torch.tensor([3, 3]), block_table=table, causal=True
    )
    torch.testing.assert_close(unchanged, again, rtol=0, atol=0)
    whole = flash_attn.flash_attn_with_kvcache(q[:, -1:], *caches, block_table=table)
    numbers: Any = {"cache_seqlens": np.int64(16), "window_size": torch.tensor([-1, 0])}  # of other libraries
    torch.testing.assert_close(
        whole, flash_attn.flash_attn_with_kvcache(q[:, -1:], *caches, block_table=table, **numbers)
    )


@pytest.mark.parametrize("paged", [False, True])
def test_tokens_beyond_a_cache_are_left_out(paged: bool) -> None:
    """Not written into the next sequence's row or page."""
    held, new, lengths = drawn(2, 16, 1, 16).half(), drawn(2, 3, 1, 16).half(), torch.tensor([14, 2]).int()
    table, cache = torch.tensor([[0], [1]]).int() if paged else None, held.clone()
    flash_attn.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=lengths, block_table=table)
    held[0, 14:], held[1, 2:5] = new[0, :2], new[1]
    torch.testing.assert_close(cache, held, rtol=0, atol=0)


@pytest.mark.parametrize(("queries", "causal"), [(3, True), (3, False), (20, True), (20, False)])
def test_caches_of_any_queries_and_slopes(queries: int, causal: bool) -> None:
    """Are those of keys side by side, in a batch and packed."""
    torch.manual_seed(0)
    q, keys = torch.randn(2, queries, 4, 32).half(), 24
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    pages = [torch.randn(6, 8, 2, 32).half() for _ in range(2)]
    k, v = (x[table.long()].flatten(1, 2) for x in pages)
    options: dict[str, Any] = {"causal": causal, "window_size": (11, 4), "alibi_slopes": torch.rand(4), "softcap": 3.0}
    right = flash_attn.flash_attn_func(q, k, v, **options)
    found = flash_attn.flash_attn_with_kvcache(q, *pages, cache_seqlens=keys, block_table=table, **options)
    torch.testing.assert_close(found, right, rtol=2e-2, atol=4e-3)
    offsets = [torch.arange(3, dtype=torch.int32) * n for n in (queries, keys)]
    packed = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), *pages, *offsets, queries, keys, block_table=table, **options
    )
    torch.testing.assert_close(packed.view_as(right), right, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(("queries", "causal"), [(1, False), (3, True), (20, True), (20, False)])
def test_rows_of_caches_and_their_padding(queries: int, causal: bool) -> None:
    """Sequences have rows in another order, some tokens behind the row's start, where NaN stands."""
    held, starts, rows = [24, 21], [0, 5], [3, 1]
    q, (keys, values) = drawn(2, queries, 4, 32).half(), (drawn(2, 24, 2, 32, seed=i).half() for i in (1, 2))
    caches = [torch.full((5, 24, 2, 32), torch.nan).half() for _ in range(2)]
    for i, row in enumerate(rows):
        for cache, given in zip(caches, (keys, values), strict=True):
            cache[row, starts[i] : held[i]] = given[i, starts[i] : held[i]]
    indices, padding, lengths = (torch.tensor(x, dtype=torch.int32) for x in (rows, starts, held))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, cache_batch_idx=indices, cache_leftpad=padding, causal=causal,
        window_size=(9, -1), return_softmax_lse=True,
    )  # fmt: skip
    for i, (first, last) in enumerate(zip(starts, held, strict=True)):
        k, v = (x[i : i + 1, first:last].double() for x in (keys, values))
        wanted, log_sums = attended(q[i : i + 1].double(), k, v, left=9, right=0 if causal else -1)
        torch.testing.assert_close(out[i].double(), wanted[0], rtol=2e-2, atol=4e-3)
        torch.testing.assert_close(lse[i].double(), log_sums[0], rtol=1e-3, atol=2e-3)


def test_rows_of_caches_lie_alike() -> None:
    k_cache, v_cache = drawn(2, 8, 2, 32), drawn(2, 2, 8, 32).transpose(1, 2)
    with pytest.raises(ValueError, match="rows and slots of k_cache and of v_cache lie alike") as error:
        flash_attn.flash_attn_with_kvcache(drawn(2, 1, 2, 32), k_cache, v_cache, cache_leftpad=torch.zeros(2).int())
    assert str(error.value).endswith("got strides (512, 64, 32, 1) and (512, 32, 256, 1).")


def convolved(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, activation: str | None) -> Tensor:
    taps = weight.shape[1] - 1
    out = F.conv1d(torch.cat((before, x), -1), weight[:, None], bias, groups=len(weight))
    assert before.shape[-1] == taps
    return F.silu(out) if activation else out


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_causal_convolutions(activation: str | None, channels_last: bool) -> None:
    x, weight, bias, before = drawn(2, 8, 7), drawn(8, 4), drawn(8), drawn(2, 8, 3)
    if channels_last:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    zeros = torch.zeros(2, 8, 3, dtype=torch.float64)
    alike(
        lambda x, w, b: causal_conv1d.causal_conv1d_fn(x, w, b, activation=activation),
        lambda x, w, b: convolved(x, w, b, zeros, activation), x, weight, bias,
    )  # fmt: skip
    alike(
        lambda x, w, b, s: causal_conv1d.causal_conv1d_fn(
            x, w, b, initial_states=s, return_final_states=True, activation=activation
        ),
        lambda x, w, b, s: (convolved(x, w, b, s, activation), torch.cat((s, x), -1)[..., -3:]),
        x, weight, bias, before,
    )  # fmt: skip
    room = torch.empty(2, 8, 3)
    _, final = causal_conv1d.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=room)
    assert final is room
    torch.testing.assert_close(room, x[..., -3:])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_updates_of_a_convolution(ring: bool, chosen: bool) -> None:
    """Token by token and two at a time, the same numbers as the whole sequence; the state holds what comes before."""
    x, weight, bias = drawn(2, 8, 11), drawn(8, 4), drawn(8)
    whole = causal_conv1d.causal_conv1d_fn(x, weight, bias, activation="silu")
    state = torch.zeros(5, 8, 6)
    which = torch.tensor([3, 1]) if chosen else None
    held = state if chosen else state[:2]
    for begin, end in ((0, 1), (1, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 10), (10, 11)):
        step = x[..., begin:end] if end - begin > 1 else x[..., begin]
        out = causal_conv1d.causal_conv1d_update(
            step, held, weight, bias, "silu", torch.tensor([begin] * 2) if ring else None, which
        )
        torch.testing.assert_close(out.reshape(2, 8, -1), whole[..., begin:end], rtol=1e-5, atol=1e-5)
    mine = state[which] if which is not None else state[:2]
    newest = x[..., 5:11]
    assert torch.equal(mine, newest.roll(11, -1) if ring else newest)  # in a ring input i is at i % 6
    others = sorted({*range(5)} - ({3, 1} if chosen else {0, 1}))
    assert not state[others].any()
    padding, given = torch.tensor([-1, -1]), torch.tensor([3, 4]) if ring else None
    assert not causal_conv1d.causal_conv1d_update(x[..., 0], state[:0], weight, bias, "silu", given, padding).any()


def test_states_of_packed_sequences() -> None:
    x, ends = drawn(9, 4), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    states = causal_conv1d.causal_conv1d_varlen_states(x, ends, 3)
    wanted = torch.zeros(3, 4, 3)
    wanted[0, :, 1:], wanted[2] = x[:2].T, x[6:9].T
    assert torch.equal(states, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_a_convolution_of_sequences_in_a_row(seed: int) -> None:
    """Each sequence's outputs and gradients are those of the sequence alone; both layouts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (3,), generator=generator).tolist()
    x = torch.randn(1, 5, sum(lengths), generator=generator, requires_grad=True)
    weight = torch.randn(5, 2 + seed, generator=generator, requires_grad=True)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    parts = [causal_conv1d.causal_conv1d_fn(each, weight, activation="silu") for each in x.split(lengths, -1)]
    expected = torch.cat(parts, -1)
    d = torch.randn(expected.shape, generator=generator)
    wanted = torch.autograd.grad(expected, (x, weight), d)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        found = causal_conv1d.causal_conv1d_fn(given, weight, seq_idx=ids, activation="silu")
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, (x, weight), d), wanted)


@pytest.mark.parametrize("seed", range(3))
def test_a_convolution_whose_first_sequence_goes_on_and_whose_padding_is_zeros(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    *lengths, padding = torch.randint(1, 9, (3,), generator=generator).tolist()
    x = torch.randn(1, 5, sum(lengths) + padding, generator=generator, requires_grad=True)
    weight, bias = (torch.randn(*n, generator=generator, requires_grad=True) for n in ((5, 2 + seed), (5,)))
    before = torch.randn(1, 5, 1 + seed, generator=generator, requires_grad=True)
    ids = torch.tensor([0] * lengths[0] + [1] * lengths[1] + [-1] * padding, dtype=torch.int32)[None]
    first, second, rest = x.split([*lengths, padding], -1)
    parts = [
        causal_conv1d.causal_conv1d_fn(first, weight, bias, initial_states=before),
        causal_conv1d.causal_conv1d_fn(second, weight, bias),
    ]
    expected, given = torch.cat((*parts, torch.zeros_like(rest)), -1), (x, weight, bias, before)
    found = causal_conv1d.causal_conv1d_fn(x, weight, bias, ids, before)
    torch.testing.assert_close(found, expected)
    d = torch.randn(expected.shape, generator=generator)
    torch.testing.assert_close(torch.autograd.grad(found, given, d), torch.autograd.grad(expected, given, d))
