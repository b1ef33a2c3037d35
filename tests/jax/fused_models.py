"""Models of flax.nnx, equinox and plain jnp, as their users write them, for the test of ``fuse``.

Each gives a function of arrays, its arguments, and what the parts of it become.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

B, T, N, HEADS, CLASSES = 2, 4, 16, 2, 12
RNG = np.random.default_rng(11)


class Model(NamedTuple):
    """A model.

    Attributes:
        function: of its parameters and of inputs.
        args: the parameters, then the inputs.
        becomes: what its parts become, in order.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    becomes: list[str]


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape) * 0.5, jnp.float32)


def of_nnx(module: nnx.Module, *inputs: Any, becomes: list[str], call: Callable[..., Any] | None = None) -> Model:
    graph, state = nnx.split(module)
    run = call or (lambda module, *inputs: module(*inputs))
    return Model(lambda state, *inputs: run(nnx.merge(graph, state), *inputs), (state, *inputs), becomes)


def of_equinox(module: Any, *inputs: Any, becomes: list[str], call: Callable[..., Any]) -> Model:
    arrays, static = eqx.partition(module, eqx.is_inexact_array)
    return Model(lambda arrays, *inputs: call(eqx.combine(arrays, static), *inputs), (arrays, *inputs), becomes)


def rms(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def turned(x: jax.Array) -> jax.Array:
    r = x.shape[-1] // 2
    angles = (jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(r) / r))[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def llama(p: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Two layers in a scan with checkpoints, and the loss of the next token."""

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = rms(x, p["n1"])
        q, k, v = ((y @ p[name]).reshape(B, -1, HEADS, N // HEADS) for name in "qkv")
        x = x + attend(turned(q), turned(k), v).reshape(B, -1, N) @ p["o"]
        y = rms(x, p["n2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), p["embed"][tokens[:, :-1]], p["layers"])
    logits = rms(x, p["norm"]) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def llama_params() -> dict[str, Any]:
    layers = {name: draw(2, N) for name in ("n1", "n2")} | {name: draw(2, N, N) for name in "qkvo"}
    layers |= {"gate": draw(2, N, 2 * N), "up": draw(2, N, 2 * N), "down": draw(2, 2 * N, N)}
    return {"embed": draw(CLASSES, N), "norm": draw(N), "layers": layers}


class DiT(nnx.Module):
    """A block whose norms are modulated by a condition."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(N, use_bias=False, use_scale=False, rngs=rngs)
        self.modulation = nnx.Linear(N, 3 * N, rngs=rngs)
        self.up, self.down = nnx.Linear(N, 2 * N, rngs=rngs), nnx.Linear(2 * N, N, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        shift, scale, gate = jnp.split(self.modulation(nnx.silu(condition))[:, None], 3, -1)
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(nnx.gelu(self.up(y)))


class Encoder(nnx.Module):
    """A layer of a ViT with nnx's attention."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(N, rngs=rngs), nnx.LayerNorm(N, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(HEADS, N, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(N, 2 * N, rngs=rngs), nnx.Linear(2 * N, N, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Gated(nnx.Module):
    """A gated MLP after an RMS norm, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(N, rngs=rngs)
        self.gate, self.up, self.down = (
            nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in ((N, 2 * N), (N, 2 * N), (2 * N, N))
        )
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        y = self.norm(x)
        return x + self.dropout(self.down(nnx.silu(self.gate(y)) * self.up(y)), rngs=nnx.Rngs(dropout=key))


class Equinox(eqx.Module):
    """A transformer's layer of one sequence, with equinox's attention."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        self.norm1, self.norm2 = eqx.nn.LayerNorm(N), eqx.nn.RMSNorm(N)
        self.attention = eqx.nn.MultiheadAttention(HEADS, N, key=key)
        self.mlp = eqx.nn.MLP(N, N, 2 * N, 1, activation=jax.nn.gelu, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda row: self.mlp(self.norm2(row)))(x)


class Mixer(eqx.Module):
    """Products over positions and over channels."""

    positions: eqx.nn.MLP
    channels: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        self.positions = eqx.nn.MLP(T, T, 2 * T, 1, activation=jax.nn.gelu, key=key)
        self.channels = eqx.nn.MLP(N, N, 2 * N, 1, activation=jax.nn.gelu, key=key)
        self.norm = eqx.nn.LayerNorm(N)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.vmap(self.positions, 1, 1)(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.channels)(jax.vmap(self.norm)(x))


def classifier(p: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
    """An MLP with biases and a mask, as tutorials write it."""
    h = jax.nn.relu(x @ p["w1"] + p["b1"])
    logp = jax.nn.log_softmax(h @ p["w2"] + p["b2"])
    at = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -jnp.where(labels > 0, at, 0).sum() / (labels > 0).sum()


def make() -> dict[str, Model]:
    x, key = draw(B, T, N), jax.random.key(3)
    tokens = jnp.asarray(RNG.integers(0, CLASSES, (B, T + 1)), jnp.int32)
    labels = jnp.asarray(RNG.integers(0, CLASSES, (B, T)), jnp.int32)
    p = {"w1": draw(N, N), "b1": draw(N), "w2": draw(N, CLASSES), "b2": draw(CLASSES)}
    each = jax.vmap
    block = ["layernorm", "softmax", "add_rmsnorm", "mlp"]
    return {
        "llama in jnp": Model(
            llama,
            (llama_params(), tokens),
            [
                *("rmsnorm", "linear_cross_entropy", "embedding", "rmsnorm", "rope", "rope", "fused"),
                *("linear_add_rmsnorm", "gated_mlp"),
            ],
        ),
        "classifier in jnp": Model(classifier, (p, x, labels), ["mlp", "cross_entropy", "fused"]),
        "nnx DiT": of_nnx(DiT(nnx.Rngs(0)), x, draw(B, N), becomes=["fused", "mlp", "fused"]),
        "nnx encoder": of_nnx(Encoder(nnx.Rngs(0)), x, becomes=[*["fused"] * 3, "mlp"]),
        "nnx gated MLP with dropout": of_nnx(Gated(nnx.Rngs(0)), x, key, becomes=["rmsnorm", "gated_mlp", "fused"]),
        "equinox transformer": of_equinox(Equinox(key), x, becomes=block, call=lambda m, x: each(m)(x)),
        "equinox mixer": of_equinox(
            Mixer(key),
            x,
            becomes=["layernorm", "fused", "linear", "fused", "mlp"],
            call=lambda m, x: each(m)(x),
        ),
        "equinox checkpoint": of_equinox(
            Equinox(jax.random.key(5)), x, becomes=block, call=lambda m, x: each(eqx.filter_checkpoint(m))(x)
        ),
    }
