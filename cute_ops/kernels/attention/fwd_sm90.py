"""Attention on Hopper: TMA loads, WGMMA, an online softmax in registers, persistent and warp-specialised."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
    pipeline_init_arrive,
    pipeline_init_wait,
)
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.kernels.attention.mods import Mods
from cute_ops.kernels.attention.softmax import OnlineSoftmax, by_row, store_packed
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous

WARPGROUP = 128
ROWS = 64  # of a warpgroup
# Registers of a thread that loads and of one that multiplies: 128 * 24 + 256 * 240 of an SM's 65536.
LOAD_REGISTERS, MULTIPLY_REGISTERS = 24, 240
# Named barriers: each warpgroup's turn to multiply, one of its own threads, and that both have read the queries; 0 is
# the CTA's.
TURN, OWN, READ = 1, 3, 5
SHARED_BYTES, BARRIER_BYTES = 227 << 10, 1 << 10
# Of keys and values that are read again and again, what L2 holds beside the queries and outputs that pass through.
CACHED_BYTES = 32 << 20


class Sizes(NamedTuple):
    """Sizes of a call, known at run time."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    heads_per_kv: Any
    batches: Any

    @property
    def shift(self):
        """What is added to a query to compare it with a key: the last one stands beside the last key."""
        return self.seqlen_k - self.seqlen_q


class Tile(NamedTuple):
    """A block of queries of one head."""

    block: Any
    head: Any
    batch: Any


class Moved(NamedTuple):
    """A tensor that TMA moves: the copy, the tensor, its shared memory."""

    tma: Any
    m: Any
    s: Any


def _view(m, order):
    """A tensor (batch, seqlen, heads, d) with its dims in another order, as TMA takes it."""
    m = folded(m, own=3)
    step = 128 // m.element_type.width  # elements of 16 bytes
    sizes = [Int32(size) if isinstance(size, cutlass.Numeric) else size for size in m.shape]
    strides = [s if isinstance(s, int) else cute.assume(Int64(s), divby=step) for s in m.stride]
    shape, stride = (tuple([each[i] for i in order]) for each in (sizes, strides))
    return cute.make_tensor(m.iterator, cute.make_layout(shape, stride=stride))


