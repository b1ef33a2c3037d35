"""Hugging Face models whose norms, gated MLPs, rotations and losses run on our ops."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cute_ops_torch
from cute_ops import Op
from cute_ops.aot import build
from cute_ops.aot.hf_config import calls_of_model
from cute_ops.calls import lookup, manifest
from cute_ops.errors import CompileError
from cute_ops.jit import cache, target
from cute_ops.jit.target import Target, parse
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd
from cute_ops.ops.reduction.cross_entropy import cross_entropy, cross_entropy_bwd, cross_entropy_step
from cute_ops.ops.reduction.scale import scale
from cute_ops_torch.host import compiled_call
from cute_ops_torch.huggingface import attention, autograd_nodes, decoder, packed_weights, products, residual_norm
from cute_ops_torch.huggingface import patch as patching
from cute_ops_torch.library import framework, program, reference
from cute_ops_torch.library.tensors import bind_tensors, memory

transformers = pytest.importorskip("transformers")


def llama(kind: str = "Llama", **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = getattr(transformers, f"{kind}{'TextConfig' if kind == 'Gemma3' else 'Config'}")(**sizes | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def logits_and_gradients(model: nn.Module, device: str = "cpu") -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(0, 97, (2, 19)).to(device)
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        logits = model(tokens).logits
    return {"logits": logits, "loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def compare(model: nn.Module, device: str = "cpu") -> list[tuple[str, str]]:
    expected = logits_and_gradients(model, device)
    state, replaced = model.state_dict(), cute_ops_torch.patch(model)
    assert list(model.state_dict()) == list(state)
    assert all(now.data_ptr() == state[name].data_ptr() for name, now in model.state_dict().items())
    got = logits_and_gradients(model, device)
    for name, e in expected.items():
        assert (got[name] - e).abs().max() <= 1e-5 * max(1.0, e.abs().max()), name
    return [tuple(r) for r in replaced]


LAYER = [
    ("", "add_rmsnorm"),
    (".self_attn", "rope"),
    (".self_attn", "attention"),
    (".mlp", "silu_mul"),
    (".input_layernorm", "rmsnorm"),
    (".post_attention_layernorm", "rmsnorm"),
]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    from cute_ops_torch import functions

    calls: dict[str, int] = {}
    for name in functions.__all__:

        def counted(name: str, function: Any, *args: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*args)

        monkeypatch.setattr(functions, name, partial(counted, name, getattr(functions, name)))
    return calls


def test_llama_patched_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    classes = [type(m) for m in model.modules()]
    calls = count_calls(monkeypatch)
    replaced = compare(model)
    assert replaced == [
        ("", "linear_cross_entropy"), ("model", "attention_mask"), ("model.embed_tokens", "embedding"),
        *((f"model.layers.{i}{part}", op) for i in range(2) for part, op in LAYER), ("model.norm", "rmsnorm"),
    ]  # fmt: skip
    # Calls of two forwards. With labels, sums are fused with the norms that read them, also between layers; gate and
    # up, and queries and keys, are the halves of one product. The other one is for the logits.
    assert calls == {"rmsnorm": 4, "add_rmsnorm": 6, "swiglu": 2, "silu_mul": 2, "rope": 2 + 4}
    with pytest.raises(ValueError, match=r"cute_ops_torch\.patch: LlamaForCausalLM is patched already"):
        cute_ops_torch.patch(model)
    cute_ops_torch.unpatch(model)
    assert [type(m) for m in model.modules()] == classes
    with pytest.raises(ValueError, match="is not patched"):
        cute_ops_torch.unpatch(model)


def test_the_loss_of_shifted_and_counted_labels() -> None:
    """A trainer passes labels with ignored positions, and the number of others in all its micro-batches."""
    tokens = torch.randint(0, 97, (2, 19))
    labels = tokens.masked_fill(torch.rand(2, 19) < 0.3, -100)
    plain, model = llama(), llama()
    cute_ops_torch.patch(model)
    counts = torch.tensor(11), torch.tensor(11, dtype=torch.int32), 11, 11.0, torch.tensor([11])
    shifted = {"shift_labels": labels.roll(-1, 1)}
    for extra in ({}, *({"num_items_in_batch": count} for count in counts), shifted):
        expected, got = (m(tokens, labels=labels, **extra).loss for m in (plain, model))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        found = [torch.autograd.grad(*pair) for pair in ((got, model.lm_head.weight), (expected, plain.lm_head.weight))]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    # A number is part of the loss' op, so that its gradients need no pass that divides them.
    for count, divides in zip(counts, (False, False, False, False, True), strict=True):
        loss = model(tokens, labels=labels, num_items_in_batch=count).loss
        assert ("Div" in type(loss.grad_fn).__name__) == divides
    assert model(tokens, labels=labels).logits is None
    assert [x.shape for x in model(tokens, labels=labels, return_dict=False)[:2]] == [(), (2, 19, 97)]
    for m in (plain.eval(), model.eval()):
        assert m(tokens, labels=labels).logits.shape == (2, 19, 97)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_kept_where_they_are_asked_for(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 97, (2, 19))
    labels = tokens.masked_fill(torch.rand(2, 19) < 0.3, -100)
    exact, plain, model = llama().double(), llama().to(dtype), llama().to(dtype)
    report = cute_ops_torch.patch(model, logits=True)
    assert ("", "cross_entropy") in report and not report.left
    counted, shifted = {"num_items_in_batch": torch.tensor(11)}, {"shift_labels": labels.roll(-1, 1)}
    for extra in ({}, counted, {"num_items_in_batch": 11}, shifted):
        outs = [m(tokens, labels=labels, **extra) for m in (exact, plain, model)]
        (true, theirs, ours), loss = outs, outs[2].loss
        assert ours.logits.shape == (2, 19, 97) and ours.logits.dtype == dtype
        assert loss.dtype == torch.float32 and "Softmax" not in type(loss.grad_fn).__name__
        for name in ("loss", "logits"):
            errors = [(getattr(out, name).double() - getattr(true, name)).abs().max() for out in (theirs, ours)]
            # A sum by a count of items may be 11, of which float32 rounds 1e-6.
            assert errors[1] <= 2 * errors[0] + 1e-6 * getattr(true, name).abs().max().clamp(min=1)
        # A loss of one's own on the logits has its gradient beside that of the model's loss.
        found = []
        for m, out in ((exact, true), (plain, theirs), (model, ours)):
            total = out.loss + out.logits.double().square().mean()
            found.append(torch.autograd.grad(total, m.lm_head.weight)[0].double())
        assert (found[2] - found[0]).norm() <= 2 * (found[1] - found[0]).norm() + 1e-6 * found[0].norm()
    assert model(tokens, labels=labels, return_dict=False)[1].shape == (2, 19, 97)
    for m in (plain.eval(), model.eval()):
        assert m(tokens, labels=labels).logits.shape == (2, 19, 97)
    torch.testing.assert_close(model(tokens, labels=labels).loss, plain(tokens, labels=labels).loss, rtol=1e-2, atol=0)
    cute_ops_torch.unpatch(model.train())
    cute_ops_torch.patch(model)
    assert model(tokens, labels=labels).logits is None


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3"])
def test_models_built_alike(kind: str) -> None:
    ops = {"embedding", "rmsnorm", "add_rmsnorm", "silu_mul", "rope", "attention", "attention_mask"}
    ops.add("linear_cross_entropy")
    assert {op for _, op in compare(llama(kind))} == ops | ({"linear"} if kind == "Qwen2" else set())  # with biases


@pytest.mark.parametrize("kind", ["Gemma", "Gemma3"])
def test_gemma(kind: str) -> None:
    replaced = dict(compare(llama(kind)))
    assert replaced["model.layers.0.mlp"] == "gelu_mul"
    assert replaced["model.norm"] == "rmsnorm"
    assert replaced["model.embed_tokens"] == "embedding"


def test_bert() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    plain = transformers.BertModel(transformers.BertConfig(num_attention_heads=4, **sizes)).eval()
    model, tokens = copy.deepcopy(plain), torch.randint(0, 97, (2, 19))
    replaced = dict(cute_ops_torch.patch(model))
    assert set(replaced.values()) == {"embedding", "layernorm", "add_layernorm", "gelu", "attention", "mlp"}
    assert replaced["encoder.layer.1.output.LayerNorm"] == "layernorm"
    expected, got = (m(tokens).last_hidden_state for m in (plain, model))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.embeddings.LayerNorm(torch.ones(2, 64)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT, and Llama, which also groups and rotates heads; a mask hides tokens."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    bert = transformers.BertConfig(num_attention_heads=4, attn_implementation="eager", **sizes)
    tokens, mask = torch.randint(0, 97, (2, 19)), torch.ones(2, 19, dtype=torch.long)
    mask[1, 11:] = 0
    for plain in (transformers.BertModel(bert), llama(attn_implementation="eager").model):
        plain = plain.eval().to(dtype)
        model = copy.deepcopy(plain)
        replaced = [tuple(r) for r in cute_ops_torch.patch(model)]
        attention = [name for name, op in replaced if op == "softmax"]
        assert len(attention) == 2
        assert sum(op == "rope" for name, op in replaced if name in attention) in (0, 2)
        with monkeypatch.context() as patched:
            calls = count_calls(patched)
            got = model(tokens, mask, output_attentions=True)
        assert calls["softmax"] == 2
        expected = plain(tokens, mask, output_attentions=True)
        for one, other in zip((got[0], *got.attentions), (expected[0], *expected.attentions), strict=True):
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(one[1, ..., :11, :], other[1, ..., :11, :], rtol=8 * eps, atol=64 * eps)
        cute_ops_torch.unpatch(model)
        assert {type(m) for m in model.modules()} == {type(m) for m in plain.modules()}


def test_other_activations() -> None:
    replaced = dict(compare(llama(hidden_act="gelu")))
    assert replaced["model.layers.0.mlp"] == "gelu_mul"
    assert "model.layers.0.mlp.act_fn" not in replaced
    assert "model.layers.0.mlp" not in dict(compare(llama(hidden_act="relu")))


def test_gradient_checkpointing_autocast_and_wide_weights() -> None:
    plain = llama()
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    for m in (plain, model):
        m.train()
        m.gradient_checkpointing_enable()
    expected, got = logits_and_gradients(plain), logits_and_gradients(model)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = logits_and_gradients(plain), logits_and_gradients(model)
    for name, e in expected.items():
        assert got[name].dtype == e.dtype
        assert (got[name] - e).abs().max() <= 0.05 * max(1.0, e.abs().max()), name
    norm, x = model.model.norm, torch.randn(2, 64).bfloat16()
    assert norm(x).dtype == plain.model.norm(x).dtype == torch.float32


def saved_elements(model: nn.Module) -> int:
    """Elements whose memory the backward keeps, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        kept.update({} if storage.data_ptr() in own else {storage.data_ptr(): storage.nbytes() // t.itemsize})
        return t

    tokens = torch.randint(0, 97, (2, 19))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens, labels=tokens).loss.backward()
    return sum(kept.values())


def test_a_patched_layer_keeps_less_and_may_run_backward_twice() -> None:
    model = llama(intermediate_size=512)
    kept = saved_elements(model)
    cute_ops_torch.patch(model)
    assert saved_elements(model) < kept - 2 * 2 * 19 * 512  # the product of each layer is not saved
    for name, p in model.named_parameters():
        p.requires_grad_("input_layernorm" in name)
    kept = saved_elements(model)
    cute_ops_torch.unpatch(model)
    assert kept <= saved_elements(model)
    cute_ops_torch.patch(model.requires_grad_())
    tokens = torch.randint(0, 97, (2, 19))
    hidden = model.model(tokens).last_hidden_state
    both = [
        torch.autograd.grad(hidden.square().sum(), [*model.model.parameters()], retain_graph=k) for k in (True, False)
    ]
    torch.testing.assert_close(*both, rtol=0, atol=0)


def test_frozen_projections_and_loras_are_run_as_they_are() -> None:
    plain = llama()
    for name, p in plain.named_parameters():
        p.requires_grad_("up_proj" in name or "input_layernorm" in name)
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj)  # as a LoRA wraps it
    tokens = torch.randint(0, 97, (2, 19))
    for m in (plain, model):
        m(tokens, labels=tokens).loss.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


