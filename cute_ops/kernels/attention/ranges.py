"""Tables of what a mask reads of captured arrays: the least and the largest number for each tile of queries or keys.

So a mask such as ``document[batch, q] == document[batch, k]`` has bounds over a tile of scores, without an array of its
size and whatever the order of documents.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.kernels.attention.tiles import Sizes
from cute_ops.kernels.tensor_core.sizes import WARP

WARPS = 8


class Ranges:
    """Fills both tables: ``(2 * reads, batches, heads, tiles)``, of each read the least and then the largest numbers. A
    warp has one tile of one head.
    """

    def __init__(self, tiles):
        self.tiles, self.mods, self.sizes = tiles, tiles.mods, (tiles.tile_q, tiles.tile_k)

    def launch(self, sizes, stream):
        for axis, reads in enumerate((self.mods.by_query, self.mods.by_key)):
            if reads:
                _, batches, heads, tiles = sizes.ranges[axis].shape
                warps = Int32(batches) * Int32(heads) * Int32(tiles)
                self.kernel(tuple(sizes), axis).launch(
                    grid=[cute.ceil_div(warps, WARPS), 1, 1], block=[WARP * WARPS, 1, 1], stream=stream
                )

    @cute.kernel
    def kernel(self, sizes, axis: cutlass.Constexpr):
        sizes = Sizes(*sizes)
        mTable = sizes.ranges[axis]
        heads, tiles, lane = Int32(mTable.shape[2]), Int32(mTable.shape[3]), cute.arch.lane_idx()
        count = Int32(mTable.shape[1]) * heads * tiles
        # The last CTA may have more warps than there are tiles left: they compute the last tile, and store nothing.
        number = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
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
