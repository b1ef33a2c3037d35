"""``flex_attention``: functions as they are written for torch's, whose eager definition says what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

import cute_ops_torch
from cute_ops_torch.composite import flex_attention as module
from cute_ops_torch.composite.scalar_function import ScalarFunction

Tensor = torch.Tensor
B, H, G, S, T = 2, 4, 2, 20, 33
SLOPES, BIAS, TABLE = torch.rand(H), torch.randn(B, H, S, T), torch.randn(H, 2 * T)
DOCUMENT, ALPHA, KEEP = torch.arange(T).expand(B, T) // 7, torch.tensor(0.7), torch.rand(T // 4 + 1, T // 4 + 1) < 0.7
WINDOW = 9


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def relative(score, b, h, q, k):
    return score + TABLE[h, q - k + T]


def whole_bias(score, b, h, q, k):
    return score + BIAS[b, h, q, k] * ALPHA


def softcap(score, b, h, q, k):
    return 20 * torch.tanh(score / 20.0)


def sides(score, b, h, q, k):
    """Methods, functions, numbers and whole numbers, in one."""
    near = torch.where((q - k).abs() < WINDOW, score.clamp(-3, 3), score * 0.5)
    even = ((q % 2) == (k // 2) % 2).to(score.dtype)
    far = torch.where(q >= k, near + even, -float("inf"))
    return torch.where(h < 2, far, torch.maximum(near, torch.sigmoid(score)) + (q < 5) - torch.exp(-(score**2)))


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= WINDOW


def documents(b, h, q, k):
    return DOCUMENT[b, q] == DOCUMENT[b, k]


def blocks(b, h, q, k):
    return KEEP[q // 4, k // 4] | ~(h > 1)


def logical(b, h, q, k):
    return (
        torch.logical_and(causal(b, h, q, k), torch.logical_not(k == 3))
        | torch.logical_xor(q < 2, k < 2)
        | ((q > 9) == (k > 9)) & torch.eq(q == 7, False)
    )


def given(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (B, H, S, 32), (B, G, T, 32), (B, G, T, 32)
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_(grad) for shape in shapes]


def right(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any) -> tuple[Tensor, Tensor]:
    """What the functions say, element by element."""
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    places = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if mask_mod is not None:
        scores = scores.masked_fill(~create_mask(mask_mod, B, H, S, T, device="cpu"), -math.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - torch.where(lse > -math.inf, lse, 0.0)[..., None]) @ v, lse


@pytest.mark.parametrize("mask_mod", [None, causal, window, documents, blocks, logical, and_masks(causal, window),
                                      or_masks(documents, window)])  # fmt: skip
@pytest.mark.parametrize("score_mod", [None, alibi, relative, whole_bias, softcap, sides])
def test_functions_mean_what_they_say(score_mod: Any, mask_mod: Any) -> None:
    x, y = given(grad=True), given(grad=True)
    mask = mask_mod and create_block_mask(mask_mod, B, H, S, T, device="cpu")
    out, lse = cute_ops_torch.flex_attention(*x, score_mod, mask, enable_gqa=True, return_lse=True)
    expected, expected_lse = right(*y, score_mod, mask_mod)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(o.sin().sum(), z) for o, z in ((out, x), (expected, y)))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_tensors_have_gradients_and_may_change() -> None:
    """Functions made anew for each call, over other tensors, are traced once."""
    x = given()

    def made(slopes: Tensor, scale: float) -> Callable[..., Tensor]:
        return lambda score, b, h, q, k: score * scale - slopes[h] * (q - k).abs()

    traced, plain = [], module.ScalarFunction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ScalarFunction", lambda *a: traced.append(a) or plain(*a))
        for scale in (1.0, 1.0, 1.0, 2.0):
            slopes, again = (torch.full((H,), 0.1 * (1 + len(traced)), requires_grad=True) for _ in range(2))
            out = cute_ops_torch.flex_attention(*x, made(slopes, scale), enable_gqa=True)
            expected, _ = right(*x, made(again, scale), None)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            found, wanted = (
                torch.autograd.grad(out.sin().sum(), slopes),
                torch.autograd.grad(expected.sin().sum(), again),
            )
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert len(traced) == 2  # a number is the kernel's


def test_a_global_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = given()
    for width in (9, 3):
        monkeypatch.setitem(globals(), "WINDOW", width)
        mask = create_block_mask(window, B, H, S, T, device="cpu")
        out = cute_ops_torch.flex_attention(*x, block_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out, right(*x, None, window)[0], rtol=1e-4, atol=1e-4)


PLACES = torch.tensor([3, -1, 0, -T, 2 - T, 7])
INDICES: dict[str, Callable[..., Any]] = {
    "distance": lambda q, k: q - k, "key before": lambda q, k: k - 1, "number": lambda q, k: -3,
    "number of the first": lambda q, k: 3, "read": lambda q, k: PLACES[(q + k) % 6],
    "float": lambda q, k: ((q - k).float() * 0.6).long(), "remainder": lambda q, k: (q - k) % T,
    "distance either way": lambda q, k: (q - k).abs(), "bounds": lambda q, k: (q - k).clamp(-4, 9),
    "chosen": lambda q, k: torch.where(q > k, q, -1), "bool": lambda q, k: (q > k).long(),
    "sum less twice": lambda q, k: torch.sub(q, k, alpha=2).clamp(min=-T), "negated": lambda q, k: -(k // 2),
}  # fmt: skip


@pytest.mark.parametrize("index", INDICES)
def test_indices_below_zero_count_from_the_end(index: str) -> None:
    x, table = given(), torch.randn(H, T, generator=torch.Generator().manual_seed(len(index)), requires_grad=True)
    again = table.detach().double().requires_grad_()

    def biased(table: Tensor) -> Callable[..., Tensor]:
        return lambda score, b, h, q, k: score + table[h, INDICES[index](q, k)] * (k + 1)

    out = cute_ops_torch.flex_attention(*x, biased(table), enable_gqa=True)
    expected, _ = right(*(each.double() for each in x), biased(again), None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    (found,), (wanted,) = (torch.autograd.grad(o.sin().sum(), of) for o, of in ((out, table), (expected, again)))
    # Terms are up to T times as large as gradients of scores, and cancel; another element's are off by 0.1 and more.
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=6e-5 * T * max(float(wanted.abs().max()), 1.0))


def test_indices_that_may_not_be_negative_are_read_as_they_are() -> None:
    """So that masks of documents and biases of coordinates keep the forms that kernels know."""

    def read(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + BIAS[b, h, q, k] + TABLE[h // 2, (q + k) % 5] + TABLE[h, (q - k).abs().clamp(0, 3)]

    traced = ScalarFunction(read, "score_mod", 1)
    indices = [node.args[1] for node in traced.graph.graph.nodes if "aten.index" in str(node.target)]
    assert len(indices) == 3 and all(traced.naturals.issuperset(each) for each in indices)


class Mod:
    """A function whose state is its own: it is traced each time."""

    scale = 2.0

    def score(self, score, b, h, q, k):
        return score * self.scale


def test_methods_and_keys_of_one_batch() -> None:
    (q, k, v), mod = given(), Mod()
    for mod.scale in (2.0, 3.0):
        out = cute_ops_torch.flex_attention(q, k[:1], v[:1], mod.score, enable_gqa=True)
        expected = right(q, k[:1].expand(B, -1, -1, -1), v[:1].expand(B, -1, -1, -1), mod.score, None)[0]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_it_computes_in_16_bits_with_a_scale() -> None:
    x = given(torch.bfloat16)
    out = cute_ops_torch.flex_attention(*x, softcap, scale=0.3, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    wide = [y.float() for y in x]
    expected, _ = right(wide[0] * 0.3 * 32**0.5, *wide[1:], softcap, None)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


def branches(score, b, h, q, k):
    return score if q > k else score * 2


def special(score, b, h, q, k):
    return torch.special.bessel_j0(score)


def whole_row(score, b, h, q, k):
    return score + BIAS[b, h].sum()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (branches, "score_mod branches cannot be traced: Python's control flow on a value, or its number"),
        (special, "aten.special_bessel_j0.default is no function of scores"),
        (whole_row, "aten.sum.default is no function of scores"),
        (lambda score, b, h, q, k: score + SLOPES[:2].sum(), "is no function of scores"),
        (lambda score, b, h, q, k: score * b, "`batch` may only be the first index of a captured array"),
    ],
)
def test_what_cannot_be_traced_is_said(function: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        cute_ops_torch.flex_attention(*given(), function, enable_gqa=True)


def test_what_does_not_fit_is_said() -> None:
    q, k, v = given()
    with pytest.raises(ValueError, match="4 heads of query and 2 of key need enable_gqa=True"):
        cute_ops_torch.flex_attention(q, k, v)
    with pytest.raises(NotImplementedError, match="a scale of 0 is not implemented"):
        cute_ops_torch.flex_attention(q, k, v, scale=0.0, enable_gqa=True)
    with pytest.raises(ValueError, match="have 4 dims, got 3, 4, 4"):
        cute_ops_torch.flex_attention(q[0], k, v)
    mask = create_block_mask(causal, B, H, S, S, device="cpu")
    with pytest.raises(ValueError, match="the block mask is of 20 queries and 20 keys, not of 20 and 33"):
        cute_ops_torch.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def test_a_block_mask_without_a_function() -> None:
    x = given()
    whole = create_block_mask(noop_mask, None, None, S, T, device="cpu")
    out = cute_ops_torch.flex_attention(*x, block_mask=whole, enable_gqa=True)
    assert torch.equal(out, cute_ops_torch.flex_attention(*x, enable_gqa=True))
    number, indices = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    empty = BlockMask.from_kv_blocks(number, indices, seq_lengths=(S, T))
    with pytest.raises(NotImplementedError, match="whose blocks are not those that its mask_mod says"):
        cute_ops_torch.flex_attention(*x, block_mask=empty, enable_gqa=True)


@pytest.mark.parametrize("size", [4, (8, 4)])
@pytest.mark.parametrize("mask_mod", [causal, window, documents, blocks, logical])
def test_blocks_are_those_of_the_function(mask_mod: Any, size: Any) -> None:
    """Ones of ``create_block_mask`` are; without one of these, or with one as whole, kernels of torch give others."""
    x, lead = given(), (B, H) if mask_mod in (documents, blocks) else (None, None)
    mask = create_block_mask(mask_mod, *lead, S, T, device="cpu", BLOCK_SIZE=size)
    out = cute_ops_torch.flex_attention(*x, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, right(*x, None, mask_mod)[0], rtol=1e-4, atol=1e-4)
    number, full = mask.kv_num_blocks, (mask.full_kv_num_blocks, mask.full_kv_indices)
    fewer = BlockMask.from_kv_blocks(
        (number - 1).clamp(min=0), mask.kv_indices, *full, mask.BLOCK_SIZE, mask_mod, (S, T)
    )
    whole = BlockMask.from_kv_blocks(
        torch.zeros_like(number), mask.kv_indices, number, mask.kv_indices, mask.BLOCK_SIZE, mask_mod, (S, T)
    )  # fmt: skip
    for other in (fewer, whole):
        with pytest.raises(NotImplementedError, match="whose blocks are not those that its mask_mod says"):
            cute_ops_torch.flex_attention(*x, block_mask=other, enable_gqa=True)


def test_a_new_block_mask_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    new, known = (create_block_mask(causal, None, None, 16, 16, device="cpu") for _ in range(2))
    q, k, v = torch.randn(3, 1, 2, 16, 16).unbind()
    want = module.flex_attention(q, k, v, block_mask=known)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match="`block_mask` is a new mask within the capture of a CUDA graph"):
        module.flex_attention(q, k, v, block_mask=new)
    assert torch.equal(module.flex_attention(q, k, v, block_mask=known), want)


@pytest.mark.gpu
def test_the_kernels_compute_it() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, h, 300, 64, device="cuda", generator=draw).bfloat16().requires_grad_() for h in (4, 2, 2))
    slopes, document = torch.rand(4, device="cuda"), torch.arange(300, device="cuda").expand(2, 300) // 90

    def score_mod(score, b, h, i, j):
        return 30 * torch.tanh((score - slopes[h] * (i - j).abs()) / 30)

    def mask_mod(b, h, i, j):
        return (i >= j) & (document[b, i] == document[b, j])

    mask = create_block_mask(mask_mod, 2, None, 300, 300, device="cuda")
    outs = [f(q, k, v, score_mod, mask, enable_gqa=True) for f in (cute_ops_torch.flex_attention, flex_attention)]
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)
    dout = torch.randn_like(outs[0])
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in outs), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_a_function_of_no_module() -> None:
    """As ``exec`` in a dict of one's own makes it, or an interpreter inside of another program."""
    made: dict[str, Any] = {}
    exec("def twice(score, b, h, q, k): return score * 2", made)
    q = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    assert made["twice"].__module__ is None
    found = cute_ops_torch.flex_attention(q, q, q, made["twice"])
    torch.testing.assert_close(found, cute_ops_torch.flex_attention(q, q, q, scale=0.5), rtol=0, atol=0.02)
