"""How many rows of logits :func:`linear_cross_entropy` holds at a time, in both frameworks."""

from __future__ import annotations

# Rows of a matrix product's tile: chunks of fewer would leave tensor cores idle.
TILE = 128
LEAST_BYTES = 32 << 20
# Every chunk rounds the weight's gradient once more; beyond so many, that shows beside the rounding of the logits.
MOST = 32


def rows_per_chunk(rows: int, hidden: int, vocab: int, itemsize: int) -> int:
    """Rows of a chunk: its logits take about as much memory as the gradient of the hidden states, which is there
    anyway, unless that made more than 32 chunks.
    """
    room = max(rows * hidden * itemsize, LEAST_BYTES) // max(vocab * itemsize, 1)
    wanted = max(room, -(-rows // MOST), TILE)
    return max(min(-(-wanted // TILE) * TILE, rows), 1)
