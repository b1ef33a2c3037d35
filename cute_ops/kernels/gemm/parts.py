"""Parts of a product's epilogue beside its expression and its outputs, with shared memory and TMA of their own."""

from typing import Any, NamedTuple

from cute_ops.kernels.gemm.config import ROW_PARTIALS
from cute_ops.kernels.tensor_core.accumulators import Chunk
from cute_ops.kernels.tensor_core.shared_struct import Buffer


class OutputTile(NamedTuple):
    """The tile that a thread stores a part of.

    Attributes:
        coordinate: row and column, in tiles; of a batch, or a split k, its index, too.
        shape: of the output, ``(m, n)``.
        thread: among those that store this tile.
        group: of warps that store a tile: with ping-pong the warpgroup, else 0.
        turn: how many tiles the group has stored before.
    """

    coordinate: tuple[Any, ...]
    shape: tuple[Any, Any]
    thread: Any
    group: Any
    turn: Any = 0


class Subtile(NamedTuple):
    """The part of a tile that is stored at once.

    Attributes:
        chunk: coordinates of this thread's elements.
        results: in fp32, a fragment for each output, then one for each reduction of rows.
        first_of_rows: whether it is the first of its rows.
        last_of_rows: whether it is the last.
    """

    chunk: Chunk
    results: list[Any]
    first_of_rows: bool
    last_of_rows: bool


class EpiloguePart:
    """Something that all warps which store also do with the values of a tile. By default nothing.

    At launch, :meth:`buffers` asks for shared memory and :meth:`arguments` turns tensors of the call into what the
    kernel takes, such as TMA copies. In the kernel, :meth:`setup` runs once, :meth:`begin` before a tile's first
    subtile, :meth:`subtile` once the values of each are computed, before they are stored, and :meth:`end` after the
    last one. With ping-pong two tiles are under way, one of each warpgroup: a part then has a buffer for each
    (``tile.group``). Stores by TMA that warp 0 commits delay those of the outputs no more than these delay each other.

    Attributes:
        names: the tensors of the call that it takes: inputs, outputs or workspaces.
    """

    names: tuple[str, ...] = ()

    def buffers(self) -> tuple[Buffer, ...]:
        """Shared memory, under names that no other part has."""
        return ()

    def arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's arguments for the tensors of :attr:`names`."""
        return tensors

    def setup(self, arguments: tuple[Any, ...], shared: Any) -> Any:
        """Resources that this part uses in all tiles, by default the arguments. All threads of a CTA run it before any
        of them waits at an mbarrier, so it may make pipelines.

        Args:
            arguments: those of :meth:`arguments`.
            shared: the kernel's :class:`cute_ops.kernels.tensor_core.shared.SharedMemory`.
        """
        return arguments

    def begin(self, resources: Any, tile: OutputTile) -> Any:
        """State that this part keeps for a tile, such as registers; ``resources`` is what :meth:`setup` returned."""
        return resources

    def subtile(self, state: Any, subtile: Subtile, tile: OutputTile) -> None:
        """Take part in a subtile; ``state`` is what :meth:`begin` returned."""

    def end(self, state: Any, tile: OutputTile) -> None:
        """Finish the tile."""


class RowPartials(EpiloguePart):
    """Reduces a tile's rows in registers, and stores a partial result for each row and column of tiles.

    Args:
        reductions: :class:`cute_ops.kernels.gemm.rows.RowReductions`.
    """

    names = (ROW_PARTIALS,)

    def __init__(self, reductions):
        self.reductions = reductions

    def begin(self, resources, tile):
        (mPartials,) = resources
        return {"mPartials": mPartials}

    def subtile(self, state, subtile, tile):
        chunk, count = subtile.chunk, len(self.reductions.reductions)
        if subtile.first_of_rows:
            state["results"] = self.reductions.start()
        self.reductions.add(state["results"], subtile.results[-count:], chunk)
        if subtile.last_of_rows:
            self.reductions.store(state["results"], state["mPartials"], chunk.rows, chunk.shape[0], tile.coordinate[1])
