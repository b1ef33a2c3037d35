"""Drawn sequences of what is done to a patched model, and what they found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops_torch.huggingface import attention_function

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.torch.drawn_treatments import GROUPED, MODELS, SLOW, check, check_in_16_bits, drawn  # noqa: E402


def seeds(numbers: range) -> list[Any]:
    """Those that draw a treatment that takes seconds are marked slow."""
    slow = [number for number in numbers if SLOW.keys() & drawn(number)[1]]
    return [pytest.param(number, marks=pytest.mark.slow) if number in slow else number for number in numbers]


@pytest.mark.parametrize("seed", seeds(range(100, 106)))
def test_drawn_treatments(seed: int) -> None:
    """``python -m tests.torch.drawn_treatments --count 500`` runs more of them."""
    check(seed)


@pytest.mark.drawn(0.34)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [5002, 5006, 5008])
def test_drawn_treatments_of_compiled_models(seed: int) -> None:
    """``python -m tests.torch.drawn_compiled --count 50`` runs more of them."""
    from tests.torch.drawn_compiled import check as check_compiled  # Dynamo takes a second

    check_compiled(seed)


@pytest.mark.parametrize("seed", seeds(range(211, 214)))
def test_drawn_treatments_in_16_bits(seed: int) -> None:
    check_in_16_bits(seed)


def test_adapters_around_a_patched_model_stay_what_they_are() -> None:
    """They have the attributes of the model that they wrap: those that ``patch`` gave it, too."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    replaced = [*cute_ops_torch.patch(model)]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    kinds = type(adapted), type(adapted.base_model)
    cute_ops_torch.unpatch(adapted)
    assert (type(adapted), type(adapted.base_model)) == kinds
    assert type(model) is transformers.LlamaForCausalLM
    again = {op for _, op in cute_ops_torch.patch(adapted)}
    assert again >= {op for _, op in replaced} - {"rope", "attention"}


def test_adapters_of_parameters_keep_their_weights() -> None:
    """Their ``forward`` puts a parametrization on the layer, also while ``patch`` traces it on fake tensors."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False)
    model, tokens = peft.get_peft_model(model, config), torch.tensor([[3, 4, 5, 6]])
    expected, weights = model(input_ids=tokens, labels=tokens).loss, {**model.state_dict()}
    cute_ops_torch.patch(model)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, expected)


def test_hooks_that_keep_no_weights_leave_attention_to_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face leaves its hooks on attention modules once any output was asked for."""
    calls, attend = Counter[str](), attention_function._attend

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["attention"] += 1
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention_function, "_attend", counted)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**MODELS["GptOssForCausalLM"])).bfloat16()
    cute_ops_torch.patch(model)
    tokens, found = torch.tensor([[3, 4, 5, 6]]), []
    for asked in ("router_logits", "hidden_states", "attentions", ""):
        calls.clear()
        out = model(input_ids=tokens, **({f"output_{asked}": True} if asked else {}))
        found.append((calls["attention"], out.attentions is not None and len(out.attentions)))
    assert found == [(2, False), (2, False), (0, 2), (2, False)]
