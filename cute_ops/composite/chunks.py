"""How ``linear_cross_entropy`` cuts its rows into chunks, in both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeVar

from cute_ops.declaration.op import Op

Arrays: TypeAlias = Mapping[str, Any]
State = TypeVar("State")

# What `accum_dtype` is where a sum is in float32, or in the weight's dtype if that rounds it no more than twice.
AUTO = "auto"
# Rows of a matrix product's tile: fewer leave tensor cores idle.
TILE = 128
# More rows make products no faster.
MAX_ROWS = 4096
# Rows with which products take some fifteen times as long as reading and writing the weight's gradient (H200).
ENOUGH = 2048
# With fewer, most of a product's time goes to reading the weight.
LEAST_ROWS = 512
# Every chunk reads and writes the weight's gradient once more, and rounds it unless it is summed in float32. With more
# chunks that adds noticeably to the time of the products and the rounding of the logits.
MAX_CHUNKS = 32
# Every block of classes reads and writes a float32 sum of the hidden states' gradient.
MAX_BLOCKS = 8
# Bytes of logits per byte of hidden states: with fewer, most time goes to reading and writing the weight's gradient.
LOGITS_PER_HIDDEN = 2.5
# Elements of an array that logits and the gradient of the hidden states share, for each element of the latter.
SHARED_PER_HIDDEN = 2.9
# As SHARED_PER_HIDDEN, for calls that sum the weight's gradient in its own dtype, as users do to save memory: a head of
# 16384 x 4096 x 32000 takes 523 MB in seven chunks (Liger 527 MB in eight), by SHARED_PER_HIDDEN 649 MB in five.
LEAST_SHARED_PER_HIDDEN = 1.95
MIN_BYTES = 32 << 20


def rows_per_chunk(rows: int, hidden: int, vocab: int, itemsize: int, min_rows: int = 0) -> int:
    """Rows of a chunk. Its logits take about 2.5 times the memory of the hidden states, more if there were otherwise
    more than 32 chunks.

    Args:
        rows, vocab: sizes of the logits' dims.
        hidden: size of the dim that products sum over.
        itemsize: bytes of an element.
        min_rows: the fewest rows, as long as their logits take at most four times the memory of the weight.
    """
    fitting = int(max(LOGITS_PER_HIDDEN * rows * hidden * itemsize, MIN_BYTES)) // max(vocab * itemsize, 1)
    fitting = max(fitting, min(min_rows, 4 * hidden))
    tiles = max(min(fitting, MAX_ROWS) // TILE, -(-rows // (MAX_CHUNKS * TILE)), 1)
    return max(min(tiles * TILE, rows), 1)


def rows_in_weight(rows: int, hidden: int) -> int:
    """Rows of a chunk whose logits fit the memory of the weight's gradient, while that is summed in another array; 0 if
    they are fewer than a tile. All chunks have this size but the last, which is not much smaller.
    """
    max_tiles = min(hidden, MAX_ROWS) // TILE
    if not max_tiles or not rows:
        return min(max_tiles, rows)
    tiles = -(-rows // TILE)
    count = -(-tiles // max_tiles)
    return min(-(-tiles // count) * TILE, rows)


def rows_beside_sum(rows: int, hidden: int, itemsize: int) -> int:
    """Rows of a chunk where several chunks sum the weight's gradient in a float32 array of its own: all, which need no
    sum, if their logits take no more memory than that would; else as :func:`rows_in_weight`.
    """
    return rows if rows * itemsize <= 4 * hidden else rows_in_weight(rows, hidden)


def classes_per_block(rows: int, hidden: int, classes: int, itemsize: int) -> int:
    """Classes of a block of logits of all rows, which take about 2.5 times the memory of the hidden states, more if
    there were otherwise more than eight blocks. All blocks have this size but the last, which is not much smaller.
    """
    most = max(int(LOGITS_PER_HIDDEN * hidden), MIN_BYTES // max(rows * itemsize, 1)) // TILE
    count = min(-(-classes // (max(most, 1) * TILE)), MAX_BLOCKS)
    return -(-classes // (max(count, 1) * TILE)) * TILE


def plan_half(rows: int, hidden: int, pitch: int) -> tuple[int, int, bool]:
    """Rows of the first half; rows of the second half whose logits of another head, ``pitch`` elements a row, are held
    at a time; and whether those fit where the gradient of the second half's hidden states goes.
    """
    half = -(-rows // (2 * TILE)) * TILE
    fitting = (rows - half) * hidden // max(pitch, 1) // TILE * TILE
    return half, max(fitting, LEAST_ROWS), fitting >= LEAST_ROWS


@lru_cache(256)
def plan_shared(
    rows: int, hidden: int, vocab: int, itemsize: int, least: bool = False
) -> tuple[int, tuple[slice, ...]]:  # fmt: skip
    """The number of elements of an array for the gradient of the hidden states and the logits of one chunk at a time,
    and the chunks. Logits are held where the gradient is not written yet, so the first chunks are the largest.
    ``least``: more chunks are taken if a tenth of what is held, the weight's gradient included, is saved.
    """
    few = _plan_shared(rows, hidden, vocab, itemsize, SHARED_PER_HIDDEN)
    if not least:
        return few
    many = _plan_shared(rows, hidden, vocab, itemsize, LEAST_SHARED_PER_HIDDEN)
    return many if 10 * (few[0] - many[0]) >= few[0] + vocab * hidden else few


def _plan_shared(
    rows: int, hidden: int, vocab: int, itemsize: int, per_hidden: float
) -> tuple[int, tuple[slice, ...]]:  # fmt: skip
    size = max(int(per_hidden * rows * hidden), rows * hidden + MIN_BYTES // itemsize)
    max_tiles = -(-max(MAX_ROWS, -(-rows // MAX_CHUNKS)) // TILE)
    while True:
        slices: list[slice] = []
        start = 0
        while start < rows:
            # A chunk's logits are needed until its gradient is written, so both need room.
            tiles = (size - start * hidden) // (vocab + hidden) // TILE
            slices.append(slice(start, min(start + max(min(tiles, max_tiles), 1) * TILE, rows)))
            start = slices[-1].stop
        if len(slices) <= MAX_CHUNKS:
            used = max(((s.stop - s.start) * vocab + s.stop * hidden for s in slices), default=0)
            return used + TILE, tuple(slices)  # logits start at a multiple of a tile
        size += TILE * vocab * max(len(slices) // MAX_CHUNKS - 1, 1)


class Chunks(Protocol):
    """A linear layer whose rows a framework processes in chunks. Arrays have one leading dim, the rows. A method that
    takes and returns an array may change it in place.

    A framework's class is made from arrays by name: the layer's hidden, weight and bias, other arrays with rows, and
    those of a second head with as many classes, whose names begin with a word such as ``teacher_``; from the attributes
    ``accum_dtype`` and ``chunk_rows``; and from the wanted gradients, ``dhidden``, ``dweight`` or ``dbias``.
    ``by`` says what may replace chunks of ``rows`` if that takes less memory: blocks of ``classes`` or two ``halves``.
    """

    inputs: Mapping[str, Any]

    def each(self, state: State, body: Callable[[State, Any], State]) -> State:
        """``state = body(state, at)`` for every chunk; returns the last state."""

    def of_chunk(self, op: Op, inputs: Arrays, attrs: Arrays, at: Any) -> tuple[Arrays, Arrays]:
        """Inputs and attributes of an op of whole rows for the logits that :meth:`logits` gives."""

    def new_rows(self) -> Any:
        """A float32 number for each row."""

    def all_rows(self, array: Any) -> Any:
        """A number for each row that there is: 0 for rows that are in no chunk."""

    def cut(self, name: str, at: Any) -> Any:
        """The chunk's rows of the array with this name."""

    def put(self, array: Any, at: Any, rows: Any) -> Any:
        """The array with the chunk's rows replaced by these."""

    def logits(self, at: Any, head: str = "") -> Any:
        """``hidden @ weight.T + bias`` of a chunk; ``head``: the word that the names of its arrays begin with."""

    def sums(self) -> dict[str, Any]:
        """Arrays for the wanted gradients by name, which chunks fill or add to."""

    def put_product(self, array: Any, at: Any, a: Any, b: Any) -> Any:
        """``put(array, at, a @ b)``."""

    def add_product(self, total: Any, at: Any, a: Any, b: Any) -> Any:
        """``total + a @ b``, rounded once, to the dtype of the total."""

    def add_rows(self, total: Any, at: Any, rows: Any) -> Any:
        """The total with these rows added, in float32."""

    def rounded(self, sums: dict[str, Any]) -> Mapping[str, Any]:
        """The gradients in the dtypes of their inputs."""
