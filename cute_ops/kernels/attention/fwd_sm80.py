"""Attention on any GPU from SM 8.0 on: cp.async and ``mma.sync``, an online softmax in registers."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.cache_loads import Fixed
from cute_ops.kernels.attention.config import MMA_ROWS, AttentionConfig
from cute_ops.kernels.attention.forward import ForwardKernel
from cute_ops.kernels.attention.mods import by_index
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.tensors import view
from cute_ops.kernels.attention.tiles import Sizes, offsets_of, sizes_of
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


class RowLoads(Fixed):
    """Copies of tiles of keys, 0, and of values, 1, by ``cp.async``, of tensors whose rows lie as those of queries do.

    All threads of a CTA copy, and call every method.
    """

    def __init__(self, sources, shared, tidx, threads):
        self.sources, self.shared, self.tidx, self.threads = sources, shared, tidx, threads

    def begin(self, last, first):
        """Copy the last tile of keys, and wait for it and all copies before."""
        self.start(0, last, first, None)
        self.finish(0, None)

    def look_up(self, tile, first):
        """Look up where a tile's keys lie; rows of a tensor need no look-up."""

    def keep(self, found, stage):
        """Show all threads what :meth:`look_up` has found."""

    def there(self, stage):
        """Which keys of the tile are there; None where all are."""

    @cute.jit
    def start(self, which: cutlass.Constexpr, tile, first, stage: cutlass.Constexpr):
        """Start to copy a tile of keys or values, unless it lies before the first one."""
        sX = self.shared[which][None, None, 0]
        if const_expr(which == 1):
            load_rows(self.sources[1], sX, tile * cute.size(sX, mode=[0]), self.tidx, self.threads)
        elif tile >= first:
            load_rows(self.sources[0], sX, tile * cute.size(sX, mode=[0]), self.tidx, self.threads)
        cute.arch.cp_async_commit_group()

    def finish(self, which, started):
        cute.arch.cp_async_wait_group(0)


