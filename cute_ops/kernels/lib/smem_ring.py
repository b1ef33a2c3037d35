"""A ring of row slots in shared memory that keeps the next rows' loads in flight.

Each thread copies the vectors that it reads itself, so its own wait suffices and no barrier is needed.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.lib.copy import (
    BITS,
    WORD_BITS,
    access_bits,
    compiler_barrier_value,
    fill_outside,
    fragment,
    gmem_elements,
    gmem_vector,
    load,
)
from cute_ops.kernels.lib.row_layout import row_address, vector_address


class Source(NamedTuple):
    """A row that a thread copies to the ring.

    Attributes:
        slots: the tensor's slots.
        address: of the row's first element, in bytes.
        first: the columns that the thread's vectors begin with.
        valid: whether the row exists.
    """

    slots: Any
    address: Any
    first: Any
    valid: Any


class RowRing:
    """``stages`` slots for each of the named row tensors.

    Shared memory: ``stages * threads * per_thread * vec`` elements of each tensor, and ``beyond`` vectors. Vectors are
    ordered by access, then by thread, so that neighbouring threads touch neighbouring 16 bytes.
    """

    def __init__(self, tile, keys, stages, beyond=0):
        self.tile = tile
        self.keys = keys
        self.stages = stages
        elements = (stages * tile.threads * tile.per_thread + beyond) * tile.vec
        self.offsets, size = {}, 0
        for key in keys:
            self.offsets[key.name] = size
            size += -(-elements * ITEMSIZE[key.dtype] // 16) * 16
        self.bytes = size

    def view(self, base, mX, name):
        """The slots of a tensor: (elements of an access, accesses, thread, vector, stage)."""
        dtype, vec, threads = mX.element_type, self.tile.vec, self.tile.threads
        width = access_bits(dtype, vec) // dtype.width
        count = vec // width
        layout = cute.make_layout(
            (width, count, threads, self.tile.per_thread, self.stages),
            stride=(1, threads * width, width, threads * vec, threads * vec * self.tile.per_thread),
        )
        return cute.make_tensor(cute.recast_ptr(base + self.offsets[name], dtype=dtype), layout)

    def allocate(self, smem, tensors, empty=0):
        """The ring's memory, and the slots of each tensor, None for an absent one."""
        base, keys = smem.allocate(self.bytes, 16), iter(self.keys)
        slots = [None if mX is None else self.view(base, mX, next(keys).name) for mX in tensors]
        for sX in slots:
            if sX is not None:
                self.clear(sX, empty)
        return base, slots

    @cute.jit
    def clear(self, sX: cute.Tensor, value: cutlass.Constexpr = 0):
        """Fill the vectors wholly past the row's end, which no copy writes."""
        tidx = cute.arch.thread_idx()[0]
        for k in cutlass.range_constexpr(self.tile.per_thread):
            if const_expr(self.tile.ends_outside(k)):
                for stage in cutlass.range_constexpr(self.stages):
                    sX[None, None, tidx, k, stage].fill(value)

    def sources(self, tensors, slots, row, first, count, valid=None):
        """A row of each tensor that is present, of ``count`` rows, one after another: an address is computed where its
        copies are. ``valid``: whether the row is read, by default if it exists.
        """
        present = [(mX, sX) for mX, sX in zip(tensors, slots) if mX is not None]
        return (
            Source(sX, row_address(mX, key, row, self.tile.n), first, row < count if valid is None else valid)
            for (mX, sX), key in zip(present, self.keys)
        )

    def fetch_rows(self, sources, edge, stage):
        """Start copying this thread's vectors of some rows; ``edge``: :meth:`RowTile.edge`. The caller commits the
        group.
        """
        held = []
        for source in sources:
            self.fetch(source, edge[0], stage)
            held.append(source)
        self.fetch_tails(held, edge, stage)

    @cute.jit
    def fetch(self, source: cutlass.Constexpr, bound, stage: Int32, ks: cutlass.Constexpr = None):
        """Start copying this thread's vectors of a row, or some of them, that begin before ``bound``, from
        :meth:`RowTile.edge`. :meth:`fetch_tails` copies the others.
        """
        sX, address, first, valid = source
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.tile.v.shifted):
            # Computed once, not again under each vector's condition.
            address, tidx = compiler_barrier_value(address), compiler_barrier_value(tidx)
        for k in range(self.tile.per_thread) if const_expr(ks is None) else ks:
            if valid and self.tile.predicate(k, first[k], bound):
                self.copy(vector_address(sX, address, self.tile, first[k], k), sX[None, None, tidx, k, stage])

    @cute.jit
    def fetch_tails(self, held: cutlass.Constexpr, edge: cutlass.Constexpr, stage: Int32, ks: cutlass.Constexpr = None):
        """Start copying the vectors that :meth:`RowTile.edge` does not allow to load whole, of a row of each input.

        Copies of a whole vector of which all but some bytes are zeros (cp.async with a size) would need no branch, but
        compute-sanitizer takes them for whole ones.
        """
        bound, tail = edge
        ends = [k for k in (range(self.tile.per_thread) if ks is None else ks) if self.tile.ends_outside(k)]
        if const_expr(self.tile.v.masked and len(ends) > 0):
            if tail:
                self._each_tail(held, bound, stage, ends)

    def _each_tail(self, held, bound, stage, ks):
        for sX, address, first, valid in held:
            # A row has one such vector: of this thread's, it can be the last that begins inside the row.
            k, column = ks[0], first[ks[0]]
            for other in ks[1:]:
                inside = first[other] < self.tile.n
                k, column = cutlass.select_(inside, Int32(other), k), cutlass.select_(inside, first[other], column)
            source = address + Int64(column) * (sX.element_type.width // 8)
            target = sX[None, None, cute.arch.thread_idx()[0], k, stage]
            here = valid & (column >= bound) & (column < self.tile.n)
            self.copy_first(here, source, target, self.tile.n - column)

    @cute.jit
    def copy_first(self, valid: Boolean, source: Int64, target: cute.Tensor, room: Int32):
        """Start copying the first ``room`` elements of a vector, which has more, if ``valid``: whole words, then the
        elements of a word that is not whole. The others stay as they are.
        """
        dtype, vec = target.element_type, self.tile.vec
        word = max(WORD_BITS // dtype.width, 1)
        # Computed once, not again for each word.
        source, room = compiler_barrier_value(source), compiler_barrier_value(Int32(room))
        place = cute.make_ptr(dtype, compiler_barrier_value(target.iterator.toint()), cute.AddressSpace.smem)
        sX = cute.make_tensor(place, target.layout)
        if valid:
            for j in cutlass.range_constexpr(0, vec - vec % word, word):
                if j + word <= room:
                    self._copy_word(source, sX, j, word)
            for i in cutlass.range_constexpr(min(word, vec) - 1):
                if room // word * word + i < room:
                    self._copy_element(source, sX, room // word * word + i)

    def _copy_word(self, source, sX, j, word):
        dtype = sX.element_type
        place = self._place(sX, j).toint()
        aligned = cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=word * dtype.width // 8)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.ALWAYS), dtype, num_bits_per_copy=word * dtype.width)
        gWord = gmem_vector(dtype, source + j * (dtype.width // 8), word)
        cute.copy(atom, gWord, cute.make_tensor(aligned, gWord.layout))

    def _copy_element(self, source, sX, i):
        """Without cp.async, which moves no less than a word."""
        bits = BITS[min(sX.element_type.width, WORD_BITS)]
        gX = gmem_elements(bits, source, self.tile.vec)
        sBits = cute.make_tensor(cute.recast_ptr(self._place(sX, i), dtype=bits), cute.make_layout(1))
        sBits[0] = cute.arch.load(gX.iterator + i, bits, sem="relaxed", scope="cta")

    def _place(self, sX, i):
        width = cute.size(sX, mode=[0])
        return sX.iterator + cute.crd2idx((i % width, i // width), sX.layout)

    def copy(self, source, target):
        """Start copying a vector."""
        dtype, vec = target.element_type, self.tile.vec
        bits = access_bits(dtype, vec)
        if bits >= 32:
            mode = LoadCacheMode.GLOBAL if bits == 128 else LoadCacheMode.ALWAYS
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), dtype, num_bits_per_copy=bits)
            cute.copy(atom, gmem_vector(dtype, source, vec), target)
        else:
            # Asynchronous copies move no less than 4 bytes.
            rX = fragment(dtype, vec)
            load(rX, source)
            cute.autovec_copy(cute.make_tensor(rX.iterator, target.layout.shape), target)

    @cute.jit
    def trim(
        self, slots: cutlass.Constexpr, k: cutlass.Constexpr, stage: Int32, first: Int32, value: cutlass.Constexpr = 0
    ):
        """Overwrite the elements of neighbouring rows in this thread's k-th vector of some tensors."""
        if first < 0 or first + self.tile.vec > self.tile.n:
            for sX in slots:
                sV = sX[None, None, cute.arch.thread_idx()[0], k, stage]
                # The address is computed once, not again for every element.
                place = cute.make_ptr(
                    sX.element_type, compiler_barrier_value(sV.iterator.toint()), cute.AddressSpace.smem
                )
                fill_outside(cute.make_tensor(place, cute.coalesce(sV.layout)), first, Int32(self.tile.n), value)

    def read(self, sX, k, stage):
        """This thread's k-th vector of a slot, in registers."""
        sV = sX[None, None, cute.arch.thread_idx()[0], k, stage]
        rX = fragment(sX.element_type, self.tile.vec)
        cute.autovec_copy(sV, cute.make_tensor(rX.iterator, cute.make_layout(sV.shape)))
        return rX
