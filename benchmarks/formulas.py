"""Expressions, each one function for ours, for PyTorch and for JAX: what generated kernels are measured by.

Those whose names begin with ``row_`` reduce rows. Beside those of the package, these are what models and losses
consist of, and some that no library has.

    python benchmarks/expressions.py --out out/benchmarks
    python benchmarks/device_time.py --out out/benchmarks --ops row_rms mish
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from cute_ops import fused

EPS, CAP = 1e-6, 30.0
ROW = {"axis": -1, "keepdims": True}
Call = Callable[..., Any]


def halves(x: Any) -> tuple[Any, Any]:
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


def softcap(xp: Any, x: Any) -> Any:
    return CAP * xp.tanh(x / CAP)


def gelu_add(xp: Any, x: Any, shift: Any, residual: Any) -> Any:
    return xp.gelu(x + shift) + residual


def mish(xp: Any, x: Any) -> Any:
    return x * xp.tanh(xp.softplus(x))


def hardswish(xp: Any, x: Any) -> Any:
    return x * xp.clip(x + 3.0, 0.0, 6.0) / 6.0


def reglu(xp: Any, x: Any) -> Any:
    gate, up = halves(x)
    return xp.relu(gate) * up


def gated_tanh(xp: Any, x: Any) -> Any:
    """WaveNet's activation."""
    signal, gate = halves(x)
    return xp.tanh(signal) * xp.sigmoid(gate)


def layer_scale(xp: Any, x: Any, gain: Any, residual: Any) -> Any:
    return residual + gain * x


def modulate(xp: Any, x: Any, gain: Any, shift: Any) -> Any:
    """What a diffusion transformer does with the output of a norm."""
    return x * (1.0 + gain) + shift


def dequantized(xp: Any, x: Any, of_row: Any, of_column: Any) -> Any:
    return x * of_row * of_column


def softplus_shifted(xp: Any, x: Any, shift: Any) -> Any:
    """The step sizes of a state space model."""
    return xp.softplus(x + shift)


def scaled_sigmoid(xp: Any, x: Any, factor: Any) -> Any:
    return xp.sigmoid(x * factor)


def gated_mix(xp: Any, x: Any, y: Any, gate: Any) -> Any:
    """What a highway layer passes on."""
    return y + xp.sigmoid(gate) * (x - y)


def huber(xp: Any, x: Any, y: Any) -> Any:
    distance = xp.abs(x - y)
    return xp.where(distance < 1.0, 0.5 * distance * distance, distance - 0.5)


def row_rms(xp: Any, x: Any, weight: Any) -> Any:
    return x * xp.rsqrt(xp.mean(x * x, **ROW) + EPS) * weight


def row_add_rms(xp: Any, x: Any, residual: Any, weight: Any) -> Any:
    return row_rms(xp, x + residual, weight)


def row_rms_beside_sum(xp: Any, x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
    """What enters a block of a transformer, and its residual stream."""
    added = x + residual
    return row_rms(xp, added, weight), added


def row_gated_rms(xp: Any, x: Any, weight: Any) -> Any:
    gate, up = halves(x)
    return row_rms(xp, xp.silu(gate) * up, weight)


def row_layernorm(xp: Any, x: Any, weight: Any, shift: Any) -> Any:
    x = row_centred(xp, x)
    return row_rms(xp, x, weight) + shift


def row_centred(xp: Any, x: Any) -> Any:
    return x - xp.mean(x, **ROW)


def row_unit(xp: Any, x: Any) -> Any:
    return x * xp.rsqrt(xp.sum(x * x, **ROW) + EPS)


def row_range(xp: Any, x: Any) -> Any:
    """To numbers from 0 to 1."""
    least = xp.min(x, **ROW)
    return (x - least) / (xp.max(x, **ROW) - least)


def row_softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - xp.max(x, **ROW))
    return e / xp.sum(e, **ROW)


def row_tempered_softmax(xp: Any, x: Any, scale: Any) -> Any:
    return row_softmax(xp, x * scale)


def row_relu2_attention(xp: Any, x: Any) -> Any:
    weights = xp.relu(x) ** 2
    return weights / (xp.sum(weights, **ROW) + EPS)


def row_capped_log_softmax(xp: Any, x: Any) -> Any:
    capped = softcap(xp, x)
    shifted = capped - xp.max(capped, **ROW)
    return shifted - xp.log(xp.sum(xp.exp(shifted), **ROW))


