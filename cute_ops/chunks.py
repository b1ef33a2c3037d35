"""How many rows of logits :func:`linear_cross_entropy` holds at a time, in both frameworks."""

from __future__ import annotations

# Rows of a matrix product's tile: chunks of fewer would leave tensor cores idle.
TILE = 128
LEAST_BYTES = 32 << 20
# Bytes of logits for each byte of hidden states: products of fewer rows spend their time on the weight's gradient.
SHARE = 2.5
# Every chunk rounds the weight's gradient once more; beyond so many, that shows beside the rounding of the logits.
MOST = 32


def rows_per_chunk(rows: int, hidden: int, vocab: int, itemsize: int) -> int:
    """Rows of a chunk: its logits take some two and a half times the memory of the hidden states, whose gradient is
    there anyway, unless that made more than 32 chunks.
    """
    room = int(max(SHARE * rows * hidden * itemsize, LEAST_BYTES)) // max(vocab * itemsize, 1)
    wanted = max(room // TILE, -(-rows // (MOST * TILE)), 1)
    return max(min(wanted * TILE, rows), 1)
