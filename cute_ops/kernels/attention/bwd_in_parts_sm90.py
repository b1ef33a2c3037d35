"""All gradients of attention from scores that are computed once, 16 queries at a time, on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from cute_ops.kernels.attention.bwd_keys_sm90 import following
from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS, OnePassBackward
from cute_ops.kernels.attention.products import multiply, multiply_part
from cute_ops.kernels.attention.registers import PART, by_row, columns_of_part, store_part
from cute_ops.kernels.attention.tiles import Tile
from cute_ops.kernels.tensor_core.sizes import WARPGROUP


class OnePassInParts(OnePassBackward):
    """What :class:`OnePassBackward` computes, where at most a cap changes scores, with tensor cores that wait less.

    Weights, and ``ds`` for dk, are multiplied 16 queries at a time, as soon as these are computed. The product that
    gives dq comes last, as it waits for the other warpgroup, and behind it the next tile's scores, during which dq is
    written. Warpgroups add their shares of dq by themselves, and wait for each other once a tile. 2 x 15616 causal
    takes 8713 us instead of 9419.
    Shared memory: as :class:`OnePassBackward`, with a tile of ``ds`` for each stage.
    """

    keeps, by_queries, shares = False, True, OnePassBackward.consumers
    adds_first = False  # dq is written before scores of the next tile are multiplied, as registers hold one of both

    @property
    def tiles_of_ds(self):
        return self.stages

    @property
    def parts_of_tile(self):
        return self.tile_q // PART

    def _slots(self, slot):
        """The slots of both operands of scores."""
        return 0, slot.index

    def _release_cotangents(self, ring_o, slot):
        """Release those of a tile whose products are done."""
        ring_o.consumer_release(slot)

    @cute.jit
    def _differentiate_all(self, consumer: cutlass.Constexpr, sizes: cutlass.Constexpr):
        (ring_q, ring_o), keys, add = consumer.rings, consumer.keys, consumer.add
        of_scores, rS, rDq = consumer.products.scores, consumer.registers.rS, consumer.registers.rDq
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        before = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(self._rounds(sizes), unroll=1):
            head, queries, last, steps = self._steps(keys, sizes, i)
            first, seen = queries, self.tiles.nothing_seen()
            if steps > 0:
                ring_q.consumer_wait(slot)
                multiply(*of_scores, rS, self._slots(slot))
                warpgroup.wait_group(0)
                slot.advance()
                next_head, next_queries = following(head, queries, first, last)
                for _ in cutlass.range(steps - 1, unroll=1):
                    tile = Tile(keys.block, next_head, keys.batch)
                    seen = self.tiles.look(seen, tile, sizes, (next_queries, keys.block))
                    if self.tiles.some(tile, sizes._replace(seen=seen), next_queries, keys.block):
                        tile = Tile(keys.block, head, keys.batch)
                        ahead = self.tiles.look(seen, tile, sizes, (queries, keys.block))
                        self._differentiate(consumer, before, (tile, queries), sizes._replace(seen=ahead))
                        if const_expr(self.adds_first):
                            warpgroup.wait_group(1)
                            add(rDq, tile, queries, sizes)
                        ring_q.consumer_wait(slot)
                        warpgroup.wait_group(1)
                        multiply(*of_scores, rS, self._slots(slot))
                        if const_expr(self.adds_first):
                            warpgroup.wait_group(1)
                        ring_q.consumer_release(before)
                        self._release_cotangents(ring_o, before)
                        if const_expr(not self.adds_first):
                            warpgroup.wait_group(1)
                            add(rDq, tile, queries, sizes)
                        # ptxas lets no instruction read in one step what a product of the step before has written.
                        warpgroup.wait_group(0)
                        before.advance()
                        slot.advance()
                        head, queries = next_head, next_queries
                    next_head, next_queries = following(next_head, next_queries, first, last)
                tile = Tile(keys.block, head, keys.batch)
                seen = self.tiles.look(seen, tile, sizes, (queries, keys.block))
                self._differentiate(consumer, before, (tile, queries), sizes._replace(seen=seen))
                warpgroup.wait_group(0)
                add(rDq, tile, queries, sizes)
                ring_q.consumer_release(before)
                self._release_cotangents(ring_o, before)
                before.advance()

    @cute.jit
    def _differentiate(
        self, consumer: cutlass.Constexpr, slot: cutlass.Constexpr, at: cutlass.Constexpr, sizes: cutlass.Constexpr
    ):
        """Issue all products of a tile whose scores are multiplied, that which gives dq last: it waits for the other
        warpgroup.
        """
        (_, ring_o), products, (lse, delta), tidx = consumer.rings, consumer.products, consumer.rows, consumer.tidx
        (tile, queries), (rS, rP, rWeights, rDs, rDk, rDv, rDq) = at, consumer.registers
        ring_o.consumer_wait(slot)
        multiply(*products.cotangents, rP, (0, slot.index))
        place = self._place(tidx, tile, queries, sizes)
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block)
        of_column = self._numbers(lse, slot, tidx)
        self._multiply_weights(products.dv, (rS, rWeights, rDv), slot, (place, whole, rest), of_column)
        of_column = self._numbers(delta, slot, tidx)
        warpgroup.wait_group(self.parts_of_tile)
        self._multiply_cotangents(products.dk, (rS, rP, rDs, rDk), slot, of_column)
        of_ds = slot.index if const_expr(self.tiles_of_ds > 1) else 0
        consumer.put_ds(rDs, of_ds)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
        multiply(*products.dq, rDq, (of_ds, 0))

    @cute.jit
    def _multiply_weights(
        self, product: cutlass.Constexpr, registers: cutlass.Constexpr, slot: cutlass.Constexpr,
        at: cutlass.Constexpr, lse: cutlass.Constexpr,
    ):  # fmt: skip
        """Exponentiate scores and multiply their weights with cotangents. ``at``: the place, whether none is left out,
        and what :meth:`Tiles.rest_of` gives.
        """
        (mma_dv, tVrO), (rS, rWeights, rDv), (place, whole, rest) = product, registers, at
        way = self.weights.hide(rS, place, whole, rest)
        for part in cutlass.range_constexpr(self.parts_of_tile):
            self.weights.of_parts((rS, rWeights), [part], (lse, place), way)
            multiply_part(mma_dv, rWeights, tVrO, rDv, part, slot.index)

    def _multiply_cotangents(self, product, registers, slot, delta):
        """Replace ``p * dscore`` by ``ds`` and multiply it with queries, 16 of them at a time."""
        (mma_dk, tKrQ), (rS, rP, rDs, rDk) = product, registers
        scores, cotangents = by_row(rS), by_row(rP)
        for part in range(self.parts_of_tile):
            for c in columns_of_part(part):
                for r in range(2):
                    scores[r, c] = scores[r, c] * (cotangents[r, c] - delta(r, c))
            store_part(rS, rDs, part)
            multiply_part(mma_dk, rDs, tKrQ, rDk, part, slot.index)
