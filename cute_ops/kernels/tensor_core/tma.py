"""TMA copies of tiles: their atoms, and their views of memory and of stages in shared memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync


class TmaTensor(NamedTuple):
    """A tensor that TMA loads or stores tile by tile: what a kernel takes of it.

    Attributes:
        atom: the copy; None for a tensor that threads copy.
        tensor: of coordinates, as the copy takes it; then the tensor itself.
        layout: of the stages in shared memory, ``(rows, columns, stages)``, swizzled.
    """

    atom: Any
    tensor: Any
    layout: Any


def load_tensor(mX, layout, tile, sharers=1):
    """A tensor whose tiles TMA loads. Each of the CTAs of a cluster that share a tile loads a part of it for all."""
    shared = sharers > 1
    operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
    stage = cute.select(layout, mode=[0, 1])
    return TmaTensor(*cpasync.make_tiled_tma_atom(operation, mX, stage, tile, num_multicast=sharers), layout)


def store_tensor(mX, layout, tile):
    """A tensor whose tiles TMA stores."""
    stage = cute.select(layout, mode=[0, 1])
    return TmaTensor(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, stage, tile), layout)


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class TmaCopy:
    """A copy between stages and tiles of memory, by one thread.

    Attributes:
        atom: the copy.
        tXsX: stages, ``(tma, stages)``.
        tXgX: tiles of memory, ``(tma, ...)``.
        mask: the CTAs that a load writes to, as bits; None for this one.
    """

    atom: Any
    tXsX: Any
    tXgX: Any
    mask: Any = None

    def load(self, at, stage):
        """Load the tile at these coordinates into a stage, whose mbarrier counts the bytes."""
        tXgX, tXsX = self.tXgX[(None, *at)], self.tXsX[None, stage.index]
        cute.copy(self.atom, tXgX, tXsX, tma_bar_ptr=stage.full, mcast_mask=self.mask)

    def store(self, at, stage):
        """Store a stage as the tile at these coordinates."""
        cute.copy(self.atom, self.tXsX[None, stage], self.tXgX[(None, *at)])


class Sharing(NamedTuple):
    """The CTAs of a cluster that share a tile.

    Attributes:
        ranks: the cluster's layout.
        rank: this CTA's coordinate.
        mode: the dim of the cluster along which they lie.
    """

    ranks: Any
    rank: Any
    mode: int

    @property
    def count(self):
        return self.ranks.shape[self.mode]

    @property
    def mask(self):
        return cute.make_layout_image_mask(self.ranks, self.rank, mode=self.mode) if self.count > 1 else None


def tma_copy(atom, sX, gX, sharing=None):
    """The copy of tiles gX, ``(rows, columns, ...)``, to or from stages sX, ``(rows, columns, stages)``."""
    rank, count = (0, 1) if const_expr(sharing is None) else (sharing.rank[sharing.mode], sharing.count)
    tXsX, tXgX = cpasync.tma_partition(
        atom, rank, cute.make_layout(count), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )
    return TmaCopy(atom, tXsX, tXgX, sharing.mask if sharing else None)
