"""Attention on any GPU from SM 8.0 on: cp.async and ``mma.sync``, an online softmax in registers."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.config import MMA_ROWS, AttentionConfig
from cute_ops.kernels.attention.mods import Mods, by_index
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.softmax import OnlineSoftmax, by_row, store_packed
from cute_ops.kernels.attention.tiles import Sizes, Tiles, offsets_of, sizes_of, view
from cute_ops.kernels.attention.warps import (
    Operand,
    Rows,
    accumulators,
    following,
    halves,
    load_rows,
    mma_of_warp,
    padded_rows,
    padded_stages,
    place_of_warp,
    queries_fit,
    source_of,
    store_rows,
)
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous


class Accumulated(NamedTuple):
    """A warp's sums for 16 queries.

    Attributes:
        first: the first of the queries.
        s: their place in shared memory.
        queries: as an operand.
        scores, weights: of a tile of keys; weights in 16 bits.
        values: sums of weighted values.
        largest, sums: of a thread's two rows, the largest score and the sum of weights so far.
    """

    first: Any
    s: Any
    queries: Any
    scores: Any
    weights: Any
    values: Any
    largest: Any
    sums: Any


class AttentionFwdSm80:
    """``out = softmax(score_mod(scale * q @ k.T), where mask) @ v`` and the log-sum-exp of each row of scores.

    Tile: a CTA has a block of queries of one head, ``16 * tiles_m`` for each warp, and goes through the keys in tiles
    of ``tile_n``, from the last to the first. All threads load: values of a tile while its scores are computed, keys of
    the next one while values are summed up. Tiles that the mask leaves out are skipped, and only those that it crosses
    are masked. Blocks with most keys come first.
    Shared memory: ``block x max(d, dv)`` queries, whose place outputs take, ``tile_n x (d + dv)`` keys and values;
    padded.
    Bytes moved per element: q and out once; k and v once as long as the heads walked together find them in L2.
    """

    def __init__(self, variant):
        config, attrs, dims = AttentionConfig.of(variant.config), variant.attrs, variant.dims
        self.d, self.dv, self.tile_n, self.tiles_m = dims["d"], dims["e"], config.tile_n, config.tiles_m
        self.warps, self.tile_q = config.warps, config.block
        self.threads = WARP * self.warps
        self.mods = Mods(attrs["scale"] or self.d**-0.5, config.score, config.mask, config.bounds)
        self.tiles = Tiles(self.tile_q, self.tile_n, self.mods)
        self.softmax = OnlineSoftmax(*self.mods.outer)
        self.packed, self.pdl = "cu_seqlens_q" in variant.names, can_use_pdl(variant.arch)
        self.keeps_queries = queries_fit(self.tiles_m, self.d, self.dv)

    @cute.jit
    def __call__(self, mQ, mK, mV, *others):
        *captured, mSinks, mOut, mLse, mQRanges, mKRanges, stream = others
        offsets, captured = offsets_of(captured, self.packed)
        self.dtype = mQ.element_type
        mQ, mK, mV, mOut = (view(m) for m in (mQ, mK, mV, mOut))  # (seqlen, d, heads, batch)
        mLse = folded(mLse, own=2)  # (batch, heads, seqlen)
        sizes = sizes_of(mQ, mK, by_index(captured, self.mods), (mQRanges, mKRanges), offsets)
        Ranges(self.tiles).launch(sizes, stream)
        blocks, batches = self.tiles.blocks(sizes, 0)
        self.kernel(mma_of_warp(self.dtype), (mQ, mK, mV, mOut), mSinks, mLse, tuple(sizes)).launch(
            grid=[blocks * sizes.heads * batches, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, moved, mSinks, mLse, sizes):
        tidx, sizes = cute.arch.thread_idx()[0], Sizes(*sizes)
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        sQ, sK, sV = self._shared()
        wait_for_previous(self.pdl)
        tile, own = self.tiles.queries_at(cute.arch.block_idx()[0], sizes, (self.d + self.dv) * self.dtype.width // 8)
        own = self.mods.with_reads(tile, own)
        (of_q, of_k), kv_head = own.rows, tile.head // sizes.heads_per_kv
        q, out = (source_of(m, tile.head, tile.batch, of_q, own.seqlen_q) for m in (moved[0], moved[3]))
        k, v = (source_of(m, kv_head, tile.batch, of_k, own.seqlen_k) for m in moved[1:3])
        first, last = self.tiles.keys_of(tile, own)
        load_rows(q, sQ, tile.block * self.tile_q, tidx, self.threads)
        if last >= first:
            load_rows(k, sK[None, None, 0], last * self.tile_n, tidx, self.threads)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        mine = [self._start(mma, sQ, tile, warp * self.tiles_m + i, lane) for i in range(self.tiles_m)]
        operands = (k, sK, Operand.of(mma, sK, lane, False)), (v, sV, Operand.of(mma, sV, lane, True))
        self._attend(mine, operands, (first, last), (tile, own, tidx))
        let_next_start(self.pdl)
        sink = None if const_expr(mSinks is None) else Float32(mSinks[tile.head])
        for each in mine:
            self._finish(each, sink, mLse, out, (tile, own, lane))

    def _start(self, mma, sQ, tile, number, lane):
        """Sums of nothing of the 16 queries with this number in a block."""
        s, largest, sums = cute.local_tile(sQ, (MMA_ROWS, self.d), (number, 0)), *by_two(-Float32.inf, 0.0)
        return Accumulated(
            tile.block * self.tile_q + number * MMA_ROWS, s, Rows.of(mma, s, lane, self.keeps_queries),
            accumulators(mma, self.tile_n), halves(self.tile_n, self.dtype), accumulators(mma, self.dv, 0.0), largest,
            sums,
        )  # fmt: skip

    @cute.jit
    def _attend(
        self, mine: cutlass.Constexpr, operands: cutlass.Constexpr, tiles: cutlass.Constexpr, at: cutlass.Constexpr
    ):
        """Go through the tiles of keys, of which the last one is there."""
        ((k, sK, of_keys), (v, sV, of_values)), (tile, own, tidx) = operands, at
        first, keys = tiles
        scores, sums = [each.scores for each in mine], [each.values for each in mine]

        def some(index):
            return self.tiles.some(tile, own, tile.block, index)

        while keys >= first:
            # All warps have read the values of the tile before.
            load_rows(v, sV[None, None, 0], keys * self.tile_n, tidx, self.threads)
            cute.arch.cp_async_commit_group()
            for each in scores:
                each.fill(0.0)
            of_keys.add_to(scores, lambda i, step: mine[i].queries(step), 0)
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            # Values are there, and all warps have read the keys.
            after = following(keys, first, -1, some if self.mods.mask else None)
            if after >= first:
                load_rows(k, sK[None, None, 0], after * self.tile_n, tidx, self.threads)
            cute.arch.cp_async_commit_group()
            whole = self.tiles.whole(tile, own, tile.block, keys)
            for each in mine:
                place = place_of_warp(tidx % WARP, tile, (each.first, keys * self.tile_n, self.tile_n), own)
                self._weigh(each, place, whole)
            of_values.add_to(sums, lambda i, step: mine[i].weights[None, None, step], 0)
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            keys = after

    @cute.jit
    def _weigh(self, mine: cutlass.Constexpr, place: cutlass.Constexpr, whole):
        """Exponentials of 16 rows of a tile's scores, and what they do to the sums so far."""
        if const_expr(self.mods.score is not None):
            self.mods.change(by_row(mine.scores), place)
        if not whole:
            self.mods.hide(by_row(mine.scores), place, -Float32.inf)
        self.softmax.rescale(mine.values, self.softmax.add(mine.scores, mine.largest, mine.sums))
        store_packed(mine.scores, mine.weights)

    @cute.jit
    def _finish(
        self, mine: cutlass.Constexpr, sink: cutlass.Constexpr, mLse, out: cutlass.Constexpr, at: cutlass.Constexpr
    ):
        """Divide by the sums of 16 rows, and store these."""
        tile, own, lane = at
        lse, factors = self.softmax.finish(mine.largest, mine.sums, sink)
        for r in cutlass.range_constexpr(2):
            query = mine.first + lane // 4 + 8 * r
            if (lane % 4 == 0) & (query < own.seqlen_q):
                mLse[own.of_query(tile, query)] = lse[r]
        self.softmax.rescale(mine.values, factors)
        store_rows(mine.values, mine.s, out, mine.first, lane, self.dtype)

    def _shared(self):
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        sQ = padded_rows(smem, dtype, self.tile_q, self.d, max(self.d, self.dv))
        return sQ, *(padded_stages(smem, dtype, self.tile_n, width) for width in (self.d, self.dv))


def by_two(*values):
    """For each value a number of each of a thread's two rows, which it is at first."""
    found = [cute.make_rmem_tensor(2, Float32) for _ in values]
    for each, value in zip(found, values):
        each.fill(value)
    return found
