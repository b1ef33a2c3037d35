"""Tiles of keys and values in shared memory as operands of products, of 16 bits and of 8.

Rows of shared memory are counted in units of 16 bits, each of which holds one number or two neighbours.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int16, Int32

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.config import PADDING
from cute_ops.kernels.attention.registers import pack
from cute_ops.kernels.attention.warps import Operand
from cute_ops.kernels.lib.copy import fragment, load

BIAS = 127  # of float32's exponents
LOWEST_EXPONENT, EXPONENT, MAGNITUDE = 23, 0xFF << 23, (1 << 31) - 1  # its bits


class Operands(NamedTuple):
    """A warp's tiles of keys and values, as :class:`cute_ops.kernels.attention.warps.Operand`."""

    keys: Any
    values: Any


class Tiles16:
    """Tiles of 16-bit numbers, which products take as they lie."""

    scaled = False

    def __init__(self, d, e):
        self.d, self.e = d, e

    def product_dtype(self, dtype):
        """The dtype of operands, for queries of a dtype."""
        return dtype

    def operands(self, mma, sK, sV, lane):
        """Of tiles (keys, units, stages)."""
        return Operands(Operand.of(mma, sK, lane, False), Operand.of(mma, sV, lane, True))

    def score(self, operands, queries, rows, stage):
        """Add the products of queries and keys to scores. ``queries(i, k)``: 16 elements of a tile of queries."""
        operands.keys.add_to([row.scores for row in rows], queries, stage)

    def add_values(self, operands, rows, stage):
        """Add weighted values to sums."""
        operands.values.add_to([row.values for row in rows], lambda i, k: rows[i].weights[None, None, k], stage)

    def column(self, lane, c):
        """The column of a thread's c-th sum of values in a row."""
        return lane % 4 * 2 + 8 * (c // 2) + c % 2


class Tiles8(Tiles16):
    """Tiles of float8_e4m3fn, converted to float16, which holds all of its numbers, as they are read.

    A thread loads four neighbours of a key, which are two of a product's operands: columns of queries are permuted so
    that they meet their partners. Of values it loads two columns of neighbouring keys: products have columns of even
    numbers, then those of odd ones. Queries are float16, too, of a power of two for each row, so that none overflows.
    """

    scaled = True

    def product_dtype(self, dtype):
        return Float16

    def score(self, operands, queries, rows, stage):
        for k in range(self.d // 32):
            words = _words(operands.keys.read(k, stage))
            for half in range(2):
                rK = self._operand(words, half)
                for i, row in enumerate(rows):
                    cute.gemm(operands.keys.mma, row.scores, queries(i, 2 * k + half), rK, row.scores)

    def _operand(self, words, half):
        """16 numbers of each key: of each block of 8 keys a word."""
        blocks = cute.size(words) // 2
        rX = cute.make_rmem_tensor(((2, 2), blocks), Float16)
        to = cute.recast_tensor(rX, Int32)
        for block in range(blocks):
            to[2 * block], to[2 * block + 1] = two_pairs(words[half + 2 * block])
        return rX

    def add_values(self, operands, rows, stage):
        for step in range(operands.values.steps):
            words = _words(operands.values.read(step, stage))
            for block in range(self.e // 16):
                rX = cute.make_rmem_tensor(((2, 2), 2), Float16)
                to = cute.recast_tensor(rX, Int32)
                for keys in range(2):
                    # Of two keys, even columns before odd ones.
                    turned = cute.arch.prmt(words[keys + 2 * block], Int32(0), Int32(0x3120))
                    to[keys], to[keys + 2] = two_pairs(turned)
                for row in rows:
                    layout = cute.make_layout(((2, 2), 1, 2), stride=((1, 2), 0, 4))
                    sums = cute.make_tensor(row.values.iterator + 8 * block, layout)
                    cute.gemm(operands.values.mma, sums, row.weights[None, None, step], rX, sums)

    def column(self, lane, c):
        block, c = c // 4, c % 4
        return block * 16 + lane % 4 * 4 + c % 2 * 2 + c // 2

    @cute.jit
    def load_queries(
        self, rows: cutlass.Constexpr, address: cutlass.Constexpr, sQ, sFactors, at: cutlass.Constexpr
    ):  # fmt: skip
        """Store queries and for each row the power of two that it was divided by.

        Args:
            rows: of a CTA.
            address: ``address(row)``: whether there is a row, and where.
            sQ: shared memory, by rows.
            sFactors: of each row.
            at: dtype of queries, warp, lane, warps.
        """
        dtype, warp, lane, warps = at
        for first in cutlass.range(0, rows, warps, unroll=1):
            row = first + warp
            there, source = address(row)
            pairs, largest = [], Float32(0.0)
            for j in cutlass.range_constexpr(-(-self.d // (2 * WARP))):
                column, rX = (j * WARP + lane) * 2, fragment(dtype, 2, 0)
                if there & (column < self.d) & (row < rows):
                    load(rX, source + column * 2)
                pairs.append([Float32(rX[0]), Float32(rX[1])])
                for x in pairs[j]:
                    largest = cute.arch.fmax(largest, (x.bitcast(Int32) & MAGNITUDE).bitcast(Float32))
            for offset in (16, 8, 4, 2, 1):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
            exponent = largest.bitcast(Int32) & EXPONENT
            inverse = (Int32(2 * BIAS << LOWEST_EXPONENT) - exponent).bitcast(Float32)
            if row < rows:
                if lane == 0:
                    sFactors[row] = exponent.bitcast(Float32)
                for j in cutlass.range_constexpr(len(pairs)):
                    pair = j * WARP + lane
                    if 2 * pair < self.d:
                        low, high = (x * inverse for x in pairs[j])
                        place = pair // 8 * 8 + pair % 8 // 2 + pair % 2 * 4
                        words = cute.make_ptr(Int32, sQ.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
                        (words + (row * ((self.d + PADDING) // 2) + place)).store(pack(low, high, Float16))


def tiles_of(itemsize, d, e):
    """The tiles of caches whose elements have so many bytes."""
    return (Tiles16 if itemsize == 2 else Tiles8)(d, e)


def _words(rX):
    return cute.recast_tensor(rX, Int32)


def two_pairs(word):
    """The four numbers of a word as two pairs of float16."""
    halves = Int16(word & 0xFFFF), Int16(word >> 16)
    return [
        cute.arch.inline_ptx("cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[half])
        for half in halves
    ]
