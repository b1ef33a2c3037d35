"""AdamW: see :mod:`cute_ops.ops.optim.adamw` for the maths."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.row_copy import number_or
from cute_ops.kernels.rowwise.function import RowFunction
from cute_ops.kernels.rowwise.kernel import RowKernel


class Update(RowFunction):
    """A parameter and its moments, from a row's three numbers."""

    inputs = ("param", "grad", "exp_avg", "exp_avg_sq")
    outputs = ("param_out", "exp_avg_out", "exp_avg_sq_out")

    numbers = ("keep", "step_size", "scale")

    def __init__(self, variant):
        attrs = variant.attrs
        self.beta1, self.beta2, self.eps = attrs["beta1"], attrs["beta2"], attrs["eps"]
        # The exact root and quotient branch at every element, which takes longer than the memory. The fast ones
        # are off by a unit or two in the last place and flush squares below 2^-126 to zero, negligible beside this eps.
        self.fast = self.eps >= 1e-11

    def begin(self, variant, numbers, row, valid):
        keys = variant.tensors
        return [number_or(mX, keys[name], row, valid, 0) for mX, name in zip(numbers, self.numbers)], valid

    def emit(self, values, results, context, columns):
        p, g, m, v = values
        keep, step_size, scale = context
        results = [fragment(Float32, columns.count) for _ in self.outputs]
        for j in range(columns.count):
            mean = self.beta1 * m[j] + (1.0 - self.beta1) * g[j]
            square = self.beta2 * _absolute(v[j]) + (1.0 - self.beta2) * (g[j] * g[j])
            if cutlass.const_expr(self.fast):
                root = _absolute(scale) * cute.math.sqrt(square, fastmath=True) + self.eps
                ratio = mean * cute.arch.rcp_approx(root)
            else:
                ratio = mean / (_absolute(scale) * cute.math.sqrt(square) + self.eps)
            results[0][j] = keep * p[j] - step_size * ratio
            results[1][j] = mean
            results[2][j] = square
        return tuple(rX.load() for rX in results)


def _absolute(x):
    return cute.arch.fmax(x, -x)


AdamW = partial(RowKernel, Update)
