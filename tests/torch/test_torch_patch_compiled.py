"""Patched models under torch.compile run the ops that they run in eager mode, in one graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import cute_ops_torch
from cute_ops_torch.host import compiled_call, recorded
from cute_ops_torch.huggingface import loss, traced
from cute_ops_torch.huggingface.masks import without_computing
from cute_ops_torch.huggingface.match import rebind
from cute_ops_torch.library import reference

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "dropout_rate", "embd_pdrop", "attn_pdrop",
     "resid_pdrop"), 0.0,
)  # fmt: skip
SPEECH = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 10,
    "max_target_positions": 12, "vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


class Case(NamedTuple):
    """A model, its config's arguments, and the kernels of a training step's forward that a graph could lose."""

    model: str
    config: dict[str, Any]
    runs: dict[str, int]


MODELS = {
    "Llama": Case("LlamaForCausalLM", GROUPED, {"rmsnorm": 1, "add_rmsnorm": 4, "cross_entropy": 1, "attention": 2}),
    "Qwen3": Case("Qwen3ForCausalLM", GROUPED, {
        "rmsnorm": 1, "add_rmsnorm": 4, "qk_norm_rope": 2, "cross_entropy": 1, "attention": 2,
    }),
    "Qwen3-MoE": Case("Qwen3MoeForCausalLM", {
        **GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    }, {"rmsnorm": 1, "add_rmsnorm": 4, "qk_norm_rope": 2, "cross_entropy": 1, "attention": 2}),
    "Gemma 3": Case("Gemma3ForCausalLM", {**GROUPED, "sliding_window": 8}, {
        "rmsnorm": 5, "add_rmsnorm": 4, "qk_norm_rope": 2, "cross_entropy": 1, "attention": 2, "gelu_mul": 2,
    }),
    "GPT-OSS": Case("GptOssForCausalLM", {**GROUPED, "num_local_experts": 4, "sliding_window": 8}, {
        "rmsnorm": 1, "add_rmsnorm": 4, "rope": 4, "cross_entropy": 1, "attention": 2,
    }),
    "GPT-2": Case("GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0,
    }, {"layernorm": 1, "add_layernorm": 4, "mlp_up": 2, "cross_entropy": 1, "attention": 2}),
    "BERT": Case("BertForMaskedLM", {**SIZES, "max_position_embeddings": 32}, {
        "layernorm": 2, "add_layernorm": 4, "mlp_up": 2, "gelu": 1, "cross_entropy": 1, "attention": 2,
    }),
    "T5": Case("T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
        "vocab_size": 61, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
    }, {"rmsnorm": 2, "add_rmsnorm": 5, "gelu_mul": 2, "cross_entropy": 1}),
    "Whisper": Case("WhisperForConditionalGeneration", SPEECH, {
        "layernorm": 2, "add_layernorm": 5, "mlp_up": 2, "cross_entropy": 1, "attention": 3,
    }),
    "ViT": Case("ViTForImageClassification", {**SIZES, "image_size": 16, "patch_size": 8}, {
        "layernorm": 1, "add_layernorm": 4, "mlp_up": 2, "attention": 2,
    }),
    "Mamba-2": Case("Mamba2ForCausalLM", {
        "hidden_size": 16, "num_heads": 2, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8,
        "num_hidden_layers": 2, "vocab_size": 61,
    }, {"rmsnorm": 3, "cross_entropy": 1}),
}  # fmt: skip
# Kernels of the products of a layer, and of biases of experts, whose forms differ: an autograd node here, an op of a
# graph there.
_OWN_FORMS = re.compile(r"(linear|scale|swiglu|gated|rope|sorted_embedding)")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each kernel ran, by the name of its op."""
    found, run = Counter[str](), reference.run_reference

    def noted(binding: Any, tensors: Any, program: Any = None, *more: Any) -> Any:
        if not (program or binding.op.program):
            found[re.sub(r"_(kn|bias|pre|step)(?=_|$)", "", binding.op.name)] += 1
        return run(binding, tensors, program, *more)

    for module in (reference, compiled_call, recorded):
        monkeypatch.setattr(module, "run_reference", noted)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def made(case: Case) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    kind = getattr(transformers, case.model)
    known = {**NO_DROPOUT, "use_cache": False}
    plain = kind.config_class()
    config = kind.config_class(**{key: value for key, value in known.items() if hasattr(plain, key)} | case.config)
    model = kind(config).bfloat16().train()
    tokens = torch.randint(3, 61, (2, 9))
    if "Image" in case.model:
        return model, {"pixel_values": torch.randn(2, 3, 16, 16).bfloat16(), "labels": torch.tensor([0, 1])}
    if "Whisper" in case.model:
        return model, {"input_features": torch.randn(2, 8, 20).bfloat16(), "labels": tokens}
    return model, {"input_ids": tokens, "labels": tokens}


