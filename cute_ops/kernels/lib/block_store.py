"""Stores of short rows that start anywhere in a vector.

Such a row shares its first and last vectors with its neighbours. Stored from the registers of a row's threads, these
are stored by elements, and L2 takes as long for each as for a whole sector: rows of 41 bfloat16 numbers reached half of
the copy rate. The rows of a CTA follow on each other, so they go to shared memory, and from there to whole vectors.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import BITS, compiler_barrier, fragment, store

# Vectors of 16 bytes of a row from which on its threads store its ends themselves.
SHORT_ROW = 32
# Bytes of vectors that are not stored by themselves.
NARROW_BYTES = 4


class BlockRow(NamedTuple):
    """A row of an output in shared memory, from the element ``start`` of its CTA's on."""

    element_type: Any
    elements: Any
    start: Any


class BlockStore:
    """Shared memory: the rows of a CTA, of each output."""

    def __init__(self, tile):
        self.tile = tile
        self.size = tile.rows * tile.n

    @classmethod
    def of(cls, tile, keys):
        """The store of these outputs; None if their rows are long, or the CTA's do not start and end on 16 bytes."""
        most = max((ITEMSIZE[key.dtype] for key in keys), default=0)
        narrow = tile.v.shifted or tile.vec * most <= NARROW_BYTES
        short = tile.cluster == 1 and tile.n * most < SHORT_ROW * VECTOR_BYTES
        return cls(tile) if keys and narrow and short and _whole(tile, keys) else None

    def allocate(self, smem, dtype):
        """Room for the elements of an output, as whole numbers of their width."""
        return smem.allocate_tensor(BITS[dtype.width], cute.make_layout(self.size), byte_alignment=VECTOR_BYTES)

    def row(self, elements, dtype, local):
        """The CTA's row of this number."""
        return BlockRow(dtype, elements, local * self.tile.n)

    @cute.jit
    def put(self, rX: cute.Tensor, row: cutlass.Constexpr, first: Int32, k: cutlass.Constexpr):
        """Put a thread's k-th vector, which begins with a column; elements of neighbouring rows are left out."""
        elements, vec, n = row.elements, self.tile.vec, self.tile.n
        place = row.start + first
        if const_expr(vec * rX.element_type.width % 32 == 0):
            compiler_barrier(rX)
        rX = cute.recast_tensor(rX, elements.element_type)
        if const_expr(not self.tile.predicated(k)):
            if const_expr(not self.tile.ends_outside(k)) or first < n:
                cute.autovec_copy(rX, self._vector(elements, place, vec))
        elif first >= 0 and first + vec <= n:
            cute.autovec_copy(rX, self._vector(elements, place, vec))
        else:
            for j in cutlass.range_constexpr(vec):
                if first + j >= 0 and first + j < n:
                    elements[place + j] = rX[j]

    def __call__(self, elements, address, rows):
        """Store the CTA's first rows at an address, once all threads have put theirs."""
        tile, vec = self.tile, 8 * VECTOR_BYTES // elements.element_type.width
        count = Int32(cutlass.min(rows, Int64(tile.rows))) * tile.n
        cute.arch.barrier()
        tidx = cute.arch.thread_idx()[0]
        for i in range(-(-self.size // (vec * tile.threads))):
            self._store(elements, address, (i * tile.threads + tidx) * vec, count, vec)
        self._store(elements, address, count // vec * vec + tidx, count, 1)  # after the last row of all

    @cute.jit
    def _store(self, elements: cute.Tensor, address: Int64, place: Int32, count: Int32, vec: cutlass.Constexpr):
        """Store the vector from an element on, if so many have it."""
        if place + vec <= count:
            rX = fragment(elements.element_type, vec)
            cute.autovec_copy(self._vector(elements, place, vec), rX)
            store(rX, address + Int64(place) * (elements.element_type.width // 8))

    def _vector(self, elements, place, vec):
        """The vector of shared memory from an element on, which is a multiple of the vector's."""
        dtype = elements.element_type
        address = elements.iterator.toint() + place * (dtype.width // 8)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=min(vec * dtype.width // 8, 16))
        return cute.make_tensor(pointer, cute.make_layout(vec))


def _whole(tile, keys):
    """Whether the first vector of a CTA's first row begins with the row, and the CTA's last row ends where one does."""
    flat = all(key.layout == "flat" and key.align >= VECTOR_BYTES for key in keys)
    even = all(tile.rows * tile.n * ITEMSIZE[key.dtype] % VECTOR_BYTES == 0 for key in keys)
    return flat and even and tile.rows > 1 and tile.v.unit == tile.vec
