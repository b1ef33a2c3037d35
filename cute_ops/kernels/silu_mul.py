"""SiLU-gated product kernels."""

import math

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.kernels._pointwise import Pointwise
from cute_ops.kernels._vectors import fragment


def sigmoid(x):
    """``1 / (1 + exp(-x))``: for a very negative x the exponential is inf and the quotient 0."""
    rX = fragment(Float32, cute.size(x.shape))
    rX.store(cute.math.exp2(x * (-math.log2(math.e)), fastmath=True))
    for j in range(cute.size(x.shape)):
        rX[j] = cute.arch.rcp_approx(rX[j] + 1.0)
    return rX.load()


def silu_mul(gate, up):
    return (gate * sigmoid(gate) * up,)


def silu_mul_backward(gate, up, dout):
    s = sigmoid(gate)
    silu = gate * s
    return dout * up * (s + silu * (1.0 - s)), dout * silu


class SiluMul:
    """``out = gate * sigmoid(gate) * up``."""

    def __init__(self, variant):
        self.form = Pointwise(variant, ("gate", "up"), ("out",), silu_mul)

    @cute.jit
    def __call__(self, mGate, mUp, mOut, stream):
        self.form((mGate, mUp), (mOut,), stream)


class SiluMulBackward:
    """``dgate = dout * up * s * (1 + gate * (1 - s))``, ``dup = dout * gate * s``, with ``s = sigmoid(gate)``."""

    def __init__(self, variant):
        self.form = Pointwise(variant, ("gate", "up", "dout"), ("dgate", "dup"), silu_mul_backward)

    @cute.jit
    def __call__(self, mGate, mUp, mDout, mDgate, mDup, stream):
        self.form((mGate, mUp, mDout), (mDgate, mDup), stream)
