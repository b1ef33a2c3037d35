"""Losses of causal models that are not built like Llama: scaled and capped logits, experts, other heads' names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import loss
from cute_ops_torch.huggingface.counted_rows import CountedRows
from cute_ops_torch.huggingface.lazy_logits import PLAIN, LazyLogits
from tests.torch.test_torch_patch_families import make

transformers = pytest.importorskip("transformers")
# With what their logits meet: a cap, a factor, a divisor, an auxiliary loss, nothing, a head of another name.
FAMILIES = ("gemma2", "cohere", "granite", "mixtral", "gpt2", "gpt_neox", "mamba")
TOKENS = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(5))


def trained(model: Any, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], Any]:
    model.zero_grad()
    torch.manual_seed(1)
    out = model(input_ids=TOKENS, labels=TOKENS, **given)
    loss = out[0]
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return loss.detach(), grads, out


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    for name, grad in want[1].items():
        assert (got[1][name] is None) == (grad is None), name
        if grad is not None:
            scale = max(1.0, float(grad.abs().max()))
            torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=2e-6 * scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_without_logits(family: str) -> None:
    if family == "mamba" and transformers.__version__.startswith("5.0."):
        pytest.skip("its forward computes a loss of its own")
    model = make(family).train()
    if family == "cohere":
        model.logit_scale = 0.7
    if family == "gemma2":
        model.config.final_logit_softcapping = 2.0  # which bends these models' logits, too
    if family == "mixtral":
        model.config.output_router_logits = True
    want = trained(model)
    found = cute_ops_torch.patch(model)
    assert ("", "linear_cross_entropy") in found and not [each for each in found.left if each.kind == "loss"]
    got = trained(model)
    close(got, want)
    assert got[2].logits is None and want[2].logits is not None
    counted = trained(model, num_items_in_batch=torch.tensor(40))
    cute_ops_torch.unpatch(model)
    close(counted, trained(model, num_items_in_batch=torch.tensor(40)))


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_logits_are_kept_where_they_are_asked_for(family: str) -> None:
    model = make(family).train()
    want = trained(model)
    assert ("", "cross_entropy") in cute_ops_torch.patch(model, logits=True)
    got = trained(model)
    close(got, want)
    torch.testing.assert_close(got[2].logits, want[2].logits)


def test_tuples_have_no_logits_in_training() -> None:
    model = make("gemma2").train()
    want = model(input_ids=TOKENS, labels=TOKENS, return_dict=False)
    cute_ops_torch.patch(model)
    got = model(input_ids=TOKENS, labels=TOKENS, return_dict=False)
    torch.testing.assert_close(got[0], want[0])
    assert len(got) == len(want) - 1  # as of every field that is None
    model.eval()
    torch.testing.assert_close(model(input_ids=TOKENS).logits, make("gemma2").eval()(input_ids=TOKENS).logits)


def test_a_head_that_is_watched_computes_its_logits() -> None:
    model = make("cohere").train()
    want = trained(model)
    cute_ops_torch.patch(model)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    close(trained(model), want)
    assert len(seen) == 1


def test_another_loss_function_gets_real_logits() -> None:
    model = make("granite").train()
    cute_ops_torch.patch(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    out = model(input_ids=TOKENS, labels=TOKENS)
    assert isinstance(out.logits, torch.Tensor)


def test_lazy_logits_are_what_is_done_to_them() -> None:
    """Drawn chains of scales, caps and other operations: caps that our loss takes, or the real logits."""
    generator = torch.Generator().manual_seed(11)
    head = nn.Linear(6, 9)
    hidden = torch.randn(6, 6, generator=generator)
    steps: list[Any] = [
        lambda x: x * 0.5, lambda x: x / 3, lambda x: 2 * x, torch.tanh, lambda x: x.float(), lambda x: x.contiguous(),
        lambda x: x + 1, lambda x: -x, lambda x: x[..., :5], lambda x: torch.softmax(x, -1), lambda x: x * -1.0,
        lambda x: x * torch.sum(x), lambda x: x.reshape(-1, x.size(-1)), lambda x: x.reshape(1, -1, x.size(-1)),
        lambda x: x[..., :-1, :], lambda x: x[:3], lambda x: x.to(x.device), lambda x: x.reshape(x.size(-1), -1),
        lambda x: x + torch.arange(float(x.size(-1))),
    ]  # fmt: skip
    lazy_ones = 0
    for _ in range(300):
        lazy, real = LazyLogits(hidden, head, lambda: head(hidden)), head(hidden)
        for k in torch.randint(0, len(steps), (4,), generator=generator).tolist():
            lazy, real = steps[k](lazy), steps[k](real)
        if isinstance(lazy, LazyLogits):
            caps, lazy_ones = lazy.caps, lazy_ones + 1
            if caps is not None:
                scaled = nn.functional.linear(lazy.hidden, head.weight, lazy.bias) * caps.scale
                made = caps.softcap * torch.tanh(scaled / caps.softcap) if caps.softcap else scaled
                torch.testing.assert_close(made, real)
            assert (lazy.shape, lazy.device, lazy.size(-1)) == (real.shape, real.device, 9)
            lazy = lazy.real()
        torch.testing.assert_close(lazy, real)
    assert lazy_ones > 10
    assert LazyLogits(hidden, head, lambda: head(hidden)).caps == PLAIN
    assert (LazyLogits(hidden, head, lambda: head(hidden)) * -1).caps is None


SIDES = {
    f"{side}_{key}": value for side in ("encoder", "decoder")
    for key, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 24}.items()
}  # fmt: skip
ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
OTHER_LOSSES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {**ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBertForMaskedLM": {**ENCODER, "cls_token_id": 1, "sep_token_id": 2},
    "AlbertForMaskedLM": {**ENCODER, "embedding_size": 16},
    "T5ForConditionalGeneration": {
        "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    },
    "BartForConditionalGeneration": {"d_model": 16, **SIDES, "dropout": 0.0},
    "WhisperForConditionalGeneration": {
        "d_model": 16, **SIDES, "dropout": 0.0, "num_mel_bins": 4, "max_source_positions": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_losses_of_masked_tokens_and_of_translations(name: str) -> None:
    cls = getattr(transformers, name)
    tokens = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(2)
    model = cls(cls.config_class(**tokens, **OTHER_LOSSES[name])).train()
    labels = torch.where(torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(4)) < 0.5, TOKENS, -100)
    given: dict[str, Any] = {"input_ids": TOKENS, "labels": labels}
    if name.startswith("Whisper"):
        given = {"input_features": torch.randn(2, 4, 16), "labels": labels}
    want = model(**given)
    want.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = cute_ops_torch.patch(model)
    assert ("", "linear_cross_entropy") in found and not [each for each in found.left if each.kind == "loss"]
    got = model(**given)
    got.loss.backward()
    close((got.loss, {name: p.grad for name, p in model.named_parameters() if name in grads}), (want.loss, grads))
    assert got.logits is None and want.logits is not None
    model.eval()
    torch.testing.assert_close(model(**given).logits, want.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "part"), [("llama", 0.2), ("gpt2", 0.5), ("bert", 0.15), ("bert", 0.9), ("bert", 0.0)]
)
def test_ignored_rows_are_not_multiplied(kind: str, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(kind).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    draw = torch.Generator().manual_seed(8)
    tokens = torch.randint(3, 97, (16, 64), generator=draw)
    labels = torch.where(torch.rand(tokens.shape, generator=draw) < part, tokens, -100)
    rows: list[int] = []
    plain = loss.linear_cross_entropy

    def counting(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rows.append(hidden.reshape(-1, hidden.shape[-1]).shape[0])
        return plain(hidden, *args, **options)

    monkeypatch.setattr(loss, "linear_cross_entropy", counting)
    found = []
    for patched in (False, True):
        if patched:
            cute_ops_torch.patch(model)
        model.zero_grad()
        out = model(input_ids=tokens, labels=labels).loss
        out.backward()
        found.append(
            (out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        )
    assert rows == [{0.2: 256, 0.5: 512, 0.15: 256, 0.9: 1024, 0.0: 128}[part]]
    if part:
        close(found[1], found[0])
    else:
        assert found[0][0].isnan() and found[1][0].isnan()  # a mean over no rows


def test_targets_that_are_not_the_labels_keep_all_rows() -> None:
    labels = torch.where(torch.arange(1024) < 100, 1, -100)
    hidden, counted = torch.randn(1024, 4), CountedRows(labels)
    given: Any = labels, hidden, labels, -100
    assert counted.of(*given, "mean")[0].shape == (128, 4)
    assert counted.of(labels.view(8, -1), hidden, labels, -100, "sum")[1].shape == (128,)
    for other in ((labels.clone(), *given[1:], "mean"), (*given[:3], 0, "mean"), (*given, "none")):
        assert counted.of(*other)[0] is hidden
    labels[:] = 1
    assert counted.of(*given, "mean")[0] is hidden
    assert CountedRows(None).of(*given, "mean")[0] is hidden


def test_a_copy_keeps_its_loss() -> None:
    model = make("gemma2").train()
    cute_ops_torch.patch(model)
    assert copy.deepcopy(model)(input_ids=TOKENS, labels=TOKENS).logits is None


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_loss_that_balances_experts(family: str, padded: bool) -> None:
    """The auxiliary loss of all layers, without padding, and gradients through it."""
    model: Any = make(family).train()
    model.config.output_router_logits = True
    ids = torch.randint(0, 90, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask if padded else None}

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        model.zero_grad()
        out = model(**given)
        (out.loss + 10 * out.aux_loss).backward()
        return out.aux_loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    wanted, slopes = step()
    patched = cute_ops_torch.patch(model)
    assert ("", "expert_balance") in patched
    found, ours = step()
    torch.testing.assert_close(found, wanted)
    for name, slope in slopes.items():
        torch.testing.assert_close(ours[name], slope, rtol=1e-4, atol=1e-5)
    cute_ops_torch.unpatch(model)
    assert cute_ops_torch.patch(model, without=["expert_balance"]).count(("", "expert_balance")) == 0