def row_log_sum_exp(xp: Any, x: Any) -> Any:
    top = xp.max(x, **ROW)
    return top + xp.log(xp.sum(xp.exp(x - top), **ROW))


def row_cosine(xp: Any, x: Any, y: Any) -> Any:
    return xp.sum(x * y, **ROW) * xp.rsqrt(xp.sum(x * x, **ROW) * xp.sum(y * y, **ROW) + EPS)


SHAPES = {
    "x": "*m n", "y": "*m n", "gate": "*m n", "residual": "*m n", "shift": "n", "gain": "n", "weight": "n",
    "of_column": "n", "of_row": "*m 1", "scale": "*m 1", "factor": "",
}  # fmt: skip
PACKED = (reglu, gated_tanh, row_gated_rms)
FUNCTIONS: dict[str, Call] = {
    function.__name__: function
    for function in (
        softcap, gelu_add, mish, hardswish, reglu, gated_tanh, layer_scale, modulate, dequantized, softplus_shifted,
        scaled_sigmoid, gated_mix, huber, row_rms, row_add_rms, row_gated_rms, row_layernorm, row_centred, row_unit,
        row_range, row_softmax, row_tempered_softmax, row_relu2_attention, row_capped_log_softmax, row_log_sum_exp,
        row_cosine, row_rms_beside_sum,
    )
}  # fmt: skip
# The same by functions that the frameworks have, whose gradients are better than those of what they are written with.
BY_LIBRARY: dict[str, Call] = {
    "row_softmax": lambda xp, x: xp.softmax(x, -1),
    "row_tempered_softmax": lambda xp, x, scale: xp.softmax(x * scale, -1),
    "row_capped_log_softmax": lambda xp, x: xp.log_softmax(softcap(xp, x), -1),
    "row_log_sum_exp": lambda xp, x: xp.logsumexp(x, -1, keepdims=True),
}


def declared(function: Call) -> Any:
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    return fused(function, operands={n: "*m 2n" if n == "x" and function in PACKED else SHAPES[n] for n in names})


OPS = tuple(map(declared, FUNCTIONS.values()))


class Torch:
    """PyTorch's words."""

    abs, clip, exp, log, rsqrt, tanh, where = (
        torch.abs,
        torch.clip,
        torch.exp,
        torch.log,
        torch.rsqrt,
        torch.tanh,
        torch.where,
    )
    max, mean, min, sum, logsumexp = torch.amax, torch.mean, torch.amin, torch.sum, torch.logsumexp
    gelu, relu, sigmoid, silu, softplus = F.gelu, F.relu, torch.sigmoid, F.silu, F.softplus
    softmax, log_softmax = F.softmax, F.log_softmax


def in_torch() -> dict[str, Call]:
    """By name: computed in float32, rounded once; a number per row is float32."""

    def call(function: Call) -> Call:
        def rounded(*tensors: torch.Tensor) -> Any:
            found, dtype = function(Torch, *(t.float() for t in tensors)), tensors[0].dtype
            each = [
                out if out.shape[-1] == 1 else out.to(dtype)
                for out in (found if isinstance(found, tuple) else (found,))
            ]
            return tuple(each) if isinstance(found, tuple) else each[0]

        return rounded

    return {name: call(function) for name, function in {**FUNCTIONS, **BY_LIBRARY}.items()}


def in_jax() -> dict[str, Call]:
    """By name: the same in JAX."""
    import jax
    import jax.numpy as jnp

    words = SimpleNamespace(**vars(jnp))
    for name in ("log_softmax", "logsumexp", "relu", "sigmoid", "silu", "softmax", "softplus"):
        setattr(words, name, getattr(jax.nn, name))
    words.gelu, words.rsqrt = lambda x: jax.nn.gelu(x, approximate=False), jax.lax.rsqrt
    # At a bound the gradient of JAX's is a half, in PyTorch and here 1.
    words.clip = lambda x, low, high: jnp.where(x < low, low, jnp.where(x > high, high, x))

    def call(function: Call) -> Call:
        def rounded(*arrays: Any) -> Any:
            found = function(words, *(a.astype(jnp.float32) for a in arrays))
            return jax.tree.map(lambda out: out if out.shape[-1] == 1 else out.astype(arrays[0].dtype), found)

        return rounded

    return {name: call(function) for name, function in {**FUNCTIONS, **BY_LIBRARY}.items()}
