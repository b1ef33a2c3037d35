"""The gradients of attention on any GPU from SM 8.0 on: one kernel for queries, one for keys and values."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.config import MMA_ROWS
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.tiles import Sizes, Tile, Tiles
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
    source_of,
    store_rows,
)
from cute_ops.kernels.attention.weights import Weights, of_columns

REGISTERS = 210  # with fewer of them for all else, registers hold a warp's rows, too


class Held(NamedTuple):
    """Shared memory: a block's rows of two tensors, whose place results take, and stages of tiles of two others; and
    what allocates more of it.
    """

    rows: Any
    tiles: Any
    smem: Any


class GradientSm80:
    """What both kernels of gradients do: a CTA has a block of rows of two tensors, 16 for each warp, and goes through
    tiles of two others, which all threads load: with two stages the next tile while one is multiplied.
    """

    def __init__(self, config, d, dv, mods, scale):
        self.d, self.dv, self.mods, self.scale = d, dv, mods, scale
        self.warps, self.threads, self.block = config.warps, WARP * config.warps, config.block
        self.weights = Weights(mods, scale)

    def keeps_rows(self, sums, tile):
        """Whether registers hold a warp's rows beside so many columns of sums, two tiles of scores, a rounded one."""
        return (self.d + self.dv) // 4 + sums // 2 + 5 * tile // 4 <= REGISTERS

    def held(self, dtype, tile):
        smem, widths = cutlass.utils.SmemAllocator(), (self.d, self.dv)
        return Held(
            [padded_rows(smem, dtype, self.block, width) for width in widths],
            [padded_stages(smem, dtype, tile, width, self.stages) for width in widths],
            smem,
        )

    def load(self, sources, places, first, tidx):
        """Start to copy rows from ``first`` on."""
        for source, sX in zip(sources, places):
            load_rows(source, sX, first, tidx, self.threads)

    @cute.jit
    def go_through(
        self, tiles: cutlass.Constexpr, some: cutlass.Constexpr, load: cutlass.Constexpr, multiply: cutlass.Constexpr
    ):  # fmt: skip
        """Do ``multiply(tile, stage)`` for each tile from a first to a last one for which ``some(tile)`` is true, after
        its ``load(tile, stage)``.
        """
        (first, last), stage = tiles, Int32(0)
        index = first
        if index <= last:
            load(index, stage)
        while index <= last:
            after = following(index, last, 1, some)
            cute.arch.cp_async_wait_group(0)
            # The tile is there, and all warps have read the one before.
            cute.arch.barrier()
            if const_expr(self.stages == 2):
                if after <= last:
                    load(after, 1 - stage)
            multiply(index, stage)
            if const_expr(self.stages == 1):
                cute.arch.barrier()
                if after <= last:
                    load(after, stage)
            else:
                stage = 1 - stage
            index = after
        cute.arch.barrier()


