"""The serving example gives each request the tokens of the model's own generate, whatever runs beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "examples" / "serving"))
serve_torch = pytest.importorskip("serve_torch", reason="transformers is not installed", exc_type=ImportError)
from engine import CHUNK, Engine, Request, Step  # noqa: E402 (its folder is known above)

# Logits that are this near are equal to caches in float16.
TIE = 0.02


def assert_same_tokens(model: Any, asked: list[Request]) -> None:
    """The tokens are those of generate, or the first other one is as likely."""
    for request in asked:
        right = serve_torch.generated(model, request)
        assert len(request.made) == request.new_tokens
        other = next((i for i, (a, b) in enumerate(zip(request.made, right, strict=True)) if a != b), None)
        if other is not None:
            before = [*request.prompt, *right[:other]]
            assert serve_torch.margin(model, before, request.made[other]) < TIE


@pytest.mark.slow
def test_a_hugging_face_model() -> None:
    model, asked, steps = serve_torch.main([])
    assert_same_tokens(model, asked)
    # One after another, each request would take a step for each chunk of its prompt and for each token but the first.
    assert steps < sum(-(-len(r.prompt) // CHUNK) + r.new_tokens - 1 for r in asked) / 3


@pytest.mark.slow
def test_a_decoder_in_nnx() -> None:
    serve_jax = pytest.importorskip("serve_jax", reason="flax is not installed", exc_type=ImportError)
    assert_same_tokens(*serve_jax.main(["--requests", "12", "--layers", "1"]))


@pytest.mark.gpu
def test_a_captured_graph_on_a_gpu() -> None:
    model, asked, _ = serve_torch.main(["--compile"])
    assert_same_tokens(model, asked)


@pytest.mark.parametrize(("batch", "pages"), [(1, 16), (3, 16), (20, 128)])
def test_requests_that_wait_for_places_and_pages(batch: int, pages: int) -> None:
    model, asked = serve_torch.small_model(), serve_torch.requests(8)
    engine = Engine(
        serve_torch.server(model, torch.float16), batch=batch, pages=pages, page_size=4, longest=serve_torch.LONGEST
    )
    engine.run(asked)
    assert sorted(engine.free) == list(range(pages))
    assert_same_tokens(model, asked)


def test_a_request_that_no_pool_holds_is_refused() -> None:
    def model(step: Step) -> np.ndarray:
        return np.zeros(len(step.lengths))

    with pytest.raises(ValueError, match="a request needs more than 2 pages"):
        Engine(model, batch=2, pages=2, page_size=4, longest=64).run([Request([1] * 4, 4), Request([1] * 9, 1)])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request([], 2), "64 at most, got 0 and 2"),
        (Request([1, 2], 0), "64 at most, got 2 and 0"),
        (Request([1] * 63, 2), "64 at most, got 63 and 2"),
    ],
)
def test_requests_that_no_engine_runs_are_refused(request_: Request, text: str) -> None:
    def model(step: Step) -> np.ndarray:
        raise AssertionError("nothing runs")

    with pytest.raises(ValueError, match=text):
        Engine(model, batch=2, pages=128, page_size=4, longest=64).run([Request([1], 1), request_])
    with pytest.raises(ValueError, match="page_size=0"):
        Engine(model, batch=2, pages=128, page_size=0, longest=64)


@pytest.mark.parametrize(
    ("kind", "other", "text"),
    [
        ("Qwen2Config", {}, "'model_type': 'qwen2'"),
        ("LlamaConfig", {"tie_word_embeddings": True}, "{'tie_word_embeddings': True}"),
        ("LlamaConfig", {"head_dim": 64}, "{'head_dim': 64}"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "'linear'"),
    ],
)
def test_the_nnx_decoder_takes_no_other_model(kind: str, other: dict[str, Any], text: str) -> None:
    serve_jax = pytest.importorskip("serve_jax", reason="flax is not installed", exc_type=ImportError)
    config = getattr(transformers, kind)(hidden_size=128, num_attention_heads=4, **other)
    with pytest.raises(ValueError, match=f"got a model with .*{text}"):
        serve_jax.with_weights(SimpleNamespace(config=config))


HEADS = {
    "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64,
    "num_key_value_heads": 2, "num_experts": 2, "num_local_experts": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 2, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "text"),
    [
        ("BertLMHeadModel", HEADS, "BertSelfAttention is not causal"),
        ("GPTJForCausalLM", {"n_embd": 64, "n_head": 2, "n_layer": 1, "vocab_size": 64, "rotary_dim": 8}, "by itself"),
        ("Mamba2ForCausalLM", {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1}, "takes no positions"),
        ("BartForCausalLM", {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2}, "takes no positions"),
        ("Qwen3NextForCausalLM", HEADS, "Qwen3NextForCausalLM keeps states"),
        ("MiniMaxForCausalLM", HEADS, "attends in layers .0., not once in each of 2"),
        ("PhimoeForCausalLM", HEADS | {"sliding_window": 4}, "a window that its mask alone"),
        ("StableLmForCausalLM", HEADS, "StableLmAttention gets no keywords"),
        ("DeepseekV32ForCausalLM", HEADS | LATENT, "DeepseekV32Attention .* keys that it chooses"),
    ],
)
def test_a_model_whose_tokens_these_caches_do_not_give_is_refused(name: str, config: dict[str, Any], text: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config, pad_token_id=0)).eval()
    with pytest.raises(ValueError, match=text):
        serve_torch.server(model, torch.float16)


def test_keys_that_are_longer_than_values() -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**HEADS, **LATENT, n_group=1, topk_group=1, initializer_range=0.2)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    asked = [Request([5, 3, 9, 8, 7, 6], 3), Request([2] * 20, 2)]
    Engine(serve_torch.server(model, torch.float16), batch=2, pages=16, page_size=4, longest=32).run(asked)
    assert_same_tokens(model, asked)
