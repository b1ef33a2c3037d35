"""All gradients of attention from scores that are computed once, of long sequences, on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_keys_sm90 import following
from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS
from cute_ops.kernels.attention.bwd_two_shares_sm90 import TwoShares
from cute_ops.kernels.attention.config import MMA_ROWS
from cute_ops.kernels.attention.products import mma_of_scores, mma_of_weights, multiply, multiply_weights
from cute_ops.kernels.attention.registers import store_packed
from cute_ops.kernels.attention.sums import CHUNK, TOGETHER, neighbouring_rows
from cute_ops.kernels.attention.tensors import address_of, transposed
from cute_ops.kernels.attention.tiles import Tile
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARP, WARPGROUP


class LongSequencesBackward(TwoShares):
    """What :class:`OnePassBackward` computes, of long sequences and heads of 128 without changes of scores.

    Tile: 80 queries, of which a warpgroup has 64 columns of dq, transposed. A tile's products end before the next one's
    begin: registers would hold both tiles' operands.
    Numbers of rows are read before scores are waited for; cotangents are free once dv's product is done. CTAs do not
    add in turns. 1 x 32768 with 16 heads takes 37396 us instead of 38570, causal 18258 instead of 20257.
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

    @cute.jit
    def _differentiate_all(self, consumer: cutlass.Constexpr, sizes: cutlass.Constexpr):
        keys, slot = consumer.keys, make_pipeline_state(PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(self._rounds(sizes), unroll=1):
            head, queries, last, steps = self._steps(keys, sizes, i)
            first = queries
            for _ in cutlass.range(steps, unroll=1):
                tile = Tile(keys.block, head, keys.batch)
                if self.tiles.some(tile, sizes, queries, tile.block):
                    self._differentiate(consumer, slot, (tile, queries), sizes)
                    slot.advance()
                head, queries = following(head, queries, first, last)

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
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block)
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
