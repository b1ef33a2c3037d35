"""The tiles of a product, as the CTAs of persistent clusters take them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.kernels.gemm.scheduler import bytes_by_grouping, tile_count, tile_of_batch


def tile_order(config, mA, mB, tile):
    """The order in which clusters take tiles: rows and columns of clusters' tiles, whether columns are grouped, and of
    a batch the number of matrices, of parts theirs.
    """
    m, n = Int32(mA.shape[0]), Int32(mB.shape[0])
    rows = cute.ceil_div(m, tile[0] * config.cluster_m)
    across = cute.ceil_div(n, tile[1] * config.cluster_n)
    by_rows, by_columns = bytes_by_grouping(rows, across, config.group, Int64(m), Int64(n))
    batch = (cute.size(mA, mode=[2]),) if const_expr(cute.rank(mA) > 2) else ()
    if const_expr(config.parts > 1):
        batch = (Int32(config.parts),)
    return rows, across, Int32(by_columns < by_rows), *batch


def cluster_count(config, order):
    """No more clusters than the waves need: the last wave is as full as the others. One for each tile where a cluster
    shares k.
    """
    if config.cluster_k > 1:
        return tile_count(order)
    waves = cute.ceil_div(tile_count(order), config.clusters)
    return cute.ceil_div(tile_count(order), cutlass.max(waves, 1))


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class ProductTiles:
    """Coordinates of this CTA's tiles.

    Attributes:
        config: of the product.
        order: see :func:`tile_order`.
    """

    config: GemmConfig
    order: Any

    @property
    def count(self):
        """Tiles of all clusters."""
        return tile_count(self.order)

    def coordinate(self, index):
        """Row and column of a tile and, in a batch, its matrix."""
        config, (x, y, _) = self.config, cute.arch.block_idx()
        row, column, *batch = tile_of_batch(index, self.order, config.group)
        if config.cluster_k > 1:
            return row, column, *batch
        return row * config.cluster_m + x, column * config.cluster_n + y, *batch

    def stored(self, index):
        """The coordinate of what this CTA stores of a tile, in parts of ``stored_n`` columns."""
        row, column, *batch = self.coordinate(index)
        if self.config.cluster_k == 1:
            return row, column, *batch
        return row, column * self.config.cluster_k + self.rank_k, *batch

    @property
    def rank_k(self):
        """This CTA's place among those that share k."""
        return cute.arch.block_idx()[0]

    def steps(self, count, coordinate):
        """The first of ``count`` steps of k that a CTA adds up of a tile and the one after the last: all of them or one
        part of what its cluster shares or the tile is of. The last parts may be past the end, where TMA gives zeros.
        """
        if self.config.cluster_k == self.config.parts == 1:
            return 0, count
        each = self.each(count)
        index = self.rank_k if self.config.cluster_k > 1 else coordinate[2]
        return index * each, (index + 1) * each

    def each(self, count):
        """The steps of k of a part, of so many altogether."""
        return cute.ceil_div(count, self.config.cluster_k * self.config.parts)

    def matrix(self, coordinate):
        """The matrix of a batch; empty where both operands are one matrix."""
        return coordinate[2:] if self.config.parts == 1 else ()
