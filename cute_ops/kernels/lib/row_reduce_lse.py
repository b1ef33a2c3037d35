"""Sums of exponentials that never overflow: a maximum, and a sum relative to it.

``lse = log(sum(exp(x))) = M + log(S)`` with ``M = max(x)`` and ``S = sum(exp(x - M))``. Two such pairs combine into
one, so each thread computes its own pair and one exchange combines them all. If the maximum is -inf, the sum is
relative to 0: a thread without elements contributes nothing, and a row of -inf alone has S = 0.

M and log(S) are not added, because rounding a large M would lose more than all of log(S). A plain sum is kept relative
to the maximum too, P = sum(x - M) of C elements: for a larger maximum M', C * (M - M') is added, which has its sign.
"""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.row_reduce import RowSum


def origin(m):
    """The number that sums are relative to if the maximum is ``m``."""
    return cutlass.select_(m > -Float32.inf, m, Float32(0.0))


def moved(state, top):
    """A pair, and its plain sum if there is one, made relative to an equal or larger maximum."""
    m, s, *plain = state
    base = origin(top)
    s = s * exponentials(m, base)
    if not plain:
        return (top, s)
    p, count = plain
    return (top, s, p + count * (origin(m) - base), count)


def exponentials(x, m):
    """``exp(x - m)``; the difference is exact where the exponential is large."""
    return cute.math.exp2((x - m) * LOG2_E, fastmath=True)


class RowLogSum(RowSum):
    """Exchanges the values of a :class:`LogSum` over the threads of each row of a tile. A subclass may exchange several
    states at once (``_states``), and have sums that become relative to a larger maximum in another way (``_moved``).
    """

    def __init__(self, tile, values, stages):
        super().__init__(tile, values, stages)
        self.halved = False

    def _states(self, values):
        """The states among a thread's values: each a maximum and sums."""
        return [values]

    def _moved(self, state, top):
        """A state, made relative to an equal or larger maximum."""
        return moved(state, top)

    def warp_sums(self, values):
        return self._reduce(values, min(self.tile.threads_per_row, WARP))

    def _reduce(self, values, group):
        """Across the lanes of a group."""
        found = []
        for state in self._states(values):
            top = cute.arch.warp_reduction(state[0], cute.arch.fmax, threads_in_group=group)
            _, *sums = self._moved(state, top)
            found += [top, *(cute.arch.warp_reduction(v, operator.add, threads_in_group=group) for v in sums)]
        return tuple(found)

    def _combine(self, sSum, stage, lane, row):
        found = []
        for states in zip(*map(self._states, self._partials(sSum, stage, lane, row))):
            top = states[0][0]
            for state in states[1:]:
                top = cute.arch.fmax(top, state[0])
            sums = [Float32(0.0) for _ in states[0][1:]]
            for state in states:
                _, *partials = self._moved(state, top)
                sums = [total + partial for total, partial in zip(sums, partials)]
            found += [top, *sums]
        return tuple(found) if self.partials <= 8 else self._reduce(tuple(found), WARP)

    def _partials(self, sSum, stage, lane, row):
        """The values of each partial sum, or those of each 32nd one, from the lane's on."""
        if self.partials <= 8:
            places = [Int32(p) for p in range(self.partials)]
            insides = [True] * self.partials
        else:
            count, starts = self.partials, range(0, self.partials, WARP)
            places = [Int32(p) + lane for p in starts]
            insides = [True if p + WARP <= count else p + lane < count for p in starts]
        found = []
        for place, inside in zip(places, insides):
            if inside is True:
                found.append([sSum[i, place, row, stage] for i in range(self.values)])
            else:
                safe = cutlass.select_(inside, place, Int32(0))
                empty = [-Float32.inf] + [Float32(0.0)] * (self.values - 1)
                found.append(
                    [cutlass.select_(inside, sSum[i, safe, row, stage], empty[i]) for i in range(self.values)]
                )  # fmt: skip
        return found


class LogSum:
    """The pair (M, S) of a row, as a reduction for :class:`cute_ops.kernels.rowwise.one_pass.OnePassRows`.

    Args:
        plain: whether to compute P and C too, the sum of ``x - M`` and the number of elements.
    """

    empty = -math.inf

    def __init__(self, plain=False):
        self.plain = plain
        self.values = 4 if plain else 2

    def across(self, tile, stages):
        return RowLogSum(tile, self.values, stages)

    def start(self):
        return (Float32(-Float32.inf), *[Float32(0.0)] * (self.values - 1))

    def add(self, state, get, inside):
        """Add a vector, which ``get()`` reads; ``inside`` tells which of its elements are inside the row."""
        (x,) = get()
        top = cute.arch.fmax(state[0], x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        return self._with(moved(state, top), x, inside)

    def gather(self, gets, insides):
        """The state of all vectors at once: the maximum is found first, so no sum is corrected."""
        top = -Float32.inf
        for get in gets:
            top = cute.arch.fmax(top, get()[0].reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        state = (self.number(top), *self.start()[1:])
        for get, inside in zip(gets, insides):
            state = self._with(state, self.vector(get()[0]), inside)
        return state

    def number(self, x):
        """The summand of an element; it grows with the element."""
        return x

    def vector(self, x):
        return x

    def _with(self, state, x, inside):
        """The state with a vector added, whose elements its maximum covers already."""
        top, s, *plain = state
        base = origin(top)
        s = s + exponentials(x, base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        if not self.plain:
            return (top, s)
        p, count = plain
        p = p + inside.only(x - base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return (top, s, p, count + inside.count())