def test_a_hook_on_a_fused_norm_still_runs() -> None:
    model = llama()
    cute_ops_torch.patch(model)
    seen = []
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *a: seen.append(a[2].shape))
    logits_and_gradients(model)
    assert seen == [(2, 19, 64)] * 2


def test_gradients_of_fused_parts_are_not_differentiated() -> None:
    model = llama()
    cute_ops_torch.patch(model)
    layer = model.model.layers[0]
    for parameter in (layer.mlp.up_proj.weight, layer.post_attention_layernorm.weight):
        loss = model(torch.arange(7)[None]).logits.sum()  # its cotangents need no gradient
        (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_to_inner_tensors_are_not_left_out(frozen: bool) -> None:
    """Cotangents need no gradient, and a weight that is frozen has no leaf that would lead to one."""
    gate, down = (torch.randn(*s).requires_grad_(not frozen) for s in ((6, 8), (8, 6)))
    norm = torch.nn.RMSNorm(8)
    norm.requires_grad_(not frozen).variance_epsilon = 1e-6
    calls = {
        "gated MLP": lambda x: (autograd_nodes.silu_mlp(x, gate, gate, down),),
        "and norm": lambda x: autograd_nodes.silu_mlp_add_rmsnorm(x, gate, gate, down, x.detach(), norm),
        "of the residual": lambda x: autograd_nodes.silu_mlp_add_rmsnorm(x.detach(), gate, gate, down, x, norm),
        "norm": lambda x: autograd_nodes.rmsnorm_and_residual(x, norm.weight, 1e-6),
        "linear": lambda x: autograd_nodes.linear_add_rmsnorm(x.detach() @ gate.t(), down, x, norm.weight, 1e-6),
    }
    for name, call in calls.items():
        inner = torch.randn(4, 8, requires_grad=True) * 1
        outs = [out.sum() for out in call(inner)]
        (gradient,) = torch.autograd.grad(outs, inner, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            pytest.fail(f"{name}: {torch.autograd.grad(gradient.square().sum(), inner, allow_unused=True)}")


@pytest.mark.slow
def test_a_patched_model_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    model = llama()
    tokens = torch.randint(0, 97, (2, 11))
    expected = model(tokens).logits
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    cute_ops_torch.patch(model)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(got.square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), nn.GELU])
def test_nested_tensors_are_left_to_torch(make: Any) -> None:
    model, nested = nn.Sequential(make()), torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)])
    want = model(nested)
    cute_ops_torch.patch(model)
    for found, expected in zip(model(nested).unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(found, expected)


def test_norms_whose_eps_a_graph_takes_for_a_tensor_are_left() -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.models.llama.modeling_llama.LlamaRMSNorm
    model = nn.Sequential(nn.LayerNorm(8), llama(8, np.float32(1e-5)), llama(8, np.float64(1e-5)), llama(8, 1e-5))
    x = torch.randn(3, 8)
    want = model(x)
    assert [each.module for each in cute_ops_torch.patch(model)] == ["0", "3"]
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), want)


