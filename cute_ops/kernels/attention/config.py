"""Configs of the kernels around attention."""

from __future__ import annotations

from typing import Literal

from cute_ops.declaration.config import KernelConfig
from cute_ops.hardware import WARP
from cute_ops.kernels.tensor_core.sizes import MMA_M

MMA_ROWS, PADDING = 16, 8  # rows of an MMA of a warp, and elements between rows in shared memory
# Of attention to caches: CTAs that run on an SM at a time; the most elements of a head of which a thread has registers
# for two tiles of queries, or for those of two CTAs.
RESIDENT, LONGEST_OF_TWO = 2, 128
BACKWARD_BLOCK = 128  # queries, or keys, of a CTA of warpgroups that computes gradients
LONG_TILE = 80  # queries of a tile of the kernel of long sequences' gradients, which no other kernel has
# Of latents by warpgroups: blocks in shared memory, and parts of a block that arrive one after another.
LATENT_STAGES, LATENT_PARTS = 2, 3


OnePass = Literal["", "keys", "queries"]
Form = Literal["contiguous", "whole_pages", "any_pages"]


class AppendConfig(KernelConfig):
    """How the vectors of tokens spread over threads.

    Attributes:
        threads: of a CTA, at most.
        threads_per_token: threads that copy the keys or the values of one token.
        unroll: vectors that a thread has in flight.
    """

    threads: int
    threads_per_token: int
    unroll: int


