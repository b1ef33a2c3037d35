"""Experts of a mixture: their tokens are sorted and summed by our ops, whatever a family's experts look like."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import experts as patched_experts
from tests.torch.test_torch_patch_families import check, make, quietly

transformers = pytest.importorskip("transformers")
moe: Any = pytest.importorskip("transformers.integrations.moe")
COUNT, N, HIDDEN = 5, 16, 24


class Gelu(nn.Module):
    """An activation that `patch` knows by what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x, approximate="tanh")


def made(has_gate: bool, has_bias: bool, is_transposed: bool, act: nn.Module, own_gate: bool) -> nn.Module:
    """A model whose only module is a layer of experts of a new class."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = COUNT, act
            up = {"gate_up_proj": 2 * HIDDEN} if has_gate else {"up_proj": HIDDEN}
            for name, (given, out) in {**{k: (N, v) for k, v in up.items()}, "down_proj": (HIDDEN, N)}.items():
                shape = (COUNT, given, out) if is_transposed else (COUNT, out, given)
                self.register_parameter(name, nn.Parameter(torch.randn(shape) / given**0.5))
                if has_bias:
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(COUNT, out)))

        if own_gate:

            def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
                return rows[..., ::2].clamp(max=1.0) * rows[..., 1::2].tanh()

        def forward(self, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
            raise NotImplementedError("the implementation that loops over experts")

    kind = moe.use_experts_implementation(
        Experts, has_gate=has_gate, has_bias=has_bias, is_transposed=is_transposed, is_concatenated=not own_gate
    )
    model = nn.Module()
    model.experts = kind(SimpleNamespace(_experts_implementation="grouped_mm"))
    return model


def inputs(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, the experts of each, and their weights."""
    draw, tokens, k = torch.Generator().manual_seed(seed), 7 + 4 * (seed % 5), 1 + seed % 3
    index = torch.rand(tokens, COUNT, generator=draw).topk(k).indices
    x, weights = torch.randn(tokens, N, generator=draw), torch.rand(tokens, k, generator=draw)
    return x.to(dtype).requires_grad_(), index, weights.to(dtype).requires_grad_()


def outcome(run: Any, module: nn.Module, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    out = run(*given)
    leaves = [given[0], given[2], *module.parameters()]
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that experts have run."""
    names: list[str] = []
    functions = patched_experts.functions
    for name in ("permute_tokens", "swiglu", "geglu", "unpermute_tokens"):
        run = getattr(functions, name)
        monkeypatch.setattr(functions, name, lambda *args, run=run, name=name: names.append(name) or run(*args))
    return names


@pytest.mark.parametrize("seed", range(12))
def test_experts_of_any_build(seed: int, ran: list[str]) -> None:
    rng = random.Random(seed)
    has_gate, has_bias, is_transposed, own_gate = (rng.random() < p for p in (0.8, 0.5, 0.5, 0.3))
    act, op = rng.choice(((nn.SiLU(), "swiglu"), (Gelu(), "geglu"), (nn.Tanh(), "")))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    torch.manual_seed(seed)
    model = made(has_gate, has_bias, is_transposed, act, own_gate).to(dtype)
    exact, given = copy.deepcopy(model).float(), inputs(seed, dtype)
    plain = outcome(model.experts, model.experts, given)
    found = cute_ops_torch.patch(model)
    assert ("experts", "permute_tokens") in found
    got = outcome(model.experts, model.experts, given)
    gate = [op] if op and has_gate and not own_gate else []
    assert ran[-len(gate) - 2 :] == ["permute_tokens", *gate, "unpermute_tokens"]
    wide = (given[0].detach().float().requires_grad_(), given[1], given[2].detach().float().requires_grad_())
    for ours, theirs, wanted in zip(got, plain, outcome(exact.experts, exact.experts, wide), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        allowed = 1e-5 * wanted.norm() + 2 * (theirs.float() - wanted).norm()
        assert (ours.float() - wanted).norm() <= allowed
    cute_ops_torch.unpatch(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, outcome(model.experts, model.experts, given), strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_families(family: str, ran: list[str]) -> None:
    found = check(family)
    assert [each for each in found if each.op == "permute_tokens"]
    assert not [each for each in found.left if "experts" in each.module]
    assert "permute_tokens" in ran


def test_what_else_runs(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    """Another implementation that is asked for, or registered since, and experts that devices share."""
    model = made(True, False, False, nn.SiLU(), False)
    given = inputs(1, torch.float32)
    cute_ops_torch.patch(model)
    model.experts.config._experts_implementation = "eager"
    with pytest.raises(NotImplementedError, match="loops over experts"):
        model.experts(*given)
    model.experts.config._experts_implementation = "batched_mm"
    batched = model.experts(*given)
    model.experts.config._experts_implementation = "grouped_mm"
    model.experts._is_expert_parallel = True
    model.experts(*given)
    model.experts._is_expert_parallel = False
    with monkeypatch.context() as patch:
        patch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", lambda self, x, *args: x)
        assert model.experts(*given) is given[0]
    assert ran == []
    torch.testing.assert_close(model.experts(*given), batched)
    assert ran == ["permute_tokens", "swiglu", "unpermute_tokens"]


def test_a_user_may_leave_them() -> None:
    model = make("qwen3_moe")
    found = quietly(model, without=["permute_tokens"])
    assert not [each for each in found if each.op == "permute_tokens"]
    assert len([each for each in found.left if each.module.endswith("experts")]) == 2


def test_in_one_graph() -> None:
    torch._dynamo.reset()
    model = made(True, True, True, nn.SiLU(), False)
    given = inputs(2, torch.float32)
    wanted = outcome(model.experts, model.experts, given)
    cute_ops_torch.patch(model)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target).partition(".")[2] for node in graph.graph.nodes if "cute." in str(node.target))
        return graph.forward

    run = torch.compile(model.experts, backend=backend, fullgraph=True)
    for ours, theirs in zip(outcome(run, model.experts, given), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert called == ["permute_tokens.default", "swiglu.default", "unpermute_tokens.default"]
