"""All gradients of attention from scores that are computed once, a tile of queries after the other, on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from cute_ops.kernels.attention.bwd_keys_sm90 import following
from cute_ops.kernels.attention.bwd_one_pass_sm90 import OnePassBackward
from cute_ops.kernels.attention.tiles import Tile


class OneTileAtATime(OnePassBackward):
    """Base of what :class:`OnePassBackward` computes where a tile's products end before the next one's begin: registers
    would hold both tiles' operands. A subclass has ``_differentiate``, which issues a tile's products, waits for them
    and releases the tile.

    Warpgroups add their shares of dq by themselves.
    Shared memory: as :class:`OnePassBackward`, with a tile of ``ds`` for each stage.
    """

    keeps, by_queries, shares = False, True, OnePassBackward.consumers

    @property
    def tiles_of_ds(self):
        return self.stages

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
