"""Mean and rstd of a row, and the sums that the norms compute them from.

Each class sums over the threads of a row and derives from the sums, for the forward, what to subtract from the row and
what to multiply it by; for the backward, with ``x`` the row and ``g`` the gradient of the normalised row, the terms of
``dx = g * rstd - (x - mean) * pull - push``.
"""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import compiler_barrier_value, fragment, trimmed
from cute_ops.kernels.lib.row_reduce import RowSum

# Elements of a thread from which on its mean is near that of the row: off by a standard deviation in one of thousands.
DENSE = 8


def row_statistics(centred, tile, eps, backward, stages, *, narrow=False, held=True):
    """The sums of a norm's rows; ``narrow``: elements have 16 bits; ``held``: threads hold the rows in registers."""
    if not centred:
        return MeanSquare(tile, eps, backward, stages)
    if held and not backward and tile.cluster == 1:
        # A second exchange within a CTA costs less than the corrections that a single one needs.
        return TwoPass(tile, eps, backward, stages)
    return Moments(tile, eps, backward, stages, narrow)


def centre(x, mean):
    """A vector minus the row's mean; the vector itself if that is None."""
    return x if mean is None else x - mean


def normalised(x, mean, rstd):
    """``(x - mean) * rstd``: zero where all elements of a row are equal. One FMA, ``x*rstd - mean*rstd``, would leave
    the rounding error of ``mean*rstd`` there.
    """
    return centre(x, mean) * rstd


def total(x):
    """Sum of a thread's vector."""
    return x.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


class Total:
    """Sum of products over a thread's vectors, in several independent sums that hide an addition's latency."""

    def __init__(self, per_thread):
        self.width = 4 if per_thread > 1 else 1
        self.sums = []

    def add(self, *factors):
        """Add the sum of a vector, or of the product of two."""
        for j in range(cute.size(factors[0].shape)):
            value = math.prod((f[j] for f in factors[1:]), start=factors[0][j])
            if len(self.sums) < self.width:
                self.sums.append(value)
            else:
                self.sums[j % self.width] = self.sums[j % self.width] + value

    def value(self):
        if not self.sums:
            return Float32(0.0)
        while len(self.sums) > 1:
            half = len(self.sums) // 2
            # Of an odd number of sums the last one has no partner.
            pairs = [self.sums[i] + self.sums[i + half] for i in range(half)]
            self.sums = pairs + self.sums[2 * half :]
        return self.sums[0]


class Statistics(RowSum):
    """The part that the norms' sums share."""

    def row(self, read, first, shared, step):
        """(mean, rstd) of a row in the forward, after ``step`` others; ``read``, ``first``: as in :meth:`thread`."""
        values = self.thread(read, first, self.counts(first))
        return self.forward_terms(self(values, shared, Int32(step)), 1.0 / self.tile.n)


class MeanSquare(Statistics):
    """RMS norms: ``rstd = rsqrt(mean(x^2) + eps)``; nothing is subtracted."""

    centred = False

    def __init__(self, tile, eps, backward, stages):
        super().__init__(tile, values=2 if backward else 1, stages=stages)
        self.eps = eps

    def counts(self, first):
        """Counts of a thread's elements, which depend on its columns only: computed once for all rows."""
        return None

    def thread(self, read, first, counts):
        """A thread's sums. ``read(k)`` gives its k-th vectors, (x,) or (x, g), zero outside the row, from the column
        ``first[k]`` on.
        """
        totals = [Total(self.tile.per_thread) for _ in range(self.values)]
        for k in range(self.tile.per_thread):
            vectors = read(k)
            for t, v in zip(totals, vectors):
                t.add(vectors[0], v)
        return tuple(t.value() for t in totals)

    def begin(self):
        return (Float32(0.0),) * self.values

    def without_counts(self, sums):
        """The sums that differ from row to row; :meth:`with_counts` puts the others back."""
        return sums

    def with_counts(self, sums, counts):
        return sums

    def add(self, sums, vectors, first, n):
        """A thread's sums after one more vector, whose first column is ``first``, of a row of n elements."""
        x = vectors[0]
        return (*(s + total(x * v) for s, v in zip(sums, vectors)), *sums[len(vectors) :])

    def whole(self, sums):
        """The sums of :meth:`add` in the form that :meth:`thread` returns."""
        return sums

    def forward_terms(self, sums, inverse):
        """(mean, rstd) of a row of ``1 / inverse`` elements."""
        return None, cute.math.rsqrt(sums[0] * inverse + self.eps, fastmath=True)

    def backward_terms(self, sums, inverse):
        """(mean, rstd, pull, push)."""
        mean, rstd = self.forward_terms(sums, inverse)
        return mean, rstd, rstd * rstd * rstd * (sums[1] * inverse), None


