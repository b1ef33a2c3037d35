"""Epilogues whose reductions depend on each other, and in torch's words: no kernel of a product computes them."""

from __future__ import annotations

from cute_ops import fused_linear

ROW = {"axis": -1, "keepdims": True}


def softmax(xp, acc, bias):
    y = acc + bias
    e = xp.exp(y - xp.max(y, **ROW))
    return e / xp.sum(e, **ROW)


def layer_norm(xp, acc, scale, bias):
    """And the product."""
    centred = acc - xp.mean(acc, **ROW)
    return centred * xp.rsqrt(xp.mean(centred * centred, **ROW) + 1e-5) * scale + bias, acc


def log_sum_exp(xp, acc):
    top = xp.max(acc, **ROW)
    return top + xp.log(xp.sum(xp.exp(acc - top), **ROW))


def total(xp, acc):
    return xp.sum(acc, **ROW)


def normed_heads(xp, acc, residual):
    """With groups of columns."""
    heads = acc * xp.rsqrt(xp.group_mean(acc * acc, 16) + 1e-6) + residual
    return heads - xp.mean(heads, **ROW)


OPERANDS = {
    softmax: {"bias": "n"}, layer_norm: {"scale": "n", "bias": "n"}, log_sum_exp: {}, total: {},
    normed_heads: {"residual": "*m n"},
}  # fmt: skip
OPS = [fused_linear(function, operands=operands) for function, operands in OPERANDS.items()]
