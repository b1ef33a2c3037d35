"""Serves a decoder of `flax.nnx` modules with paged caches, by the engine and with the weights of serve_torch.py.

One program of two shapes serves all lengths: caches are donated, and lengths and pages are arrays of the device.
`append_kv` rotates keys as it writes them.

    python examples/serving/serve_jax.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from engine import Engine, Request, Step
from flax import nnx
from serve_torch import BATCH, LONGEST, PAGE_SIZE, PAGES, requests, small_model

import cute_ops_jax
import cute_ops_jax.nnx as ours

Caches = list[tuple[jax.Array, jax.Array]]


class Attention(nnx.Module):
    """Queries, keys and values of new tokens; keys and values go to the cache, and are read from it."""

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        width, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.headdim = width // self.heads
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q_proj = linear(width, self.heads * self.headdim)
        self.k_proj, self.v_proj = (linear(width, self.kv_heads * self.headdim) for _ in range(2))
        self.o_proj = linear(self.heads * self.headdim, width)

    def __call__(self, x: jax.Array, angles: Any, caches: tuple[jax.Array, jax.Array], step: Any) -> Any:
        dtype = caches[0].dtype
        q, k, v = (f(x).reshape(*x.shape[:2], -1, self.headdim) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = cute_ops_jax.rope(q, *angles).astype(dtype)
        caches = cute_ops_jax.append_kv(*caches, k.astype(dtype), v.astype(dtype), step.slots, *angles)
        if q.shape[1] == 1:
            out, _ = cute_ops_jax.decode_attention(q, *caches, step.lengths, step.page_table)
        else:
            where = {"lengths": step.lengths, "page_table": step.page_table}
            out, _ = cute_ops_jax.attention(q, *caches, causal=True, **where)
        return self.o_proj(out.reshape(*x.shape[:2], -1).astype(x.dtype)), caches


class Layer(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = ours.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.post_attention_layernorm = ours.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.self_attn = Attention(config, rngs)
        self.mlp = ours.GatedMLP(width, config.intermediate_size, rngs=rngs)

    def __call__(self, x: jax.Array, *others: Any) -> Any:
        attended, caches = self.self_attn(self.input_layernorm(x), *others)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), caches


class Decoder(nnx.Module):
    """A Llama, as :func:`serve_torch.small_model` is."""

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = ours.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)
        self.theta = config.rope_parameters["rope_theta"]
        self.headdim = config.hidden_size // config.num_attention_heads

    def __call__(self, step: Any, caches: Caches) -> tuple[jax.Array, Caches]:
        """The token that follows each sequence's last one, and the new caches."""
        frequencies = self.theta ** -(jnp.arange(0, self.headdim, 2) / self.headdim)
        angle = step.positions[..., None] * frequencies
        x, angles, written = self.embed_tokens(step.tokens), (jnp.cos(angle), jnp.sin(angle)), []
        for layer, each in zip(self.layers, caches, strict=True):
            x, each = layer(x, angles, each, step)
            written.append(each)
        return self.lm_head(self.norm(x[:, -1])).argmax(-1), written


def refuse_others(config: Any) -> None:
    """A model that computes something else than :class:`Decoder` is an error, not other tokens."""
    plain = {
        "model_type": "llama", "hidden_act": "silu", "head_dim": config.hidden_size // config.num_attention_heads,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    other = {name: getattr(config, name, None) for name, value in plain.items() if getattr(config, name, None) != value}
    if config.rope_parameters["rope_type"] != "default":
        other["rope_parameters"] = config.rope_parameters
    if other:
        raise ValueError(f"the decoder is a Llama with {plain} and plain angles, got a model with {other}")


def with_weights(model: Any) -> Decoder:
    """The decoder with the weights of a Hugging Face model."""
    refuse_others(model.config)
    decoder = Decoder(model.config, nnx.Rngs(0))
    weights = {name: jnp.asarray(x.detach().float().cpu().numpy()) for name, x in model.named_parameters()}
    for name, weight in weights.items():
        *path, last, _ = name.removeprefix("model.").split(".")
        module: Any = decoder
        for each in path:
            module = module[int(each)] if each.isdigit() else getattr(module, each)
        module = getattr(module, last.removesuffix("_proj") if "mlp" in path else last)
        if isinstance(module, nnx.Linear):
            module.kernel[...] = weight.T
        else:
            parameter = module.embedding if isinstance(module, nnx.Embed) else module.scale
            parameter[...] = weight
    return decoder


def server(decoder: Decoder, config: Any, dtype: Any) -> Callable[[Step], np.ndarray]:
    """A step of the decoder, with caches of this dtype that the program writes in place."""
    shape = PAGES, PAGE_SIZE, config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    caches = [tuple(jnp.zeros(shape, dtype) for _ in range(2)) for _ in range(config.num_hidden_layers)]
    graph, weights = nnx.split(decoder)

    @partial(jax.jit, donate_argnums=2)
    def run(weights: Any, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        return nnx.merge(graph, weights)(step, caches)

    def step(given: Step) -> np.ndarray:
        nonlocal caches
        following, caches = run(weights, Step(*map(jnp.asarray, given)), caches)
        return np.asarray(following)

    return step


def main(arguments: list[str] | None = None) -> tuple[Any, list[Request]]:
    """Serve some requests; returns the model whose weights the decoder has, and the requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    model, asked = small_model(options.layers), requests(options.requests)
    step = server(with_weights(model), model.config, jnp.float16)
    start = time.perf_counter()
    engine = Engine(step, batch=BATCH, pages=PAGES, page_size=PAGE_SIZE, longest=LONGEST)
    engine.run(asked)
    made, seconds = sum(len(request.made) for request in asked), time.perf_counter() - start
    print(f"{made} tokens of {len(asked)} requests in {engine.steps} steps, {seconds:.1f} s")
    return model, asked


if __name__ == "__main__":
    from serve_torch import generated

    model, asked = main()
    same = sum(request.made == generated(model, request) for request in asked)
    print(f"{same} of {len(asked)} requests have the tokens of generate")
