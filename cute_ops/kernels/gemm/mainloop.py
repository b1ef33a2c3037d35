"""The main loop of a product on Hopper: TMA fills a pipeline of tiles of both operands, warpgroups multiply them."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.gemm.config import Barrier
from cute_ops.kernels.gemm.views import is_last_contiguous
from cute_ops.kernels.tensor_core import wgmma
from cute_ops.kernels.tensor_core.accumulators import AccumulatorTile
from cute_ops.kernels.tensor_core.barriers import OrderBarrier
from cute_ops.kernels.tensor_core.pipeline import Consumer, Producer, tma_pipeline
from cute_ops.kernels.tensor_core.scheduler import persistent
from cute_ops.kernels.tensor_core.sizes import WARPGROUP
from cute_ops.kernels.tensor_core.tma import Sharing, TmaTensor, load_tensor, tma_copy


class Operands(NamedTuple):
    """Both operands as the kernel takes them.

    Attributes:
        a: ``(m, k)``; of a batch ``(m, k, batch)``; of transposed tiles of gate_up weights both halves.
        a_edge: the same, of which fewer rows are loaded at once; empty where there is no such copy.
        b: ``(n, k)``; of gate_up weights the gate's rows and the up projection's.
        layouts: of the stages of the whole tile of a and of b.
    """

    a: tuple[TmaTensor, ...]
    a_edge: tuple[TmaTensor, ...]
    b: tuple[TmaTensor, ...]
    layouts: tuple[Any, Any]


class OperandStages(NamedTuple):
    """Both operands in memory and in shared memory, which the roles share.

    Attributes:
        operands: in memory.
        sA: ``(tile_m, tile_k, stages)``.
        sB: ``(tile_n, tile_k, stages)``; of gate_up weights the gate's rows, then the up projection's.
        pipeline: of the stages.
    """

    operands: Operands
    sA: Any
    sB: Any
    pipeline: Any


class Fragments(NamedTuple):
    """A warpgroup's part of a product.

    Attributes:
        mma: the tiled MMA.
        tCrA: descriptors of A's stages, ``(mma, m, k, stages)``.
        tCrB: descriptors of B's stages, ``(mma, n, k, stages)``.
        acc: accumulators, ``(mma, m, 1)``.
    """

    mma: Any
    tCrA: Any
    tCrB: Any
    acc: Any


class Mainloop:
    """``acc = a @ b.T`` of a tile, stage by stage.

    A CTA takes the same rows of the gate's and of the up projection's weights, one after the other in shared memory, so
    that a thread accumulates both.

    Args:
        halves: 2 for gate_up weights, else 1.
    """

    def __init__(self, config, halves):
        self.config, self.halves = config, 1 if config.transposed else halves
        self.rows = config.tile_m // halves * self.halves  # of an output's tile
        self.columns = config.tile_n // self.halves
        self.consumers = config.sharing * WARPGROUP
        self.order = OrderBarrier(Barrier.ORDER) if config.form == "pingpong" else None

    # --- at launch

    def tiled_mma(self, mA, mB):
        config = self.config
        self.majors = [wgmma.major_of(is_last_contiguous(m)) for m in (mA, mB)]
        return wgmma.tiled_mma((mA.element_type, mB.element_type), self.majors, config.tile_n, config.sharing)

    def operands(self, mA, mB):
        """Operands as the kernel takes them; ``mA`` and ``mB`` are the halves of a and of b, or each alone."""
        config = self.config
        shape, half = (config.tile_m, config.tile_n, config.tile_k), (self.rows, self.columns, config.tile_k)
        major_a, major_b = (
            LayoutEnum.ROW_MAJOR if is_last_contiguous(m) else LayoutEnum.COL_MAJOR for m in (mA[0], mB[0])
        )
        a_layout, half_a = (
            hopper.make_smem_layout_a(major_a, tile, mA[0].element_type, config.stages) for tile in (shape, half)
        )
        b_layout, half_b = (
            hopper.make_smem_layout_b(major_b, tile, mB[0].element_type, config.stages) for tile in (shape, half)
        )
        a = [load_tensor(m, half_a, (self.rows, config.tile_k), config.cluster_n) for m in mA]
        b = [load_tensor(m, half_b, (self.columns, config.tile_k), config.cluster_m) for m in mB]
        edge = []
        if config.edge_m:
            rows = (config.edge_m, *shape[1:])
            layout = hopper.make_smem_layout_a(major_a, rows, mA[0].element_type, config.stages)
            edge = [load_tensor(mA[0], layout, (config.edge_m, config.tile_k), config.cluster_n)]
        return Operands(tuple(a), tuple(edge), tuple(b), (a_layout, b_layout))

    # --- in the kernel

    def stages(self, operands, dtypes, shared):
        """Both operands' stages in shared memory."""
        config = self.config
        sA, sB = (shared.tensor(name, *each) for name, *each in zip("ab", dtypes, operands.layouts))
        bytes_ = sum(cute.size_in_bytes(s.element_type, cute.select(s.layout, mode=[0, 1])) for s in (sA, sB))
        cluster = (config.cluster_m, config.cluster_n, 1) if config.cluster_k == 1 else None
        mbarriers = shared.mbarriers("mainloop")
        return OperandStages(operands, sA, sB, tma_pipeline(mbarriers, config.stages, bytes_, self.consumers, cluster))

    @cute.jit
    def load(self, stages: cutlass.Constexpr, ranks, tiles: cutlass.Constexpr):
        """The role of the warp that loads: fill stages with tiles of both operands, tile after tile."""
        tile_copy, (few, copy_edge, few_bytes) = self._tile_copies(stages, ranks), self._edge(stages, ranks)
        whole, halves = cute.size(stages.operands.a[0].tensor, mode=[0]), len(stages.operands.a)
        producer = Producer(stages.pipeline)
        work = persistent(tiles.count)
        for index in cutlass.range(work.first, work.end, work.step, unroll=1):
            row, column, *_ = coordinate = tiles.coordinate(index)
            begin, end = tiles.steps(cute.size(tile_copy[0].tXgX, mode=[2]), coordinate)
            matrix = tiles.matrix(coordinate)
            is_edge = whole - row * self.config.tile_m <= few
            for k in cutlass.range(begin, end, unroll=1):
                if const_expr(copy_edge is None):
                    stage = producer.acquire_and_advance()
                    tile_copy[0].load((row, k, *matrix), stage)
                else:
                    stage = producer.acquire_and_advance(cutlass.select_(is_edge, *few_bytes))
                    if is_edge:
                        copy_edge.load((row, k, *matrix), stage)
                    else:
                        tile_copy[0].load((row, k, *matrix), stage)
                for copy in tile_copy[1:halves]:
                    copy.load((row, k, *matrix), stage)
                for copy in tile_copy[halves:]:
                    copy.load((column, k, *matrix), stage)
        return producer

    def _tile_copies(self, stages, ranks):
        """TMA copies of a's tiles, ``(tma, rest_m, rest_k)``, or of each half of it, then of b's."""
        (a, _, b, _), sA, sB, _ = stages
        every, tile_k, copies = (None,) * cute.rank(a[0].tensor), self.config.tile_k, []
        for halves, sX, rows, mode in ((a, sA, self.rows, 1), (b, sB, self.columns, 0)):
            for i, half in enumerate(halves):
                sHalf = sX if len(halves) == 1 else cute.local_tile(sX, (rows, tile_k), (i, 0, None))
                gX = cute.local_tile(half.tensor, (rows, tile_k), every)  # (rows, tile_k, rest, rest_k)
                copies.append(tma_copy(half.atom, sHalf, gX, self._sharing(ranks, mode)))
        return copies

    def _sharing(self, ranks, mode):
        """The CTAs of this one's cluster along m (0) or n (1), which share a tile of b or of a."""
        rank = (0, 0, 0)
        if const_expr(self.config.cluster_k == 1):
            rank = ranks.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        return Sharing(ranks, rank, mode)

    def _edge(self, stages, ranks):
        """The most rows that a tile at the edge has, the copy of so many, and the bytes of a stage with it and without;
        no copy where there is none.
        """
        config, sA = self.config, stages.sA
        if not stages.operands.a_edge:
            return 0, None, ()
        (a,), tile = stages.operands.a_edge, (config.edge_m, config.tile_k)
        # The first rows of each tile: (edge_m, tile_k, rest_m, rest_k).
        gA = cute.local_tile(a.tensor, (config.tile_m, config.tile_k), (None,) * cute.rank(a.tensor))
        gA = cute.local_tile(gA, tile, (0, 0, *(None,) * cute.rank(a.tensor)))
        copy = tma_copy(a.atom, cute.local_tile(sA, tile, (0, 0, None)), gA, self._sharing(ranks, 1))
        sizes = [Int32(self._bytes(stages.sA, stages.sB, rows)) for rows in (config.edge_m, config.tile_m)]
        return config.edge_m, copy, tuple(sizes)

    def _bytes(self, sA, sB, rows):
        """Bytes of a stage with so many rows of a."""
        a, b = (s.element_type.width // 8 * self.config.tile_k for s in (sA, sB))
        return rows * a + self.config.tile_n * b

    def fragments(self, mma, stages, group):
        """The fragments of a warpgroup, whose descriptors are those of its first thread."""
        first = mma.get_slice(0 if self.order else group * WARPGROUP)
        tCrA = mma.make_fragment_A(first.partition_A(stages.sA))
        tCrB = mma.make_fragment_B(first.partition_B(stages.sB))
        return Fragments(mma, tCrA, tCrB, wgmma.accumulators(mma, (self.config.tile_m, self.config.tile_n)))

    def stored(self, stages, thread):
        """A thread's accumulators of the columns that a CTA stores of a tile whose k its cluster shares."""
        config = self.config
        dtypes, shape = (stages.sA.element_type, stages.sB.element_type), (config.tile_m, config.stored_n)
        mma = wgmma.tiled_mma(dtypes, self.majors, config.stored_n, config.sharing)
        return AccumulatorTile.of(mma, wgmma.accumulators(mma, shape), thread, shape, self.halves)

    @cute.jit
    def multiply(self, fragments: cutlass.Constexpr, consumer, steps, turn: cutlass.Constexpr):
        """Accumulate a tile; the instructions of one stage run while those of the next are issued.

        Args:
            turn: with ping-pong, this warpgroup and whether the other one has another tile.
        """
        released = consumer.clone()
        self._multiply_stage(fragments, consumer, zero_init=True)
        consumer.advance()
        for _ in cutlass.range(1, steps, unroll=1):
            self._multiply_stage(fragments, consumer)
            consumer.advance()
            warpgroup.wait_group(1)
            released.release_and_advance()
        if const_expr(self.order is not None):
            self.pass_on(*turn)
        warpgroup.wait_group(0)
        released.release_and_advance()
        return consumer

    def _multiply_stage(self, fragments, consumer, zero_init=False):
        mma, tCrA, tCrB, acc = fragments
        stage = consumer.wait()
        wgmma.multiply(mma, (tCrA, tCrB), acc, (stage, stage), zero_init)

    @cute.jit
    def pass_on(self, group, more):
        """Let the other warpgroup multiply if it has one more tile."""
        if more:
            self.order.pass_on(group)

    def consumer(self, stages):
        return Consumer(stages.pipeline)
