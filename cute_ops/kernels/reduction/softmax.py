"""Softmax kernels: see :mod:`cute_ops.ops.reduction.softmax` for the maths."""

from functools import partial

import cutlass.cute as cute

from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.row_reduce_lse import LogSum, exponentials, origin
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.kernels.rows.on_chip import RowsInRegisters
from cute_ops.kernels.rows.select import FusedRows
from cute_ops.kernels.rowwise.config import ReduceConfig
from cute_ops.kernels.rowwise.function import RowFunction, Sum
from cute_ops.kernels.rowwise.kernel import RowKernel

MOST_KEPT = 32  # exponentials that a thread keeps in registers


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


class Softmax:
    """Probabilities of rows, or of short unaligned ones as an expression.

    There threads keep their exponentials, where :class:`Probabilities` computes them again: its maximum and its sum are
    exchanged as one state. Rows of 177 bfloat16 numbers reach 0.93 of the copy rate instead of 0.74.
    """

    function = Probabilities
    expression = "e1(t) max 0; subtract 0 1; exp 2; sum 3; divide 3 4 -> 5"

    def __init__(self, variant):
        config = ReduceConfig.of(variant.config)
        if config.form == "expression":
            self.form = FusedRows(*self._as_expression(variant, config))
        else:
            self.form = RowKernel(self.function, variant)

    def _as_expression(self, variant, config):
        each = -(-variant.dims["n"] // config.threads_per_row)
        rows = FusedRowConfig(
            "one_pass", config.threads, config.threads_per_row, keep=each <= MOST_KEPT, expression=self.expression,
            reads="x", writes="out", kinds="t",
        )  # fmt: skip
        variant = variant._replace(settings=tuple(sorted(rows.flat().items())))
        return variant, RowsInRegisters(variant)

    @cute.jit
    def __call__(self, *arguments):
        self.form(*arguments)


class LogSoftmax(Softmax):
    """Their logarithms."""

    function = LogProbabilities
    expression = "e1(t) max 0; subtract 0 1; exp 2; sum 3; log 4; subtract 2 5 -> 6"


SoftmaxBackward, LogSoftmaxBackward = partial(RowKernel, SoftmaxGradient), partial(RowKernel, LogSoftmaxGradient)
