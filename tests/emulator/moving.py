"""Kernels that move words between registers, whose machine code tests run on the CPU."""

import os
from types import SimpleNamespace

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.lib.column_params import column_vectors
from cute_ops.kernels.lib.copy import access_bits, compiler_barrier_value, fragment, load, store_masked
from cute_ops.kernels.lib.realign import bytes_past, fetch, settle, settle_all
from cute_ops.kernels.lib.row_config import RowConfig
from cute_ops.kernels.lib.row_layout import RowTile, Vectors

DTYPES = {4: cutlass.Float32, 2: cutlass.BFloat16, 1: cutlass.Uint8}


def compile_to_ptx(kernel, folder):
    arguments = [cute.runtime.make_fake_compact_tensor(kernel.dtype, (1 << 16,), assumed_align=16) for _ in range(2)]
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
    return cute.compile(kernel, *arguments, Int64(0), options=options, no_jit_engine=True).__ptx__


class Moving:
    """out = the vectors that :meth:`move` makes of x and a number, those of one call of it side by side."""

    threads = 32

    @cute.kernel
    def kernel(self, gX: cute.Tensor, gOut: cute.Tensor, number: Int64):
        thread, _, _ = cute.arch.thread_idx()
        found = self.move(gX, number, thread)
        for i in cutlass.range_constexpr(len(found)):
            vec = cute.size(found[i])
            place = (gOut.iterator + (i * self.threads + thread) * vec).toint()
            align = access_bits(self.dtype, vec) // 8
            pointer = cute.make_ptr(self.dtype, place, cute.AddressSpace.gmem, assumed_align=align)
            # Read as one vector: branches before it become a choice between vectors.
            cute.make_tensor(pointer, cute.make_layout(vec)).store(found[i].load())

    @cute.jit
    def __call__(self, gX: cute.Tensor, gOut: cute.Tensor, number: Int64):
        self.kernel(gX, gOut, number).launch(grid=[1, 1, 1], block=[self.threads, 1, 1])


class Halves(Moving):
    """The first two of four words in thread 0, the second two in others.

    The smallest kernel that libNVVM gets wrong: it makes one of the two branches, which differ in the words alone, so
    that every thread gets the second two.

    Args:
        hidden: whether each word is moved by an instruction that libNVVM does not look into.
    """

    dtype = cutlass.Int32

    def __init__(self, hidden):
        self.hidden = hidden

    @cute.jit
    def move(self, gX, number, thread):
        rX, rOut = fragment(self.dtype, 4), fragment(self.dtype, 2)
        rX.store(cute.make_tensor(gX.iterator, cute.make_layout(4)).load())
        if thread == 0:
            self._take(rX, rOut, 0)
        else:
            self._take(rX, rOut, 2)
        return [rOut]

    def _take(self, rX, rOut, start):
        for i in range(2):
            rOut[i] = compiler_barrier_value(rX[start + i]) if self.hidden else rX[start + i]


class Columns(Moving):
    """A weight's elements for the columns of a row, whose number decides where in a vector of memory it starts."""

    def __init__(self, rows, weights, n, threads):
        row_bytes = n * ITEMSIZE[rows]
        x = SimpleNamespace(name="x", dtype=rows, align=16, row_align=min(row_bytes & -row_bytes, 16), layout="flat")
        self.vectors = Vectors(SimpleNamespace(tensors={"x": x}), ["x"], n)
        self.tile = RowTile(self.vectors, RowConfig("rows", threads, threads))
        self.key = SimpleNamespace(dtype=weights, align=16)
        self.dtype, self.threads = DTYPES[ITEMSIZE[weights]], threads

    def move(self, gX, row, thread):
        shift = self.vectors.shift(row, self.tile.n)
        first = [self.tile.first(thread, 0, k, shift) for k in range(self.tile.per_thread)]
        return column_vectors(gX, self.key, self.tile, first)


class Windows(Moving):
    """Two of each thread's vectors of a last row, which starts at any element: by :func:`settle` and by
    :func:`settle_all`, then all that begin in the first of them, whose places the compiler knows.
    """

    def __init__(self, itemsize, vec, n):
        self.dtype, self.vec, self.n = DTYPES[itemsize], vec, n

    def move(self, gX, start, thread):
        itemsize = self.dtype.width // 8
        address = gX.iterator.toint() + start * itemsize
        past, pairs = bytes_past(address, self.dtype, self.vec), []
        for i in range(2):
            first = (i * self.threads + thread) * self.vec
            pairs.append(cute.make_rmem_tensor((2 * self.vec,), self.dtype))
            begin, bound = first - past // itemsize, Int32(self.n - self.vec + 1)
            fetch(pairs[i], address - past + Int64(first) * itemsize, begin, Int32(self.n), bound, True)
        known = [settle(pairs[0], begin * itemsize) for begin in range(self.vec)]
        return [*(settle(rPair, past) for rPair in pairs), *settle_all(pairs, past), *known]


class Ends(Moving):
    """Those of a thread's elements of x that lie in a row of n, which starts ``number`` elements before x."""

    def __init__(self, itemsize, vec, n):
        self.dtype, self.vec, self.n = DTYPES[itemsize], vec, n

    @cute.kernel
    def kernel(self, gX: cute.Tensor, gOut: cute.Tensor, number: Int64):
        thread, _, _ = cute.arch.thread_idx()
        rX, place = fragment(self.dtype, self.vec), Int64(thread) * (self.vec * self.dtype.width // 8)
        load(rX, gX.iterator.toint() + place)
        first = Int32(number) + thread * self.vec
        store_masked(rX, gOut.iterator.toint() + place, first, Int32(self.n), pieces=True)
