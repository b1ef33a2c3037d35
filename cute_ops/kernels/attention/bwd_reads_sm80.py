"""The gradient of what a change of scores reads on any GPU from SM 8.0 on."""

import cutlass
import cutlass.cute as cute

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.bwd_sm80 import GradientSm80, times_cotangents
from cute_ops.kernels.attention.config import MMA_ROWS, PADDING
from cute_ops.kernels.attention.sums_of_reads import SumsOfReads
from cute_ops.kernels.attention.tiles import Sizes
from cute_ops.kernels.attention.warps import (
    Operand,
    Rows,
    accumulators,
    load_rows,
    mma_of_warp,
    place_of_warp,
    source_of,
)


class SumsOfReadsSm80(SumsOfReads, GradientSm80):
    """``sums = sum(ds * dscore / dread)`` over the scores that read the same element, by warps.

    Tile: scores of ``block`` queries, 16 for each warp, and ``tile_k`` keys.
    Shared memory: ``stages`` slots of ``block x (d + dv)`` queries and cotangents and of ``tile_k x (d + dv)`` keys and
    values, padded; a tile of sums takes their place.
    Bytes moved per element: each tile's operands, which mostly L2 holds; sums once.
    """

    def __init__(self, config, d, dv, mods, scale):
        GradientSm80.__init__(self, config, d, dv, mods, scale)
        SumsOfReads.__init__(self, config, d, dv, mods, scale)

    @cute.jit
    def start(
        self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, found: cutlass.Constexpr, sizes: cutlass.Constexpr,
        ctas, stream,
    ):  # fmt: skip
        self.kernel(mma_of_warp(self.dtype), inputs, rows, found, tuple(sizes)).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, inputs, rows, found, sizes):
        tidx, sizes = cute.arch.thread_idx()[0], Sizes(*sizes)
        unit, part, ends = self.own_steps(found[1], sizes)
        held, start = self._places(cutlass.utils.SmemAllocator())
        rSum = self._add_up(mma, inputs, rows, held, (unit, ends, sizes, tidx))
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        place = place_of_warp(lane, None, (warp * MMA_ROWS, 0, self.tile_k), sizes)
        self.write(rSum, place, (unit, part, tidx), start, found, sizes)

    def _places(self, smem):
        """Stages of queries, cotangents, keys and values in shared memory, and its address."""
        every = [(length, width) for length in (self.block, self.tile_k) for width in (self.d, self.dv)]
        sizes = [self.stages * length * (width + PADDING) for length, width in every]
        count = max(sum(sizes), 0 if self.share == "score" else 2 * self.block * (self.tile_k + 1))
        whole = smem.allocate_tensor(self.dtype, cute.make_layout(count), byte_alignment=16)
        held = []
        for i, (length, width) in enumerate(every):
            pitch = width + PADDING
            layout = cute.make_layout((length, width, self.stages), stride=(pitch, 1, length * pitch))
            held.append(cute.make_tensor((whole.iterator + sum(sizes[:i])).align(16), layout))
        return held, whole.iterator.toint()

    @cute.jit
    def _add_up(
        self, mma, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, held: cutlass.Constexpr, at: cutlass.Constexpr
    ):
        """A thread's part of the sum of a CTA's tiles."""
        (mQ, mK, mV, mDout), (unit, ends, sizes, tidx) = inputs, at
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        of_q, of_dout, *others = held
        keys, values = (Operand.of(mma, s, lane, False) for s in others)
        rS, rP = (accumulators(mma, self.tile_k) for _ in range(2))
        rSum = accumulators(mma, self.tile_k, 0.0)

        def load(index, stage):
            tile, of_keys = self.tile_at(unit, index, sizes)
            kv_head = tile.head // sizes.heads_per_kv
            for m, sX, head, first, length in (
                (mQ, held[0], tile.head, tile.block * self.block, sizes.seqlen_q),
                (mDout, held[1], tile.head, tile.block * self.block, sizes.seqlen_q),
                (mK, held[2], kv_head, of_keys * self.tile_k, sizes.seqlen_k),
                (mV, held[3], kv_head, of_keys * self.tile_k, sizes.seqlen_k),
            ):
                source = source_of(m, head, tile.batch, None, length)
                load_rows(source, sX[None, None, stage], first, tidx, self.threads)
            cute.arch.cp_async_commit_group()

        def multiply(index, stage):
            tile, of_keys = self.tile_at(unit, index, sizes)
            first = tile.block * self.block + warp * MMA_ROWS
            lse, delta = self.weights.of_rows(rows, first + lane // 4, tile, sizes)
            rS.fill(0.0)
            rP.fill(0.0)
            for rX, operand, own, width in ((rS, keys, of_q, self.d), (rP, values, of_dout, self.dv)):
                place = cute.local_tile(own[None, None, stage], (MMA_ROWS, width), (warp, 0))
                row = Rows.of(mma, place, lane, False)
                operand.add_to([rX], lambda _, k: row(k), stage)
            place = place_of_warp(lane, tile, (first, of_keys * self.tile_k, self.tile_k), sizes)
            self.weights.of_scores(rS, None, place, lse, self.tiles.whole(tile, sizes, tile.block, of_keys))
            times_cotangents(rS, rP, delta)
            rSum.store(rSum.load() + rS.load())

        def some(index):
            tile, of_keys = self.tile_at(unit, index, sizes)
            return self.tiles.some(tile, sizes, tile.block, of_keys)

        self.go_through(ends, some if self.mods.mask else None, load, multiply)
        return rSum
