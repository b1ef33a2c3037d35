"""A decoder of ``flax.nnx`` modules, like Llama, Qwen3 or Gemma 3. ``Parts`` is all that differs between our ops and
XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cute_ops_jax
import cute_ops_jax.nnx as ours

Array = jax.Array
EPS = 1e-6


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder and of its batches."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    headdim: int
    vocabulary: int
    batch: int
    seqlen: int
    dtype: str
    activation: str = "silu"
    window: int | None = None  # tokens that attention sees
    full_every: int = 1  # of so many layers, one sees all of them
    norms_after: bool = False  # of what attention and the MLP give
    qk_norm: bool = True  # of queries and keys
    theta: float = 1e6  # base of the rotations' frequencies

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.seqlen


MODELS = {
    # The layers, the vocabulary and the tied embedding of Qwen3-0.6B, eight of its 28 layers.
    "qwen3-0.6b": Config(8, 1024, 3072, 16, 8, 128, 151936, 4, 4096, "bfloat16"),
    # Gemma 3 270M, but for the scale of its embedding and the second frequency of its rotations.
    "gemma3-270m": Config(
        18, 640, 2048, 4, 1, 256, 262144, 8, 2048, "bfloat16", "gelu_tanh", window=512, full_every=6, norms_after=True
    ),
    # The Llama of 15 million parameters that llama2.c trains on TinyStories, with its 131072 tokens a step.
    "stories15m": Config(6, 288, 768, 6, 6, 48, 32000, 512, 256, "bfloat16", qk_norm=False, theta=1e4),
}


def small(config: Config) -> Config:
    """The same for a CPU."""
    sizes = {"layers": 2, "hidden": 64, "mlp": 176, "heads": 4, "kv_heads": 2, "headdim": 16, "vocabulary": 512}
    window = config.window and 16
    return replace(config, **sizes, batch=4, seqlen=64, dtype="float32", window=window, full_every=2)


class Parts(NamedTuple):
    """The modules and the loss that a decoder is made of."""

    norm: type[ours.RMSNorm]
    add_norm: type[ours.AddRMSNorm]
    qk_norm_rope: type[ours.QKNormRope]
    rope: Any
    mlp: type[ours.GatedMLP]
    loss: Any


# --- the same in jax.numpy, for XLA to fuse ---------------------------------------------------------------------------


def rmsnorm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def rope(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class XlaRMSNorm(ours.RMSNorm):
    def __call__(self, x: Array) -> Array:
        return rmsnorm(x, self.scale[...])


class XlaAddRMSNorm(ours.AddRMSNorm):
    def __call__(self, x: Array, residual: Array) -> tuple[Array, Array]:
        residual = x + residual
        return rmsnorm(residual, self.scale[...]), residual


class XlaQKNormRope(ours.QKNormRope):
    def __call__(self, q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        return rope(rmsnorm(q, self.q_scale[...]), cos, sin), rope(rmsnorm(k, self.k_scale[...]), cos, sin)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class XlaGatedMLP(ours.GatedMLP):
    def __call__(self, x: Array) -> Array:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


def xla_loss(hidden: Array, weight: Array, target: Array) -> Array:
    logits = (hidden @ weight.T).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, target))


# 2 GiB of logits at a time: products of many rows fill a GPU where hidden states are small, too.
LOGITS = 1 << 30


def our_loss(hidden: Array, weight: Array, target: Array) -> Array:
    return cute_ops_jax.linear_cross_entropy(hidden, weight, target, chunk_rows=LOGITS // weight.shape[0])


PARTS = {
    "XLA": Parts(XlaRMSNorm, XlaAddRMSNorm, XlaQKNormRope, rope, XlaGatedMLP, xla_loss),
    "ours": Parts(ours.RMSNorm, ours.AddRMSNorm, ours.QKNormRope, cute_ops_jax.rope, ours.GatedMLP, our_loss),
}


# --- the decoder ------------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, config: Config, parts: Parts, full: bool, rngs: nnx.Rngs) -> None:
        c, options = config, {"param_dtype": config.dtype, "rngs": rngs}
        linear = {**options, "use_bias": False, "dtype": c.dtype}
        normal = nnx.initializers.normal
        narrow = normal(0.02 / (2 * c.layers) ** 0.5)  # what adds to the residual stream starts small
        self.config = c
        # Each token, those before it, none after it.
        self.window = None if full or c.window is None else (c.window - 1, 0)
        self.q = nnx.Linear(c.hidden, c.heads * c.headdim, kernel_init=normal(0.02), **linear)
        self.k = nnx.Linear(c.hidden, c.kv_heads * c.headdim, kernel_init=normal(0.02), **linear)
        self.v = nnx.Linear(c.hidden, c.kv_heads * c.headdim, kernel_init=normal(0.02), **linear)
        self.out = nnx.Linear(c.heads * c.headdim, c.hidden, kernel_init=narrow, **linear)
        self.rope = parts.rope
        self.qk_norm_rope = nnx.data(parts.qk_norm_rope(c.headdim, epsilon=EPS, **options) if c.qk_norm else None)
        self.mlp_norm = parts.add_norm(c.hidden, epsilon=EPS, **options)
        self.mlp = parts.mlp(
            c.hidden, c.mlp, activation=c.activation, dtype=c.dtype, kernel_init=normal(0.02), **options
        )
        self.next_norm = parts.add_norm(c.hidden, epsilon=EPS, **options)
        after = [parts.norm(c.hidden, epsilon=EPS, **options) for _ in range(2)] if c.norms_after else []
        self.norms_after = nnx.List(after)

    def __call__(self, x: Array, residual: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """``x`` is normed already; so is what is returned, for the layer that follows."""
        x, residual = self.mlp_norm(self._after(0, self.attention(x, cos, sin)), residual)
        return self.next_norm(self._after(1, self.mlp(x)), residual)

    def _after(self, which: int, x: Array) -> Array:
        return self.norms_after[which](x) if self.norms_after else x

    def attention(self, x: Array, cos: Array, sin: Array) -> Array:
        q, k, v = (a.reshape(*x.shape[:2], -1, self.config.headdim) for a in (self.q(x), self.k(x), self.v(x)))
        if self.qk_norm_rope is None:
            q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
        else:
            q, k = self.qk_norm_rope(q, k, cos, sin)
        # cuDNN's fused attention takes half precision only.
        fused = "cudnn" if jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16 else None
        heads = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=self.window, implementation=fused
        )
        return self.out(heads.reshape(*x.shape[:2], -1))


class Decoder(nnx.Module):
    """RMSNorm, rotated queries and keys that may be normed, grouped causal attention, gated MLPs, tied embeddings."""

    def __init__(self, config: Config, parts: Parts, rngs: nnx.Rngs) -> None:
        c, self.config, self.loss = config, config, parts.loss
        table = {"embedding_init": nnx.initializers.normal(0.02), "param_dtype": c.dtype, "dtype": c.dtype}
        self.embedding = nnx.Embed(c.vocabulary, c.hidden, **table, rngs=rngs)
        self.first_norm = parts.norm(c.hidden, epsilon=EPS, param_dtype=c.dtype, rngs=rngs)
        self.layers = nnx.List([Layer(c, parts, (i + 1) % c.full_every == 0, rngs) for i in range(c.layers)])

    def __call__(self, window: Array) -> Array:
        """The mean loss, in nats per token, of ``window: int32[batch, seqlen + 1]``."""
        tokens, following = window[:, :-1], window[:, 1:]
        cos, sin = rotary(self.config)
        residual = self.embedding(tokens)
        x = self.first_norm(residual)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        return self.loss(x, self.embedding.embedding[...], following)


def rotary(config: Config) -> tuple[Array, Array]:
    """Cosines and sines, ``float32[seqlen, headdim / 2]``."""
    frequency = config.theta ** (-np.arange(0, config.headdim, 2) / config.headdim)
    angle = np.arange(config.seqlen)[:, None] * frequency
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
