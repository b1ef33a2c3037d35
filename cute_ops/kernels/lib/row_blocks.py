"""Short rows that start anywhere, in shared memory: the rows of a CTA, which follow on each other, as whole vectors.

A thread's vectors of such rows are moved into place, masked at both ends and stored by elements there, which takes more
instructions than the memory has time for. Here vectors are those of all rows of the CTA, and threads take single
elements of a row, neighbours neighbouring ones.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, gmem_elements, gmem_vector, store
from cute_ops.kernels.lib.row_layout import Vectors


class Elements(Vectors):
    """Vectors of one element, whatever the alignment."""

    def __init__(self, variant, names, n):
        super().__init__(variant, names, n)
        self.vec = self.unit = 1
        self.shifted = self.masked = False


class RowBlocks:
    """Shared memory: ``rows`` rows of each tensor."""

    def __init__(self, tile, rows):
        self.tile, self.rows, self.size = tile, rows, rows * tile.n

    def holds(self, keys):
        """Whether the rows of these tensors follow on each other, and those of each CTA start on 16 bytes."""
        flat = all(key.layout == "flat" and key.align >= VECTOR_BYTES for key in keys)
        return flat and all(self.size * ITEMSIZE[key.dtype] % VECTOR_BYTES == 0 for key in keys)

    def allocate(self, smem, mX):
        """Room for a tensor's rows; None for an absent one."""
        if mX is None:
            return None
        return smem.allocate_tensor(mX.element_type, cute.make_layout(self.size), byte_alignment=VECTOR_BYTES)

    @cute.jit
    def fetch(self, sX: cute.Tensor, address: Int64, rows: Int32):
        """Start copying the first ``rows`` rows from an address."""
        dtype, count, tidx = sX.element_type, rows * self.tile.n, cute.arch.thread_idx()[0]
        size = dtype.width // 8
        vec = VECTOR_BYTES // size
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=8 * VECTOR_BYTES)
        for i in cutlass.range_constexpr(-(-self.size // (vec * self.tile.threads))):
            place = (i * self.tile.threads + tidx) * vec
            if place + vec <= count:
                gX = gmem_vector(dtype, address + Int64(place) * size, vec)
                cute.copy(atom, gX, self._vector(sX, place, gX.layout))
        place = count // vec * vec + tidx
        if place < count:  # after the last whole vector of all
            sX[place] = gmem_elements(sX.element_type, address + Int64(place) * size, 1)[0]

    @cute.jit
    def send(self, sX: cute.Tensor, address: Int64, rows: Int32):
        """Store the first ``rows`` rows at an address."""
        dtype, count, tidx = sX.element_type, rows * self.tile.n, cute.arch.thread_idx()[0]
        size = dtype.width // 8
        vec = VECTOR_BYTES // size
        for i in cutlass.range_constexpr(-(-self.size // (vec * self.tile.threads))):
            place = (i * self.tile.threads + tidx) * vec
            if place + vec <= count:
                rX = fragment(dtype, vec)
                cute.autovec_copy(self._vector(sX, place, rX.layout), rX)
                store(rX, address + Int64(place) * size, True)
        place = count // vec * vec + tidx
        if place < count:
            gmem_elements(sX.element_type, address + Int64(place) * size, 1)[0] = sX[place]

    def _vector(self, sX, place, layout):
        pointer = cute.make_ptr(
            sX.element_type, (sX.iterator + place).toint(), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES
        )
        return cute.make_tensor(pointer, layout)

    @cute.jit
    def read(
        self, sX: cute.Tensor, local: Int32, column: Int32, inside: cutlass.Constexpr, empty: cutlass.Constexpr = 0
    ):
        """An element of a row, in registers; ``empty`` past the row's end. ``inside``: whether the column is inside."""
        rX = fragment(sX.element_type, 1, empty)
        if cutlass.const_expr(inside):
            rX[0] = sX[local * self.tile.n + column]
        elif column < self.tile.n:
            rX[0] = sX[local * self.tile.n + column]
        return rX

    @cute.jit
    def write(self, rX: cute.Tensor, sX: cute.Tensor, local: Int32, column: Int32, inside: cutlass.Constexpr):
        """Put an element of a row in its place."""
        if cutlass.const_expr(inside):
            sX[local * self.tile.n + column] = rX[0]
        elif column < self.tile.n:
            sX[local * self.tile.n + column] = rX[0]
