"""Attention of packed sequences in PyTorch: drawn calls against float64, transforms, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import mods
from tests.ops.attention_sequences import drawn_sequences

EITHER = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_right(seed: int, device: str, longest: int) -> None:
    packed, (*given, sinks) = drawn_sequences(seed, longest)
    call, dtype = packed.call, getattr(torch, packed.call.dtype)
    q, k, v = (torch.from_numpy(x).to(device, dtype) for x in given)
    if call.packed:
        q, k, v = torch.cat([q, k, v], dim=1).split([call.h, call.g, call.g], dim=1)
    named = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": torch.from_numpy(sinks).to(device)})
    leaves = {name: x.detach().requires_grad_() for name, x in named.items()}
    captured = {name: torch.from_numpy(x).to(device) for name, x in packed.functions.captured.items()}
    offsets = [torch.from_numpy(x).to(device) for x in packed.offsets]
    torch.manual_seed(seed)
    dout, dlse = (
        torch.randn(call.s, call.h, call.e, dtype=dtype, device=device),
        torch.randn(call.h, call.s, device=device),
    )
    runs = []
    for _ in range(2 if device == "cuda" else 1):
        out, lse = cute_ops_torch.attention(
            **leaves, **call.attrs, **packed.functions.options, captured=captured, cu_seqlens_q=offsets[0],
            cu_seqlens_k=offsets[1],
        )  # fmt: skip
        grads = torch.autograd.grad([out, lse], [*leaves.values()], [dout, dlse])
        runs.append({"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}})
        poison = [torch.full_like(x, math.nan) for x in runs[-1].values() for _ in range(3)]
        del poison
    wide = lambda each: {n: x.detach().cpu().double().numpy() for n, x in each.items()}  # noqa: E731
    packed.assert_right(wide(named) | wide({"dout": dout, "dlse": dlse}), wide(runs[0]), f"seed {seed}")
    for name, found in runs[0].items():
        if name not in ("dq", "dk", "dv") or call.attrs.get("deterministic"):
            assert all(torch.equal(found, again[name]) for again in runs[1:]), f"seed {seed}: {call.name}: {name}"


@pytest.mark.parametrize("seed", range(12))
def test_drawn_calls(seed: int) -> None:
    assert_right(seed, "cpu", 40)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(24))
def test_drawn_calls_on_a_gpu(part: int) -> None:
    for seed in range(part * 2, part * 2 + 2):  # most of the time goes to compiling
        assert_right(seed, "cuda", 300)


def given(device: str = "cpu", tokens: int = 30) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, h, 64, generator=draw).bfloat16().to(device) for h in (4, 2, 2)]


def offsets(*numbers: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", EITHER)
def test_nan_stays_in_its_sequence(device: str) -> None:
    """And what lies behind the last one attends to nothing."""
    x, cu = given(device), offsets(0, 7, 7, 20, 27, device=device)
    clean = [y.clone().requires_grad_() for y in x]
    for y in x:
        y[7:20] = math.nan
        y[27:] = math.nan
    x = [y.requires_grad_() for y in x]
    results = []
    for each in (clean, x):
        out, lse = cute_ops_torch.attention(*each, causal=True, cu_seqlens_q=cu)
        dout = torch.ones_like(out)
        results.append([out, lse.t(), *torch.autograd.grad([out, lse], each, [dout, torch.ones_like(lse)])])
    for right, found in zip(*results, strict=True):
        assert found[7:20].isnan().any()
        for part in (slice(0, 7), slice(20, 27)):
            torch.testing.assert_close(found[part], right[part], rtol=0, atol=0.02)
    assert (results[1][0][27:] == 0).all()
    assert (results[1][1][27:] == -math.inf).all()


@pytest.mark.parametrize("device", EITHER)
@pytest.mark.parametrize("tokens", [(0, 0), (0, 5), (5, 0)])
def test_no_queries_and_no_keys(device: str, tokens: tuple[int, int]) -> None:
    """Of no sequence there is a token: neither fails, and there is nothing to attend to."""
    q, k, v = (given(device, count)[i].requires_grad_() for i, count in enumerate((tokens[0], *tokens[1:] * 2)))
    of_q, of_k = (offsets(0, 0, count, device=device) for count in tokens)
    out, lse = cute_ops_torch.attention(q, k, v, causal=True, cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for x in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (x == 0).all()


@pytest.mark.gpu
def test_many_sequences_on_a_gpu() -> None:
    """More blocks than CTAs; the tensors of a sequence alone give what the packed ones do, gradients but for their
    rounding: how many CTAs share a block of keys, whose sums are added, depends on the size of the whole call.
    """
    lengths = torch.randint(0, 700, (90,), generator=torch.Generator().manual_seed(0))
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    qkv = torch.randn(int(lengths.sum()), 12, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    split = lambda x: x.split([8, 2, 2], dim=-2)  # noqa: E731
    out, lse = cute_ops_torch.attention(*split(qkv), causal=True, deterministic=True, cu_seqlens_q=cu)
    dout = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, qkv, dout, retain_graph=True)
    assert torch.equal(torch.autograd.grad(out, qkv, dout)[0], grad)
    for i in (0, 1, 44, 89):
        part = slice(int(cu[i]), int(cu[i + 1]))
        one = qkv.detach()[None, part].requires_grad_()
        alone, alone_lse = cute_ops_torch.attention(*split(one), causal=True, deterministic=True)
        assert torch.equal(alone[0], out[part])
        assert torch.equal(alone_lse[0], lse[:, part])
        (of_alone,) = torch.autograd.grad(alone, one, dout[None, part])
        torch.testing.assert_close(of_alone[0], grad[part])


@pytest.mark.gpu
def test_a_call_does_not_wait_for_the_gpu() -> None:
    x, cu = given("cuda"), offsets(0, 10, 30, device="cuda")
    cute_ops_torch.attention(*x, cu_seqlens_q=cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cute_ops_torch.attention(*x, cu_seqlens_q=cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", EITHER)
def test_offsets_that_are_wrong_reach_no_other_memory(device: str) -> None:
    """Their results are anything."""
    x = given(device)
    for numbers in ((0, 100, -5, 30), (5, 3, 1), (-9, 50)):
        assert cute_ops_torch.attention(*x, cu_seqlens_q=offsets(*numbers, device=device))[0].shape == (30, 4, 64)
        if device == "cuda":
            torch.cuda.synchronize()


@pytest.mark.slow
def test_a_compiled_graph_of_any_lengths() -> None:
    def function(q: Any, k: Any, v: Any, cu: Any, slopes: Any) -> Any:
        options = {"score_mod": mods.alibi, "captured": {"slopes": slopes}}
        return cute_ops_torch.attention(q, k, v, causal=True, cu_seqlens_q=cu, **options)[0]

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for tokens, cu in ((30, offsets(0, 11, 30)), (41, offsets(0, 2, 2, 40)), (17, offsets(0, 17))):
        x = given(tokens=tokens)
        torch.testing.assert_close(compiled(*x, cu, torch.ones(4)), function(*x, cu, torch.ones(4)))


def test_vmap_and_the_gradient_of_what_a_score_reads() -> None:
    x, cu = [torch.stack([y, y.flip(0)]) for y in given()], torch.stack([offsets(0, 11, 30), offsets(0, 29, 30)])
    found = torch.vmap(lambda q, k, v, cu: cute_ops_torch.attention(q, k, v, cu_seqlens_q=cu)[0])(*x, cu)
    each = [cute_ops_torch.attention(*y, cu_seqlens_q=c)[0] for *y, c in zip(*x, cu, strict=True)]
    assert torch.equal(found, torch.stack(each))
    slopes = torch.rand(2, 4, requires_grad=True)  # of each sequence

    def near(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any) -> Any:
        return score - slopes[batch, head] * abs(q - k)

    q, k, v = (y[0].float() for y in x)
    out, _ = cute_ops_torch.attention(q, k, v, score_mod=near, captured={"slopes": slopes}, cu_seqlens_q=cu[0])
    (grad,) = torch.autograd.grad(out.sin().sum(), slopes)
    right = []
    for i, part in enumerate((slice(0, 11), slice(11, 30))):
        own = slopes.detach()[i : i + 1].requires_grad_()
        alone, _ = cute_ops_torch.attention(
            *(y[None, part] for y in (q, k, v)), score_mod=near, captured={"slopes": own}
        )
        right.append(torch.autograd.grad(alone.sin().sum(), own)[0][0])
    torch.testing.assert_close(grad, torch.stack(right))


@pytest.mark.parametrize(
    ("lead", "options", "error", "said"),
    [
        ((), {"cu_seqlens_k": offsets(0, 3)}, TypeError, "`cu_seqlens_k` was given without `cu_seqlens_q`."),
        ((1,), {"cu_seqlens_q": offsets(0, 3)}, ValueError,
         r"with `cu_seqlens_q`, argument `q` must be \(tokens, heads, headdim\), has shape \(1, 30, 4, 64\)."),
        ((), {"cu_seqlens_q": offsets(0, 3).long()}, TypeError, "`cu_seqlens_q` has dtype int64, expected int32"),
        ((), {"cu_seqlens_q": offsets()}, ValueError, "`cu_seqlens_q`"),
        ((), {"cu_seqlens_q": offsets(0, 3), "cu_seqlens_k": offsets(0, 1, 3)}, ValueError, "`cu_seqlens_k`"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(
    lead: tuple[int, ...], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        cute_ops_torch.attention(*(x.reshape(*lead, *x.shape) for x in given()), **options)
