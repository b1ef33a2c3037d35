"""Losses of causal models that are not built like Llama: scaled and capped logits, experts, other heads' names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import cute_ops_torch
from cute_ops_torch.huggingface import loss
from cute_ops_torch.huggingface.counted_rows import CountedRows
from cute_ops_torch.huggingface.lazy_logits import PLAIN, LazyLogits
from cute_ops_torch.library import row_chunks
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


def test_tuples_have_logits_in_training() -> None:
    """A program that unpacks a tuple without logits takes the next output for the logits."""
    model = make("gemma2").train()
    want = model(input_ids=TOKENS, labels=TOKENS, return_dict=False)
    cute_ops_torch.patch(model)
    got = model(input_ids=TOKENS, labels=TOKENS, return_dict=False)
    torch.testing.assert_close(got[:2], want[:2])
    assert len(got) == len(want)
    assert model(input_ids=TOKENS, labels=TOKENS).logits is None
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


TEXT = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("name", ["FuyuForCausalLM", "Llama4ForConditionalGeneration"])
def test_losses_of_models_around_a_language_model(name: str) -> None:
    """The vocabulary is that of their text, not of their own configuration; Llama 4's head is a patched model's."""
    cls, text = getattr(transformers, name), {**TEXT, "model_type": "persimmon"}
    if name.startswith("Llama4"):
        text |= {"model_type": "llama4_text", "intermediate_size_mlp": 16, "num_local_experts": 2}
    more = {"patch_size": 4} if name.startswith("Fuyu") else {"vision_config": IMAGES}
    torch.manual_seed(2)
    model = cls(cls.config_class(text_config=text, **more)).train()
    want = trained(model)
    assert ("", "linear_cross_entropy") in cute_ops_torch.patch(model)
    got = trained(model)
    close(got, want)
    assert got[2].logits is None and want[2].logits is not None


@pytest.mark.parametrize("logits", [False, True])
def test_outputs_of_a_model_within_have_no_logits_to_come(logits: bool) -> None:
    """They would be computed when they are read: of other weights, after a step."""
    q_former = {**ENCODER, "encoder_hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 97}
    text = {"model_type": "opt", "vocab_size": 97, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2, "dropout": 0.0}
    config = transformers.Blip2Config(
        vision_config=IMAGES, qformer_config=q_former, text_config=text, num_query_tokens=2, image_token_index=96
    )
    model: Any = transformers.Blip2ForConditionalGeneration(config).train()
    assert ("", "linear_cross_entropy" if not logits else "cross_entropy") in cute_ops_torch.patch(model, logits=logits)
    tokens = torch.cat([torch.full((len(TOKENS), 2), 96), TOKENS], 1)
    out = model(pixel_values=torch.randn(len(TOKENS), 3, 8, 8), input_ids=tokens, labels=tokens)
    assert out.loss.requires_grad
    assert {type(each.get("logits")) for each in (out, out.language_model_outputs)} == {
        torch.Tensor if logits else type(None)
    }


@pytest.mark.parametrize(
    ("compiled", "kind", "part", "given"),
    [
        (False, "llama", 0.2, {}), (False, "llama", 0.2, {"num_items_in_batch": torch.tensor(100)}),
        (False, "gpt2", 0.5, {}), (False, "bert", 0.15, {}), (False, "bert", 0.9, {}), (False, "bert", 0.0, {}),
        (True, "llama", 0.2, {"num_items_in_batch": torch.tensor(100)}), (True, "bert", 0.15, {}),
    ],
    ids=str,
)  # fmt: skip
def test_ignored_rows_are_not_multiplied(
    compiled: bool, kind: str, part: float, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(kind).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    draw = torch.Generator().manual_seed(8)
    tokens = torch.randint(3, 97, (16, 64), generator=draw)
    labels = torch.where(torch.rand(tokens.shape, generator=draw) < part, tokens, -100)
    rows = multiplied(monkeypatch)
    found = []
    for patched in (False, True):
        if patched:
            cute_ops_torch.patch(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if patched and compiled else model
        model.zero_grad()
        with torch.autograd.profiler.profile():  # programs run, not what they have run before
            out = run(input_ids=tokens, labels=labels, **given).loss
        out.backward()
        found.append(
            (out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        )
    torch._dynamo.reset()
    assert sum(rows) == {0.2: 256, 0.5: 512, 0.15: 256, 0.9: 1024, 0.0: 128}[part]
    if part:
        close(found[1], found[0])
    else:
        assert found[0][0].isnan() and found[1][0].isnan()  # a mean over no rows


def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each chunk of logits from here on."""
    rows, plain = list[int](), row_chunks.Chunks.logits

    def logits(self: Any, at: slice) -> torch.Tensor:
        rows.append(at.stop - at.start)
        return plain(self, at)

    monkeypatch.setattr(row_chunks.Chunks, "logits", logits)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
