"""Rows that start anywhere, in vectors that start with the row: vector ``v`` covers the columns from ``v * vec`` on.

Loads take the two aligned vectors around one (see :mod:`cute_ops.kernels.lib.realign`). Stores go through shared
memory, where a thread finds the elements of other threads that share an aligned vector with its own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, gmem_elements, store
from cute_ops.kernels.lib.realign import settle
from cute_ops.kernels.lib.row_layout import Vectors, present


class ColumnVectors(Vectors):
    """Vectors that start with the row: never shifted, and narrower than the widest only if the alignment allows
    ``least`` elements or rows are short.

    Attributes:
        unaligned: tensors whose vectors do not start on one of memory, with the bytes of a vector.
    """

    def __init__(self, variant, names, n, align_vectors, least):
        super().__init__(variant, names, n, align_vectors)
        tensors = present(variant, names)
        sizes = [ITEMSIZE[t.dtype] for t in tensors]
        widest = VECTOR_BYTES // max(sizes)
        self.unaligned = {}
        if self.shifted or (self.vec < max(widest // 2, least) and n >= 8 * widest):
            self.shifted, self.masked = False, True
            self.vec = self.unit = widest
            vectors = [(t, widest * size) for t, size in zip(tensors, sizes)]
            self.unaligned = {t.name: size for t, size in vectors if min(t.align, t.row_align) < size}


class ColumnStore:
    """Stores a CTA's share of a row of an output as whole vectors of memory, from vectors that start with the row.

    Shared memory: the CTA's share of each of the tile's rows.
    """

    def __init__(self, tile, vector_bytes):
        self.tile = tile
        self.row_bytes = tile.per_thread * tile.threads_per_row * vector_bytes + VECTOR_BYTES

    def allocate(self, smem):
        return smem.allocate_tensor(Uint8, self._layout(), byte_alignment=16)

    def view(self, base):
        """The tensor of :meth:`allocate` in shared memory that is there already, for a tile of one row."""
        return cute.make_tensor(cute.recast_ptr(base, dtype=Uint8), self._layout())[None, 0]

    def _layout(self):
        return cute.make_layout((self.row_bytes, self.tile.rows))

    @cute.jit
    def __call__(self, vectors: cutlass.Constexpr, sRow: cute.Tensor, address: Int64, t: Int32, rank, valid: Boolean):
        """Store this thread's vectors of the row at an address, if that exists; all threads of the CTA are done with
        what was in the row's shared memory.
        """
        tile = self.tile
        for k in cutlass.range_constexpr(tile.per_thread):
            self._put(vectors[k], sRow, (k * tile.threads_per_row + t) * self._bytes(vectors[k]))
        cute.arch.barrier()
        itemsize = vectors[0].element_type.width // 8
        span = tile.per_thread * tile.threads_per_row * tile.vec
        begin = rank * span
        count = cutlass.min(tile.n - begin, span) * itemsize
        count = cutlass.select_(valid, cutlass.max(count, Int32(0)), Int32(0))
        address = address + Int64(begin) * itemsize
        head = cutlass.min(Int32(-address & (VECTOR_BYTES - 1)), count)
        whole = (count - head) // VECTOR_BYTES
        most = span * itemsize // VECTOR_BYTES
        for i in cutlass.range_constexpr(-(-most // tile.threads_per_row)):
            self._move(sRow, address, head, i * tile.threads_per_row + t, whole)
        for i in cutlass.range_constexpr(-(-2 * VECTOR_BYTES // tile.threads_per_row)):
            self._edge(sRow, address, head, i * tile.threads_per_row + t, whole, count)

    def _put(self, rX, sRow, place):
        words = cute.recast_tensor(rX, Int32)
        target = cute.make_ptr(
            Int32, (sRow.iterator + place).toint(), cute.AddressSpace.smem, assumed_align=self._bytes(rX)
        )
        cute.autovec_copy(words, cute.make_tensor(target, words.layout))

    @cute.jit
    def _move(self, sRow: cute.Tensor, address: Int64, head: Int32, i: Int32, whole: Int32):
        """The i-th whole vector of memory."""
        if i < whole:
            rPair = fragment(Uint8, 2 * VECTOR_BYTES)
            source = cute.make_ptr(
                Uint8, (sRow.iterator + i * VECTOR_BYTES).toint(), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES
            )
            cute.autovec_copy(cute.make_tensor(source, rPair.layout), rPair)
            store(settle(rPair, head), address + Int64(head + i * VECTOR_BYTES))

    @cute.jit
    def _edge(self, sRow: cute.Tensor, address: Int64, head: Int32, i: Int32, whole: Int32, count: Int32):
        """The i-th of the bytes before and after the whole vectors."""
        place, end = i, head
        if i >= VECTOR_BYTES:
            place, end = i - VECTOR_BYTES + head + whole * VECTOR_BYTES, count
        if place < end:
            gmem_elements(Uint8, address + Int64(place), 1)[0] = sRow[place]

    def _bytes(self, rX):
        return cute.size(rX) * rX.element_type.width // 8
