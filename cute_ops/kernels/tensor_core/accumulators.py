"""Accumulators of a tile: their coordinates, views, and chunks of them that are computed at once.

This holds for instructions of a warp (``mma.sync``) and of a warpgroup (WGMMA), for operands of 16 and of 8 bits: a
thread has pairs of neighbouring columns in two rows that are 8 apart, and repeats of these.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64


def by_rows(acc):
    """Accumulators, or their coordinates, as ``(rows, columns)``: from ``((2, 2), m, n)`` of a warp's instruction, or
    ``((2, 2, n / 8), m, 1)`` of a warpgroup's.
    """
    (pair, two, *blocks), repeat_m, repeat_n = acc.layout.shape
    (s_pair, s_two, *s_blocks), s_m, s_n = acc.layout.stride
    rows, columns = (two, repeat_m), (pair, *blocks, repeat_n)
    layout = cute.make_layout((rows, columns), stride=((s_two, s_m), (s_pair, *s_blocks, s_n)))
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc, dtype):
    """A warpgroup's accumulators, rounded to 16 bits, as the operand A of its next instruction:
    ``((2, 2, 2), m, n / 16)``. Two neighbouring blocks of 8 columns are 16 elements of k. Operands of 8 bits lie
    otherwise.
    """
    if dtype.width != 16:
        raise ValueError(f"accumulators can be an operand of 16 bits, not of {dtype}")
    rounded = cute.make_rmem_tensor(acc.layout, dtype)
    rounded.store(acc.load().to(dtype))
    (pair, two, blocks), repeat_m, repeat_n = acc.layout.shape
    (s_pair, s_two, s_blocks), s_m, s_n = acc.layout.stride
    layout = cute.make_layout(
        ((pair, two, 2), repeat_m, (blocks // 2, repeat_n)),
        stride=((s_pair, s_two, s_blocks), s_m, (2 * s_blocks, s_n)),
    )
    return cute.make_tensor(rounded.iterator, layout)


class Chunk(NamedTuple):
    """Coordinates of those of a thread's accumulators that are computed at once: two rows of pairs of columns.

    Accumulator ``4 * c + 2 * r + j`` lies in row ``rows[r]`` and column ``columns[c] + j``.

    Attributes:
        rows: two rows of the whole output.
        columns: the first column of each pair.
        shape: of the output; what lies outside is neither read nor stored.
        tile_columns: columns within the tile of the thread that has the first ones; known at compile time.
        batch: the matrix of a batch, empty where there is none.
        repeat_m: the repeat of the instruction along the rows; known at compile time.
    """

    rows: tuple[Any, Any]
    columns: tuple[Any, ...]
    shape: tuple[Any, Any]
    tile_columns: tuple[int, ...]
    batch: tuple[Any, ...] = ()
    repeat_m: int = 0

    @property
    def size(self):
        return 4 * len(self.columns)

    def row_of(self, tensor, row):
        """The row of a tensor, after those of the matrices before it, that is this row of a matrix."""
        if not tensor.batched:
            return row
        (batch,) = self.batch
        return Int64(batch) * self.shape[0] + row if tensor.rows else batch


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class AccumulatorTile:
    """A thread's accumulators of a tile, by their coordinates.

    Attributes:
        mma: the tiled MMA.
        acc: the accumulators, ``(rows, columns)``.
        coordinates: of each, in the tile.
        half: columns of the tile that an output's tile has: all, or half of them where each column of the output has
            one of the gate and one of the up projection.
        columns: the first column of each pair of the thread that has the first ones; known at compile time.
        index: from such a column, in the whole tile, to its place along a row of ``acc``.
    """

    mma: Any
    acc: Any
    coordinates: Any
    half: int
    columns: list[int]
    index: dict[int, int]

    @classmethod
    def of(cls, mma, acc, thread, shape, halves=1):
        """A tile of this shape ``(m, n)``; ``halves`` is 2 for gate_up weights."""
        tile = cute.make_identity_tensor(shape)
        coordinates = by_rows(mma.get_slice(thread).partition_C(tile))
        # Those of thread 0 are integers of Python.
        first = by_rows(mma.get_slice(0).partition_C(tile))
        columns = [first[0, 2 * c][1] for c in range(cute.size(first, mode=[1]) // 2)]
        index = {column: 2 * c for c, column in enumerate(columns)}
        return cls(mma, by_rows(acc), coordinates, shape[1] // halves, columns[: len(columns) // halves], index)

    @property
    def repeats_m(self):
        """Repeats of the instruction along the rows."""
        return cute.size(self.acc, mode=[0]) // 2

    def chunk(self, repeat_m, pairs, origin, shape, batch=()):
        """The chunk of these pairs of columns, a range.

        Args:
            origin: row and column of the output at which the tile begins.
            shape: of the output.
        """
        rows = tuple(origin[0] + self.coordinates[2 * repeat_m + r, 0][0] for r in range(2))
        columns = tuple(origin[1] + self.coordinates[0, 2 * c][1] for c in pairs)
        return Chunk(rows, columns, shape, tuple(self.columns[c] for c in pairs), tuple(batch), repeat_m)

    def values(self, chunk):
        """From ``(half, v, distance)`` to the accumulator ``distance`` columns after the chunk's v-th."""

        def value(half, v, distance):
            column = chunk.tile_columns[v // 4] + distance + half * self.half
            return self.acc[2 * chunk.repeat_m + v // 2 % 2, self.index[column] + v % 2]

        return value

    def put(self, chunk, rX):
        """Replace the chunk's accumulators, such as scores by probabilities."""
        for v in range(chunk.size):
            column = self.index[chunk.tile_columns[v // 4]] + v % 2
            self.acc[2 * chunk.repeat_m + v // 2 % 2, column] = rX[v]