class AttentionFwd:
    """``out = softmax(score_mod(scale * q @ k.T), where mask) @ v`` and the log-sum-exp of each row of scores.

    Tile: a CTA has 128 queries of one head, 64 for each of two warpgroups, and goes through the keys in tiles of
    ``tile_n``, from the last to the first. One warp of a third warpgroup loads queries, and keys and values into rings
    of two stages. A warpgroup issues the scores of a tile and the weighted values of the one before together, and
    exponentiates while these are summed up. The warpgroups take turns: one multiplies while the other exponentiates.
    Tiles that the mask leaves out are skipped, and only those that it crosses are masked. A CTA goes from one block of
    queries to another, those with most keys first.
    Shared memory: ``128 x d`` queries, two stages of ``tile_n x (d + dv)`` keys and values, ``128 x dv`` outputs, which
    take the place of the queries where there is no room for both.
    Bytes moved per element: q and out once; k and v once as long as the heads walked together find them in L2.
    """

    tile_m, stages, consumers = 128, 2, 2

    def __init__(self, variant):
        config, attrs, dims = AttentionConfig.of(variant.config), variant.attrs, variant.dims
        self.keys = variant.tensors
        self.d, self.dv, self.tile_n, self.sms = dims["d"], dims["e"], config.tile_n, config.sms
        self.mods = Mods(config.mask, config.bounds, config.score)
        self.scale = attrs["scale"] or self.d**-0.5
        self.softmax = OnlineSoftmax(1.0 if self.mods.score else self.scale)
        used = 2 * (self.tile_m + self.stages * self.tile_n) * (self.d + self.dv) + BARRIER_BYTES
        self.shares_memory = used > SHARED_BYTES  # outputs with queries

    @cute.jit
    def __call__(self, mQ, mK, mV, mSinks, mOut, mLse, stream):
        self.dtype = dtype = mQ.element_type
        rows, columns = (1, 3, 2, 0), (3, 1, 2, 0)
        mQ, mK, mOut = (_view(m, rows) for m in (mQ, mK, mOut))  # (seqlen, d, heads, batch)
        mV, mLse = _view(mV, columns), folded(mLse, own=2)  # (dv, seqlen, heads, batch), (batch, heads, seqlen)
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        by_rows, by_columns = row.sm90_mma_major_mode(), column.sm90_mma_major_mode()
        warpgroups = (self.consumers, 1, 1)
        mma_qk = hopper.make_trivial_tiled_mma(
            dtype, dtype, by_rows, by_rows, Float32, warpgroups, tiler_mn=(ROWS, self.tile_n)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            dtype, dtype, by_rows, by_columns, Float32, warpgroups, tiler_mn=(ROWS, self.dv),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        layouts = (
            hopper.make_smem_layout_a(row, (self.tile_m, self.tile_n, self.d), dtype, 1),
            hopper.make_smem_layout_b(row, (self.tile_m, self.tile_n, self.d), dtype, self.stages),
            hopper.make_smem_layout_b(column, (self.tile_m, self.dv, self.tile_n), dtype, self.stages),
            hopper.make_smem_layout_epi(dtype, row, (ROWS, self.dv), self.consumers),
        )
        tiles = (self.tile_m, self.d), (self.tile_n, self.d), (self.dv, self.tile_n), (ROWS, self.dv)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        moved = tuple(
            [
                cpasync.make_tiled_tma_atom(operation, m, cute.select(layout, mode=[0, 1]), tile)
                for operation, m, layout, tile in zip((load, load, load, store), (mQ, mK, mV, mOut), layouts, tiles)
            ]
        )
        seqlen_q, seqlen_k, heads, batches = (
            Int32(cute.size(m, mode=[mode])) for m, mode in ((mQ, 0), (mK, 0), (mQ, 2), (mQ, 3))
        )
        sizes = Sizes(seqlen_q, seqlen_k, heads, heads // Int32(cute.size(mK, mode=[2])), batches)
        ctas = cutlass.min(self._tiles(sizes), Int32(self.sms))
        self.kernel(mma_qk, mma_qk, mma_pv, (moved, layouts), mSinks, mLse, tuple(sizes)).launch(
            grid=[ctas, 1, 1], block=[WARPGROUP * (1 + self.consumers), 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mma_first: cute.TiledMma, mma_qk: cute.TiledMma, mma_pv: cute.TiledMma, moved, mSinks, mLse, sizes
    ):
        (moved, layouts), sizes = moved, Sizes(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma, _ in moved:
                cpasync.prefetch_descriptor(tma)
        smem = cutlass.utils.SmemAllocator()
        slots = [self._slots(smem, layout) for layout in layouts[:3]]
        layout = layouts[3]
        if const_expr(self.shares_memory):
            start = cute.recast_ptr(slots[0].iterator, layout.inner, self.dtype)
            slots.append(cute.make_tensor(start, layout.outer))
        else:
            slots.append(self._slots(smem, layout))
        moved = [Moved(tma, m, s) for (tma, m), s in zip(moved, slots)]
        rings = [self._ring(smem, layout, stages) for layout, stages in zip(layouts, (1, self.stages, self.stages))]
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        wait_for_previous(True)

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 0:
                self._load(rings, moved, sizes)
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            mma_first.set(warpgroup.Field.ACCUMULATE, False)
            for mma in (mma_qk, mma_pv):
                mma.set(warpgroup.Field.ACCUMULATE, True)
            self._attend(rings, (mma_first, mma_qk, mma_pv), moved, mSinks, mLse, sizes)

    def _slots(self, smem, layout):
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def _ring(self, smem, layout, stages):
        """Slots that one warp fills and both warpgroups empty."""
        return PipelineTmaAsync.create(
            num_stages=stages, producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.consumers * WARPGROUP // 32),
            tx_count=cute.size(cute.select(layout, mode=[0, 1])) * (self.dtype.width // 8),
            barrier_storage=smem.allocate_array(Int64, 2 * stages), defer_sync=True,
        )  # fmt: skip

    # Which tiles there are -----------------------------------------------------------------------------------------

    def _tiles(self, sizes):
        """Blocks of queries of all heads."""
        return cute.ceil_div(sizes.seqlen_q, self.tile_m) * sizes.heads * sizes.batches

    def _tile(self, index, sizes):
        """The block of queries with this index: heads whose keys and values fit into L2 together, and of these the
        last queries first, which have most keys under a causal mask.
        """
        blocks = cute.ceil_div(sizes.seqlen_q, self.tile_m)
        of_head = Int64(sizes.seqlen_k) * ((self.d + self.dv) * self.dtype.width // 8)
        together = Int32(cutlass.max(Int64(CACHED_BYTES) // cutlass.max(of_head, 1), 1)) * sizes.heads_per_kv
        together = cutlass.min(together, sizes.heads * sizes.batches)
        section = index // (together * blocks)
        within = index - section * together * blocks
        members = cutlass.min(together, sizes.heads * sizes.batches - section * together)
        row = within // members
        head = section * together + within - row * members
        batch = head // sizes.heads
        return Tile(blocks - 1 - row, head - batch * sizes.heads, batch)

    @cute.jit
    def _range(self, tile: cutlass.Constexpr, sizes: cutlass.Constexpr):
        """The first and the last tile of keys that the mask does not leave out; first > last if there is none."""
        tiles = cute.ceil_div(sizes.seqlen_k, self.tile_n)
        first, last = Int32(0), tiles - 1
        if const_expr(self.mods.mask is not None):
            first, last = tiles, Int32(-1)
            for base in cutlass.range(0, tiles, 32, unroll=1):
                keys = base + cute.arch.lane_idx()
                if keys < tiles:
                    if self._some(tile, sizes, keys):
                        first, last = cutlass.min(first, keys), cutlass.max(last, keys)
            for offset in (16, 8, 4, 2, 1):
                first = cutlass.min(first, cute.arch.shuffle_sync_bfly(first, offset=offset))
                last = cutlass.max(last, cute.arch.shuffle_sync_bfly(last, offset=offset))
        return cute.arch.make_warp_uniform(first), cute.arch.make_warp_uniform(last)

    def _bounds(self, tile, sizes, keys):
        """Whether the mask is true of all elements of a tile, and whether it may be true of any."""
        q, k = tile.block * self.tile_m, keys * self.tile_n
        q_high = cutlass.min(q + self.tile_m, sizes.seqlen_q) - 1
        k_high = cutlass.min(k + self.tile_n, sizes.seqlen_k) - 1
        return self.mods.bounds(tile, (q, q_high), (k, k_high), sizes.shift)

    def _some(self, tile, sizes, keys):
        return Boolean(True) if self.mods.mask is None else self._bounds(tile, sizes, keys)[1]

    def _whole(self, tile, sizes, keys):
        """Whether no element of a tile is left out: by the mask, or because it lies behind the last key."""
        inside = (keys + 1) * self.tile_n <= sizes.seqlen_k
        return inside if self.mods.mask is None else inside & self._bounds(tile, sizes, keys)[0]

    # The warp that loads -------------------------------------------------------------------------------------------

    @cute.jit
    def _load(self, rings: cutlass.Constexpr, moved: cutlass.Constexpr, sizes: cutlass.Constexpr):
        """Load the queries of each block, then the keys and the values of its tiles."""
        ring_q, ring_k, ring_v = rings
        q, k, v, _ = moved
        q_slot = make_pipeline_state(PipelineUserType.Producer, 1)
        slot = make_pipeline_state(PipelineUserType.Producer, self.stages)
        for index in cutlass.range(cute.arch.block_idx()[0], self._tiles(sizes), cute.arch.grid_dim()[0], unroll=1):
            tile = self._tile(index, sizes)
            kv_head = tile.head // sizes.heads_per_kv
            tQsQ, tQgQ = self._partition(q, (self.tile_m, self.d), (tile.block, 0, tile.head, tile.batch))
            tKsK, tKgK = self._partition(k, (self.tile_n, self.d), (None, 0, kv_head, tile.batch))
            tVsV, tVgV = self._partition(v, (self.dv, self.tile_n), (0, None, kv_head, tile.batch))
            first, last = self._range(tile, sizes)
            ring_q.producer_acquire(q_slot)
            cute.copy(q.tma, tQgQ, tQsQ[None, 0], tma_bar_ptr=ring_q.producer_get_barrier(q_slot))
            q_slot.advance()
            for i in cutlass.range(last - first + 1, unroll=1):
                keys = last - i
                if self._some(tile, sizes, keys):
                    for tma, ring, tXsX, tXgX in ((k.tma, ring_k, tKsK, tKgK), (v.tma, ring_v, tVsV, tVgV)):
                        ring.producer_acquire(slot)
                        full = ring.producer_get_barrier(slot)
                        cute.copy(tma, tXgX[None, keys], tXsX[None, slot.index], tma_bar_ptr=full)
                    slot.advance()
        let_next_start(True)
        ring_v.producer_tail(slot)

    def _partition(self, moved, tile, at):
        """TMA's view of shared memory, (tma, stages), and of a tensor, (tma, rest)."""
        s, g = cute.group_modes(moved.s, 0, 2), cute.group_modes(cute.local_tile(moved.m, tile, at), 0, 2)
        return cpasync.tma_partition(moved.tma, 0, cute.make_layout(1), s, g)

    # The warpgroups that multiply ----------------------------------------------------------------------------------

    @cute.jit
    def _attend(
        self, rings: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr,
        mSinks, mLse, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        (ring_q, ring_k, ring_v), (mma_first, mma_qk, mma_pv), (q, k, v, _) = rings, mmas, moved
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        # A warpgroup's descriptors are those of its first thread.
        first_qk, first_pv = mma_qk.get_slice(group * WARPGROUP), mma_pv.get_slice(group * WARPGROUP)
        tSrQ = mma_qk.make_fragment_A(first_qk.partition_A(q.s))  # (mma, m, d, 1)
        tSrK = mma_qk.make_fragment_B(first_qk.partition_B(k.s))  # (mma, n, d, stages)
        tOrV = mma_pv.make_fragment_B(first_pv.partition_B(v.s))  # (mma, dv, n, stages)
        rS = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        rO = cute.make_rmem_tensor(mma_pv.partition_shape_C((self.tile_m, self.dv)), Float32)
        # The scores of two blocks of 8 columns are, in this order, a thread's part of A for 16 columns.
        rP = cute.make_rmem_tensor(((2, 2, 2), 1, self.tile_n // 16), self.dtype)
        rMax, rSum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        score, value = ((mma_first, mma_qk), tSrQ, tSrK, rS), (mma_pv, rP, tOrV, rO)

        q_slot = make_pipeline_state(PipelineUserType.Consumer, 1)
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        before = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        if group == 1:
            self._end_turn(group)
        for index in cutlass.range(cute.arch.block_idx()[0], self._tiles(sizes), cute.arch.grid_dim()[0], unroll=1):
            tile = self._tile(index, sizes)
            first, last = self._range(tile, sizes)
            rMax.fill(-Float32.inf)
            rSum.fill(0.0)
            rO.fill(0.0)
            ring_q.consumer_wait(q_slot)
            if last >= first:
                self._begin_turn(group)
                ring_k.consumer_wait(slot)
                self._multiply_score(score, slot.index)
                self._end_turn(group)
                warpgroup.wait_group(0)
                ring_k.consumer_release(slot)
                slot.advance()
                self._change(rS, (tile, sizes, tidx), last)
                self.softmax.add(rS, rMax, rSum)
                store_packed(rS, rP)
                for i in cutlass.range(1, last - first + 1, unroll=1):
                    keys = last - i
                    if self._some(tile, sizes, keys):
                        self._begin_turn(group)
                        ring_k.consumer_wait(slot)
                        self._multiply_score(score, slot.index)
                        ring_v.consumer_wait(before)
                        self._multiply_value(value, before.index)
                        self._end_turn(group)
                        warpgroup.wait_group(1)
                        ring_k.consumer_release(slot)
                        slot.advance()
                        self._change(rS, (tile, sizes, tidx), keys)
                        factors = self.softmax.add(rS, rMax, rSum)
                        # ptxas would move the wait ahead of the exponentials, but not over a branch on their sums.
                        if rSum[0] + rSum[1] < 0.0:
                            cute.arch.sync_warp()
                        warpgroup.wait_group(0)
                        ring_v.consumer_release(before)
                        before.advance()
                        self.softmax.rescale(rO, factors)
                        store_packed(rS, rP)
                ring_v.consumer_wait(before)
                self._multiply_value(value, before.index)
                warpgroup.wait_group(0)
                ring_v.consumer_release(before)
                before.advance()
            if const_expr(self.shares_memory):
                cute.arch.barrier(barrier_id=READ, number_of_threads=self.consumers * WARPGROUP)
            else:
                ring_q.consumer_release(q_slot)
            self._finish(mma_pv, rO, (rMax, rSum), moved[3], (mSinks, mLse), (tile, sizes, tidx))
            if const_expr(self.shares_memory):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                ring_q.consumer_release(q_slot)
            q_slot.advance()
        if group == 0:
            self._begin_turn(group)  # the other warpgroup's last end of a turn
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _begin_turn(self, group):
        cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)

    def _end_turn(self, group):
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=2 * WARPGROUP)

    def _multiply_score(self, product, stage):
        """Issue the scores of a tile, which overwrite those of the one before."""
        mmas, tSrQ, tSrK, rS = product
        warpgroup.fence()
        for k in range(self.d // 16):
            cute.gemm(mmas[k > 0], rS, tSrQ[None, None, k, 0], tSrK[None, None, k, stage], rS)
        warpgroup.commit_group()

    def _multiply_value(self, product, stage):
        """Issue the sum of a tile's values, weighted."""
        mma, rP, tOrV, rO = product
        warpgroup.fence()
        for k in range(self.tile_n // 16):
            cute.gemm(mma, rO, rP[None, None, k], tOrV[None, None, k, stage], rO)
        warpgroup.commit_group()

    @cute.jit
    def _change(self, rS, at: cutlass.Constexpr, keys):
        """Change a tile's scores as a mod says, and hide those that are left out."""
        tile, sizes, tidx = at
        lane, scores = tidx % 32, by_row(rS)  # (rows, columns)
        row = tile.block * self.tile_m + tidx // 32 * 16 + lane // 4
        column = keys * self.tile_n + lane % 4 * 2
        q, k = (row, row + 8), (column, tuple(8 * (c // 2) + c % 2 for c in range(self.tile_n // 4)))
        if const_expr(self.mods.score is not None):
            self.mods.change(scores, (tile, q, k, sizes.shift), self.scale)
        if not self._whole(tile, sizes, keys):
            self.mods.hide(scores, (tile, q, k, sizes.shift), sizes.seqlen_k)

    @cute.jit
    def _finish(
        self, mma_pv, rO, rows: cutlass.Constexpr, out: cutlass.Constexpr, sums: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        """Divide by the sums of a block, and store it."""
        (block, head, batch), sizes, tidx = at
        (rMax, rSum), (mSinks, mLse), lane = rows, sums, tidx % 32
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        sink = None if const_expr(mSinks is None) else Float32(mSinks[head])
        lse, factors = self.softmax.finish(rMax, rSum, sink)
        for r in cutlass.range_constexpr(2):
            row = block * self.tile_m + tidx // 32 * 16 + lane // 4 + 8 * r
            if (lane % 4 == 0) & (row < sizes.seqlen_q):
                mLse[batch, head, row] = lse[r]
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
            tOsO, tOgO = self._partition(out, (ROWS, self.dv), (None, 0, head, batch))
            cute.copy(out.tma, tOsO[None, group], tOgO[None, block * self.consumers + group])
            cute.arch.cp_async_bulk_commit_group()