def step(run: Any, model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = run(**inputs).loss
    loss.backward()
    return [loss.detach().float(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_runs_what_eager_mode_runs(name: str, calls: Counter[str]) -> None:
    case, graphs = MODELS[name], list[Any]()
    model, inputs = made(case)
    cute_ops_torch.patch(model)
    step(model, model, inputs)  # learns which norms read a layer's output
    calls.clear()
    expected, eager = step(model, model, inputs), Counter(calls)
    assert {op: eager[op] for op in case.runs} == case.runs
    fresh, _ = made(case)  # which has learned nothing
    cute_ops_torch.patch(fresh)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    calls.clear()
    found, compiled = step(torch.compile(fresh, backend=backend), fresh, inputs), Counter(calls)
    assert len(graphs) == 1
    same = {op for op in {*eager, *compiled} if op in case.runs or not _OWN_FORMS.match(op)}
    assert {op: compiled[op] for op in same} == {op: eager[op] for op in same}
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= 2e-2 * want.abs().max().clamp(min=1e-2)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("Llama", "model"), ("ViT", "vit")])
def test_a_stack_compiled_alone_hands_sums_from_layer_to_layer(name: str, part: str, calls: Counter[str]) -> None:
    model, inputs = made(MODELS[name])
    cute_ops_torch.patch(model)
    step(model, model, inputs)  # learns which norms read a layer's output
    calls.clear()
    want, eager = step(model, model, inputs), Counter(calls)
    for layer in model.modules():
        traced.forget(layer)
    model.get_submodule(part).compile(backend="eager", fullgraph=True)
    for _ in range(2):
        calls.clear()
        found = step(model, model, inputs)
    assert {op: calls[op] for op in eager if "norm" in op} == {op: eager[op] for op in eager if "norm" in op}
    for got, each in zip(found, want, strict=True):
        assert (got - each).abs().max() <= 2e-2 * each.abs().max().clamp(min=1e-2)


@pytest.mark.parametrize("given", [{"num_items_in_batch": torch.tensor(18)}, {"num_items_in_batch": 18}, {}], ids=str)
def test_what_a_trainer_gives_a_model_says_nothing_to_attention(given: dict[str, Any], calls: Counter[str]) -> None:
    """Models hand on to attention what they are called with, and MoE models that router logits are wanted."""
    case = MODELS["Llama" if given else "Qwen3-MoE"]
    model, inputs = made(case)
    model.config.output_router_logits = not given
    cute_ops_torch.patch(model)
    run = model if given else torch.compile(model, backend="eager", fullgraph=True)
    first = run(**inputs, **given).loss  # a first call, which would put in the hooks that keep router logits
    torch.testing.assert_close(first, model(**inputs, **given).loss)
    assert calls["attention"] == 4


@pytest.mark.slow
def test_a_graph_of_all_lengths() -> None:
    """Its numbers are inputs, too, of which nodes of autograd can hold no default."""
    torch._dynamo.reset()
    model, inputs = made(MODELS["Llama"])
    cute_ops_torch.patch(model)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for length in (7, 5):
        given = {name: value[:, :length] for name, value in inputs.items()}
        torch.testing.assert_close(compiled(**given).loss, model(**given).loss, rtol=2e-2, atol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_keeps_its_ops(strict: bool) -> None:
    """And its gradients: `torch.export` runs a model's code, or traces it by Dynamo, which loses those of Functions."""
    model, inputs = made(MODELS["Llama"])
    cute_ops_torch.patch(model, logits=True)
    program = torch.export.export(model, (), {**inputs, "use_cache": False}, strict=strict)
    assert {"cute.rmsnorm.default", "cute.rope.default"} <= {str(node.target) for node in program.graph.nodes}
    exported: Any = program.module()
    for each in (exported, model):
        each.zero_grad()
        each(**inputs, use_cache=False).loss.backward()
    found = dict(exported.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].grad, p.grad, rtol=0.1, atol=2e-2 * p.grad.abs().max().item())


@pytest.mark.slow
def test_a_graph_holds_as_many_logits_as_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the head's rows are larger behind gated MLPs, which leave memory to them in both: not those with an
    adapter, which may have no weight of their own.
    """
    asked: list[Any] = []
    find = loss.rows_in_saved
    monkeypatch.setattr(
        loss, "rows_in_saved", lambda saved, *of: asked.append((saved, find(saved, *of))) or asked[-1][-1]
    )
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED | {"intermediate_size": 256})).train()
    cute_ops_torch.patch(model)
    inputs = {"input_ids": (tokens := torch.randint(1, 61, (2, 128))), "labels": tokens}
    for adapted in (False, True):
        if adapted:
            mlp = model.model.layers[0].mlp
            mlp.down_proj = nn.Sequential(mlp.down_proj)
        for run in (model, torch.compile(model, backend="eager", fullgraph=True, dynamic=False)):
            run(**inputs)
        eager, *traced_ = asked
        assert {*traced_} == {eager} and (adapted or eager[-1])
        asked.clear()


@pytest.mark.slow
@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("frozen", "dynamic"), [("k_proj", False), ("q_proj k_proj v_proj", True)])
def test_gradients_of_rotated_heads_are_joined_by_the_rotation(frozen: str, dynamic: bool) -> None:
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 1,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED | sizes)).bfloat16().train()
    cute_ops_torch.patch(model)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(each in name for each in frozen.split()))
    inputs = {"input_ids": (tokens := torch.randint(1, 61, (2, 16))), "labels": tokens}
    seen: list[str] = []

    def noted(module: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    run = torch.compile(model, backend=aot_autograd(fw_compiler=noted, bw_compiler=noted), dynamic=dynamic)
    for found, expected in zip(step(run, model, inputs), step(model, model, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=2e-2 * expected.abs().max().item())
    assert seen.count("cute.rope_bwd_joined.default") == 1
    assert not any("qkv_rope_64_bwd" in each for each in seen)


def test_outputs_of_a_model_that_ran_before_its_patch_are_kept_once() -> None:
    model, inputs = made(MODELS["Qwen3-MoE"])
    model.config.output_router_logits = True
    expected = model(**inputs).router_logits
    cute_ops_torch.patch(model)
    assert len(model(**inputs).router_logits) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dynamic"), [("ViT", None), ("ViT", True), ("Llama", True)])
def test_checkpointed_layers_of_a_graph_read_no_norm_of_the_next_layer(name: str, dynamic: bool | None) -> None:
    """Each is a call in the graph, which has no names for tensors outside of it."""
    torch._dynamo.reset()
    model, inputs = made(MODELS[name])
    cute_ops_torch.patch(model)
    want = step(model, model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    if dynamic:
        with torch.no_grad():  # a graph of its own, in which norms run alone
            compiled(**inputs)
    found = step(compiled, model, inputs)
    for got, each in zip(found, want, strict=True):
        assert (got - each).abs().max() <= 2e-2 * each.abs().max().clamp(min=1e-2)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_without_gradients(name: str, frozen: bool) -> None:
    torch._dynamo.reset()
    model, inputs = made(MODELS[name])
    cute_ops_torch.patch(model)
    model.requires_grad_(not frozen)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with nullcontext() if frozen else torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).loss, model(**inputs).loss, rtol=2e-2, atol=0)


def test_classes_of_a_patched_model_are_compiled_apart() -> None:
    """Where a graph breaks, Dynamo compiles a ``forward`` at most eight times and counts them by their code."""
    assert without_computing(len).__code__ is not without_computing(max).__code__  # functions that make masks
    layers = nn.Sequential(nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.GELU(), nn.Embedding(4, 8))
    cute_ops_torch.patch(layers)
    assert len({id(type(layer).forward.__code__) for layer in layers}) == 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Dropped(nn.Module):
    """Layers between which a graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0:
                continue
            x = layer(x)
        return x


@pytest.mark.slow
def test_layers_between_breaks_of_a_graph_are_compiled_once(calls: Counter[str]) -> None:
    """Sums that go from graph to graph have neither norms, which nobody would read, nor anything that Dynamo guards."""
    model, x, graphs = Dropped(), torch.randn(2, 3, 8), list[Any]()
    want = model(x)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.extend([graph] if any(node.op.startswith("call") for node in graph.graph.nodes) else [])
        return graph

    def compiled() -> int:
        graphs.clear()
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend)
        for _ in range(2):
            calls.clear()
            torch.testing.assert_close(run(x), want, rtol=1e-5, atol=1e-6)
        return len(graphs)

    plain = compiled()
    assert "add_layernorm" in {each.op for each in cute_ops_torch.patch(model)}
    for _ in range(2):
        assert compiled() == plain and calls["layernorm"] == 3 and not calls["add_layernorm"]
        model(x)  # learns which norms read a layer's output


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def _broken(x: torch.Tensor) -> torch.Tensor:
    y = _doubled(x)
    torch._dynamo.graph_break()
    return _doubled(y).sin()


def test_a_copy_with_other_functions_shares_no_compiled_code() -> None:
    """Dynamo ends a graph at a hook, as ``enable_input_require_grads`` makes, and names the rest among globals."""
    x, copy = torch.randn(3), rebind(_broken, _doubled=torch.cos)
    torch.compiler.reset()
    for function in (_broken, copy, _broken):
        compiled = torch.compile(lambda x, function=function: function(x) + 1, backend="eager")
        torch.testing.assert_close(compiled(x), function(x) + 1)
