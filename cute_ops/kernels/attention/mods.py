"""What is done to a tile of scores in registers: expressions of :mod:`cute_ops.ops.attention.mods` as device code."""

import cutlass
from cutlass import Float32

from cute_ops.kernels.emit.emitter import Emitter


class Mods:
    """A mask, its bounds over a tile and a change of scores; each may be absent.

    Coordinates are float32 in expressions, which hold whole numbers up to 2^24.
    """

    def __init__(self, mask, bounds, score, dscore=""):
        texts = mask, bounds, score, dscore
        self.mask, self._bounds, self.score, self._dscore = (Emitter(text) if text else None for text in texts)

    def bounds(self, tile, q, k, shift):
        """Whether the mask is true of all scores of a tile, and whether it may be true of one.

        Args:
            tile: block, head and batch.
            q, k: the first and the last query and key.
            shift: of queries.
        """
        return self._bounds(*map(Float32, (tile.batch, tile.head, *q, *k, shift)))

    def change(self, scores, place, scale):
        """Replace scores, which are scaled first."""
        for r, c, coordinates in place.each():
            scores[r, c] = self.score(scores[r, c] * Float32(scale), *coordinates)[0]

    def hide(self, values, place, seqlen_k, hidden):
        """Replace values of keys that a query does not attend to, and of what lies behind the last key."""
        last = Float32(seqlen_k)
        for r, c, coordinates in place.each():
            kept = coordinates[3] < last
            if self.mask is not None:
                kept = kept & self.mask(*coordinates)[0]
            values[r, c] = cutlass.select_(kept, values[r, c], Float32(hidden))

    def derive(self, cotangents, scores, place):
        """Multiply cotangents of changed scores by the derivative of the change; scores are scaled."""
        for r, c, coordinates in place.each():
            cotangents[r, c] = self._dscore(cotangents[r, c], scores[r, c], *coordinates)[0]
