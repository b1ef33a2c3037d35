"""Attention to caches on Hopper: see :mod:`cute_ops.ops.attention.attention_cached`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait

from cute_ops.kernels.attention.cache_loads import WARPS, CacheLoads, CopyRing, page_found
from cute_ops.kernels.attention.cached import Cached, hide_missing
from cute_ops.kernels.attention.fwd_sm90 import AttentionFwd
from cute_ops.kernels.attention.products import tma_copies
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.tensors import Moved, by_sequence, partition, ring, slots, view
from cute_ops.kernels.attention.tiles import Sizes, first_row
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP, RegisterBudget

REGISTERS = RegisterBudget(load=40, multiply=232)


class AttentionCachedSm90(Cached, AttentionFwd):
    """:class:`AttentionFwd` of keys and values in caches, of which each sequence has so many as its length says.

    A whole warpgroup loads keys and values, by ``cp.async``, because pages may have any size: a lane looks up the page
    of one key, a tile ahead. Keys of pages outside of the pool are not there: the loading warps say which are. Float8
    is converted on its way; scores, and sums of values, are multiplied by a head's scales.
    """

    ring_of_caches, may_draw = CopyRing, False

    def __init__(self, variant):
        super().__init__(variant)
        # The first tile of a part of the keys may be one that the mask leaves out: none is known to be the last.
        self.registers, self.releases_early, self.narrows = REGISTERS, False, False

    @cute.jit
    def __call__(self, *arguments):
        given, stream = self._given(arguments), arguments[-1]
        mK, mV, mTable = (given.get(name) for name in ("k", "v", "page_table"))
        mQ, mOut = view(given["q"]), view(given["out"])  # (seqlen, d, heads, batch)
        self.dtype = dtype = mQ.element_type
        sizes = self._sizes(given, mQ)
        if const_expr(self.packed):
            mQ, mOut = by_sequence(mQ), by_sequence(mOut)
        (mma_qk, mma_pv), layouts = self._products(dtype), self._layouts(dtype)
        moved = tma_copies(
            (mQ, mOut), (layouts[0], layouts[3]), ((self.tile_m, self.d), (MMA_M, self.dv)), stored=1
        )  # fmt: skip
        Ranges(self.tiles).launch(sizes, stream)
        ctas = cutlass.min(self._count(sizes), Int32(self.sms))
        mLse, caches = folded(given["lse"], own=2), (mK, mV, mTable, self._boxes((mK, mV)))
        self.cached_kernel(
            (mma_qk, mma_qk, mma_pv), (moved, layouts), caches, given.get("sinks"), mLse, tuple(sizes)
        ).launch(
            grid=[ctas, 1, 1], block=[WARPGROUP * (1 + self.consumers), 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip
        self._combine(given, sizes, stream)

    def _boxes(self, caches):
        """What TMA copies of caches: nothing."""
        return ()

    @cute.kernel
    def cached_kernel(self, mmas, moved, caches, mSinks, mLse, sizes):
        mma_first, mma_qk, mma_pv = mmas
        ((q_moved, out_moved), layouts), sizes = moved, Sizes(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma, _ in (q_moved, out_moved, *caches[3]):
                cpasync.prefetch_descriptor(tma)
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        sQ, sK, sV = (slots(smem, dtype, layout) for layout in layouts[:3])
        sOut = self._place_of_outputs(smem, sQ, layouts[3])
        held = Moved(*q_moved, sQ), Moved(None, None, sK), Moved(None, None, sV), Moved(*out_moved, sOut)
        ring_q = ring(smem, dtype, layouts[0], 1, self.consumers)
        paged = const_expr(caches[2] is not None)
        copied = [self.ring_of_caches(smem, self.stages, self.consumers, marked=marked) for marked in (paged, False)]
        if warp == 0:
            with cute.arch.elect_one():
                for each in copied:
                    each.start()
            cute.arch.mbarrier_init_fence()
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        cute.arch.barrier()
        wait_for_previous(True)
        rings = ring_q, *copied, None

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(self.registers.load)
            self._load_cached(rings, held, caches, sizes)
        else:
            cute.arch.setmaxregister_increase(self.registers.multiply)
            mma_first.set(warpgroup.Field.ACCUMULATE, False)
            for mma in (mma_qk, mma_pv):
                mma.set(warpgroup.Field.ACCUMULATE, True)
            self._attend(rings, (mma_first, mma_qk, mma_pv), held, mSinks, mLse, sizes)

    @cute.jit
    def _load_cached(
        self, rings: cutlass.Constexpr, held: cutlass.Constexpr, caches: cutlass.Constexpr, sizes: cutlass.Constexpr
    ):  # fmt: skip
        """Load the queries of each block, then the keys and the values of its tiles."""
        (ring_q, *of_caches, _), (q, k, v, _), (mK, mV, mTable, boxes) = rings, held, caches
        loads = CacheLoads(self.tile_n, mTable)
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        q_slot = make_pipeline_state(PipelineUserType.Producer, 1)
        slot = make_pipeline_state(PipelineUserType.Producer, self.stages)
        steps, index_of = self._steps(sizes)
        for step in cutlass.range(steps, unroll=1):
            if index_of(step) < self._count(sizes):
                tile, own = self._tile(index_of(step), sizes)
                kv_head = tile.head // sizes.heads_per_kv
                first, last = self._keys_of(tile, own)
                entry, place = loads.find(mK, tile.batch, last, own.seqlen_k)
                if warp == 0:
                    tQsQ, tQgQ = partition(
                        q, (self.tile_m, self.d), (tile.block, 0, tile.head, tile.batch), own.rows[0]
                    )
                    ring_q.producer_acquire(q_slot)
                    cute.copy(q.tma, tQgQ, tQsQ[None, 0], tma_bar_ptr=ring_q.producer_get_barrier(q_slot))
                q_slot.advance()
                sources = loads, ((mK, k.s), (mV, v.s)), boxes, kv_head
                for i in cutlass.range(last - first + 1, unroll=1):
                    keys = last - i
                    found = page_found(mTable, mK, entry), place
                    entry, place = loads.find(mK, tile.batch, keys - 1, own.seqlen_k)
                    if self._is_loaded(tile, own, keys):
                        of_caches[0].producer_acquire(slot)
                        of_caches[0].mark(slot, found[0] >= 0, warp, lane)
                        ends = (keys + 1) * self.tile_n > own.seqlen_k
                        self._load_tile(of_caches, slot, sources, found, (warp, lane, ends))
                        slot.advance()
        let_next_start(True)

    @cute.jit
    def _load_tile(
        self, rings: cutlass.Constexpr, slot: cutlass.Constexpr, sources: cutlass.Constexpr, found: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        """Load a warp's part of a tile of keys, whose slot is free, and of values.

        Args:
            rings: of keys and of values.
            slot: of both.
            sources: loads, caches with their slots, what TMA copies, the caches' head.
            found: the keys of lanes.
            at: the warp, the lane, and whether there are keys behind the sequence's last one.
        """
        loads, caches, _, head = sources
        for i, each in enumerate(rings):
            mX, sX = caches[i]
            if const_expr(i == 1):
                each.producer_acquire(slot)
            if const_expr(self.float8):
                loads.convert(mX, head, sX, slot.index, found)
            else:
                loads.copy(mX, head, sX, slot.index, found)
            each.producer_commit(slot, self.float8)

    def _there(self, ring_k, slot):
        return None if ring_k.marks is None else ring_k.marked(slot)

    def _hide_missing(self, scores, there, tidx):
        hide_missing(scores, there, self.tile_n // WARPS, tidx % 32)

    @cute.jit
    def _finish(
        self, mma_pv, rO, rows: cutlass.Constexpr, out: cutlass.Constexpr, sums: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        tile, sizes, tidx = at
        if sizes.splits == 1:
            AttentionFwd._finish(self, mma_pv, rO, rows, out, sums, at)
        else:
            row = tile.block * self.tile_m + first_row(tidx)
            self._store_part(rO, rows, row, (tile, sizes, tidx % 32))
