"""What ``patch`` says of a model: what it replaced, what it left, and why."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface.report import Left, Patched, Replaced, grouped

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip


def make(kind: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    return getattr(transformers, f"{kind}{changes.pop('head', 'ForCausalLM')}")(config)


def quietly(model: nn.Module) -> Patched:
    """Patch a model that may keep its loss or norms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cute_ops_torch.patch(model)


def test_a_llama_of_which_nothing_is_left() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cute_ops_torch.patch(make("Llama"))
    assert found.left == [] and found.replaced == list(found) and len(found) == 16
    assert found[0] == ("", "linear_cross_entropy") and dict(found)["model.norm"] == "rmsnorm"
    assert str(found) == repr(found)
    assert str(found).splitlines() == [
        "LlamaForCausalLM: 16 modules replaced, none left",
        "  linear_cross_entropy  the model",
        "  attention_mask        model",
        "  embedding             model.embed_tokens",
        "  add_rmsnorm           model.layers.0-1",
        "  rope                  model.layers.0-1.self_attn",
        "  attention             model.layers.0-1.self_attn",
        "  silu_mul              model.layers.0-1.mlp",
        "  rmsnorm               model.layers.0-1.input_layernorm,",
        "                        model.layers.0-1.post_attention_layernorm, model.norm",
    ]


def test_the_report_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "patch.md").read_text(encoding="utf-8")
    assert f"\n```\n{quietly(make('Gemma2'))}\n```\n" in page


def test_patching_makes_transformers_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, *args: said.append(args), raising=False)
    cute_ops_torch.patch(make("Llama"))
    assert said == []


LEFT: dict[str, dict[str, str]] = {"Qwen3": {}, "Gemma": {}, "Gemma2": {}, "Mixtral": {}, "Qwen2Moe": {}, "Olmo2": {}}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_of_other_models(kind: str) -> None:
    found = quietly(make(kind, attn_implementation="eager" if kind == "Gemma2" else "sdpa"))
    assert {each.kind: each.reason for each in found.left} == LEFT[kind]
    if kind == "Gemma2":
        page = Path(__file__).parents[2] / "docs" / "patch.md"
        assert f"\n{found}\n" in page.read_text(encoding="utf-8")


def test_a_model_of_which_a_part_is_patched_already() -> None:
    model = make("Llama")
    cute_ops_torch.patch(model.model.layers)
    found = cute_ops_torch.patch(model)
    # The tables of rotations are made outside of the layers.
    rest = ["linear_cross_entropy", "attention_mask", "embedding", *2 * ["rope", "attention"], "rmsnorm"]
    assert [each.op for each in found] == rest
    assert found.left == []


def test_what_is_left_of_an_encoder() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it predicts no next token
        found = cute_ops_torch.patch(
            transformers.BertForMaskedLM(transformers.BertConfig(**SIZES | {"attn_implementation": "eager"}))
        )
    assert found.left == []


def own_forward(model: Any) -> None:
    norm = model.model.norm
    norm.forward = type(norm).forward.__get__(norm)


def other_head(model: Any) -> None:
    class Head(nn.Linear):
        pass

    model.lm_head = Head(64, 97, bias=False)


def other_loss(model: Any) -> None:
    model.loss_function = torch.nn.functional.cross_entropy


def other_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def other_table(model: Any) -> None:
    model.model.embed_tokens = nn.Embedding(97, 64, max_norm=1.0)


@pytest.mark.parametrize(
    ("change", "left", "warns"),
    [
        (own_forward, Left("model.norm", "norm", "a `forward` was set on the module itself before it was patched"),
         "keeps its norm model.norm (a `forward` was set on the module itself before it was patched)."),
        (other_head, Left("", "loss", "its head is a Head, not a plain torch.nn.Linear"),
         "keeps its loss (its head is a Head, not a plain torch.nn.Linear)."),
        (other_loss, Left("", "loss", "its loss is cross_entropy, none of Hugging Face's"),
         "keeps its loss (its loss is cross_entropy, none of Hugging Face's)."),
        (other_activation, Left("model.layers.1.mlp", "MLP",
         "its activation ReLU is neither SiLU nor GELU, or its forward is not Llama's"), None),
        (other_table, Left("model.embed_tokens", "embedding", "it has max_norm=1.0"), None),
    ],
)  # fmt: skip
def test_reasons_and_warnings(change: Any, left: Left, warns: str | None) -> None:
    model = make("Llama")
    change(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cute_ops_torch.patch(model)
    assert found.left == [left]
    texts = [str(each.message) for each in caught if "cute_ops" in str(each.message)]
    end = " print(patch(model)) shows all that is left."
    assert texts == ([f"cute_ops_torch.patch: LlamaForCausalLM {warns}{end}"] if warns else [])
    assert all(each.filename == __file__ for each in caught if "cute_ops" in str(each.message))


def test_norms_that_are_kept_are_named_together() -> None:
    model = make("Olmo2")
    for module in model.modules():
        if type(module).__name__ == "Olmo2RMSNorm":
            module.forward = module.forward  # its own from now on
    with pytest.warns(UserWarning, match=re.escape(
        "cute_ops_torch.patch: Olmo2ForCausalLM keeps its norms model.layers.0-1.self_attn.q_norm, "
    )):  # fmt: skip
        cute_ops_torch.patch(model)


def test_the_table_fits_a_terminal() -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.{'a' * 20}" for i in (0, 1, 2, 7) for j in range(3)]
    found = Patched(
        "Model", [Replaced(n, "silu_mul") for n in names], [Left(n, "norm", "of " + "b " * 40) for n in names]
    )
    assert all(len(line) <= 80 for line in str(found).splitlines())
    assert str(found).splitlines()[:2] == [
        "Model: 12 modules replaced, 12 left",
        f"  silu_mul              model.layers.0-2,7.mlp.experts.0-2.{'a' * 20}",
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []), (["", "a"], ["", "a"]), (["a.0", "a.1", "a.3", "b"], ["a.0-1,3", "b"]),
        (["a.0.b", "a.0.c", "a.1.b"], ["a.0-1.b", "a.0.c"]), (["a.0.1", "a.0.2", "a.1.1"], ["a.0.1-2", "a.1.1"]),
        (["a.10", "a.9", "a.11"], ["a.9-11"]), (["0.a", "1.a"], ["0-1.a"]),
    ],
)  # fmt: skip
def test_grouped(names: list[str], expected: list[str]) -> None:
    assert grouped(names) == expected