def test_unknown_models_are_refused() -> None:
    class LlamaRMSNorm(nn.Module):  # the name alone does not match
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    for model in (nn.Linear(2, 2), LlamaRMSNorm()):
        with pytest.raises(
            ValueError, match=rf"^cute_ops_torch\.patch: {type(model).__name__} has no module that is kn"
        ):
            cute_ops_torch.patch(model)


def test_models_of_others_need_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, but does not import where a package that it uses is broken, as torchvision often is."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(f"Could not import module {name!r}. Are this object's requirements there?")

    broken = Broken("transformers")
    broken.__spec__ = ModuleSpec("transformers", None)
    monkeypatch.setitem(sys.modules, "transformers", broken)
    assert [each.op for each in cute_ops_torch.patch(nn.Sequential(nn.LayerNorm(8)))] == ["layernorm"]
    with pytest.raises(ModuleNotFoundError, match=r"^Could not import module"):
        cute_ops_torch.register_attention()


@pytest.mark.gpu
def test_llama_on_a_gpu() -> None:
    assert compare(llama().cuda(), "cuda") == compare(llama(), "cpu")


class Counts(TorchDispatchMode):
    """Counts the ops that run below autograd, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_positions_that_the_model_counts_are_not_looked_at(kind: str) -> None:
    """A look at them would wait for the GPU. Positions that are given may be of several packed sequences."""
    plain = llama(kind)
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    tokens = torch.randint(0, 97, (2, 19))
    packed = torch.cat([torch.arange(7), torch.arange(12)]).expand(2, -1)
    for m, looks in ((plain, True), (model, False)):
        with Counts() as counts:
            m(tokens, labels=tokens, use_cache=False).loss.backward()
        assert (counts.of["aten::_local_scalar_dense"] > 0) == looks
    for given in ({"position_ids": packed}, {"attention_mask": (tokens > 9).long()}, {"use_cache": True}):
        expected, got = (m.eval()(tokens, **given).logits for m in (plain, model))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens, position_ids=packed).logits, model(tokens).logits, atol=1e-3)


def pack_weights(model: nn.Module) -> None:
    """Do what patching does on a GPU."""
    for layer in model.model.layers:
        for parent, names in ((layer.mlp, ("gate_proj", "up_proj")), (layer.self_attn, ("q_proj", "k_proj", "v_proj"))):
            packed_weights.pack([getattr(parent, name).weight for name in names])


@pytest.mark.parametrize("frozen", ["", "down_proj", "gate_proj", "_proj"])
@pytest.mark.parametrize("packed", [True, False])
def test_activations_inside_of_products(packed: bool, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU where our products are faster, here by their references."""
    monkeypatch.setattr(products, "are_ours", lambda x: x.dtype is torch.bfloat16)
    tokens = torch.randint(0, 97, (2, 19))
    plain = llama()
    for name, p in plain.named_parameters():
        p.requires_grad_(not frozen or frozen not in name)
    model = copy.deepcopy(plain).bfloat16()
    cute_ops_torch.patch(model)
    if packed:
        pack_weights(model)
    loss = model(tokens, labels=tokens).loss
    loss.backward(retain_graph=True)  # nothing is overwritten, which references cannot
    plain(tokens, labels=tokens).loss.backward()
    for (name, p), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is None:
            assert got.grad is None
        else:
            assert (got.grad - p.grad).norm() <= 0.05 * p.grad.norm(), name


