"""Subtiles, in which an output's tile goes through shared memory: those that TMA loads and those that are stored."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.gemm.config import LEAST_STORED, GemmConfig
from cute_ops.kernels.gemm.row_store import Subtile
from cute_ops.kernels.tensor_core.pipeline import Consumer, Producer, tma_pipeline
from cute_ops.kernels.tensor_core.scheduler import persistent
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP
from cute_ops.kernels.tensor_core.tma import TmaTensor, load_tensor, store_tensor, tma_copy


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class Subtiles:
    """How a tile is cut: into 64 rows of each warpgroup and 64 or 32 bytes of columns, of the tensor with the smallest
    elements.

    Attributes:
        config: of the product.
        rows, columns: of an output's tile.
        shape: of a subtile.
    """

    config: GemmConfig
    rows: int
    columns: int
    shape: tuple[int, int]

    @property
    def major(self):
        """Which way outputs and tiles lie in memory: the output's rows are columns of a transposed tile."""
        return LayoutEnum.COL_MAJOR if self.config.transposed else LayoutEnum.ROW_MAJOR

    @property
    def across(self):
        """Subtiles along a tile's row."""
        return self.columns // self.shape[1]

    @property
    def count(self):
        """Subtiles of a tile.

        Raises:
            ValueError: the tile is not cut into whole ones, one has fewer columns than a warp's matrices, or there is
                one output stage, which would be written while it is stored.
        """
        sub_m, sub_n = self.shape
        count, left = divmod(self.rows * self.columns, sub_m * sub_n)
        if left or sub_n < LEAST_STORED or self.config.store_stages < 2:
            raise ValueError(f"{count} subtiles of {sub_m} x {sub_n} with {self.config.store_stages} stages")
        return count

    def stage(self, tile, i):
        """The output stage of the i-th subtile of a tile. Stages are taken in turn, over all tiles of a group."""
        stages = self.config.store_stages
        begin = tile.turn * (self.count % stages) if self.count % stages else 0
        return tile.group * stages + (begin + i) % stages

    def coordinate(self, tile, i):
        """Of the i-th subtile of a tile: row, column and, of a batch, the matrix, in subtiles."""
        row, column, *batch = tile
        repeats = self.rows // self.shape[0]
        return row * repeats + i // self.across, column * self.across + i % self.across, *batch

    def chunk(self, acc, tile, i):
        """The coordinates of a thread's accumulators in the i-th subtile."""
        (row, column, *batch), pairs = tile.coordinate, self.shape[1] // 8
        repeat_m, repeat_n = divmod(i, self.across)
        origin = row * self.rows, column * self.columns
        return acc.chunk(repeat_m, range(repeat_n * pairs, (repeat_n + 1) * pairs), origin, tile.shape, batch)

    def values(self, acc, chunk):
        """The accumulators of a chunk, see :meth:`AccumulatorTile.values`; of transposed tiles those of the up
        projection are in the rows behind the gate's.
        """
        if self.rows == self.config.tile_m:
            return acc.values(chunk)

        def value(half, v, distance):
            repeat = chunk.repeat_m + half * (acc.repeats_m // 2)
            return acc.acc[2 * repeat + v // 2 % 2, acc.index[chunk.tile_columns[v // 4]] + v % 2]

        return value

    def tensor(self, make, tensor, m, stages):
        """A tensor in subtiles as the kernel takes it: with a TMA copy that ``make`` makes, where TMA can take it."""
        layout = hopper.make_smem_layout_epi(m.element_type, self.major, self.shape, stages * self.config.groups)
        matrix = tensor.matrix(m)
        return make(matrix, layout, self.shape) if tensor.by_tma else TmaTensor(None, matrix, layout)

    def of(self, tensor):
        """A matrix in subtiles: (sub_m, sub_n, rest_m, rest_n), of a batch more."""
        return cute.local_tile(tensor.tensor, self.shape, (None,) * cute.rank(tensor.tensor))


class TileStages(NamedTuple):
    """Subtiles of the epilogue's tiles on their way in.

    Attributes:
        tensors: in memory.
        sC: for each tile ``(sub_m, sub_n, groups * tile_stages)``; a group of warps goes round its own stages.
        pipeline: of the stages of all tiles; None without tiles.
    """

    tensors: tuple[TmaTensor, ...]
    sC: tuple[Any, ...]
    pipeline: Any


class OperandTiles:
    """The epilogue's operands that TMA loads, by one warp for each group of warps that computes.

    Args:
        operands: the epilogue's operands.
        by_tma: indices of those that TMA loads.
    """

    def __init__(self, config, subtiles, operands, by_tma):
        self.config, self.subtiles = config, subtiles
        self.operands, self.by_tma = [operands[i] for i in by_tma], by_tma

    def arguments(self, operands):
        """At launch: the tiles among all operands, as the kernel takes them."""
        loaded, stages = [operands[i] for i in self.by_tma], self.config.tile_stages
        self.dtypes = [m.element_type for m in loaded]
        return tuple([self.subtiles.tensor(load_tensor, t, m, stages) for t, m in zip(self.operands, loaded)])

    def stages(self, tensors, shared):
        """In the kernel: all tiles' stages in shared memory."""
        sC, pipeline = _stages("tile", tensors, self.dtypes, shared), None
        if const_expr(len(sC) > 0):
            (sub_m, sub_n), count = self.subtiles.shape, self.config.groups * self.config.tile_stages
            bytes_, threads = (
                sub_m * sub_n * sum(s.element_type.width // 8 for s in sC),
                self.config.sharing * WARPGROUP,
            )
            pipeline = tma_pipeline(shared.mbarriers("tiles"), count, bytes_, threads)
        return TileStages(tensors, sC, pipeline)

    @cute.jit
    def load(self, stages: cutlass.Constexpr, group, tiles: cutlass.Constexpr):
        """The role of the warp that loads subtiles for a group of warps, in the order in which the group takes them."""
        config = self.config
        copies = [tma_copy(t.atom, s, self.subtiles.of(t)) for t, s in zip(stages.tensors, stages.sC)]
        producer = Producer(stages.pipeline, config.tile_stages, group * config.tile_stages)
        work = persistent(tiles.count, config.groups, group)
        for index in cutlass.range(work.first, work.end, work.step, unroll=1):
            coordinate = tiles.stored(index)
            for i in cutlass.range(self.subtiles.count, unroll=1):
                stage = producer.acquire_and_advance()
                for copy in copies:
                    copy.load(self.subtiles.coordinate(coordinate, i), stage)

    def consumer(self, stages, group):
        """The participant of a group of warps; None without tiles."""
        if stages.pipeline is None:
            return None
        return Consumer(stages.pipeline, self.config.tile_stages, group * self.config.tile_stages)

    def read(self, stages, acc, thread, consumer):
        """A thread's elements of the next subtile of each tile, in the order of its accumulators."""
        stage, found = consumer.wait(), []
        for sC in stages.sC:
            copy = _by_accumulators(acc, _load_atom(sC.element_type, self.subtiles.major), thread)
            tSsC = copy.partition_S(sC)  # (copy, copies_m, copies_n, stages)
            rC = cute.make_rmem_tensor(copy.partition_D(sC).shape[:3], sC.element_type)
            cute.copy(copy, tSsC[None, None, None, stage], copy.retile(rC))
            found.append(cute.make_tensor(rC.iterator, cute.make_layout(cute.size(rC))))
        # TMA fills the stage again once it is released, so these reads must be done before.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        consumer.release_and_advance()
        return found


class OutputStages(NamedTuple):
    """Subtiles of outputs on their way out.

    Attributes:
        tensors: in memory; without a TMA copy where threads store.
        sD: for each output ``(sub_m, sub_n, groups * store_stages)``; a group of warps goes round its own stages.
    """

    tensors: tuple[TmaTensor, ...]
    sD: tuple[Any, ...]


class OutputTiles:
    """The outputs, which one thread of a group of warps stores by TMA, or all of them where TMA cannot."""

    def __init__(self, config, subtiles, outputs):
        self.config, self.subtiles, self.outputs = config, subtiles, outputs
        self.threads = config.sharing * WARPGROUP  # of a group

    def arguments(self, outputs):
        """At launch: the outputs as the kernel takes them."""
        self.dtypes, stages = [m.element_type for m in outputs], self.config.store_stages
        return tuple([self.subtiles.tensor(store_tensor, t, m, stages) for t, m in zip(self.outputs, outputs)])

    def stages(self, tensors, shared):
        """In the kernel: all outputs' stages in shared memory."""
        return OutputStages(tensors, _stages("output", tensors, self.dtypes, shared))

    def copies(self, stages):
        """TMA copies of subtiles, None where threads store."""
        return [
            None if t.atom is None else tma_copy(t.atom, s, self.subtiles.of(t))
            for t, s in zip(stages.tensors, stages.sD)
        ]

    def write(self, stages, results, acc, thread, stage):
        """Write a thread's results of a subtile to shared memory, rounded."""
        for sD, rX in zip(stages.sD, results):
            copy = _by_accumulators(acc, _store_atom(sD.element_type, self.subtiles.major), thread)
            rD = cute.make_rmem_tensor(copy.partition_S(sD).shape[:3], sD.element_type)
            rD.store(cute.make_tensor(rX.iterator, rD.layout).load().to(sD.element_type))
            cute.copy(copy, rD, copy.partition_D(sD)[None, None, None, stage])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def send(
        self, stages: cutlass.Constexpr, copies: cutlass.Constexpr, tile: cutlass.Constexpr, i: cutlass.Constexpr,
        barrier: cutlass.Constexpr,
    ):  # fmt: skip
        """Store the i-th subtile of a tile of all outputs from shared memory; those by TMA go on while later ones are
        computed.
        """
        stage, at = self.subtiles.stage(tile, i), self.subtiles.coordinate(tile.coordinate, i)
        for tensor, output, sD in zip(self.outputs, stages.tensors, stages.sD):
            if const_expr(output.atom is None):
                Subtile.of(self.subtiles, tensor, output, sD, tile, i).store(tile.thread, self.threads)
        if const_expr(any(copy is not None for copy in copies)):
            if cute.arch.make_warp_uniform(tile.thread // WARP) == 0:
                for copy in copies:
                    if const_expr(copy is not None):
                        copy.store(at, stage)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(self.config.store_stages - 2, read=True)
        # The next subtile would be written where others still read the one before this.
        if const_expr(self.config.store_stages == 2 and any(output.atom is None for output in stages.tensors)):
            cute.arch.barrier(barrier_id=barrier + tile.group, number_of_threads=self.threads)


def _stages(name, tensors, dtypes, shared):
    named = [(f"{name}{i}", dtype, tensor.layout) for i, (dtype, tensor) in enumerate(zip(dtypes, tensors))]
    return tuple([shared.tensor(*each) for each in named])


def _by_accumulators(acc, atom, thread):
    """A thread's copy between shared memory and registers in the order of its accumulators."""
    by_matrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), cutlass.Float16)
    return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(by_matrix, acc.mma)).get_slice(thread)


def _store_atom(dtype, major):
    return hopper.get_smem_store_op(major, dtype, cutlass.Float32)


def _load_atom(dtype, major):
    if dtype.width != 16:
        return _store_atom(dtype, major)
    return cute.make_copy_atom(LdMatrix8x8x16bOp(major.is_m_major_c(), 4), dtype)
