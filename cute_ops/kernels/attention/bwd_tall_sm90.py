"""All gradients of attention from scores that are computed once, of short heads and tiles of 128 queries, on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from cute_ops.kernels.attention.bwd_keys_sm90 import following
from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS, OnePassBackward
from cute_ops.kernels.attention.products import multiply, multiply_weights
from cute_ops.kernels.attention.softmax import store_packed
from cute_ops.kernels.attention.tiles import Tile
from cute_ops.kernels.tensor_core.sizes import WARPGROUP


class TallOnePass(OnePassBackward):
    """What :class:`OnePassBackward` computes, of heads of up to 64 elements.

    Of a tile of 128 queries each warpgroup has 64 rows of dq, and adds them by itself. What a product reads of shared
    memory serves twice as many numbers.

    No product goes on behind a tile's end, or registers would hold two tiles' operands. 4 x 4096 causal takes 1386 us
    instead of 1520 by :class:`ShortHeadsBackward`, all keys 2747 instead of 3012.
    Shared memory: as :class:`OnePassBackward`, with a tile of ``ds`` for each stage.
    """

    keeps, reads_early, by_queries, sharing, shares = False, False, True, 1, OnePassBackward.consumers

    @property
    def tiles_of_ds(self):
        return self.stages

    @cute.jit
    def _differentiate_all(
        self, rings: cutlass.Constexpr, products: cutlass.Constexpr, registers: cutlass.Constexpr,
        given: cutlass.Constexpr, at: cutlass.Constexpr, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        (ring_q, _, _, ring_o), (mmas, operands) = rings, products
        (mma_first, mma_s, mma_dk, mma_dv, mma_new, mma_dq), (lse, delta, put_ds, add) = mmas, given
        of_scores, of_weights, tKrQ, tVrO, (tDrDs, tDrK) = operands
        (rS, rP, rWeights, rDs, rDk, rDv, rDq), (tidx, keys) = registers, at
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        early = self.mods.mask is None  # dv's product before that of dq and ds: as measured
        for i in cutlass.range(self._rounds(sizes), unroll=1):
            head, queries, last, steps = self._steps(keys, sizes, i)
            first = queries
            for _ in cutlass.range(steps, unroll=1):
                tile = Tile(keys.block, head, keys.batch)
                if self.tiles.some(tile, sizes, queries, tile.block):
                    place = self._place(tidx, tile, queries, sizes)
                    ring_q.consumer_wait(slot)
                    multiply((mma_first, mma_s), *of_scores, rS, (0, slot.index))
                    ring_o.consumer_wait(slot)
                    multiply((mma_first, mma_s), *of_weights, rP, (0, slot.index))
                    warpgroup.wait_group(1)
                    whole = self.tiles.whole(tile, sizes, queries, tile.block)
                    rest = self.tiles.rest_of(tile, sizes, queries, tile.block, down=True)
                    self.weights.of_scores(rS, rWeights, place, self._numbers(lse, slot, tidx), whole, rest)
                    if const_expr(early):
                        multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
                    warpgroup.wait_group(int(early))
                    self._cotangents_of_scores(rS, rP, self._numbers(delta, slot, tidx))
                    store_packed(rS, rDs)
                    put_ds(rDs, slot.index)
                    if const_expr(not early):
                        multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
                    cute.arch.fence_view_async_shared()
                    cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
                    multiply((mma_new, mma_dq), tDrDs, tDrK, rDq, (slot.index, 0))
                    multiply_weights(mma_dk, rDs, tKrQ, rDk, slot.index)
                    warpgroup.wait_group(1)
                    add(rDq, tile, queries, sizes)
                    warpgroup.wait_group(0)
                    ring_q.consumer_release(slot)
                    ring_o.consumer_release(slot)
                    slot.advance()
                head, queries = following(head, queries, first, last)
