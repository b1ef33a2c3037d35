"""Attention in PyTorch: drawn calls against float64, on a CPU and on a GPU, and what is refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cute_ops_torch
from cute_ops import mods
from cute_ops.ops.attention import config
from cute_ops.ops.attention.attention import declare
from tests.ops.attention_calls import (
    Call,
    arrays,
    assert_holds_with_functions,
    drawn,
    drawn_with_functions,
    expected,
)


def tensors(call: Call, seed: int, device: str) -> list[Any]:
    q, k, v, sinks = arrays(call, seed)
    dtype = getattr(torch, call.dtype)
    q, k, v = (torch.from_numpy(x).to(device, dtype) for x in (q, k, v))
    if call.packed:
        q, k, v = torch.cat([q, k, v], dim=2).split([call.h, call.g, call.g], dim=2)
    return [q, k, v, None if sinks is None else torch.from_numpy(sinks).to(device)]


def wide(tensors: Sequence[torch.Tensor | None]) -> list[np.ndarray | None]:
    return [None if x is None else x.detach().cpu().float().numpy() for x in tensors]


def assert_right(call: Call, seed: int, device: str, attend: Callable[..., Any] = cute_ops_torch.attention) -> None:
    """Results and gradients are right, and have the same bits when they are computed again in poisoned memory, if asked
    to.
    """
    given = tensors(call, seed, device)
    torch.manual_seed(seed)
    dout = torch.randn(call.batch, call.s, call.h, call.e, dtype=given[0].dtype, device=device)
    dlse = torch.randn(call.batch, call.h, call.s, device=device)
    runs = []
    for _ in range(2 if device == "cuda" else 1):
        leaves = [None if x is None else x.detach().requires_grad_() for x in given]
        out, lse = attend(*leaves, **call.attrs)
        grads = torch.autograd.grad([out, lse], [x for x in leaves if x is not None], [dout, dlse])
        names = ("out", "lse", "dq", "dk", "dv", "dsinks")
        runs.append(dict(zip(names, (out, lse, *grads), strict=False)))
        poison = [torch.full_like(x, math.nan) for x in runs[-1].values() for _ in range(3)]
        del poison
    right = expected(call, wide(given), tuple(wide([dout, dlse])))  # type: ignore[arg-type]
    for name, bound in right.items():
        what = f"seed {seed}: {call.name}: {name}"
        bound.assert_holds(wide([runs[0][name]])[0], what)  # type: ignore[arg-type]
        if name not in ("dq", "dk", "dv") or call.attrs.get("deterministic"):
            assert all(torch.equal(runs[0][name], again[name]) for again in runs[1:]), what


@pytest.mark.parametrize("seed", range(24))
def test_drawn_calls(seed: int) -> None:
    assert_right(drawn(seed, longest=90), seed, "cpu")


def assert_right_with_functions(seed: int, device: str, longest: int) -> None:
    """Results and gradients of a call with drawn functions, those of what they read included, are right, and have the
    same bits when they are computed again in poisoned memory.
    """
    call, functions = drawn_with_functions(seed, longest)
    named = {n: x for n, x in zip((*"qkv", "sinks"), tensors(call, seed, device), strict=True) if x is not None}
    captured = {name: torch.from_numpy(array).to(device) for name, array in functions.captured.items()}
    torch.manual_seed(seed)
    dout = torch.randn(call.batch, call.s, call.h, call.e, dtype=named["q"].dtype, device=device)
    dlse = torch.randn(call.batch, call.h, call.s, device=device)
    leaves = [*named.values(), *(captured[name] for name in functions.differentiable)]
    names = ["out", "lse", *(f"d{name}" for name in (*named, *functions.differentiable))]
    for leaf in leaves:
        leaf.requires_grad_()
    runs = []
    for _ in range(2 if device == "cuda" else 1):
        results = cute_ops_torch.attention(**named, **call.attrs, **functions.options, captured=captured)
        found = (*results, *torch.autograd.grad(results, leaves, [dout, dlse]))
        runs.append(dict(zip(names, found, strict=True)))
        poison = [torch.full_like(x, math.nan) for x in found for _ in range(3)]
        del poison
    given, cotangents = wide([named.get(name) for name in (*"qkv", "sinks")]), tuple(wide([dout, dlse]))
    right = expected(call, given, cotangents, functions)  # type: ignore[arg-type]
    arrays = {name: wide([x])[0] for name, x in runs[0].items()}
    assert_holds_with_functions(functions, arrays, right, f"seed {seed}: {call.name}")  # type: ignore[arg-type]
    for name, found in runs[0].items():
        if name not in ("dq", "dk", "dv") or call.attrs.get("deterministic"):
            assert all(torch.equal(found, again[name]) for again in runs[1:]), f"seed {seed}: {call.name}: {name}"


@pytest.mark.parametrize("seed", range(18))
def test_drawn_calls_with_functions(seed: int) -> None:
    assert_right_with_functions(seed, "cpu", 60)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(18))
def test_drawn_calls_with_functions_on_a_gpu(part: int) -> None:
    for seed in range(part * 2, part * 2 + 2):
        assert_right_with_functions(seed, "cuda", 500)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(24))
def test_drawn_calls_on_a_gpu(part: int) -> None:
    for seed in range(part * 2, part * 2 + 2):
        assert_right(drawn(seed), seed, "cuda")


@pytest.mark.gpu
def test_kernels_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those by ``mma.sync``, which Hopper runs, too; ``--attention-by-warps`` runs all of attention's tests by them."""
    monkeypatch.setattr(config, "by_warpgroups", lambda arch: False)
    attend = cute_ops_torch.register(declare("attention_by_warps"))
    for seed in range(100, 108):
        assert_right(drawn(seed), seed, "cuda", attend)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_and_heads_on_a_gpu(causal: bool) -> None:
    """Several blocks of queries for each CTA, and more keys and values than L2 holds."""
    q, k, v = (
        torch.randn(4, 4096, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (16, 4, 4)
    )
    out, _ = cute_ops_torch.attention(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, (q, k, v), dout)
    for b in (0, 3):
        whole = [x.detach()[b].float().transpose(0, 1).requires_grad_() for x in (q, k, v)]
        right = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
        grads = torch.autograd.grad(right, whole, dout[b].float().transpose(0, 1))
        for got, expected_, most in zip(found, (right, *grads), (0.03, 0.03, 0.06, 0.06), strict=True):
            assert (got[b].float().transpose(0, 1) - expected_).abs().max() < most


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("device", "most"), [("cpu", 8), pytest.param("cuda", 300, marks=[pytest.mark.gpu, pytest.mark.slow])]
)
def test_every_length(device: str, most: int, d: int) -> None:
    """As many queries as keys, and other numbers of both, around each tile; some queries come before all keys."""
    for n in range(1, most + 1):
        for s, t in ((n, n), (n, 7 * n % most + 1)):
            q, k, v = (
                torch.randn(1, length, heads, d, device=device, dtype=torch.bfloat16, requires_grad=True)
                for length, heads in ((s, 2), (t, 1), (t, 1))
            )
            out, _ = cute_ops_torch.attention(q, k, v, causal=True, deterministic=n % 2 == 0)
            dout = torch.randn_like(out)
            found = out, *torch.autograd.grad(out, (q, k, v), dout)
            wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
            scores = torch.einsum("bshd,btgd->bhst", wide[0], wide[1]) * d**-0.5
            seen = torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)
            weights = scores.masked_fill(~seen, -1e300).softmax(-1) * seen
            right = torch.einsum("bhst,btgd->bshd", weights, wide[2])
            grads = torch.autograd.grad(right, wide, dout.double())
            for got, expected_ in zip(found, (right, *grads), strict=True):
                assert (got - expected_).abs().max() <= 0.012 * max(expected_.abs().max().item(), 1), (s, t)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    batch = 2**31 // (128 * 8 * 64) + 3
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("40 GB of memory are not free")
    q = torch.empty(batch, 128, 8, 64, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    k, v = (torch.randn(batch, 128, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out, _ = cute_ops_torch.attention(q, k, v, causal=True)
    found = out, *torch.autograd.grad(out, (q, k, v), out.detach())
    for b in (0, batch - 1):
        one = [x.detach()[b : b + 1].clone().requires_grad_() for x in (q, k, v)]
        alone, _ = cute_ops_torch.attention(*one, causal=True)
        right = alone, *torch.autograd.grad(alone, one, alone.detach())
        for got, expected_ in zip(found, right, strict=True):
            torch.testing.assert_close(got[b : b + 1], expected_, rtol=0.02, atol=0.02)


def test_the_definition_is_that_of_torch() -> None:
    q, k, v = (torch.randn(2, 33, 4, 32, dtype=torch.bfloat16) for _ in range(3))
    out, _ = cute_ops_torch.attention(q, k, v, causal=True)
    wide = [x.float().transpose(1, 2) for x in (q, k, v)]
    right = F.scaled_dot_product_attention(*wide, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out.float(), right, atol=0.02, rtol=0.02)


def test_no_keys_and_no_queries() -> None:
    q, k = torch.randn(2, 3, 4, 32, dtype=torch.bfloat16), torch.randn(2, 0, 2, 32, dtype=torch.bfloat16)
    out, lse = cute_ops_torch.attention(q, k, k)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    sinks = torch.randn(4, requires_grad=True)
    cute_ops_torch.attention(q, k, k, sinks)[1].sum().backward()
    assert sinks.grad.tolist() == [6.0] * 4  # of six rows, whose log-sum-exp is the sink
    out, lse = cute_ops_torch.attention(q[:, :0], q, q)
    assert out.shape == (2, 0, 4, 32)
    assert lse.shape == (2, 4, 0)


@pytest.mark.slow
def test_a_compiled_graph_with_dynamic_lengths() -> None:
    compiled = torch.compile(
        lambda q, k, v: cute_ops_torch.attention(q, k, v, causal=True)[0], fullgraph=True, dynamic=True
    )
    for s in (5, 9, 17):
        q, k, v = (torch.randn(2, s, 2, 32, dtype=torch.bfloat16) for _ in range(3))
        assert torch.equal(compiled(q, k, v), cute_ops_torch.attention(q, k, v, causal=True)[0])


@pytest.mark.slow
def test_gradients_in_a_compiled_graph_are_those_of_eager_calls() -> None:
    given = [torch.randn(2, 9, heads, 32, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]

    def loss(*x: torch.Tensor) -> torch.Tensor:
        out, lse = cute_ops_torch.attention(*x, causal=True, left=3)
        return out.float().square().sum() + lse.sum()

    eager = torch.autograd.grad(loss(*given), given)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*given), given)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_vmap_over_sequences() -> None:
    q, k, v = (torch.randn(3, 2, 9, 2, 32, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.vmap(lambda *x: cute_ops_torch.attention(*x, causal=True))(q, k, v)
    each = [cute_ops_torch.attention(*x, causal=True) for x in zip(q, k, v, strict=True)]
    assert torch.equal(out, torch.stack([o for o, _ in each]))
    assert torch.equal(lse, torch.stack([x for _, x in each]))


Q = (2, 5, 4, 32)


@pytest.mark.parametrize(
    ("k", "attrs", "said"),
    [
        ((2, 5, 3, 32), {}, "argument `q` has g*r=4, expected a multiple of 3."),
        ((2, 5, 2, 32), {"causal": True, "right": 3}, "causal=True is right=0, got right=3, too."),
        ((2, 5, 2, 32), {"left": -2}, "at least -1, which is all keys, got left=-2, right=-1."),
        ((2, 5, 2, 32), {"left": 3, "right": -5}, "at least -1, which is all keys, got left=3, right=-5."),
        ((2, 5, 2, 32), {"softcap": -1.0}, "scale and softcap are not negative, got scale=0.0, softcap=-1.0."),
        ((2, 5, 2, 32), {"softcap": 1e-103}, "0 or from 2^-126 to 2^126, as float32 holds them, got scale=0.0, soft"),
        ((2, 5, 2, 48), {}, "has d=48, but d=32"),
    ],
)
def test_what_does_not_fit_is_said(k: tuple[int, ...], attrs: dict[str, Any], said: str) -> None:
    q, keys = torch.zeros(Q, dtype=torch.bfloat16), torch.zeros(k, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=re.escape(said)):
        cute_ops_torch.attention(q, keys, keys, **attrs)


def test_heads_of_odd_size_are_refused() -> None:
    q = torch.zeros(1, 2, 1, 40, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a head has 16, 32 \.\.\. 256 elements, got d=40\."):
        cute_ops_torch.attention(q, q, q)


@pytest.mark.parametrize("read", ["out", "lse"])
def test_the_gradient_of_one_result_needs_no_cotangent_of_the_other(read: str) -> None:
    call = Call(1, 9, 12, 4, 2, 32, 32, "bfloat16", {"causal": True}, True, False)
    leaves = [x.requires_grad_() for x in tensors(call, 0, "cpu")]
    out, lse = cute_ops_torch.attention(*leaves, **call.attrs)
    cotangents = torch.randn_like(out) * (read == "out"), torch.randn_like(lse) * (read == "lse")
    which = ("out", "lse").index(read)
    found = torch.autograd.grad((out, lse)[which], leaves, cotangents[which])
    right = expected(call, wide(leaves), tuple(wide(cotangents)))  # type: ignore[arg-type]
    for name, grad in zip(("dq", "dk", "dv", "dsinks"), found, strict=True):
        right[name].assert_holds(wide([grad])[0], name)  # type: ignore[arg-type]


def plain(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.bfloat16)


DOCUMENT, SLOPES = torch.zeros(2, 5, dtype=torch.int64), torch.ones(4)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"captured": (SLOPES,)}, TypeError, "`captured` was given, but no score_mod or mask_mod that reads it."),
        ({"captured": SLOPES}, TypeError, "`captured` was given, but no score_mod or mask_mod that reads it."),
        ({"score_mod": mods.alibi, "captured": SLOPES}, TypeError,
         "cute.attention: argument `captured` must be a tuple or a dict of arrays, got one array."),
        ({"score_mod": mods.alibi}, TypeError, "score_mod alibi reads `slopes`, but `captured` has 0."),
        ({"mask_mod": mods.causal, "captured": (SLOPES,)}, TypeError, "reads no arrays, but `captured` has 1"),
        ({"score_mod": mods.alibi, "captured": {"slope": SLOPES}}, TypeError,
         "reads `slopes`, which `captured` does not have"),
        ({"mask_mod": mods.causal, "captured": {"slopes": SLOPES}}, TypeError, "has `slopes`, which no function"),
        ({"mask_mod": lambda xp, q, k: k <= q}, TypeError,
         "must take (xp, batch, head, q, k, *captured), takes 3 arguments."),
        ({"mask_mod": 3}, TypeError, "cute.attention: argument `mask_mod` must be a function, got int."),
        ({"mask_mod": mods.documents, "captured": (SLOPES,)}, ValueError,
         "`document` has 1 dims, but is read by 2 indices: expected 2."),
        ({"score_mod": mods.alibi, "captured": (torch.ones(3),)}, ValueError, "argument `slopes` has"),
        ({"score_mod": mods.alibi, "captured": ([1.0] * 4,)}, TypeError, "`captured` has a list, expected tensors."),
        ({"score_mod": lambda xp, score, batch, head, q, k: score * batch}, ValueError,
         "`batch` may only be the first index of a captured array"),
        ({"score_mod": lambda xp, score, batch, head, q, k, x: score + x[q, batch], "captured": (SLOPES,)}, ValueError,
         "`x` is read by `batch` in another place than the first."),
        ({"score_mod": lambda xp, score, batch, head, q, k, x: score + x[q] * x[q, k], "captured": (SLOPES,)},
         ValueError, "`x` is read with 1 indices and with 2."),
        ({"score_mod": lambda xp, score, batch, head, q, k, x: score + x[()], "captured": (torch.ones(()),)},
         ValueError, "`x` has no dims: give it one, and read element 0."),
        ({"mask_mod": lambda xp, batch, head, q, k: q - k}, TypeError, "it returns float32, not one bool"),
        ({"score_mod": lambda xp, score, batch, head, q, k: k <= q}, TypeError, "it returns bool, not one float32"),
        ({"score_mod": lambda xp, score, batch, head, q, k: score if q > k else 0.0}, TypeError,
         "Python's control flow on a value"),
        ({"score_mod": lambda xp, score, batch, head, q, k: xp.sum(score, axis=-1, keepdims=True)}, TypeError,
         "xp.sum of scores"),
        ({"score_mod": lambda xp, score, batch, head, q, k, x: score + x, "captured": (SLOPES,)}, TypeError,
         "arithmetic on a captured array"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_functions_is_said(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        cute_ops_torch.attention(plain(2, 5, 4, 32), plain(2, 5, 2, 32), plain(2, 5, 2, 32), **options)


def test_an_array_that_only_masks_read_has_no_gradient() -> None:
    far, q = torch.ones(4, requires_grad=True), torch.randn(2, 5, 4, 32, dtype=torch.bfloat16, requires_grad=True)

    def near(xp: Any, batch: Any, head: Any, q: Any, k: Any, far: Any) -> Any:
        return q - k < far[head]

    cute_ops_torch.attention(q, q, q, mask_mod=near, captured=(far,))[0].sum().backward()
    assert far.grad is None
    assert q.grad is not None


@pytest.mark.slow
def test_functions_follow_what_they_refer_to() -> None:
    q = torch.randn(1, 9, 2, 32, dtype=torch.bfloat16)
    width = 3

    def near(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return xp.abs(q - k) < width

    compiled = torch.compile(lambda x: cute_ops_torch.attention(x, x, x, mask_mod=near)[0], fullgraph=True)
    for width in (3, 5):
        right = cute_ops_torch.attention(q, q, q, left=width - 1, right=width - 1)[0]
        assert torch.equal(cute_ops_torch.attention(q, q, q, mask_mod=near)[0], right)
        assert torch.equal(compiled(q), right)


NAMED = {
    "causal": (mods.causal, {"causal": True}), "window": (mods.window(3, 1), {"left": 3, "right": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_masks_are_those_of_options(name: str) -> None:
    function, options = NAMED[name]
    q, k = torch.randn(2, 7, 4, 32, dtype=torch.bfloat16), torch.randn(2, 12, 2, 32, dtype=torch.bfloat16)
    for one, other in zip(
        cute_ops_torch.attention(q, k, k, mask_mod=function), cute_ops_torch.attention(q, k, k, **options), strict=True
    ):
        assert torch.equal(one, other)
    capped = cute_ops_torch.attention(q, k, k, score_mod=mods.softcap(2.0))
    assert torch.equal(capped[0], cute_ops_torch.attention(q, k, k, softcap=2.0)[0])


def test_sequences_of_a_vmap_have_arrays_of_their_own() -> None:
    q, document = torch.randn(3, 2, 9, 2, 32, dtype=torch.bfloat16), torch.randint(0, 3, (3, 2, 9))
    found = torch.vmap(lambda x, d: cute_ops_torch.attention(x, x, x, mask_mod=mods.documents, captured=(d,))[0])(
        q, document
    )
    each = [
        cute_ops_torch.attention(x, x, x, mask_mod=mods.documents, captured=(d,))[0]
        for x, d in zip(q, document, strict=True)
    ]
    assert torch.equal(found, torch.stack(each))


def test_a_mask_without_bounds_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    q, far = torch.randn(1, 5, 4, 32, dtype=torch.bfloat16), torch.ones(4)

    def near(xp: Any, batch: Any, head: Any, q: Any, k: Any, far: Any) -> Any:
        return q - k < far[head] + 1

    with caplog.at_level("INFO", "cute_ops"):
        cute_ops_torch.attention(q, q, q, mask_mod=near, captured=(far,))
    said = "tiles of the mask near are not skipped where they depend on array 0, which has no bounds"
    assert said in caplog.text


def test_a_call_with_functions_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q, slopes = torch.randn(1, 5, 4, 32, dtype=torch.bfloat16), torch.ones(4)

    def call() -> torch.Tensor:
        options = {"mask_mod": mods.window(3, 1), "score_mod": mods.alibi, "captured": {"slopes": slopes}}
        out: torch.Tensor = cute_ops_torch.attention(q, q, q, **options)[0]  # type: ignore[arg-type]
        return out

    first = call()
    monkeypatch.delattr("cute_ops.composite.attention.op_of_call")
    assert torch.equal(first, call())


EITHER = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", EITHER)
def test_what_is_hidden_never_spreads(device: str) -> None:
    """A change of scores that is NaN, or has no derivative, where a query does not attend or behind the last one."""
    q, k = (torch.randn(1, s, 2, 64, dtype=torch.bfloat16, device=device) for s in (150, 300))
    leaves = [x.requires_grad_() for x in (q, k)]

    def distance(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return score - xp.log(q - k + 1) + xp.sqrt(q - k) + xp.sqrt(k.size - 1 - q)

    out, lse = cute_ops_torch.attention(q, k, k, causal=True, score_mod=distance)
    grads = torch.autograd.grad([out.float().sum(), lse.sum()], leaves)
    assert all(x.isfinite().all() for x in (out, lse, *grads))


@pytest.mark.parametrize("device", EITHER)
def test_an_index_outside_is_the_nearest_inside(device: str) -> None:
    q = torch.randn(2, 140, 2, 64, dtype=torch.bfloat16, device=device)
    table = torch.randn(2, 5, device=device)

    def outside(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, table: Any) -> Any:
        return score + table[head, q - k + 2]

    def inside(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, table: Any) -> Any:
        return score + table[head, xp.clip(q - k + 2, 0, 4)]

    one, other = (cute_ops_torch.attention(q, q, q, score_mod=each, captured=(table,))[0] for each in (outside, inside))
    assert torch.equal(one, other)


@pytest.mark.parametrize("device", EITHER)
def test_whole_numbers_divide_exactly(device: str) -> None:
    """Blocks of 49, of which neither a reciprocal nor its rounding is exact."""
    q = torch.randn(1, 600, 1, 64, dtype=torch.bfloat16, device=device)
    block = torch.arange(600, device=device) // 49

    def blocks(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return xp.logical_and(q // 49 == k // 49, xp.floor(q / 49) == xp.floor((k - k % 49) / 49))

    one = cute_ops_torch.attention(q, q, q, mask_mod=blocks)
    other = cute_ops_torch.attention(q, q, q, mask_mod=mods.documents, captured=(block[None],))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("device", EITHER)
def test_documents_of_no_key_and_lengths_of_none(device: str) -> None:
    q, k = (torch.randn(2, s, 2, 64, dtype=torch.bfloat16, device=device) for s in (200, 200))
    document = torch.arange(200, device=device).repeat(2, 1)

    def others(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
        return xp.logical_and(document[batch, q] == document[batch, k], q != k)

    leaves = [x.requires_grad_() for x in (q, k)]
    out, lse = cute_ops_torch.attention(q, k, k, mask_mod=others, captured=(document,))
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.float().sum(), leaves))
    none = cute_ops_torch.attention(q[:, :0], k, k, mask_mod=others, captured=(document,))[0]
    assert none.shape == (2, 0, 2, 64)
    assert (cute_ops_torch.attention(q, k[:, :0], k[:, :0], mask_mod=others, captured=(document,))[0] == 0).all()


def test_gradients_of_captured_arrays_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores exist some rows at a time; the last rows may be some of those before. Repeated calls give the same."""
    call, functions = drawn_with_functions(1, 60)
    named = {n: x for n, x in zip((*"qkv", "sinks"), tensors(call, 1, "cpu"), strict=True) if x is not None}
    captured = {name: torch.from_numpy(array) for name, array in functions.captured.items()}
    wanted = [captured[name].requires_grad_() for name in functions.differentiable]
    assert wanted

    def gradients() -> tuple[torch.Tensor, ...]:
        out, lse = cute_ops_torch.attention(**named, **call.attrs, **functions.options, captured=captured)
        return torch.autograd.grad(out.float().square().sum() + lse[lse > -math.inf].sum(), wanted)

    whole = gradients()
    for rows in (1, 4, call.s - 1):
        monkeypatch.setattr(sys.modules["cute_ops.ops.attention.captured"], "SCORES", rows * call.t)
        for _ in range(2):
            for one, other in zip(gradients(), whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
