"""Which rows of logits ``linear_cross_entropy`` holds at a time, in both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeVar

State = TypeVar("State")

# Rows of a matrix product's tile: fewer would leave tensor cores idle.
TILE = 128
# More rows make products no faster.
MAX_ROWS = 4096
# Products of so many rows take some fifteen times as long as reading and writing the weight's gradient (H200).
ENOUGH = 2048
# Every chunk reads and writes the weight's gradient once more, and rounds it unless it is summed in float32. With more
# chunks that is noticeable beside the time of the products and the rounding of the logits.
MAX_CHUNKS = 32
# Bytes of logits for each byte of hidden states: with fewer, products spend their time on the weight's gradient.
LOGITS_PER_HIDDEN = 2.5
# The same for logits together with the gradient of the hidden states, where they share an array.
SHARED_PER_HIDDEN = 2.9
MIN_BYTES = 32 << 20


def rows_per_chunk(rows: int, hidden: int, vocab: int, itemsize: int, min_rows: int = 0) -> int:
    """Rows of a chunk. Its logits take about 2.5 times the memory of the hidden states, more if that made more than 32
    chunks.

    Args:
        rows, hidden, vocab, itemsize: sizes of the logits' dims, of the sum's dim and of an element.
        min_rows: at least so many rows, as long as their logits take no more than four times the memory of the weight.
    """
    fitting = int(max(LOGITS_PER_HIDDEN * rows * hidden * itemsize, MIN_BYTES)) // max(vocab * itemsize, 1)
    fitting = max(fitting, min(min_rows, 4 * hidden))
    tiles = max(min(fitting, MAX_ROWS) // TILE, -(-rows // (MAX_CHUNKS * TILE)), 1)
    return max(min(tiles * TILE, rows), 1)


def rows_in_weight(rows: int, hidden: int) -> int:
    """Rows of a chunk whose logits fit the memory of the weight's gradient, for use while that is summed in another
    array; 0 if those are fewer than a tile. All chunks have this size but the last, which is not much smaller.
    """
    max_tiles = min(hidden, MAX_ROWS) // TILE
    if not max_tiles or not rows:
        return min(max_tiles, rows)
    tiles = -(-rows // TILE)
    count = -(-tiles // max_tiles)
    return min(-(-tiles // count) * TILE, rows)


@lru_cache(256)
def plan_shared(rows: int, hidden: int, vocab: int, itemsize: int) -> tuple[int, tuple[slice, ...]]:
    """Elements of an array that holds the gradient of the hidden states and the logits of one chunk at a time, and the
    chunks. Logits lie in the part that the gradient has not filled yet, so the first chunks are the largest.
    """
    size = max(int(SHARED_PER_HIDDEN * rows * hidden), rows * hidden + MIN_BYTES // itemsize)
    max_tiles = -(-max(MAX_ROWS, -(-rows // MAX_CHUNKS)) // TILE)
    while True:
        slices: list[slice] = []
        start = 0
        while start < rows:
            # A row has logits until its gradient is written, so both need room.
            tiles = (size - start * hidden) // (vocab + hidden) // TILE
            slices.append(slice(start, min(start + max(min(tiles, max_tiles), 1) * TILE, rows)))
            start = slices[-1].stop
        if len(slices) <= MAX_CHUNKS:
            used = max(((s.stop - s.start) * vocab + s.stop * hidden for s in slices), default=0)
            return used + TILE, tuple(slices)  # logits start at a multiple of a tile
        size += TILE * vocab * max(len(slices) // MAX_CHUNKS - 1, 1)


class Chunks(Protocol):
    """A linear layer's rows, as a framework cuts them. Arrays have one leading dim, that of the rows. A function that
    gets an array and returns it may have changed it in place.

    A framework's class takes the layer (hidden, weight, bias) and what else has rows by name; attributes
    ``accum_dtype`` and ``chunk_rows``; and which gradients are wanted, ``dhidden``, ``dweight`` or ``dbias``.
    """

    inputs: Mapping[str, Any]

    def each(self, state: State, body: Callable[[State, Any], State]) -> State:
        """``state = body(state, at)`` for every chunk."""

    def new_rows(self) -> Any:
        """A float32 number for each row."""

    def cut(self, name: str, at: Any) -> Any:
        """The rows of a chunk, of what has this name."""

    def put(self, array: Any, at: Any, part: Any) -> Any:
        """The array with these as the rows of a chunk."""

    def logits(self, at: Any) -> Any:
        """``hidden @ weight.T + bias`` of a chunk."""

    def sums(self) -> dict[str, Any]:
        """The gradients that are wanted, by name, which chunks fill or add to."""

    def put_product(self, array: Any, at: Any, a: Any, b: Any) -> Any:
        """``put(array, at, a @ b)``."""

    def add_product(self, total: Any, at: Any, a: Any, b: Any) -> Any:
        """``total + a @ b``, rounded to the dtype of the total only."""

    def add_rows(self, total: Any, rows: Any) -> Any:
        """The total with these rows added, in float32."""

    def rounded(self, sums: dict[str, Any]) -> Mapping[str, Any]:
        """The gradients in the dtypes of what they are of."""
