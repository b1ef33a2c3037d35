"""Untouched models under the graph pass: what is recognised in each, and their losses and gradients."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from cute_ops.jit.target import Target
from cute_ops_torch import inductor
from cute_ops_torch.inductor import choice, graph_pass, rewrite
from cute_ops_torch.inductor.dynamo import DynamoFront
from tests.torch.drawn_programs import enabled, only_the_pass, through_autograd

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61,
    "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "use_cache": False, "pad_token_id": 0}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout", "dropout_rate",
     "embd_pdrop", "attn_pdrop", "resid_pdrop", "activation_dropout", "hidden_dropout"), 0.0,
)  # fmt: skip
IMAGE = {**SIZES, "image_size": 16, "patch_size": 8}


class Case(NamedTuple):
    """A model of Hugging Face: its classes, its config's arguments, and what is recognised in two layers."""

    config: str
    model: str
    arguments: dict[str, Any]
    found: dict[str, int]


LOSS = {"cross_entropy": 1, "attention_mask": 2, "embedding": 1}
ROTATED = {"rope": 4}
LLAMA = {**ROTATED, "add_rmsnorm": 2, "linear_add_rmsnorm": 2, "gated_mlp": 2, **LOSS}
ENCODER = {"fused": 6, "mlp": 2, "cross_entropy": 1, "embedding": 3}
VISION = {"fused": 5, "mlp": 2, "cross_entropy": 1}
MODELS = {
    "Llama": Case("LlamaConfig", "LlamaForCausalLM", GROUPED, {"rmsnorm": 1, **LLAMA}),
    "Mistral": Case("MistralConfig", "MistralForCausalLM", GROUPED, {"rmsnorm": 1, **LLAMA}),
    "Qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", GROUPED, {"rmsnorm": 1, **LLAMA}),
    "Qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", GROUPED, {"rmsnorm": 5, **LLAMA}),
    "Gemma3": Case("Gemma3TextConfig", "Gemma3ForCausalLM", {**GROUPED, "sliding_window": 8}, {
        **ROTATED, "fused": 6, "rmsnorm": 4, "gated_mlp": 2, "cross_entropy": 1, "embedding": 1,
    }),
    "OLMo 2": Case("Olmo2Config", "Olmo2ForCausalLM", GROUPED, {
        **ROTATED, "rmsnorm": 4, "fused": 4, "gated_mlp": 2, **LOSS,
    }),
    "Phi-3": Case("Phi3Config", "Phi3ForCausalLM", GROUPED, {"rmsnorm": 1, **LLAMA}),
    "GLM-4": Case("Glm4Config", "Glm4ForCausalLM", GROUPED, {
        **ROTATED, "rmsnorm": 1, "fused": 4, "gated_mlp": 2, **LOSS,
    }),
    "Granite": Case("GraniteConfig", "GraniteForCausalLM", GROUPED, {"rmsnorm": 1, **LLAMA}),
    "Cohere": Case("CohereConfig", "CohereForCausalLM", GROUPED, {
        **ROTATED, "layernorm": 1, "fused": 2, "gated_mlp": 2, **LOSS,
    }),
    "StableLM": Case("StableLmConfig", "StableLmForCausalLM", GROUPED, {
        **ROTATED, "layernorm": 1, "fused": 4, "gated_mlp": 2, **LOSS,
    }),
    "GPT-2": Case("GPT2Config", "GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 0, "loss_type": "ForCausalLMLoss", "use_cache": False,
    }, {"fused": 5, "mlp": 2, **LOSS, "embedding": 2}),
    "GPT-NeoX": Case("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SIZES, "use_cache": False}, {
        **ROTATED, "fused": 3, "mlp": 2, **LOSS,
    }),
    "BERT": Case("BertConfig", "BertForMaskedLM", SIZES, ENCODER),
    "RoBERTa": Case("RobertaConfig", "RobertaForMaskedLM", {**SIZES, "pad_token_id": 0}, ENCODER),
    "ModernBERT": Case("ModernBertConfig", "ModernBertForMaskedLM", {**SIZES, "pad_token_id": 0}, {
        **ROTATED, "layernorm": 1, "fused": 5, "gated_mlp": 2, "cross_entropy": 1, "embedding": 1,
    }),
    "T5": Case("T5Config", "T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 61,
        "decoder_start_token_id": 0, "use_cache": False,
    }, {
        "rmsnorm": 2, "fused": 3, "linear_add_rmsnorm": 6, "add_rmsnorm": 3, "mlp": 4, "cross_entropy": 1,
        "embedding": 4, "attention_mask": 2,
    }),
    "ViT": Case("ViTConfig", "ViTForImageClassification", IMAGE, VISION),
    "DINOv2": Case("Dinov2Config", "Dinov2ForImageClassification", IMAGE, VISION),
    "DeiT": Case("DeiTConfig", "DeiTForImageClassification", IMAGE, VISION),
}  # fmt: skip
CALLS = 200  # of functions for each node of a graph: some 15 microseconds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    inductor.replaced.clear()
    torch.manual_seed(0)
    with enabled():
        yield


