"""Attention to caches on Hopper by TMA: see :mod:`cute_ops.ops.attention.attention_cached`."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_ops.kernels.attention.boxes import FAR, columns_of, copies_of, slots_of
from cute_ops.kernels.attention.cache_loads import WARPS, CopyRing
from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.fwd_cached_sm90 import AttentionCachedSm90


class BoxRing(CopyRing):
    """A :class:`CopyRing` that is full when one lane of each loading warp has said so, and TMA's bytes have come."""

    arrivals = WARPS

    @cute.jit
    def mark(self, slot: cutlass.Constexpr, there, warp, lane):
        if const_expr(self.marks is not None):
            bits = cute.arch.vote_ballot_sync(there)
            if lane == 0:
                self.marks[warp, slot.index] = Int32(bits)


class AttentionCachedBoxesSm90(AttentionCachedSm90):
    """:class:`AttentionCachedSm90` of tiles that TMA loads: each loading warp its quarter, box by box.

    A box lies in one page. One without keys, or of a page outside of the pool, is behind the end of a page, so that it
    has zeros. Threads copy the values of a tile with a sequence's last key all the same, because those behind it may be
    NaN.
    """

    ring_of_caches = BoxRing

    def __init__(self, variant):
        super().__init__(variant)
        self.box, self.widths = AttentionConfig.of(variant.config).box, (self.d, self.dv)
        self.columns = [columns_of(width) for width in self.widths]

    def _boxes(self, caches):
        return copies_of(caches, self.dtype, self.box, self.columns)

    @cute.jit
    def _load_tile(
        self, rings: cutlass.Constexpr, slot: cutlass.Constexpr, sources: cutlass.Constexpr, found: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        (loads, caches, boxes, head), (page, key), (warp, lane, ends) = sources, found, at
        count = loads.of_warp // self.box
        row, page = cutlass.select_(page >= 0, key // self.box, Int32(FAR)), cutlass.max(page, Int32(0))
        places = [[cute.arch.shuffle_sync(x, i * self.box) for x in (row, page)] for i in range(count)]
        for i, ring in enumerate(rings):
            (mX, sX), (atom, m), columns, width = caches[i], boxes[i], self.columns[i], self.widths[i]
            by_threads, full = Boolean(False), ring.full + slot.index
            if const_expr(i == 1):
                by_threads = ends
                ring.producer_acquire(slot)
            if by_threads:
                loads.copy(mX, head, sX, slot.index, found)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(full)
            else:
                gX = cute.group_modes(cute.local_tile(m, (self.box, columns), (None, None, head, None)), 0, 2)
                tile = self.tile_n, width
                sBoxes = slots_of(
                    sX.iterator, self.dtype, (self.box, columns), tile, (self.stages, self.tile_n * width)
                )  # fmt: skip
                tXsX, tXgX = cpasync.tma_partition(atom, 0, cute.make_layout(1), sBoxes, gX)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * loads.of_warp * width)
                for j, (at_row, at_page) in enumerate(places):
                    for column in cutlass.range_constexpr(width // columns):
                        source = tXgX[None, at_row, column, at_page]
                        target = tXsX[None, warp * count + j, column, slot.index]
                        cute.copy(atom, source, target, tma_bar_ptr=full)