def count_fused(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let products compute all that they can, as on a GPU where that gains, by their references; counts them."""
    monkeypatch.setattr(products, "are_ours", lambda x: True)
    monkeypatch.setattr(framework, "kernel_is_faster", lambda op, inputs, attrs: True)
    counts: Counter[str] = Counter()
    for name in ("rotated", "add_rmsnorm", "forward"):
        run = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *args, name=name, run=run: counts.update([name]) or run(*args))
    return counts


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "added"),
    [("Llama", 2), ("Mistral", 2), ("Gemma", 0), ("Qwen2", 2), ("Qwen3", 2)],
)
@pytest.mark.parametrize(("packed", "cached"), [(True, True), (True, False), (False, False)])
def test_what_comes_next_inside_of_products(
    kind: str, added: int, packed: bool, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations, adds and norms of each layer; the gradients that are wanted; no more is saved than before."""
    counts = count_fused(monkeypatch)
    model = llama(kind, head_dim=64, use_cache=cached)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1.post_attention_layernorm" not in name and "layers.0.self_attn.o_proj" not in name)
    plain = copy.deepcopy(model).double()
    cute_ops_torch.patch(model)
    if packed:
        pack_weights(model)
    tokens = torch.randint(0, 97, (2, 19))
    expected, got = gradients(plain, tokens), gradients(model, tokens)
    # Values by themselves where a cache copies them.
    rotated, others = {"Qwen2": (0, 0), "Qwen3": (0, 3)}.get(kind, (1 if packed else 2, cached or not packed))
    assert counts == Counter(rotated=2 * rotated, add_rmsnorm=2 * added, forward=2 * others)
    for name, e in expected.items():
        assert (e is None) == (got[name] is None)
        assert e is None or (got[name] - e).abs().max() <= 1e-5 * max(1.0, e.abs().max()), name
    prompt = {"input_ids": tokens[:, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long), "do_sample": False}
    assert torch.equal(*(m.eval().generate(**prompt, max_new_tokens=3) for m in (plain, model)))
    saved = saved_elements(model.train())
    monkeypatch.setattr(products, "are_ours", lambda x: False)
    assert saved <= saved_elements(model)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("Llama", {}, ["its heads have 16 columns, not 64 or 128"]),
        ("Llama", {"head_dim": 64}, []),
        ("Qwen2", {"head_dim": 64}, ["its projections have biases"]),
        ("Qwen3", {"head_dim": 64}, ["it does more between projecting queries and keys and rotating them"]),
    ],
)
def test_patching_says_what_is_not_fused(
    kind: str, changes: Any, why: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "cute_ops"):
        cute_ops_torch.patch(llama(kind, num_hidden_layers=1, **changes))
    assert caplog.messages == [f"model.layers.0.self_attn runs rope in a pass of its own: {each}" for each in why]


