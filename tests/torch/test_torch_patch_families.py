"""Tiny models of many families: patched, they give the loss, gradients and logits of the untouched model."""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface.unreplaced import UNWANTED

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "ffn_dim": 96, "word_embed_proj_dim": 64,
    "state_size": 8,
}  # fmt: skip
# Each has all that patch replaces in a decoder of its build.
BUILT_ALIKE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "arcee", "bitnet")
CAUSAL = (
    *BUILT_ALIKE, "gemma", "gemma2", "gemma3_text", "phi3", "phi", "gpt2", "gpt_neox", "opt", "bloom", "olmo",
    "olmo2", "olmo3", "cohere", "cohere2", "stablelm", "starcoder2", "granite", "granitemoe", "mixtral", "qwen2_moe",
    "qwen3_moe", "glm", "glm4", "helium", "ernie4_5", "diffllama", "seed_oss", "exaone4", "apertus", "lfm2", "mamba",
    "persimmon", "biogpt", "gpt_oss", "minimax", "rwkv", "gpt_bigcode", "mpt", "phimoe",
    "nanochat", "vaultgemma", "doge",
)  # fmt: skip
MASKED = (
    "bert", "roberta", "distilbert", "albert", "electra", "deberta-v2", "modernbert", "mpnet", "layoutlm",
    "eurobert", "convbert", "ibert", "roformer", "fnet", "xlm", "yoso", "longformer",
)  # fmt: skip
# The suite takes these; ``python tests/torch/test_torch_patch_families.py`` takes all, and prints what is left of each.
DRAWN = random.Random(34).sample(CAUSAL, 7) + random.Random(34).sample(MASKED, 3)


def make(family: str) -> nn.Module:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if family not in known:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    kind = known[family]
    has = {name: n for name, n in SIZES.items() if name.endswith("token_id") or getattr(kind(), name, None) is not None}
    head = transformers.AutoModelForMaskedLM if family in MASKED else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: nn.Module = head.from_config(kind(**has))
    return model


def outcome(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Loss and gradients of a training step, and logits of padded sequences in evaluation."""
    mask = torch.ones_like(tokens)
    mask[0, 11:] = 0
    torch.manual_seed(1)  # of dropout
    model.train().zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens, attention_mask=mask).logits
    real = logits[mask.bool()[:, : logits.shape[1]]]
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "logits": real, **gradients}


def check(family: str) -> Any:
    """What patch did to a model of the family, which goes on computing the same."""
    model, tokens = make(family), torch.randint(3, 97, (2, 16))
    expected = outcome(model, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched = cute_ops_torch.patch(model)
    largest = max(g.norm() for name, g in expected.items() if g is not None and name not in ("loss", "logits"))
    for name, got in outcome(model, tokens).items():
        wanted = expected[name]
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            atol = 1e-6 * max(1.0, float(largest))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    cute_ops_torch.unpatch(model)
    return patched


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("family", DRAWN)
def test_a_patched_model_computes_what_it_did(family: str) -> None:
    check(family)


@pytest.mark.parametrize("family", BUILT_ALIKE)
def test_what_is_found_in_decoders_built_like_a_llama(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cute_ops_torch.patch(make(family))
    ops = {"linear_cross_entropy", "attention_mask", "embedding", "add_rmsnorm", "rope", "silu_mul", "rmsnorm"}
    ops.add("attention")
    others = {"silu_mul": "relu2"} if family in ("arcee", "bitnet") else {}  # their MLPs square a ReLU
    plain = {"mlp"} if family == "arcee" else {"linear"} if family == "qwen2" else set()  # no gate; biases
    assert {each.op for each in found} == ops - others.keys() | {*others.values()} | plain
    assert found.left == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_only_some_ops(seed: int) -> None:
    """Drawn sets of ops, as ``only`` or ``without``: they run, no others, and the model computes what it did."""
    draw, tokens = random.Random(seed), torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(seed))
    for family in ("llama", "cohere", "phi3"):
        model = make(family)
        expected, every = outcome(model, tokens), {each.op for each in quietly(model)}
        cute_ops_torch.unpatch(model)
        for _ in range(3):
            some = frozenset(draw.sample(sorted(every), draw.randint(1, len(every) - 1)))
            found = quietly(model, only=some) if draw.random() < 0.5 else quietly(model, without=every - some)
            assert {each.op for each in found} <= some, (family, sorted(some), found)
            assert not [each for each in found.left if each.reason == UNWANTED] or some != every
            for name, got in outcome(model, tokens).items():
                torch.testing.assert_close(
                    got, expected[name], rtol=1e-4, atol=1e-5, msg=f"{family} {sorted(some)} {name}"
                )
            if found:
                cute_ops_torch.unpatch(model)


def test_what_is_left_out_is_said() -> None:
    found = quietly(make("llama"), without=["rmsnorm", "add_rmsnorm"])
    assert {(each.kind, each.reason) for each in found.left} == {("norm", UNWANTED), ("decoder layer", UNWANTED)}
    model = make("llama")
    assert quietly(model, only=["geglu"]) == []
    assert not any(hasattr(module, "_cute_original") for module in model.modules())
    assert {each.op for each in cute_ops_torch.patch(model)} >= {"rmsnorm", "rope"}
    with pytest.raises(ValueError, match="LlamaForCausalLM is patched already"):
        cute_ops_torch.patch(model, only=["rmsnorm"])


@pytest.mark.slow
def test_the_activation_of_a_replaced_mlp_is_left_to_it() -> None:
    """In a second call, too, which would replace what nothing calls."""
    model = make("gemma2")
    quietly(model)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM is patched already"):
        cute_ops_torch.patch(model)
    assert not any(hasattr(type(layer.mlp.act_fn), "_cute_original") for layer in model.model.layers)


def test_ops_that_are_none() -> None:
    model = make("llama")
    with pytest.raises(ValueError) as caught:
        cute_ops_torch.patch(model, only=["rmsnrom"])
    message = "cute_ops_torch.patch: argument `only` has 'rmsnrom' (did you mean rmsnorm?); modules run add_layernorm, "
    assert str(caught.value).startswith(message)
    with pytest.raises(TypeError, match=re.escape('argument `without` is a str, expected names, ["rope"].')):
        cute_ops_torch.patch(model, without="rope")
    with pytest.raises(ValueError, match=r"argument `without` has 'norm'"):
        cute_ops_torch.patch(model, without=["norm"])


def quietly(model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cute_ops_torch.patch(model, **options)


def main() -> int:
    """Print a line for each family: what it runs now, and what is left."""
    bad = 0
    print(f"transformers {transformers.__version__}")
    transformers.logging.set_verbosity_error()
    for family in (*CAUSAL, *MASKED):
        try:
            found = check(family)
            counts = (Counter(each[1] for each in rows) for rows in (found, found.left))
            result = " | left: ".join(", ".join(f"{kind} {n}" for kind, n in each.items()) for each in counts)
        except pytest.skip.Exception:
            result = "not in this version"
        except Exception as error:
            bad, result = bad + 1, f"BAD: {type(error).__name__}: {error}"
        print(f"{family:14} {result}", flush=True)
    print(f"{len(CAUSAL) + len(MASKED)} families, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
