"""Softmax kernels: see :mod:`cute_ops.ops.reduction.softmax` for the maths."""

import cutlass.cute as cute

from cute_ops.kernels.lib.row_reduce_lse import LOG2_E, LogSum, exponentials, origin
from cute_ops.kernels.rowwise.one_pass import RowFunction, Sum
from cute_ops.kernels.rowwise.two_pass import run_rows


class Probabilities(RowFunction):
    inputs, outputs = ("x",), ("out",)
    reduction = LogSum()

    def emit(self, values, results, context, first):
        top, total = results
        return (exponentials(values[0], origin(top)) * (1.0 / total),)


class LogProbabilities(RowFunction):
    inputs, outputs = ("x",), ("out",)
    reduction = LogSum()

    def emit(self, values, results, context, first):
        top, total = results
        return ((values[0] - top) - cute.math.log(total),)


class SoftmaxGradient(RowFunction):
    inputs, outputs = ("out", "dout"), ("dx",)
    reduction = Sum(lambda out, dout: out * dout)

    def emit(self, values, results, context, first):
        out, dout = values
        return (out * (dout - results[0]),)


class LogSoftmaxGradient(RowFunction):
    inputs, outputs = ("out", "dout"), ("dx",)
    reduction = Sum(lambda out, dout: dout)

    def emit(self, values, results, context, first):
        out, dout = values
        return (dout - cute.math.exp2(out * LOG2_E, fastmath=True) * results[0],)


class Softmax:
    """``out = exp(x - M) / S``, ``M`` the row's maximum and ``S = sum(exp(x - M))``."""

    def __init__(self, variant):
        self.form = run_rows(variant, Probabilities())

    @cute.jit
    def __call__(self, mX, mOut, stream):
        self.form((mX,), (mOut,), (), stream)


class LogSoftmax:
    """``out = x - M - log(S)``."""

    def __init__(self, variant):
        self.form = run_rows(variant, LogProbabilities())

    @cute.jit
    def __call__(self, mX, mOut, stream):
        self.form((mX,), (mOut,), (), stream)


class SoftmaxBackward:
    """``dx = out * (dout - sum(out * dout))``."""

    def __init__(self, variant):
        self.form = run_rows(variant, SoftmaxGradient())

    @cute.jit
    def __call__(self, mOut, mDout, mDx, stream):
        self.form((mOut, mDout), (mDx,), (), stream)


class LogSoftmaxBackward:
    """``dx = dout - exp(out) * sum(dout)``."""

    def __init__(self, variant):
        self.form = run_rows(variant, LogSoftmaxGradient())

    @cute.jit
    def __call__(self, mOut, mDout, mDx, stream):
        self.form((mOut, mDout), (mDx,), (), stream)
