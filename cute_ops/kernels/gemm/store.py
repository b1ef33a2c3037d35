"""The epilogue of a product on Hopper: computed subtile by subtile, stored through shared memory by TMA."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.gemm.config import Barrier
from cute_ops.kernels.gemm.parts import RowPartials, Subtile
from cute_ops.kernels.tensor_core.pipeline import Consumer, Producer, tma_pipeline
from cute_ops.kernels.tensor_core.scheduler import persistent
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP
from cute_ops.kernels.tensor_core.tma import TmaTensor, load_tensor, store_tensor, tma_copy


class EpilogueArguments(NamedTuple):
    """The epilogue's tensors as the kernel takes them.

    Attributes:
        operands: those that threads load, None for those that TMA loads.
        tiles: the operands that TMA loads.
        outputs: without a TMA copy where threads store.
        parts: what each part takes.
    """

    operands: tuple[Any, ...]
    tiles: tuple[TmaTensor, ...]
    outputs: tuple[TmaTensor, ...]
    parts: tuple[Any, ...]


class EpilogueStages(NamedTuple):
    """What the roles share: tensors, and their stages in shared memory, those of each group of warps in turn.

    Attributes:
        arguments: in memory.
        sC: for each tile that TMA loads ``(sub_m, sub_n, groups * tile_stages)``.
        sD: for each output ``(sub_m, sub_n, groups * store_stages)``.
        pipeline: of the stages of all tiles; None without tiles.
        parts: what each part uses.
    """

    arguments: EpilogueArguments
    sC: tuple[Any, ...]
    sD: tuple[Any, ...]
    pipeline: Any
    parts: tuple[Any, ...]


class Store:
    """``outputs = epilogue(acc, operands)`` of a tile.

    A tile goes through shared memory in subtiles of 64 rows of each warpgroup and 64 bytes of columns, of the tensor
    with the smallest elements. A warp of the loading warpgroup fills stages with subtiles of the epilogue's tiles; of
    the warps that compute, one thread issues the stores, the last ones of which run during the next tile.

    Args:
        parts: what else happens to a tile, see :class:`EpiloguePart`.
    """

    def __init__(self, config, epilogue, parts=()):
        self.config, self.epilogue = config, epilogue
        rows = (RowPartials(epilogue.rows),) if epilogue.rows.reductions else ()
        self.parts = (*rows, *parts)
        self.columns = config.tile_n // epilogue.halves
        self.threads = config.sharing * WARPGROUP  # that store a tile
        self.subtile = sub_m, sub_n = config.subtile(*epilogue.itemsizes)
        self.across = self.columns // sub_n
        self.subtiles, left = divmod(config.tile_m * self.columns, sub_m * sub_n)
        if left or config.store_stages < 2 or self.subtiles % config.store_stages:
            shape = f"{sub_m} x {sub_n}"
            raise ValueError(f"{self.subtiles} subtiles of {shape} cannot take {config.store_stages} slots in turn")

    # --- at launch

    def buffers(self, operand_bytes):
        tiles = [self.epilogue.operands[i].key.itemsize for i in self.epilogue.by_tma]
        outputs = [tensor.key.itemsize for tensor in self.epilogue.outputs]
        return *self.config.buffers(outputs, tiles, operand_bytes), *(b for part in self.parts for b in part.buffers())

    def arguments(self, operands, outputs, parts):
        """The epilogue's tensors as the kernel takes them; ``parts``: those of each part."""
        config, by_tma = self.config, self.epilogue.by_tma
        loaded = [(self.epilogue.operands[i], operands[i]) for i in by_tma]
        stored = [*zip(self.epilogue.outputs, outputs)]
        self.dtypes = [[m.element_type for _, m in each] for each in (loaded, stored)]
        return EpilogueArguments(
            tuple([None if i in by_tma else m for i, m in enumerate(operands)]),
            tuple([self._by_subtile(load_tensor, tensor, m, config.tile_stages) for tensor, m in loaded]),
            tuple([self._by_subtile(store_tensor, tensor, m, config.store_stages) for tensor, m in stored]),
            tuple([part.arguments(tensors) for part, tensors in zip(self.parts, parts)]),
        )

    def _by_subtile(self, make, tensor, m, stages):
        layout = hopper.make_smem_layout_epi(
            m.element_type, LayoutEnum.ROW_MAJOR, self.subtile, stages * self.config.groups
        )
        matrix = tensor.matrix(m)
        return make(matrix, layout, self.subtile) if tensor.by_tma else TmaTensor(None, matrix, layout)

    # --- in the kernel

    def stages(self, arguments, shared):
        """All subtiles' stages in shared memory."""
        config, pipeline = self.config, None
        sC, sD = (
            tuple(
                [shared.tensor(f"{name}{i}", *each) for i, each in enumerate(zip(dtypes, (t.layout for t in tensors)))]
            )
            for name, dtypes, tensors in zip(("tile", "output"), self.dtypes, arguments[1:3])
        )
        if const_expr(len(sC) > 0):
            bytes_ = self.subtile[0] * self.subtile[1] * sum(s.element_type.width // 8 for s in sC)
            stages, threads = config.groups * config.tile_stages, config.sharing * WARPGROUP
            pipeline = tma_pipeline(shared.mbarriers("tiles"), stages, bytes_, threads)
        parts = [part.setup(given, shared) for part, given in zip(self.parts, arguments.parts)]
        return EpilogueStages(arguments, sC, sD, pipeline, tuple(parts))

    @cute.jit
    def load(self, stages: cutlass.Constexpr, group, tiles: cutlass.Constexpr):
        """The role of the warp that loads subtiles for a group of warps, in the order in which the group takes them."""
        config = self.config
        copies = [tma_copy(t.atom, s, self._subtiles_of(t)) for t, s in zip(stages.arguments.tiles, stages.sC)]
        producer = Producer(stages.pipeline, config.tile_stages, group * config.tile_stages)
        work = persistent(tiles.count, config.groups, group)
        for index in cutlass.range(work.first, work.end, work.step, unroll=1):
            coordinate = tiles.coordinate(index)
            for i in cutlass.range(self.subtiles, unroll=1):
                stage = producer.acquire_and_advance()
                for copy in copies:
                    copy.load(self._subtile_coordinate(coordinate, i), stage)

    def _subtiles_of(self, tensor):
        """A matrix in subtiles: (sub_m, sub_n, rest_m, rest_n), of a batch more."""
        return cute.local_tile(tensor.tensor, self.subtile, (None,) * cute.rank(tensor.tensor))

    def _subtile_coordinate(self, coordinate, i):
        """Of the i-th subtile of a tile: row, column and, of a batch, the matrix, in subtiles."""
        row, column, *batch = coordinate
        repeats = self.config.tile_m // self.subtile[0]
        return row * repeats + i // self.across, column * self.across + i % self.across, *batch

    def consumer(self, stages, group):
        """The participant of a group of warps in the pipeline of tiles; None without tiles."""
        if stages.pipeline is None:
            return None
        return Consumer(stages.pipeline, self.config.tile_stages, group * self.config.tile_stages)

    @cute.jit
    def store(
        self, stages: cutlass.Constexpr, acc: cutlass.Constexpr, tile: cutlass.Constexpr, loads: cutlass.Constexpr,
        consumer,
    ):  # fmt: skip
        """Compute and store a tile.

        Args:
            acc: the :class:`AccumulatorTile`.
            tile: the :class:`OutputTile`.
            loads: the operands that threads load, those of the first subtile already.
            consumer: see :meth:`consumer`.
        """
        outputs, sD = stages.arguments.outputs, stages.sD
        copies = self._subtile_copies(acc.mma, stages, tile.thread)
        targets = [None if t.atom is None else tma_copy(t.atom, s, self._subtiles_of(t)) for t, s in zip(outputs, sD)]
        states = [part.begin(resources, tile) for part, resources in zip(self.parts, stages.parts)]
        for i in cutlass.range_constexpr(self.subtiles):
            chunk = self.chunk(acc, tile, i)
            loaded = loads.taken
            if const_expr(consumer is not None):
                self._read_tiles(loaded, stages, copies.from_smem, consumer)
            first, last = i % self.across == 0, i % self.across == self.across - 1
            if const_expr(first):
                groups = {}
            subtile = Subtile(chunk, self.epilogue.compute(acc.values(chunk), loaded, chunk, groups), first, last)
            for part, state in zip(self.parts, states):
                part.subtile(state, subtile, tile)
            stage = tile.group * self.config.store_stages + i % self.config.store_stages
            for s, copy, rX in zip(sD, copies.to_smem, subtile.results):
                self._write_subtile(copy, s, rX, stage)
            cute.arch.fence_view_async_shared()
            # Issued after the fence; otherwise the fence waits for these loads.
            if const_expr(i + 1 < self.subtiles):
                loads.take(self.chunk(acc, tile, i + 1))
            # A warp that arrives here is done with the previous subtile, and the warp that stores has waited for the
            # next stage.
            cute.arch.barrier(barrier_id=Barrier.STORED + tile.group, number_of_threads=self.threads)
            self._send(stages, targets, stage, self._subtile_coordinate(tile.coordinate, i), tile.thread)
        for part, state in zip(self.parts, states):
            part.end(state, tile)
        return consumer

    def chunk(self, acc, tile, i):
        """The coordinates of a thread's accumulators in a subtile."""
        (row, column, *batch), pairs = tile.coordinate, self.subtile[1] // 8
        repeat_m, repeat_n = divmod(i, self.across)
        origin = row * self.config.tile_m, column * self.columns
        return acc.chunk(repeat_m, range(repeat_n * pairs, (repeat_n + 1) * pairs), origin, tile.shape, batch)

    def _subtile_copies(self, mma, stages, thread):
        """A thread's copies between shared memory and registers in the order of its accumulators."""
        by_matrix = cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), cutlass.Float16)
        tiled = cute.make_tiled_copy_C_atom(by_matrix, mma)

        def copy(atom):
            return cute.make_tiled_copy_S(atom, tiled).get_slice(thread)

        return SubtileCopies(
            [copy(_load_atom(s.element_type)) for s in stages.sC],
            [copy(_store_atom(s.element_type)) for s in stages.sD],
        )

    def _read_tiles(self, loaded, stages, copies, consumer):
        """Read this thread's elements of all tiles' subtiles, in the order of its accumulators."""
        stage = consumer.wait()
        for i, copy, s in zip(self.epilogue.by_tma, copies, stages.sC):
            tSsC = copy.partition_S(s)  # (copy, copies_m, copies_n, stages)
            rC = cute.make_rmem_tensor(copy.partition_D(s).shape[:3], s.element_type)
            cute.copy(copy, tSsC[None, None, None, stage], copy.retile(rC))
            loaded[i] = cute.make_tensor(rC.iterator, cute.make_layout(cute.size(rC)))
        # TMA fills the stage again once it is released, so these reads must be done before.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        consumer.release_and_advance()

    def _write_subtile(self, copy, sD, rX, stage):
        """Write this thread's results to shared memory, rounded."""
        rD = cute.make_rmem_tensor(copy.partition_S(sD).shape[:3], sD.element_type)
        rD.store(cute.make_tensor(rX.iterator, rD.layout).load().to(sD.element_type))
        cute.copy(copy, rD, copy.partition_D(sD)[None, None, None, stage])

    @cute.jit
    def _send(
        self, stages: cutlass.Constexpr, targets: cutlass.Constexpr, stage, at: cutlass.Constexpr, thread
    ):  # fmt: skip
        """Store a subtile of all outputs from shared memory."""
        for tensor, output, s in zip(self.epilogue.outputs, stages.arguments.outputs, stages.sD):
            if const_expr(output.atom is None):
                self._store_rows(tensor, s[None, None, stage], output.tensor, at, thread)
        if const_expr(any(target is not None for target in targets)):
            if cute.arch.make_warp_uniform(thread // WARP) == 0:
                for target in targets:
                    if const_expr(target is not None):
                        target.store(at, stage)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(self.config.store_stages - 2, read=True)

    @cute.jit
    def _store_rows(self, tensor: cutlass.Constexpr, sD, mD, at: cutlass.Constexpr, thread):
        """Store a subtile of an output whose rows TMA cannot take, in vectors that their alignment allows."""
        vec = tensor.align // tensor.key.itemsize
        across = self.subtile[1] // vec
        threads = cute.make_layout((self.threads // across, across), stride=(across, 1))
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


class SubtileCopies(NamedTuple):
    """Copies between shared memory and registers, for each tile that is read and each output that is written."""

    from_smem: list[Any]
    to_smem: list[Any]


def _store_atom(dtype):
    return hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, cutlass.Float32)


def _load_atom(dtype):
    return cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype) if dtype.width == 16 else _store_atom(dtype)


class OperandLoads:
    """The epilogue's operands that a thread loads itself, one chunk of a tile after another.

    Attributes:
        taken: those of the last chunk, None for those that TMA loads.
    """

    def __init__(self, epilogue, operands):
        self.epilogue, self.operands = epilogue, operands
        self.loaded = {}

    def take(self, chunk):
        """Load what this chunk reads and no earlier one of the tile has loaded."""
        self.taken = []
        for i, (tensor, mX) in enumerate(zip(self.epilogue.operands, self.operands)):
            key = None if i in self.epilogue.by_tma else (i, self.epilogue.coordinate(tensor, chunk))
            if key is not None and key not in self.loaded:
                self.loaded[key] = self.epilogue.load(tensor, mX, chunk)
            self.taken.append(None if key is None else self.loaded[key])
