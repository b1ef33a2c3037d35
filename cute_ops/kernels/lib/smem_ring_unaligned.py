"""Rows that start anywhere, in shared memory: the aligned vectors that contain them, and vectors made from two.

See :mod:`cute_ops.kernels.lib.realign` for how a vector is made from two.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ops.kernels.lib.copy import access_bits, fragment, pieces, trim
from cute_ops.kernels.lib.realign import bytes_past, settle_all
from cute_ops.kernels.lib.smem_ring import RowRing


class WindowRing(RowRing):
    """One slot for each of the named row tensors, for tiles whose CTAs hold one row or a share of one.

    A vector is made from two aligned ones, the second of which another thread has copied, so the CTA meets at a barrier
    between copying and reading.
    Shared memory: as :class:`RowRing`, and one vector more of each tensor.
    """

    def __init__(self, tile, keys):
        if tile.rows != 1:
            raise ValueError(f"{tile.rows} rows share a CTA, which can hold one only")
        super().__init__(tile, keys, stages=1, beyond=1)

    def begins(self, sX, address, first):
        """The first columns of this thread's aligned vectors of a row."""
        past = bytes_past(address, sX.element_type, self.tile.vec) // (sX.element_type.width // 8)
        return [f - past for f in first]

    @cute.jit
    def fetch_last(self, sX: cute.Tensor, address: Int64, rank, valid: Boolean, bound):
        """Start copying the vector past this CTA's own, which its last thread reads too."""
        tile, dtype = self.tile, sX.element_type
        if cute.arch.thread_idx()[0] == 0:
            (begin,) = self.begins(sX, address, [Int32((rank + 1) * tile.per_thread * tile.threads * tile.vec)])
            source = address + Int64(begin) * (dtype.width // 8)
            target = self._vector(sX, tile.per_thread, Int32(0))
            if valid & (begin < bound):
                self.copy(source, target)
            self.copy_first(valid & (begin >= bound) & (begin < tile.n), source, target, tile.n - begin)

    @property
    def complete(self):
        """Whether the threads' own vectors are all vectors of the row, wherever it starts."""
        tile = self.tile
        return tile.cluster * tile.per_thread * tile.threads * tile.vec >= tile.n + tile.vec - 1

    def read_own(self, sX, address, first, k):
        """The k-th vector that this thread has copied, zero outside the row; no other thread's copy is read."""
        rX = self.read(sX, k, Int32(0))
        (begin,) = self.begins(sX, address, [first[k]])
        if k == 0 or self.tile.ends_outside(k):
            trim(rX, begin, Int32(self.tile.n))
        return rX

    def _vector(self, sX, k, t):
        """The k-th aligned vector that thread t copies."""
        dtype, vec = sX.element_type, self.tile.vec
        place = (sX.iterator + (k * self.tile.threads + t) * vec).toint()
        pointer = cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=access_bits(dtype, vec) // 8)
        return cute.make_tensor(pointer, pieces(dtype, vec))

    def read_row(self, sX, address, first, k):
        """This thread's k-th vector of a row, zero outside it."""
        vec, t = self.tile.vec, cute.arch.thread_idx()[0]
        rPair = fragment(sX.element_type, 2 * vec)
        for i in range(2):
            sV = self._vector(sX, k, t + i)
            cute.autovec_copy(sV, cute.make_tensor(rPair.iterator + i * vec, cute.make_layout(sV.shape)))
        (rX,) = settle_all([rPair], bytes_past(address, sX.element_type, vec))
        if self.tile.ends_outside(k):
            trim(rX, first[k], Int32(self.tile.n))
        return rX
