"""All gradients of attention from scores that are computed once, of short heads and tiles of 128 queries, on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from cute_ops.kernels.attention.bwd_keys_sm90 import following
from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS
from cute_ops.kernels.attention.bwd_two_shares_sm90 import TwoShares
from cute_ops.kernels.attention.products import multiply, multiply_weights
from cute_ops.kernels.attention.registers import PART, store_packed
from cute_ops.kernels.attention.tiles import Tile
from cute_ops.kernels.tensor_core.sizes import WARPGROUP


class TallOnePass(TwoShares):
    """What :class:`OnePassBackward` computes, of heads of up to 64 elements, where at most a cap changes scores and
    each query attends to one interval of keys.

    Of a tile of 128 queries each warpgroup has 64 rows of dq: what a product reads of shared memory serves twice as
    many numbers as of 64. A tile's dk and dq are multiplied while the next tile's scores are exponentiated: a warpgroup
    waits for the other one's ds half of that later, so that one exponentiates while the other one multiplies.
    13 x 2432 with 8 heads take 840 us instead of 862 by products that end with their tile.
    """

    reads_early, sharing = False, 1

    @cute.jit
    def _differentiate_all(self, consumer: cutlass.Constexpr, sizes: cutlass.Constexpr):
        keys = consumer.keys
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        before = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        head, queries, last, steps = self._steps(keys, sizes, 0)
        first = queries
        if steps > 0:
            self._begin_with(consumer, slot, (Tile(keys.block, head, keys.batch), queries), sizes)
            slot.advance()
            next_head, next_queries = following(head, queries, first, last)
            for _ in cutlass.range(steps - 1, unroll=1):
                if self.tiles.some(Tile(keys.block, next_head, keys.batch), sizes, next_queries, keys.block):
                    ended = Tile(keys.block, head, keys.batch), queries
                    at = Tile(keys.block, next_head, keys.batch), next_queries
                    self._end_and_begin(consumer, (before, slot), ended, at, sizes)
                    before.advance()
                    slot.advance()
                    head, queries = next_head, next_queries
                next_head, next_queries = following(next_head, next_queries, first, last)
            self._end(consumer, before, (Tile(keys.block, head, keys.batch), queries), sizes)

    def _begin_with(self, consumer, slot, at, sizes):
        """Compute ds of the first tile of queries."""
        (ring_q, ring_o), products = consumer.rings, consumer.products
        (mma_dv, tVrO), (rS, rP, rWeights, _, _, rDv, _) = products.dv, consumer.registers
        ring_q.consumer_wait(slot)
        multiply(*products.scores, rS, (0, slot.index))
        lse = self._numbers(consumer.rows[0], slot, consumer.tidx)
        warpgroup.wait_group(0)
        place, way = self._hide(consumer, at, sizes)
        self.weights.of_parts((rS, rWeights), range(self.tile_q // PART), (lse, place), way)
        ring_o.consumer_wait(slot)
        multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        multiply(*products.cotangents, rP, (0, slot.index))
        self._put_ds(consumer, slot)

    def _end_and_begin(self, consumer, slots, ended, at, sizes):
        """Multiply what gives dk and dq of a tile, and compute ds of the next one. ``slots``: of both."""
        (ring_q, ring_o), products, (before, slot) = consumer.rings, consumer.products, slots
        rS, rP, rWeights, rDs, rDk, rDv, rDq = consumer.registers
        (mma_dv, tVrO), (mma_dk, tKrQ), parts = products.dv, products.dk, self.tile_q // PART
        ring_q.consumer_wait(slot)
        multiply(*products.scores, rS, (0, slot.index))
        multiply_weights(mma_dk, rDs, tKrQ, rDk, before.index)
        lse = self._numbers(consumer.rows[0], slot, consumer.tidx)
        warpgroup.wait_group(1)
        place, way = self._hide(consumer, at, sizes)
        self.weights.of_parts((rS, rWeights), range(parts // 2), (lse, place), way)
        warpgroup.wait_group(0)
        ring_q.consumer_release(before)
        self._multiply_keys(products, rDq, before)
        self.weights.of_parts((rS, rWeights), range(parts // 2, parts), (lse, place), way)
        ring_o.consumer_wait(slot)
        multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        warpgroup.wait_group(1)
        consumer.add(rDq, *ended, sizes)
        warpgroup.wait_group(0)  # registers do not hold weights, ds and cotangents at once
        multiply(*products.cotangents, rP, (0, slot.index))
        self._put_ds(consumer, slot)

    def _end(self, consumer, before, ended, sizes):
        """Multiply what gives dk and dq of the last tile."""
        products, (*_, rDs, rDk, _, rDq) = consumer.products, consumer.registers
        mma_dk, tKrQ = products.dk
        multiply_weights(mma_dk, rDs, tKrQ, rDk, before.index)
        self._multiply_keys(products, rDq, before)
        warpgroup.wait_group(0)
        consumer.rings[0].consumer_release(before)
        consumer.add(rDq, *ended, sizes)

    def _hide(self, consumer, at, sizes):
        """The place of a tile's scores, and what :meth:`Weights.hide` returns."""
        place, (tile, queries) = self._place(consumer.tidx, *at, sizes), at
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block)
        return place, self.weights.hide(consumer.registers.rS, place, whole, rest)

    def _put_ds(self, consumer, slot):
        """Wait for the cotangents of weights, and write ds."""
        rS, rP, _, rDs, *_ = consumer.registers
        delta = self._numbers(consumer.rows[1], slot, consumer.tidx)
        warpgroup.wait_group(0)
        self._cotangents_of_scores(rS, rP, delta)
        store_packed(rS, rDs)
        consumer.rings[1].consumer_release(slot)
        consumer.put_ds(rDs, slot.index)
        cute.arch.fence_view_async_shared()

    def _multiply_keys(self, products, rDq, slot):
        """Issue the product that gives dq, once both warpgroups have written ds."""
        cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
        multiply(*products.dq, rDq, (slot.index, 0))