class Moments(Statistics):
    """Layer norm: mean and ``rstd = rsqrt(mean((x - mean)^2) + eps)``.

    A mean may be large compared with the deviations from it, so squares of uncentred numbers are never added. Vectors,
    then threads, warps and rows sum deviations from their own mean and correct them by the difference to the common
    mean (Chan, Golub and LeVeque). The lanes of a warp, and the warps of a row, are merged with all sums at once, with
    deviations from the mean of one of them. If that is far from the common mean, bits cancel; so if lanes hold few
    elements, the common mean is computed first. A warp sends its mean, its sum of squared deviations, in the backward
    the sums of g and of g times the deviations, and its number of elements if warps differ in it.
    """

    centred = True

    def __init__(self, tile, eps, backward, stages, narrow=False):
        # No counts are sent if all are equal; the backward sends them as a pair.
        counts = 0 if tile.even else 2 if backward else 1
        super().__init__(tile, values=(4 if backward else 2) + counts, stages=stages)
        self.backward, self.narrow = backward, narrow
        self.eps = eps
        self.halved = self.halved and backward
        self.dense = tile.n is not None and tile.n >= DENSE * tile.cluster * tile.threads_per_row

    def counts(self, first):
        """Elements of the row that this thread and its warp hold, the reciprocals, and a lane of the warp that holds
        any.
        """
        tile = self.tile
        if tile.even:
            count = float(tile.per_thread * tile.vec)
            together = count * min(tile.threads_per_row, WARP)
            return (count, 1.0 / count), (together, 1.0 / together), Int32(0)
        lanes = min(tile.threads_per_row, WARP)
        lane = cute.arch.thread_idx()[0] % lanes
        held, together = 0, 0
        for k, f in enumerate(first):
            held = held + self._held(k, f, tile.vec)
            together = together + self._held(k, f - lane * tile.vec, lanes * tile.vec)
        lane = Int32(0)
        if tile.per_thread == 1 and tile.v.unit > tile.vec:
            # The first lanes may have vectors before the row only.
            holding = cute.arch.vote_ballot_sync(Int32(held) > 0)
            lane = cute.arch.bfind(holding & -holding)
        count, together = compiler_barrier_value(Float32(held)), compiler_barrier_value(Float32(together))
        return (count, _reciprocal(count)), (together, _reciprocal(together)), lane

    def _held(self, k, first, width):
        """Elements of the row among the ``width`` columns from ``first`` on, which k-th vectors cover."""
        if self.tile.starts_outside(k) or self.tile.ends_outside(k):
            return self._inside(first, self.tile.n, width)
        return width

    def _inside(self, first, n, width):
        """How many of the columns ``first ... first + width - 1`` are inside the row."""
        return cutlass.max(cutlass.min(first + width, n) - cutlass.max(first, 0), 0)

    def thread(self, read, first, counts):
        """A thread's sums, the counts included; arguments as those of :meth:`MeanSquare.thread`."""
        tile, (count, inverse) = self.tile, counts[0]
        inner = [k for k in range(tile.per_thread) if not (tile.starts_outside(k) or tile.ends_outside(k))]
        if self.narrow and inner:
            # One pass over deviations from one of the thread's own numbers. However far that is from the others, the
            # sum that cancels is at most the thread's number of elements times the result: a few bits of fp32.
            pivot = read(inner[0])[0][0]
            total, squares, gradients, products = self._deviations(read, first, pivot)
            shift = _quotient(total, count, inverse)
            return counts, pivot + shift, squares - total * shift, gradients, products - gradients * shift
        sums = Total(tile.per_thread)
        for k in range(tile.per_thread):
            sums.add(read(k)[0])
        mean = _quotient(sums.value(), count, inverse)
        if tile.per_thread > 4:
            # This many vectors are read again instead of kept in registers.
            cute.arch.sync_warp()
        _, *others = self._deviations(read, first, mean)
        return counts, mean, *others

    def _deviations(self, read, first, middle):
        """A thread's sums: deviations from ``middle``, their squares, g, and deviations times g."""
        sums = [Total(self.tile.per_thread) for _ in range(4)]
        for k in range(self.tile.per_thread):
            if self.tile.sparse(k):
                rFound = fragment(Float32, 4, 0.0)
                self._deviations_if(first[k] < self.tile.n, rFound, read, first, middle, k)
                for i, t in enumerate(sums[: 4 if self.backward else 2]):
                    t.sums[0] = t.sums[0] + rFound[i]
            else:
                self._deviate(sums, read, first, middle, k)
        return tuple(t.value() for t in sums)

    @cute.jit
    def _deviations_if(
        self, valid: Boolean, rFound: cute.Tensor, read: cutlass.Constexpr, first: cutlass.Constexpr, middle: Float32,
        k: cutlass.Constexpr,
    ):  # fmt: skip
        """The sums of the k-th vectors alone, if they exist."""
        if valid:
            sums = [Total(2) for _ in range(4)]
            self._deviate(sums, read, first, middle, k)
            for i in cutlass.range_constexpr(4 if self.backward else 2):
                rFound[i] = sums[i].value()

    def _deviate(self, sums, read, first, middle, k):
        """Add the k-th vectors to a thread's sums."""
        x, *g = read(k)
        deviation = x - middle
        if self.tile.starts_outside(k) or self.tile.ends_outside(k):
            deviation = trimmed(deviation, first[k], self.tile.n)
        sums[0].add(deviation)
        sums[1].add(deviation, deviation)
        if g:
            sums[2].add(*g)
            sums[3].add(deviation, *g)

    def begin(self):
        return (Float32(0.0),) * 5

    def without_counts(self, sums):
        return sums[1:]

    def with_counts(self, sums, counts):
        return counts, *sums

    def add(self, sums, vectors, first, n):
        """A thread's sums after one more vector, whose first column is ``first``, of a row of n elements."""
        count, mean, squares, gradients, products = sums
        inside = Float32(self._inside(first, n, self.tile.vec))
        after = count + inside
        own = _quotient(total(vectors[0]), inside, _reciprocal(inside))
        deviation = trimmed(vectors[0] - own, first, n)
        step = (own - mean) * (inside * _reciprocal(after))
        squares = squares + total(deviation * deviation) + (own - mean) * step * count
        if self.backward:
            g = total(vectors[1])
            products = products - step * gradients + total(deviation * vectors[1]) + (own - mean - step) * g
            gradients = gradients + g
        return after, mean + step, squares, gradients, products

    def whole(self, sums):
        """The sums of :meth:`add` in the form that :meth:`thread` returns."""
        together = self.warp_sum(sums[0])
        return ((sums[0], None), (together, _reciprocal(together)), Int32(0)), *sums[1:]

    def arrive(self, values, shared, step):
        ((count, _), (together, inverse), lane), mean, squares, gradients, products = values
        origin = self._of_lane(mean, lane)
        if not self.dense:
            origin = origin + _quotient(self.warp_sum((mean - origin) * count), together, inverse)
        deviation = mean - origin
        moved = deviation * count
        squares, products = squares + deviation * moved, products + deviation * gradients
        if not self.backward:
            moved, squares = self.warp_sum(moved), self.warp_sum(squares)
            shift = _quotient(moved, together, inverse)
            found = [origin + shift, squares - shift * moved]
        elif self.halved:
            # The upper half of a warp holds the second sum of each pair.
            sums, others = self.warp_sums((moved, gradients, squares, products))
            shift = _quotient(self._of_lane(sums, 0), together, inverse)
            found = [cutlass.select_(cute.arch.lane_idx() < WARP // 2, origin + shift, sums), others - shift * sums]
        else:
            moved, gradients, squares, products = map(self.warp_sum, (moved, gradients, squares, products))
            shift = _quotient(moved, together, inverse)
            found = [origin + shift, gradients, squares - shift * moved, products - shift * gradients]
        if not self.tile.even:
            found += [Float32(together)] * (2 if self.backward and not self.halved else 1)
        return self.send(tuple(found), shared, step)

    def _of_lane(self, value, lane):
        """The value of a lane among those that share a row and a warp."""
        others = WARP - min(self.tile.threads_per_row, WARP)
        return cute.arch.shuffle_sync(value, offset=lane, mask_and_clamp=others << 8 | WARP - 1)

    @cute.jit
    def _combine(self, sSum, stage, lane, row):
        # Each lane takes the sums of one warp: those of all warps would take a vector's registers per sum.
        group = min(1 << (self.partials - 1).bit_length(), WARP)
        partials, pivot = [], sSum[0, 0, row, stage]
        for p in cutlass.range_constexpr(0, self.partials, group):
            place = p + lane % group
            inside = place < self.partials
            if const_expr(p + group > self.partials):
                place = cutlass.select_(inside, place, Int32(0))
            partial = self._partial(sSum, place, row, stage)
            if const_expr(p + group > self.partials):
                partial = [cutlass.select_(inside, Float32(v), Float32(0.0)) for v in partial]
            partials.append(partial)
        return self._merge(partials, pivot, lambda v: cute.arch.warp_reduction(v, operator.add, threads_in_group=group))

    def _partial(self, sSum, p, row, stage):
        """(count, mean, gradients, squares, products) of a warp; (count, mean, squares) in the forward."""
        values = [sSum[i, p, row, stage] for i in range(self.values)]
        count = float(self.tile.per_thread * self.tile.vec * WARP) if self.tile.even else values[-1]
        return [count, *values[: 4 if self.backward else 2]]

    def _merge(self, partials, pivot, across):
        """The row's mean and sums from those of its warps, which ``across`` adds up over the lanes."""
        if self.tile.n is not None:
            inverse = 1.0 / self.tile.n
        else:
            count = Float32(0.0)
            for partial in partials:
                count = count + partial[0]
            inverse = _reciprocal(across(count))
        moved, gradients, squares, products = (Float32(0.0) for _ in range(4))
        for partial in partials:
            deviation = partial[1] - pivot
            step = deviation * partial[0]
            moved, squares = moved + step, squares + partial[3 if self.backward else 2] + deviation * step
            if self.backward:
                gradients, products = gradients + partial[2], products + partial[4] + deviation * partial[2]
        moved, squares = across(moved), across(squares)
        shift = moved * inverse
        mean, squares = pivot + shift, squares - shift * moved
        if not self.backward:
            return mean, squares
        gradients, products = across(gradients), across(products)
        return mean, gradients, squares, products - shift * gradients

    def wait(self, given, shared, step):
        """The row's (mean, squares), in the backward (mean, gradients, squares, products)."""
        sums = super().wait(given, shared, step)
        return sums[: 4 if self.backward else 2]

    def forward_terms(self, sums, inverse):
        return sums[0], cute.math.rsqrt(sums[1] * inverse + self.eps, fastmath=True)

    def backward_terms(self, sums, inverse):
        mean, gradients, squares, products = sums
        _, rstd = self.forward_terms((mean, squares), inverse)
        # A row's only element is its mean, so its gradient is zero; rstd, up to 1 / sqrt(eps), would blow up rounding.
        if self.tile.n is None:
            rstd = cutlass.select_(Float32(inverse) == 1.0, Float32(0.0), rstd)
        elif self.tile.n == 1:
            rstd = Float32(0.0)
        return mean, rstd, rstd * rstd * rstd * (products * inverse), rstd * (gradients * inverse)


class TwoPass(Statistics):
    """Layer norm in a forward whose rows one CTA holds: the mean first, then the squared deviations from it."""

    centred = True

    def __init__(self, tile, eps, backward, stages):
        super().__init__(tile, values=1, stages=2)
        self.eps = eps

    def counts(self, first):
        return None

    def row(self, read, first, shared, step):
        tile = self.tile
        sums, squares = Total(tile.per_thread), Total(tile.per_thread)
        for k in range(tile.per_thread):
            sums.add(read(k)[0])
        (found,) = self((sums.value(),), shared, Int32(2 * step))
        # Divided, not multiplied by the reciprocal, so that equal numbers are their own mean, whatever their number.
        mean = _quotient(found, float(tile.n), 1.0 / tile.n)
        for k in range(tile.per_thread):
            deviation = read(k)[0] - mean
            if tile.starts_outside(k) or tile.ends_outside(k):
                deviation = trimmed(deviation, first[k], tile.n)
            squares.add(deviation, deviation)
        (found,) = self((squares.value(),), shared, Int32(2 * step + 1))
        return mean, cute.math.rsqrt(found * (1.0 / tile.n) + self.eps, fastmath=True)


def _reciprocal(count):
    """The approximate reciprocal of a number of elements; undefined if that is zero."""
    return 1.0 / count if isinstance(count, float) else cute.arch.rcp_approx(cutlass.max(count, Float32(1.0)))


def _quotient(value, count, inverse):
    """``value / count``, corrected once: an error of the reciprocal, the same in all warps, would shift the mean."""
    if isinstance(count, float) and math.frexp(count)[0] == 0.5:
        return value * inverse
    quotient = value * inverse
    return quotient + (value - quotient * count) * inverse
