"""Linear layers that read the same input: queries, keys and values with biases, of attentions of any build."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import shared_input
from tests.torch.test_torch_patch_families import make
from tests.torch.test_torch_patch_sums import close, step, without_dropout

transformers = pytest.importorskip("transformers")
# By family: how many layers are computed together in each attention of two layers.
FAMILIES = {"bert": [3, 3], "qwen2": [3, 3], "gpt_oss": [3, 3], "llama": [], "distilbert": [3, 3]}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each node has computed."""
    found: list[int] = []
    plain = shared_input.projections

    def noted(x: torch.Tensor, weights: Any, biases: Any) -> Any:
        found.append(len(weights))
        return plain(x, weights, biases)

    monkeypatch.setattr(shared_input, "projections", noted)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_one_input_are_one_node(family: str, together: list[int]) -> None:
    model = without_dropout(make(family))
    want = step(model)
    found = cute_ops_torch.patch(model)
    close(step(model), want)
    assert together == FAMILIES[family]
    assert len([each for each in found if each.op == "linear"]) == len(together)
    with pytest.raises(ValueError, match="patched already"):
        cute_ops_torch.patch(model)


def test_keys_and_values_of_another_sequence_are_a_node_of_their_own(together: list[int]) -> None:
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_attention_heads=2, decoder_ffn_dim=24, num_mel_bins=4, max_source_positions=8, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model: Any = transformers.WhisperForConditionalGeneration(config).train()
    given = {"input_features": torch.randn(2, 4, 16), "labels": torch.randint(3, 97, (2, 9))}
    outcomes = []
    for _ in range(2):
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        outcomes.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
        if not together:
            cute_ops_torch.patch(model)
    close(outcomes[1], outcomes[0])
    assert together == [3, 3, 2]
    with torch.no_grad():
        model.generate(given["input_features"], max_new_tokens=3)
    assert together == [3, 3, 2]


def test_layers_that_are_frozen_hooked_or_adapted(together: list[int]) -> None:
    def frozen(layers: Any) -> None:
        layers.query.weight.requires_grad_(False)
        layers.key.bias.requires_grad_(False)

    def hooked(layers: Any) -> None:
        layers.value.register_forward_hook(lambda module, args, out: out * 2)

    def adapted(layers: Any) -> None:
        layers.value = nn.Sequential(layers.value, nn.Tanh())

    for change, counts in ((frozen, [3, 3]), (hooked, [2, 3]), (adapted, [2, 3])):
        plain = without_dropout(make("bert"))
        model = copy.deepcopy(plain)
        cute_ops_torch.patch(model)
        for each in (plain, model):
            change(each.bert.encoder.layer[0].attention.self)
        del together[:]
        close(step(model), step(plain))
        assert together == counts


def test_names_that_a_forward_assigns_again_are_not_trusted() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, flag: bool = False) -> torch.Tensor:
            source = x if flag else other
            q = self.q(x)
            x = x * 2
            return q + self.k(source) + self.v(x)  # type: ignore[no-any-return]

    class Named(Attention):
        def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, flag: bool = False) -> torch.Tensor:
            source = x if flag else other
            return self.q(x) + self.k(source) + self.v(source)  # type: ignore[no-any-return]

    assert shared_input._read(Attention.forward) == {"k": ("x", "other")}  # what `source` is was read before
    module, x, other = Named(), torch.randn(2, 4), torch.randn(2, 4)
    assert shared_input._read(Named.forward) == {"q": ("x",), "k": ("x", "other"), "v": ("x", "other")}
    ours = shared_input._make_forward(Named.forward)
    for flag in (True, False):
        torch.testing.assert_close(ours(module, x, other, flag), module(x, other, flag))


@pytest.mark.parametrize("family", ["bert", "gpt_oss"])
def test_gradients_of_one_sequence_may_lie_by_columns(family: str) -> None:
    """Scores of eager attention are products of transposed keys."""
    model = without_dropout(make(family))
    model.set_attn_implementation("eager")
    ids = torch.arange(1, 8)[None]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = gradients()
    cute_ops_torch.patch(model)
    torch.testing.assert_close(gradients(), want, rtol=1e-4, atol=1e-5)


def test_a_graph_copies_no_sum_of_products() -> None:
    """If an input's gradient is a sum of products, a graph adds each product in place."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []

    def run(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    def function(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        made = shared_input.projections(x, given[:3], given[3:])
        return sum((each.sin().sum() for each in made), torch.zeros(()))

    sizes = ((2, 5, 8), (8, 8), (6, 8), (4, 8), (8,), (6,), (4,))
    given = [torch.linspace(-1, 1, torch.Size(size).numel()).view(size).sin().requires_grad_() for size in sizes]
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=run), fullgraph=True)
    found, expected = (torch.autograd.grad(call(*given), given) for call in (compiled, function))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert seen.count("cute.input_gradients.default") == 1