class QueriesBackwardSm80(GradientSm80):
    """``dq = ds @ k``.

    Tile: a CTA has ``block`` queries of one head, 16 for each warp, and goes through the keys in tiles of ``tile_k``.
    Shared memory: ``block x (d + dv)`` queries and cotangents, whose place the result takes; ``stages`` slots of
    ``tile_k x (d + dv)`` keys and values; padded.
    Bytes moved per element: q, dout and dq once; k and v once as long as the heads walked together find them in L2.
    """

    def __init__(self, config, d, dv, mods, scale):
        super().__init__(config, d, dv, mods, scale)
        self.tile_k, self.stages = config.tile_k, config.key_stages
        self.tiles = Tiles(self.block, self.tile_k, mods)

    @cute.jit
    def launch(self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, mDq, sizes: cutlass.Constexpr, stream):
        mQ, *_ = inputs
        self.dtype = mQ.element_type
        blocks, batches = self.tiles.blocks(sizes, 0)
        self.kernel(mma_of_warp(self.dtype), (*inputs, mDq), rows, tuple(sizes)).launch(
            grid=[blocks * sizes.heads * batches, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, moved, rows, sizes):
        tidx, sizes = cute.arch.thread_idx()[0], Sizes(*sizes)
        tile, own = self.tiles.queries_at(cute.arch.block_idx()[0], sizes, (self.d + self.dv) * self.dtype.width // 8)
        (of_q, of_k), kv_head = own.rows, tile.head // sizes.heads_per_kv
        mQ, mK, mV, mDout, mDq = moved
        q, dout, dq = (source_of(m, tile.head, tile.batch, of_q, own.seqlen_q) for m in (mQ, mDout, mDq))
        k, v = (source_of(m, kv_head, tile.batch, of_k, own.seqlen_k) for m in (mK, mV))
        held = self.held(self.dtype, self.tile_k)
        self.load((q, dout), held.rows, tile.block * self.block, tidx)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self._multiply(mma, (k, v, dq), rows, held, (tile, own, tidx))

    @cute.jit
    def _multiply(
        self, mma, sources: cutlass.Constexpr, rows: cutlass.Constexpr, held: cutlass.Constexpr, at: cutlass.Constexpr
    ):
        (k, v, dq), (tile, own, tidx) = sources, at
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        first = tile.block * self.block + warp * MMA_ROWS
        kept = self.keeps_rows(self.d, self.tile_k)
        places = [cute.local_tile(s, (MMA_ROWS, width), (warp, 0)) for s, width in zip(held.rows, (self.d, self.dv))]
        of_q, of_dout = (Rows.of(mma, s, lane, kept) for s in places)
        keys, values = (Operand.of(mma, s, lane, False) for s in held.tiles)
        across = Operand.of(mma, held.tiles[0], lane, True)
        rS, rP = (accumulators(mma, self.tile_k) for _ in range(2))
        rDs, rDq = halves(self.tile_k, self.dtype), accumulators(mma, self.d, 0.0)
        lse, delta = self.weights.of_rows(rows, first + lane // 4, tile, own)

        def load(index, stage):
            self.load((k, v), [s[None, None, stage] for s in held.tiles], index * self.tile_k, tidx)
            cute.arch.cp_async_commit_group()

        def multiply(index, stage):
            rS.fill(0.0)
            rP.fill(0.0)
            keys.add_to([rS], lambda _, i: of_q(i), stage)
            values.add_to([rP], lambda _, i: of_dout(i), stage)
            place = place_of_warp(lane, tile, (first, index * self.tile_k, self.tile_k), own)
            self.weights.of_scores(rS, None, place, lse, self.tiles.whole(tile, own, tile.block, index))
            times_cotangents(rS, rP, delta)
            store_packed(rS, rDs)
            across.add_to([rDq], lambda _, i: rDs[None, None, i], stage)

        def some(index):
            return self.tiles.some(tile, own, tile.block, index)

        self.go_through(self.tiles.keys_of(tile, own), some if self.mods.mask else None, load, multiply)
        scale_by(rDq, self.scale)
        store_rows(rDq, places[0], dq, first, lane, self.dtype)


class KeysBackwardSm80(GradientSm80):
    """``dk = ds.T @ q`` and ``dv = p.T @ dout``.

    Tile: a CTA has ``block`` keys of one head, 16 for each warp, and goes through the queries of all heads that share
    it in tiles of ``tile_q``. Scores are computed transposed, so that their weights stay in registers for the products
    with queries and cotangents.
    Shared memory: ``block x (d + dv)`` keys and values, whose place the results take; ``stages`` slots of ``tile_q x (d
    + dv)`` queries and cotangents; padded.
    Bytes moved per element: k, v, dk and dv once; q and dout once as long as the heads walked together find them in L2.
    """

    def __init__(self, config, d, dv, mods, scale, parts="kv"):
        """``parts``: ``k``, ``v`` or both: where heads are long, registers hold the sums of one of them."""
        super().__init__(config, d, dv, mods, scale)
        self.of_k, self.of_v = "k" in parts, "v" in parts
        self.tile_q, self.stages = config.tile_q, config.query_stages
        self.tiles = Tiles(self.tile_q, self.block, mods)

    @cute.jit
    def launch(
        self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, gradients: cutlass.Constexpr,
        sizes: cutlass.Constexpr, stream,
    ):  # fmt: skip
        self.dtype = inputs[0].element_type
        self.kernel(mma_of_warp(self.dtype), (*inputs, *gradients), rows, tuple(sizes)).launch(
            grid=[self.ctas(sizes), 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    def ctas(self, sizes):
        blocks, batches = self.tiles.blocks(sizes, 1)
        return blocks * (sizes.heads // sizes.heads_per_kv) * batches

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, moved, rows, sizes):
        tidx, sizes = cute.arch.thread_idx()[0], Sizes(*sizes)
        keys, own = self.tiles.keys_at(cute.arch.block_idx()[0], sizes, (self.d + self.dv) * self.dtype.width // 8)
        mQ, mK, mV, mDout, mDk, mDv, *mSums = moved
        of_keys = [source_of(m, keys.head, keys.batch, own.rows[1], own.seqlen_k) for m in (mK, mV, mDk, mDv)]
        held = self.held(self.dtype, self.tile_q)
        self.load(of_keys[:2], held.rows, keys.block * self.block, tidx)
        cute.arch.cp_async_commit_group()
        self._multiply(mma, (mQ, mDout, *of_keys[2:], mSums), rows, held, (keys, own, tidx))

    def rows_of(self, rows, held, at):
        """Numbers of rows in shared memory; None where each thread reads those of its columns from memory."""
        return None

    def logs(self, mLse, place):
        """A function to the log-sum-exp of a column, of base 2."""
        logs = [self.weights.of_lse(*each) for each in of_columns(mLse, place, place.sizes)]
        return lambda r, c: logs[c]

    def deltas(self, mDelta, place):
        """A function to the delta of a column."""
        deltas = [delta for delta, _ in of_columns(mDelta, place, place.sizes)]
        return lambda r, c: deltas[c]

    def adder(self, mma, mSums, held, at):
        """A function that is given a tile's ``ds``; None where nothing is to be done with it."""
        return None

    @cute.jit
    def _multiply(
        self, mma, moved: cutlass.Constexpr, rows: cutlass.Constexpr, held: cutlass.Constexpr, at: cutlass.Constexpr
    ):
        (mQ, mDout, dk, dv, mSums), (keys, own, tidx) = moved, at
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        first = keys.block * self.block + warp * MMA_ROWS
        widths = self.d if self.of_k else 0, self.dv if self.of_v else 0
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        kept = self.keeps_rows(sum(widths), self.tile_q)
        places = [cute.local_tile(s, (MMA_ROWS, width), (warp, 0)) for s, width in zip(held.rows, (self.d, self.dv))]
        of_k, of_v = (Rows.of(mma, s, lane, kept) for s in places)
        of_q, of_dout, q_across, dout_across = (
            Operand.of(mma, s, lane, across) for across in (False, True) for s in held.tiles
        )
        rS, rP = (accumulators(mma, self.tile_q) for _ in range(2))
        rWeights, rDs = (halves(self.tile_q, self.dtype) for _ in range(2))
        rDk, rDv = (accumulators(mma, width, 0.0) if width else None for width in widths)
        add = self.adder(mma, mSums, held, (own, tidx))
        own_rows = self.rows_of(rows, held, (own, tidx))
        for i in cutlass.range(own.heads_per_kv, unroll=1):
            tile = Tile(keys.block, keys.head * own.heads_per_kv + i, keys.batch)
            sources = [source_of(m, tile.head, tile.batch, own.rows[0], own.seqlen_q) for m in (mQ, mDout)]

            def load(index, stage):
                self.load(sources, [s[None, None, stage] for s in held.tiles], index * self.tile_q, tidx)
                if const_expr(own_rows is not None):
                    own_rows.load(tile, index, stage)
                cute.arch.cp_async_commit_group()

            def multiply(index, stage):
                place = place_of_warp(lane, tile, (first, index * self.tile_q, self.tile_q), own, keys_down=True)
                logs = own_rows.of(0, stage) if const_expr(own_rows is not None) else self.logs(rows[0], place)
                rS.fill(0.0)
                of_q.add_to([rS], lambda _, k: of_k(k), stage)
                weights = rWeights if self.of_v else None
                whole = self.tiles.whole(tile, own, index, tile.block)
                self.weights.of_scores(rS, weights, place, logs, whole)
                if const_expr(self.of_v):
                    dout_across.add_to([rDv], lambda _, k: rWeights[None, None, k], stage)
                if const_expr(self.of_k):
                    delta = own_rows.of(1, stage) if const_expr(own_rows is not None) else self.deltas(rows[1], place)
                    rP.fill(0.0)
                    of_dout.add_to([rP], lambda _, k: of_v(k), stage)
                    times_cotangents(rS, rP, delta)
                    store_packed(rS, rDs)
                    if const_expr(add is not None):
                        add(rDs, tile, index)
                    q_across.add_to([rDk], lambda _, k: rDs[None, None, k], stage)

            def some(index):
                return self.tiles.some(tile, own, index, tile.block)

            self.go_through(self.tiles.queries_of(tile, own), some if self.mods.mask else None, load, multiply)
        for rX, place, source, scale in ((rDk, places[0], dk, self.scale), (rDv, places[1], dv, 1.0)):
            if const_expr(rX is not None):
                scale_by(rX, scale)
                store_rows(rX, place, source, first, lane, self.dtype)


def times_cotangents(rS, rP, delta):
    """Replace ``p * dscore`` by ``ds``. ``delta``: a function of row and column."""
    scores, cotangents = by_row(rS), by_row(rP)
    for c in range(cute.size(scores, mode=[1])):
        for r in range(2):
            scores[r, c] = scores[r, c] * (cotangents[r, c] - delta(r, c))


def scale_by(rX, scale):
    for i in range(cute.size(rX)):
        rX[i] = rX[i] * Float32(scale)
