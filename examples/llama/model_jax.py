"""The decoder in JAX. ``Ops`` is all that differs between our ops and JAX's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from config import ADAM_EPS, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Config, initial_weights, rotary
from jax import Array

import cute_ops_jax

# By default XLA multiplies float32 matrices in TF32 on a GPU; PyTorch does not.
jax.config.update("jax_default_matmul_precision", "highest")


class Ops(NamedTuple):
    rmsnorm: Callable[..., Array]
    add_rmsnorm: Callable[..., tuple[Array, Array]]
    silu_mul: Callable[[Array, Array], Array]


def own_rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def own_add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    residual = x + residual
    return own_rmsnorm(residual, weight, eps), residual


def own_silu_mul(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


OPS = {
    "own": Ops(own_rmsnorm, own_add_rmsnorm, own_silu_mul),
    "our": Ops(cute_ops_jax.rmsnorm, cute_ops_jax.add_rmsnorm, cute_ops_jax.silu_mul),
}


def loss(params: dict[str, Array], window: Array, config: Config, ops: Ops) -> Array:
    """The mean loss, in nats per byte, of ``window: int32[batch, seqlen + 1]``."""
    tokens, following = window[:, :-1], window[:, 1:]
    residual = params["embedding"][tokens]
    x = ops.rmsnorm(residual, params["layers.0.attention_norm"], eps=EPS)
    for i in range(config.layers):
        weight = {n: params[f"layers.{i}.{n}"] for n in ("qkv", "attention_out", "gate", "up", "down")}
        x = attention(x @ weight["qkv"].T, config)
        x = x @ weight["attention_out"].T
        x, residual = ops.add_rmsnorm(x, residual, params[f"layers.{i}.mlp_norm"], eps=EPS)
        x = ops.silu_mul(x @ weight["gate"].T, x @ weight["up"].T)
        x = x @ weight["down"].T
        last = i + 1 == config.layers
        norm = params["norm"] if last else params[f"layers.{i + 1}.attention_norm"]
        x, residual = ops.add_rmsnorm(x, residual, norm, eps=EPS)
    logits = (x @ params["embedding"].T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], axis=-1)
    return -jnp.mean(chosen)


def attention(qkv: Array, config: Config) -> Array:
    c = config
    q, k, v = jnp.moveaxis(qkv.reshape(c.batch, c.seqlen, 3, c.heads, c.headdim), 2, 0)
    cos, sin = (jnp.asarray(t, qkv.dtype)[:, None, :] for t in rotary(c))

    def rotate(x: Array) -> Array:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    # cuDNN's fused attention takes half precision only.
    fused = "cudnn" if jax.default_backend() == "gpu" and qkv.dtype == jnp.bfloat16 else None
    out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation=fused)
    return out.reshape(c.batch, c.seqlen, c.hidden)


def adamw(param: Array, grad: Array, mean: Array, square: Array, count: Array) -> tuple[Array, Array, Array]:
    """``torch.optim.AdamW``, step for step."""
    mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    square = BETAS[1] * square + (1 - BETAS[1]) * grad * grad
    size = LEARNING_RATE / (1 - BETAS[0] ** count)
    scale = jnp.sqrt(square) / jnp.sqrt(1 - BETAS[1] ** count) + ADAM_EPS
    new = param * (1 - LEARNING_RATE * WEIGHT_DECAY) - size * mean / scale
    return tuple(a.astype(param.dtype) for a in (new, mean, square))  # type: ignore[return-value]


@partial(jax.jit, static_argnames=("config", "ops"), donate_argnums=0)
def update(state: Any, window: Array, config: Config, ops: Ops) -> tuple[Any, Array]:
    params, means, squares, count = state
    value, grads = jax.value_and_grad(loss)(params, window, config, ops)
    count = count + 1
    new = {n: adamw(params[n], grads[n], means[n], squares[n], count) for n in params}
    params, means, squares = ({n: new[n][i] for n in new} for i in range(3))
    return (params, means, squares, count), value


def make_step(config: Config, ops: str, dtype: str = "float32") -> Callable[[np.ndarray], float]:
    """A training step: takes a batch, updates the weights, returns the loss."""
    params = {n: jnp.asarray(w, dtype) for n, w in initial_weights(config).items()}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state: Any = (params, zeros, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))

    def step(window: np.ndarray) -> float:
        nonlocal state
        state, value = update(state, jnp.asarray(window), config, OPS[ops])
        return float(value)

    return step
