"""The base of the kernels of attention's forward."""

from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.mods import Mods
from cute_ops.kernels.attention.softmax import softmax_of
from cute_ops.kernels.attention.tiles import Tiles


class ForwardKernel:
    """What the forward kernels share: sizes, functions of scores, and which tiles of keys a block of queries has."""

    def __init__(self, variant):
        config, attrs, dims = AttentionConfig.of(variant.config), variant.attrs, variant.dims
        self.d, self.dv, self.tile_n = dims["d"], dims["e"], config.tile_n
        self.mods = Mods(attrs["scale"] or self.d**-0.5, config.score, config.mask, config.bounds)
        self.tiles = Tiles(config.block, self.tile_n, self.mods)
        self.softmax = softmax_of(self.mods, self.dv, variant.tensors["q"].dtype)
        self.packed = "cu_seqlens_q" in variant.names

    def _count(self, sizes):
        """How many blocks of queries all heads have."""
        blocks, batches = self.tiles.blocks(sizes, 0)
        return blocks * sizes.heads * batches

    def _tile(self, index, sizes):
        """The block of queries with an index, and the sizes of its sequence."""
        return self.tiles.queries_at(index, sizes, (self.d + self.dv) * self.dtype.width // 8)

    def _keys_of(self, tile, own):
        """The first and the last tile of keys of a block of queries; first > last if there is none."""
        return self.tiles.keys_of(tile, own)

    def _scale_scores(self, rS, tile, sizes):
        """Multiply products by the scale of keys, where there is one."""

    def _of_values(self, factors, at):
        """Multiply the factors of two rows of sums by the scale of values, where there is one."""
