"""Sums and means of rows."""

from functools import partial

from cutlass import Float32

from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.row_copy import number_or, store_number
from cute_ops.kernels.rowwise.function import RowFunction, Sum
from cute_ops.kernels.rowwise.kernel import RowKernel


class SumRow(RowFunction):
    """The sum of a row, or its mean."""

    inputs, outputs, numbers = ("x",), (), ("out",)
    reduction = Sum(lambda x: x)

    def __init__(self, variant, mean=False):
        self.mean = mean

    def postprocess(self, variant, numbers, rows, results, context, row):
        (mOut,) = numbers
        total = results[0]
        if self.mean:
            total = total / Float32(rows[0].shape[-1])
        store_number(total, mOut, variant.tensors["out"], row)


class FillRow(RowFunction):
    """A row filled with its number, or with that divided by the row's length."""

    inputs, outputs, numbers = (), ("dx",), ("dout", "dx")

    def __init__(self, variant, mean=False):
        self.mean = mean

    def begin(self, variant, numbers, row, valid):
        mDout, mDx = numbers
        value = number_or(mDout, variant.tensors["dout"], row, valid, 0).to(Float32)
        if self.mean:
            value = value / Float32(mDx.shape[-1])
        return value, valid

    def emit(self, values, results, context, columns):
        rX = fragment(Float32, columns.count, context)
        return (rX.load(),)


RowTotal, RowTotalBackward = partial(RowKernel, SumRow), partial(RowKernel, FillRow)
RowMean, RowMeanBackward = (partial(RowKernel, partial(function, mean=True)) for function in (SumRow, FillRow))
