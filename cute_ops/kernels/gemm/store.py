"""The epilogue of a product on Hopper: computed subtile by subtile, stored through shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from cute_ops.kernels.gemm.config import Barrier
from cute_ops.kernels.gemm.parts import RowPartials, Subtile
from cute_ops.kernels.gemm.subtiles import OperandTiles, OutputStages, OutputTiles, Subtiles, TileStages
from cute_ops.kernels.tensor_core.tma import TmaTensor


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
    """The epilogue's operands and outputs in memory and in shared memory, which the roles share.

    Attributes:
        operands: those that threads load.
        tiles: the operands that TMA loads.
        outputs: on their way out.
        parts: what each part uses.
    """

    operands: tuple[Any, ...]
    tiles: TileStages
    outputs: OutputStages
    parts: tuple[Any, ...]


class Store:
    """``outputs = epilogue(acc, operands)`` of a tile, subtile by subtile.

    A warp of the loading warpgroup fills stages with subtiles of the epilogue's tiles; of the warps that compute, one
    thread issues the stores, the last ones of which run during the next tile.

    Args:
        parts: what else happens to a tile, see :class:`EpiloguePart`.
    """

    def __init__(self, config, epilogue, parts=()):
        self.config, self.epilogue = config, epilogue
        rows = (RowPartials(epilogue.rows),) if epilogue.rows.reductions else ()
        self.parts = (*rows, *parts)
        down, across = (epilogue.halves, 1) if config.transposed else (1, epilogue.halves)
        tile = config.tile_m // down, config.stored_n // across
        self.subtiles = Subtiles(config, *tile, config.subtile(*epilogue.itemsizes))
        self.tiles = OperandTiles(config, self.subtiles, epilogue.operands, epilogue.by_tma)
        self.outputs = OutputTiles(config, self.subtiles, epilogue.outputs)
        self.threads, self.count = self.outputs.threads, self.subtiles.count

    def buffers(self, operand_bytes):
        """The kernel's shared memory, for operands of the product of so many bytes each."""
        tiles, outputs = ([t.key.itemsize for t in each] for each in (self.tiles.operands, self.epilogue.outputs))
        return *self.config.buffers(outputs, tiles, operand_bytes), *(b for part in self.parts for b in part.buffers())

    def arguments(self, operands, outputs, parts):
        """At launch: the epilogue's tensors as the kernel takes them; ``parts``: those of each part."""
        return EpilogueArguments(
            tuple([None if i in self.tiles.by_tma else m for i, m in enumerate(operands)]),
            self.tiles.arguments(operands), self.outputs.arguments(outputs),
            tuple([part.arguments(tensors) for part, tensors in zip(self.parts, parts)]),
        )  # fmt: skip

    def stages(self, arguments, shared):
        """In the kernel: what is in shared memory."""
        tiles, outputs = (self.tiles.stages(arguments.tiles, shared), self.outputs.stages(arguments.outputs, shared))
        parts = [part.setup(given, shared) for part, given in zip(self.parts, arguments.parts)]
        return EpilogueStages(arguments.operands, tiles, outputs, tuple(parts))

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
            consumer: of the tiles that TMA loads.
        """
        copies = self.outputs.copies(stages.outputs)
        states = [part.begin(resources, tile) for part, resources in zip(self.parts, stages.parts)]
        for i in cutlass.range_constexpr(self.count):
            chunk, loaded = self.subtiles.chunk(acc, tile, i), loads.taken
            if const_expr(consumer is not None):
                for k, rC in zip(self.tiles.by_tma, self.tiles.read(stages.tiles, acc, tile.thread, consumer)):
                    loaded[k] = rC
            across = self.subtiles.across
            if const_expr(i % across == 0):
                groups = {}
            results = self.epilogue.compute(self.subtiles.values(acc, chunk), loaded, chunk, groups)
            for part, state in zip(self.parts, states):
                part.subtile(state, Subtile(chunk, results, i % across == 0, i % across == across - 1), tile)
            stage = self.subtiles.stage(tile, i)
            self.outputs.write(stages.outputs, results, acc, tile.thread, stage)
            # Issued after the fence; otherwise the fence waits for these loads.
            if const_expr(i + 1 < self.count):
                loads.take(self.subtiles.chunk(acc, tile, i + 1))
            # A warp that arrives here is done with the previous subtile, and the warp that stores has waited for the
            # next stage.
            cute.arch.barrier(barrier_id=Barrier.STORED + tile.group, number_of_threads=self.threads)
            self.outputs.send(stages.outputs, copies, tile, i, Barrier.STORED)
        for part, state in zip(self.parts, states):
            part.end(state, tile)
        return consumer


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
