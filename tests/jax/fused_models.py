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

B, T, N, HEADS, CLASSES = 2, 4, 32, 2, 12
RNG = np.random.default_rng(11)


class Model(NamedTuple):
    """A model.

    Attributes:
        function: of its parameters and of inputs.
        args: the parameters, then the inputs.
        becomes: what its parts become in float32, in order.
        attends: which of them are attention in bfloat16, which has a kernel of it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    becomes: list[str]
    attends: tuple[int, ...] = ()


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape) * 0.5, jnp.float32)


def of_nnx(
    module: nnx.Module,
    *inputs: Any,
    becomes: list[str],
    call: Callable[..., Any] | None = None,
    attends: tuple[int, ...] = (),
) -> Model:
    graph, state = nnx.split(module)
    run = call or (lambda module, *inputs: module(*inputs))
    return Model(lambda state, *inputs: run(nnx.merge(graph, state), *inputs), (state, *inputs), becomes, attends)


def of_equinox(
    module: Any, *inputs: Any, becomes: list[str], call: Callable[..., Any], attends: tuple[int, ...] = ()
) -> Model:
    arrays, static = eqx.partition(module, eqx.is_inexact_array)
    return Model(
        lambda arrays, *inputs: call(eqx.combine(arrays, static), *inputs), (arrays, *inputs), becomes, attends
    )


def rms(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(v.dtype), v)


def turned(x: jax.Array) -> jax.Array:
    r = x.shape[-1] // 2
    angles = (jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(r) / r))[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


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

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """Two layers whose attention shares a causal mask, with the head of the embedding and a smoothed loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words, self.places = nnx.Embed(CLASSES, N, rngs=rngs), nnx.Embed(T, N, rngs=rngs)
        self.layers = nnx.List([Encoder(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(N, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = (self.words(tokens[:, :-1]) + self.places(jnp.arange(T))[None]).astype(self.norm.scale[...].dtype)
        mask = nnx.make_causal_mask(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.words.attend(self.norm(x)).astype(jnp.promote_types(x.dtype, jnp.float32))
        logp = jax.nn.log_softmax(logits)
        at = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
        return -(0.9 * at + 0.1 * logp.mean(-1)).mean()


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


def grouped(p: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """A decoder's layer with rotated heads of 64 columns, of which several share keys, and its loss."""
    x = p["embed"][tokens[:, :-1]]
    y = rms(x, p["n1"])
    q, k, v = ((y @ p[name]).reshape(B, T, -1, 64) for name in "qkv")
    q, k = turned(q), turned(k)
    k, v = (jnp.repeat(each, 2, axis=2) for each in (k, v))
    x = x + attend(q, k, v).reshape(B, T, -1) @ p["o"]
    y = rms(x, p["n2"])
    gate, up = jnp.split(y @ p["gate_up"], 2, -1)
    x = x + (jax.nn.silu(gate) * up) @ p["down"]
    return optax.softmax_cross_entropy_with_integer_labels(rms(x, p["n3"]) @ p["head"], tokens[:, 1:]).mean()


def grouped_params() -> dict[str, jax.Array]:
    shapes = {"embed": (CLASSES, N), "head": (N, CLASSES), "q": (N, 128), "k": (N, 64), "v": (N, 64), "o": (128, N)}
    shapes |= {"gate_up": (N, 4 * N), "down": (2 * N, N)}
    return {name: draw(*shape) for name, shape in shapes.items()} | {f"n{i}": draw(N) for i in (1, 2, 3)}


class Bert(nnx.Module):
    """An encoder with norms after its parts, a mask of padding, and a loss of the words that were hidden."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words, self.places = nnx.Embed(CLASSES, N, rngs=rngs), nnx.Embed(T, N, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(N, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(HEADS, N, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(N, 2 * N, rngs=rngs), nnx.Linear(2 * N, N, rngs=rngs)

    def __call__(self, words: jax.Array, kept: jax.Array, labels: jax.Array) -> jax.Array:
        embedded = self.words(words) + self.places(jnp.arange(T))[None]
        x = self.norms[0](embedded.astype(self.up.kernel[...].dtype))
        x = self.norms[1](x + self.attention(x, mask=kept[:, None, None]))
        x = self.norms[2](x + self.down(nnx.gelu(self.up(x), approximate=False)))
        logp = jax.nn.log_softmax(self.words.attend(x))
        at = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
        return -(at * kept).sum() / kept.sum()


def t5(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A layer with a learned bias of relative places, scores without a scale, and a gate of GELU."""
    y = rms(x, p["n1"])
    q, k, v = ((y @ p[name]).reshape(B, T, HEADS, -1) for name in "qkv")
    ahead = jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None], -2, 2) + 2
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + p["bias"][ahead].transpose(2, 0, 1)
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, N) @ p["o"]
    y = rms(x, p["n2"])
    return x + (jax.nn.gelu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def t5_params() -> dict[str, jax.Array]:
    shapes = {**dict.fromkeys("qkvo", (N, N)), "gate": (N, 2 * N), "up": (N, 2 * N), "down": (2 * N, N)}
    return {name: draw(*shape) for name, shape in {**shapes, "bias": (5, HEADS), "n1": (N,), "n2": (N,)}.items()}


class Mamba(eqx.Module):
    """A block of a state-space model of one sequence: a causal convolution, a scan over places, and a gate."""

    norm: eqx.nn.RMSNorm
    into: eqx.nn.Linear
    out: eqx.nn.Linear
    step: eqx.nn.Linear
    taps: jax.Array
    decay: jax.Array

    def __init__(self, key: jax.Array) -> None:
        self.norm, keys = eqx.nn.RMSNorm(N), jax.random.split(key, 3)
        self.into, self.out = eqx.nn.Linear(N, 2 * N, key=keys[0]), eqx.nn.Linear(N, N, key=keys[1])
        self.step = eqx.nn.Linear(N, N, key=keys[2])
        self.taps, self.decay = draw(3, N), draw(N)

    def __call__(self, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(jax.vmap(lambda row: self.into(self.norm(row)))(x), 2, -1)
        padded = jnp.pad(y, ((2, 0), (0, 0)))
        y = jax.nn.silu(sum(padded[k : k + T] * self.taps[k] for k in range(3)))
        delta = jax.nn.softplus(jax.vmap(self.step)(y))

        def advance(state: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kept, new = each
            state = state * kept + new
            return state, state

        _, states = jax.lax.scan(advance, jnp.zeros_like(x[0]), (jnp.exp(-delta * jnp.exp(self.decay)), delta * y))
        return x + jax.vmap(self.out)(states * jax.nn.silu(gate))


def classifier(p: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
    """An MLP with biases and a mask, as tutorials write it."""
    h = jax.nn.relu(x @ p["w1"] + p["b1"])
    logp = jax.nn.log_softmax(h @ p["w2"] + p["b2"])
    at = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -jnp.where(labels > 0, at, 0).sum() / (labels > 0).sum()


NAMES = (
    "llama in jnp", "grouped heads in jnp", "nnx GPT", "nnx BERT", "T5 in jnp", "equinox Mamba", "classifier in jnp",
    "nnx DiT", "nnx encoder", "nnx gated MLP with dropout", "equinox transformer", "equinox mixer",
    "equinox checkpoint",
)  # fmt: skip


def make() -> dict[str, Model]:
    """The models by name, see NAMES. Their parameters are drawn, which takes seconds."""
    x, key = draw(B, T, N), jax.random.key(3)
    tokens = jnp.asarray(RNG.integers(0, CLASSES, (B, T + 1)), jnp.int32)
    labels = jnp.asarray(RNG.integers(0, CLASSES, (B, T)), jnp.int32)
    p = {"w1": draw(N, N), "b1": draw(N), "w2": draw(N, CLASSES), "b2": draw(CLASSES)}
    each = jax.vmap
    kept = jnp.asarray([[1] * T, [1] * (T - 1) + [0]], jnp.float32)
    block = ["layernorm", "softmax", "add_rmsnorm", "mlp"]
    return {
        "llama in jnp": Model(
            llama,
            (llama_params(), tokens),
            [
                *("rmsnorm", "linear_cross_entropy", "embedding", "rmsnorm", "rope", "rope", "fused"),
                *("linear_add_rmsnorm", "gated_mlp"),
            ],
            (6,),
        ),
        "grouped heads in jnp": Model(
            grouped,
            (grouped_params(), tokens),
            [
                *("rmsnorm", "qkv_rope", "fused", "linear_add_rmsnorm", "gated_mlp", "add_rmsnorm"),
                *("linear_cross_entropy", "embedding"),
            ],
            (2,),
        ),
        "nnx GPT": of_nnx(
            GPT(nnx.Rngs(0)),
            tokens,
            becomes=[*["fused"] * 6, "mlp", "mlp", "fused", "linear_cross_entropy", "embedding", "embedding"],
            attends=(2, 3),
        ),
        "nnx BERT": of_nnx(
            Bert(nnx.Rngs(0)),
            tokens[:, :-1],
            kept,
            labels,
            becomes=[*["fused"] * 4, "mlp", "linear_cross_entropy", "embedding", "embedding"],
            call=lambda m, words, kept, labels: m(words, kept > 0, labels),
            attends=(2,),
        ),
        "T5 in jnp": Model(t5, (t5_params(), x), ["rmsnorm", "fused", "linear_add_rmsnorm", "gated_mlp", "embedding"]),
        "equinox Mamba": of_equinox(
            Mamba(key),
            x,
            becomes=["rmsnorm", "fused", "linear", "fused", "fused", "linear", "fused"],
            call=lambda m, x: each(m)(x),
        ),
        "classifier in jnp": Model(classifier, (p, x, labels), ["linear", "linear_cross_entropy"]),
        "nnx DiT": of_nnx(DiT(nnx.Rngs(0)), x, draw(B, N), becomes=["fused", "mlp", "fused"]),
        "nnx encoder": of_nnx(Encoder(nnx.Rngs(0)), x, becomes=[*["fused"] * 3, "mlp"], attends=(1,)),
        "nnx gated MLP with dropout": of_nnx(Gated(nnx.Rngs(0)), x, key, becomes=["rmsnorm", "gated_mlp", "fused"]),
        "equinox transformer": of_equinox(Equinox(key), x, becomes=block, call=lambda m, x: each(m)(x), attends=(1,)),
        "equinox mixer": of_equinox(
            Mixer(key),
            x,
            becomes=["layernorm", "fused", "linear", "fused", "mlp"],
            call=lambda m, x: each(m)(x),
        ),
        "equinox checkpoint": of_equinox(
            Equinox(jax.random.key(5)),
            x,
            becomes=block,
            call=lambda m, x: each(eqx.filter_checkpoint(m))(x),
            attends=(1,),
        ),
    }
