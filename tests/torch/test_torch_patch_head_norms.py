"""Norms of queries' and keys' heads, and their rotation, in one pass: Qwen 3 and Gemma 3."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops_torch.huggingface import attention
from cute_ops_torch.huggingface.lazy_norm import LazyNorm
from cute_ops_torch.huggingface.residual_norm import Norm
from tests.torch.test_torch_patch_families import make
from tests.torch.test_torch_patch_sums import TOKENS, close, step, without_dropout

pytest.importorskip("transformers")


@pytest.fixture
def rotated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of queries that were normalised and rotated together."""
    found: list[tuple[int, ...]] = []
    plain = attention.norm_and_rotate

    def noted(q: LazyNorm, k: LazyNorm, *tables: torch.Tensor) -> Any:
        found.append(tuple(q.heads.shape))
        return plain(q, k, *tables)

    monkeypatch.setattr(attention, "norm_and_rotate", noted)
    return found


@pytest.mark.parametrize(("family", "times"), [("qwen3", 2), ("gemma3_text", 2), ("qwen3_moe", 2), ("olmo2", 0)])
def test_norms_of_heads_are_rotated_in_one_pass(family: str, times: int, rotated: list[tuple[int, ...]]) -> None:
    model = without_dropout(make(family))
    want = step(model)
    cute_ops_torch.patch(model)
    close(step(model), want)
    assert len(rotated) == times and len({*rotated}) <= 1
    with torch.no_grad():
        got = model.eval()(TOKENS[:, :7]).logits
        cute_ops_torch.unpatch(model)
        torch.testing.assert_close(got, model(TOKENS[:, :7]).logits, rtol=1e-4, atol=1e-5)


def test_norms_that_differ_or_are_watched_run_by_themselves(rotated: list[tuple[int, ...]]) -> None:
    plain = without_dropout(make("qwen3"))
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    for each in (plain, model):
        layers = each.model.layers
        layers[0].self_attn.q_norm.variance_epsilon = 1e-2
        layers[1].self_attn.k_norm.register_forward_hook(lambda module, args, out: out * 2)
    close(step(model), step(plain))
    assert rotated == []


def test_what_else_is_asked_of_a_lazy_norm_is_asked_of_the_real_one() -> None:
    x, weight = torch.randn(2, 3, 4, 8), torch.randn(8)
    made = Norm("rmsnorm", weight, None, 1e-6, 0.0)
    real = cute_ops_torch.rmsnorm(x, weight)
    lazy = LazyNorm(x, made, lambda: real)
    turned = lazy.transpose(1, -2)
    assert isinstance(turned, LazyNorm) and turned.heads is x
    for ask in (
        lambda t: t.transpose(0, 1), lambda t: t.view(2, 3, 32), lambda t: t * 2, lambda t: 2 * t, lambda t: t + 1,
        lambda t: t[:, 1], torch.sin, lambda t: torch.cat([t, t]), lambda t: t.shape[-1], lambda t: -t,
    ):  # fmt: skip
        got, want = ask(lazy), ask(real)
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    torch.testing.assert_close(turned.real(), real.transpose(1, 2))