@pytest.mark.slow
@pytest.mark.drawn(0.35)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_hugging_face(name: str) -> None:
    case = MODELS[name]
    model, inputs = hugging_face(case)
    compare(model, lambda run: run(**inputs).loss)
    assert dict(inductor.replaced) == case.found, name
    report = inductor.report()
    assert Counter({entry.becomes: 0 for entry in report.replaced}).keys() == case.found.keys()
    assert all(entry.why for entry in report.left if entry.what == "product")


def hugging_face(case: Case) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = getattr(transformers, case.config)(**{**NO_DROPOUT, **case.arguments})
    model = getattr(transformers, case.model)(config).train()
    if "Image" in case.model:
        return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(1, 61, (2, 9))
    return model, {"input_ids": tokens, "labels": tokens}


def compare(model: nn.Module, loss: Callable[[Any], Any], backend: Any = only_the_pass, **options: Any) -> None:
    """Loss and gradients of a compiled model are those of the model."""
    results = []
    for run in (model, torch.compile(model, backend=backend, **options)):
        model.zero_grad()
        value = loss(run)
        value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for got, want in zip(results[1], results[0], strict=True):
        assert got.dtype == want.dtype
        bound = (2e-5 if want.dtype == torch.float32 else 4e-2) * max(want.abs().max().item(), 1e-2)
        assert (got.double() - want.double()).abs().max().item() <= bound


