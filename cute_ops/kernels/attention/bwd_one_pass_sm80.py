"""All gradients of attention from scores that are computed once, on any GPU from SM 8.0 on."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.bwd_sm80 import KeysBackwardSm80
from cute_ops.kernels.attention.config import MMA_ROWS
from cute_ops.kernels.attention.pages import copy_bytes
from cute_ops.kernels.attention.sums import CHUNK, SumsOfQueries
from cute_ops.kernels.attention.tensors import address_of
from cute_ops.kernels.attention.warps import Operand, Rows, accumulators, mma_of_warp, padded_rows, put_rows
from cute_ops.kernels.attention.weights import InPairs
from cute_ops.kernels.lib.copy import fragment, load, store


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

    def rows_of(self, rows, held, at):
        own, tidx = at
        layout = cute.make_layout((self.tile_q, 2, self.stages))
        s = held.smem.allocate_tensor(Float32, layout, VECTOR_BYTES)
        return RowsOfQueries(s, rows, own, tidx, self.first_of)

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
            # A tile's sums lie as threads have them: a warp adds to 32 neighbours at once.
            place = self.first_of(own, queries), 0, tile.head, batch_of(tile, own)
            address = address_of(mSums, place, warp * cute.size(rDq) * WARP + lane)
            for i in range(cute.size(rDq)):
                ptx = f"red.global.add.f32 [{{$r0}}+{4 * WARP * i}], {{$r1}};"
                cute.arch.inline_ptx(ptx, read_only_args=[address, rDq[i]])

        return add

    def _round_chunk(self, mSums, mDq, at, chunk):
        row, token, head, batch = at
        begin, row = row // self.tile_q * self.tile_q, row % self.tile_q
        beside, block = chunk // (self.columns // CHUNK), chunk % (self.columns // CHUNK)
        number = (row // MMA_ROWS + self.down * beside) * (self.columns // 2) + 4 * block + row % MMA_ROWS // 8 * 2
        first = address_of(mSums, (begin, 0, head, batch), number * WARP + row % 8 * 4)
        halves, rOut = [fragment(Float32, CHUNK // 2) for _ in range(2)], fragment(mDq.element_type, CHUNK)
        for i, rX in enumerate(halves):  # of even and of odd columns
            load(rX, first + 4 * WARP * i)
            for j in range(CHUNK // 2):
                rOut[2 * j + i] = (rX[j] * Float32(self.scale)).to(mDq.element_type)
        store(rOut, address_of(mDq, (token, chunk * CHUNK, head, batch)))


def batch_of(tile, sizes):
    """The batch in numbers of rows, which packed sequences have one after another."""
    return tile.batch if sizes.offsets is None else Int32(0)


@dataclass(frozen=True)
class RowsOfQueries:
    """Logarithms and deltas of a tile's queries in shared memory.

    Attributes:
        s: (tile_q, 2, stages).
        rows: both for all rows, (batch, heads, length), in whole tiles; logarithms are of base 2, and infinite where
            there is no query.
        sizes, tidx: of the sequence, of the thread.
        first_of: from these and the number of a tile to its first row.
    """

    s: Any
    rows: Any
    sizes: Any
    tidx: Any
    first_of: Any

    def load(self, tile, queries, stage):
        """Start to copy those of a tile, 16 bytes with each of a few threads."""
        place = batch_of(tile, self.sizes), tile.head, self.first_of(self.sizes, queries)
        for which, m in enumerate(self.rows):
            copy_numbers(self.s[None, which, stage], address_of(m, place), self.tidx)

    def of(self, which, stage):
        """A function of row and column to the number of a thread's column."""
        size = cute.size(self.s, mode=[0])
        layout = cute.make_layout((2, 4, size // 8), stride=(1, 2, 8))
        pairs = cute.make_tensor(self.s[None, which, stage].iterator, layout)
        return InPairs(pairs[None, self.tidx % 4, None])


@cute.jit
def copy_numbers(sX, address, tidx):
    if tidx < cute.size(sX) * 4 // VECTOR_BYTES:
        copy_bytes((sX.iterator.toint() + tidx * VECTOR_BYTES, 0), address + tidx * VECTOR_BYTES, None)
