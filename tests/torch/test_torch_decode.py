"""Attention to caches in PyTorch: drawn calls against float64, programs that decode, and what is refused."""

from __future__ import annotations

import math
import random
import re
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import cute_ops_torch
from cute_ops import testing
from cute_ops.ops.attention.merge_states import merge_states
from tests.ops.attention_calls import NO_FUNCTIONS, Functions
from tests.ops.decode_calls import Decoding, arrays, drawn, drawn_latent, expected, functions_of, latent, of_latent


def tensors(call: Decoding, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The op's inputs; caches keep their strides, and one scale of all heads is repeated without memory."""
    half, found = getattr(torch, call.dtype), {}
    of_caches = torch.float8_e4m3fn if call.float8 else half
    dtypes = {"q": half, "k_cache": of_caches, "v_cache": of_caches}
    for name, a in arrays(call, seed).items():
        if name == "v_scale":
            found[name] = torch.tensor(a[0], device=device).expand(call.g)
            continue
        x = torch.from_numpy(a.astype(np.float32) if name in dtypes else a)
        found[name] = x.to(device, dtypes.get(name, x.dtype), memory_format=torch.preserve_format)
    return found


def check(call: Decoding, seed: int, device: str) -> None:
    given, functions = tensors(call, seed, device), functions_of(call, seed) if seed % 3 == 1 else NO_FUNCTIONS
    captured = {name: torch.from_numpy(a).to(device) for name, a in functions.captured.items()}
    op = partial(cute_ops_torch.decode_attention, score_mod=functions.score, captured=captured)
    check_results(call, seed, op, given, arrays(call, seed), functions)


def check_latent(seed: int, longest: int, device: str) -> None:
    call = drawn_latent(seed, longest)
    given, half = latent(call, seed), getattr(torch, call.dtype)
    made = {n: torch.from_numpy(a.astype(np.float32) if n in ("q", "latent_cache") else a) for n, a in given.items()}
    of_dtype = {n: x.to(device, half if x.is_floating_point() else x.dtype) for n, x in made.items()}
    check_results(call, seed, cute_ops_torch.mla_decode, of_dtype, given)


def check_results(
    call: Decoding, seed: int, op: Any, given: dict[str, torch.Tensor], known: dict[str, Any],
    functions: Functions = NO_FUNCTIONS,
) -> None:  # fmt: skip
    """Results are right, and have the same bits when they are computed again in poisoned memory."""
    right = of_latent(call, known) if "latent_cache" in known else expected(call, known, functions)
    runs, device = [], given["q"].device
    for _ in range(2 if device.type == "cuda" else 1):
        runs.append(op(**given, **call.attrs))
        poison = [torch.full((1 << 16,), math.nan, device=device) for _ in range(8)]
        del poison
    for i, name in enumerate(("out", "lse")):
        what = f"seed {seed}: {call.name}: {name}"
        right[name].assert_holds(runs[0][i].cpu().double().numpy(), what)
        assert all(torch.equal(runs[0][i], again[i]) for again in runs[1:]), what


@pytest.mark.parametrize("part", range(6))
def test_drawn_calls(part: int) -> None:
    for seed in range(8 * part, 8 * part + 8):
        check(drawn(seed, longest=60), seed, "cpu")


def test_drawn_calls_of_latent_attention() -> None:
    for seed in range(16):
        check_latent(seed, 60, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_drawn_calls_of_latent_attention_on_a_gpu(part: int) -> None:
    for seed in range(6 * part, 6 * part + 6):
        check_latent(seed, 700, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(12))
def test_drawn_calls_on_a_gpu(part: int) -> None:
    for seed in range(8 * part, 8 * part + 8):
        check(drawn(seed, longest=700), seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "invariant"), [(0, False), (1, False), (16, True), (24, False)])
def test_every_length_on_a_gpu(size: int, invariant: bool) -> None:
    """In one call, beside each other: all that surrounds a sequence's keys is NaN."""
    keys = -(-301 // size) * size if size else 301
    attrs = {"batch_invariant": invariant}
    check(Decoding(tuple(range(302)), 1, 2, 4, 64, 64, size, keys, attrs=attrs, holes=size == 16), 0, "cuda")


@pytest.mark.gpu
def test_splits_of_many_keys_on_a_gpu() -> None:
    torch.manual_seed(0)
    for batch, keys, heads in ((1, 131072, 8), (3, 40000, 2), (64, 1500, 8)):
        q = torch.randn(batch, 1, 4 * heads, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, keys, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        right = F.scaled_dot_product_attention(
            *(x[-1:].transpose(1, 2).float() for x in (q, k, v)), enable_gqa=True
        ).transpose(1, 2)
        for invariant in (False, True):
            out, _ = cute_ops_torch.decode_attention(q, k, v, lengths, batch_invariant=invariant)
            torch.testing.assert_close(out[-1:].float(), right, atol=2e-3, rtol=2e-2)


@pytest.mark.gpu
def test_one_captured_graph_serves_all_lengths() -> None:
    call = drawn(5)._replace(lengths=(0, 0, 0), size=16, keys=304, attrs={}, s=1)
    given = tensors(call._replace(lengths=(304, 304, 304)), 0, "cuda")
    cute_ops_torch.decode_attention(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cute_ops_torch.decode_attention(**given)
    for lengths in ((0, 1, 304), (17, 300, 16), (64, 63, 65)):
        given["lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        right = cute_ops_torch.decode_attention(**given)
        assert torch.equal(out, right[0])
        assert torch.equal(lse, right[1])


@pytest.mark.gpu
def test_the_bits_of_a_sequence_depend_on_it_alone() -> None:
    call = Decoding((900, 3, 1400, 0, 512), 2, 2, 4, 128, 128, 16, 1408, attrs={"batch_invariant": True})
    given = tensors(call, 0, "cuda")
    out, lse = cute_ops_torch.decode_attention(**given, **call.attrs)
    for i in range(len(call.lengths)):
        each = {name: x if "cache" in name else x[i : i + 1] for name, x in given.items()}
        alone = cute_ops_torch.decode_attention(**each, **call.attrs)
        assert torch.equal(out[i : i + 1], alone[0])
        assert torch.equal(lse[i : i + 1], alone[1])


def decode(steps: int, batch: int, step: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of some steps by caches, and by attention to all tokens."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, steps, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.full((batch, 16, 2, 32), math.nan, dtype=torch.bfloat16) for _ in range(2))
    lengths, found = torch.zeros(batch, dtype=torch.int32), []
    for i in range(steps):
        found.append(step(k_cache, v_cache, *(x[:, i : i + 1] for x in (q, k, v)), lengths))
    return torch.cat(found, dim=1), cute_ops_torch.attention(q, k, v, causal=True)[0]


def one_step(
    k_cache: torch.Tensor, v_cache: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    slots = torch.arange(len(lengths)) * k_cache.shape[1] + lengths
    cute_ops_torch.append_kv(k_cache, v_cache, k, v, slots[:, None])
    lengths += 1
    out: torch.Tensor = cute_ops_torch.decode_attention(q, k_cache, v_cache, lengths)[0]
    return out


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_equal_attention_to_all_tokens(compiled: bool) -> None:
    """A step writes its tokens, then attends; compiled once, it serves all lengths without reading them."""
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(one_step, fullgraph=True, backend=counter) if compiled else one_step
    found, right = decode(9, 3, step)
    torch.testing.assert_close(found.float(), right.float(), atol=0.02, rtol=0.02)
    assert counter.frame_count == compiled


def test_pages_are_those_of_append_kv() -> None:
    torch.manual_seed(0)
    new = [torch.randn(2, 7, 2, 32, dtype=torch.bfloat16) for _ in range(2)]
    table, lengths = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32), torch.tensor([7, 7])
    paged = [torch.full((6, 3, 2, 32), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    places = torch.arange(7)
    slots = table[:, places // 3].to(torch.int64) * 3 + places % 3
    cute_ops_torch.append_kv(*paged, *new, slots)
    q = torch.randn(2, 3, 4, 32, dtype=torch.bfloat16)
    found = cute_ops_torch.decode_attention(q, *paged, lengths, table)
    right = cute_ops_torch.decode_attention(q, *new, lengths)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_append_kv_rounds_to_float8(device: str, rotated: bool, kind: torch.dtype) -> None:
    """To the bits of torch: of each head's scale, or of one; heads may stand before slots, infinities become 448."""
    draw = torch.Generator().manual_seed(0)
    new = [(torch.randn(2, 7, 3, size, generator=draw) * 2).to(device, kind) for size in (32, 64)]
    new[0][0, 1, 2, 3], new[1][0, 2, 0, :2] = math.nan, torch.tensor([math.inf, -math.inf])
    tables = [torch.randn(7, 8, generator=draw).to(device) for _ in range(2)] if rotated else [None, None]
    scales = [torch.rand(3, generator=draw).to(device) / 40, torch.tensor(0.003, device=device).expand(3)]
    slots = (torch.arange(2)[:, None] * 9 + torch.arange(7)).to(device)
    slots[1, 4] = -1
    caches = [torch.zeros(2, 3, 9, x.shape[-1], device=device).to(torch.float8_e4m3fn).transpose(1, 2) for x in new]
    cute_ops_torch.append_kv(*caches, *new, slots, *tables, *scales)
    if rotated:
        new[0] = cute_ops_torch.rope(new[0].float(), *tables)
    for x, cache, scale in zip(new, caches, scales, strict=True):
        right = torch.zeros(cache.shape, device=device)
        right[:, :7] = (x.float() * (1 / scale)[:, None]).clamp(-448, 448)
        right[1, 4] = 0
        torch.testing.assert_close(cache.float(), right.to(cache.dtype).float(), rtol=0, atol=0, equal_nan=True)
    found, _ = cute_ops_torch.decode_attention(
        torch.randn(2, 1, 6, 32).to(device, torch.bfloat16), *caches, torch.tensor([0, 4], device=device),
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    assert found.isfinite().all()


def test_caches_of_other_dtypes_are_refused() -> None:
    new, slots = torch.zeros(1, 2, 32), torch.zeros(1, dtype=torch.int64)
    caches = [torch.zeros(1, 1, 2, 32, dtype=torch.float16) for _ in range(2)]
    said = "caches are in the dtype of k and v or in float8_e4m3fn, got float16 for float32."
    with pytest.raises(ValueError, match=re.escape(said)):
        cute_ops_torch.append_kv(*caches, new, new, slots)


def test_latent_attention_is_that_of_the_heads_own_keys_and_values() -> None:
    """Weights that make keys and values of a latent are absorbed by queries and results."""
    torch.manual_seed(0)
    b, h, keys, rank, rotated, nope = 2, 4, 9, 64, 16, 24
    latents, of_keys = torch.randn(b, keys, rank), torch.randn(b, keys, rotated)
    w_k, w_v = (torch.randn(h, nope, rank) / 8 for _ in range(2))
    q, q_rotated = torch.randn(b, 1, h, nope), torch.randn(b, 1, h, rotated)
    absorbed = torch.cat([torch.einsum("bshn,hnr->bshr", q, w_k), q_rotated], -1).half()
    cache = torch.cat([latents, of_keys], -1).half()
    scale = (nope + rotated) ** -0.5
    out, _ = cute_ops_torch.mla_decode(absorbed, cache, torch.tensor([keys] * b), scale=scale, rank=rank)
    found = torch.einsum("bshr,hnr->bshn", out.float(), w_v)
    k, v = (torch.einsum("btr,hnr->bhtn", latents, w) for w in (w_k, w_v))
    k = torch.cat([k, of_keys[:, None].expand(-1, h, -1, -1)], -1)
    whole = torch.cat([q, q_rotated], -1).transpose(1, 2)
    right = F.scaled_dot_product_attention(whole, k, v, scale=scale).transpose(1, 2)
    torch.testing.assert_close(found, right, atol=0.02, rtol=0.02)


def test_caches_of_latents_are_those_of_append_kv() -> None:
    torch.manual_seed(0)
    new, slots = torch.randn(5, 80, dtype=torch.bfloat16), torch.tensor([2, 7, 0, 5, 11])
    cache = torch.zeros(4, 3, 80, dtype=torch.bfloat16)
    heads, rows = cache[:, :, None], new[:, None]
    cute_ops_torch.append_kv(heads[..., :64], heads[..., 64:], rows[..., :64], rows[..., 64:], slots)
    assert torch.equal(cache.flatten(0, 1)[slots], new)
    assert cache.count_nonzero() <= new.numel()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scale": 0.0}, "scale is a positive number, 1 / sqrt of the headdim before absorption; got 0.0."),
        ({"scale": 1e-103}, "scale is from 2^-126 to 2^126, as float32 holds it, got 1e-103."),
        ({"rank": 48}, "at most 576; got rank=48 of d=80."),
        ({"latent_cache": torch.zeros(3, 9, 80, dtype=torch.bfloat16)}, "got p=3 of them for b=2 sequences."),
    ],
)
def test_what_does_not_fit_latent_attention_is_said(changed: dict[str, Any], said: str) -> None:
    given = {"q": torch.zeros(2, 1, 4, 80, dtype=torch.bfloat16), "scale": 0.1, "rank": 64}
    given |= {"latent_cache": torch.zeros(2, 9, 80, dtype=torch.bfloat16), "lengths": torch.tensor([1, 2]), **changed}
    with pytest.raises(ValueError, match=re.escape(said)):
        cute_ops_torch.mla_decode(**given)


def test_a_pool_without_pages() -> None:
    """No entry of a table is one of its pages: there is nothing to attend to."""
    lengths, table = torch.tensor([0, 3]), torch.tensor([[-1, 0], [0, 7]])
    q, pool = torch.randn(2, 2, 4, 32).half(), torch.randn(0, 4, 2, 32).half()
    results = (
        cute_ops_torch.decode_attention(q, pool, pool, lengths, table),
        cute_ops_torch.attention(q, pool, pool, causal=True, lengths=lengths, page_table=table),
        cute_ops_torch.mla_decode(
            torch.randn(2, 1, 4, 80).half(), torch.randn(0, 4, 80).half(), lengths, table, 0.1, 64
        ),
    )
    for out, lse in results:
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_lengths_of_any_kind() -> None:
    call = Decoding((5, 5), 1, 1, 2, 32, 32, 0, 5)
    given = tensors(call, 0)
    whole = cute_ops_torch.decode_attention(**given)
    given["lengths"] = torch.tensor([2**40, 5])
    assert torch.equal(cute_ops_torch.decode_attention(**given)[0], whole[0])
    given["lengths"] = torch.tensor([-(2**40), -1])
    out, lse = cute_ops_torch.decode_attention(**given)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_a_shared_prefix_is_merged_with_own_keys() -> None:
    """A prefix is attended to once, by the queries of all sequences side by side."""
    torch.manual_seed(0)
    shared = [torch.randn(1, 11, 2, 32, dtype=torch.bfloat16) for _ in range(2)]
    own = [torch.randn(3, 9, 2, 32, dtype=torch.bfloat16) for _ in range(2)]
    q, lengths = torch.randn(3, 1, 4, 32, dtype=torch.bfloat16), torch.tensor([9, 4, 0])
    of_prefix = cute_ops_torch.attention(q.transpose(0, 1), *shared)
    a = of_prefix[0].transpose(0, 1), of_prefix[1].transpose(0, 2)
    b = cute_ops_torch.decode_attention(q, *own, lengths)
    out, lse = cute_ops_torch.merge_states(*a, *b)
    whole = [torch.cat([x.expand(3, -1, -1, -1), y], dim=1) for x, y in zip(shared, own, strict=True)]
    right = cute_ops_torch.decode_attention(q, *whole, lengths + 11)
    torch.testing.assert_close(out.float(), right[0].float(), atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, right[1])
    assert torch.equal(out[2], a[0][2])


def check_merge(device: str, dtype: torch.dtype, e: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 5, 3, e, device=device).to(dtype) for _ in range(2)]
    sums = [torch.randn(2, 3, 5, device=device) * 9 for _ in range(2)]
    for i, which in enumerate(((0,), (1,), (0, 1))):
        for each in which:
            sums[each][0, i] = -math.inf
            given[each][0, :, i] = math.nan
    found = cute_ops_torch.merge_states(given[0], sums[0], given[1], sums[1])
    arguments = [x.cpu().float().numpy() for x in (given[0], sums[0], given[1], sums[1])]
    names = dict(zip(merge_states.inputs, arguments, strict=True))
    halves = {name: x.astype(testing.numpy_dtype(str(dtype)[6:])) if "out" in name else x for name, x in names.items()}
    results = [x.cpu().float().numpy() for x in found]
    testing.check(merge_states, halves, {}, (results[0].astype(halves["out_a"].dtype), results[1]))
    again = cute_ops_torch.merge_states(given[1], sums[1], given[0], sums[0])
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


def test_merged_states() -> None:
    check_merge("cpu", torch.bfloat16, 16)


@pytest.mark.parametrize("batched", [every for n in (1, 2, 3, 4) for every in combinations(range(4), n)])
def test_merged_states_under_vmap(batched: tuple[int, ...]) -> None:
    """Results and log-sums that examples share are repeated for each, along drawn dims of those that they do not."""
    rng = random.Random(str(batched))
    examples, shapes = 3, ((2, 5, 3, 8), (2, 3, 5)) * 2
    given = [torch.randn(*(examples,) * (i in batched), *shape) for i, shape in enumerate(shapes)]
    dims = [rng.randint(-len(shapes[i]) - 1, len(shapes[i])) if i in batched else None for i in range(4)]
    moved = [x if dim is None else x.movedim(0, dim) for x, dim in zip(given, dims, strict=True)]
    found = torch.vmap(cute_ops_torch.merge_states, in_dims=tuple(dims))(*moved)
    for example in range(examples):
        own = [x[example] if i in batched else x for i, x in enumerate(given)]
        for one, each in zip(cute_ops_torch.merge_states(*own), found, strict=True):
            torch.testing.assert_close(each[example], one)


@pytest.mark.gpu
@pytest.mark.parametrize("e", [7, 36, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_states_on_a_gpu(dtype: torch.dtype, e: int) -> None:
    check_merge("cuda", dtype, e)


TESTS = ("test_schema", "test_faketensor")


def test_registered_op_passes_the_checks_of_torch() -> None:
    given = tensors(Decoding((5, 3), 2, 1, 2, 32, 16, 2, 6, sinks=True), 0)
    torch.library.opcheck(torch.ops.cute.decode_attention.default, tuple(given.values()), test_utils=TESTS)


CACHE = (2, 9, 2, 32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"k_cache": (2, 9, 3, 32), "v_cache": (2, 9, 3, 32)}, "g*r"),
        ({"q": (2, 17, 4, 32)}, "a sequence has 1 to 16 queries, got s=17; `attention` takes more."),
        ({"k_cache": (4, 9, 2, 32), "v_cache": (4, 9, 2, 32)}, "got p=4 of them for b=2 sequences."),
        ({"v_cache": (2, 9, 2, 24)}, "a head has 16, 32 ... 256 elements, got e=24."),
        ({"v_cache": (2, 8, 2, 32)}, "has c=8, but c=9"),
        ({"window": -1}, "window is not negative, got -1."),
        ({"softcap": float("inf")}, "as float32 holds them, got scale=0.0, softcap=inf."),
        ({"k_scale": torch.ones(2)}, "k_scale and v_scale are for caches in float8_e4m3fn, got bfloat16."),
    ],
)
def test_what_does_not_fit_is_said(changed: dict[str, Any], said: str) -> None:
    shapes = {"q": (2, 1, 4, 32), "k_cache": CACHE, "v_cache": CACHE, **changed}
    given = {n: torch.zeros(x, dtype=torch.bfloat16) if isinstance(x, tuple) else x for n, x in shapes.items()}
    with pytest.raises(ValueError, match=re.escape(said)):
        cute_ops_torch.decode_attention(**given, lengths=torch.zeros(2, dtype=torch.int32))


def test_a_gradient_is_refused() -> None:
    given = tensors(Decoding((5,), 1, 1, 2, 32, 32, 0, 5), 0)
    with pytest.raises(NotImplementedError, match=r"cute\.decode_attention.*caches have no gradient"):
        cute_ops_torch.decode_attention(given.pop("q").requires_grad_(), **given)[0].sum().backward()
