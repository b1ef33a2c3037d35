"""The config of the kernel that sums the gradients of what a change of scores reads."""

from __future__ import annotations

from typing import Literal

from cute_ops.kernels.attention.config import PADDING, AttentionBackwardConfig

# What of a head an element that is read belongs to: one score, those of a distance from key to query, of a query, of a
# key, or all of them.
Share = Literal["score", "distance", "query", "key", "all"]


class ReadsConfig(AttentionBackwardConfig):
    """Tiles of scores, of which a CTA adds up those that read the same elements.

    Attributes:
        share: which scores of a head read one element.
        by_batch, by_head: whether examples, and heads, read different ones.
    """

    share: Share = "score"
    by_batch: bool = True
    by_head: bool = True

    def shared(self, d: int, e: int) -> int:
        """Bytes of shared memory: stages of queries, cotangents, keys and values, padded where warps multiply; a tile
        of sums takes their place.
        """
        stages = 2 * self.key_stages * (self.block + self.tile_k) * (d + e + (2 * PADDING if self.warps else 0))
        return max(stages, 0 if self.share == "score" else 4 * self.block * (self.tile_k + 1))
