"""The reductions of a row's stages over its threads: sums, largest and smallest numbers beside each other."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.hardware import WARP
from cute_ops.kernels.emit.primitives import COMBINE, NEUTRAL
from cute_ops.kernels.lib.row_reduce import RowSum

COPIES = 2  # of the shared memory: a row takes its stages one after another, see :class:`RowSum`


def exchanges(tile, stages):
    """One reduction over the threads for each stage. All use the shared memory and mbarriers of the first."""
    most = max(map(len, stages), default=0)
    plain = all(len(primitives) == most and {*primitives} <= {"sum", "mean"} for primitives in stages)
    return [RowSum(tile, most, COPIES) if plain else RowExchange(tile, primitives, most) for primitives in stages]


class RowExchange(RowSum):
    """A :class:`RowSum` in which each number has its own reduction; numbers beyond the reductions are not used."""

    def __init__(self, tile, primitives, values):
        super().__init__(tile, values, COPIES)
        self.halved = False
        self.combine, self.neutral = (
            [COMBINE[primitive] for primitive in primitives],
            [NEUTRAL[primitive] for primitive in primitives],
        )

    def warp_sums(self, values):
        found = self._across_lanes(values, min(self.tile.threads_per_row, WARP))
        return (*found, *[Float32(0.0)] * (self.values - len(found)))

    def _across_lanes(self, values, lanes):
        return tuple(
            cute.arch.warp_reduction(value, combine, threads_in_group=lanes)
            for value, combine in zip(values, self.combine)
        )

    def _combine(self, sSum, stage, lane, row):
        few = self.partials <= 8
        found = [Float32(neutral) for neutral in self.neutral]
        for p in range(0, self.partials, 1 if few else WARP):
            place, inside = (Int32(p), True) if few else (p + lane, p + WARP <= self.partials)
            if not few and not inside:
                place = cutlass.min(place, self.partials - 1)
            for i, combine in enumerate(self.combine):
                value = sSum[i, place, row, stage]
                if not inside:
                    value = cutlass.select_(p + lane < self.partials, value, Float32(self.neutral[i]))
                found[i] = combine(found[i], value)
        return tuple(found) if few else self._across_lanes(found, WARP)