class AttentionFwdSm80(ForwardKernel):
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
        super().__init__(variant)
        config = AttentionConfig.of(variant.config)
        self.tiles_m, self.tile_q, self.threads = config.tiles_m, config.block, WARP * config.warps
        self.pdl = can_use_pdl(variant.arch)
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
        self._launch((mQ, (mK, mV), mOut), mSinks, mLse, sizes, stream)

    def _launch(self, moved, mSinks, mLse, sizes, stream):
        self.kernel(mma_of_warp(self.dtype), moved, mSinks, mLse, tuple(sizes)).launch(
            grid=[self._count(sizes), 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, moved, mSinks, mLse, sizes):
        tidx, sizes, (mQ, keys, mOut) = cute.arch.thread_idx()[0], Sizes(*sizes), moved
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        sQ, sK, sV, more = self._shared(keys)
        wait_for_previous(self.pdl)
        tile, own = self._tile(cute.arch.block_idx()[0], sizes)
        own = self.mods.with_reads(tile, own)
        q, out = (source_of(m, tile.head, tile.batch, own.rows[0], own.seqlen_q) for m in (mQ, mOut))
        first, last = self._keys_of(tile, own)
        loads = self._loads(keys, (sK, sV, more), (tile, own, tidx))
        load_rows(q, sQ, tile.block * self.tile_q, tidx, self.threads)
        loads.begin(last, first)
        cute.arch.barrier()
        mine = [self._start(mma, sQ, tile, warp * self.tiles_m + i, lane) for i in range(self.tiles_m)]
        operands = Operand.of(mma, sK, lane, False), Operand.of(mma, sV, lane, True)
        self._attend(mine, (loads, *operands), (first, last), (tile, own, tidx))
        let_next_start(self.pdl)
        sink = None if const_expr(mSinks is None) else Float32(mSinks[tile.head])
        for each in mine:
            self._finish(each, sink, mLse, out, (tile, own, lane))

    def _loads(self, keys, shared, at):
        """The copies of tiles of keys and of values: an object with the methods of :class:`RowLoads`."""
        (tile, own, tidx), kv_head = at, at[0].head // at[1].heads_per_kv
        sources = [source_of(m, kv_head, tile.batch, own.rows[1], own.seqlen_k) for m in keys]
        return RowLoads(sources, shared[:2], tidx, self.threads)

    def _start(self, mma, sQ, tile, number, lane):
        """Sums of nothing of the 16 queries with this number in a block."""
        s, largest, sums = cute.local_tile(sQ, (MMA_ROWS, self.d), (number, 0)), *by_two(self.softmax.least, 0.0)
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
        (loads, of_keys, of_values), (tile, own, tidx) = operands, at
        first, keys = tiles
        scores, sums = [each.scores for each in mine], [each.values for each in mine]
        stage = Int32(0)

        def some(index):
            return self.tiles.some(tile, own, tile.block, index)

        while keys >= first:
            # All warps have read the values of the tile before.
            after = following(keys, first, -1, some if self.mods.mask else None)
            values, found = loads.start(1, keys, first, stage), loads.look_up(after, first)
            for each in scores:
                each.fill(0.0)
            of_keys.add_to(scores, lambda i, step: mine[i].queries(step), 0)
            loads.finish(1, values)
            loads.keep(found, 1 - stage)
            cute.arch.barrier()
            # Values are there, and all warps have read the keys.
            next_keys = loads.start(0, after, first, 1 - stage)
            whole, there = self.tiles.whole(tile, own, tile.block, keys), loads.there(stage)
            for each in mine:
                place = place_of_warp(tidx % WARP, tile, (each.first, keys * self.tile_n, self.tile_n), own)
                self._weigh(each, place, whole, there)
            of_values.add_to(sums, lambda i, step: mine[i].weights[None, None, step], 0)
            loads.finish(0, next_keys)
            cute.arch.barrier()
            keys = after
            stage = 1 - stage

    @cute.jit
    def _weigh(self, mine: cutlass.Constexpr, place: cutlass.Constexpr, whole, there: cutlass.Constexpr):
        """Exponentials of 16 rows of a tile's scores, and what they do to the sums so far."""
        rS = mine.scores

        def change():
            self._change(rS, place)

        def hide():
            self._hide(rS, place, whole, there)

        factors = self.softmax.add_changed(rS, (mine.largest, mine.sums), whole, change, hide)
        self.softmax.rescale_grown(mine.values, factors)
        store_packed(rS, mine.weights)

    def _change(self, rS, place):
        """Change products of 16 rows of a tile to scores, as a mod says."""
        self._scale_scores(rS, place.tile, place.sizes)
        if self.mods.score is not None:
            self.mods.change(by_row(rS), place)

    @cute.jit
    def _hide(self, rS, place: cutlass.Constexpr, whole, there: cutlass.Constexpr):
        """Hide scores of 16 rows of a tile that are left out."""
        if not whole:
            self.mods.hide(by_row(rS), place, -Float32.inf)
        self._hide_missing(by_row(rS), there)

    def _hide_missing(self, scores, there):
        """Hide keys that are not there."""

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
        self._of_values(factors, at)
        self.softmax.rescale(mine.values, factors)
        store_rows(mine.values, mine.s, out, mine.first, lane, self.dtype)

    def _shared(self, keys):
        """Shared memory of queries, keys and values, and what :meth:`_loads` needs besides."""
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        sQ = padded_rows(smem, dtype, self.tile_q, self.d, max(self.d, self.dv))
        sK, sV = (padded_stages(smem, dtype, self.tile_n, width) for width in (self.d, self.dv))
        return sQ, sK, sV, self._more_shared(smem, keys)

    def _more_shared(self, smem, keys):
        return None


def by_two(*values):
    """For each value a number of each of a thread's two rows, which it is at first."""
    found = [cute.make_rmem_tensor(2, Float32) for _ in values]
    for each, value in zip(found, values):
        each.fill(value)
    return found
