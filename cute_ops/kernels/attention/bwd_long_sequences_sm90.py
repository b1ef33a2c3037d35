"""All gradients of attention from scores that are computed once, of long sequences, on Hopper."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS
from cute_ops.kernels.attention.bwd_one_tile_sm90 import OneTileAtATime
from cute_ops.kernels.attention.config import MMA_ROWS
from cute_ops.kernels.attention.products import mma_of_scores, mma_of_weights, multiply, multiply_weights
from cute_ops.kernels.attention.registers import store_packed
from cute_ops.kernels.attention.sums import CHUNK, TOGETHER, add_bytes, neighbouring_rows
from cute_ops.kernels.attention.tensors import Moved, address_of, transposed
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARP, WARPGROUP


class LongSequencesBackward(OneTileAtATime):
    """What :class:`OnePassBackward` computes, of long sequences and heads of 128 without changes of scores.

    Tile: 80 queries, of which a warpgroup has 64 columns of dq, transposed.
    Numbers of rows are read before scores are waited for; cotangents are free once dv's product is done. TMA adds dq
    without a descriptor, not in turns. 1 x 32768 with 16 heads takes 37396 us instead of 38570, causal 18258 instead of
    20257.
    """

    reads_early, apart = True, 1

    def _mmas(self, dtype):
        of_keys, of_ds, shape = OperandMajorMode.MN, OperandMajorMode.K, (MMA_M, self.tile_q)
        mma_dq = hopper.make_trivial_tiled_mma(dtype, dtype, of_keys, of_ds, Float32, (self.consumers, 1, 1), shape)
        weights = [mma_of_weights(dtype, width) for width in (self.d, self.dv)]
        return mma_of_scores(dtype, self.tile_q), *weights, mma_dq

    def _product_of_queries(self, mma_dq, sDs, k, group):
        first_dq = mma_dq.get_slice(group * WARPGROUP)
        tDrK = mma_dq.make_fragment_A(first_dq.partition_A(transposed(k.s)))  # (mma, d, n, 1)
        tDrDs = mma_dq.make_fragment_B(first_dq.partition_B(sDs))  # (mma, m, n, tiles)
        return tDrK, tDrDs, cute.make_rmem_tensor(mma_dq.partition_shape_C((self.d, self.tile_q)), Float32)

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

    def _differentiate(self, consumer, slot, at, sizes):
        (ring_q, ring_o), products, (lse, delta), tidx = consumer.rings, consumer.products, consumer.rows, consumer.tidx
        (tile, queries), (rS, rP, rWeights, rDs, rDk, rDv, rDq) = at, consumer.registers
        (mma_dv, tVrO), (mma_dk, tKrQ) = products.dv, products.dk
        place = self._place(tidx, tile, queries, sizes)
        ring_q.consumer_wait(slot)
        multiply(*products.scores, rS, (0, slot.index))
        of_column = self._numbers(lse, slot, tidx)
        ring_o.consumer_wait(slot)
        multiply(*products.cotangents, rP, (0, slot.index))
        warpgroup.wait_group(1)
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block, down=True)
        self.weights.of_scores(rS, rWeights, place, of_column, whole, rest)
        of_column = self._numbers(delta, slot, tidx)
        warpgroup.wait_group(0)
        self._cotangents_of_scores(rS, rP, of_column)
        store_packed(rS, rDs)
        consumer.put_ds(rDs, slot.index)
        multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
        multiply(*products.dq, rDq, (0, slot.index))
        warpgroup.wait_group(1)
        ring_o.consumer_release(slot)
        multiply_weights(mma_dk, rDs, tKrQ, rDk, slot.index)
        warpgroup.wait_group(1)
        consumer.add(rDq, tile, queries, sizes)
        warpgroup.wait_group(0)
        ring_q.consumer_release(slot)

    def _load_rows(self, mSums, at, chunk):
        """A chunk of two neighbouring rows, which eight threads have: each two columns, 8 apart, of both."""
        row, head, which = at
        place, share, column = row % self.tile_q, chunk * CHUNK // MMA_M, chunk * CHUNK % MMA_M
        thread = column // MMA_ROWS * WARP + place % 8 // 2
        number = share * (self.tile_q * MMA_M) + (place // 8 * WARPGROUP + thread) * TOGETHER
        number += column % MMA_ROWS // 8 * 2
        return neighbouring_rows(address_of(mSums, (row - place, 0, head, which), number))