def all_of_it(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()


def some_of_it(model: nn.Module) -> None:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


@pytest.mark.parametrize("recompute", [all_of_it, some_of_it])
def test_what_comes_next_is_computed_again(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, tokens = count_fused(monkeypatch), torch.randint(0, 97, (2, 19))
    plain = llama(head_dim=64)
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    recompute(model)
    for (name, e), g in zip(gradients(plain, tokens).items(), gradients(model, tokens).values(), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5, msg=name)
    # Twice; policies look at single ops.
    assert not counts if recompute is some_of_it else (counts["rotated"], counts["add_rmsnorm"]) == (2 * 2 * 2, 2 * 2)


def sees_an_attention(model: nn.Module) -> None:
    model.model.layers[0].self_attn.register_forward_hook(lambda *a: None)


def sees_a_projection(model: nn.Module) -> None:
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *a: None)


def sees_an_mlp(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *a: None)


def wraps_a_projection(model: nn.Module) -> None:
    model.model.layers[0].self_attn.o_proj = nn.Sequential(model.model.layers[0].self_attn.o_proj)


@pytest.mark.parametrize("somebody", [sees_an_attention, sees_a_projection, sees_an_mlp, wraps_a_projection])
def test_products_that_somebody_looks_at_are_called(somebody: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, tokens = count_fused(monkeypatch), torch.randint(0, 97, (2, 19))
    plain = llama(head_dim=64)
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    somebody(model)
    got = gradients(model, tokens).values()
    assert counts["add_rmsnorm"] == 3
    for e, g in zip(gradients(plain, tokens).values(), got, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_no_product_takes_what_everybody_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on all modules, as a profiler's."""
    counts, seen = count_fused(monkeypatch), set()
    model = llama(head_dim=64)
    cute_ops_torch.patch(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module))
    try:
        gradients(model, torch.randint(0, 97, (2, 19)))
    finally:
        handle.remove()
    assert not counts and {m for m in model.modules() if isinstance(m, nn.Linear)} - seen <= {model.lm_head}


def test_a_patched_layer_runs_fewer_products() -> None:
    """Layers that read the same input share one product for its gradient, or add into it, and one for their weights."""
    model = llama(num_hidden_layers=1)

    def count(rows: int) -> tuple[int, ...]:
        tokens = torch.randint(0, 97, (1, rows))
        with torch.profiler.profile() as forward:
            loss = model.model(tokens).last_hidden_state.square().sum()
        with Counts() as back:
            loss.backward()
        products = sum(event.name == "aten::mm" for event in forward.events())
        return products, *(back.of[name] for name in ("aten::mm", "aten::addmm_", "aten::cat"))

    assert count(19) == (7, 14, 0, 0)
    cute_ops_torch.patch(model)
    assert count(19) == (7, 8, 3, 0) and count(201) == (7, 8, 0, 2)
    pack_weights(model)
    assert count(19) == count(201) == (5, 8, 0, 0)
    model.double().float()  # moves the weights apart
    assert count(201) == (7, 8, 0, 2)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_packed_weights(kind: str, tmp_path: Path) -> None:
    model, tokens = llama(kind), torch.randint(0, 97, (2, 19))
    cute_ops_torch.patch(model)
    parameters, state = list(model.parameters()), {n: t.clone() for n, t in model.state_dict().items()}
    expected = gradients(model, tokens)
    model.zero_grad()
    pack_weights(model)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for name, gradient in gradients(model, tokens).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    model.save_pretrained(tmp_path)
    for again in (type(model).from_pretrained(tmp_path), copy.deepcopy(model)):
        assert all(torch.equal(t, state[name]) for name, t in again.state_dict().items())
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, p in model.named_parameters():  # no update has touched another parameter
        torch.testing.assert_close(p.data, state[name] - expected[name], rtol=1e-4, atol=1e-5)


def test_a_patched_model_is_copied_and_not_pickled(tmp_path: Path) -> None:
    """The error says what to do, also of a part of the model; copies are patched, and their weights are their own."""
    model, tokens = llama(), torch.randint(0, 97, (2, 19))
    cute_ops_torch.patch(model)
    for part in (model, model.model.layers[0].mlp):
        for save in (
            pickle.dumps,
            lambda part: torch.save(part, tmp_path / "model.pt"),
            lambda part: pickle.dumps([part]),
        ):
            with pytest.raises(TypeError, match=r"save its state_dict\(\), or call cute_ops_torch\.unpatch\("):
                save(part)
    twin, shallow = copy.deepcopy(model), copy.copy(model)
    assert type(twin) is type(shallow) is type(model) and shallow.lm_head is model.lm_head
    expected = gradients(model, tokens)
    for name, gradient in gradients(twin, tokens).items():
        torch.testing.assert_close(gradient, expected[name])
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    cute_ops_torch.unpatch(twin)
    torch.testing.assert_close(pickle.loads(pickle.dumps(twin))(tokens).logits, model(tokens).logits)


def test_weights_that_somebody_else_holds_stay_where_they_are() -> None:
    def two() -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(rows, 4)) for rows in (3, 5)]

    weights, (a, b) = two(), two()
    packed_weights.pack(weights)
    one = packed_weights.packed_view(weights)
    assert (
        one is not None and torch.equal(one, torch.cat(weights)) and packed_weights.packed_view(weights[::-1]) is None
    )
    view, whole = a.detach(), torch.randn(20, 4)
    parts = [nn.Parameter(whole[:3]), nn.Parameter(whole[7:])]
    shared, wide = two(), [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 6))]
    shared[0].share_memory_()
    turned, double = [nn.Parameter(torch.randn(4, 5).t()), *two()], [a, nn.Parameter(b.double())]
    for kept in ([a, b], parts, shared, wide, turned, double):
        places = [w.data_ptr() for w in kept]
        packed_weights.pack(kept)
        assert [w.data_ptr() for w in kept] == places and packed_weights.packed_view(kept) is None
    assert view.data_ptr() == a.data_ptr()
    chance = torch.randn(8, 4)  # neighbours of different storages
    pair = [
        torch.frombuffer(chance.numpy().data, dtype=torch.float32, count=n, offset=o) for n, o in ((12, 0), (20, 48))
    ]
    assert packed_weights.packed_view([t.view(-1, 4) for t in pair]) is None


def hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [20, 200])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_on_a_gpu_patching_packs_weights(size: int, packed: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where that gains, products rotate queries and keys, and add; without packing as well."""
    rotate, rotated = products.rotated, []
    monkeypatch.setattr(products, "rotated", lambda *args: rotated.append(args[-1]) or rotate(*args))
    tokens = torch.randint(0, 97, (2, rows)).cuda()
    plain = llama(num_hidden_layers=1, head_dim=size).cuda().bfloat16()
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    for parent, names in ((model.model.layers[0].mlp, ["gate_proj", "up_proj"]),
                          (model.model.layers[0].self_attn, ["q_proj", "k_proj", "v_proj"])):  # fmt: skip
        assert packed_weights.packed_view([getattr(parent, name).weight for name in names]) is not None
    for p in model.parameters():
        p.data = p.data if packed else p.data.clone()
    expected, got = gradients(plain.float(), tokens), gradients(model, tokens)
    wanted = [size] * (1 if packed else 2) if size > 16 and hopper() else []
    assert rotated == wanted or (rows < 33 and not rotated)  # of few rows the model of products says
    for name, e in expected.items():
        assert (got[name] - e).norm() <= 0.03 * e.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [19, 2000])
@pytest.mark.parametrize("size", [96, 97])
def test_on_a_gpu_a_gated_mlp_makes_its_product_again_in_place(size: int, rows: int) -> None:
    """With the same bits as in new memory, which it takes where another backward is to come."""
    model = llama(num_hidden_layers=1, intermediate_size=size).cuda().bfloat16()
    cute_ops_torch.patch(model)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, wanted = mlp(x), [x, *mlp.parameters()]
    apart, in_place = [torch.autograd.grad(out.square().sum(), wanted, retain_graph=k) for k in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(apart, in_place, strict=True))


def gradients(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.drawn(0.8)
@pytest.mark.parametrize("frozen", ["", "q_proj", "v_proj", "_proj", "input_layernorm"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma"])
def test_gradients_of_heads_come_joined_from_the_rotation(
    kind: str, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits as rotated one by one and concatenated."""
    tokens = torch.randint(0, 97, (2, 19))
    joined = llama(kind).bfloat16()
    for name, p in joined.named_parameters():
        p.requires_grad_(not frozen or frozen not in name)
    apart = copy.deepcopy(joined)
    cute_ops_torch.patch(joined)
    with monkeypatch.context() as patched:
        patched.setattr(attention, "_rotates_projections", lambda forward: False)
        patching._subclass.cache_clear()
        cute_ops_torch.patch(apart)
    patching._subclass.cache_clear()
    for model, back, copies in ((joined, {"joined": 2, "bwd": 0}, 0), (apart, {"joined": 0, "bwd": 4}, 2)):
        loss = model(tokens, labels=tokens).loss
        with Counts() as counts:
            loss.backward()
        assert {"joined": counts.of["cute::rope_bwd_joined"], "bwd": counts.of["cute::rope_bwd"]} == back
        assert counts.of["aten::cat"] == copies  # of gradients
    expected, got = gradients(apart, tokens), gradients(joined, tokens)
    for name, e in expected.items():
        assert (e is None) == (got[name] is None) == bool(frozen and frozen in name), name
        assert e is None or torch.equal(e, got[name]), name


def test_frozen_norms_have_no_gradient() -> None:
    """Those of a residual stream too; all other gradients are the same."""
    model, tokens = llama(), torch.randint(0, 97, (2, 19))
    cute_ops_torch.patch(model)
    expected = gradients(model, tokens)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name)
    with Counts() as counts:
        got = gradients(model, tokens)
    ran = {name for name in counts.of if "rmsnorm_bwd" in name}
    assert ran == {"cute::add_rmsnorm_bwd_only_dx_dresidual", "cute::rmsnorm_bwd_only_dx"}
    for name, e in expected.items():
        if "norm" in name:
            assert got[name] is None
        else:
            torch.testing.assert_close(got[name], e, rtol=1e-4, atol=1e-6)


