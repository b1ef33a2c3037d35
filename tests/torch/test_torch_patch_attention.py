"""Hugging Face models whose attention runs on our op: patched, or by ``attn_implementation="cute"``."""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.composite import scaled_dot_product

transformers = pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from cute_ops_torch.huggingface import attention_function  # noqa: E402  imports transformers
from cute_ops_torch.huggingface.masks import BandMask  # noqa: E402
from cute_ops_torch.huggingface.source import definition  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
EXPERT = {"num_local_experts": 1, "num_experts_per_tok": 1}
# By a name: the family, and what its config has besides sizes.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}), "llama-eager": ("Llama", {"attn_implementation": "eager"}), "mistral": ("Mistral", WINDOW),
    "qwen3": ("Qwen3", {}), "gemma2": ("Gemma2", WINDOW | {"attn_implementation": "eager"}),
    "gemma3": ("Gemma3", WINDOW), "gpt-oss": ("GptOss", WINDOW | EXPERT),
}  # fmt: skip
TOKENS = torch.randint(3, 97, (2, 19), generator=torch.Generator().manual_seed(1))


def decoder(name: str) -> nn.Module:
    kind, more = DECODERS[name]
    text = "Text" if kind == "Gemma3" else ""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{text}Config")(**SIZES | more)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():  # GPT-OSS leaves some uninitialized
        if not parameter.isfinite().all() or kind == "GptOss":
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The attributes of calls of our attention."""
    seen: list[dict[str, Any]] = []
    names = "sinks", "scale", "causal", "left", "right", "softcap", "deterministic"
    run = scaled_dot_product._attention

    def attention(*args: Any) -> Any:
        seen.append(dict(zip(names, args[3:], strict=True)))
        return run(*args)

    monkeypatch.setattr(scaled_dot_product, "_attention", attention)
    return seen


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(model: Any, **given: Any) -> dict[str, torch.Tensor]:
    """Logits of an evaluation, loss and gradients of a training step."""
    seen = given.get("attention_mask", torch.ones_like(TOKENS)).bool()
    counted = seen & seen.roll(1, 1)  # each token is predicted at the one before
    model.train().zero_grad()
    loss = model(TOKENS, labels=TOKENS.masked_fill(~counted, -100), **given).loss
    loss.backward()
    with torch.no_grad():
        logits = model.eval()(TOKENS, **given).logits
    parameters = getattr(model, "_orig_mod", model).named_parameters()
    gradients = {name: p.grad.float().clone() for name, p in parameters if p.grad is not None}
    return {"logits": logits[seen].float(), "loss": loss.detach().float(), **gradients}


def assert_as_close(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exact: dict[str, Any]) -> None:
    """At most twice as far from float32 as the untouched model in 16 bits."""
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        allowed = 2 * (plain[name] - right).abs().max() + 2e-3 * right.abs().max() + 1e-6
        error = (found[name] - right).abs().max()
        assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"


def generated(model: Any, **given: Any) -> torch.Tensor:
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(2, 5)}
    found: torch.Tensor = model.eval().generate(TOKENS[:, :5], **options | given)
    return found


def assert_greedy(words: torch.Tensor, exact: Any, plain: Any) -> None:
    """Each word is the most likely one, as far as 16 bits tell."""
    with torch.no_grad():
        right, rounded = exact.eval()(words).logits, plain.eval()(words).logits
    given, error = right[:, 4:-1], (rounded - right).abs().max()
    chosen = given.gather(-1, words[:, 5:, None])[..., 0]
    assert (given.max(-1).values - chosen).max() <= 2 * error


def patched(model: nn.Module) -> nn.Module:
    found = cute_ops_torch.patch(model)
    assert [each.op for each in found if each.op == "attention"] == ["attention", "attention"]
    assert "attention" not in {each.kind for each in found.left}
    return model


def named(model: nn.Module) -> nn.Module:
    cute_ops_torch.register_attention()
    model.set_attn_implementation("cute")  # type: ignore[operator]
    return model


WAYS = {"patched": patched, "named": named}


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_computes_what_it_did(name: str, way: Callable[[Any], Any], calls: list[Any]) -> None:
    exact, model = decoder(name), decoder(name).bfloat16()
    right, plain = outcome(exact), outcome(model)
    attrs = {"scale": 0.0, "causal": True, "right": -1, "left": -1, "softcap": 0.0}
    if name in ("gemma2", "gemma3"):
        attrs["scale"] = model.config.query_pre_attn_scalar**-0.5
    if name == "gemma2":
        attrs["softcap"] = 50.0
    model = way(model)
    assert_as_close(outcome(model), plain, right)
    assert len(calls) == 4
    windows = {"mistral": {7}, "gemma2": {7, -1}, "gemma3": {7}, "gpt-oss": {7, -1}}.get(name, {-1})
    assert {call["left"] for call in calls} == windows
    assert all({key: call[key] for key in attrs} == attrs | {"left": call["left"]} for call in calls)
    assert all((call["sinks"] is not None) == (name == "gpt-oss") for call in calls)
    calls.clear()
    assert_greedy(generated(model), exact, decoder(name).bfloat16())
    # Of one query torch's kernel is left in the place of `sdpa`.
    decodes = way is named or model.config._attn_implementation == "eager"
    assert len(calls) == (24 if decodes else 2)


@pytest.mark.drawn(0.8)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["llama", "llama-eager", "gemma2", "gpt-oss"])
def test_a_padded_batch_is_left_to_the_original(name: str, way: Callable[[Any], Any], calls: list[Any]) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    exact, model = decoder(name), decoder(name).bfloat16()
    right, plain = outcome(exact, attention_mask=mask), outcome(model, attention_mask=mask)
    model = way(model)
    assert_as_close(outcome(model, attention_mask=mask), plain, right)
    assert calls == []
    all_seen, plain = torch.ones_like(mask), outcome(decoder(name).bfloat16())
    assert_as_close(outcome(model, attention_mask=all_seen), plain, outcome(exact))
    assert len(calls) == 4


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_static_cache(name: str, way: Callable[[Any], Any], calls: list[Any]) -> None:
    """Keys beyond the length are zeros that nobody may see."""
    words = generated(way(decoder(name).bfloat16()), cache_implementation="static", disable_compile=True)
    assert_greedy(words, decoder(name), decoder(name).bfloat16())


@pytest.mark.drawn(0.8)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_encoders_attend_to_all(way: Callable[[Any], Any], attention: str, calls: list[Any]) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    models = {"ViT": (torch.randn(2, 3, 32, 32), {"image_size": 32, "patch_size": 8})}
    if attention == "sdpa":  # eager, BERT hands its weights on
        models["Bert"] = TOKENS, {"vocab_size": 97}
    for name, (given, more) in models.items():
        config = getattr(transformers, f"{name}Config")(**sizes | more, attn_implementation=attention)
        torch.manual_seed(0)
        exact = getattr(transformers, f"{name}Model")(config).eval()
        model = copy.deepcopy(exact).bfloat16()
        halves = given if given.dtype == torch.long else given.bfloat16()
        plain, right = model(halves)[0].float(), exact(given)[0]
        calls.clear()
        found = way(model)(halves)[0].float()
        assert_as_close({"out": found}, {"out": plain}, {"out": right})
        assert [(call["causal"], call["left"], call["right"]) for call in calls] == [(False, -1, -1)] * 2, name


def test_heads_are_attended_to_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whisper makes its heads contiguous for attention, which needs no copy, and neither do their gradients."""
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_attention_heads=2, decoder_ffn_dim=24, num_mel_bins=4, max_source_positions=8, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model: Any = transformers.WhisperForConditionalGeneration(config).bfloat16()
    sounds = torch.randn(2, 4, 16).bfloat16()
    words, loss = generated_of(model, sounds), model(sounds, labels=TOKENS).loss
    lie, run = list[bool](), scaled_dot_product._attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> Any:
        lie.extend(x.is_contiguous() for x in (q, k, v))  # (batch, seqlen, heads, headdim)
        return run(q, k, v, *args)

    monkeypatch.setattr(scaled_dot_product, "_attention", attention)
    cute_ops_torch.patch(model)
    torch.testing.assert_close(model.train()(sounds, labels=TOKENS, use_cache=False).loss, loss, rtol=2e-2, atol=0)
    assert lie == 9 * [True]
    assert torch.equal(generated_of(model.eval(), sounds), words)


