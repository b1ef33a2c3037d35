"""How a head's rotated and untouched elements spread over vectors, and the rotation itself.

A head of ``d`` elements has ``r`` pairs, ``(j, j + r)`` or interleaved ``(2j, 2j + 1)``, and then ``d - 2r`` elements
that pass through. A *chunk* is the two vectors of ``vec`` elements that one thread holds. The vectors of a rotated
chunk are the first and the second elements of ``vec`` pairs, ``r`` apart; if pairs are interleaved, and in chunks that
pass through, the vectors are neighbours.
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import access_bits, fragment, gmem_elements, load_if, store_if
from cute_ops.kernels.lib.fp8 import to_fp8
from cute_ops.kernels.lib.row_layout import row_address, row_count, strided_offset

# CTAs in the second dimension of a grid.
MAX_LINES = 65535


class Chunk(NamedTuple):
    """The two vectors of a head that one thread holds.

    Attributes:
        index: of the chunk in its head.
        rotated: whether it is rotated.
        first, second: elements where its vectors begin; the second one may be past the head.
        d: elements of the head.
        inside: whether the head has the chunk.
    """

    index: Any
    rotated: Any
    first: Any
    second: Any
    d: Any
    inside: Any = True


class Rotary:
    """Chunks of one head of the tensors named ``heads``; a variant's dims ``d`` and ``r`` are None where dynamic."""

    def __init__(self, variant, heads, interleaved):
        self.d, self.r = variant.dims["d"], variant.dims["r"]
        self.interleaved = interleaved
        keys = [variant.tensors[name] for name in heads]
        if self.d is None:
            self.vec = 1  # halves may begin anywhere
        else:
            fits = [min(key.align, key.row_align, VECTOR_BYTES) // ITEMSIZE[key.dtype] for key in keys]
            widest = min(fits)
            self.vec = math.gcd(widest, self.r, self.d - 2 * self.r)
        self.tables = variant.tensors["cos"], variant.tensors["sin"]

    def sizes(self, mX, mCos):
        """(d, r), static where known."""
        if self.d is not None:
            return self.d, self.r
        return Int32(mX.shape[-1]), Int32(mCos.shape[-1])

    def chunks(self, d, r):
        """Chunks of a head: rotated ones, then those that pass through."""
        return r // self.vec + (d - 2 * r + 2 * self.vec - 1) // (2 * self.vec)

    def chunk(self, index, d, r):
        """The chunk of that index in a head of d elements with r pairs."""
        rotated = index < r // self.vec
        neighbour = index * (2 * self.vec)
        if self.interleaved:
            return Chunk(index, rotated, neighbour, neighbour + self.vec, d)
        first = index * self.vec
        passing = neighbour + 2 * r - (r // self.vec) * (2 * self.vec)
        if isinstance(r, int) and d == 2 * r:
            return Chunk(index, rotated, first, first + r, d)
        start = cutlass.select_(rotated, first, passing)
        return Chunk(index, rotated, start, cutlass.select_(rotated, first + r, passing + self.vec), d)

    def row(self, mCos, token):
        """The row of both tables for a token: sequences that share the tables start again with the first."""
        return token % row_count(mCos)

    def table(self, mTable, which, row, chunk, wanted):
        """The cosines or sines of a chunk's pairs if they are ``wanted``, else zeros.

        They must be zeros, because the terms that a missing token adds to a sum are multiplied by them.
        """
        key = self.tables[which]
        n = mTable.shape[-1]
        address = row_address(mTable, key, row, n)
        address = address + Int64(chunk.index * self.vec) * ITEMSIZE[key.dtype]
        rTable = fragment(mTable.element_type, self.vec, 0)
        if min(key.align, key.row_align) >= access_bits(mTable.element_type, self.vec) // 8:
            load_if(wanted, rTable, address)
        else:
            _elements_if(wanted, rTable, address)
        return rTable

    def load(self, dtype, address, valid, chunk):
        """A chunk's two vectors as one fragment in memory order; zeros where not valid or past the head."""
        rX = fragment(dtype, 2 * self.vec, 0)
        halves = self._halves(rX)
        itemsize = dtype.width // 8
        load_if(valid, halves[0], address + Int64(chunk.first) * itemsize)
        load_if(valid & (chunk.second < chunk.d), halves[1], address + Int64(chunk.second) * itemsize)
        return rX

    def column(self, mWeight, key, valid, chunk):
        """Weights of a chunk's elements, in fp32; zeros past the head."""
        rWeight = fragment(mWeight.element_type, 2 * self.vec, 0)
        itemsize = ITEMSIZE[key.dtype]
        aligned = key.align >= access_bits(mWeight.element_type, self.vec) // 8
        for rHalf, start in zip(self._halves(rWeight), (chunk.first, chunk.second)):
            address = mWeight.iterator.toint() + Int64(start) * itemsize
            if aligned:
                load_if(valid & (start < chunk.d), rHalf, address)
            else:
                _elements_if(valid & (start < chunk.d), rHalf, address)
        return wide(rWeight)

    def store(self, rWide, dtype, address, valid, chunk, streaming=True):
        if dtype.width == 8:
            rX = to_fp8(rWide.load(), 2 * self.vec)
        else:
            rX = fragment(dtype, 2 * self.vec)
            rX.store(rWide.load().to(dtype))
        halves = self._halves(rX)
        itemsize = dtype.width // 8
        store_if(valid, halves[0], address + Int64(chunk.first) * itemsize, streaming)
        store_if(valid & (chunk.second < chunk.d), halves[1], address + Int64(chunk.second) * itemsize, streaming)

    def _halves(self, rX):
        return [cute.make_tensor(rX.iterator + i * self.vec, cute.make_layout(self.vec)) for i in range(2)]

    def pair(self, j):
        """Where the two elements of a chunk's j-th pair are in its fragment."""
        return (2 * j, 2 * j + 1) if self.interleaved else (j, j + self.vec)

    def rotate(self, rX, rCos, rSin, rotated, sign=1.0):
        """Rotate the pairs of a chunk by their angles, or back with ``sign=-1``; others pass through."""
        for j in range(self.vec):
            a, b = self.pair(j)
            x, y, c, s = rX[a], rX[b], rCos[j], rSin[j] * sign
            rX[a] = cutlass.select_(rotated, x * c - y * s, x)
            rX[b] = cutlass.select_(rotated, y * c + x * s, y)


def wide(rX):
    """A fragment in fp32."""
    rWide = fragment(Float32, cute.size(rX))
    rWide.store(rX.load().to(Float32))
    return rWide


@cute.jit
def _elements_if(valid: cutlass.Boolean, rX: cute.Tensor, address: Int64):
    if valid:
        gX = gmem_elements(rX.element_type, address, cute.size(rX))
        for j in cutlass.range_constexpr(cute.size(rX)):
            rX[j] = gX[j]


def table_grid(blocks, mX, mCos):
    """The grid of ``blocks`` CTAs for the rows of the tables, times the sequences that share the tables.

    CTAs start in the order of the first dimension, so CTAs that read the same row start together and find it in L2.
    """
    planes = (blocks + (MAX_LINES - 1)) // MAX_LINES
    sequences = row_count(mX, inner=2) // row_count(mCos)
    return [Int32(sequences), Int32(cutlass.min(blocks, Int64(MAX_LINES))), Int32(planes)]


def sequence_and_block():
    """This CTA's sequence, and which of the CTAs of a sequence it is, in 64 bits."""
    sequence, line, plane = cute.arch.block_idx()
    return Int64(sequence), Int64(plane) * MAX_LINES + line


def split_index(start, more, size):
    """(row, place in the row) of item ``start + more`` where rows have ``size`` items. One division in 64 bits, which
    all of a CTA share, the rest in 32.
    """
    above = start // Int64(size)
    local = Int32(start - above * Int64(size)) + more
    below = local // size
    return above + Int64(below), local - below * size


def head_count(mX):
    """Size of the dim before the last."""
    return Int32(mX.shape[len(mX.shape) - 2])


def head_address(mX, key, token, head, d):
    """Byte address of a head, in 64 bits throughout."""
    itemsize = mX.element_type.width // 8
    last = len(mX.shape) - 2
    base = mX.iterator.toint()
    if key.layout == "flat":
        return base + (token * Int64(head_count(mX)) + Int64(head)) * Int64(d * itemsize)
    return base + strided_offset(mX, token, last, Int64(head) * Int64(mX.stride[last])) * itemsize
