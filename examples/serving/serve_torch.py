"""Serves a Hugging Face model with paged caches: `append_kv` writes them, `attention` reads them for chunks of prompts,
`decode_attention` for single tokens.

The model is untouched: these ops are an attention function of transformers, which gets caches, slots, lengths and pages
by keyword. Its tokens are those of the model's own `generate`, one request after another.

    python examples/serving/serve_torch.py
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from engine import Engine, Request, Step
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import cute_ops_torch

NAME, ONCE, PAGE_SIZE, BATCH, PAGES, LONGEST = "cute_paged", "cute_paged_once", 4, 8, 128, 64


class Paged(NamedTuple):
    """What attention layers get besides queries, keys and values."""

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    slots: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, *, paged: Paged,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """An attention function of transformers, whose arguments are (batch, heads, queries, headdim)."""
    k_cache, v_cache = paged.caches[module.layer_idx]
    q, k, v = (x.transpose(1, 2).to(k_cache.dtype) for x in (query, key, value))
    cute_ops_torch.append_kv(k_cache, v_cache, k, v, paged.slots)
    window, options = sliding_window or 0, {"scale": scaling or 0.0, "softcap": softcap or 0.0, "sinks": s_aux}
    if q.shape[1] == 1:
        out, _ = cute_ops_torch.decode_attention(
            q, k_cache, v_cache, paged.lengths, paged.page_table, window=window, **options
        )
    else:
        out, _ = cute_ops_torch.attention(
            q, k_cache, v_cache, causal=True, left=window - 1, lengths=paged.lengths, page_table=paged.page_table,
            **options,
        )  # fmt: skip
    return out.to(query.dtype), None


def mask_of_once(*_: Any, dtype: torch.dtype, device: Any = None, local_size: int | None = None, **__: Any) -> Any:
    """A mask of one token and itself, which says its window."""
    mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)
    mask.window = local_size or 0
    return mask


def attend_once(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *,
    sizes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] | None = None, sliding_window: int | None = None,
    indices: Any = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of one token to itself, which is its value. It notes layers, and heads and columns of keys and values.

    Raises:
        ValueError: the layer is not causal, has a mask that `attend` does not know, or gets no keywords of the call.
    """
    name = type(module).__name__
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{name} is not causal: its tokens cannot be served one after another")
    if sizes is None:
        raise ValueError(f"{name} gets no keywords of the model's call, which bring these caches")
    if getattr(attention_mask, "window", None) != (sliding_window or 0):
        raise ValueError(f"{name} has a mask of its own, or a window that its mask alone says")
    if indices is not None:
        raise ValueError(f"{name} attends to keys that it chooses, by caches of its own")
    sizes.append((module.layer_idx, (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])))
    return value.transpose(1, 2).repeat_interleave(query.shape[1] // value.shape[1], dim=2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
AttentionInterface.register(ONCE, attend_once)
AttentionMaskInterface.register(ONCE, mask_of_once)


def small_model(layers: int = 2) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, initializer_range=0.2, max_position_embeddings=LONGEST, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def requests(count: int, vocabulary: int = 512) -> list[Request]:
    """Prompts of 1 to 40 tokens, and 1 to 12 tokens to follow."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, (41, 13), (count, 2))
    return [Request(rng.integers(0, vocabulary, prompt).tolist(), int(new)) for prompt, new in sizes]


@torch.no_grad()
def caches_of(model: Any, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Caches of keys and values for each layer, of the sizes that one token shows.

    Raises:
        ValueError: the model keeps what these caches do not hold, or does not take positions.
    """
    name, sizes = type(model).__name__, []
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} takes no positions: it counts tokens of caches of its own")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} keeps states besides keys and values, which these caches do not hold")
    set_attention(model, ONCE)
    token = torch.zeros((1, 1), dtype=torch.int32, device=model.device)
    model(token, position_ids=token, use_cache=False, sizes=sizes)
    layers = sorted(layer for layer, *_ in sizes)
    if layers != [*range(model.config.num_hidden_layers)]:
        raise ValueError(f"{name} attends in layers {layers}, not once in each of {model.config.num_hidden_layers}")
    return [
        tuple(torch.zeros((PAGES, PAGE_SIZE, *size), dtype=dtype, device=model.device) for size in both)
        for _, *both in sorted(sizes)
    ]


def set_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} computes attention by itself, without these caches")


def server(model: Any, dtype: torch.dtype, compiled: bool = False) -> Callable[[Step], np.ndarray]:
    """A step of the model, with caches of this dtype."""
    caches, device = caches_of(model, dtype), model.device

    def forward(tokens: torch.Tensor, positions: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        paged = Paged(caches, *others)
        logits = model(tokens, position_ids=positions, use_cache=False, logits_to_keep=1, paged=paged).logits
        return logits[:, -1].argmax(-1)

    run = torch.compile(forward, mode="reduce-overhead", fullgraph=True) if compiled else forward

    @torch.no_grad()
    def step(given: Step) -> np.ndarray:
        set_attention(model, NAME)
        return run(*(torch.from_numpy(x).to(device) for x in given)).cpu().numpy()

    return step


def generated(model: Any, request: Request) -> list[int]:
    """What the model's own generate makes of a prompt."""
    model.set_attn_implementation("sdpa")
    prompt = torch.tensor([request.prompt], device=model.device)
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.new_tokens, do_sample=False
    )
    return found[0, len(request.prompt) :].tolist()


@torch.no_grad()
def margin(model: Any, tokens: list[int], chosen: int) -> float:
    """By how much the logit of a token is below the largest one of those that may follow."""
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([tokens], device=model.device)).logits[0, -1].float()
    return float(logits.max() - logits[chosen])


def main(arguments: list[str] | None = None) -> tuple[Any, list[Request], int]:
    """Serve some requests; returns the model, the requests, and the number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--compile", action="store_true", help="by torch.compile, one captured graph for all lengths")
    options = parser.parse_args(arguments)
    model, asked = small_model(), requests(options.requests)
    if torch.cuda.is_available():
        model = model.to("cuda")
    engine = Engine(
        server(model, torch.float16, options.compile), batch=BATCH, pages=PAGES, page_size=PAGE_SIZE, longest=LONGEST
    )
    start = time.perf_counter()
    engine.run(asked)
    made, seconds = sum(len(request.made) for request in asked), time.perf_counter() - start
    print(f"{made} tokens of {len(asked)} requests in {engine.steps} steps, {seconds:.1f} s")
    return model, asked, engine.steps


if __name__ == "__main__":
    model, asked, _ = main()
    same = sum(request.made == generated(model, request) for request in asked)
    print(f"{same} of {len(asked)} requests have the tokens of generate")