def test_projections_that_somebody_looks_at_are_called() -> None:
    """A hook on a projection, or tables passed by position, prevent the fused rotation; results stay the same."""
    model, tokens, seen = llama(), torch.randint(0, 97, (2, 19)), []
    plain = copy.deepcopy(model)
    cute_ops_torch.patch(model)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *a: seen.append(a[2].shape))
    expected, got = gradients(plain, tokens), gradients(model, tokens)
    assert seen == [(2, 19, 32)]
    for name, e in expected.items():
        torch.testing.assert_close(got[name], e, rtol=1e-4, atol=1e-6)
    x, angles = torch.randn(2, 19, 64), torch.randn(1, 19, 8)
    tables = tuple(torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
    layers = [m.model.layers[1].self_attn for m in (plain, model)]
    torch.testing.assert_close(*(layer(x, tables, None)[0] for layer in layers), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        *(layer(x, position_embeddings=tables, attention_mask=None)[0] for layer in layers), rtol=1e-4, atol=1e-6
    )


def sees_a_layer(model: nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda *a: None)


def changes_a_layer(model: nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda *a: a[2].mul_(2))


def changes_a_weight(model: nn.Module) -> None:
    def before(layer: nn.Module, _: Any) -> None:
        layer.input_layernorm.weight.data.mul_(1.5)

    model.model.layers[1].register_forward_pre_hook(before)


def wraps_a_layer(model: nn.Module) -> None:
    class Wrapped(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)

    model.config.use_cache = False  # the second forward would add to it
    model.model.layers[0] = Wrapped(model.model.layers[0])


def drops_a_layer(model: nn.Module) -> None:
    model.config.num_hidden_layers = 2


def replaces_a_norm(model: nn.Module) -> None:
    model.model.norm = nn.LayerNorm(64)


def freezes_a_norm(model: nn.Module) -> None:
    model.model.layers[1].input_layernorm.requires_grad_(False)


@pytest.mark.parametrize(
    ("somebody", "fused"),
    [
        (lambda model: None, 3), (sees_a_layer, 2), (changes_a_layer, 2), (changes_a_weight, 1), (wraps_a_layer, 2),
        (drops_a_layer, 2), (replaces_a_norm, 2), (freezes_a_norm, 3), (nn.Module.eval, 3),
    ],
)  # fmt: skip
def test_a_layer_adds_with_the_norm_after_it(somebody: Any, fused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless something observes or changes what is between them; changes take effect."""
    plain, tokens, taken = llama(num_hidden_layers=3), torch.randint(0, 97, (2, 19)), []
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    pop = residual_norm.pop

    def noted(norm: nn.Module, total: torch.Tensor) -> torch.Tensor | None:
        taken.append(pop(norm, total))
        return taken[-1]

    monkeypatch.setattr(residual_norm, "pop", noted)
    losses, grads = [], []
    for m in (plain, model):
        somebody(m)
        out = m(tokens, labels=tokens)
        out.loss.backward()
        losses.append(out.loss)
        grads.append([p.grad for p in m.parameters()])
    # A checkpoint's second forward takes norms that it has computed itself.
    assert sum(t is not None for t in taken) == fused
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for e, g in zip(*grads, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


def test_a_norm_fused_with_the_add_before_it_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = llama(num_hidden_layers=3).bfloat16(), torch.randint(0, 97, (2, 19))
    cute_ops_torch.patch(model)
    got = gradients(model, tokens)
    monkeypatch.setattr(decoder, "_next_norms", lambda model: {})
    expected = gradients(model, tokens)
    assert all(torch.equal(got[name], e) for name, e in expected.items())


def test_hidden_states_of_a_patched_model_are_there_and_have_gradients() -> None:
    plain, tokens = llama(num_hidden_layers=3), torch.randint(0, 97, (2, 19))
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    found = []
    for m in (plain, model):
        states = m.model(tokens, output_hidden_states=True).hidden_states
        (gradient,) = torch.autograd.grad(sum(h.square().sum() for h in states), m.model.embed_tokens.weight)
        found.append((*states, gradient))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_norm_is_taken_only_of_what_it_was_made_of() -> None:
    model = llama()
    cute_ops_torch.patch(model)
    norm = model.model.norm
    x, residual = torch.randn(2, 3, 64, requires_grad=True), torch.randn(2, 3, 64)

    def changed(total: torch.Tensor) -> None:
        with torch.no_grad():
            total.mul_(2)

    def other_weight(_: torch.Tensor) -> None:
        with torch.no_grad():
            norm.weight.add_(1)

    for between, there in ((lambda t: None, True), (changed, False), (other_weight, False)):
        total = residual_norm.add(x, residual, norm)
        torch.testing.assert_close(total, x + residual)
        assert residual_norm.pop(llama().model.norm, residual_norm.add(x, residual, norm)) is None
        between(total)
        normed = residual_norm.pop(norm, total)
        assert (normed is not None) == there and residual_norm.pop(norm, total) is None
        if normed is not None:
            torch.testing.assert_close(normed, norm(x + residual))


class Calls(TorchDispatchMode):
    """Records the kernels that calls of our ops would run on a GPU."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target, self.found = target, dict[str, manifest.Call]()

    def note(self, op: Op, arguments: tuple[Any, ...]) -> None:
        tensors = [*arguments, *[None] * len(op.inputs)][: len(op.inputs)]
        attrs = {**op.attrs, **dict(zip(op.attrs, arguments[len(op.inputs) :], strict=False))}
        call = manifest.call_of(bind_tensors(op, tensors, list(attrs.values())), memory(op, tensors))
        assert call is not None
        self.found[build.variant_of(call, self.target).symbol] = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "cute" and not name.startswith(("linear_cross_entropy", "scaled_gradient", "embedding")):
            self.note(lookup.find(name), args)
        return func(*args, **(kwargs or {}))


@pytest.mark.drawn(0.8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma", "Gemma2", "Gemma3"])
def test_a_configuration_tells_all_that_the_patched_model_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle built from the configuration leaves nothing to compile."""
    sm90, model = parse("sm_90a"), llama(kind)
    cute_ops_torch.patch(model)
    calls = Calls(sm90)

    def noted(op: Op, make: Callable[[bool], Callable[..., Any]]) -> Callable[[bool], Callable[..., Any]]:
        return lambda inplace: lambda *arguments: (calls.note(op, arguments), make(inplace)(*arguments))[1]

    for op in (sorted_embedding_bwd, cross_entropy, cross_entropy_bwd, cross_entropy_step, scale):
        monkeypatch.setitem(program.functions, op, noted(op, program.functions[op]))
    tokens = torch.randint(0, 97, (64, manifest.ROWS // 64))
    loss = model(tokens, labels=tokens).loss  # fused nodes run only outside of the mode
    with calls:
        loss.backward()
        model(tokens, labels=tokens).loss.backward()
        with torch.no_grad():
            for prompt in (tokens[:1, :9], tokens[:3, :1]):
                model(prompt)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" not in name)
    loss = model(tokens, labels=tokens).loss
    with calls:
        loss.backward()
        model(tokens, labels=tokens).loss.backward()
    told = {build.variant_of(c, sm90).symbol for c in calls_of_model(model.config.to_dict(), "float32", train=True)}
    names = {call.name for call in calls.found.values()}
    assert {"rmsnorm", "rmsnorm_bwd", "rope", "rope_bwd", "sorted_embedding_bwd"} <= names
    assert "cross_entropy_step" in names
    assert {"rmsnorm_bwd_only_dx", "add_rmsnorm_bwd_only_dx_dresidual"} <= names
    assert ("rope_bwd_joined" in names) == (kind not in ("Qwen3", "Gemma3"))
    assert not [str(call) for symbol, call in calls.found.items() if symbol not in told]


@pytest.mark.slow
def test_kernels_of_a_model_are_loaded_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, sm90 = list[str](), parse("sm_90a")
    monkeypatch.setattr(target, "of_device", lambda index: sm90)
    monkeypatch.setattr(cache, "get", lambda variant: asked.append(variant.symbol))
    config = llama().config
    with FakeTensorMode():
        model = nn.ParameterList([torch.empty(1, device="cuda", dtype=torch.bfloat16)])
        model.config = config
        trained = cute_ops_torch.warm_up(model)
        expected = calls_of_model(model.config.to_dict(), "bfloat16", train=True)
        assert {*asked} == {v.symbol for v in build.variants_of(expected, [sm90])} and trained == len(asked)
        assert cute_ops_torch.warm_up(model.eval()) < trained
        # FSDP gathers weights in another dtype than it keeps them in.
        asked.clear()
        with_float32 = nn.ParameterList([torch.empty(1, device="cuda")])
        with_float32.config = config
        assert cute_ops_torch.warm_up(with_float32, torch.bfloat16) == trained
        assert {*asked} == {v.symbol for v in build.variants_of(expected, [sm90])}

        def fail(variant: Any) -> None:
            asked.append(variant.symbol)
            raise CompileError(variant.symbol)

        monkeypatch.setattr(cache, "get", fail)
        asked.clear()
        with pytest.raises(CompileError, match="cute_rmsnorm"):
            cute_ops_torch.warm_up(model.train())
        assert len(asked) == trained  # the others were attempted
    assert cute_ops_torch.warm_up(llama()) == 0
    with pytest.raises(TypeError, match="warm_up: Linear has no config"):
        cute_ops_torch.warm_up(nn.Linear(2, 2))


@pytest.mark.gpu
def test_the_first_step_of_a_warm_model_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(hidden_size=256, intermediate_size=512, head_dim=64).to("cuda", torch.bfloat16)
    cute_ops_torch.patch(model)
    assert cute_ops_torch.warm_up(model)
    loaded, from_disk = list[str](), cache._from_disk

    def noted(where: Any, variant: Any, *args: Any, **options: Any) -> Any:
        loaded.append(variant.describe())
        return from_disk(where, variant, *args, **options)

    monkeypatch.setattr(cache, "_from_disk", noted)
    tokens = torch.randint(97, (4, 256), device="cuda")
    model(tokens, labels=tokens).loss.backward()
    assert loaded == []  # nor compiled: the disk is asked first


@pytest.mark.drawn(0.8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma"])
def test_a_configuration_tells_all_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a training step on Hopper, with packed weights or without; of many elements and of few."""
    count_fused(monkeypatch)
    if kind == "Llama":
        monkeypatch.setattr("cute_ops.composite.linear_add_rmsnorm.FEW_ELEMENTS", 0)
    sm90, calls, run = parse("sm_90a"), dict[str, manifest.Call](), reference.run_reference

    def noted(binding: Any, tensors: Any, other: Any = None) -> Any:
        if not (other or binding.op.program):
            call = manifest.call_of(binding, memory(binding.op, tensors))
            if not build.runs_by_framework(call, sm90):
                calls[build.variant_of(call, sm90).symbol] = call
        return run(binding, tensors, other)

    monkeypatch.setattr(reference, "run_reference", noted)
    monkeypatch.setattr(compiled_call, "run_reference", noted)
    model = llama(kind, head_dim=64, num_hidden_layers=1, use_cache=False).bfloat16()
    cute_ops_torch.patch(model)
    tokens = torch.randint(0, 97, (64, manifest.ROWS // 64))
    for prepare in (lambda model: None, pack_weights):
        prepare(model)
        gradients(model, tokens)
    told = {v.symbol for v in build.variants_of(calls_of_model(model.config.to_dict(), "bfloat16", train=True), [sm90])}
    names = {call.name for call in calls.values()}
    assert ("qkv_rope_64" in names) == ("Qwen" not in kind) and ("linear_add_rstd" in names) == (kind == "Llama")
    assert not [str(call) for symbol, call in calls.items() if symbol not in told]


@pytest.mark.parametrize("host", ["model", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate_proj"])
def test_a_hook_that_comes_while_a_model_runs_counts(host: str) -> None:
    def losses(patched: bool) -> list[float]:
        model = llama()
        if patched:
            cute_ops_torch.patch(model)
        found = []
        for name in (
            "lm_head",
            "model.norm",
            "model.layers.1.mlp.down_proj",
            "model.layers.1.mlp.act_fn",
            "model.layers.1.self_attn.o_proj",
            "model.layers.1.post_attention_layernorm",
        ):
            late = []

            def hook(*_: Any, target: str = name, late: list[Any] = late) -> None:
                late.append(model.get_submodule(target).register_forward_hook(lambda module, args, out: 2 * out))

            early = model.get_submodule(host).register_forward_hook(hook)
            found.append(model(TOKENS, labels=TOKENS).loss.item())
            for handle in (early, *late):
                handle.remove()
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


TOKENS = torch.randint(0, 97, (2, 19), generator=torch.Generator().manual_seed(1))


def test_group_norms_of_images() -> None:
    """Channels first and last in memory, forward and backward, in the layout of torch's own."""
    model = torch.nn.Sequential(torch.nn.GroupNorm(4, 32), torch.nn.SiLU(), torch.nn.Conv2d(32, 16, 3))
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 32, 8, 8).to(memory_format=layout).requires_grad_()
        wanted = model(x)
        slopes = torch.autograd.grad(wanted.square().sum(), [x, *model.parameters()])
        assert cute_ops_torch.patch(model) == [("", "group_norm"), ("0", "group_norm")]
        found = model(x)
        assert found.stride() == wanted.stride()
        ours = torch.autograd.grad(found.square().sum(), [x, *model.parameters()])
        cute_ops_torch.unpatch(model)
        for a, b in zip((found, *ours), (wanted, *slopes), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class _Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("layer", ["norm", "linear", "gated MLP"])
def test_functions_that_give_no_gradient(layer: str) -> None:
    """Autograd runs a layer's node though none of its outputs has a gradient."""
    norm = torch.nn.RMSNorm(8)
    norm.variance_epsilon = 1e-6
    x, residual, gate, down = (torch.randn(s).requires_grad_() for s in ((2, 3, 8), (2, 3, 8), (12, 8), (8, 12)))
    outs = {
        "norm": lambda: autograd_nodes.rmsnorm_and_residual(x, norm.weight, 1e-6),
        "linear": lambda: autograd_nodes.linear_add_rmsnorm(x @ gate.t(), down, residual, norm.weight, 1e-6),
        "gated MLP": lambda: autograd_nodes.silu_mlp_add_rmsnorm(x, gate, gate, down, residual, norm),
    }[layer]()
    total = sum(_Stopped.apply(out).sum() for out in outs) + 3 * x.sum()
    dx, *others = torch.autograd.grad(total, (x, residual, gate, down, norm.weight), allow_unused=True)
    assert torch.equal(dx, torch.full_like(x, 3)) and others == [None] * 4
