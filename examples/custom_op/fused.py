"""An op of one Python function: reference, kernel and gradient follow from it."""

from cute_ops import fused


def gelu_add(xp, x, bias, residual):
    """``out = gelu(x + bias) + residual``"""
    return xp.gelu(x + bias) + residual


gelu_add_op = fused(gelu_add, operands={"x": "*m n", "bias": "n", "residual": "*m n"})
