"""Products with the epilogues that models have, for the tests of the core and of PyTorch."""

from __future__ import annotations

from typing import Any

from cute_ops import Op
from cute_ops.ops.gemm.fused import fused_linear

TILE, ROW, COLUMN = "*m n", "n", "*m 1"


def with_bias(xp: Any, acc: Any, bias: Any) -> Any:
    return acc + bias


def with_gelu(xp: Any, acc: Any, bias: Any) -> Any:
    return xp.gelu(acc + bias)


def with_silu(xp: Any, acc: Any) -> Any:
    return xp.silu(acc)


def with_residual(xp: Any, acc: Any, residual: Any) -> Any:
    return acc + residual


def saving(xp: Any, acc: Any, bias: Any) -> Any:
    pre = acc + bias
    return pre, xp.gelu(pre)


def with_swiglu(xp: Any, acc: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n]) * acc[..., n:]


def gated_saving(xp: Any, acc: Any, bias: Any) -> Any:
    n = acc.shape[-1] // 2
    gate, up = acc[..., :n] + bias[..., :n], acc[..., n:] + bias[..., n:]
    return gate, up, xp.silu(gate) * up


def gated_dgrad(xp: Any, acc: Any, pre: Any) -> Any:
    n = pre.shape[-1] // 2
    gate, up = pre[..., :n], pre[..., n:]
    s = xp.sigmoid(gate)
    return acc * up * (s + gate * s * (1 - s)), acc * gate * s


def with_all(xp: Any, acc: Any, scale: Any, bias: Any, residual: Any, factor: Any, *, limit: float) -> Any:
    return xp.clip(acc * scale + bias, -limit, limit) * factor + residual


def with_rstd(xp: Any, acc: Any, residual: Any, *, eps: float) -> Any:
    out = acc + residual
    return out, xp.rsqrt(xp.mean(out * out, axis=-1, keepdims=True) + eps)


def gated_reducing(xp: Any, acc: Any, scale: Any) -> Any:
    n = acc.shape[-1] // 2
    out = xp.silu(acc[..., :n]) * acc[..., n:]
    largest = xp.max(xp.abs(out), axis=-1, keepdims=True)
    return largest * scale, out, xp.min(out, axis=-1, keepdims=True), xp.sum(out, axis=-1, keepdims=True)


def with_rope(xp: Any, acc: Any, bias: Any, cos: Any, sin: Any, *, heads: int) -> Any:
    x = acc + bias
    turned = x * cos + xp.rotate_half(x, 64) * sin
    return xp.where(xp.arange(acc.shape[-1]) < 64 * heads, turned, x)


def with_qk_norm(xp: Any, acc: Any, norm: Any, cos: Any, sin: Any, *, heads: int) -> Any:
    x = acc * xp.rsqrt(xp.group_mean(acc * acc, 64) + 1e-6) * norm
    turned = x * cos + xp.rotate_half(x, 64) * sin
    return xp.where(xp.arange(acc.shape[-1]) < 64 * heads, turned, acc)


def rescaled(xp: Any, acc: Any, scale: Any) -> Any:
    """By the largest of 128 columns, as fp8 numbers are; and what that was."""
    n = acc.shape[-1] // 2
    y = xp.silu(acc[..., :n]) * acc[..., n:] * scale
    largest = xp.group_max(xp.abs(y), 64)
    return y / xp.maximum(largest, 1e-4), xp.max(largest, axis=-1, keepdims=True)


GROUPED = ("with_rope", "with_qk_norm", "rescaled", "turned_heads")


def columns(op: Op, n: int) -> int:
    """At least n, whole groups where the op, or the one that it is a step of, has groups."""
    return -(-n // 64) * 64 if op.name.startswith(GROUPED) else n


OPS: tuple[Op, ...] = (
    fused_linear(with_bias, operands={"bias": ROW}),
    fused_linear(with_gelu, operands={"bias": ROW}),
    fused_linear(with_silu),
    fused_linear(with_residual, operands={"residual": TILE}),
    fused_linear(saving, operands={"bias": ROW}, outputs={"pre": TILE, "out": TILE}, dtypes={"pre": "float32"}),
    fused_linear(with_swiglu, weight="2n k"),
    fused_linear(
        gated_saving, operands={"bias": "2n"}, weight="k 2n", outputs={"pre": "*m 2n", "out": TILE}
    ),
    fused_linear(gated_dgrad, operands={"pre": "*m 2n"}, weight="k n", outputs={"dpre": "*m 2n"}),
    fused_linear(
        with_rstd, operands={"residual": TILE}, outputs={"out": TILE, "rstd": COLUMN}, attrs={"eps": 1e-6}
    ),
    fused_linear(
        gated_reducing, operands={"scale": "*m"}, weight="2n k", dtypes={"least": "bfloat16"},
        outputs={"largest": "*m", "out": TILE, "least": COLUMN, "total": COLUMN},
    ),
    fused_linear(
        with_rope, operands={"bias": ROW, "cos": "*#m 32", "sin": "*#m 32"}, attrs={"heads": 3}
    ),
    fused_linear(
        with_qk_norm, operands={"norm": ROW, "cos": "*#m 32", "sin": "*#m 32"}, attrs={"heads": 3}
    ),
    fused_linear(rescaled, operands={"scale": "*m"}, weight="2n k"),
    fused_linear(
        with_all, operands={"scale": "*m", "bias": ROW, "residual": TILE, "factor": ""}, attrs={"limit": 2.0}
    ),
)  # fmt: skip
BY_NAME = {op.name: op for op in OPS}


def multiplied(xp: Any, acc: Any, other: Any, bias: Any) -> Any:
    return xp.silu(acc + bias) * other


def with_tanh(xp: Any, acc: Any, scale: Any) -> Any:
    return xp.tanh(acc + scale)


def turned_heads(xp: Any, acc: Any, norm: Any, sin: Any, scale: Any, shift: Any) -> Any:
    """All heads, by angles that rows share; whatever the operands' dtypes, with a gradient for each."""
    x = acc * xp.rsqrt(xp.group_mean(acc * acc, 64) + 1e-6) * norm
    return (x + xp.rotate_half(x, 64) * sin) * scale + shift


def with_summands(xp: Any, acc: Any, bias: Any, residual: Any, other: Any, shift: Any) -> Any:
    """Of sums before an activation all gradients are one, or its sums."""
    return xp.silu(acc + bias + residual + other + shift)


# With other ways to get the sums for a gradient.
DIFFERENTIABLE: tuple[Op, ...] = (
    *(op for op in OPS if op.grad and not op.no_gradient),
    fused_linear(turned_heads, operands={"norm": ROW, "sin": ROW, "scale": COLUMN, "shift": ""}),
    fused_linear(with_gelu, name="gelu_again", operands={"bias": ROW}, save="none"),
    fused_linear(with_swiglu, name="swiglu_again_kn", weight="k 2n", save="none", dtypes={"acc": "float32"}),
    fused_linear(with_silu, name="silu_float32", dtypes={"acc": "float32", "out": "float32"}),
    fused_linear(multiplied, operands={"other": TILE, "bias": ROW}, weight="k n"),
    fused_linear(with_tanh, operands={"scale": COLUMN}),
    fused_linear(with_summands, operands={"bias": ROW, "residual": TILE, "other": TILE, "shift": ROW}),
)

# The others' gradients go to the largest of some numbers: which that is may change with how these are rounded.
SMOOTH = tuple(op for op in DIFFERENTIABLE if op.name not in ("rescaled", "gated_reducing"))
