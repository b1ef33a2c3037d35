"""The tiles of a product, as the CTAs of persistent clusters take them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.kernels.gemm.scheduler import bytes_by_grouping, tile_count, tile_of_batch


def tile_order(config, mA, mB, columns):
    """The order in which clusters take tiles: rows and columns of clusters' tiles, whether columns are grouped, and of
    a batch, or of a split k, the number of matrices.
    """
    m, n = Int32(mA.shape[0]), Int32(mB.shape[0])
    rows = cute.ceil_div(m, config.tile_m * config.cluster_m)
    across = cute.ceil_div(n, columns * config.cluster_n)
    by_rows, by_columns = bytes_by_grouping(rows, across, config.group, Int64(m), Int64(n))
    batch = (cute.size(mA, mode=[2]),) if const_expr(cute.rank(mA) > 2) else ()
    if const_expr(config.split_k > 0):
        batch = (split_count(config, mA),)
    return rows, across, Int32(by_columns < by_rows), *batch


def split_count(config, mA):
    """The ranges that k is split into, none of which is empty."""
    return cutlass.min(Int32(config.split_k), cute.ceil_div(Int32(mA.shape[1]), config.tile_k))


def cluster_count(config, order):
    """No more clusters than the waves need: the last wave is as full as the others."""
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
        """Row and column of a tile and, in a batch, its matrix; with a split k its range of k."""
        config, (x, y, _) = self.config, cute.arch.block_idx()
        row, column, *batch = tile_of_batch(index, self.order, config.group)
        return row * config.cluster_m + x, column * config.cluster_n + y, *batch

    def steps(self, count, coordinate):
        """The first of ``count`` steps of k that a tile adds up, and the one after the last: all of them, or a range
        of a split k.
        """
        if self.config.split_k == 0:
            return 0, count
        part, parts = coordinate[2], self.order[3]
        return part * count // parts, (part + 1) * count // parts

    def matrix(self, coordinate):
        """The matrix of a batch; empty where both operands are one matrix, also with a split k."""
        return () if self.config.split_k else coordinate[2:]
