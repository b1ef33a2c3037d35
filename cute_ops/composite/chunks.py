"""How many rows of logits :func:`linear_cross_entropy` holds at a time, in both frameworks."""

from __future__ import annotations

from functools import lru_cache

# Rows of a matrix product's tile: chunks of fewer would leave tensor cores idle.
TILE = 128
LEAST_BYTES = 32 << 20
# Bytes of logits for each byte of hidden states: products of fewer rows spend their time on the weight's gradient.
SHARE = 2.5
# The same of logits and of the gradient of the hidden states together, where they share their memory.
SHARE_TOGETHER = 2.9
# Every chunk reads and writes the weight's gradient once more, and rounds it where it is not summed in float32; beyond
# so many, that shows beside the products and beside the rounding of the logits.
MOST = 32
# More rows make products no faster.
FULL = 4096
# Products of so many rows take some fifteen times as long as reading and writing the weight's gradient (H200).
ENOUGH = 2048


def rows_per_chunk(rows: int, hidden: int, vocab: int, itemsize: int, enough: int = 0) -> int:
    """Rows of a chunk: its logits take some two and a half times the memory of the hidden states, whose gradient is
    there anyway, unless that made more than 32 chunks.

    Args:
        enough: at least so many rows, as long as their logits take no more than four times the memory of the weight.
    """
    room = int(max(SHARE * rows * hidden * itemsize, LEAST_BYTES)) // max(vocab * itemsize, 1)
    room = max(room, min(enough, 4 * hidden))
    wanted = max(min(room, FULL) // TILE, -(-rows // (MOST * TILE)), 1)
    return max(min(wanted * TILE, rows), 1)


def beside_weight(rows: int, hidden: int) -> int:
    """Rows of a chunk whose logits fit the memory of the weight's gradient, while that is summed somewhere else; 0
    where that is less than a tile. All chunks but the last are alike, and that is not much smaller.
    """
    most = min(hidden, FULL) // TILE
    if not most or not rows:
        return min(most, rows)
    tiles = -(-rows // TILE)
    count = -(-tiles // most)
    return min(-(-tiles // count) * TILE, rows)


@lru_cache(256)
def shared(rows: int, hidden: int, vocab: int, itemsize: int) -> tuple[int, tuple[slice, ...]]:
    """Elements of an array that holds the gradient of the hidden states and, in what that has not filled yet, the
    logits of one chunk after another; and the chunks. The first ones are larger: all of it is still free.
    """
    room = max(int(SHARE_TOGETHER * rows * hidden), rows * hidden + LEAST_BYTES // itemsize)
    most = -(-max(FULL, -(-rows // MOST)) // TILE)
    while True:
        found: list[slice] = []
        start = 0
        while start < rows:
            # The rows of a chunk have logits until their gradient is there.
            tiles = (room - start * hidden) // (vocab + hidden) // TILE
            found.append(slice(start, min(start + max(min(tiles, most), 1) * TILE, rows)))
            start = found[-1].stop
        if len(found) <= MOST:
            # Logits start on a multiple of a tile.
            return max(((s.stop - s.start) * vocab + s.stop * hidden for s in found), default=0) + TILE, tuple(found)
        room += TILE * vocab * max(len(found) // MOST - 1, 1)
