"""The softmax of rows that arrive in tiles: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cute_ops.kernels.attention.registers import by_row, exp2, rounded_product
from cute_ops.kernels.lib.activation import LOG2_E

LN2 = math.log(2)
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
