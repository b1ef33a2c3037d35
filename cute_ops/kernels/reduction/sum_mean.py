"""Sums and means of rows."""

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.row_copy import number_or, store_number
from cute_ops.kernels.rowwise.map import Segments
from cute_ops.kernels.rowwise.one_pass import RowFunction, Sum
from cute_ops.kernels.rowwise.two_pass import run_rows


class Total(RowFunction):
    """The sum of a row, or its mean."""

    inputs, outputs = ("x",), ()
    reduction = Sum(lambda x: x)

    def __init__(self, mean):
        self.mean = mean

    def finish(self, variant, numbers, rows, results, context, row):
        (mOut,) = numbers
        total = results[0]
        if self.mean:
            total = total / Float32(rows[0].shape[len(rows[0].shape) - 1])
        store_number(total, mOut, variant.tensors["out"], row)


class Spread:
    """A row filled with its number, or with that divided by the row's length."""

    inputs, outputs = (), ("dx",)

    def __init__(self, mean):
        self.mean = mean

    def begin(self, variant, numbers, row, there):
        mDout, mDx = numbers
        value = number_or(mDout, variant.tensors["dout"], row, there, 0).to(Float32)
        if self.mean:
            value = value / Float32(mDx.shape[len(mDx.shape) - 1])
        return value, there

    def emit(self, values, first, vec, context):
        rX = fragment(Float32, vec)
        rX.fill(context)
        return (rX.load(),)


class RowTotal:
    """``out = sum(x)``."""

    mean = False

    def __init__(self, variant):
        self.form = run_rows(variant, Total(self.mean))

    @cute.jit
    def __call__(self, mX, mOut, stream):
        self.form((mX,), (), (mOut,), stream)


class RowMean(RowTotal):
    """``out = sum(x) / n``."""

    mean = True


class RowTotalBackward:
    """``dx = dout`` in every column; x says how many."""

    mean = False

    def __init__(self, variant):
        self.form = Segments(variant, Spread(self.mean))

    @cute.jit
    def __call__(self, mX, mDout, mDx, stream):
        self.form((), (mDx,), (mDout, mDx), stream)


class RowMeanBackward(RowTotalBackward):
    """``dx = dout / n`` in every column."""

    mean = True
