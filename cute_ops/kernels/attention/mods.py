"""What is done to a tile of scores in registers: expressions of :mod:`cute_ops.ops.attention.mods` as device code."""

import cutlass
from cutlass import Float32

from cute_ops.kernels.emit.emitter import Emitter


class Mods:
    """A mask, its bounds over a tile and a change of scores; each may be absent.

    Coordinates are float32 in expressions, which hold whole numbers up to 2^24.
    """

    def __init__(self, mask, bounds, score):
        self.mask, self._bounds, self.score = (Emitter(text) if text else None for text in (mask, bounds, score))

    def bounds(self, tile, q, k, shift):
        """Whether the mask is true of all scores of a tile, and whether it may be true of one.

        Args:
            tile: block, head and batch.
            q, k: the first and the last query and key.
            shift: of queries.
        """
        return self._bounds(*map(Float32, (tile.batch, tile.head, *q, *k, shift)))

    def change(self, scores, at, scale):
        """Replace scores, which are scaled first."""
        for r, c, coordinates in self._coordinates(at):
            scores[r, c] = self.score(scores[r, c] * Float32(scale), *coordinates)[0]

    def hide(self, scores, at, seqlen_k):
        """Replace scores of keys that a query does not attend to, and of what lies behind the last key, by -inf."""
        last = Float32(seqlen_k)
        for r, c, coordinates in self._coordinates(at):
            kept = coordinates[3] < last
            if self.mask is not None:
                kept = kept & self.mask(*coordinates)[0]
            scores[r, c] = cutlass.select_(kept, scores[r, c], -Float32.inf)

    def _coordinates(self, at):
        """The coordinates of each score of a thread: batch, head, q, k and shift."""
        tile, rows, (start, columns), shift = at
        batch, head, start, shift = map(Float32, (tile.batch, tile.head, start, shift))
        for r, row in enumerate(rows):
            q = Float32(row)
            for c, column in enumerate(columns):
                yield r, c, (batch, head, q, start + Float32(column), shift)
