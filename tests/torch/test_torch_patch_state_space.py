"""Convolutions along a sequence and Mamba 2's scan in patched models, against what Hugging Face runs in torch."""

from __future__ import annotations

import copy
import random
from importlib import import_module
from inspect import unwrap
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops_torch.composite import chunk_scan as composite
from cute_ops_torch.huggingface import state_space
from tests.torch.test_torch_patch_families import check, outcome, quietly

transformers = pytest.importorskip("transformers")
mamba2: Any = import_module("transformers.models.mamba2.modeling_mamba2")
if not hasattr(mamba2, "mamba2_chunk_scan"):
    pytest.skip("transformers scans in a method of its own", allow_module_level=True)


def scanned(function: Any, given: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a scan."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    x, dt, a, b, c, *_ = leaves.values()
    more = {"D": leaves.get("d"), "dt_bias": leaves.get("bias"), "initial_states": leaves.get("initial")}
    found = function(x, dt, a, b, c, **more, **options)
    found = found if isinstance(found, tuple) else (found,)
    total = sum((out.float() * out.float().detach().cos()).sum() for out in found)
    gradients = torch.autograd.grad(total, [*leaves.values()])
    return {**dict(zip(("out", "last"), found, strict=False)), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("seed", range(14))
def test_scans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    monkeypatch.setattr(composite, "_CHUNK", rng.choice((16, 128)))
    groups, each, p, n = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((8, 12)), rng.choice((4, 16))
    batch, seqlen, heads = rng.choice((1, 2)), rng.choice((1, 7, 16, 33, 150)), groups * each
    dtype = rng.choice((torch.float32, torch.bfloat16))
    sizes = {
        "x": (batch, seqlen, heads, p), "dt": (batch, seqlen, heads), "a": (heads,), "b": (batch, seqlen, groups, n),
        "c": (batch, seqlen, groups, n), "d": (heads,), "bias": (heads,), "initial": (batch, heads, p, n),
    }  # fmt: skip
    exact = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    exact["a"], exact["bias"] = -exact["a"].exp(), exact["bias"] - 2
    for name in ("d", "bias", "initial"):
        if rng.random() < 0.4:
            del exact[name]
    options = {
        "chunk_size": 32, "dt_softplus": rng.random() < 0.8, "return_final_states": rng.random() < 0.5,
        "dt_limit": rng.choice(((0.0, float("inf")), (0.01, 0.2))),
    }  # fmt: skip
    if not options["dt_softplus"]:
        exact["dt"] = exact["dt"].abs()
    theirs = unwrap(mamba2.mamba2_chunk_scan)
    given = {name: t if name in ("a", "initial") else t.to(dtype) for name, t in exact.items()}
    wanted = scanned(theirs, {name: t.float() for name, t in given.items()}, options)
    plain, got = (scanned(each, given, options) for each in (theirs, state_space._scanning(None)))
    assert got["out"].dtype == dtype
    assert got.keys() == wanted.keys()
    for name, right in wanted.items():
        # Decays are rounded for products, and sums over tokens of gradients of dt cancel.
        scale = right.norm() + (wanted["dt"].norm() if name in ("a", "bias") else 0.0)
        allowed = 3e-6 if dtype == torch.float32 else 2**-6 if name in given else 2**-8
        error, other = ((found[name].float() - right).norm() for found in (got, plain))
        assert error <= allowed * scale + 2 * other + 1e-6, (name, error, other, scale)


def test_states_pass_chunks_exactly_behind_strong_decays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays since the begin of a sequence are large sums, of which those between two chunks are small differences."""
    monkeypatch.setattr(composite, "_CHUNK", 16)
    draw, seqlen = torch.Generator().manual_seed(1), 512
    x, b, c = (torch.randn(1, seqlen, *size, generator=draw) for size in ((2, 8), (1, 4), (1, 4)))
    dt, a = torch.rand(1, seqlen, 2, generator=draw) * 1e-2, torch.tensor([-16.0, -8.0])
    dt[:, : seqlen // 2] += 8
    out, last = composite.chunk_scan(x, dt, a, b, c, wants_last=True)
    state, wanted = torch.zeros(1, 2, 8, 4, dtype=torch.float64), []
    for t in range(seqlen):
        step = dt[:, t, :, None].double()
        state = state * (a.double()[:, None] * step).exp()[..., None] + (step * x[:, t])[..., None] * b[:, t, :, None]
        wanted.append((state * c[:, t, :, None]).sum(-1))
    torch.testing.assert_close(out.double(), torch.stack(wanted, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, state.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_convolutions(seed: int) -> None:
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, n, seqlen, width = rng.choice((1, 3)), rng.choice((6, 16)), rng.choice((1, 2, 9, 40)), rng.choice((2, 3, 4))
    sizes = ((batch, n, seqlen), (n, width), (n,))
    x, weight, bias = leaves = [torch.randn(size, generator=draw).requires_grad_() for size in sizes]
    given = x if rng.random() < 0.5 else x.mT.contiguous().mT
    options = {"activation": rng.choice((None, "silu", "swish")), "bias": rng.choice((bias, None))}
    used = leaves if options["bias"] is not None else leaves[:2]
    found = [
        (out, *torch.autograd.grad(out.sin().sum(), used, retain_graph=True))
        for function in (unwrap(mamba2.causal_conv1d_fn), state_space._convolving(None))
        for out in [function(given, weight, **options)]
    ]
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_stays_as_it_is() -> None:
    """Packed sequences, other activations, and filters that are wider."""
    asked: list[str] = []
    convolve = state_space._convolving(lambda *args, **kwargs: asked.append("convolve"))
    scan = state_space._scanning(lambda *args, **kwargs: asked.append("scan"))
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    convolve(x, weight, seq_idx=torch.zeros(1, 9, dtype=torch.int32))
    convolve(x, weight, activation="tanh")
    convolve(x, torch.randn(6, 5))
    convolve(x.double(), weight.double())
    heads, state = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 1, 3)
    given = (heads, torch.rand(1, 9, 2), -torch.rand(2), state, state)
    scan(*given, 4, seq_idx=torch.zeros(1, 9, dtype=torch.int32))
    scan(*(t.double() for t in given), 4)
    assert asked == ["convolve"] * 4 + ["scan"] * 2
    assert convolve(x, weight, seq_idx=None).shape == x.shape
    assert scan(*given, 4).shape == heads.shape


def tiny(layers: int = 2) -> Any:
    """A Mamba 2, whose sizes depend on each other."""
    torch.manual_seed(0)
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=16, vocab_size=97, chunk_size=16, num_hidden_layers=layers,
        n_groups=2,
    ))  # fmt: skip


@pytest.mark.parametrize("half", [False, True])
def test_a_model(half: bool) -> None:
    model, tokens = tiny(), torch.randint(3, 97, (2, 21))
    model = model.bfloat16() if half else model
    exact = copy.deepcopy(model).float()
    plain, wanted = outcome(model, tokens), outcome(exact, tokens)
    found = quietly(model)
    mixers = [each.op for each in found if each.module == "backbone.layers.0.mixer"]
    assert sorted(mixers) == ["causal_conv1d", "fused"]
    for name, got in outcome(model, tokens).items():
        right, other = wanted[name], plain[name]
        assert (got is None) == (right is None), name
        if got is not None and right is not None and other is not None:
            allowed = (2**-6 if half else 1e-5) * right.norm() + 2 * (other.float() - right).norm()
            assert (got.float() - right).norm() <= allowed + 1e-7, name
    cute_ops_torch.unpatch(model)
    assert torch.equal(outcome(model, tokens)["logits"], plain["logits"])


def test_a_prompt_and_what_follows() -> None:
    """The state that a prompt leaves in a cache is that of Hugging Face's scan."""
    model, tokens = tiny().eval(), torch.randint(3, 97, (2, 21))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(tokens, **options)
    quietly(model)
    assert torch.equal(model.generate(tokens, **options), wanted)


def test_a_family_that_only_convolves() -> None:
    assert [each for each in check("mamba") if each.op == "causal_conv1d"]


def test_a_user_may_leave_them() -> None:
    found = quietly(tiny(), without=["causal_conv1d", "fused"])
    assert not {each.op for each in found} & {"causal_conv1d", "fused"}


@pytest.mark.slow
def test_in_one_graph() -> None:
    torch._dynamo.reset()
    model, tokens = tiny(1).train(), torch.randint(3, 97, (2, 16))
    plain = copy.deepcopy(model)
    quietly(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [f(input_ids=tokens, labels=tokens).loss for f in (plain, run)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (q.grad - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, name
