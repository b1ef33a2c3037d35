"""Random sequences of what is done to a Hugging Face model: patched, copied, adapted, converted, called in other ways.

A seed draws one of 27 families and two to five treatments. A model that is patched among them gives the losses, logits,
hidden states and gradients of one that went through the others alone. More of them than the suite runs:
``python -m tests.torch.drawn_treatments --count 500``.
"""

from __future__ import annotations

import copy
import io
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import peft
import torch
import transformers
from torch import nn

import cute_ops_torch
from tests.drawing import check_seeds

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "Qwen3ForCausalLM": GROUPED,
    "Gemma3ForCausalLM": {**GROUPED, "sliding_window": 4},
    "GPT2LMHeadModel": {
        "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": 0,
    },
    "BertForMaskedLM": {
        **SIZES, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
        "vocab_size": 61, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0,
    },
    "GptOssForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "Mamba2ForCausalLM": {
        "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "num_heads": 4, "head_dim": 16, "n_groups": 1,
        "state_size": 16, "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Qwen3MoeForCausalLM": {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MistralForCausalLM": {**GROUPED, "sliding_window": 4},
    "Gemma2ForCausalLM": {**GROUPED, "sliding_window": 4, "attn_implementation": "eager"},
    "Phi3ForCausalLM": GROUPED,
    "Olmo2ForCausalLM": GROUPED,
    "Cohere2ForCausalLM": {**GROUPED, "logit_scale": 0.7, "sliding_window": 4},
    "GraniteForCausalLM": {**GROUPED, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "Glm4ForCausalLM": {**GROUPED, "attention_bias": True},
    "StableLmForCausalLM": {**GROUPED, "use_parallel_residual": True},
    "GPTNeoXForCausalLM": {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "Starcoder2ForCausalLM": {**GROUPED, **dict.fromkeys(("residual_dropout", "embedding_dropout"), 0.0)},
    "NemotronForCausalLM": GROUPED,
    "OPTForCausalLM": {
        **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "max_position_embeddings": 40,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "BartForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "dropout": 0.0,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 61,
        "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None,
    },
    "RobertaForMaskedLM": {
        **SIZES, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "ModernBertForMaskedLM": {
        **SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        "local_attention": 4, "reference_compile": False,
    },
    "WhisperForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 61,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "dropout": 0.0,
        "max_source_positions": 10, "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
    },
    "ViTForImageClassification": {
        **SIZES, "image_size": 16, "patch_size": 5, "num_labels": 8, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
MOE = ("GptOssForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")
SPEECH, IMAGES = "WhisperForConditionalGeneration", "ViTForImageClassification"
NOT_CAUSAL = (
    "BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration", SPEECH, IMAGES,
)  # fmt: skip


class State(NamedTuple):
    """A model amid its treatments.

    Attributes:
        model: the model, or the adapter around it.
        found: what it returned so far, by treatment.
        patches: whether it is the one that is patched and unpatched.
    """

    model: Any
    found: dict[str, torch.Tensor]
    patches: bool


Treatment = Callable[[State, random.Random], State]


def check(seed: int, instead: Mapping[str, Treatment] = MappingProxyType({})) -> None:
    """``instead``: treatments in the place of those of the same name."""
    name, steps = drawn(seed)
    print(f"seed {seed}: {said(seed)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, got = (_treated(name, steps, seed, patches, instead=instead) for patches in (False, True))
        assert expected.keys() == got.keys(), f"{expected.keys() ^ got.keys()}"
        moved: dict[str, torch.Tensor] = {}
        for key, e in expected.items():
            assert (got[key].dtype, got[key].shape) == (e.dtype, e.shape), f"{key}: {got[key].dtype}, {got[key].shape}"
            size = max(float(e.abs().max()), 1e-2) if e.numel() else 1.0
            error, allowed = _off(got[key], e) / size, 1024 * torch.finfo(torch.float32).eps
            if error > allowed:  # as ill-conditioned as a change of the weights' last bit shows
                moved = moved or _treated(name, steps, seed, False, moved=True, instead=instead)
                allowed = max(allowed, 4 * _off(moved[key], e) / size)
            assert error <= allowed, f"{key} is off by {error:.3g} of its size, {allowed:.3g} allowed"


def check_in_16_bits(seed: int) -> None:
    """A model in bfloat16, where attention, products of patches and fused sums run on our ops: as near to float32 as
    one that is not patched.
    """
    name, steps = drawn(seed)
    # Routes and tokens that are nearly as good change places in 16 bits.
    steps = ["train" if step in ("16 bits and back", "generate") else step for step in steps]
    name = "LlamaForCausalLM" if name in MOE else name
    print(f"seed {seed} in 16 bits: {name}: {', '.join(steps)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact, plain, ours = (_treated(name, steps, seed, *how) for how in (
            (False, False, torch.float32), (False, False, torch.bfloat16), (True, False, torch.bfloat16),
        ))  # fmt: skip
    assert plain.keys() == ours.keys(), f"{plain.keys() ^ ours.keys()}"
    parts = {key: _parts_of(plain[key], ours[key], exact[key]) for key in exact.keys() & ours.keys()}
    for key, (error, _) in parts.items():
        step = key.partition(":")[0]  # among whose results some are as ill-conditioned as these
        usual = max(of_plain for other, (_, of_plain) in parts.items() if other.startswith(f"{step}:"))
        assert error <= 8 * usual + 2**-6, f"{key} is off by {error:.3g} of its norm, at most {usual:.3g} unpatched"


def _parts_of(plain: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """What part of the norm of the exact values our error is, and that of the model that is not patched."""
    right = exact.double()
    size = float(right.norm()) + 2**-4 * right.numel() ** 0.5
    return float((ours - right).norm()) / size, float((plain - right).norm()) / size


def drawn(seed: int) -> tuple[str, list[str]]:
    rng = random.Random(seed)
    name = rng.choice(list(MODELS))
    steps = [rng.choice(list(TREATMENTS)) for _ in range(rng.randint(2, 5))]
    if rng.random() < 0.15:
        steps[rng.randrange(len(steps))] = rng.choice(list(SLOW))
    if "patch" not in steps:
        steps.insert(rng.randrange(len(steps)), "patch")
    return name, steps


def said(seed: int) -> str:
    name, steps = drawn(seed)
    return f"{name}: {', '.join(steps)}"


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().nan_to_num(torch.inf).max()) if a.numel() else 0.0


def _treated(
    name: str, steps: list[str], seed: int, patches: bool, moved: bool = False, dtype: torch.dtype | None = None,
    *, instead: Mapping[str, Treatment] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What the treatments find; with ``dtype`` of a model in that, whose weights bfloat16 holds."""
    torch.manual_seed(seed)
    state = State(_made(name) if dtype is None else _made(name).bfloat16().to(dtype), {}, patches)
    if moved:
        with torch.no_grad():
            for i, p in enumerate(state.model.parameters()):
                p.mul_(1 + (-1) ** i * 2**-23)
    results = dict[str, torch.Tensor]()
    for i, step in enumerate([*steps, "train"]):
        torch.manual_seed(seed + i)
        state = (TREATMENTS | SLOW | {**instead})[step](state._replace(found={}), random.Random(seed * 10 + i))
        results |= {f"{i} {step}: {key}": value for key, value in state.found.items()}
    return results


def _made(name: str, config: Any = None) -> Any:
    kind = getattr(transformers, name)
    model = kind(config or kind.config_class(**MODELS[name])).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def base_of(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def _name(model: Any) -> str:
    return next(cls.__name__ for cls in type(base_of(model)).__mro__ if cls.__name__ in MODELS)


def _is_patched(model: nn.Module) -> bool:
    return any(hasattr(type(module), "_cute_original") for module in model.modules())


def _inputs(state: State, rng: random.Random, padded: bool = True) -> dict[str, torch.Tensor]:
    generator, name = torch.Generator().manual_seed(rng.randrange(1 << 30)), _name(state.model)
    dtype = next(p.dtype for n, p in state.model.named_parameters() if "lora" not in n)
    if name == IMAGES:
        pixels = torch.randn(2, 3, 16, 16, generator=generator).to(dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, 8, (2,), generator=generator)}
    if name == SPEECH:
        features, labels = torch.randn(2, 8, 20, generator=generator), torch.randint(3, 50, (2, 5), generator=generator)
        return {"input_features": features.to(dtype), "labels": labels}
    tokens = torch.randint(3, 50, (2, rng.choice((5, 8))), generator=generator)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    if padded and rng.random() < 0.5:
        mask[0, :2] = 0
        tokens[0, :2], labels[0, :2] = 0, -100
    if rng.random() < 0.5:
        labels[rng.randrange(2)] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _note(state: State, out: Any, mask: torch.Tensor | None, logits: bool = True) -> None:
    """Keeps what a call returned; of padding, whose rows attend to nothing, nothing is promised."""
    for key, value in out.items():
        for i, x in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(x, torch.Tensor) and (logits or key != "logits") and key != "past_key_values":
                x = x.detach().clone().float()
                rows = mask is not None and x.shape[:2] == mask.shape
                state.found[f"{key} {i}"] = x[mask.bool()] if mask is not None and rows else x


def _call(state: State, rng: random.Random, **given: Any) -> State:
    inputs = _inputs(state, rng)
    if rng.random() < 0.5:
        out = state.model.train()(**inputs, **given)
        _note(state, out, inputs.get("attention_mask"), logits=False)
        return state
    with torch.no_grad():
        _note(state, state.model.eval()(**inputs, **given), inputs.get("attention_mask"))
    return state


def _step(state: State, model: Any, run: Any, inputs: dict[str, Any]) -> None:
    """Keeps the results and gradients of a training step, which ``run`` does of the model."""
    out = run(**inputs)
    _note(state, out, inputs.get("attention_mask"), logits=False)
    if out.loss.requires_grad:
        out.loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            state.found[f"gradient of {name}"] = p.grad.clone().float()


def _train(state: State, rng: random.Random) -> State:
    inputs, model = _inputs(state, rng), state.model.train()
    model.zero_grad()
    _step(state, model, model, inputs)
    with torch.no_grad():
        _note(state, model.eval()(**inputs), inputs.get("attention_mask"))
    return state


def _patch(state: State, rng: random.Random) -> State:
    if state.patches and not _is_patched(state.model):
        without = rng.sample(
            ["rmsnorm", "add_rmsnorm", "rope", "linear_cross_entropy", "linear", "mlp"], rng.choice((0, 0, 2))
        )
        cute_ops_torch.patch(state.model, logits=rng.random() < 0.3, without=without)
    return state


def _unpatch(state: State, rng: random.Random) -> State:
    if state.patches and _is_patched(state.model):
        cute_ops_torch.unpatch(state.model)
    return state


def _repatch(state: State, rng: random.Random) -> State:
    return _patch(_unpatch(state, rng), rng)


def _copy(state: State, rng: random.Random) -> State:
    return state._replace(model=copy.deepcopy(state.model))


def _load(state: State, rng: random.Random) -> State:
    """Into another model, patched or not, from a file."""
    if isinstance(state.model, peft.PeftModel):
        return state
    file = io.BytesIO()
    torch.save(state.model.state_dict(), file)
    file.seek(0)
    made = _made(_name(state.model), copy.deepcopy(state.model.config)).to(state.model.dtype)
    other = State(made, state.found, state.patches)
    if rng.random() < 0.6:
        other = _patch(other, rng)
    other.model.load_state_dict(torch.load(file))
    return other


def _adapter(state: State, rng: random.Random) -> State:
    if isinstance(state.model, peft.PeftModel):
        return state
    kinds = {
        name.rpartition(".")[2]: type(module) for name, module in state.model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }  # fmt: skip
    layers = sorted(kinds.keys() - {"decoder", "out_proj"})
    targets = rng.sample(layers, min(len(layers), rng.randint(1, 4)))
    if rng.random() < 0.6:
        options: Any = {"use_dora": rng.random() < 0.3, "use_rslora": rng.random() < 0.3}
        config: Any = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
    elif rng.random() < 0.5 or not all(issubclass(kinds[name], nn.Linear) for name in targets):
        before = rng.sample(targets, rng.randint(0, len(targets)))  # those whose input it scales
        config = peft.IA3Config(target_modules=targets, feedforward_modules=before, init_ia3_weights=False)
    else:
        config = peft.LoHaConfig(r=2, target_modules=targets, init_weights=False)
    return state._replace(model=peft.get_peft_model(state.model, config))


def _merge(state: State, rng: random.Random) -> State:
    if isinstance(state.model, peft.PeftModel):
        end = state.model.merge_and_unload if rng.random() < 0.5 else state.model.unload
        return state._replace(model=end())
    return state


def _disable(state: State, rng: random.Random) -> State:
    """Adapters off for a call."""
    if not isinstance(state.model, peft.PeftModel):
        return state
    with state.model.disable_adapter():
        return _call(state, rng)


def _checkpoint(state: State, rng: random.Random) -> State:
    if not base_of(state.model).supports_gradient_checkpointing:
        return state
    if rng.random() < 0.7:
        state.model.gradient_checkpointing_enable({"use_reentrant": rng.random() < 0.3})
        state.model.enable_input_require_grads()
    else:
        state.model.gradient_checkpointing_disable()
    return state


def _tie(state: State, rng: random.Random) -> State:
    # transformers cannot tie a head that has an adapter
    if not isinstance(state.model, peft.PeftModel) and _name(state.model) != IMAGES:
        state.model.config.tie_word_embeddings = True
        state.model.tie_weights()
    return state


def _resize(state: State, rng: random.Random) -> State:
    if not isinstance(state.model, peft.PeftModel) and _name(state.model) != IMAGES:
        state.model.zero_grad()  # gradients of the old size stay, else
        state.model.resize_token_embeddings(rng.choice((56, 64, 77)), mean_resizing=False)
    return state


def _freeze(state: State, rng: random.Random) -> State:
    for name, p in sorted(state.model.named_parameters()):
        if rng.random() < 0.3 and (p.requires_grad or "lora" not in name):
            p.requires_grad_(rng.random() < 0.4)
    return state


def _convert(state: State, rng: random.Random) -> State:
    """To 16 bits, in which it runs, and back."""
    model = state.model.to(rng.choice((torch.bfloat16, torch.float16)))
    loss = model.train()(**_inputs(state, rng)).loss
    if loss.requires_grad:
        loss.backward()
        model.zero_grad()
    return state._replace(model=model.float())


def _generate(state: State, rng: random.Random) -> State:
    if _name(state.model) == IMAGES or "MaskedLM" in _name(state.model):
        return state
    inputs = {key: x for key, x in _inputs(state, rng).items() if key != "labels"}
    out = state.model.eval().generate(
        **inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, num_beams=rng.choice((1, 1, 2)),
    )  # fmt: skip
    for i, x in enumerate(out.logits):
        state.found[f"logits of token {i}"] = x.float()
    return state


def _meta(state: State, rng: random.Random) -> State:
    model = state.model
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(weights)
    for name, x in model.named_buffers():
        x.copy_(buffers[name])
    if not isinstance(model, peft.PeftModel):
        model.tie_weights()
    return state


def _router(state: State, rng: random.Random) -> State:
    return _call(state, rng, output_router_logits=True) if _name(state.model) in MOE else state


def _hidden(state: State, rng: random.Random) -> State:
    return _call(state, rng, output_hidden_states=True)


def _attentions(state: State, rng: random.Random) -> State:
    if _name(state.model) in ("Mamba2ForCausalLM", SPEECH):
        return state
    if rng.random() < 0.5:
        base_of(state.model).set_attn_implementation("eager")
    return _call(state, rng, output_attentions=base_of(state.model).config._attn_implementation == "eager")


def _embeds(state: State, rng: random.Random) -> State:
    inputs = _inputs(state, rng)
    if "input_ids" not in inputs:
        return state
    embeds = base_of(state.model).get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    out = state.model.train()(inputs_embeds=embeds, **inputs)
    out.loss.backward()
    state.found["gradient of embeddings"] = embeds.grad
    _note(state, out, inputs.get("attention_mask"), logits=False)
    return state


def _items(state: State, rng: random.Random) -> State:
    if _name(state.model) in NOT_CAUSAL:
        return state
    return _call(state, rng, num_items_in_batch=rng.choice((7, torch.tensor(9))))


def _inference(state: State, rng: random.Random) -> State:
    inputs = _inputs(state, rng)
    with torch.inference_mode():
        _note(state, state.model.eval()(**inputs), inputs.get("attention_mask"))
    return state


def _autocast(state: State, rng: random.Random) -> State:
    """Nothing is compared: a number in 16 bits moves by what a sum in another order moves in float32."""
    inputs = _inputs(state, rng)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = state.model.train()(**inputs).loss
    if loss.requires_grad:
        loss.backward()
        state.model.zero_grad()
    return state


def _compiled(state: State, rng: random.Random) -> State:
    """The model that is patched, or a part of it that holds layers; the other one runs as it is."""
    inputs, model = _inputs(state, rng), state.model.train()
    model.zero_grad()
    if state.patches:
        torch._dynamo.reset()
        parts = [each for each in model.modules() if any(isinstance(m, nn.ModuleList) for m in each.children())]
        part = rng.choice([model, *parts])
        part.compile(backend=rng.choice(("eager", "aot_eager")))
    _step(state, model, model, inputs)
    if state.patches:
        part._compiled_call_impl = None
        torch._dynamo.reset()
    return state


def _save(state: State, rng: random.Random) -> State:
    """By Hugging Face's files, into a model of the same class, or an adapter's into the same model."""
    with tempfile.TemporaryDirectory() as folder:
        state.model.save_pretrained(folder)
        if isinstance(state.model, peft.PeftModel):
            state.model.load_adapter(folder, "saved", is_trainable=True)
            state.model.set_adapter("saved")
            return state
        model = type(state.model).from_pretrained(folder, dtype=state.model.dtype)
    return state._replace(model=model)


def _steps(state: State, rng: random.Random) -> State:
    """Two steps of an optimizer."""
    model = state.model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained:
        optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(**_inputs(state, rng)).loss
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
        optimizer.zero_grad()
    return state


def _functional(state: State, rng: random.Random) -> State:
    """A stateless call, with other weights."""
    inputs, model = _inputs(state, rng), state.model.eval()
    weights = {name: 0.9 * p.detach() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, weights, (), inputs)
    _note(state, out, inputs.get("attention_mask"))
    return state


def _trainer(state: State, rng: random.Random) -> State:
    """Hugging Face's ``Trainer``, which accumulates gradients and tells a model how many tokens it divides by."""
    if not any(p.requires_grad for p in state.model.parameters()):
        return state
    rows = [{key: x[i] for key, x in _inputs(state, random.Random(rng.randrange(99)), False).items()} for i in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2, report_to=[],
            learning_rate=0.05, optim="sgd", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=3,
            gradient_checkpointing=False, logging_strategy="no",
        )  # fmt: skip
        transformers.Trainer(state.model, options, train_dataset=rows).train()
    return state


TREATMENTS: dict[str, Treatment] = {
    "patch": _patch, "unpatch": _unpatch, "patch again": _repatch, "deepcopy": _copy, "load": _load,
    "adapter": _adapter, "merge": _merge, "adapters off": _disable, "checkpointing": _checkpoint,
    "tie_weights": _tie, "resize": _resize, "freeze": _freeze, "16 bits and back": _convert,
    "generate": _generate, "meta and back": _meta, "router logits": _router, "hidden states": _hidden,
    "attentions": _attentions, "inputs_embeds": _embeds, "num_items_in_batch": _items, "inference_mode": _inference,
    "train": _train, "autocast": _autocast, "save_pretrained": _save, "optimizer steps": _steps,
    "functional_call": _functional,
}  # fmt: skip
# Of those that take seconds a sequence has one at most, and few have one.
SLOW: dict[str, Treatment] = {"compiled": _compiled, "Trainer": _trainer}


if __name__ == "__main__":
    check_seeds(check, "sequences")
