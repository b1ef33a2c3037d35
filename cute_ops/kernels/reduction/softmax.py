"""Softmax kernels: see :mod:`cute_ops.ops.reduction.softmax` for the maths."""

from functools import partial

import cutlass.cute as cute

from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.row_reduce_lse import LogSum, exponentials, origin
from cute_ops.kernels.rowwise.function import RowFunction, Sum
from cute_ops.kernels.rowwise.kernel import RowKernel


class Probabilities(RowFunction):
    """``out = exp(x - M) / S``, ``M`` the row's maximum and ``S = sum(exp(x - M))``."""

    inputs, outputs = ("x",), ("out",)
    reduction = LogSum()

    def emit(self, values, results, context, columns):
        top, total = results
        return (exponentials(values[0], origin(top)) * (1.0 / total),)


class LogProbabilities(RowFunction):
    """``out = x - M - log(S)``."""

    inputs, outputs = ("x",), ("out",)
    reduction = LogSum()

    def emit(self, values, results, context, columns):
        top, total = results
        return ((values[0] - top) - cute.math.log(total),)


class SoftmaxGradient(RowFunction):
    """``dx = out * (dout - sum(out * dout))``."""

    inputs, outputs = ("out", "dout"), ("dx",)
    reduction = Sum(lambda out, dout: out * dout)

    def emit(self, values, results, context, columns):
        out, dout = values
        return (out * (dout - results[0]),)


class LogSoftmaxGradient(RowFunction):
    """``dx = dout - exp(out) * sum(dout)``."""

    inputs, outputs = ("out", "dout"), ("dx",)
    reduction = Sum(lambda out, dout: dout)

    def emit(self, values, results, context, columns):
        out, dout = values
        return (dout - cute.math.exp2(out * LOG2_E, fastmath=True) * results[0],)


Softmax, SoftmaxBackward = partial(RowKernel, Probabilities), partial(RowKernel, SoftmaxGradient)
LogSoftmax, LogSoftmaxBackward = partial(RowKernel, LogProbabilities), partial(RowKernel, LogSoftmaxGradient)
