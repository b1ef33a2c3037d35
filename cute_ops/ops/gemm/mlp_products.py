"""The products of an MLP without a gate: up with its activation, and the backward of down with the activation's."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.op import Op
from cute_ops.ops.activation.maths import activated, value_and_gradient
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.named import bias

ACTIVATIONS = OneOf("gelu", "gelu_tanh", "relu", "relu2", "silu", "quick_gelu")
ATTRS = {"activation": ACTIVATIONS}


def _up(xp: Any, acc: Any, *, activation: str) -> Any:
    return activated(xp, acc, activation)


def _up_bias(xp: Any, acc: Any, bias: Any, *, activation: str) -> Any:
    return activated(xp, acc + bias, activation)


def _up_pre(xp: Any, acc: Any, *, activation: str) -> tuple[Any, Any]:
    return activated(xp, acc, activation), acc


def _up_bias_pre(xp: Any, acc: Any, bias: Any, *, activation: str) -> tuple[Any, Any]:
    return activated(xp, acc + bias, activation), acc + bias


def _dgrad(xp: Any, dh: Any, pre: Any, *, activation: str) -> Any:
    return value_and_gradient(xp, pre, dh, activation)[1]


def _dgrad_again(xp: Any, dh: Any, pre: Any, *, activation: str) -> tuple[Any, Any]:
    value, dpre = value_and_gradient(xp, pre, dh, activation)
    return dpre, value


@cache
def up(transposed: bool, biased: bool, saving: bool) -> Op:
    """The op of the first product and its activation; ``saving`` also returns ``pre``, what the activation is of."""
    epilogue = (_up_bias_pre if saving else _up_bias) if biased else (_up_pre if saving else _up)
    return fused_linear(
        epilogue, name=f"mlp{'_kn' if transposed else ''}{epilogue.__name__}", attrs=ATTRS,
        operands={"bias": "n"} if biased else {}, outputs={"out": "*m n"} | ({"pre": "*m n"} if saving else {}),
        weight="k n" if transposed else "n k",
    )  # fmt: skip


@cache
def dgrad(transposed: bool, again: bool) -> Op:
    """The op of the product that is the gradient of the hidden layer, and of that of ``pre``, which alone is stored;
    ``again`` also returns the hidden layer, which is recomputed. The weight is ``[p, n]``, or transposed ``[n, p]``.
    """
    return fused_linear(
        _dgrad_again if again else _dgrad, name=f"mlp{'_kn' if transposed else ''}_dgrad{'_again' if again else ''}",
        outputs={"dpre": "*m n"} | ({"hidden": "*m n"} if again else {}), operands={"pre": "*m n"}, attrs=ATTRS,
        weight="n k" if transposed else "k n",
    )  # fmt: skip


@cache
def biased(transposed: bool) -> Op:
    """The op of a product and a bias."""
    return fused_linear(
        bias, name=f"linear{'_kn' if transposed else ''}_bias", operands={"bias": "n"},
        weight="k n" if transposed else "n k",
    )  # fmt: skip


def _activated(xp: Any, x: Any, *, activation: str) -> Any:
    return activated(xp, x, activation)


@cache
def activation() -> Op:
    """The op of the activation alone."""
    return fused(_activated, name="mlp_activation", operands={"x": "*m n"}, attrs=ATTRS)


def _plus_bias(xp: Any, x: Any, bias: Any) -> Any:
    return x + bias


@cache
def plus_bias() -> Op:
    """The op of a bias that is added to what devices have added up."""
    return fused(_plus_bias, name="mlp_plus_bias", operands={"x": "*m n", "bias": "n"})


def parts(transposed: bool) -> tuple[Op, ...]:
    """The ops that an MLP of one layout calls besides products without an epilogue."""
    ups = [up(transposed, biased, saving) for biased in (False, True) for saving in (False, True)]
    return *ups, *(dgrad(transposed, again) for again in (False, True)), biased(transposed), activation(), plus_bias()
