"""Torch's attention with a mask of data in the graph pass: ours reads what the mask is computed from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cute_ops_torch import inductor
from cute_ops_torch.inductor import choice
from cute_ops_torch.inductor.emit import Refused
from tests.torch.drawn_programs import enabled, through_autograd

Tensor = torch.Tensor
SIZE, KINDS = 16, ("padding", "lengths", "places", "floats", "slopes", "all of them")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    inductor.replaced.clear()
    with enabled():
        yield


def entries_of(
    function: Callable[..., Tensor], *given: Tensor, dynamic: bool = False, backend: Any = through_autograd
) -> dict[str, list[str]]:
    """What became of the parts of a function, whose results and gradients are as near to float64's as its own."""

    def results(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        out = run(*leaves)
        out.double().tanh().mul(torch.linspace(-1, 1, out.shape[-1], device=out.device)).sum().backward()
        return [out.detach().double(), *(t.grad.double() for t in leaves if t.grad is not None)]

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    exact, plain, ours = (
        results(run, dtype)
        for run, dtype in ((function, torch.float64), (function, torch.bfloat16), (compiled, torch.bfloat16))
    )
    for right, his, got in zip(exact, plain, ours, strict=True):
        assert not got.isnan().any()
        largest = max(float(right.abs().max()), 1.0)
        assert float((got - right).abs().max()) <= 1.7 * float((his - right).abs().max()) + 0.01 * largest
    report, found = inductor.report(), dict[str, list[str]]()
    for entry in [*report.replaced, *report.left]:
        found.setdefault(entry.becomes, []).append(entry.what)
    return found


def drawn(
    kind: str, draw: random.Random, size: int = SIZE, longest: int = 40, device: str = "cpu"
) -> tuple[Callable[..., Tensor], tuple[Tensor, Tensor, Tensor], bool]:
    """A function with a mask of a kind, its arrays, and whether its mask is causal or a window, too."""
    batch, groups, times = draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 3)
    queries = draw.randint(longest // 20, longest)
    keys = queries if draw.random() < 0.7 else queries + draw.randint(1, 20)
    band = draw.choice(["", "", "causal", "window"]) if keys == queries else ""
    scale = draw.choice([None, 0.3])
    make = torch.Generator().manual_seed(draw.randrange(1 << 30))
    shapes = (batch, groups * times, queries), *[(batch, groups, keys)] * 2
    q, k, v = (torch.randn(*shape, size, generator=make).to(device) for shape in shapes)
    lengths = torch.randint(0, keys + 1, (batch,), generator=make).to(device)  # of no keys, too
    slopes = torch.rand(groups * times, generator=make).to(device)

    def mask() -> Tensor:
        key = torch.arange(keys, device=device)
        place = torch.arange(queries, device=device)[:, None] + (keys - queries)
        terms = {
            "padding": lambda: (key < lengths[:, None]).long()[:, None, None] > 0,
            "lengths": lambda: key < lengths[:, None, None, None],
            "places": lambda: (key - lengths[:, None, None, None]).abs() <= place.new_ones(()) * 3,
        }
        made = [terms[name]() for name in terms if kind in (name, "all of them")]
        made += [key <= place] if band else []
        made += [key > place - 4] if band == "window" else []
        draw_order = made[::-1] if times == 2 else made
        seen = draw_order[0] if made else torch.ones((), dtype=torch.bool)
        for each in draw_order[1:]:
            seen = seen & each
        if kind == "floats":
            return torch.where(key < lengths[:, None, None, None], 0.0, -math.inf)
        if kind == "slopes":
            return slopes[:, None, None] * (key - keys).float()
        return seen

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = mask()
        given = given.to(q.dtype) if given.is_floating_point() else given
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=given, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    return function, (q, k, v), bool(band) and kind not in ("floats", "slopes")


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_masks_of_data(kind: str, seed: int) -> None:
    """Conditions, and biases without a gradient. A query whose keys are all hidden gets zeros from both."""
    function, given, in_band = drawn(kind, random.Random(f"{kind} {seed}"))
    found = entries_of(function, *given)
    assert found.get("attention"), found
    said = found["attention"][0]
    assert "captured0" in said
    assert in_band == ("causal" in said or "left=" in said)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["dense", "segments", "dropout", "learned", "few queries", "dynamic"])
def test_masks_that_stay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call stays one of torch's, and its neighbours are fused as they would be without it."""
    lengths, bias = torch.tensor([9, 24]), torch.randn(1, 4, 1, 24)

    def refuse(*given: Any) -> None:
        raise Refused("few queries")

    if why == "few queries":
        monkeypatch.setattr(choice, "_check_attention", refuse)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.arange(k.shape[-2]) < lengths[:, None, None, None]
        seen = hidden if why == "dense" else (of[:, :, None] == of[:, None])[:, None] if why == "segments" else seen
        mask = (v.mean((0, 1, 3)) * bias).to(q.dtype) if why == "learned" else seen
        q = F.rms_norm(q, (SIZE,))
        p = 1e-30 if why == "dropout" else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).flatten(2)

    hidden, of = torch.rand(2, 1, 24, 24) < 0.5, torch.randint(0, 3, (2, 24))
    hidden[..., 0] = True
    found = entries_of(function, *(torch.randn(2, 4, 24, SIZE) for _ in range(3)), dynamic=why == "dynamic")
    assert "attention" not in found
    assert "rmsnorm" in found


@pytest.mark.slow
def test_layers_that_share_a_mask() -> None:
    """Each reads what the mask is computed from, and not the mask."""
    lengths = torch.tensor([9, 24])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(24)
        mask = (at[:, None] >= at) & (at < lengths[:, None, None, None])
        for _ in range(2):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).contiguous().transpose(1, 2)
        return q.transpose(1, 2).flatten(2)

    found = entries_of(function, *(torch.randn(2, 4, 24, SIZE) for _ in range(3)))
    assert found["attention"] == ["q, k, v, captured0, causal, scores changed"]
    assert inductor.replaced["attention"] == 2


def by_baddbmm(form: str, draw: random.Random) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Attention of heads [batch * heads, positions, columns], or of Megatron's [positions, batch * heads, columns],
    whose scores ``torch.baddbmm`` computes.
    """
    heads, queries, size = draw.randint(1, 5), draw.randint(17, 40), draw.choice((16, 32))
    scale, beta = draw.choice((size**-0.5, 0.3)), draw.choice((1, 1.0, 0.5))
    shape = (queries, heads, size) if form == "positions first" else (heads, queries, size)
    given = [torch.randn(shape) for _ in range(3)]
    bias = torch.randn(heads, 1, queries).bfloat16().float()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if form == "positions first":
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        if form == "biased":
            scores = bias.to(q.dtype).baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=beta, alpha=scale)
        else:
            empty = torch.empty(heads, queries, queries, dtype=q.dtype)
            scores = torch.baddbmm(empty.fill_(math.nan), q, k.transpose(1, 2), beta=0, alpha=scale)
        out = torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)
        return out.transpose(0, 1).reshape(queries, -1) * 1.5

    return function, tuple(given)


@pytest.mark.parametrize("form", ["positions first", "unbiased", "biased"])
def test_scores_by_baddbmm(form: str) -> None:
    for seed in range(2):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        inductor.disable()
        with enabled():
            function, given = by_baddbmm(form, random.Random(f"{form} {seed}"))
            found = entries_of(function, *given)
            assert "attention" in found, found
