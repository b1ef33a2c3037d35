"""Matrix products on Hopper: TMA loads, WGMMA, TMA stores, persistent and warp-specialised."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
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

from cute_ops.kernels.gemm.config import MMA_K, MMA_M, WARPGROUP, GemmConfig
from cute_ops.kernels.gemm.scheduler import bytes_by_grouping, tile_of
from cute_ops.kernels.gemm.views import is_last_contiguous
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous

# Registers of a thread that loads and of one that multiplies: 128 * 40 + 256 * 232 of an SM's 65536.
LOAD_REGISTERS, MULTIPLY_REGISTERS = 40, 232
# Named barriers: one for each warpgroup's turn, one for each group of warps that stores; 0 is the CTA's.
TURN, STORED = 1, 3


class GemmSm90:
    """``out = epilogue(a @ b.T)``: a ``(m, k)`` and b ``(n, k)`` of 16 bits, accumulated in float32.

    Tile: ``tile_m x tile_n`` of a CTA; clusters of ``cluster_m x cluster_n`` CTAs share what they load. A cluster goes
    from tile to tile until none is left. The first warp of the first warpgroup loads; the two other warpgroups
    multiply, convert and store. Which of the operands' dims is contiguous is known at compile time, all sizes at run
    time; what lies outside of a matrix is loaded as zeros and not stored.
    Shared memory: ``stages`` slots of ``(tile_m + tile_n) x tile_k`` elements; ``store_stages`` subtiles of 64 bytes a
    row, for each group of warps that stores.
    Bytes moved per element: a and b once from memory as long as the tiles walked together find them in L2, out once.
    """

    def __init__(self, variant, epilogue):
        tile, out = GemmConfig.of(variant.config), variant.args[-1]
        self.config, self.epilogue, self.pdl = tile, epilogue, True
        self.tma_store, self.row_vec = out.row_align % 16 == 0, out.row_align // out.itemsize
        self.cluster = (tile.cluster_m, tile.cluster_n, 1)
        self.consumers = tile.sharing * WARPGROUP  # threads that wait for a slot
        sub_m, sub_n = tile.subtile(out.itemsize)
        subtiles, left = divmod(tile.tile_m * tile.tile_n, sub_m * sub_n)
        if left or tile.store_stages < 2 or subtiles % tile.store_stages:
            raise ValueError(f"{subtiles} subtiles of {sub_m} x {sub_n} cannot take {tile.store_stages} slots in turn")

    @cute.jit
    def launch(self, mA, mB, mD, stream):
        tile = self.config
        majors = [LayoutEnum.ROW_MAJOR if const_expr(is_last_contiguous(m)) else LayoutEnum.COL_MAJOR for m in (mA, mB)]
        self.dtype, self.out_dtype = dtype, out_dtype = mA.element_type, mD.element_type
        shape = (tile.tile_m, tile.tile_n, tile.tile_k)
        mma = hopper.make_trivial_tiled_mma(
            dtype, dtype, majors[0].sm90_mma_major_mode(), majors[1].sm90_mma_major_mode(), Float32,
            atom_layout_mnk=(tile.sharing, 1, 1), tiler_mn=(MMA_M, tile.tile_n),
        )  # fmt: skip
        a_layout = hopper.make_smem_layout_a(majors[0], shape, dtype, tile.stages)
        b_layout = hopper.make_smem_layout_b(majors[1], shape, dtype, tile.stages)
        subtile = tile.subtile(out_dtype.width // 8)
        slots = tile.store_stages * (2 // tile.sharing)
        d_layout = hopper.make_smem_layout_epi(out_dtype, LayoutEnum.ROW_MAJOR, subtile, slots)
        tma_a, gA = self._load_atom(mA, a_layout, (tile.tile_m, tile.tile_k), tile.cluster_n)
        tma_b, gB = self._load_atom(mB, b_layout, (tile.tile_n, tile.tile_k), tile.cluster_m)
        tma_d, gD = None, mD
        if const_expr(self.tma_store):
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_d, gD = cpasync.make_tiled_tma_atom(store, mD, cute.select(d_layout, mode=[0, 1]), subtile)

        m, n = Int32(mD.shape[0]), Int32(mD.shape[1])
        rows = cute.ceil_div(m, tile.tile_m * tile.cluster_m)
        columns = cute.ceil_div(n, tile.tile_n * tile.cluster_n)
        by_rows, by_columns = bytes_by_grouping(rows, columns, tile.group, Int64(m), Int64(n))
        clusters = cutlass.min(rows * columns, tile.clusters)
        order = (rows, columns, Int32(by_columns < by_rows))
        self.kernel(mma, (tma_a, gA, a_layout), (tma_b, gB, b_layout), (tma_d, gD, d_layout), order).launch(
            grid=[tile.cluster_m, tile.cluster_n, clusters], block=[tile.threads, 1, 1], cluster=list(self.cluster),
            stream=stream, use_pdl=self.pdl, min_blocks_per_mp=1,
        )  # fmt: skip

    def _load_atom(self, m, layout, tile, sharers):
        """A TMA load of a tile, each of the CTAs that share it loading a part for all."""
        shared = sharers > 1
        operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(operation, m, cute.select(layout, mode=[0, 1]), tile, num_multicast=sharers)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, a, b, d, order):
        tile, (tma_a, mA, a_layout), (tma_b, mB, b_layout), (tma_d, mD, d_layout) = self.config, a, b, d
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if const_expr(self.tma_store):
                cpasync.prefetch_descriptor(tma_d)

        smem = cutlass.utils.SmemAllocator()
        sA = smem.allocate_tensor(self.dtype, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        sB = smem.allocate_tensor(self.dtype, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        sD = smem.allocate_tensor(self.out_dtype, d_layout.outer, byte_alignment=1024, swizzle=d_layout.inner)
        ranks = cute.make_layout(self.cluster)
        ring = PipelineTmaAsync.create(
            num_stages=tile.stages, producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.consumers),
            tx_count=tile.load_bytes(self.dtype.width // 8) // tile.stages,
            barrier_storage=smem.allocate_array(Int64, 2 * tile.stages),
            cta_layout_vmnk=cute.make_layout((1, *self.cluster)), enable_multicast_signaling=True, defer_sync=True,
        )  # fmt: skip
        pipeline_init_arrive(ranks, is_relaxed=True)
        pipeline_init_wait(ranks)
        wait_for_previous(self.pdl)

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 0:
                self._load(ring, ranks, order, (tma_a, mA, sA), (tma_b, mB, sB))
        else:
            cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
            self._multiply_and_store(mma, ring, order, sA, sB, (tma_d, mD, sD), cute.size(mA, mode=[1]))

    @cute.jit
    def _load(self, ring, ranks, order: cutlass.Constexpr, a: cutlass.Constexpr, b: cutlass.Constexpr):
        """Fill the ring with the tiles of both operands, tile after tile."""
        tile = self.config
        (tma_a, mA, sA), (tma_b, mB, sB) = a, b
        place = ranks.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        gA = cute.local_tile(mA, (tile.tile_m, tile.tile_k), (None, None))  # (tile_m, tile_k, rest_m, rest_k)
        gB = cute.local_tile(mB, (tile.tile_n, tile.tile_k), (None, None))  # (tile_n, tile_k, rest_n, rest_k)
        beside, below = cute.make_layout(tile.cluster_n), cute.make_layout(tile.cluster_m)
        tAsA, tAgA = cpasync.tma_partition(
            tma_a, place[1], beside, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )  # (tma, stages), (tma, rest_m, rest_k)
        tBsB, tBgB = cpasync.tma_partition(
            tma_b, place[0], below, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )  # (tma, stages), (tma, rest_n, rest_k)
        a_sharers = cute.make_layout_image_mask(ranks, place, mode=1) if const_expr(tile.cluster_n > 1) else None
        b_sharers = cute.make_layout_image_mask(ranks, place, mode=0) if const_expr(tile.cluster_m > 1) else None

        slot = make_pipeline_state(PipelineUserType.Producer, tile.stages)
        for index in cutlass.range(cute.arch.block_idx()[2], order[0] * order[1], cute.arch.grid_dim()[2], unroll=1):
            row, column = self._tile(index, order)
            for k in cutlass.range(cute.size(tAgA, mode=[2]), unroll=1):
                ring.producer_acquire(slot)
                full = ring.producer_get_barrier(slot)
                cute.copy(tma_a, tAgA[None, row, k], tAsA[None, slot.index], tma_bar_ptr=full, mcast_mask=a_sharers)
                cute.copy(tma_b, tBgB[None, column, k], tBsB[None, slot.index], tma_bar_ptr=full, mcast_mask=b_sharers)
                slot.advance()
        let_next_start(self.pdl)
        # A CTA stays until the others of its cluster have read what it loaded for them.
        ring.producer_tail(slot)

    @cute.jit
    def _tile(self, index, order: cutlass.Constexpr):
        """Row and column of this CTA's tile."""
        tile, (x, y, _) = self.config, cute.arch.block_idx()
        row, column = tile_of(index, order[0], order[1], tile.group, order[2])
        return row * tile.cluster_m + x, column * tile.cluster_n + y

    @cute.jit
    def _multiply_and_store(self, mma, ring, order: cutlass.Constexpr, sA, sB, out: cutlass.Constexpr, k):
        tile = self.config
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        pingpong = const_expr(tile.form == "pingpong")
        turns = 2 if pingpong else 1
        thread = tidx % self.consumers
        # A warpgroup's descriptors are those of its first thread.
        first = mma.get_slice(0 if pingpong else group * WARPGROUP)
        tCrA, tCrB = mma.make_fragment_A(first.partition_A(sA)), mma.make_fragment_B(first.partition_B(sB))
        rAcc = cute.make_rmem_tensor(mma.partition_shape_C((tile.tile_m, tile.tile_n)), Float32)
        product = (mma, tCrA, tCrB, rAcc)  # fragments: (mma, m or n, k, stages)

        steps = cute.ceil_div(k, tile.tile_k)
        slot = make_pipeline_state(PipelineUserType.Consumer, tile.stages)
        clusters, start, tiles = cute.arch.grid_dim()[2], cute.arch.block_idx()[2], order[0] * order[1]
        if const_expr(pingpong):
            if group == 1:
                self._end_turn(group, True)
            start += group * clusters
            slot.advance(group * steps)
        for index in cutlass.range(start, tiles, turns * clusters, unroll=1):
            if const_expr(pingpong):
                # A slot's phase is one bit, so a warpgroup may wait for its slots only after the other one has waited
                # for all of its own.
                cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)
            slot = self._multiply(product, ring, slot, steps, (group, index + clusters < tiles))
            if const_expr(pingpong):
                slot.advance(steps)
            self._store(mma, rAcc, out, self._tile(index, order), thread, group if pingpong else 0)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _end_turn(self, group, more):
        """Let the other warpgroup multiply if it has one more tile."""
        if more:
            cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _multiply(self, product: cutlass.Constexpr, ring, slot, steps, turn: cutlass.Constexpr):
        """Sum up a tile; one step's instructions run while the next one's are issued."""
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
        """Issue the instructions of one slot; the first of a tile does not add to what the registers hold."""
        mma, tCrA, tCrB, rAcc = product
        ring.consumer_wait(slot)
        warpgroup.fence()
        for k in range(self.config.tile_k // MMA_K):
            if first and k < 2:
                mma.set(warpgroup.Field.ACCUMULATE, k == 1)
            cute.gemm(mma, rAcc, tCrA[None, None, k, slot.index], tCrB[None, None, k, slot.index], rAcc)
        warpgroup.commit_group()

    @cute.jit
    def _store(self, mma, rAcc, out: cutlass.Constexpr, at: cutlass.Constexpr, thread, group):
        """Store a tile, subtile by subtile through shared memory; TMA stores the last ones during the next tile."""
        tile, (tma_d, mD, sD) = self.config, out
        stages, (sub_m, sub_n) = tile.store_stages, tile.subtile(self.out_dtype.width // 8)
        across = tile.tile_n // sub_n
        by_matrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), cutlass.Float16)
        to_smem = cute.make_tiled_copy_S(
            hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.out_dtype, Float32),
            cute.make_tiled_copy_C_atom(by_matrix, mma),
        ).get_slice(thread)
        tRS_sD = to_smem.partition_D(sD)  # (copy, copies_m, copies_n, slots)
        rPart = cute.make_rmem_tensor(to_smem.partition_S(sD).shape[:3], Float32)
        rOut = cute.make_rmem_tensor_like(rPart, self.out_dtype)
        gD = cute.local_tile(mD, (tile.tile_m, tile.tile_n), at)
        if const_expr(self.tma_store):
            bSG_sD, bSG_gD = cpasync.tma_partition(
                tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.zipped_divide(gD, (sub_m, sub_n))
            )  # (tma, slots), (tma, (tile_m / sub_m, across))
        for i in cutlass.range_constexpr(cute.size(rAcc) // cute.size(rPart)):
            for v in cutlass.range_constexpr(cute.size(rPart)):
                rPart[v] = rAcc[i * cute.size(rPart) + v]
            rOut.store(self.epilogue(rPart.load()).to(self.out_dtype))
            slot, place = group * stages + i % stages, (i // across, i % across)
            cute.copy(to_smem, rOut, tRS_sD[None, None, None, slot])
            cute.arch.fence_view_async_shared()
            # Who arrives here is done with the subtile before, and the warp that stores has waited for the slot that
            # comes next.
            cute.arch.barrier(barrier_id=STORED + group, number_of_threads=self.consumers)
            if const_expr(not self.tma_store):
                sub_at = (at[0] * (tile.tile_m // sub_m) + place[0], at[1] * across + place[1])
                self._store_rows(sD[None, None, slot], mD, (sub_m, sub_n), sub_at, thread)
            elif cute.arch.make_warp_uniform(thread // 32) == 0:
                cute.copy(tma_d, bSG_sD[None, slot], bSG_gD[None, place])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(stages - 2, read=True)

    @cute.jit
    def _store_rows(self, sD, mD, subtile: cutlass.Constexpr, at: cutlass.Constexpr, thread):
        """Store a subtile of an output whose rows TMA cannot take, in vectors that their alignment allows."""
        vec = self.row_vec
        across = subtile[1] // vec
        threads = cute.make_layout((self.consumers // across, across), stride=(across, 1))
        bits = vec * self.out_dtype.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out_dtype, num_bits_per_copy=bits)
        rows = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vec))).get_slice(thread)
        tSsD = rows.partition_S(sD)  # (copy, copies_m, 1)
        tSgD = rows.partition_D(cute.local_tile(mD, subtile, at))
        tScD = rows.partition_D(cute.local_tile(cute.make_identity_tensor(mD.shape), subtile, at))
        rD = cute.make_rmem_tensor_like(tSsD)
        cute.copy(atom, tSsD, rD)
        for i in cutlass.range_constexpr(cute.size(tSgD, mode=[1])):
            if cute.elem_less(tScD[0, i, 0], mD.shape):
                cute.copy(atom, rD[None, i, 0], tSgD[None, i, 0])
