"""A decoder in equinox, trained by optax: our norm, gated MLP and loss inside of one jitted step.

python examples/gallery/equinox_decoder.py --steps 60
"""

from __future__ import annotations

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from text import VOCABULARY, windows

import cute_ops_jax
from cute_ops_jax.equinox import AddRMSNorm, RMSNorm

Array = jax.Array


class Layer(eqx.Module):
    """Causal attention and a gated MLP; the residual stream goes beside them."""

    qkv: Array
    attention_out: Array
    gate_up: Array
    down: Array
    attention_norm: AddRMSNorm
    mlp_norm: AddRMSNorm
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: Array) -> None:
        keys, init = jax.random.split(key, 4), jax.nn.initializers.lecun_normal()
        self.qkv, self.attention_out = init(keys[0], (width, 3 * width)), init(keys[1], (width, width))
        self.gate_up, self.down = init(keys[2], (width, 6 * width)), init(keys[3], (3 * width, width))
        self.attention_norm, self.mlp_norm = (AddRMSNorm(width, use_bias=False) for _ in range(2))
        self.heads = heads

    def __call__(self, x: Array, residual: Array) -> tuple[Array, Array]:
        x, residual = self.attention_norm(x, residual)
        q, k, v = jnp.split((x @ self.qkv).reshape(*x.shape[:-1], self.heads, -1), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x, residual = self.mlp_norm(mixed @ self.attention_out, residual)
        return cute_ops_jax.swiglu(x @ self.gate_up) @ self.down, residual


class Decoder(eqx.Module):
    embedding: Array
    layers: list[Layer]
    norm: RMSNorm

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, *, key: Array) -> None:
        first, *keys = jax.random.split(key, layers + 1)
        self.embedding = 0.02 * jax.random.normal(first, (VOCABULARY, width))
        self.layers = [Layer(width, heads, k) for k in keys]
        self.norm = RMSNorm(width, use_bias=False)

    def __call__(self, window: Array) -> Array:
        """The mean loss, in nats per byte, of ``window: int[batch, seqlen + 1]``."""
        x = cute_ops_jax.embedding(window[:, :-1], self.embedding)
        residual = jnp.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return cute_ops_jax.linear_cross_entropy(self.norm(x + residual), self.embedding, window[:, 1:])


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    model = Decoder(key=jax.random.key(0))
    optimizer = optax.adamw(3e-3)
    memory = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first")
    def update(window: Array, model: Decoder, memory: optax.OptState) -> tuple[Decoder, optax.OptState, Array]:
        loss, grads = eqx.filter_value_and_grad(lambda model: model(window))(model)
        updates, memory = optimizer.update(grads, memory, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), memory, loss

    losses = []
    for step, window in enumerate(windows(batch=16, seqlen=64, steps=options.steps)):
        model, memory, loss = update(jnp.asarray(window), model, memory)
        losses.append(float(loss))
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f} nats per byte")
    return losses


if __name__ == "__main__":
    main()
