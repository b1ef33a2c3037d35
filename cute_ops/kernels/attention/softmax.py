"""The softmax of rows that arrive in tiles: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_ops.kernels.lib.activation import LOG2_E

LN2 = math.log(2)
PART = 16  # columns of weights that one instruction multiplies
# A row's largest score is replaced only by one whose exponential is 2**GROWTH times as large or more: to rescale sums
# of 128 columns takes as many instructions as a tile of 128 keys has scores.
GROWTH = 8.0
NEGLIGIBLE = 1e-6  # an error of a weight, relative to the row's largest weight
LARGEST = 1e38  # a factor that float32 holds
# How far a row's weights may be below and above 1, as powers of e, where they have the exponents of float32.
LOWEST, HIGHEST = 60.0, 20.0


class Near(NamedTuple):
    """An odd polynomial in the place of tanh(x): factors of x, x^3 and so on, and the largest abs(x) that it is for."""

    factors: tuple[float, ...]
    bound: float


# By the least elements of a head: wrong by 3.4e-6, 6.8e-6 and 9.5e-6 of tanh at most, as little as scores in float32
# are, which are sums of so many products.
CUBICS = {
    16: Near((0.9999965658347145, -0.3314233210879795), 0.12), 64: Near((0.99999319, -0.33064564), 0.1425),
    128: Near((0.99999048, -0.33015769), 0.155),
}  # fmt: skip
# Wrong by 3.4e-6 of tanh at most, and it ascends everywhere.
QUINTIC = Near((0.9999966173826041, -0.33286093587899307, 0.12343751134273151), 0.36)


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
MOST_WRONG = 1e-4  # an error of scores, and so of weights relatively, that 16 bits do not show


def by_row(rX):
    """A thread's accumulators by its two rows: (row, column). Neighbours are two columns of one row."""
    count = cute.size(rX) // 4
    return cute.make_tensor(rX.iterator, cute.make_layout((2, (2, count)), stride=(2, (1, 4))))


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    """``ex2.approx``, once: LLVM computes a pure function again where that saves a register."""
    value = llvm.inline_asm(
        T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Float32(value)


@dsl_user_op
def rounded_product(x, y, *, loc=None, ip=None):
    """``x * y``, rounded: not fused with an addition that follows."""
    operands = [Float32(each).ir_value(loc=loc, ip=ip) for each in (x, y)]
    value = llvm.inline_asm(
        T.f32(), operands, "mul.rn.f32 $0, $1, $2;", "=f,f,f",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Float32(value)


@dsl_user_op
def pack(low, high, dtype, *, loc=None, ip=None):
    """Two numbers as 16-bit floats in one register, here: LLVM moves a conversion to where its result is used, past
    instructions that multiply, and keeps twice the registers until then.
    """
    name = {"Float16": "f16x2", "BFloat16": "bf16x2"}[dtype.__name__]
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    value = llvm.inline_asm(
        T.i32(), operands, f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Int32(value)


def store_packed(rX, rP):
    """Convert a thread's accumulators to 16-bit floats, in their order."""
    pairs = cute.recast_tensor(rP, Int32)
    for i in range(cute.size(pairs)):
        pairs[i] = pack(rX[2 * i], rX[2 * i + 1], rP.element_type)


def into_pairs(rP):
    """A function that converts weights of neighbouring columns, one after another, and stores them in pairs; it does
    nothing without ``rP``.
    """
    pairs, first = None if rP is None else cute.recast_tensor(rP, Int32), {}

    def put(r, c, weight):
        if pairs is not None and c % 2 == 0:
            first[r] = weight
        elif pairs is not None:
            pairs[c // 2 * 2 + r] = pack(first[r], weight, rP.element_type)

    return put


def columns_of_part(part):
    """A thread's columns of those that one instruction multiplies."""
    return range(PART // 4 * part, PART // 4 * (part + 1))


def store_part(rX, rP, part):
    """:func:`store_packed` of the columns that one instruction multiplies."""
    scores, pairs = by_row(rX), cute.recast_tensor(rP, Int32)
    for c in columns_of_part(part)[::2]:
        for r in range(2):
            pairs[c + r] = pack(scores[r, c], scores[r, c + 1], rP.element_type)


class OnlineSoftmax:
    """The largest score and the sum of exponentials of a thread's two rows, over the tiles so far.

    The four threads of a row agree on the largest one and keep sums of their own columns. Exponents are of base 2, so
    that one FMA scales and shifts.

    Args:
        scale, offset: scores are ``scale * x + offset`` of the numbers that are given; the scale is positive.
        growth: a row keeps the largest score it has until a tile has one that is larger by this power of two. While it
            does, sums of earlier tiles are not rescaled, and weights may be larger than 1.

    Attributes:
        least: a row's largest number before its first tile.
    """

    least = -math.inf

    def __init__(self, scale, offset=0.0, growth=0.0):
        self.scale, self.offset, self.growth = scale, offset, growth

    def log2(self, largest):
        """The largest score, of base 2."""
        score = self._scaled(largest)
        return score + Float32(self.offset * LOG2_E) if self.offset else score

    def _scaled(self, number):
        """A number times the scale, of base 2, by which exponents are shifted. An offset takes most of it away: fused
        with that it would be another number than without.
        """
        scale = Float32(self.scale * LOG2_E)
        return rounded_product(number, scale) if self.offset else number * scale

    @cute.jit
    def add(self, rS, rMax, rSum):
        """Replace a tile's scores by their exponentials, less the largest so far; returns for each row what sums over
        earlier tiles are to be multiplied by.
        """
        scale, largest, factors = Float32(self.scale * LOG2_E), self.largest(rS), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            shift, factors[r] = self.grow(rMax, r, largest[r])
            self.exponentiate(rS, r, rSum, factors[r], lambda x: x * scale - shift)
        return factors

    def add_changed(self, rS, sums, whole, change, hide):
        """Replace a tile's products by exponentials of scores; returns what :meth:`add` does.

        Args:
            rS: products of queries and keys.
            sums: rMax and rSum, as :meth:`add` has them.
            whole: whether no key is left out.
            change: changes products into scores.
            hide: replaces scores of keys that are left out by -inf.
        """
        change()
        hide()
        return self.add(rS, *sums)

    def largest(self, rS, of=lambda x: x):
        """The largest number of each row of a tile, or of what ``of`` makes of them: its four threads agree on it."""
        scores, found = by_row(rS), []
        for r in range(2):
            largest = [of(scores[r, c]) for c in range(4)]
            for c in range(4, cute.size(scores, mode=[1])):
                largest[c % 4] = cute.arch.fmax(largest[c % 4], of(scores[r, c]))
            highest = cute.arch.fmax(cute.arch.fmax(largest[0], largest[1]), cute.arch.fmax(largest[2], largest[3]))
            for offset in (2, 1):
                highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=offset))
            found.append(highest)
        return found

    def grow(self, rMax, r, largest):
        """Update a row's largest number by a tile's; returns the shift of exponents, and the factor of sums so far."""
        scale, before = Float32(self.scale * LOG2_E), rMax[r]
        highest = cute.arch.fmax(before, largest)
        if self.growth:
            # Of a row without a key so far -inf - -inf is NaN, for which the comparison is false.
            kept = (highest - before) * scale < self.growth
            highest = cutlass.select_(kept, before, highest)
        # A row without a key so far: -inf less -inf would be NaN.
        shift = self._scaled(cutlass.select_(highest == -Float32.inf, Float32(0.0), highest))
        factor, rMax[r] = exp2(before * scale - shift), highest
        return shift, cutlass.select_(kept, Float32(1.0), factor) if self.growth else factor

    def exponentiate(self, rS, r, rSum, factor, exponent):
        """Replace a row's numbers by powers of two, and add them to its sum so far, times a factor."""
        scores, sums = by_row(rS), [rSum[r] * factor, Float32(0.0)]
        for c in range(cute.size(scores, mode=[1])):
            scores[r, c] = exp2(exponent(scores[r, c]))
            sums[c % 2] = sums[c % 2] + scores[r, c]
        rSum[r] = sums[0] + sums[1]

    @cute.jit
    def rescale_grown(self, rX, factors):
        """:meth:`rescale`; with ``growth`` only if the largest score of any row of the warp has been replaced."""
        if cutlass.const_expr(not self.growth):
            self.rescale(rX, factors)
        elif cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            self.rescale(rX, factors)

    def rescale(self, rX, factors):
        """Multiply a thread's accumulators by a factor of each row."""
        values = by_row(rX)
        for r in range(2):
            for c in range(cute.size(values, mode=[1])):
                values[r, c] = values[r, c] * factors[r]

    def finish(self, rMax, rSum, sink):
        """The log-sum-exp of each row, -inf of a row without keys, and what its sum of values is to be multiplied by.

        Args:
            rMax, rSum: of a thread's rows.
            sink: one more score of each row, without a value; or None.
        """
        lse, factors = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in range(2):
            total, highest = rSum[r], self.log2(rMax[r])
            for offset in (2, 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if self.least > -math.inf:
                highest = cutlass.select_(total == 0.0, -Float32.inf, highest)
            share = Float32(1.0)
            if sink is not None:
                score = sink * Float32(LOG2_E)
                largest = cute.arch.fmax(highest, score)
                # Without a key and a sink: -inf less -inf would be NaN.
                shift = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
                share = exp2(highest - shift)
                total, highest = total * share + exp2(score - shift), shift
            lse[r] = (highest + cute.math.log2(total, fastmath=True)) * Float32(LN2)
            factors[r] = cutlass.select_(total == 0.0, Float32(0.0), share / total)
        return lse, factors


class CappedSoftmax(OnlineSoftmax):
    """The softmax of ``a * tanh(b * x)``, where a polynomial replaces tanh in tiles for which it is accurate enough.

    The exponential and the reciprocal in each tanh take half of the forward's time: an SM computes 16 of these a clock,
    and its tensor cores 8 scores. A polynomial takes two or three multiplications. It is used if the largest product of
    each row of a warp is in its range. In other tiles scores are computed as those of any function are, right to 2e-7
    of ``a``.

    Of tiles of which keys are left out the absolute products are compared, those of hidden keys, too. Their scores are
    computed before keys are hidden.

    With ``signed`` products smaller than the range may get a wrong score, but one so far below the largest that its
    weight is negligible. Else the largest absolute product is taken, also in the place of the largest: all products are
    in the range, so that a polynomial need not ascend outside, and weights may be smaller, for which float16 has no
    exponents.

    Args:
        cap: a and b.
        scale, offset, growth: see :class:`OnlineSoftmax`; scale and offset are those of changed scores.
        signed: see above.
        d: elements of a head, that products are summed over.
    """

    def __init__(self, cap, scale, offset, growth, signed, d=min(CUBICS)):
        super().__init__(scale, offset, growth)
        (self.outer, self.inner), self.signed = cap, signed
        self.near = (QUINTIC,) if signed else (CUBICS[max(n for n in CUBICS if n <= d)], QUINTIC)
        self.farthest = LOWEST / 2

    def range_of(self, near):
        """Between which numbers a row's largest product is where a polynomial is accurate enough."""
        if self.outer * self.inner ** (2 * len(near.factors) - 1) > LARGEST:
            return 0.0, 0.0  # of a cap so small that float32 does not hold its factors
        if not self.signed:
            return 0.0, min(near.bound, self.farthest / self.outer) / self.inner
        points = [near.bound + i / 100 for i in range(400)]
        wrong = [(u, min(abs(polynomial(near, u) - math.tanh(u)) * self.outer, 1.0)) for u in points]
        lowest = max(math.log(max(error, 1e-30) / NEGLIGIBLE) - self.outer * math.tanh(u) for u, error in wrong)
        low = -math.inf if lowest < -self.outer else math.atanh(min(lowest / self.outer, 0.999)) / self.inner
        return max(low, -near.bound / self.inner), near.bound / self.inner

    def holds(self, largest, near):
        """Whether a polynomial is accurate enough for all rows of a warp; ``largest``: each row's largest product."""
        low, high = map(Float32, self.range_of(near))
        inside = [(x >= low) & (x <= high) for x in largest]
        return cute.arch.vote_all_sync(inside[0] & inside[1])

    def add_changed(self, rS, sums, whole, change, hide):
        factors = cute.make_rmem_tensor(2, Float32)
        largest = self.largest(rS) if self.signed else self.largest(rS, cute.math.absf)
        self._add(rS, (sums, factors), whole, (largest, change, hide), 0)
        return factors

    @cute.jit
    def _add(
        self, rS, numbers: cutlass.Constexpr, whole, given: cutlass.Constexpr, which: cutlass.Constexpr
    ):  # fmt: skip
        """:meth:`add_changed` by the polynomials from one on, or by none."""
        (sums, factors), (largest, change, hide) = numbers, given
        if cutlass.const_expr(which == len(self.near)):
            if self.holds_of_part(rS, largest, whole):
                self.add_part(rS, sums, factors, hide)
            else:
                change()
                hide()
                factors.store(self.add(rS, *sums).load())
        elif whole & self.holds(largest, self.near[which]):
            self.add_near(rS, sums, largest, factors, self.near[which])
        else:
            self._add(rS, numbers, whole, given, which + 1)

    @cute.jit
    def holds_of_part(self, rS, largest: cutlass.Constexpr, whole):
        """Whether keys of a tile are left out, and the last polynomial is accurate enough for all of a warp."""
        found, bound = Boolean(False), Float32(QUINTIC.bound / self.inner)
        if not whole:
            absolute = self.largest(rS, cute.math.absf) if cutlass.const_expr(self.signed) else largest
            found = cute.arch.vote_all_sync((absolute[0] <= bound) & (absolute[1] <= bound))
        return found

    def add_part(self, rS, sums, factors, hide):
        """Do what :meth:`add` does, for a tile of which :meth:`holds_of_part` is true; ``factors`` gets the result."""
        (rMax, rSum), scores = sums, by_row(rS)
        for r in range(2):
            for c in range(cute.size(scores, mode=[1])):
                scores[r, c] = self._near(QUINTIC, scores[r, c])
        hide()
        offset, largest = Float32(self.offset * LOG2_E), self.largest(rS)
        for r in range(2):
            # Numbers of which ``scale * y + offset`` are scores, as rMax keeps them.
            changed = (largest[r] - offset) * Float32(1.0 / (self.scale * LOG2_E))
            shift, factors[r] = self.grow(rMax, r, changed)
            shift = shift + offset
            self.exponentiate(rS, r, rSum, factors[r], lambda x, shift=shift: x - shift)

    def _near(self, near, x, shift=None):
        """The score of a product by a polynomial, of base 2, less a shift."""
        first, *others = (
            Float32(self.outer * LOG2_E * factor * self.inner ** (2 * i + 1)) for i, factor in enumerate(near.factors)
        )
        square, value = x * x, others[-1]
        for factor in (*others[-2::-1], first):
            value = square * value + factor
        return x * value if shift is None else x * value - shift

    @cute.jit
    def add_near(
        self, rS, sums: cutlass.Constexpr, largest: cutlass.Constexpr, factors, near: cutlass.Constexpr
    ):  # fmt: skip
        """Do what :meth:`add` does, for products of which :meth:`holds` is true; ``factors`` gets the result."""
        rMax, rSum = sums
        for r in cutlass.range_constexpr(2):
            # rMax keeps the changed number y, of which ``scale * y + offset`` is the score.
            u = largest[r] * Float32(-2.0 * self.inner * LOG2_E)
            changed = cute.arch.rcp_approx(exp2(u) + 1.0)
            shift, factors[r] = self.grow(rMax, r, changed)
            shift = shift + Float32(self.offset * LOG2_E)
            self.exponentiate(rS, r, rSum, factors[r], lambda x: self._near(near, x, shift))


class BoundedSoftmax(CappedSoftmax):
    """:class:`CappedSoftmax` of caps so small that weights may be those of scores less 0: a row's largest number is
    that of a score of 0 until a tile has a far larger one. Tiles for which a polynomial is accurate enough have none:
    their largest scores are not looked for, and no sums rescaled.
    """

    def __init__(self, cap, scale, offset, d=min(CUBICS)):
        super().__init__(cap, scale, offset, GROWTH, signed=False, d=d)
        self.least, self.farthest = -offset / scale, HIGHEST

    def add_changed(self, rS, sums, whole, change, hide):
        factors, scores, largest = cute.make_rmem_tensor(2, Float32), by_row(rS), []
        factors.fill(1.0)
        for r in range(2):  # of a thread: votes are of all
            parts = [Float32(0.0)] * 2
            for c in range(cute.size(scores, mode=[1])):
                parts[c % 2] = cute.arch.fmax(parts[c % 2], cute.math.absf(scores[r, c]))
            largest.append(cute.arch.fmax(*parts))
        self._add(rS, (sums, factors), whole, (largest, change, hide), 0)
        return factors

    def holds_of_part(self, rS, largest, whole):
        return (whole == False) & self.holds(largest, QUINTIC)  # noqa: E712

    def add_part(self, rS, sums, factors, hide):
        (rMax, rSum), scores = sums, by_row(rS)
        for r in range(2):
            shift = self.shift(rMax, r)
            for c in range(cute.size(scores, mode=[1])):
                scores[r, c] = self._near(QUINTIC, scores[r, c], shift)
        hide()
        for r in range(2):
            self.exponentiate(rS, r, rSum, 1.0, lambda x: x)

    def add_near(self, rS, sums, largest, factors, near):
        rMax, rSum = sums
        for r in range(2):
            shift = self.shift(rMax, r)
            self.exponentiate(rS, r, rSum, 1.0, lambda x, shift=shift: self._near(near, x, shift))

    def shift(self, rMax, r):
        return self._scaled(rMax[r]) + Float32(self.offset * LOG2_E)


def polynomial(near, x):
    return sum(factor * x ** (2 * i + 1) for i, factor in enumerate(near.factors))


class Weights:
    """The weights of scores whose log-sum-exp is known, and what a cotangent of scores is multiplied by.

    Args:
        mods: what is done to scores.
        scale: of scores.
    """

    def __init__(self, mods, scale):
        self.mods, self.scale, self.near = mods, scale, None
        if mods.cap is not None:
            # Polynomials are for caps of which float32 holds their factors, and of which scores are right.
            outer, inner = mods.cap
            held = LEAST_FACTOR < outer * inner**3 < LARGEST * min(mods.scale, 1.0) and outer >= LEAST_CAP
            self.near = next((each for each in GRADIENTS if held and outer * each.error < MOST_WRONG), None)

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
            near = self.hide(rS, place, whole, rest)
            self.of_parts((rS, rWeights), range(cute.size(rS) // (PART // 2)), (lse, place), near)
        elif cutlass.const_expr(not self.mods.is_changed_by_column):
            self._in_steps(rS, rWeights, place, lse, whole, rest)
        elif self._is_inside(place, whole):
            self._by_column(rS, rWeights, place, lse)
        else:
            self._in_steps(rS, rWeights, place, lse, whole, rest)

    @cute.jit
    def hide(self, rS, place: cutlass.Constexpr, whole, rest: cutlass.Constexpr = None):
        """Before :meth:`of_parts`: replace products that are left out by :attr:`hidden`. Returns whether polynomials
        are accurate enough for the others.
        """
        near = Boolean(False) if cutlass.const_expr(self.near is None) else self._is_near(rS)
        if not whole:
            self.mods.hide(by_row(rS), place, self.hidden, rest)
        return near

    @property
    def hidden(self):
        """What takes the place of a product that is left out: its weight is 0, as no row's ``lse`` is NaN."""
        if self.mods.cap is not None:
            return HIDDEN / self.mods.cap[1]
        return -Float32.inf if self.mods.outer[0] > 0 else Float32.inf

    @cute.jit
    def of_parts(self, registers: cutlass.Constexpr, parts: cutlass.Constexpr, at: cutlass.Constexpr, near):
        """What :meth:`of_scores` does, of the columns that some instructions multiply, behind :meth:`hide`, where at
        most a cap changes scores.

        Args:
            registers: a thread's products, and what gets the weights, see :meth:`of_scores`.
            parts: numbers of the instructions.
            at: ``lse(row, column)``, of base 2, and the place of the products.
            near: what :meth:`hide` has returned.
        """
        (rS, rWeights), (lse, place) = registers, at
        if cutlass.const_expr(self.mods.cap is None):
            for part in parts:
                self._plain(rS, part, lse)
                store_part(rS, rWeights, part)
        elif cutlass.const_expr(self.near is None):
            self._by_column(rS, rWeights, place, lse, parts)
        elif near:
            self._by_polynomial(rS, rWeights, lse, parts)
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
        scores, (outer, inner) = by_row(rS), self.mods.cap
        first, third = (Float32(outer * LOG2_E * c * inner ** (2 * i + 1)) for i, c in enumerate(self.near.value))
        flat, bent = (
            Float32(outer * inner / self.mods.scale * c * inner ** (2 * i)) for i, c in enumerate(self.near.slope)
        )
        put = into_pairs(rWeights)
        for c in (c for part in parts for c in columns_of_part(part)):
            for r in range(2):
                x = scores[r, c]
                square = x * x
                weight = exp2(x * (square * third + first) - lse(r, c))
                put(r, c, weight)
                scores[r, c] = weight * (square * bent + flat)

    def _by_column(self, rS, rWeights, place, lse, parts=None):
        """Gradients of a tile of which nothing is left out, or of parts of it where products may be :attr:`hidden`,
        with fewer registers: products are not kept.
        """
        scores, (scale, offset) = by_row(rS), (Float32(each * LOG2_E) for each in self.mods.outer)
        columns = None if parts is None else [c for part in parts for c in columns_of_part(part)]
        put = into_pairs(rWeights)
        for r, c, score, derive in self.mods.by_column(scores, place, columns):
            weight = exp2(score * scale - (lse(r, c) if self.mods.cap is None else lse(r, c) - offset))
            if self.mods.cap is not None:
                weight = cutlass.select_(scores[r, c] == Float32(self.hidden), Float32(0.0), weight)
            put(r, c, weight)
            scores[r, c] = derive(weight)

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


def softmax_of(mods, d, dv, dtype):
    """The softmax of a kernel.

    Args:
        mods: functions of scores.
        d, dv: elements of a key, of a value.
        dtype: of weights.
    """
    # Sums of up to 64 columns are rescaled as fast as a vote finds out whether they need to be.
    growth = GROWTH if dv > 64 else 0.0
    capped = None
    if mods.cap is not None and dtype == "bfloat16" and mods.cap[0] <= LOWEST:
        capped = BoundedSoftmax(mods.cap, *mods.outer, d)
    elif mods.cap is not None:
        capped = CappedSoftmax(mods.cap, *mods.outer, growth, dtype != "bfloat16", d)
    if capped and all(low < high for low, high in map(capped.range_of, capped.near)):
        return capped
    return OnlineSoftmax(*mods.outer, growth)
