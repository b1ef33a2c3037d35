"""Tables of what a mask reads of captured arrays: the least and the largest number for each tile of queries or keys.

So a mask such as ``document[batch, q] == document[batch, k]`` has bounds over a tile of scores, without an array of its
size and whatever the order of documents.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.kernels.attention.tiles import Sizes
from cute_ops.kernels.tensor_core.sizes import WARP

WARPS = 8


class Ranges:
    """Fills both tables: ``(2 * reads + 1, batches, heads, tiles)``, of each read the least and then the largest
    numbers. A warp has one tile of one head; the first CTAs have those of queries.
    Behind the numbers of queries is a count of the blocks that CTAs have drawn, 0 as yet.
    """

    def __init__(self, tiles):
        self.tiles, self.mods, self.sizes = tiles, tiles.mods, (tiles.tile_q, tiles.tile_k)

    def launch(self, sizes, stream):
        if any(table is not None for table in sizes.ranges):
            self.kernel(tuple(sizes)).launch(
                grid=[ctas_of(sizes, 0) + ctas_of(sizes, 1), 1, 1], block=[WARP * WARPS, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, sizes):
        sizes, cta = Sizes(*sizes), cute.arch.block_idx()[0]
        first = ctas_of(sizes, 0)
        if const_expr(sizes.ranges[0] is not None):
            if (cta == 0) & (cute.arch.thread_idx()[0] == 0):
                sizes.ranges[0][2 * len(self.mods.by_query), 0, 0, 0] = Float32(0.0)
        if cta < first:
            self._fill(sizes, 0, cta)
        else:
            self._fill(sizes, 1, cta - first)

    @cute.jit
    def _fill(self, sizes: cutlass.Constexpr, axis: cutlass.Constexpr, cta):
        """Write the numbers of a CTA's tiles of queries, 0, or of keys, 1."""
        mTable, count = sizes.ranges[axis], tiles_of(sizes, axis)
        if const_expr(mTable is not None):
            heads, tiles, lane = Int32(mTable.shape[2]), Int32(mTable.shape[3]), cute.arch.lane_idx()
            # The last CTA may have more warps than there are tiles left: they compute the last one, and store nothing.
            number = cta * WARPS + cute.arch.warp_idx()
            index = cutlass.min(number, count - 1)
            which = index // tiles
            slot, batch = index - which * tiles, which // heads
            head = which - batch * heads
            tile, own = self.tiles.placed(slot, head, batch, sizes, axis)
            for i, (low, high) in enumerate(self.of_tile(tile.block, (tile.batch, head), lane, own, axis)):
                for offset in (16, 8, 4, 2, 1):
                    low = cute.arch.fmin(low, cute.arch.shuffle_sync_bfly(low, offset=offset))
                    high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, offset=offset))
                if (lane == 0) & (number < count):
                    mTable[2 * i, batch, head, slot] = low
                    mTable[2 * i + 1, batch, head, slot] = high

    def of_tile(self, tile, at, lane, sizes, axis):
        """The least and the largest number of a thread's places in a tile, for each read."""
        size, mask = self.sizes[axis], self.mods.mask
        last = cutlass.min((tile + 1) * size, sizes.lengths[axis]) - 1
        shift, found = (sizes.shift, Int32(0))[axis], []
        for step in range(0, size, WARP):
            place = Float32(cutlass.min(tile * size + lane + step, last) + shift)
            operands = [*map(Float32, at), *((place, None) if axis == 0 else (None, place)), *sizes.counts]
            values = []
            for i in range(len(mask.mod.reads)):
                other = mask.mod.depends(i)[1 - axis]
                operands.append(None if other else mask.read(i, operands, sizes.captured))
                if i in (self.mods.by_query, self.mods.by_key)[axis]:
                    values.append(operands[-1])
            found.append(values)
        pairs = []
        for each in zip(*found):
            low = high = each[0]
            for x in each[1:]:
                low, high = cute.arch.fmin(low, x), cute.arch.fmax(high, x)
            pairs.append((low, high))
        return pairs


def tiles_of(sizes, axis):
    """Tiles of all heads and batches that a table is for; 0 where there is none."""
    mTable = sizes.ranges[axis]
    return Int32(0) if mTable is None else Int32(mTable.shape[1]) * Int32(mTable.shape[2]) * Int32(mTable.shape[3])


def ctas_of(sizes, axis):
    return cute.ceil_div(tiles_of(sizes, axis), WARPS)