class Attention(nn.Module):
    def __init__(self, n: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.causal = nn.Linear(n, 3 * n), nn.Linear(n, n), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, n: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.second, self.attention = norm(n), norm(n), Attention(n, True)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A decoder whose loss alone reads the logits."""

    def __init__(self, n: int = 32, norm: type[nn.Module] = nn.LayerNorm, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(61, n), norm(n), nn.Linear(n, 61, bias=False)
        self.blocks, self.checkpointed = nn.ModuleList(Block(n, norm) for _ in range(2)), checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 61).float(), tokens[:, 1:].reshape(-1))


class DiT(nn.Module):
    """A block with adaLN: its norms are scaled and shifted by what is computed from a condition."""

    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(n, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attention, self.ada = Attention(n, False), nn.Linear(n, 6 * n)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = self.ada(F.silu(condition))[:, None].chunk(6, dim=-1)
        x = x + c * self.attention(self.first(x) * (1 + b) + a)
        return x + f * self.down(F.gelu(self.up(self.second(x) * (1 + e) + d), approximate="tanh"))


TOKENS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_decoder_with_its_loss() -> None:
    compare(Decoder(), lambda run: run(TOKENS), through_autograd, fullgraph=True)
    assert inductor.replaced == {"layernorm": 1, "fused": 4, "mlp": 2, "linear_cross_entropy": 1, "embedding": 1}


@pytest.mark.slow
def test_a_block_with_modulated_norms() -> None:
    x, condition = torch.randn(2, 5, 32), torch.randn(2, 32)
    compare(DiT(), lambda run: run(x, condition).cos().sum(), through_autograd, fullgraph=True)
    assert inductor.replaced == {"fused": 3, "mlp": 1}


@pytest.mark.slow
def test_modulated_norms_of_rows_that_lie_across() -> None:
    """A convolution's result has its places beside each other; what the model returns keeps these strides."""
    x, condition = torch.randn(2, 32, 5).transpose(1, 2), torch.randn(2, 32)
    compare(DiT(), lambda run: run(x, condition).cos().sum(), through_autograd, fullgraph=True)
    assert inductor.replaced == {"fused": 3, "mlp": 1}


@pytest.mark.slow
def test_bodies_of_checkpoints_are_rewritten() -> None:
    """Torch runs the pass on them, too; here the graphs are as Dynamo made them."""
    compare(Decoder(checkpointed=True), lambda run: run(TOKENS), bodies_too, fullgraph=True)
    assert inductor.replaced == {"layernorm": 3, "fused": 2, "mlp": 2, "linear_cross_entropy": 1, "embedding": 1}


def bodies_too(module: torch.fx.GraphModule, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor.compile_fx import _recursive_pre_grad_passes

    return aot_eager(_recursive_pre_grad_passes(module, inputs), inputs)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_autocast(norm: type[nn.Module]) -> None:
    """Inside of what is compiled and around it; products get their operands in autocast's dtype."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Decoder(norm=norm)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(tokens)

    def outside(run: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(TOKENS)  # type: ignore[no-any-return]

    for model, loss in ((Inside(), lambda run: run(TOKENS)), (Decoder(norm=norm), outside)):
        inductor.replaced.clear()
        nearly(model, loss)
        assert inductor.replaced["mlp"] == 2


def nearly(model: nn.Module, loss: Callable[[Any], Any]) -> None:
    """Loss and gradients agree as values of 8 bits do."""
    results = []
    for run in (model, torch.compile(model, backend=through_autograd, fullgraph=True)):
        model.zero_grad()
        value = loss(run)
        value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(results[1], results[0], strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0.05 * want.abs().max().item() + 1e-4)


def test_exact_keeps_every_rounding() -> None:
    """In bfloat16 results are those of the model, bit for bit, where otherwise one rounding stands for several."""

    def function(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x * 1.1 + y
        wide = total.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return F.silu(normed * weight) * total

    generator = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 48), (64, 48), (48,)))
    want = function(x, y, weight)
    results = {}
    for exact in (False, True):
        torch._dynamo.reset()
        inductor.replaced.clear()
        with enabled(exact=exact):
            results[exact] = torch.compile(function, backend=only_the_pass)(x, y, weight)
        assert inductor.replaced == {"fused": 1}
    assert (results[True] != want).float().mean() < 0.01  # sums of rows may be added in another order
    assert (results[False] != want).float().mean() > 0.1


@pytest.mark.slow
def test_dynamic_rows_compile_once() -> None:
    model = Decoder()
    compiled = torch.compile(model, backend=only_the_pass, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        tokens = torch.randint(0, 61, (rows, 2 * rows))
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert inductor.replaced == {"layernorm": 1, "fused": 4, "mlp": 2, "linear_cross_entropy": 1, "embedding": 1}


@pytest.mark.drawn(0.5, among="inductor")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead"])
def test_inductor_runs_what_was_put_in(mode: str) -> None:
    """Code that Inductor makes: training, with sizes that change."""
    compare(Decoder(), lambda run: run(TOKENS) + run(TOKENS[:, 2:]), "inductor", mode=mode, fullgraph=True)
    assert inductor.replaced["linear_cross_entropy"] == 2


def test_products_take_an_epilogue_where_the_model_of_products_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H100, with tensors that have no memory: a GELU is worth it, after long sums of few rows it is not.
    Functions of elements alone stay with Inductor.
    """
    monkeypatch.setattr(choice, "target_of", lambda device: Target("sm_90a", 132))
    monkeypatch.setattr(DynamoFront, "device_of", lambda self, value: "cuda")
    monkeypatch.setattr(graph_pass.Replace, "_concerns", lambda self, graph: True)

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias))

    found = {}
    for dtype, rows, k in ((torch.bfloat16, 16384, 1024), (torch.bfloat16, 200, 16384), (torch.float32, 16384, 1024)):
        torch._dynamo.reset()
        given = [torch.empty(s, dtype=dtype, device="meta") for s in ((rows, k), (1024, k), (1024,))]
        with inductor.enable():
            torch.compile(layer, backend=only_the_pass, fullgraph=True, dynamic=False)(*given)
            (found[dtype, rows],) = [entry for entry in inductor.report() if "gelu" in entry.what]
    first, few, wide = found.values()
    assert first.becomes == "linear"
    assert first.gain is not None
    assert 10 < first.gain < 500
    assert re.fullmatch(r"the framework's product is expected to be faster: \S+ us are expected .*", few.why)
    assert wide.why == "no kernel of a product takes float32"

    torch._dynamo.reset()
    x = torch.empty(64, 1024, device="meta")
    with inductor.enable():
        torch.compile(lambda x: (x * 2).tanh() + 1, backend=only_the_pass)(x)
        (entry,) = inductor.report()
    assert (entry.becomes, entry.why) == ("", "Inductor fuses it, too; mode='max-autotune' measures both forms")


