"""Matrix products on Hopper: TMA loads, WGMMA, TMA stores, persistent and warp-specialised."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait

from cute_ops.kernels.gemm.cluster_sums import ClusterSums
from cute_ops.kernels.gemm.config import REGISTERS, GemmConfig
from cute_ops.kernels.gemm.mainloop import Mainloop, Operands
from cute_ops.kernels.gemm.parts import OutputTile
from cute_ops.kernels.gemm.store import EpilogueArguments, OperandLoads, Store
from cute_ops.kernels.gemm.tiles import ProductTiles, cluster_count, tile_order
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.accumulators import AccumulatorTile
from cute_ops.kernels.tensor_core.scheduler import persistent
from cute_ops.kernels.tensor_core.shared import SharedMemory
from cute_ops.kernels.tensor_core.shared_struct import SharedStruct
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP
from cute_ops.kernels.tensor_core.tma import TmaTensor


class GemmSm90:
    """``outputs = epilogue(a @ b.T, operands)``: a ``(m, k)`` and b ``(n, k)``, accumulated in float32.

    Tile: ``tile_m x tile_n`` of a CTA; clusters of ``cluster_m x cluster_n`` CTAs share what they load. A cluster goes
    from tile to tile until none is left. The first warp of the first warpgroup loads (:class:`Mainloop`); the two
    other warpgroups multiply, compute the epilogue and store (:class:`Store`), while one more warp for each group of
    these loads the epilogue's tiles.
    Which of the operands' dims is contiguous is known at compile time, all sizes at run time; what lies outside of a
    matrix is loaded as zeros and not stored.
    In a batch, a ``(m, k, batch)`` and b ``(n, k, batch)``, tiles of one matrix come after those of another. With
    ``cluster_k`` the CTAs of a cluster share a tile's terms (:class:`ClusterSums`).
    Shared memory: :meth:`GemmConfig.buffers`: ``stages`` of ``(tile_m + tile_n) x tile_k`` elements; ``store_stages``
    subtiles of each output and ``tile_stages`` of each tile that TMA loads, for each group of warps that stores.
    Bytes moved per element: a and b once from memory as long as the tiles walked together find them in L2, all others
    once.
    """

    def __init__(self, variant, epilogue, parts=()):
        config = GemmConfig.of(variant.config)
        REGISTERS.check(config.groups * config.sharing)
        self.config, self.pdl = config, True
        self.mainloop, self.store = Mainloop(config, epilogue.halves), Store(config, epilogue, parts)
        self.parts = self.store.parts

    @cute.jit
    def launch(self, operands, epilogue, stream):
        """Launch the kernel.

        Args:
            operands: a and b, both halves of one that is gate_up weights.
            epilogue: the epilogue's operands, its outputs and, for each part, its tensors.
            stream: the stream.
        """
        config, (mA, mB) = self.config, operands
        across = config.cluster_m * config.cluster_k
        mma = self.mainloop.tiled_mma(mA[0], mB[0])
        self.dtypes = (mA[0].element_type, mB[0].element_type)
        operands, epilogue = self.mainloop.operands(mA, mB), self.store.arguments(*epilogue)
        shape = Int32(mA[0].shape[0]), Int32(mB[0].shape[0])
        order = tile_order(config, mA[0], mB[0], (self.mainloop.rows, self.mainloop.columns))
        self.kernel(mma, operands, epilogue, shape, order).launch(
            grid=[across, config.cluster_n, cluster_count(config, order)], block=[config.threads, 1, 1],
            cluster=[across, config.cluster_n, 1], stream=stream, use_pdl=self.pdl, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, operands, epilogue, shape, order):
        config = self.config
        operands, epilogue = _operands(operands), _epilogue(epilogue)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tensor in (*operands.a, *operands.a_edge, *operands.b, *epilogue.tiles, *epilogue.outputs):
                if const_expr(tensor.atom is not None):
                    cpasync.prefetch_descriptor(tensor.atom)

        shared = SharedMemory(SharedStruct(self.store.buffers([dtype.width // 8 for dtype in self.dtypes])))
        stages = self.mainloop.stages(operands, self.dtypes, shared)
        subtiles = self.store.stages(epilogue, shared)
        sums = None
        if const_expr(config.cluster_k > 1):
            sums = ClusterSums.of(config, shared)
            sums.setup()
        everyone = cute.make_layout((config.cluster_m * config.cluster_k, config.cluster_n, 1))
        pipeline_init_arrive(everyone, is_relaxed=True)
        pipeline_init_wait(everyone)
        cluster = cute.make_layout((config.cluster_m, config.cluster_n, 1))
        wait_for_previous(self.pdl)

        tiles = ProductTiles(config, order)
        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(REGISTERS.load)
            if warp == 0:
                producer = self.mainloop.load(stages, cluster, tiles)
                let_next_start(self.pdl)
                # A CTA stays until the others of its cluster have read what it loaded for them.
                producer.tail()
            elif const_expr(len(epilogue.tiles) > 0):
                if warp <= config.groups:
                    self.store.tiles.load(subtiles.tiles, warp - 1, tiles)
        else:
            cute.arch.setmaxregister_increase(REGISTERS.multiply)
            steps = cute.ceil_div(cute.size(operands.a[0].tensor, mode=[1]), config.tile_k)
            if const_expr(config.parts > 1):
                steps = tiles.each(steps)
            self._multiply_and_store(mma, stages, subtiles, sums, (tiles, shape, steps))

    @cute.jit
    def _multiply_and_store(
        self, mma, stages: cutlass.Constexpr, subtiles: cutlass.Constexpr, sums: cutlass.Constexpr,
        sizes: cutlass.Constexpr,
    ):  # fmt: skip
        """The role of the other warpgroups: tile after tile, accumulate, then compute and store the epilogue."""
        config, (tiles, shape, steps) = self.config, sizes
        pingpong = const_expr(config.form == "pingpong")
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        warpgroup = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        thread, group = tidx % self.store.threads, warpgroup if pingpong else 0
        fragments = self.mainloop.fragments(mma, stages, warpgroup)
        halves = self.mainloop.halves
        acc = whole = AccumulatorTile.of(mma, fragments.acc, thread, (config.tile_m, config.tile_n), halves)
        if const_expr(sums is not None):
            acc = self.mainloop.stored(stages, thread)
        consumer, tile_consumer = self.mainloop.consumer(stages), self.store.tiles.consumer(subtiles.tiles, group)
        work = persistent(tiles.count, config.groups, group)
        if const_expr(pingpong):
            if group == 1:
                self.mainloop.pass_on(group, True)
            consumer.advance(group * steps)
        for index in cutlass.range(work.first, work.end, work.step, unroll=1):
            tile = OutputTile(tiles.stored(index), shape, thread, group, (index - work.first) // work.step)
            # Operands of the first subtile are loaded while the tile is accumulated.
            loads = OperandLoads(self.store.epilogue, subtiles.operands)
            loads.take(self.store.subtiles.chunk(acc, tile, 0))
            if const_expr(pingpong):
                # A stage's phase is one bit, so a warpgroup may wait for its stages only after the other warpgroup has
                # waited for all of its own.
                self.mainloop.order.wait(group)
            count = steps
            if const_expr(config.cluster_k > 1):
                begin, end = tiles.steps(steps, ())
                count = end - begin
            turn = (group, index + work.step // config.groups < tiles.count)
            consumer = self.mainloop.multiply(fragments, consumer, count, turn)
            if const_expr(pingpong):
                consumer.advance(steps)
            if const_expr(sums is not None):
                sums.exchange(whole.acc, acc.acc, thread, halves)
            tile_consumer = self.store.store(subtiles, acc, tile, loads, tile_consumer)
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def _operands(given):
    """Operands as named tuples, which arguments of kernels are not."""
    *loaded, layouts = given
    return Operands(*(tuple(TmaTensor(*part) for part in each) for each in loaded), layouts)


def _epilogue(given):
    operands, tiles, outputs, parts = given
    tiles, outputs = (tuple(TmaTensor(*tensor) for tensor in each) for each in (tiles, outputs))
    return EpilogueArguments(operands, tiles, outputs, parts)
