"""All gradients of attention from scores that are computed once, of short heads and tiles of 128 queries, on Hopper."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS
from cute_ops.kernels.attention.bwd_one_tile_sm90 import OneTileAtATime
from cute_ops.kernels.attention.products import multiply, multiply_weights
from cute_ops.kernels.attention.registers import store_packed
from cute_ops.kernels.tensor_core.sizes import WARPGROUP


class TallOnePass(OneTileAtATime):
    """What :class:`OnePassBackward` computes, of heads of up to 64 elements.

    Of a tile of 128 queries each warpgroup has 64 rows of dq, and adds them by itself. What a product reads of shared
    memory serves twice as many numbers. 4 x 4096 causal takes 1386 us instead of 1520 by :class:`ShortHeadsBackward`,
    all keys 2747 instead of 3012.
    """

    reads_early, sharing = False, 1

    def _differentiate(self, consumer, slot, at, sizes):
        (ring_q, ring_o), products, (lse, delta), tidx = consumer.rings, consumer.products, consumer.rows, consumer.tidx
        (tile, queries), (rS, rP, rWeights, rDs, rDk, rDv, rDq) = at, consumer.registers
        (mma_dv, tVrO), (mma_dk, tKrQ) = products.dv, products.dk
        early = self.mods.mask is None  # dv's product before that of dq and ds: as measured
        place = self._place(tidx, tile, queries, sizes)
        ring_q.consumer_wait(slot)
        multiply(*products.scores, rS, (0, slot.index))
        ring_o.consumer_wait(slot)
        multiply(*products.cotangents, rP, (0, slot.index))
        warpgroup.wait_group(1)
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block, down=True)
        self.weights.of_scores(rS, rWeights, place, self._numbers(lse, slot, tidx), whole, rest)
        if early:
            multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        warpgroup.wait_group(int(early))
        self._cotangents_of_scores(rS, rP, self._numbers(delta, slot, tidx))
        store_packed(rS, rDs)
        consumer.put_ds(rDs, slot.index)
        if not early:
            multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
        multiply(*products.dq, rDq, (slot.index, 0))
        multiply_weights(mma_dk, rDs, tKrQ, rDk, slot.index)
        warpgroup.wait_group(1)
        consumer.add(rDq, tile, queries, sizes)
        warpgroup.wait_group(0)
        ring_q.consumer_release(slot)
        ring_o.consumer_release(slot)