def test_a_graph_that_cannot_be_read_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*given: Any) -> None:
        raise KeyError("wrong")

    monkeypatch.setattr("cute_ops.fusion.settle.analyse", broken)
    x = torch.randn(4, 32)
    got = torch.compile(lambda x: F.rms_norm(x, (32,)), backend=only_the_pass)(x)
    torch.testing.assert_close(got, F.rms_norm(x, (32,)))
    assert "torch.compile: a graph stays as it is: TypeError: " in caplog.text
    assert [entry.what for entry in inductor.report()] == ["a graph"]


@pytest.mark.slow
def test_recognition_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: calls of functions for each node of a graph whose layers have different widths."""
    from cute_ops.fusion import repeated

    class Layer(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 2 * n), nn.Linear(n, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.up(self.norm(x.float() * 1.5)).chunk(2, dim=-1)
            return x + self.down(F.silu(gate).mul(up).contiguous())

    graphs: list[torch.fx.GraphModule] = []
    model = nn.Sequential(*(Layer(8 * (k + 1)) for k in range(20)))
    torch.compile(model, backend=lambda module, inputs: graphs.append(module) or module)(torch.randn(4, 32))
    (module,) = graphs
    chooser = choice.Chooser(choice.KNOWN, ("cpu",), exact=False)
    rewrite.chosen_in(DynamoFront(module), chooser, exact=False)  # what is made once in a process
    monkeypatch.setattr(repeated, "_kept", {})
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        rewrite.chosen_in(DynamoFront(module), chooser, exact=False)
    finally:
        sys.setprofile(None)
    assert calls < CALLS * len(module.graph.nodes)


def test_a_global_switch_and_a_context() -> None:
    before = torch._inductor.config.pre_grad_custom_pass
    with inductor.enable(devices=("cpu",)):
        assert torch._inductor.config.pre_grad_custom_pass is not before
        assert list(inductor.report()) == []
    assert torch._inductor.config.pre_grad_custom_pass is None
    assert getattr(torch._inductor.config, "pre_grad_pass_timing", "default") == "default"


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(900, 906))
def test_drawn_programs(seed: int) -> None:
    from tests.torch.drawn_programs import Program
    from tests.torch.drawn_programs import compare as compare_programs

    program = Program(seed)
    backend = through_autograd if seed % 4 == 0 and not program.is_random else only_the_pass
    compare_programs(program, backend, dynamic=seed % 3 == 0 or None)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 26))
def test_drawn_graphs(seed: int) -> None:
    """``python -m tests.torch.drawn_graphs --count 500`` checks more of them."""
    from tests.torch.drawn_graphs import check

    check(seed)
