"""Kernels of activations: alone, times ``up``, and times the other half of packed rows."""

import cutlass.cute as cute

from cute_ops.kernels.rowwise.pointwise import Part, Pointwise

PACKED = (Part("x", 0, 2), Part("x", 1, 2))
DPACKED = (Part("dx", 0, 2), Part("dx", 1, 2))


def gated(activation):
    """``compute`` of ``activation(gate) * up``."""

    def compute(gate, up):
        return (activation(gate)[0] * up,)

    return compute


def gated_backward(activation):
    """``compute`` of its gradients, from gate, up and dout."""

    def compute(gate, up, dout):
        y, slope = activation(gate)
        return dout * up * slope, dout * y

    return compute


def gated_again(activation):
    """``compute`` of the gradients and the product."""

    def compute(gate, up, dout):
        y, slope = activation(gate)
        return dout * up * slope, dout * y, y * up

    return compute


def alone(activation):
    return lambda x: (activation(x)[0],)


def alone_backward(activation):
    return lambda x, dout: (dout * activation(x)[1],)


class Alone:
    """``out = activation(x)``."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, ("x",), ("out",), alone(activation))

    @cute.jit
    def __call__(self, mX, mOut, stream):
        self.form((mX,), (mOut,), stream)


class AloneBackward:
    """``dx = dout * activation'(x)``."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, ("x", "dout"), ("dx",), alone_backward(activation))

    @cute.jit
    def __call__(self, mX, mDout, mDx, stream):
        self.form((mX, mDout), (mDx,), stream)


class Gated:
    """``out = activation(gate) * up``."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, ("gate", "up"), ("out",), gated(activation))

    @cute.jit
    def __call__(self, mGate, mUp, mOut, stream):
        self.form((mGate, mUp), (mOut,), stream)


class GatedBackward:
    """``dgate = dout * up * activation'(gate)``, ``dup = dout * activation(gate)``."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, ("gate", "up", "dout"), ("dgate", "dup"), gated_backward(activation))

    @cute.jit
    def __call__(self, mGate, mUp, mDout, mDgate, mDup, stream):
        self.form((mGate, mUp, mDout), (mDgate, mDup), stream)


class Packed:
    """``out = activation(x[:n]) * x[n:]`` of rows of ``2n``."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, PACKED, ("out",), gated(activation))

    @cute.jit
    def __call__(self, mX, mOut, stream):
        self.form((mX, mX), (mOut,), stream)


class PackedBackward:
    """Both gradients of :class:`Packed`, side by side as in x."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, (*PACKED, "dout"), DPACKED, gated_backward(activation))

    @cute.jit
    def __call__(self, mX, mDout, mDx, stream):
        self.form((mX, mX, mDout), (mDx, mDx), stream)


class PackedAgain:
    """Both gradients of :class:`Packed`, as :class:`PackedBackward` has them, and its output once more."""

    def __init__(self, variant, activation):
        self.form = Pointwise(variant, (*PACKED, "dout"), (*DPACKED, "out"), gated_again(activation))

    @cute.jit
    def __call__(self, mX, mDout, mDx, mOut, stream):
        self.form((mX, mX, mDout), (mDx, mDx, mOut), stream)
