"""Attention to caches in PyTorch: drawn calls against float64, programs, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import cute_ops_torch
from cute_ops import mods
from tests.ops.cached_calls import drawn

EITHER = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_right(seed: int, device: str, longest: int) -> None:
    call = drawn(seed, longest)
    given, half, tensors = call.arrays(seed), getattr(torch, call.caches.dtype), {}
    of_caches = torch.float8_e4m3fn if call.caches.float8 else half
    for name, a in given.items():
        x = torch.from_numpy(a.astype(np.float32) if name in "qkv" else np.array(a))
        dtype = {"q": half, "k": of_caches, "v": of_caches}.get(name, x.dtype)
        tensors[name] = x.to(device, dtype, memory_format=torch.preserve_format)
    captured = {name: tensors.pop(name) for name in call.functions.captured}
    runs = []
    for _ in range(2 if device == "cuda" else 1):
        out, lse = cute_ops_torch.attention(**tensors, **call.attrs, **call.functions.options, captured=captured)
        runs.append({"out": out, "lse": lse})
        poison = [torch.full((1 << 16,), math.nan, device=device) for _ in range(8)]
        del poison
    found = {name: x.cpu().double().numpy() for name, x in runs[0].items()}
    call.assert_right(given, found, f"seed {seed}")
    for name, x in runs[0].items():
        assert all(torch.equal(x, again[name]) for again in runs[1:]), f"seed {seed}: {call.name}: {name}"


@pytest.mark.parametrize("part", range(3))
def test_drawn_calls(part: int) -> None:
    for seed in range(part * 8, part * 8 + 8):
        assert_right(seed, "cpu", 40)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_drawn_calls_on_a_gpu(part: int) -> None:
    for seed in range(part * 8, part * 8 + 8):
        assert_right(seed, "cuda", 400)


def chunks(device: str, size: int) -> dict[str, torch.Tensor]:
    """Caches in pages of a prompt of 40 tokens each, whose pages are mixed."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 40, 2, 64, generator=draw).bfloat16() for _ in range(2))
    each = -(-40 // size)
    table = torch.randperm(2 * each, generator=draw).reshape(2, each)
    pools = []
    for x in (k, v):
        pool = torch.full((2 * each, size, 2, 64), math.nan, dtype=x.dtype)
        pool[table[:, torch.arange(40) // size], torch.arange(40) % size] = x
        pools.append(pool)
    q = torch.randn(2, 40, 4, 64, generator=draw).bfloat16()
    found = {"q": q, "k": k, "v": v, "k_pages": pools[0], "v_pages": pools[1], "table": table.int()}
    return {name: x.to(device) for name, x in found.items()}


@pytest.mark.parametrize("size", [1, 7, 16])
@pytest.mark.parametrize("device", EITHER)
def test_chunks_of_a_prompt_are_the_whole(device: str, size: int) -> None:
    """A page table of int32, then contiguous caches, packed queries, and a window: all see the keys so far."""
    x = chunks(device, size)
    for window in (-1, 9):
        whole, whole_lse = cute_ops_torch.attention(x["q"], x["k"], x["v"], causal=True, left=window)
        for start, end in ((0, 13), (13, 30), (30, 40)):
            part, lengths = x["q"][:, start:end], torch.full((2,), end, device=device)
            given: dict[str, Any] = {"causal": True, "left": window, "lengths": lengths}
            cu = torch.arange(3, device=device, dtype=torch.int32) * (end - start)
            for out, lse in (
                cute_ops_torch.attention(part, x["k_pages"], x["v_pages"], page_table=x["table"], **given),
                cute_ops_torch.attention(part, x["k"], x["v"], **given),
            ):
                torch.testing.assert_close(out.float(), whole[:, start:end].float(), atol=0.02, rtol=0.02)
                torch.testing.assert_close(lse, whole_lse[:, :, start:end], atol=1e-4, rtol=1e-4)
            packed, _ = cute_ops_torch.attention(
                part.flatten(0, 1), x["k_pages"], x["v_pages"], page_table=x["table"], cu_seqlens_q=cu, **given
            )
            torch.testing.assert_close(packed.float(), whole[:, start:end].flatten(0, 1).float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("device", EITHER)
def test_changes_of_scores_are_those_of_decoding(device: str) -> None:
    x, slopes = chunks(device, 8), torch.rand(4, device=device)
    lengths = torch.tensor([40, 17], device=device)
    given: dict[str, Any] = {"score_mod": mods.alibi, "captured": (slopes,), "page_table": x["table"]}
    caches = x["k_pages"], x["v_pages"]
    found = cute_ops_torch.decode_attention(x["q"][:, :5], *caches, lengths, **given)
    right = cute_ops_torch.attention(x["q"][:, :5], *caches, causal=True, lengths=lengths, **given)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_calls(packed: bool) -> None:
    """Lengths and pages are read on the device alone, and functions read arrays."""
    x, lengths, slopes = chunks("cpu", 8), torch.tensor([40, 17]), torch.rand(4)
    cu = torch.tensor([0, 13, 26], dtype=torch.int32)
    q = x["q"][:, :13].flatten(0, 1) if packed else x["q"][:, :13]

    def call(q: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.attention(
            q, x["k_pages"], x["v_pages"], causal=True, lengths=lengths, page_table=table, score_mod=mods.alibi,
            captured=(slopes,), cu_seqlens_q=cu if packed else None,
        )[0]  # fmt: skip

    given = q, lengths, x["table"], slopes
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


@pytest.mark.gpu
def test_one_captured_graph_serves_all_lengths() -> None:
    x = chunks("cuda", 8)
    lengths = torch.tensor([40, 40], device="cuda")
    given: dict[str, Any] = {"causal": True, "lengths": lengths, "page_table": x["table"]}
    caches = x["k_pages"], x["v_pages"]
    cute_ops_torch.attention(x["q"], *caches, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cute_ops_torch.attention(x["q"], *caches, **given)
    for new in ((0, 1), (40, 7), (33, 40)):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        right = cute_ops_torch.attention(x["q"], *caches, **given)
        assert torch.equal(out, right[0])
        assert torch.equal(lse, right[1])


ZEROS, CACHE = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 9, 2, 64, dtype=torch.bfloat16)
LENGTHS = torch.tensor([9, 3])


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"lengths": None, "page_table": LENGTHS[:, None]}, TypeError, "`page_table` was given without `lengths`."),
        ({"cu_seqlens_k": LENGTHS}, TypeError, "`cu_seqlens_k` was given beside `lengths`, which keys in caches have."),
        ({"cu_seqlens_q": LENGTHS.int()}, ValueError, "argument `q` must be (tokens, heads, headdim)"),
        ({"lengths": torch.tensor([9])}, ValueError, "argument `lengths` has b=1, but b=2."),
        ({"k": CACHE[:1], "v": CACHE[:1]}, ValueError, "kv heads, headdim), got p=1 of them for b=2"),
        ({"lengths": torch.tensor([9.0, 3.0])}, TypeError, "argument `lengths` has dtype float32"),
        ({"k_scale": LENGTHS.float()}, ValueError, "k_scale and v_scale are for caches in float8_e4m3fn, got bf"),
        ({"lengths": None, "v_scale": LENGTHS.float()}, TypeError, "`v_scale` was given without `lengths`."),
        ({"captured": (LENGTHS,)}, TypeError, "`captured` was given, but no score_mod or mask_mod that reads it."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(changed: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)) as raised:
        cute_ops_torch.attention(**{"q": ZEROS, "k": CACHE, "v": CACHE, "lengths": LENGTHS, **changed})
    assert str(raised.value).startswith("cute.attention")


def test_caches_have_no_gradient() -> None:
    with pytest.raises(NotImplementedError, match="caches have no gradient"):
        cute_ops_torch.attention(ZEROS.clone().requires_grad_(), CACHE, CACHE, lengths=LENGTHS)[0].sum().backward()
