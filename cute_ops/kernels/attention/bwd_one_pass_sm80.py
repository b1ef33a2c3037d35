"""All gradients of attention from scores that are computed once, on any GPU from SM 8.0 on."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.bwd_sm80 import KeysBackwardSm80
from cute_ops.kernels.attention.config import MMA_ROWS
from cute_ops.kernels.attention.softmax import by_row
from cute_ops.kernels.attention.sums import SumsOfQueries
from cute_ops.kernels.attention.tiles import address_of
from cute_ops.kernels.attention.warps import Operand, Rows, accumulators, mma_of_warp, padded_rows, put_rows


class OnePassBackwardSm80(SumsOfQueries, KeysBackwardSm80):
    """``dk = ds.T @ q``, ``dv = p.T @ dout``, and for each tile of keys what it adds to ``dq = ds @ k``.

    Tile: a CTA has ``block`` keys of one head, as :class:`KeysBackwardSm80`. It computes the scores of a tile of
    queries and writes ``ds`` to shared memory; each warp multiplies 16 of its queries with a part of the keys' columns,
    and adds the product to float32 sums in memory, in the order in which CTAs come: dq is not deterministic.
    Shared memory: as :class:`KeysBackwardSm80`, and ``block x tile_q`` of ``ds``.
    Bytes moved per element: as :class:`KeysBackwardSm80`; the sums of dq are read and written by L2 once for each tile
    of keys, and once more to zero and to round them.
    """

    def __init__(self, config, d, dv, mods, scale):
        super().__init__(config, d, dv, mods, scale)
        self.down = self.tile_q // MMA_ROWS  # warps below one another for dq, others beside
        self.columns = d // (self.warps // self.down)

    @cute.jit
    def launch(
        self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, gradients: cutlass.Constexpr, mSums,
        sizes: cutlass.Constexpr, stream,
    ):  # fmt: skip
        self.dtype = inputs[0].element_type
        self.kernel(mma_of_warp(self.dtype), (*inputs, *gradients, mSums), rows, tuple(sizes)).launch(
            grid=[self.ctas(sizes), 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    def first_of(self, sizes, queries):
        """The row of a tile's first query in numbers and sums of rows, which have whole tiles of packed sequences."""
        return (sizes.first_slots[0] + queries) * self.tile_q

    def logs(self, mLogs, place, queries):
        """Logarithms are of base 2 already, and infinite where there is no query."""
        return self.deltas(mLogs, place, queries)

    def deltas(self, mDelta, place, queries):
        batch = place.tile.batch if place.sizes.offsets is None else Int32(0)
        first = self.first_of(place.sizes, queries) - queries * self.tile_q + place.start
        return [mDelta[batch, place.tile.head, first + column] for column in place.columns]

    def adder(self, mma, mSums, held, at):
        """A function that adds what a tile's ``ds`` makes of dq."""
        (mSums,), (own, tidx) = mSums, at
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        sDs = padded_rows(held.smem, self.dtype, self.block, self.tile_q)
        mine = cute.local_tile(sDs, (MMA_ROWS, self.tile_q), (warp, 0))
        # (queries, keys), of which a warp has 16 queries
        turned = cute.make_tensor(sDs.iterator, cute.select(sDs.layout, mode=[1, 0]))
        row, column = warp % self.down, warp // self.down
        sK = cute.local_tile(held.rows[0], (self.block, self.columns), (0, column))
        keys = Operand.of(mma, cute.make_tensor(sK.iterator, cute.append(sK.layout, cute.make_layout(1))), lane, True)
        of_ds = Rows.of(mma, cute.local_tile(turned, (MMA_ROWS, self.block), (row, 0)), lane, False, across=True)
        rDq = accumulators(mma, self.columns)

        def add(rDs, tile, queries):
            put_rows(rDs, mine, lane)
            cute.arch.barrier()
            rDq.fill(0.0)
            keys.add_to([rDq], lambda _, k: of_ds(k), 0)
            batch = tile.batch if own.offsets is None else Int32(0)
            values, first = by_row(rDq), row * MMA_ROWS + lane // 4
            for r in range(2):
                inside = queries * self.tile_q + first + 8 * r < own.seqlen_q
                place = self.first_of(own, queries) + first + 8 * r, column * self.columns + lane % 4 * 2
                add_to_memory(values, r, address_of(mSums, (*place, tile.head, batch)), inside)

        return add


@cute.jit
def add_to_memory(values, r: cutlass.Constexpr, address, inside):
    """Add a thread's row of accumulators to sums, whose first one has this address."""
    if inside:
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            offset = 4 * (8 * (c // 2) + c % 2)
            ptx = f"red.global.add.f32 [{{$r0}}+{offset}], {{$r1}};"
            cute.arch.inline_ptx(ptx, read_only_args=[address, values[r, c]])
