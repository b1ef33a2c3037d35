"""The weights of scores in gradients, whose log-sum-exp is known."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from cute_ops.kernels.attention.registers import (
    PART,
    by_row,
    columns_of_part,
    exp2,
    into_pairs,
    store_packed,
    store_part,
)
from cute_ops.kernels.attention.softmax import LARGEST
from cute_ops.kernels.lib.activation import LOG2_E


class NearWithSlope(NamedTuple):
    """Factors of a cubic in the place of tanh(x) and of a square in that of its derivative, the largest abs(x) that
    they are for, and the error of the cubic.
    """

    value: tuple[float, float]
    slope: tuple[float, float]
    bound: float
    error: float


# Of gradients, whose products are rounded to 16 bits: the slope is wrong by less than 9e-5, or 3e-5, of large caps.
GRADIENTS = (
    NearWithSlope((0.99995713, -0.32801012), (0.99991488, -0.97878986), 0.18, 1.55e-6),
    NearWithSlope((0.99998507, -0.33018586), (0.99997026, -0.98743932), 0.138, 4.2e-7),
)
LEAST_CAP, LEAST_FACTOR = 1e-3, 1e-30  # with which a polynomial gives hidden scores a weight of 0
# The argument of a hidden score's tanh: the polynomial of it has an exponential of 0.
HIDDEN = 999_983.0
# How weights of capped scores are computed: by polynomials, of a tile whose keys all are there, and of any tile.
NEAR, WHOLE, ANY = 2, 1, 0
# Factors that gradients in bfloat16 and sums in float32 may lack on the way.
LEFT_OUT = 1e-12, 1e6
MOST_WRONG = 1e-4  # an error of scores, and so of weights relatively, that 16 bits do not show


class Weights:
    """The weights of scores whose log-sum-exp is known, and what a cotangent of scores is multiplied by.

    Args:
        mods: what is done to scores.
        scale: of scores.

    Attributes:
        left_out: the factor that what :meth:`of_parts` gives lacks, see :meth:`leave_out`.
    """

    def __init__(self, mods, scale):
        self.mods, self.scale, self.near, self.left_out = mods, scale, None, 1.0
        if mods.cap is not None:
            # Polynomials are for caps of which float32 holds their factors, and of which scores are right.
            outer, inner = mods.cap
            held = LEAST_FACTOR < outer * inner**3 < LARGEST * min(mods.scale, 1.0) and outer >= LEAST_CAP
            self.near = next((each for each in GRADIENTS if held and outer * each.error < MOST_WRONG), None)

    def leave_out(self, dtype):
        """Leave the factor of a polynomial's square out of cotangents of scores, one operation less for each; returns
        what gradients of queries and keys are to be multiplied by. Float16 does not hold cotangents without it.
        """
        factor = 1.0 if self.near is None else -self._of_polynomial[3]
        self.left_out = factor if dtype is BFloat16 and LEFT_OUT[0] < factor < LEFT_OUT[1] else 1.0
        return self.left_out

    @property
    def _of_polynomial(self):
        """Factors of the first and the third power of a product in its score, of base 2, and of none and of the second
        one in what the score's cotangent is multiplied by.
        """
        outer, inner = self.mods.cap
        score = [outer * LOG2_E * c * inner ** (2 * i + 1) for i, c in enumerate(self.near.value)]
        return *score, *(outer * inner / self.mods.scale * c * inner ** (2 * i) for i, c in enumerate(self.near.slope))

    def of_lse(self, lse, given):
        """A row's log-sum-exp, of base 2, without a cap less the offset of scores; infinite where the row has no key or
        is not ``given``: its weights are 0.
        """
        log = lse * Float32(LOG2_E)
        if self.mods.outer[1] and self.mods.cap is None:
            log = log - Float32(self.mods.outer[1] * LOG2_E)
        return cutlass.select_(given & (lse > -Float32.inf), log, Float32.inf)

    def of_rows(self, rows, first, tile, sizes):
        """The log-sum-exp, of base 2, and the delta of a thread's rows, ``first`` and 8 further down, as functions of
        row and column. ``rows``: both for all rows.
        """
        (mLse, mDelta), lse, delta, last = rows, [], [], sizes.seqlen_q - 1
        if sizes.starts is not None:  # an empty sequence has the row before it, or the first one of all
            last = cutlass.max(last, -sizes.starts[0])
        for row in (first, first + 8):
            at = sizes.of_query(tile, cutlass.min(row, last))
            lse.append(self.of_lse(mLse[at], row < sizes.seqlen_q))
            delta.append(mDelta[at])
        return (lambda r, c: lse[r]), (lambda r, c: delta[r])

    @cute.jit
    def of_scores(
        self, rS, rWeights, place: cutlass.Constexpr, lse: cutlass.Constexpr, whole, rest: cutlass.Constexpr = None
    ):  # fmt: skip
        """Replace products of queries and keys by ``p * dscore``, the weight and the derivative of its score.

        Args:
            rS: a thread's products.
            rWeights: gets the weights in 16 bits; or None.
            place: of the products.
            lse: ``lse(row, column)``, of base 2.
            whole: whether none is left out.
            rest: see :meth:`Tiles.rest_of`.
        """
        if cutlass.const_expr(self.mods.cap is not None):
            way = self.hide(rS, place, whole, rest)
            self.of_parts((rS, rWeights), range(cute.size(rS) // (PART // 2)), (lse, place), way)
        elif cutlass.const_expr(not self.mods.is_changed_by_column):
            self._in_steps(rS, rWeights, place, lse, whole, rest)
        elif self._is_inside(place, whole):
            self._by_column(rS, rWeights, place, lse)
        else:
            self._in_steps(rS, rWeights, place, lse, whole, rest)

    @cute.jit
    def hide(self, rS, place: cutlass.Constexpr, whole, rest: cutlass.Constexpr = None):
        """Before :meth:`of_parts`: replace products that are left out by :attr:`hidden`. Returns how it computes the
        others: :data:`NEAR`, :data:`WHOLE` or :data:`ANY`.
        """
        near = Boolean(False) if cutlass.const_expr(self.near is None) else self._is_near(rS)
        way = cutlass.select_(near, Int32(NEAR), cutlass.select_(whole, Int32(WHOLE), Int32(ANY)))
        if not whole:
            self.mods.hide(by_row(rS), place, self.hidden, rest)
        return way

    @property
    def hidden(self):
        """What takes the place of a product that is left out: its weight is 0, as no row's ``lse`` is NaN."""
        if self.mods.cap is not None:
            return HIDDEN / self.mods.cap[1]
        return -Float32.inf if self.mods.outer[0] > 0 else Float32.inf

    @cute.jit
    def of_parts(self, registers: cutlass.Constexpr, parts: cutlass.Constexpr, at: cutlass.Constexpr, way):
        """What :meth:`of_scores` does, of the columns that some instructions multiply, behind :meth:`hide`, where at
        most a cap changes scores.

        Args:
            registers: a thread's products, and what gets the weights, see :meth:`of_scores`.
            parts: numbers of the instructions.
            at: ``lse(row, column)``, of base 2, and the place of the products.
            way: what :meth:`hide` has returned.
        """
        (rS, rWeights), (lse, place) = registers, at
        if cutlass.const_expr(self.mods.cap is None):
            for part in parts:
                self._plain(rS, part, lse)
                store_part(rS, rWeights, part)
        elif cutlass.const_expr(self.near is None):
            self._by_column(rS, rWeights, place, lse, parts)
        elif way == NEAR:
            self._by_polynomial(rS, rWeights, lse, parts)
        elif way == WHOLE:
            self._by_column(rS, rWeights, place, lse, parts, False)
        else:
            self._by_column(rS, rWeights, place, lse, parts)

    def _plain(self, rS, part, lse):
        scores, scale = by_row(rS), Float32(self.mods.outer[0] * LOG2_E)
        for c in columns_of_part(part):
            for r in range(2):
                scores[r, c] = exp2(scores[r, c] * scale - lse(r, c))

    def _is_inside(self, place, whole):
        """Whether nothing of a warp is left out. Its lanes go one way: both ways have votes of all of them."""
        return cute.arch.vote_all_sync(whole & (place.last_query < place.sizes.seqlen_q))

    def _is_near(self, rS):
        """Whether polynomials are accurate enough for all products of a warp."""
        bound, parts = Float32(self.near.bound / self.mods.cap[1]), [Float32(0.0)] * 4
        for i in range(cute.size(rS)):
            parts[i % 4] = cute.arch.fmax(parts[i % 4], cute.math.absf(rS[i]))
        largest = cute.arch.fmax(cute.arch.fmax(parts[0], parts[1]), cute.arch.fmax(parts[2], parts[3]))
        return cute.arch.vote_all_sync(largest <= bound)

    def _by_polynomial(self, rS, rWeights, lse, parts):
        """What :meth:`of_parts` does of capped scores of which :meth:`_is_near` is true."""
        scores, put, (first, third, flat, bent) = by_row(rS), into_pairs(rWeights), self._of_polynomial
        zero = flat / -bent  # the square of which the slope is 0
        for c in (c for part in parts for c in columns_of_part(part)):
            for r in range(2):
                x = scores[r, c]
                slope = Float32(zero) - x * x
                weight = exp2(x * (slope * Float32(-third) + Float32(first + third * zero)) - lse(r, c))
                put(r, c, weight)
                scores[r, c] = weight * slope if self.left_out != 1.0 else weight * (slope * Float32(-bent))

    def _by_column(self, rS, rWeights, place, lse, parts=None, has_hidden=True):
        """Gradients of a tile of which nothing is left out, or of parts of it where products may be :attr:`hidden`,
        with fewer registers: products are not kept.
        """
        scores, (scale, offset) = by_row(rS), (Float32(each * LOG2_E) for each in self.mods.outer)
        columns = None if parts is None else [c for part in parts for c in columns_of_part(part)]
        put = into_pairs(rWeights)
        for r, c, score, derive in self.mods.by_column(scores, place, columns):
            weight = exp2(score * scale - (lse(r, c) if self.mods.cap is None else lse(r, c) - offset))
            if self.mods.cap is not None and has_hidden:
                weight = cutlass.select_(scores[r, c] == Float32(self.hidden), Float32(0.0), weight)
            put(r, c, weight)
            scores[r, c] = derive(weight) if self.left_out == 1.0 else derive(weight) * Float32(1.0 / self.left_out)

    @cute.jit
    def _in_steps(
        self, rS, rWeights, place: cutlass.Constexpr, lse: cutlass.Constexpr, whole, rest: cutlass.Constexpr
    ):  # fmt: skip
        scores = by_row(rS)
        rRaw = cute.make_rmem_tensor_like(rS) if cutlass.const_expr(self.mods.score is not None) else None
        if cutlass.const_expr(rRaw is not None):
            rRaw.store(rS.load())
            self.mods.change(scores, place)
        scale = Float32(self.mods.outer[0] * LOG2_E)
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            for r in cutlass.range_constexpr(2):
                scores[r, c] = exp2(scores[r, c] * scale - lse(r, c))
        if cutlass.const_expr(rRaw is not None):
            if place.last_query >= place.sizes.seqlen_q:  # behind the last row a changed score may be NaN
                for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    for r in cutlass.range_constexpr(2):
                        scores[r, c] = cutlass.select_(lse(r, c) == Float32.inf, Float32(0.0), scores[r, c])
        if not whole:
            self.mods.hide(scores, place, 0.0, rest)
        if cutlass.const_expr(rWeights is not None):
            store_packed(rS, rWeights)
        if cutlass.const_expr(rRaw is not None):
            self.mods.derive(scores, by_row(rRaw), place)


def of_columns(mRows, place, sizes):
    """A number of each of a thread's columns, which are rows of scores, and whether there is such a row."""
    found = []
    for column in place.columns:
        query = place.start + column
        at = sizes.of_query(place.tile, cutlass.min(query, sizes.seqlen_q - 1))
        found.append((mRows[at], query < sizes.seqlen_q))
    return found


class InPairs:
    """Numbers of columns in shared memory, as a function of row and column. Two at a time are read, since registers are
    few: it is called column by column.
    """

    def __init__(self, numbers):
        self.numbers, self.pair, self.read = numbers, None, None

    def __call__(self, r, c):
        if c // 2 != self.pair:
            self.pair, self.read = c // 2, cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(self.numbers[None, self.pair], self.read)
        return self.read[c % 2]