def test_skipped_rows_change_no_number(
    dtype: torch.dtype, reduction: str, wanted: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(3)
    layer = [torch.randn(*shape, generator=draw).to(dtype) for shape in ((4, 300, 24), (50, 24), (50,))]
    target = torch.randint(0, 50, (4, 300), generator=draw).masked_fill(torch.rand(4, 300, generator=draw) < 0.8, 7)
    slope = torch.randn((4, 300) if reduction == "none" else (), generator=draw)
    rows, found = multiplied(monkeypatch), []
    for skip in (False, True):
        rows.clear()
        hidden, weight, bias = (x.clone().requires_grad_(want) for x, want in zip(layer, wanted, strict=True))
        options: Any = {"ignore_index": 7, "reduction": reduction, "chunk_rows": None, "label_smoothing": 0.1}
        with torch.autograd.profiler.profile():
            made = loss.loss_of_head(hidden, weight, target, bias, skip_ignored=skip, **options)
            made.backward(slope)
        grads = [x.grad.float() for x in (hidden, weight, bias) if x.grad is not None]
        found.append([made.detach(), *grads])
        computed_again = reduction == "none" or dtype == torch.float16
        assert sum(rows) == (256 if skip else 1200) * (1 + computed_again)
    assert [x.shape for x in found[1]] == [x.shape for x in found[0]]
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]  # of a rounding of a sum
    for got, want in zip(*reversed(found), strict=True):
        assert float((got - want).abs().max()) <= bound * max(float(want.abs().max()), 1e-3)


def test_how_many_rows_are_skipped_differs_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call after one that has taken all rows does not wait for their number, and takes all, too."""
    hidden, weight = torch.randn(1024, 16), torch.randn(33, 16)
    taken, count_rows = list[int](), row_chunks._rows_that_count

    def counted(*given: Any) -> Any:
        found = count_rows(*given)
        taken.append(1024 if found is None else len(found.places))
        return found

    monkeypatch.setattr(row_chunks, "_last", {})
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):  # as kernels are compiled ahead
        count_rows({"target": torch.zeros(1024, dtype=torch.int64)}, {"skip_ignored": True, "ignore_index": -100})
    monkeypatch.setattr(row_chunks, "_rows_that_count", counted)
    for count, kept in ((100, 128), (410, 512), (0, 128), (1024, 1024), (200, 1024), (200, 256)):
        target = torch.where(torch.randperm(1024) < count, 5, -100)
        options: Any = {"ignore_index": -100, "reduction": "sum", "chunk_rows": None}
        found, want = (
            loss.loss_of_head(hidden, weight, target, None, skip_ignored=s, **options) for s in (True, False)
        )
        torch.testing.assert_close(found, want)
        assert taken[0] == kept
        taken.clear()


@pytest.mark.parametrize("count", [torch.tensor(0), torch.tensor(0.0), torch.tensor(7.0), 7, 7.0], ids=repr)
def test_the_number_that_a_trainer_divides_by(count: Any) -> None:
    """In float32 since it is divided by the number of ranks; 0 if no label counts: the loss is NaN, no gradient is."""
    model = make("llama").train()
    labels = TOKENS if float(count) else TOKENS.new_full(TOKENS.shape, -100)
    found = []
    for _ in range(2):
        model.zero_grad()
        out = model(input_ids=TOKENS, labels=labels, num_items_in_batch=count).loss
        out.backward()
        found.append((out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        if len(found) == 1:
            cute_ops_torch.patch(model)
    assert "total" in type(out.grad_fn).__name__  # gradients are of the quotient
    assert found[0][0].isnan() == found[1][0].isnan() == (not float(count))
    close((found[1][0].nan_to_num(), found[1][1]), (found[0][0].nan_to_num(), found[0][1]))


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


@pytest.mark.slow
def test_a_second_step_is_not_compiled_again() -> None:
    """Where the model's own ``forward`` computes the loss of its head's logits, whose place was looked for once."""
    torch._dynamo.reset()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=61)).train()
    cute_ops_torch.patch(model)
    graphs, tokens = [], torch.randint(3, 61, (2, 9))

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(model, backend=backend)
    for _ in range(3):
        run(input_ids=tokens, labels=tokens).loss.backward()
    assert len(graphs) == 1
