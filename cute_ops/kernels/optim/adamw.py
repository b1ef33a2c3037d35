"""AdamW: see :mod:`cute_ops.ops.optim.adamw` for the maths."""

import math
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.expressions.philox import WORDS
from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.philox import words
from cute_ops.kernels.lib.row_copy import number_or
from cute_ops.kernels.rowwise.function import Columns, RowFunction
from cute_ops.kernels.rowwise.kernel import RowKernel
from cute_ops.kernels.rowwise.pointwise import Piece, Pointwise

EXPONENT = 0x7F800000  # bits of a float32's exponent: all are set in what is not finite


class Update(RowFunction):
    """A parameter and its moments, from a row's three numbers."""

    inputs = ("param", "grad", "exp_avg", "exp_avg_sq")
    outputs = ("param_out", "exp_avg_out", "exp_avg_sq_out")

    numbers = ("keep", "step_size", "scale")

    def __init__(self, variant):
        attrs, self.variant = variant.attrs, variant
        self.beta1, self.beta2, self.eps = attrs["beta1"], attrs["beta2"], attrs["eps"]
        self.counted = attrs["counted"]
        # The exact root and quotient branch at every element, which takes longer than the memory. The fast ones
        # are off by a unit or two in the last place and flush squares below 2^-126 to zero, negligible beside this eps.
        self.fast = self.eps >= 1e-11

    def begin(self, variant, numbers, row, valid):
        keys = variant.tensors
        found = zip(numbers, self.numbers[:3])
        keep, step_size, scale = [number_or(mX, keys[name], row, valid, 0) for mX, name in found]
        if self.counted:  # a decay of 0 has a logarithm, too
            first, second = (_rise(scale * math.log(max(beta, 1e-80))) for beta in (self.beta1, self.beta2))
            step_size = step_size * cute.arch.rcp_approx(first)
            scale = cute.math.rsqrt(second, fastmath=True)
        return [keep, step_size, scale], valid

    def emit(self, values, results, context, columns):
        p, g, m, v = values
        keep, step_size, scale, *_ = context
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


def _rise(x):
    """``1 - exp(x)``, right to the last places where that is nearly 0, too."""
    return -cute.math.tanh(x * 0.5) * (cute.math.exp(x) + 1.0)


def _absolute(x):
    return cute.arch.fmax(x, -x)


class StochasticUpdate(Update):
    """An :class:`Update` whose parameters are rounded to bfloat16 up or down, by words of random bits."""

    numbers = (*Update.numbers, "seed")

    def begin(self, variant, numbers, row, valid):
        found, valid = super().begin(variant, numbers, row, valid)
        seed = gmem_elements(numbers[3].element_type, numbers[3].iterator.toint(), 1)[0]
        return [*found, seed, row], valid

    def emit(self, values, results, context, columns):
        param, *moments = super().emit(values, results, context, columns)
        *_, seed, row = context
        whole = columns.count % WORDS == 0 and self.variant.dims["n"] is not None
        whole = whole and self.variant.dims["n"] % WORDS == 0
        rX = fragment(Float32, columns.count)
        rX.store(param)
        for j, word in enumerate(words(seed, row, (columns.first, columns.count, whole))):
            bits = rX[j].bitcast(Int32)
            up = (bits + Int32(word & 0xFFFF)) & Int32(-0x10000)
            finite = (bits & EXPONENT) != EXPONENT
            rX[j] = Int32(cutlass.select_(finite, up, bits)).bitcast(Float32)
        return (rX.load(), *moments)


class Launch(NamedTuple):
    """What :class:`Pointwise` asks of a config."""

    threads: int
    unroll: int = 1


class UpdateElements(Pointwise):
    """:class:`Update` of compact tensors as one long row: rows that start off a vector would be stored element by
    element at both ends.
    """

    threads = 256

    def __init__(self, variant):
        self.update = Update(variant)
        inputs = [Piece(name) for name in Update.inputs]
        numbers = [Piece(name, columns=False) for name in Update.numbers]
        outputs = [Piece(name) for name in Update.outputs]
        super().__init__(variant, (*inputs, *numbers), outputs, self._element_of, Launch(self.threads))

    def _element_of(self, *given):
        count = len(Update.inputs)
        values, context = [[x] for x in given[:count]], given[count:]
        return tuple(x[0] for x in self.update.emit(values, (), context, Columns(None, 1)))


class ElementKernel:
    """Runs :class:`UpdateElements`."""

    def __init__(self, elements, variant):
        self.elements, self.names = elements, variant.names

    @cute.jit
    def __call__(self, *arguments):
        tensors, update = dict(zip(self.names, arguments)), self.elements.update
        inputs, outputs = (tuple([tensors[name] for name in names]) for names in (
            (*update.inputs, *update.numbers), update.outputs
        ))  # fmt: skip
        self.elements(inputs, outputs, arguments[-1])


def adamw(variant):
    """The kernel of a variant. Counted steps take logarithms of a row's numbers, which elements would repeat."""
    elements = None if variant.attrs["counted"] or variant.dims["n"] is None else UpdateElements(variant)
    return ElementKernel(elements, variant) if elements and elements.crossed else RowKernel(Update, variant)


AdamW, AdamWStochastic = adamw, partial(RowKernel, StochasticUpdate)