def generated_of(model: Any, sounds: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(sounds, max_new_tokens=5, do_sample=False)  # type: ignore[no-any-return]


def _kept(self: Any, x: torch.Tensor) -> Any:
    heads = self.q(x).transpose(1, 2).contiguous()
    return ALL_ATTENTION_FUNCTIONS["sdpa"](self, heads, heads.view(-1), heads, None)


def _left_out(self: Any, x: torch.Tensor, cache: Any) -> Any:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    heads = self.q(x).transpose(1, 2).contiguous()
    keys = self.k(x).transpose(1, 2).contiguous()
    other = self.v(x).transpose(0, 1).contiguous()
    keys, other = cache.update(keys, other)
    return attend(self, heads, keys, other, None)


def test_copies_that_are_read_by_others_stay() -> None:
    made = attention_function._with_views
    assert made(_kept) is _kept
    text = ast.unparse(definition(made(_left_out)))
    assert text.count("contiguous") == 1 and "self.v(x).transpose(0, 1).contiguous()" in text


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_bias_of_zeros_is_none(checkpointed: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's attention to the encoder has one; that of its own tokens has a bias with a gradient, and stays. Its rows lie
    in one piece: else torch's fused kernels do not take it.
    """
    seen, plain_attention = list[int](), nn.functional.scaled_dot_product_attention

    def attention(*args: Any, attn_mask: Any = None, **options: Any) -> Any:
        seen.append(attn_mask.stride(-1))
        return plain_attention(*args, attn_mask=attn_mask, **options)

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=61, decoder_start_token_id=0, dropout_rate=0.0)
    torch.manual_seed(0)
    plain = transformers.T5ForConditionalGeneration(config).bfloat16().train()
    tokens, found = torch.randint(3, 61, (2, 9)), []
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    cute_ops_torch.patch(model)
    for each in (model, plain, exact):
        if checkpointed:
            each.gradient_checkpointing_enable({"use_reentrant": False})
        with monkeypatch.context() as patched:
            if each is model:
                patched.setattr(nn.functional, "scaled_dot_product_attention", attention)
            loss = each(input_ids=tokens, labels=tokens[:, :7].contiguous()).loss
            loss.backward()
        found.append([loss.float().detach(), *(p.grad.float() for p in each.parameters())])
    assert len(calls) == (4 if checkpointed else 2)
    assert seen == [1] * (6 if checkpointed else 3)
    for got, other, right in zip(*found, strict=True):
        assert (got - right).norm() <= 2**-6 * right.norm() + 2 * (other - right).norm()


def masks_seen(model: nn.Module, *given: Any) -> list[Any]:
    """The masks that reach the layers."""
    seen: list[Any] = []
    hook = lambda module, args, kwargs: seen.append(kwargs.get("attention_mask"))  # noqa: E731
    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in model.model.layers]  # type: ignore
    with torch.no_grad():
        model(*given)
    for each in hooks:
        each.remove()
    return seen


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_known_mask_is_not_computed(way: Callable[[Any], Any]) -> None:
    plain, model = decoder("mistral").bfloat16(), way(decoder("mistral").bfloat16())
    (right, _), (mask, again) = masks_seen(plain, TOKENS), masks_seen(model, TOKENS)
    assert type(mask) is BandMask and again is mask
    assert not mask.computed
    # Who reads it sees the original one.
    assert (mask.shape, mask.dtype, mask.device) == (right.shape, right.dtype, right.device)
    assert torch.equal(mask, right)
    assert type(mask & right) is torch.Tensor
    assert mask.computed


@pytest.mark.parametrize(("name", "in_place"), [("mistral", False), ("gpt-oss", False), ("gpt-oss", True)])
def test_a_mask_that_a_hook_changes(name: str, in_place: bool, calls: list[Any]) -> None:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        mask = mask if in_place else mask.clone()
        mask[:1, ..., 3] = False if mask.dtype == torch.bool else -1e9
        return args, {**kwargs, "attention_mask": mask}

    exact, plain, model = decoder(name), decoder(name).bfloat16(), patched(decoder(name).bfloat16())
    calls.clear()
    for each in (exact, plain, model):
        each.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)  # type: ignore[union-attr,operator]
    right, before, found = ({"out": each.eval()(TOKENS).logits.float()} for each in (exact, plain, model))
    assert_as_close(found, before, right)
    assert len(calls) == 1
    assert (decoder(name)(TOKENS).logits - right["out"]).abs().max() > 1e-4


def test_weights_that_are_asked_for(calls: list[Any]) -> None:
    """They exist in the original only."""
    plain, model = decoder("llama-eager").bfloat16(), patched(decoder("llama-eager").bfloat16())
    right, found = (each.eval()(TOKENS, output_attentions=True).attentions for each in (plain, model))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)
    assert calls == []


def test_dropout_and_float32_are_left_to_the_original(calls: list[Any]) -> None:
    model = patched(decoder("llama"))
    outcome(model)
    model.bfloat16()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = 0.5
    model.train()(TOKENS)
    assert calls == []
    model.eval()(TOKENS)
    assert len(calls) == 2


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The offsets of calls of our attention on packed sequences."""
    seen: list[list[int]] = []
    run = scaled_dot_product._packed
    monkeypatch.setattr(scaled_dot_product, "_packed", lambda *args: (seen.append(args[3].tolist()), run(*args))[1])
    return seen


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences(name: str, way: Callable[[Any], Any], calls: list[Any], packed_calls: list[Any]) -> None:
    """Whose positions begin anew, in both rows of a batch."""
    positions = torch.arange(19).remainder(11)[None].expand(2, -1)
    exact, model = decoder(name), decoder(name).bfloat16()
    packed = {"position_ids": positions, "use_cache": False}
    right, plain = outcome(exact, **packed), outcome(model, **packed)
    assert_as_close(outcome(way(model), **packed), plain, right)
    assert calls == []
    assert packed_calls == [[0, 11, 19, 30, 38]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_the_arguments_of_flash_attention(name: str, dtype: torch.dtype, packed_calls: list[Any]) -> None:
    """GPT-OSS shows its positions to no mask, so that they do not tell sequences from each other."""
    model, tokens = named(decoder(name).to(dtype)).eval(), TOKENS[:1]
    offsets, positions = torch.tensor([0, 11, 19]), torch.arange(19).remainder(11)[None]
    flash = {f"cu_seq_lens_{x}": offsets for x in "qk"} | {f"max_length_{x}": 11 for x in "qk"}
    with torch.no_grad():
        parts = [model(part, use_cache=False).logits for part in (tokens[:, :11], tokens[:, 11:])]
        packed_calls.clear()
        options = [flash] if name == "gpt-oss" else [{}, flash]
        found = [model(tokens, position_ids=positions, use_cache=False, **more).logits for more in options]
    limit = 1e-4 if dtype == torch.float32 else 0.03
    for each in found:
        torch.testing.assert_close(each, torch.cat(parts, dim=1), rtol=limit, atol=limit)
    counted = len(options) if dtype == torch.bfloat16 else name == "gpt-oss"
    assert packed_calls == [[0, 11, 19]] * (2 * counted)


def test_dropout_of_sequences_is_refused() -> None:
    model = named(decoder("llama")).train()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = 0.5
    offsets = torch.tensor([0, 11, 19])
    with pytest.raises(NotImplementedError, match="dropout is not implemented for sequences by cu_seq_lens_q"):
        model(TOKENS[:1], cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=11, max_length_k=11)
    padding = torch.ones(1, 19, dtype=torch.long)
    padding[:, 0] = 0
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q beside a mask that is no band is not implemented"):
        model.eval()(
            TOKENS[:1], padding, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=11, max_length_k=11
        )


def test_another_attention_function_takes_effect(calls: list[Any]) -> None:
    """One that a config names after patching, or that somebody registers in the place of ``sdpa``."""
    model, mapping = patched(decoder("llama").bfloat16()), transformers.AttentionInterface._global_mapping
    model.set_attn_implementation("eager")  # type: ignore[operator]
    model(TOKENS)
    assert len(calls) == 2
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    plain, asked = mapping["sdpa"], []
    try:
        transformers.AttentionInterface.register("sdpa", lambda *a, **k: (asked.append(0), plain(*a, **k))[1])
        model(TOKENS)
    finally:
        transformers.AttentionInterface.register("sdpa", plain)
    assert (len(asked), len(calls)) == (2, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool, calls: list[Any]) -> None:
    exact, model = decoder("mistral"), decoder("mistral").bfloat16()
    right, plain = outcome(exact), outcome(model)
    model = patched(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    assert_as_close(outcome(model), plain, right)
    assert len(calls) == 2 + 2 + 2


def test_in_inference_mode_and_autocast(calls: list[Any]) -> None:
    exact, model = decoder("mistral").eval(), patched(decoder("mistral")).eval()
    with torch.inference_mode():
        right = exact(TOKENS).logits
        assert torch.allclose(model(TOKENS).logits, right, atol=1e-5)
        assert calls == []
        with torch.autocast("cpu", torch.bfloat16):
            plain, found = exact(TOKENS).logits, model(TOKENS).logits
    assert_as_close({"out": found.float()}, {"out": plain.float()}, {"out": right})
    assert len(calls) == 2


@pytest.mark.drawn(0.35)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [("llama", patched), ("mistral", patched), ("gpt-oss", patched), ("llama", named)]
)
def test_a_compiled_model(name: str, way: Callable[[Any], Any]) -> None:
    exact, model = decoder(name), decoder(name).bfloat16()
    right, plain = outcome(exact), outcome(model)
    model = way(model)
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=name != "gpt-oss")
    assert_as_close(outcome(compiled), plain, right)
    assert any(code.count("ops.cute.attention") == 2 for code in graphs)
    assert not any("scaled_dot_product_attention" in code for code in graphs)


DECODER = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "vocab_size": 97}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BigBirdPegasusForCausalLM", DECODER),
        ("DeepseekV4ForCausalLM", {"q_lora_rank": 16, "n_routed_experts": 2, "num_experts_per_tok": 2, "o_groups": 2}),
    ],
)
def test_models_without_sdpa_read_their_mask(name: str, config: dict[str, Any]) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SIZES, **config})).eval()
    right = model(TOKENS).logits
    torch.testing.assert_close(named(model)(TOKENS).logits, right)


def test_keys_that_a_layer_chooses_are_refused() -> None:
    query = torch.zeros(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="`indices` of Linear is not implemented"):
        attention_function.cute_attention_forward(nn.Linear(1, 1), query, query, query, None, indices=TOKENS)
