"""The online softmax that does not look for a tile's largest scores."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_ops.kernels.attention.registers import by_row
from cute_ops.kernels.attention.softmax import GROWTH, OnlineSoftmax
from cute_ops.kernels.lib.activation import LOG2_E

# A row's largest score is replaced when a thread's weights of a tile add up to more: float16 holds such weights.
MOST_WEIGHT = 1024.0
LARGEST = 2.0**120  # a weight of which float32 holds the inverse


class LazySoftmax(OnlineSoftmax):
    """:class:`OnlineSoftmax`, where a row keeps the largest score it has as long as its weights stay small: a tile's
    scores are exponentiated before its largest ones are looked for, and the sum of the weights tells whether they are
    small.

    To look for the largest scores takes a fifth of the instructions, and nothing is exponentiated meanwhile. Weights
    that are too large are divided by the largest one of their row. Where a weight is :data:`LARGEST` or more, a tile's
    scores are multiplied again, and the warp looks for the largest ones in the later tiles of its block.
    """

    def __init__(self, scale):
        super().__init__(scale, growth=GROWTH)

    @cute.jit
    def add_later(self, rS, sums: cutlass.Constexpr, rLazy, again: cutlass.Constexpr):
        """Do what :meth:`add` does, of a tile that is not a block's first one.

        Args:
            rS: scores.
            sums: rMax and rSum, as :meth:`add` has them.
            rLazy: one Int32: 1 as long as the warp does not look for the largest scores of the block's tiles.
            again: a function that makes the scores anew.
        """
        (rMax, rSum), factors = sums, cute.make_rmem_tensor(2, Float32)
        factors.fill(1.0)
        is_added = cute.arch.vote_all_sync((rLazy[0] > 0) & (rMax[0] > -Float32.inf) & (rMax[1] > -Float32.inf))
        if is_added:
            found = self._weigh(rS, rMax)
            small = (found[0] <= MOST_WEIGHT) & (found[1] <= MOST_WEIGHT)  # false of NaN
            if cute.arch.vote_all_sync(small):
                for r in cutlass.range_constexpr(2):
                    rSum[r] = rSum[r] + found[r]
            elif cute.arch.vote_all_sync((found[0] < LARGEST) & (found[1] < LARGEST)):
                self._shrink(rS, rMax, found, factors)
                for r in cutlass.range_constexpr(2):
                    rSum[r] = (rSum[r] + found[r]) * factors[r]
            else:
                again()
                rLazy[0] = Int32(0)
                is_added = Boolean(False)
        if not is_added:
            factors.store(self.add(rS, rMax, rSum).load())
        return factors

    def _weigh(self, rS, rMax):
        """Replace scores by their exponentials, less the largest one before; returns their sum of each row."""
        scale, shifts = Float32(self.scale * LOG2_E), [self._scaled(rMax[r]) for r in range(2)]
        return [self._of_row(rS, r, lambda x, shift=shift: x * scale - shift) for r, shift in enumerate(shifts)]

    def _shrink(self, rS, rMax, found, factors):
        """Divide weights of rows by the largest one, where they are too large, whatever other rows have. ``found``: a
        thread's sums of them.
        """
        scores = by_row(rS)
        for r, largest in enumerate(self.largest(rS)):
            total = found[r]
            for offset in (2, 1):
                total = cute.arch.fmax(total, cute.arch.shuffle_sync_bfly(total, offset=offset))
            largest = cutlass.select_(total > MOST_WEIGHT, largest, Float32(1.0))
            factors[r] = cute.arch.rcp_approx(largest)
            rMax[r] = rMax[r] + cute.math.log2(largest, fastmath=True) * Float32(1.0 / (self.scale * LOG2_E))
            for c in range(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] * factors[r]

    def exponentiate(self, rS, r, rSum, factor, exponent):
        """What the base does, with a tile's sum added as by :meth:`add_later`."""
        rSum[r] = rSum[r] * factor + self._of_row(rS, r, exponent)

    def _of_row(self, rS, r, exponent):
        """Replace a row's numbers by powers of two; returns their sum."""
        found = cute.make_rmem_tensor(2, Float32)
        found.fill(0.0)
        super().exponentiate(rS, r, found, Float32(1.0), exponent)
        return found[r]
