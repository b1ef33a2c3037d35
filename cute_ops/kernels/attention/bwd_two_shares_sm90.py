"""All gradients of attention from scores that are computed once, whose dq warpgroups add by themselves, on Hopper."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.kernels.attention.bwd_one_pass_sm90 import OnePassBackward
from cute_ops.kernels.attention.sums import add_bytes
from cute_ops.kernels.attention.tensors import Moved, address_of


class TwoShares(OnePassBackward):
    """Base of what :class:`OnePassBackward` computes where each warpgroup adds its share of dq by itself. A subclass
    has ``_differentiate_all``. TMA adds a share without a descriptor: it is one piece of memory.

    Shared memory: as :class:`OnePassBackward`, with a tile of ``ds`` for each stage.
    """

    keeps, by_queries, shares = False, True, OnePassBackward.consumers

    @property
    def tiles_of_ds(self):
        return self.stages

    def _added(self, mSums):
        """The sums, and the layout of what is added to a tile, in shares."""
        rows = self.tile_q // self.shares
        return mSums, cute.make_layout((rows, self.d, self.shares), stride=(self.d, 1, rows * self.d))

    def _place_of_sums(self, added, smem):
        m, of_sums = added
        return Moved(None, m, smem.allocate_tensor(Float32, of_sums, byte_alignment=128))

    def _of_head(self, sums, tile, sizes):
        """The address of a head's sums."""
        return address_of(sums.m, (sizes.first_slots[0] * self.tile_q, 0, tile.head, self._batch(tile, sizes)))

    def _add_share(self, sums, of_head, queries, share, sizes):
        size, source = self.tile_q * self.d * Float32.width // 8 // self.shares, Int32(sums.s.iterator.toint())
        add_bytes(of_head + Int64(self.shares * queries + share) * size, source + share * size, size)
