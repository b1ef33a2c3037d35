"""The base of the kernels of attention's forward."""

import cutlass
import cutlass.cute as cute

from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.mods import Mods
from cute_ops.kernels.attention.softmax import softmax_of
from cute_ops.kernels.attention.tiles import Tiles


class ForwardKernel:
    """Parts of the forward kernels: sizes, functions of scores, and which tiles of keys a block of queries has."""

    def __init__(self, variant):
        config, attrs, dims = AttentionConfig.of(variant.config), variant.attrs, variant.dims
        self.d, self.dv, self.tile_n, self.heads = dims["d"], dims["e"], config.tile_n, config.heads
        self.mods = Mods(attrs["scale"] or self.d**-0.5, config.score, config.mask, config.bounds)
        self.tiles = Tiles(config.block, self.tile_n, self.mods)
        self.softmax = softmax_of(self.mods, self.d, self.dv, variant.tensors["q"].dtype)
        self.packed = "cu_seqlens_q" in variant.names

    def _count(self, sizes):
        """How many blocks of queries all heads have, or all groups of them that share a block."""
        blocks, batches = self.tiles.blocks(sizes, 0)
        return blocks * self._grouped(sizes).heads * batches

    def _grouped(self, sizes):
        """Sizes with groups of heads that share a block in the place of heads."""
        if self.heads == 1:
            return sizes
        return sizes._replace(heads=sizes.heads // self.heads, heads_per_kv=sizes.heads_per_kv // self.heads)

    def _steps(self, sizes):
        """In how many steps a CTA goes through blocks, and a function from a step to the index of a block, which is no
        less than their count where the CTA has none.

        Blocks of heads that are walked together come from the longest to the shortest. Every other row of CTAs takes
        them the other way round, so that each CTA has as much work: else the first one of a row had most each time (2 x
        8192 causal, 32 heads: 3% more than on average). CTAs that have one block more than others do are those behind
        the ones that had before: else they were the same for all heads (17000, 32 heads: 15% more than on average).
        """
        count, ctas, own = self._count(sizes), cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        together = self._together(sizes)
        together = cutlass.select_(together > ctas, together, count)
        rows = cute.ceil_div(together, ctas)

        def index_of(step):
            section = step // rows
            row, first = step - section * rows, section * together
            length = cutlass.min(together, count - first)
            reversed_end = (section + cute.ceil_div(length, ctas)) % 2 == 0  # of the section, its last row
            mine = own - cutlass.select_(reversed_end, first + length, first) % ctas
            mine = cutlass.select_(mine < 0, mine + ctas, mine)
            place = row * ctas + cutlass.select_((section + row) % 2 == 0, mine, ctas - 1 - mine)
            return cutlass.select_(place < length, first + place, count)

        return cute.ceil_div(count, together) * rows, index_of

    def _together(self, sizes):
        """How many indices heads have that are walked together."""
        blocks, _ = self.tiles.blocks(sizes, 0)
        return self.tiles.heads_together(self._grouped(sizes), self._bytes_of_key) * blocks

    @property
    def _bytes_of_key(self):
        return (self.d + self.dv) * self.dtype.width // 8

    def _tile(self, index, sizes):
        """The block of queries with an index, of the first head that shares it, and the sizes of its sequence."""
        tile, own = self.tiles.queries_at(index, self._grouped(sizes), self._bytes_of_key)
        own = own._replace(heads=sizes.heads, heads_per_kv=sizes.heads_per_kv)
        return tile._replace(head=tile.head * self.heads), own

    def _keys_of(self, tile, own):
        """The first and the last tile of keys of a block of queries; first > last if there is none."""
        return self.tiles.keys_of(tile, own)

    def _scale_scores(self, rS, tile, sizes):
        """Multiply products by the scale of keys, where there is one."""

    def _of_values(self, factors, at):
        """Multiply the factors of two rows of sums by the scale of values, where there is one."""