class AttentionConfig(KernelConfig):
    """The tiles of attention, and what is done to scores.

    Attributes:
        tile_n: keys of a tile.
        sms: CTAs that run at a time; 0 where each block of queries has its own.
        consumers: warpgroups of a CTA with 64 queries each.
        warps: of a CTA that multiply by ``mma.sync``; 0 where warpgroups do.
        tiles_m: tiles of 16 queries of such a warp.
        mask: the expression of the mask; empty if there is none.
        bounds: expressions of bounds over a tile: of the mask and, if it has limits and other parts, of these.
        score: the expression of a change of scores; empty if there is none.
        cached: whether keys lie in caches.
        box: keys in caches that TMA loads at once, some of a loading warp; 0 where threads copy them.
        heads: whose queries a CTA has: one, or one for each warpgroup.
    """

    tile_n: int
    sms: int
    consumers: int = 2
    warps: int = 0
    tiles_m: int = 1
    mask: str = ""
    bounds: str = ""
    score: str = ""
    cached: bool = False
    box: int = 0
    heads: int = 1

    @property
    def block(self) -> int:
        """Queries of a CTA, of each of its heads."""
        rows = MMA_ROWS * self.tiles_m * self.warps if self.warps else MMA_M * self.consumers
        return rows // self.heads

    def shared(self, d: int, e: int) -> int:
        """Bytes of shared memory where warps multiply: queries, whose place outputs take, keys and values, padded; for
        caches also the page and the slot of each key of two tiles, and a bit for each.
        """
        places = 4 * 2 * (2 * self.tile_n + -(-self.tile_n // 32)) if self.cached else 0
        return 2 * (self.block * (max(d, e) + PADDING) + self.tile_n * (d + e + 2 * PADDING)) + places


class AttentionBackwardConfig(KernelConfig):
    """The tiles of attention's gradients, and what is done to scores.

    Attributes:
        tile_k: keys of a tile of the kernel of queries.
        key_stages: tiles of keys and values in shared memory.
        tile_q: queries of a tile of the kernel of keys and values.
        query_stages: tiles of queries and cotangents in shared memory.
        one_pass: ``keys`` or ``queries`` if one kernel computes all gradients, by CTAs with a block of these each and
            the tiles and stages of the kernel of that name; empty where two kernels do.
        warps: of a CTA that multiply by ``mma.sync``, each with 16 queries, or keys; 0 where warpgroups do.
        mask: the expression of the mask; empty if there is none.
        bounds: expressions of bounds over a tile: of the mask and, if it has limits and other parts, of these.
        score: the expression of a change of scores; empty if there is none.
        dscore: the expression of its gradient.
    """

    tile_k: int
    key_stages: int
    tile_q: int
    query_stages: int
    one_pass: OnePass = ""
    warps: int = 0
    mask: str = ""
    bounds: str = ""
    score: str = ""
    dscore: str = ""

    @property
    def block(self) -> int:
        """Queries, or keys, of a CTA."""
        return MMA_ROWS * self.warps if self.warps else BACKWARD_BLOCK

    def shared(self, d: int, e: int) -> int:
        """Bytes of shared memory where warps multiply: a block's rows, whose place results take, stages of the tiles
        that it goes through and, in one pass, a tile of scores and numbers of rows; padded.
        """
        rows = self.block + max(self.key_stages * self.tile_k, self.query_stages * self.tile_q)
        of_scores = self.block * (self.tile_q + PADDING) if self.one_pass else 0
        of_rows = 8 * self.query_stages * self.tile_q if self.one_pass else 0
        return 2 * (rows * (d + e + 2 * PADDING) + of_scores) + of_rows


class DecodeConfig(KernelConfig):
    """How attention to caches spreads over warps.

    Attributes:
        form: how a tile of keys lies in memory: ``contiguous``; in one of the pages (``whole_pages``); in several
            (``any_pages``).
        tiles_m: tiles of 16 queries, of heads that share keys, which a CTA has.
        warps: of a CTA, each with tiles of keys of its own; so many of them for each sharer.
        stages: tiles of keys and values that a warp has in shared memory; tiles of keys or of values that a CTA has
            there, where TMA loads them.
        keys: of a warp's tile.
        itemsize: bytes of an element of caches.
        box: keys that TMA loads at once, of a tile of all warps; 0 where each warp copies its own.
        sharers: warps that have the same tiles of keys, each with tiles of queries of its own.
        split_keys: keys after which they are split; 0 where the number of splits is chosen.
        score: the expression of a change of scores; empty if there is none.
        cluster: CTAs that have all parts of a row's keys and combine them in shared memory; 1 where memory has parts.
    """

    form: Form
    tiles_m: int
    warps: int
    stages: int
    keys: int = MMA_ROWS
    itemsize: int = 2
    box: int = 0
    sharers: int = 1
    split_keys: int = 0
    score: str = ""
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Queries of a CTA."""
        return MMA_ROWS * self.tiles_m

    def slots_bytes(self, d: int, e: int) -> int:
        """Bytes of the tiles that TMA loads, or of the results that take their place."""
        tile = self.keys * self.warps * max(d, e) * self.itemsize
        return max(self.stages * tile, 4 * self.warps * self.rows * (e + 2))

    def stage_bytes(self, d: int, e: int) -> int:
        """Bytes of a tile of keys and values: padding keeps eight neighbouring rows in different banks."""
        return self.keys * (self.itemsize * (d + e) + 4 * PADDING)

    def shared(self, d: int, e: int) -> int:
        """Bytes of shared memory: queries and their factors, tiles or results of each warp, which take their place, and
        masks.
        """
        queries = self.rows * (2 * (d + PADDING) + 4)
        if self.box:
            return queries + self.slots_bytes(d, e) + self.stages * (2 * 8 + 4 * (self.keys * self.warps // WARP))
        results = 4 * self.rows * (e + 2)
        ring = self.stages * self.stage_bytes(d, e)
        return queries + self.warps * (max(ring, results) + 4 * self.stages)


class MergeConfig(KernelConfig):
    """``threads`` of a CTA, each with one vector."""

    threads: int


class MlaConfig(KernelConfig):
    """The block of scores of latent attention that a CTA computes at once.

    Attributes:
        tiles_m: tiles of 16 rows, the queries of a sequence's heads.
        keys: of a block.
        warps: each has the scores of 16 rows and 16 keys.
        chunk: keys that are loaded at once, a part of a block.
        stages: chunks of keys in shared memory.
        paged: whether the cache has pages.
        split_keys: keys after which they are split; 0 where the number of splits is chosen.
        wgmma: whether warpgroups multiply; then a block has 64 rows and 64 keys, and is loaded by a warpgroup more.
        boxed: whether TMA loads such blocks, each of which lies in one page.
    """

    tiles_m: int
    keys: int
    warps: int
    chunk: int
    stages: int
    paged: bool
    split_keys: int = 0
    wgmma: bool = False
    boxed: bool = False

    @property
    def rows(self) -> int:
        return MMA_ROWS * self.tiles_m

    @property
    def chunks(self) -> int:
        """Of a block."""
        return self.keys // self.chunk

    def shared(self, d: int) -> int:
        """Bytes of shared memory: queries, chunks of keys, weights, which keys are there; of each row a factor and two
        numbers for each 16 keys.
        """
        if self.wgmma:
            swizzled = 2 * (self.rows + self.stages * self.keys) * d + 2 * self.rows * self.keys
            return (
                swizzled
                + 4 * (self.stages * (self.keys + 4) + 6 * self.rows)
                + 8 * (1 + self.stages * (LATENT_PARTS + 1))
            )
        pitch, rows, keys = 2 * (d + PADDING), self.rows, self.stages * self.chunk
        weights, of_rows = 2 * rows * (self.keys + PADDING), 4 * rows * (1 + 2 * self.keys // 16)
        return pitch * (rows + keys) + weights + 4 * keys + of_rows
