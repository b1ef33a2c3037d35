"""Attention on Hopper: TMA loads, WGMMA, an online softmax in registers, persistent and warp-specialised."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.forward import ForwardKernel
from cute_ops.kernels.attention.lazy_softmax import LazySoftmax
from cute_ops.kernels.attention.mods import by_index
from cute_ops.kernels.attention.products import (
    mma_of_scores,
    mma_of_weights,
    multiply,
    multiply_weights,
    tma_copies,
)
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.tensors import Moved, address_of, by_sequence, partition, ring, slots, view
from cute_ops.kernels.attention.tiles import (
    BARRIER_BYTES,
    REGISTERS,
    SHARED_BYTES,
    Sizes,
    first_row,
    offsets_of,
    place_of,
    sizes_of,
)
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP

# Named barriers: each warpgroup's turn to multiply, one of its own threads, and that all have read the queries; 0 is
# the CTA's.
TURN, OWN, READ = 1, 4, 7
LONG = 128  # elements of values; sums of more are rescaled before the next product, while scores are multiplied


class AttentionFwd(ForwardKernel):
    """``out = softmax(score_mod(scale * q @ k.T), where mask) @ v`` and the log-sum-exp of each row of scores.

    Tile: a CTA has 128 queries of one head, or 64 of each of two, 64 for each of two warpgroups, and goes through the
    keys in tiles of ``tile_n``, from the last to the first. One warp of a third warpgroup loads queries, and keys and
    values into rings of two stages. A warpgroup issues the scores of a tile and the weighted values of the one before
    together, and exponentiates while these are summed up. The warpgroups take turns: one multiplies while the other
    exponentiates.
    Tiles that the mask leaves out are skipped, and only those that it crosses are masked. A CTA goes from one block of
    queries to another, those with most keys first.
    Shared memory: ``128 x d`` queries, two stages of ``tile_n x (d + dv)`` keys and values, ``128 x dv`` outputs, which
    take the place of the queries where there is no room for both.
    Bytes moved per element: q and out once; k and v once as long as the heads walked together find them in L2.
    """

    stages, may_draw = 2, True

    def __init__(self, variant):
        super().__init__(variant)
        config = AttentionConfig.of(variant.config)
        self.consumers, self.tile_m, self.sms = config.consumers, config.block, config.sms
        self.registers, self.is_long = REGISTERS[config.consumers], self.dv > LONG
        rows = self.tile_m * self.heads + self.stages * self.tile_n
        used = 2 * rows * (self.d + self.dv) + BARRIER_BYTES
        self.shares_memory = used > SHARED_BYTES  # outputs with queries
        self.releases_early = not self.shares_memory
        # Whether a CTA draws its next block when it is free: the work of blocks is not known before. Blocks of long
        # heads have a CTA each.
        self.draws = self.may_draw and bool(self.mods.by_query) and not self.is_long
        # Longer heads wait for keys whose slot is held: 2 x 4096 of 256 take 5% longer.
        self.is_lazy = self.mods.score is None and max(self.d, self.dv) <= LONG
        self.softmax = LazySoftmax(self.mods.scale) if self.is_lazy else self.softmax
        # Whether warpgroups may have fewer tiles than their block: some of those at its ends.
        self.narrows = self.mods.is_interval and self.tile_m > self.tile_n

    @cute.jit
    def __call__(self, mQ, mK, mV, *others):
        *captured, mSinks, mOut, mLse, mQRanges, mKRanges, stream = others
        offsets, captured = offsets_of(captured, self.packed)
        self.dtype = dtype = mQ.element_type
        mQ, mK, mOut = (view(m) for m in (mQ, mK, mOut))  # (seqlen, d, heads, batch)
        mV, mLse = view(mV, (3, 1, 2, 0)), folded(mLse, own=2)  # (dv, seqlen, heads, batch), (batch, heads, seqlen)
        sizes = sizes_of(mQ, mK, by_index(captured, self.mods), (mQRanges, mKRanges), offsets)
        if const_expr(self.packed):
            mQ, mK, mV, mOut = (by_sequence(m, mode) for m, mode in ((mQ, 0), (mK, 0), (mV, 1), (mOut, 0)))
        (mma_qk, mma_pv), layouts = self._products(dtype), self._layouts(dtype)
        tiles = (self.tile_m, self.d), (self.tile_n, self.d), (self.dv, self.tile_n), (MMA_M, self.dv)
        moved = tma_copies((mQ, mK, mV, mOut), layouts, tiles, stored=1)
        Ranges(self.tiles).launch(sizes, stream)
        ctas = self._count(sizes)
        # Of long heads no store overlaps with loads of the next block, and few blocks of unlike work come to a CTA: the
        # GPU gives one to each that is free (2 x 4096 causal, 16 heads: 0.72 of the SMs' time else).
        if const_expr(not (self.is_long and self.mods.mask is not None)):
            ctas = cutlass.min(ctas, Int32(self.sms))
        self.kernel((mma_qk, mma_qk, mma_pv), (moved, layouts), mSinks, mLse, tuple(sizes)).launch(
            grid=[ctas, 1, 1], block=[WARPGROUP * (1 + self.consumers), 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _products(self, dtype):
        """The MMAs of scores, and of weights and values."""
        warpgroups = self.consumers // self.heads
        return mma_of_scores(dtype, self.tile_n, warpgroups), mma_of_weights(dtype, self.dv, warpgroups)

    def _layouts(self, dtype):
        """Of queries, keys, values and outputs in shared memory."""
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        return (
            hopper.make_smem_layout_a(row, (self.tile_m, self.tile_n, self.d), dtype, self.heads),
            hopper.make_smem_layout_b(row, (self.tile_m, self.tile_n, self.d), dtype, self.stages),
            hopper.make_smem_layout_b(column, (self.tile_m, self.dv, self.tile_n), dtype, self.stages),
            hopper.make_smem_layout_epi(dtype, row, (MMA_M, self.dv), self.consumers),
        )

    def _place_of_outputs(self, smem, sQ, layout):
        """Outputs in shared memory: a place of their own, or that of queries."""
        if not self.shares_memory:
            return slots(smem, self.dtype, layout)
        return cute.make_tensor(cute.recast_ptr(sQ.iterator, layout.inner, self.dtype), layout.outer)

    @cute.kernel
    def kernel(self, mmas, moved, mSinks, mLse, sizes):
        mma_first, mma_qk, mma_pv = mmas
        (moved, layouts), sizes = moved, Sizes(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma, _ in moved:
                cpasync.prefetch_descriptor(tma)
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        held = [slots(smem, dtype, layout) for layout in layouts[:3]]
        held.append(self._place_of_outputs(smem, held[0], layouts[3]))
        moved = [Moved(tma, m, s) for (tma, m), s in zip(moved, held)]
        stages = 1, self.stages, self.stages
        others = (self.heads - 1) * self.tile_m * self.d * dtype.width // 8  # bytes of other heads' queries
        rings = [
            ring(smem, dtype, layout, count, self.consumers, more)
            for layout, count, more in zip(layouts, stages, (others, 0, 0))
        ]
        rings.append(smem.allocate_tensor(Int32, cute.make_layout(2)) if const_expr(self.draws) else None)
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        wait_for_previous(True)

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(self.registers.load)
            if warp == 0:
                self._load(rings, moved, sizes)
        else:
            cute.arch.setmaxregister_increase(self.registers.multiply)
            mma_first.set(warpgroup.Field.ACCUMULATE, False)
            for mma in (mma_qk, mma_pv):
                mma.set(warpgroup.Field.ACCUMULATE, True)
            self._attend(rings, (mma_first, mma_qk, mma_pv), moved, mSinks, mLse, sizes)

    # The warp that loads -------------------------------------------------------------------------------------------

    @cute.jit
    def _load(self, rings: cutlass.Constexpr, moved: cutlass.Constexpr, sizes: cutlass.Constexpr):
        """Load the queries of each block, then the keys and the values of its tiles."""
        ring_q, ring_k, ring_v, drawn = rings
        q, k, v, _ = moved
        q_slot = make_pipeline_state(PipelineUserType.Producer, 1)
        slot = make_pipeline_state(PipelineUserType.Producer, self.stages)
        steps, index_of = self._steps(sizes)
        step, count = Int32(0), self._count(sizes)
        while step < steps:
            index = place = self._draw(sizes) if const_expr(self.draws) else index_of(step)
            if const_expr(self.draws):
                # Behind the last block its queries are loaded again: consumers wait for them, and see that it was last.
                place = cutlass.min(index, count - 1)
            if place < count:
                tile, own = self._tile(place, sizes)
                (of_q, of_k), kv_head = own.rows, tile.head // sizes.heads_per_kv
                tKsK, tKgK = partition(k, (self.tile_n, self.d), (None, 0, kv_head, tile.batch), of_k)
                tVsV, tVgV = partition(v, (self.dv, self.tile_n), (0, None, kv_head, tile.batch), of_k, 1)
                first, last = self._keys_of(tile, own)
                if const_expr(self.draws):
                    last = cutlass.select_(index < count, last, first - 1)
                    drawn[step % 2] = index
                ring_q.producer_acquire(q_slot)
                for i in cutlass.range_constexpr(self.heads):
                    at = tile.block, 0, tile.head + i, tile.batch
                    tQsQ, tQgQ = partition(q, (self.tile_m, self.d), at, of_q)
                    cute.copy(q.tma, tQgQ, tQsQ[None, i], tma_bar_ptr=ring_q.producer_get_barrier(q_slot))
                q_slot.advance()
                seen = self.tiles.nothing_seen()
                for i in cutlass.range(last - first + 1, unroll=1):
                    keys = last - i
                    seen = self.tiles.look(seen, tile, own, (tile.block, keys))
                    if self._is_loaded(tile, own._replace(seen=seen), keys):
                        for tma, each, tXsX, tXgX in ((k.tma, ring_k, tKsK, tKgK), (v.tma, ring_v, tVsV, tVgV)):
                            each.producer_acquire(slot)
                            full = each.producer_get_barrier(slot)
                            cute.copy(tma, tXgX[None, keys], tXsX[None, slot.index], tma_bar_ptr=full)
                        slot.advance()
            step += 1
            steps = self._steps_known(step, steps, index < count)
        let_next_start(True)
        ring_v.producer_tail(slot)

    @cute.jit
    def _draw(self, sizes: cutlass.Constexpr):
        """The index of the next block that no CTA has drawn; no less than their count where none is left."""
        index, mTable = Int32(0), sizes.ranges[0]
        if cute.arch.lane_idx() == 0:
            address = address_of(mTable, (2 * len(self.mods.by_query), 0, 0, 0))
            number = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
            index = cute.arch.atomic_add(number, Int32(1))
        return cute.arch.shuffle_sync(index, 0)

    def _drawn(self, queries, drawn, step):
        """Wait for a step's queries. Returns the index of the block that was drawn for it, which comes with them."""
        ring_q, q_slot = queries
        ring_q.consumer_wait(q_slot)
        return drawn[step % 2]

    def _steps_known(self, step, steps, goes_on):
        """The number of steps as far as it is known before ``step``: where blocks are drawn, there is another step as
        long as the last draw gave a block, ``goes_on``.
        """
        return step + cutlass.select_(goes_on, Int32(1), Int32(0)) if self.draws else steps

    # The warpgroups that multiply ----------------------------------------------------------------------------------

    @cute.jit
    def _attend(
        self, rings: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr,
        mSinks, mLse, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        (*rings, drawn), (mma_first, mma_qk, mma_pv), (q, k, v, _) = rings, mmas, moved
        ring_q, ring_k, ring_v = rings
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        # Of several heads each warpgroup has one, and the rows of the first warpgroup.
        of_head = const_expr(self.heads > 1)
        queries, thread = (group, tidx % WARPGROUP) if of_head else (0, tidx)
        # A warpgroup's descriptors are those of its first thread.
        first = 0 if of_head else group * WARPGROUP
        first_qk, first_pv = mma_qk.get_slice(first), mma_pv.get_slice(first)
        tSrQ = mma_qk.make_fragment_A(first_qk.partition_A(q.s))  # (mma, m, d, 1)
        tSrK = mma_qk.make_fragment_B(first_qk.partition_B(k.s))  # (mma, n, d, stages)
        tOrV = mma_pv.make_fragment_B(first_pv.partition_B(v.s))  # (mma, dv, n, stages)
        rS = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        rO = cute.make_rmem_tensor(mma_pv.partition_shape_C((self.tile_m, self.dv)), Float32)
        # The scores of two blocks of 8 columns are, in this order, a thread's part of A for 16 columns.
        rP = cute.make_rmem_tensor(((2, 2, 2), 1, self.tile_n // 16), self.dtype)
        rMax, rSum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        score, value = ((mma_first, mma_qk), tSrQ, tSrK, rS), (mma_pv, rP, tOrV, rO)
        rLazy = cute.make_rmem_tensor(1, Int32)

        q_slot = make_pipeline_state(PipelineUserType.Consumer, 1)
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        before = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        late = cute.make_rmem_tensor(2, Float32)  # what sums are to be multiplied by before the next product
        if group == self.consumers - 1:
            self._end_turn(group)
        steps, index_of = self._steps(sizes)
        step, count = Int32(0), self._count(sizes)
        while step < steps:
            index = self._drawn((ring_q, q_slot), drawn, step) if const_expr(self.draws) else index_of(step)
            if index < count:
                tile, own = self._tile(index, sizes)
                tile = self._of_group(tile, group)
                own = self.mods.with_reads(tile, own)
                first, last = self._keys_of(tile, own)
                rMax.fill(self.softmax.least)
                rSum.fill(0.0)
                rLazy.fill(1)
                rO.fill(0.0)
                above, below = self._left_out(tile, own, group, (first, last))
                ring_q.consumer_wait(q_slot)
                for _ in cutlass.range(above, unroll=1):
                    self._pass_on(rings, (slot, before), group)
                    slot.advance()
                    before.advance()
                first, last = first + below, last - above
                if last >= first:
                    self._begin_turn(group)
                    ring_k.consumer_wait(slot)
                    multiply(*score, (queries, slot.index))
                    self._end_turn(group)
                    warpgroup.wait_group(0)
                    there = self._there(ring_k, slot)
                    ring_k.consumer_release(slot)
                    slot.advance()
                    self._release_queries(ring_q, q_slot, last == first)
                    seen = self.tiles.look(self.tiles.nothing_seen(), tile, own, (tile.block, last))
                    at = tile, own._replace(seen=seen), (thread, group), there
                    self._weigh(rS, at, last, (rMax, rSum))
                    late.fill(1.0)
                    store_packed(rS, rP)
                    for i in cutlass.range(1, last - first + 1, unroll=1):
                        keys = last - i
                        seen = self.tiles.look(seen, tile, own, (tile.block, keys))
                        looked = own._replace(seen=seen)
                        if self._is_loaded(tile, looked, keys):
                            self._begin_turn(group)
                            ring_k.consumer_wait(slot)
                            multiply(*score, (queries, slot.index))
                            self._rescale_late(rO, late)
                            ring_v.consumer_wait(before)
                            multiply_weights(*value, before.index)
                            self._end_turn(group)
                            warpgroup.wait_group(1)
                            there = self._there(ring_k, slot)
                            held = q.s, k.s, (queries, slot.index)
                            self._release_scores(rings, (slot, q_slot), keys == first, before=True)
                            at = tile, looked, (thread, group), there
                            factors = self._weigh(rS, at, keys, (rMax, rSum), (rLazy, held))
                            self._release_scores(rings, (slot, q_slot), keys == first, before=False)
                            slot.advance()
                            # ptxas would move the wait ahead of the exponentials, but not over a branch on their sums.
                            if rSum[0] + rSum[1] < 0.0:
                                cute.arch.sync_warp()
                            warpgroup.wait_group(0)
                            ring_v.consumer_release(before)
                            before.advance()
                            if const_expr(self.is_long):
                                late.store(factors.load())
                            else:
                                self.softmax.rescale_grown(rO, factors)
                            store_packed(rS, rP)
                    self._rescale_late(rO, late)
                    ring_v.consumer_wait(before)
                    multiply_weights(*value, before.index)
                    warpgroup.wait_group(0)
                    ring_v.consumer_release(before)
                    before.advance()
                for _ in cutlass.range(below, unroll=1):
                    self._pass_on(rings, (slot, before), group)
                    slot.advance()
                    before.advance()
                self._end_queries(ring_q, q_slot, last < first)
                self._finish(mma_pv, rO, (rMax, rSum), moved[3], (mSinks, mLse), (tile, own, tidx))
                if const_expr(self.shares_memory):
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    ring_q.consumer_release(q_slot)
                q_slot.advance()
            step += 1
            steps = self._steps_known(step, steps, index < count)
        if group == 0:
            self._begin_turn(group)  # the last warpgroup's last end of a turn
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _of_group(self, tile, group):
        """A warpgroup's own tile: of several heads that share a block it has one."""
        return tile if self.heads == 1 else tile._replace(head=tile.head + group)

    @cute.jit
    def _left_out(self, tile: cutlass.Constexpr, sizes: cutlass.Constexpr, group, ends: cutlass.Constexpr):
        """How many of a block's tiles, from the last one on and from the first one on, have no key of a warpgroup's own
        queries.
        """
        (first, last), above, below = ends, Int32(0), Int32(0)
        if const_expr(self.narrows):
            while (first + above <= last) & self._is_left_out(tile, sizes, group, last - above):
                above += 1
            while (first + above + below <= last) & self._is_left_out(tile, sizes, group, first + below):
                below += 1
        return above, below

    def _is_left_out(self, tile, sizes, group, keys):
        return self.tiles.bounds_of_rows(tile, sizes, self._rows(tile, group), keys)[1] ^ True

    def _rows(self, tile, group):
        """A warpgroup's first query, and how many it has."""
        return tile.block * self.tile_m + group * MMA_M, MMA_M

    def _pass_on(self, rings, at, group):
        """Leave out a tile: pass the turn on, and release the slots once they are filled."""
        (_, ring_k, ring_v), (slot, before) = rings, at
        self._begin_turn(group)
        self._end_turn(group)
        ring_k.consumer_wait(slot)
        ring_k.consumer_release(slot)
        ring_v.consumer_wait(before)
        ring_v.consumer_release(before)

    def _release_scores(self, rings, at, is_last, before):
        """Let the next keys be loaded, and the next queries behind a block's last tile: before scores are exponentiated
        where these cannot be multiplied again.
        """
        (ring_q, ring_k, _), (slot, q_slot) = rings, at
        if before != self.is_lazy:
            ring_k.consumer_release(slot)
            self._release_queries(ring_q, q_slot, is_last)

    @cute.jit
    def _release_queries(self, ring_q: cutlass.Constexpr, q_slot, is_last):
        """Let the next block's queries be loaded, once the scores of a block's last tile are multiplied."""
        if const_expr(self.releases_early):
            if is_last:
                ring_q.consumer_release(q_slot)

    @cute.jit
    def _end_queries(self, ring_q: cutlass.Constexpr, q_slot, is_empty):
        """Go on to outputs, which may take the place of queries: all must have read these."""
        if const_expr(self.shares_memory):
            cute.arch.barrier(barrier_id=READ, number_of_threads=self.consumers * WARPGROUP)
        elif const_expr(self.releases_early):
            self._release_queries(ring_q, q_slot, is_empty)
        else:
            ring_q.consumer_release(q_slot)

    def _is_loaded(self, tile, sizes, keys):
        """Whether a tile between a block's first and last one is loaded; if rows have intervals, all are."""
        return Boolean(True) if self.mods.is_interval else self.tiles.some(tile, sizes, tile.block, keys)

    def _rescale_late(self, rO, late):
        """Rescale sums of long heads before the next product is added, while scores are multiplied."""
        if self.is_long:
            self.softmax.rescale_grown(rO, late)

    def _begin_turn(self, group):
        """Wait for a warpgroup's turn to multiply; those of long heads take none."""
        if self.is_long:
            return
        cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)

    def _end_turn(self, group):
        if self.is_long:
            return
        after = cutlass.select_(group == self.consumers - 1, Int32(0), group + 1)
        cute.arch.barrier_arrive(barrier_id=TURN + after, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _weigh(
        self, rS, at: cutlass.Constexpr, keys, sums: cutlass.Constexpr, later: cutlass.Constexpr = None
    ):  # fmt: skip
        """Change a tile's scores and exponentiate them: see :meth:`OnlineSoftmax.add`. Without a mask keys are left out
        of the last tile alone, which is a block's first one; of others ``later`` are whether the warp is lazy, and the
        operands of scores in shared memory with their slots.
        """
        (tile, sizes, (tidx, group), there), is_last = at, later is None
        whole = Boolean(True)
        if const_expr(is_last or self.mods.mask is not None):
            rows = self._rows(tile, group) if self.narrows else None
            whole = self.tiles.whole(tile, sizes, tile.block, keys, rows)
        first = tile.block * self.tile_m, keys * self.tile_n, self.tile_n
        place = place_of(tidx, tile, first, sizes)
        if const_expr(self.is_lazy and not is_last):
            rLazy, held = later
            self._change(rS, place)
            self._hide(rS, place, whole, keys, (there, tidx))
            return self.softmax.add_later(
                rS, sums, rLazy, lambda: self._score_again(rS, place, whole, keys, (there, tidx), held)
            )
        return self.softmax.add_changed(
            rS, sums, whole, lambda: self._change(rS, place), lambda: self._hide(rS, place, whole, keys, (there, tidx))
        )

    def _change(self, rS, place):
        """Change a tile's products to scores, as a mod says."""
        self._scale_scores(rS, place.tile, place.sizes)
        if self.mods.score is not None:
            self.mods.change(by_row(rS), place)

    @cute.jit
    def _hide(self, rS, place: cutlass.Constexpr, whole, keys, missing: cutlass.Constexpr):
        """Hide scores of a tile that are left out."""
        if not whole:
            rest = self.tiles.rest_of(place.tile, place.sizes, place.tile.block, keys)
            self.mods.hide(by_row(rS), place, -Float32.inf, rest, votes=True)
        self._hide_missing(by_row(rS), *missing)

    @cute.jit
    def _score_again(
        self, rS, place: cutlass.Constexpr, whole, keys, missing: cutlass.Constexpr, held: cutlass.Constexpr
    ):  # fmt: skip
        """Multiply a tile's scores once more, each thread its own: few tiles need it."""
        (sQ, sK, (queries, slot)), scores = held, by_row(rS)
        row, column = first_row(missing[1]), missing[1] % 4 * 2
        rS.fill(0.0)
        for j in cutlass.range(self.d, unroll=1):
            left = [Float32(sQ[row + 8 * r, j, queries]) for r in range(2)]
            for c in cutlass.range_constexpr(len(place.columns)):
                right = Float32(sK[column + place.columns[c], j, slot])
                for r in cutlass.range_constexpr(2):
                    scores[r, c] = scores[r, c] + left[r] * right
        # One lane releases the slots that all of its warp have read.
        cute.arch.sync_warp()
        self._change(rS, place)
        self._hide(rS, place, whole, keys, missing)

    def _there(self, ring_k, slot):
        """Which keys of a slot are there; None where all are."""
        return None

    def _hide_missing(self, scores, there, tidx):
        """Hide keys that are not there."""

    @cute.jit
    def _finish(
        self, mma_pv, rO, rows: cutlass.Constexpr, out: cutlass.Constexpr, sums: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        """Divide by the sums of a block, and store it."""
        tile, sizes, tidx = at
        (rMax, rSum), (mSinks, mLse), lane = rows, sums, tidx % 32
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        sink = None if const_expr(mSinks is None) else Float32(mSinks[tile.head])
        lse, factors = self.softmax.finish(rMax, rSum, sink)
        for r in cutlass.range_constexpr(2):
            row = tile.block * self.tile_m + first_row(tidx % WARPGROUP if self.heads > 1 else tidx) + 8 * r
            if (lane % 4 == 0) & (row < sizes.seqlen_q):
                mLse[sizes.of_query(tile, row)] = lse[r]
        self._of_values(factors, at)
        self.softmax.rescale(rO, factors)
        rOut = cute.make_rmem_tensor_like(rO, self.dtype)
        rOut.store(rO.load().to(self.dtype))
        # The thread that stores has seen the block before leave shared memory.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        copy = cute.make_tiled_copy_C(atom, mma_pv).get_slice(tidx % WARPGROUP)
        cute.copy(copy, copy.retile(rOut), copy.partition_D(out.s)[None, None, None, group])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        if cute.arch.make_warp_uniform(tidx // 32) % 4 == 0:
            tOsO, tOgO = partition(out, (MMA_M, self.dv), (None, 0, tile.head, tile.batch), sizes.rows[0])
            number = tile.block if const_expr(self.heads > 1) else tile.block * self.consumers + group
            cute.copy(out.tma, tOsO[None, group], tOgO[None, number])
            cute.arch.cp_async_bulk_commit_group()
