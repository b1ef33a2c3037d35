"""Who is measured. Every contender of an op takes the same tensors and returns the same outputs.

A contender that is not installed, or that has no such op, is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import formulas
import fp8
import layers
import models
import torch
import torch.nn.functional as F
from problems import BY_NAME, Buffers

EPS = 1e-6
BETAS = 0.9, 0.999  # AdamW's
Call = Callable[..., Any]
TORCH = ("torch eager", "torch.compile", "quack", "Liger", "ours (torch)")
JAX = ("XLA (jit)", "ours (JAX)")
ALL = TORCH + JAX
# What max-autotune tries of generated kernels; not its search beyond them, which compiles one candidate after another.
COMPILE_OPTIONS = {"max_autotune": True}


def make(contender: str, op: str, attrs: Mapping[str, Any] | None = None) -> Call | None:
    """The contender's function for an op: tensors in declaration order to an output or a tuple of them.

    Args:
        attrs: attributes that differ from the declaration's defaults.
    """
    makers = {
        "torch eager": _eager,
        "torch.compile": _compiled,
        "quack": _quack,
        "Liger": _liger,
        "ours (torch)": _ours_torch,
        "XLA (jit)": _xla,
        "ours (JAX)": _ours_jax,
    }
    if op in layers.LAYERS:
        return layers.make(contender, op)
    if contender in JAX and BY_NAME[op].mutates:
        return None  # the arrays are not donated, so a program would copy what it writes
    try:
        return makers[contender](op, attrs or {})
    except ImportError:
        return None


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def torch_calls(
    function: Call, direction: str, sets: Sequence[Buffers], wanted: Sequence[bool]
) -> list[Callable[[], Any]]:
    """One closure per buffer set. A backward call goes through autograd, on a forward call made here; a call of both
    makes its own.

    Args:
        wanted: per input, whether it has a gradient.
    """
    calls = []
    for inputs, cotangents in sets:
        if direction == "fwd":
            calls.append(lambda inputs=inputs: as_tuple(function(*inputs)))
            continue
        given = tuple(t.detach().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True))
        leaves = tuple(t for t in given if t.requires_grad)
        if direction == "both":
            calls.append(lambda a=given, x=leaves, g=cotangents: torch.autograd.grad(as_tuple(function(*a)), x, g))
            continue
        outputs = as_tuple(function(*given))
        calls.append(lambda o=outputs, x=leaves, g=cotangents: torch.autograd.grad(o, x, g, retain_graph=True))
    return calls


def _eager(op: str, attrs: Mapping[str, Any]) -> Call:
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype != x.dtype:  # F.rms_norm wants one dtype
            return (F.rms_norm(x.float(), x.shape[-1:], None, EPS) * weight.float()).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return rmsnorm(total, weight).to(x.dtype), total

    def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gelu(gate) * up

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=attrs.get("approximate", "tanh"))

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        r = cos.shape[-1]
        a, b, rest = x[..., :r].float(), x[..., r : 2 * r].float(), x[..., 2 * r :]
        c, s = cos[..., None, :].float(), sin[..., None, :].float()
        return torch.cat([(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), rest], -1)

    def qk_norm_rope(
        q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Rounded once, at the end.
        q_out = rope(rmsnorm(q.float(), q_weight.float()), *tables)
        return q_out.to(q.dtype), rope(rmsnorm(k.float(), k_weight.float()), *tables).to(k.dtype)

    def rope_bwd_joined(
        dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat([rope(dq, cos, -sin), rope(dk, cos, -sin), dv], -2)

    def cross_entropy_step(
        x: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logs = F.log_softmax(x.float(), -1)
        loss = -logs.gather(-1, target[..., None])[..., 0]
        classes = torch.arange(x.shape[-1], device=x.device)
        return ((logs.exp() - (classes == target[..., None]).float()) * dloss[..., None]).to(x.dtype), loss

    def swiglu_again(x: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (g, u), d = x.float().chunk(2, -1), dout.float()
        s = torch.sigmoid(g)
        return torch.cat([d * u * s * (1 + g * (1 - s)), d * g * s], -1).to(x.dtype), (g * s * u).to(x.dtype)

    def adamw(
        param: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, *numbers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        p, g, m, v = param.float(), grad.float(), mean.float(), square.float()
        keep, size, scale = (number[..., None] for number in numbers)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v.abs() + (1 - BETAS[1]) * g * g
        p = keep * p - size * m / (scale.abs() * v.sqrt() + attrs["eps"])
        return p.to(param.dtype), m.to(mean.dtype), v.to(square.dtype)

    def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # It wants (batch, channels, seqlen), and zeros before each sequence.
        (_, s, n), taps = x.shape, weight.shape[1] - 1
        out = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=taps, groups=n)[..., :s].transpose(1, 2)
        last = F.pad(x[:, -taps:], (0, 0, max(taps - s, 0), 0))
        return F.silu(out) if attrs.get("activation") == "silu" else out, last

    def append_kv(
        k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor,
        *tables: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        for cache, new in ((k_cache, rope(k, *tables) if tables else k), (v_cache, v)):
            if slots.dim() == 2:  # contiguous: the first slots of each sequence
                cache[:, : slots.shape[1]] = new
            else:
                cache.flatten(0, 1).index_copy_(0, slots, new)
        return k_cache, v_cache

    return {
        "append_kv": append_kv,
        "causal_conv1d": causal_conv1d,
        "cross_entropy_step": cross_entropy_step,
        "swiglu_again": swiglu_again,
        "adamw": adamw,
        "rmsnorm": rmsnorm,
        "add_rmsnorm": add_rmsnorm,
        "layernorm": layernorm,
        "silu_mul": silu_mul,
        "gelu_mul": gelu_mul,
        "swiglu": lambda x: silu_mul(*x.chunk(2, -1)),
        "geglu": lambda x: gelu_mul(*x.chunk(2, -1)),
        "silu": F.silu,
        "gelu": gelu,
        "relu2": lambda x: F.relu(x).square(),
        "rope": rope,
        "qk_norm_rope": qk_norm_rope,
        "rope_bwd_joined": rope_bwd_joined,
        # In float32, as the softmax: what it gives for bfloat16 logits is a bfloat16 loss.
        "cross_entropy": lambda x, target: F.cross_entropy(x.float(), target, reduction="none"),
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1),
        **fp8.in_torch(attrs, EPS),
        **models.in_torch(attrs),
        **formulas.in_torch(),
    }[op]


def _compiled(op: str, attrs: Mapping[str, Any]) -> Call:
    return torch.compile(_eager(op, attrs), fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)


def _quack(op: str, attrs: Mapping[str, Any]) -> Call | None:
    from quack import rmsnorm

    def add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rmsnorm(x, weight, residual=residual, prenorm=True, eps=EPS)

    def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        from quack import cross_entropy

        return cross_entropy(x, target, reduction="none")

    def softmax(x: torch.Tensor) -> torch.Tensor:
        from quack import softmax

        return softmax(x)

    calls = {
        "rmsnorm": lambda x, weight: rmsnorm(x, weight, eps=EPS),
        "add_rmsnorm": add_rmsnorm,
        "cross_entropy": cross_entropy,
        "softmax": softmax,
        **models.in_quack(attrs),
    }
    return calls.get(op)


def _liger(op: str, attrs: Mapping[str, Any]) -> Call | None:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if attrs.get("approximate", "tanh") != "tanh":
            raise NotImplementedError("Liger has the tanh approximation only")
        return LigerGELUMulFunction.apply(gate, up)

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != 2 * cos.shape[-1]:
            raise NotImplementedError("Liger turns whole heads")
        # It wants a k as well, and (batch, heads, positions, elements); it reads the first half of its tables.
        k = x.new_empty(x.shape[0], 1, x.shape[1], x.shape[3])
        return LigerRopeFunction.apply(x.transpose(1, 2), k, cos[None], sin[None])[0].transpose(1, 2)

    def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        # ignore_index, lse_square_scale, label_smoothing, reduction
        return LigerCrossEntropyFunction.apply(x, target, None, -100, 0.0, 0.0, "none")[0]

    def softmax(x: torch.Tensor) -> torch.Tensor:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return LigerSoftmaxFunction.apply(x)

    # in_place=False: its default overwrites the incoming gradient, which others read after it.
    return {
        "rmsnorm": lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
        "add_rmsnorm": lambda x, r, weight: LigerFusedAddRMSNormFunction.apply(x, r, weight, EPS, 0.0, "llama", False),
        "layernorm": lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS),
        "silu_mul": LigerSiLUMulFunction.apply,
        "gelu_mul": gelu_mul,
        "swiglu": lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1)),
        "geglu": lambda x: gelu_mul(*x.chunk(2, -1)),
        "rope": rope,
        "cross_entropy": cross_entropy,
        "softmax": softmax,
    }.get(op)


def overwrites_inputs(contender: str, op: str, direction: str) -> bool:
    """Liger's gated products write their gradients over their inputs, its rope its output over its input, its cross
    entropy the gradient in the forward: they need copies, as all need of caches, which they write.
    """
    if op in BY_NAME and BY_NAME[op].mutates:
        return True
    return contender == "Liger" and (op in ("rope", "cross_entropy") or (direction == "bwd" and "norm" not in op))


def _ours_torch(op: str, attrs: Mapping[str, Any]) -> Call:
    import cute_ops_torch

    if op in formulas.FUNCTIONS:
        return cute_ops_torch.register(BY_NAME[op], namespace="benchmarks")
    function = getattr(cute_ops_torch, op, None)  # None for a part of our functions, which is an op only
    if BY_NAME[op].mutates:
        return _returning_written(function, op)
    return _with_attributes(function or cute_ops_torch.register(BY_NAME[op]), op, attrs)


def _returning_written(function: Call, op: str) -> Call:
    """The function of an op without outputs, which returns what it has written."""
    places = [i for i, name in enumerate(BY_NAME[op].inputs) if name in BY_NAME[op].mutates]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        function(*tensors)
        return tuple(tensors[i] for i in places)

    return call


def _ours_jax(op: str, attrs: Mapping[str, Any]) -> Call:
    import cute_ops_jax

    return _with_attributes(cute_ops_jax.register(BY_NAME[op]), op, attrs)


def _with_attributes(function: Call, op: str, attrs: Mapping[str, Any]) -> Call:
    full = {"eps": EPS, **attrs} if "norm" in op else dict(attrs)
    if op.endswith(("cross_entropy", "cross_entropy_metrics")):
        full["reduction"] = "none"
    return (lambda *tensors: function(*tensors, **full)) if full else function


def _xla(op: str, attrs: Mapping[str, Any]) -> Call:
    """Of its forward, a backward takes inputs, outputs and what was reduced, as in a program that holds both. What else
    would lie between a forward and a backward program here is every intermediate value in float32.
    """
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    def kept(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name.startswith("reduce_") or primitive.name == "name"

    def rmsnorm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        out = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
        return (out * weight.astype(jnp.float32)).astype(x.dtype)

    def add_rmsnorm(x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        total = checkpoint_name((x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(residual.dtype), "total")
        return rmsnorm(total, weight).astype(x.dtype), total

    def layernorm(x: Any, weight: Any, bias: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        out = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
        return (out * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)

    def silu_mul(gate: Any, up: Any) -> Any:
        wide = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return wide.astype(gate.dtype)

    def gelu_mul(gate: Any, up: Any) -> Any:
        return (gelu32(gate) * up.astype(jnp.float32)).astype(gate.dtype)

    def cross_entropy(x: Any, target: Any) -> Any:
        wide = x.astype(jnp.float32)
        picked = jnp.take_along_axis(wide, target[..., None].astype(jnp.int32), -1)[..., 0]
        return jax.nn.logsumexp(wide, -1) - picked

    def gelu32(x: Any) -> Any:
        return jax.nn.gelu(x.astype(jnp.float32), approximate=attrs.get("approximate", "tanh") == "tanh")

    def rope(x: Any, cos: Any, sin: Any) -> Any:
        r = cos.shape[-1]
        a, b = x[..., :r].astype(jnp.float32), x[..., r : 2 * r].astype(jnp.float32)
        c, s = cos[..., None, :].astype(jnp.float32), sin[..., None, :].astype(jnp.float32)
        turned = jnp.concatenate([a * c - b * s, b * c + a * s], -1).astype(x.dtype)
        return jnp.concatenate([turned, x[..., 2 * r :]], -1)

    def qk_norm_rope(q: Any, k: Any, q_weight: Any, k_weight: Any, *tables: Any) -> tuple[Any, Any]:
        q_out = rope(rmsnorm(q.astype(jnp.float32), q_weight), *tables)
        return q_out.astype(q.dtype), rope(rmsnorm(k.astype(jnp.float32), k_weight), *tables).astype(k.dtype)

    def rope_bwd_joined(dq: Any, dk: Any, dv: Any, cos: Any, sin: Any) -> Any:
        return jnp.concatenate([rope(dq, cos, -sin), rope(dk, cos, -sin), dv], -2)

    def cross_entropy_step(x: Any, target: Any, dloss: Any) -> tuple[Any, Any]:
        loss, pull = jax.vjp(lambda x: cross_entropy(x, target), x)
        return pull(dloss)[0], loss

    def swiglu_again(x: Any, dout: Any) -> tuple[Any, Any]:
        out, pull = jax.vjp(lambda x: silu_mul(*jnp.split(x, 2, -1)), x)
        return pull(dout)[0], out

    def adamw(param: Any, grad: Any, mean: Any, square: Any, *numbers: Any) -> tuple[Any, Any, Any]:
        p, g, m, v = (a.astype(jnp.float32) for a in (param, grad, mean, square))
        keep, size, scale = (number[..., None] for number in numbers)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * jnp.abs(v) + (1 - BETAS[1]) * g * g
        p = keep * p - size * m / (jnp.abs(scale) * jnp.sqrt(v) + attrs["eps"])
        return p.astype(param.dtype), m.astype(mean.dtype), v.astype(square.dtype)

    def causal_conv1d(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        (n, width), (_, s, _) = weight.shape, x.shape
        taps = weight.T[:, None].astype(jnp.float32)
        out = jax.lax.conv_general_dilated(
            x.astype(jnp.float32), taps, (1,), [(width - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=n,
        ) + bias.astype(jnp.float32)  # fmt: skip
        out = jax.nn.silu(out) if attrs.get("activation") == "silu" else out
        last = jnp.pad(x[:, 1 - width :], ((0, 0), (max(width - 1 - s, 0), 0), (0, 0)))
        return out.astype(x.dtype), last

    function = {
        "causal_conv1d": causal_conv1d,
        "cross_entropy_step": cross_entropy_step,
        "swiglu_again": swiglu_again,
        "adamw": adamw,
        "rmsnorm": rmsnorm,
        "add_rmsnorm": add_rmsnorm,
        "layernorm": layernorm,
        "silu_mul": silu_mul,
        "gelu_mul": gelu_mul,
        "swiglu": lambda x: silu_mul(*jnp.split(x, 2, -1)),
        "geglu": lambda x: gelu_mul(*jnp.split(x, 2, -1)),
        "silu": lambda x: jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype),
        "gelu": lambda x: gelu32(x).astype(x.dtype),
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
        "rope": rope,
        "qk_norm_rope": qk_norm_rope,
        "rope_bwd_joined": rope_bwd_joined,
        "cross_entropy": cross_entropy,
        "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype),
        "log_softmax": lambda x: jax.nn.log_softmax(x.astype(jnp.float32), -1).astype(x.dtype),
        "sum": lambda x: jnp.sum(x.astype(jnp.float32), -1).astype(x.dtype),
        "mean": lambda x: jnp.mean(x.astype(jnp.float32), -1).astype(x.dtype),
        **fp8.in_jax(attrs, EPS),
        **models.in_jax(attrs),
        **formulas.in_jax(),
    }.get(op)
    return function and jax.checkpoint(function, policy=kept, prevent_cse=False)
