"""The backward of a gated activation, as the epilogue of the product that computes its cotangent: for gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cute_ops.declaration.op import Op
from cute_ops.expressions.derivative import DERIVATIVE
from cute_ops.ops.activation.maths import halves
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.halves import stack_halves
from cute_ops.ops.gemm.named import ACTIVATIONS, gated, gated_linear


def _gated_dgrad(xp: Any, dh: Any, pre: Any, *, activation: str) -> tuple[Any, Any]:
    """Gradients of gate and up, side by side, from the product that is the gradient of ``h``."""
    return _gated_dgrad_again(xp, dh, pre, activation=activation)[:2]


def _gated_dgrad_again(xp: Any, dh: Any, pre: Any, *, activation: str) -> tuple[Any, Any, Any]:
    """Gradients of gate and up, and ``h``, which is recomputed."""
    gate, up = halves(pre)
    value = getattr(xp, activation)(gate)
    if activation == "silu":  # with the value at hand, one multiplication less than its rule takes
        s = xp.sigmoid(gate)
        return dh * up * (value * (1 - s) + s), dh * value, value * up
    (dgate,) = DERIVATIVE[activation](xp, dh * up, value, gate)
    return dgate, dh * value, value * up


@cache
def gated_dgrad(transposed: bool) -> Op:
    """The op for a weight ``[p, n]``, or transposed ``[n, p]``: the product ``dh``, and gradients of gate and up."""
    return _declared(_gated_dgrad, transposed, "", dpre="*m 2n")


@cache
def gated_dgrad_again(transposed: bool) -> Op:
    """The op of :func:`gated_dgrad` that also returns ``h``."""
    return _declared(_gated_dgrad_again, transposed, "_again", dpre="*m 2n", hidden="*m n")


def _declared(epilogue: Callable[..., Any], transposed: bool, suffix: str, **outputs: str) -> Op:
    return fused_linear(
        epilogue, name=f"gated_mlp{'_kn' if transposed else ''}_dgrad{suffix}", outputs=outputs,
        operands={"pre": "*m 2n"}, attrs={"activation": ACTIVATIONS}, weight="n k" if transposed else "k n",
    )  # fmt: skip


@cache
def gated_linear_kn() -> Op:
    """``gated_linear`` for a weight ``[k, 2n]``."""
    return fused_linear(
        gated, name="gated_linear_kn", weight="k 2n", attrs={"activation": ACTIVATIONS}, called="gated_linear"
    )


def gated_linear_of(transposed: bool, batched: bool = False, halves: bool = False) -> Op:
    """``gated_linear`` for a weight ``[k, 2n]``, for a batch of weights, and with a dim for both halves."""
    one = gated_linear_kn() if transposed else gated_linear
    op = (batched and one.batched) or one
    return stack_halves(op) if halves else op
