"""Matrix products on Hopper: TMA loads, WGMMA, TMA stores, persistent and warp-specialised."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineState,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
    pipeline_init_arrive,
    pipeline_init_wait,
)
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.gemm.config import MMA_K, MMA_M, WARPGROUP, GemmConfig
from cute_ops.kernels.gemm.epilogue import Chunk
from cute_ops.kernels.gemm.scheduler import bytes_by_grouping, tile_count, tile_of_batch
from cute_ops.kernels.gemm.views import is_last_contiguous
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous

# Registers of a thread that loads and of one that multiplies: 128 * 40 + 256 * 232 of an SM's 65536.
LOAD_REGISTERS, MULTIPLY_REGISTERS = 40, 232
# Named barriers: one for each warpgroup's turn, one for each group of warps that stores; 0 is the CTA's.
TURN, STORED = 1, 3


class GemmSm90:
    """``outputs = epilogue(a @ b.T, operands)``: a ``(m, k)`` and b ``(n, k)`` of 16 bits, accumulated in float32.

    Tile: ``tile_m x tile_n`` of a CTA; clusters of ``cluster_m x cluster_n`` CTAs share what they load. A cluster goes
    from tile to tile until none is left. The first warp of the first warpgroup loads; the two other warpgroups
    multiply, compute the epilogue and store, while one more warp for each group of these loads the epilogue's tiles.
    Which of the operands' dims is contiguous is known at compile time, all sizes at run time; what lies outside of a
    matrix is loaded as zeros and not stored. A CTA takes the same rows of both halves of a packed b, one half after the
    other in shared memory, so that a thread accumulates both.
    In a batch, a ``(m, k, batch)`` and b ``(n, k, batch)``, tiles of one matrix come after those of another. With
    ``split_k`` so many partial sums of each tile are computed, over a range of k each: an output ``(partials, m, n)``.
    Shared memory: ``stages`` slots of ``(tile_m + tile_n) x tile_k`` elements; ``store_stages`` subtiles of each output
    and ``tile_stages`` of each tile that TMA loads, for each group of warps that stores.
    Bytes moved per element: a and b once from memory as long as the tiles walked together find them in L2, all others
    once.
    """

    def __init__(self, variant, epilogue):
        config = GemmConfig.of(variant.config)
        self.config, self.epilogue, self.pdl = config, epilogue, True
        self.cluster = (config.cluster_m, config.cluster_n, 1)
        self.consumers = config.sharing * WARPGROUP  # threads that wait for a slot
        self.columns = config.tile_n // (1 + epilogue.packed)  # of an output's tile
        self.subtile = sub_m, sub_n = config.subtile(*epilogue.itemsizes)
        self.subtiles, left = divmod(config.tile_m * self.columns, sub_m * sub_n)
        if left or config.store_stages < 2 or self.subtiles % config.store_stages:
            shape = f"{sub_m} x {sub_n}"
            raise ValueError(f"{self.subtiles} subtiles of {shape} cannot take {config.store_stages} slots in turn")

    @cute.jit
    def launch(self, mA, mB, operands, outputs, mPartials, stream):
        config = self.config
        majors = [
            LayoutEnum.ROW_MAJOR if const_expr(is_last_contiguous(m)) else LayoutEnum.COL_MAJOR for m in (mA, mB[0])
        ]
        self.dtype = dtype = mA.element_type
        shape = (config.tile_m, config.tile_n, config.tile_k)
        mma = hopper.make_trivial_tiled_mma(
            dtype, dtype, majors[0].sm90_mma_major_mode(), majors[1].sm90_mma_major_mode(), Float32,
            atom_layout_mnk=(config.sharing, 1, 1), tiler_mn=(MMA_M, config.tile_n),
        )  # fmt: skip
        a_layout = hopper.make_smem_layout_a(majors[0], shape, dtype, config.stages)
        b_layout = hopper.make_smem_layout_b(majors[1], shape, dtype, config.stages)
        half_layout = hopper.make_smem_layout_b(
            majors[1], (config.tile_m, self.columns, config.tile_k), dtype, config.stages
        )
        a = self._load_atom(mA, a_layout, (config.tile_m, config.tile_k), config.cluster_n)
        b = tuple([self._load_atom(m, half_layout, (self.columns, config.tile_k), config.cluster_m) for m in mB])
        loaded = [(self.epilogue.operands[i], operands[i]) for i in self.epilogue.by_tma]
        stored = [*zip(self.epilogue.outputs, outputs)]
        operands = tuple([None if i in self.epilogue.by_tma else m for i, m in enumerate(operands)])
        self.dtypes = [[m.element_type for _, m in each] for each in (loaded, stored)]
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tiles = tuple([self._by_subtile(load, tensor, m, config.tile_stages) for tensor, m in loaded])
        stored = tuple([self._by_subtile(store, tensor, m, config.store_stages) for tensor, m in stored])

        m, n = Int32(mA.shape[0]), Int32(mB[0].shape[0])
        rows = cute.ceil_div(m, config.tile_m * config.cluster_m)
        columns = cute.ceil_div(n, self.columns * config.cluster_n)
        by_rows, by_columns = bytes_by_grouping(rows, columns, config.group, Int64(m), Int64(n))
        batch = (cute.size(mA, mode=[2]),) if const_expr(cute.rank(mA) > 2) else ()
        if const_expr(config.split_k > 0):
            batch = (self.split_count(mA),)
        order = (rows, columns, Int32(by_columns < by_rows), *batch)
        # No more clusters than these waves need: the last one is as full as the others.
        waves = cute.ceil_div(tile_count(order), config.clusters)
        clusters = cute.ceil_div(tile_count(order), cutlass.max(waves, 1))
        self.kernel(mma, (*a, a_layout), (b, b_layout), operands, tiles, stored, mPartials, (m, n), order).launch(
            grid=[config.cluster_m, config.cluster_n, clusters], block=[config.threads, 1, 1],
            cluster=list(self.cluster), stream=stream, use_pdl=self.pdl, min_blocks_per_mp=1,
        )  # fmt: skip

    def split_count(self, mA):
        """The ranges that k is split into, none of which is empty."""
        return cutlass.min(Int32(self.config.split_k), cute.ceil_div(Int32(mA.shape[1]), self.config.tile_k))

    def _by_subtile(self, operation, tensor, m, slots):
        """A TMA copy of a tensor's subtiles, None where TMA cannot take it; the tensor as a matrix; slots' layout."""
        layout = hopper.make_smem_layout_epi(
            m.element_type, LayoutEnum.ROW_MAJOR, self.subtile, slots * self.config.groups
        )
        matrix = tensor.matrix(m)
        if not tensor.by_tma:
            return None, matrix, layout
        return *cpasync.make_tiled_tma_atom(operation, matrix, cute.select(layout, mode=[0, 1]), self.subtile), layout

    def _load_atom(self, m, layout, tile, sharers):
        """A TMA load of a tile. Each of the CTAs that share the tile loads some of it for all."""
        shared = sharers > 1
        operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(operation, m, cute.select(layout, mode=[0, 1]), tile, num_multicast=sharers)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, a, b, operands, tiles, outputs, mPartials, shape, order):
        config, (tma_a, mA, a_layout), (halves, b_layout) = self.config, a, b
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma, *_ in ((tma_a,), *halves, *tiles, *outputs):
                if const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma)

        smem = cutlass.utils.SmemAllocator()
        sA, sB = self._slots(smem, self.dtype, a_layout), self._slots(smem, self.dtype, b_layout)
        tiles, outputs = (
            [(tma, m, self._slots(smem, dtype, layout)) for dtype, (tma, m, layout) in zip(dtypes, each)]
            for dtypes, each in zip(self.dtypes, (tiles, outputs))
        )
        ranks = cute.make_layout(self.cluster)
        ring = PipelineTmaAsync.create(
            num_stages=config.stages, producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.consumers),
            tx_count=config.slot_bytes,
            barrier_storage=smem.allocate_array(Int64, 2 * config.stages),
            cta_layout_vmnk=cute.make_layout((1, *self.cluster)), enable_multicast_signaling=True, defer_sync=True,
        )  # fmt: skip
        tile_ring = None
        if const_expr(len(tiles) > 0):
            slots, (sub_m, sub_n) = config.groups * config.tile_stages, self.subtile
            tile_ring = PipelineTmaAsync.create(
                num_stages=slots, producer_group=CooperativeGroup(Agent.Thread),
                consumer_group=CooperativeGroup(Agent.Thread, self.consumers // 32),
                tx_count=sub_m * sub_n * sum(sC.element_type.width // 8 for *_, sC in tiles),
                barrier_storage=smem.allocate_array(Int64, 2 * slots), defer_sync=True,
            )  # fmt: skip
        pipeline_init_arrive(ranks, is_relaxed=True)
        pipeline_init_wait(ranks)
        wait_for_previous(self.pdl)

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 0:
                self._load(ring, ranks, order, (tma_a, mA, sA), (halves, sB))
            elif const_expr(len(tiles) > 0):
                if warp <= config.groups:
                    self._load_tiles(tile_ring, warp - 1, order, tiles)
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            inputs, results = (operands, tiles, tile_ring), (outputs, mPartials)
            self._multiply_and_store(mma, ring, order, sA, sB, inputs, results, shape, cute.size(mA, mode=[1]))

    def _slots(self, smem, dtype, layout):
        return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    @cute.jit
    def _load(self, ring, ranks, order: cutlass.Constexpr, a: cutlass.Constexpr, b: cutlass.Constexpr):
        """Fill the ring with the tiles of both operands, tile after tile."""
        config = self.config
        (tma_a, mA, sA), (halves, sB) = a, b
        place = ranks.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        every = (None,) * cute.rank(mA)
        gA = cute.local_tile(
            mA, (config.tile_m, config.tile_k), every
        )  # (tile_m, tile_k, rest_m, rest_k), of a batch more
        beside, below = cute.make_layout(config.cluster_n), cute.make_layout(config.cluster_m)
        tAsA, tAgA = cpasync.tma_partition(
            tma_a, place[1], beside, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )  # (tma, stages), (tma, rest_m, rest_k)
        b_copies = []
        for i, (tma_b, mB) in enumerate(halves):
            rows = (self.columns, config.tile_k)
            sHalf, gB = cute.local_tile(sB, rows, (i, 0, None)), cute.local_tile(mB, rows, every)
            partition = cpasync.tma_partition(
                tma_b, place[0], below, cute.group_modes(sHalf, 0, 2), cute.group_modes(gB, 0, 2)
            )  # (tma, stages), (tma, rest_n, rest_k)
            b_copies.append((tma_b, *partition))
        a_sharers = cute.make_layout_image_mask(ranks, place, mode=1) if const_expr(config.cluster_n > 1) else None
        b_sharers = cute.make_layout_image_mask(ranks, place, mode=0) if const_expr(config.cluster_m > 1) else None

        slot = make_pipeline_state(PipelineUserType.Producer, config.stages)
        for index in cutlass.range(cute.arch.block_idx()[2], tile_count(order), cute.arch.grid_dim()[2], unroll=1):
            row, column, *batch = self._tile(index, order)
            begin, end = self._steps(cute.size(tAgA, mode=[2]), order, batch)
            batch = () if const_expr(config.split_k > 0) else batch
            for k in cutlass.range(begin, end, unroll=1):
                ring.producer_acquire(slot)
                full = ring.producer_get_barrier(slot)
                cute.copy(
                    tma_a, tAgA[(None, row, k, *batch)], tAsA[None, slot.index], tma_bar_ptr=full, mcast_mask=a_sharers
                )
                for tma_b, tBsB, tBgB in b_copies:
                    to = tBsB[None, slot.index]
                    cute.copy(tma_b, tBgB[(None, column, k, *batch)], to, tma_bar_ptr=full, mcast_mask=b_sharers)
                slot.advance()
        let_next_start(self.pdl)
        # A CTA stays until the others of its cluster have read what it loaded for them.
        ring.producer_tail(slot)

    @cute.jit
    def _load_tiles(self, ring, group, order: cutlass.Constexpr, tiles: cutlass.Constexpr):
        """Load the subtiles of the epilogue's operands, in the order in which a group of warps takes them."""
        config, clusters = self.config, cute.arch.grid_dim()[2]
        below, across = config.tile_m // self.subtile[0], self.columns // self.subtile[1]
        copies = [(tma, *self._partition(tma, m, sC)) for tma, m, sC in tiles]
        slot = make_pipeline_state(PipelineUserType.Producer, config.tile_stages)
        start = cute.arch.block_idx()[2] + group * clusters
        for index in cutlass.range(start, tile_count(order), config.groups * clusters, unroll=1):
            row, column, *batch = self._tile(index, order)
            for i in cutlass.range(self.subtiles, unroll=1):
                at = (row * below + i // across, column * across + i % across, *batch)
                mine = self._of_group(slot, group)
                ring.producer_acquire(mine)
                full = ring.producer_get_barrier(mine)
                for tma, tCsC, tCgC in copies:
                    cute.copy(tma, tCgC[None, at], tCsC[None, mine.index], tma_bar_ptr=full)
                slot.advance()

    def _partition(self, tma, m, slots):
        """A TMA copy's view of slots and of a matrix in subtiles: (tma, slots), (tma, (rest_m, rest_n)), of a batch
        (tma, (rest_m, rest_n, batch)).
        """
        subtiles = cute.zipped_divide(m, self.subtile)
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), subtiles)

    def _of_group(self, slot, group):
        """A slot of a group of warps among all groups' slots."""
        return PipelineState(slot.stages, slot.count, slot.index + group * self.config.tile_stages, slot.phase)

    @cute.jit
    def _tile(self, index, order: cutlass.Constexpr):
        """Row and column of this CTA's tile and, in a batch, its matrix."""
        config, (x, y, _) = self.config, cute.arch.block_idx()
        row, column, *batch = tile_of_batch(index, order, config.group)
        return row * config.cluster_m + x, column * config.cluster_n + y, *batch

    def _steps(self, count, order, batch):
        """The first step of k that a tile adds up, and the one after the last: all of them, or a range of a split k."""
        if self.config.split_k == 0:
            return 0, count
        return batch[0] * count // order[3], (batch[0] + 1) * count // order[3]

    @cute.jit
    def _multiply_and_store(
        self, mma, ring, order: cutlass.Constexpr, sA, sB, inputs: cutlass.Constexpr, outputs: cutlass.Constexpr,
        shape: cutlass.Constexpr, k,
    ):  # fmt: skip
        config = self.config
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        pingpong = const_expr(config.form == "pingpong")
        thread = tidx % self.consumers
        # A warpgroup's descriptors are those of its first thread.
        first = mma.get_slice(0 if pingpong else group * WARPGROUP)
        tCrA, tCrB = mma.make_fragment_A(first.partition_A(sA)), mma.make_fragment_B(first.partition_B(sB))
        rAcc = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        product = (mma, tCrA, tCrB, rAcc)  # fragments: (mma, m or n, k, stages)

        steps = cute.ceil_div(k, config.tile_k)
        slot = make_pipeline_state(PipelineUserType.Consumer, config.stages)
        tile_slot = make_pipeline_state(PipelineUserType.Consumer, max(config.tile_stages, 1))
        clusters, start, tiles = cute.arch.grid_dim()[2], cute.arch.block_idx()[2], tile_count(order)
        if const_expr(pingpong):
            if group == 1:
                self._end_turn(group, True)
            start += group * clusters
            slot.advance(group * steps)
        for index in cutlass.range(start, tiles, config.groups * clusters, unroll=1):
            places = (self._tile(index, order), shape, thread)
            # Operands of the first subtile are loaded while the tile is accumulated.
            held = {}
            ahead = self._load_chunk(inputs[0], self._chunk(0, places), held)
            if const_expr(pingpong):
                # A slot's phase is one bit, so a warpgroup may wait for its slots only after the other warpgroup has
                # waited for all of its own.
                cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)
            begin, end = self._steps(steps, order, places[0][2:])
            slot = self._multiply(product, ring, slot, end - begin, (group, index + clusters < tiles))
            if const_expr(pingpong):
                slot.advance(steps)
            storing = group if const_expr(pingpong) else 0
            tile_slot = self._store(mma, rAcc, ahead, held, inputs, outputs, places, storing, tile_slot)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _end_turn(self, group, more):
        """Let the other warpgroup multiply if it has one more tile."""
        if more:
            cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _multiply(self, product: cutlass.Constexpr, ring, slot, steps, turn: cutlass.Constexpr):
        """Accumulate a tile; the instructions of one step run while those of the next are issued."""
        self._step(product, ring, slot, first=True)
        done = slot.clone()
        slot.advance()
        for _ in cutlass.range(1, steps, unroll=1):
            self._step(product, ring, slot)
            warpgroup.wait_group(1)
            ring.consumer_release(done)
            done.advance()
            slot.advance()
        if const_expr(self.config.form == "pingpong"):
            self._end_turn(*turn)
        warpgroup.wait_group(0)
        ring.consumer_release(done)
        return slot

    def _step(self, product, ring, slot, first=False):
        """Issue the instructions of one slot; the first one of a tile overwrites the accumulators."""
        mma, tCrA, tCrB, rAcc = product
        ring.consumer_wait(slot)
        warpgroup.fence()
        for k in range(self.config.tile_k // MMA_K):
            if first and k < 2:
                mma.set(warpgroup.Field.ACCUMULATE, k == 1)
            cute.gemm(mma, rAcc, tCrA[None, None, k, slot.index], tCrB[None, None, k, slot.index], rAcc)
        warpgroup.commit_group()

    @cute.jit
    def _store(
        self, mma, rAcc, ahead: cutlass.Constexpr, held: cutlass.Constexpr, inputs: cutlass.Constexpr,
        outputs: cutlass.Constexpr, places: cutlass.Constexpr, group, tile_slot,
    ):  # fmt: skip
        """Compute and store a tile, subtile by subtile through shared memory; TMA stores the last ones during the next
        tile.
        """
        config, (sub_m, sub_n), (at, _, thread) = self.config, self.subtile, places
        stages, across = config.store_stages, self.columns // sub_n
        (operands, tiles, tile_ring), (outputs, mPartials) = inputs, outputs
        size = sub_m * sub_n // self.consumers  # of a thread
        to_smem = [self._subtile_copy(mma, sD.element_type, thread) for *_, sD in outputs]
        from_smem = [self._subtile_copy(mma, sC.element_type, thread, load=True) for *_, sC in tiles]
        by_tma = any(tma is not None for tma, *_ in outputs)
        targets = [None if tma is None else self._partition(tma, m, sD) for tma, m, sD in outputs]
        for i in cutlass.range_constexpr(self.subtiles):
            chunk, loaded = self._chunk(i, places), ahead
            if const_expr(len(tiles) > 0):
                mine = self._of_group(tile_slot, group)
                tile_ring.consumer_wait(mine)
                for k, (_, m, sC) in enumerate(tiles):
                    loaded[self.epilogue.by_tma[k]] = self._read_subtile(from_smem[k], sC, mine.index)
                # TMA fills the slot again once it is released, so these reads must be done before.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                tile_ring.consumer_release(mine)
                tile_slot.advance()
            # The accumulators of a block of rows are neighbours, of packed ones those of each half.
            first, half = i // across * (config.tile_n // sub_n) * size + i % across * size, across * size
            if const_expr(i % across == 0):
                totals, groups = self.epilogue.rows.start(), {}
            results = self.epilogue.compute(
                lambda h, v, distance: rAcc[first + h * half + v + distance // 2], loaded, chunk, totals, groups
            )
            if const_expr(i % across == across - 1 and len(totals) > 0):
                self.epilogue.rows.store(totals, mPartials, chunk.rows, chunk.shape[0], at[1])
            slot = group * stages + i % stages
            for (*_, sD), copy, rX in zip(outputs, to_smem, results):
                rOut = cute.make_rmem_tensor(copy.partition_S(sD).shape[:3], sD.element_type)
                rOut.store(cute.make_tensor(rX.iterator, rOut.layout).load().to(sD.element_type))
                cute.copy(copy, rOut, copy.partition_D(sD)[None, None, None, slot])
            cute.arch.fence_view_async_shared()
            # After the fence, which would wait for these loads, too.
            if const_expr(i + 1 < self.subtiles):
                ahead = self._load_chunk(operands, self._chunk(i + 1, places), held)
            # A warp that arrives here is done with the previous subtile, and the warp that stores has waited for the
            # next slot.
            cute.arch.barrier(barrier_id=STORED + group, number_of_threads=self.consumers)
            sub_at = (at[0] * (config.tile_m // sub_m) + i // across, at[1] * across + i % across, *at[2:])
            for tensor, (tma, m, sD) in zip(self.epilogue.outputs, outputs):
                if const_expr(tma is None):
                    self._store_rows(tensor, sD[None, None, slot], m, sub_at, thread)
            if const_expr(by_tma):
                if cute.arch.make_warp_uniform(thread // 32) == 0:
                    for (tma, *_), target in zip(outputs, targets):
                        if const_expr(tma is not None):
                            cute.copy(tma, target[0][None, slot], target[1][None, sub_at])
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(stages - 2, read=True)
        return tile_slot

    def _chunk(self, i, places):
        """The places of a thread's accumulators in a subtile."""
        (row, column, *batch), shape, thread = places
        (sub_m, sub_n), lane = self.subtile, thread % 32
        below, beside = divmod(i, self.columns // sub_n)
        row = row * self.config.tile_m + below * sub_m + thread // 32 * 16 + lane // 4
        column = column * self.columns + beside * sub_n + lane % 4 * 2
        columns = range(0, sub_n, 8)
        at = tuple(beside * sub_n + c for c in columns)
        return Chunk((row, row + 8), tuple(column + c for c in columns), shape, at, tuple(batch), below)

    def _load_chunk(self, operands, chunk, held):
        """The epilogue's operands that a thread loads itself; None for those that TMA loads. ``held`` keeps what
        was loaded for this tile, by :meth:`Epilogue.place`.
        """
        loaded = []
        for i, (tensor, m) in enumerate(zip(self.epilogue.operands, operands)):
            place = None if i in self.epilogue.by_tma else (i, self.epilogue.place(tensor, chunk))
            if place is not None and place not in held:
                held[place] = self.epilogue.load(tensor, m, chunk)
            loaded.append(None if place is None else held[place])
        return loaded

    def _subtile_copy(self, mma, dtype, thread, load=False):
        """A thread's copies between shared memory and registers in the order of its accumulators."""
        by_matrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), cutlass.Float16)
        atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, Float32)
        if load and dtype.width == 16:
            atom = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype)
        return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(by_matrix, mma)).get_slice(thread)

    def _read_subtile(self, copy, slots, index):
        """A thread's elements of a subtile in shared memory, in the order of its accumulators."""
        tSsC = copy.partition_S(slots)  # (copy, copies_m, copies_n, slots)
        rC = cute.make_rmem_tensor(copy.partition_D(slots).shape[:3], slots.element_type)
        cute.copy(copy, tSsC[None, None, None, index], copy.retile(rC))
        return cute.make_tensor(rC.iterator, cute.make_layout(cute.size(rC)))

    @cute.jit
    def _store_rows(self, tensor: cutlass.Constexpr, sD, mD, at: cutlass.Constexpr, thread):
        """Store a subtile of an output whose rows TMA cannot take, in vectors that their alignment allows."""
        vec = tensor.align // tensor.key.itemsize
        across = self.subtile[1] // vec
        threads = cute.make_layout((self.consumers // across, across), stride=(across, 1))
        bits = vec * mD.element_type.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mD.element_type, num_bits_per_copy=bits)
        rows = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vec))).get_slice(thread)
        tSsD = rows.partition_S(sD)  # (copy, copies_m, 1)
        tSgD = rows.partition_D(cute.local_tile(mD, self.subtile, at))
        tScD = rows.partition_D(cute.local_tile(cute.make_identity_tensor(mD.shape), self.subtile, at))
        rD = cute.make_rmem_tensor_like(tSsD)
        cute.copy(atom, tSsD, rD)
        for i in cutlass.range_constexpr(cute.size(tSgD, mode=[1])):
            if cute.elem_less(tScD[0, i, 0], mD.shape):
                cute.copy(atom, rD[None, i, 0], tSgD[None, i, 0])
