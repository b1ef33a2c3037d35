"""Parts of attention by ``mma.sync``: products of one warp, tiles by ``cp.async``, results of rows.

A tile in shared memory has rows of the tensor's elements, padded so that eight neighbouring rows lie in different
banks. A warp multiplies 16 rows, or several times 16, which take each part of the second operand that it reads.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.config import MMA_ROWS, PADDING
from cute_ops.kernels.attention.pages import copy_or_clear
from cute_ops.kernels.attention.registers import store_packed
from cute_ops.kernels.attention.tensors import address_of
from cute_ops.kernels.attention.tiles import Place
from cute_ops.kernels.lib.copy import fragment, store

VECTOR = VECTOR_BYTES // 2  # elements
STEP = 16  # elements of both operands that an instruction multiplies


def queries_fit(tiles_m, d, dv):
    """Whether registers hold so many tiles of 16 queries beside their sums of values."""
    return tiles_m * (d + 2 * dv) <= 512


def mma_of_warp(dtype):
    """Of 16 rows and 16 columns at a time, in two instructions."""
    return cute.make_tiled_mma(
        MmaF16BF16Op(dtype, Float32, (MMA_ROWS, 8, STEP)), (1, 1, 1), permutation_mnk=(MMA_ROWS, STEP, STEP)
    )


def padded_rows(smem, dtype, rows, width, most=0):
    """Rows in shared memory, (rows, width), with room for ``most`` elements where that is more."""
    pitch = max(width, most) + PADDING
    whole = smem.allocate_tensor(dtype, cute.make_layout(rows * pitch), VECTOR_BYTES)
    return cute.make_tensor(whole.iterator, cute.make_layout((rows, width), stride=(pitch, 1)))


def padded_stages(smem, dtype, rows, width, stages=1):
    """Stages of a tile in shared memory, (rows, width, stages)."""
    pitch = width + PADDING
    whole = smem.allocate_tensor(dtype, cute.make_layout(rows * pitch * stages), VECTOR_BYTES)
    layout = cute.make_layout((rows, width, stages), stride=(pitch, 1, rows * pitch))
    return cute.make_tensor(whole.iterator, layout)


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class Rows:
    """16 rows in shared memory as the first operand of products: ``rows(k)`` gives 16 elements of each.

    Attributes:
        reader, source, rX: loads from shared memory, what they load, registers.
        kept: whether registers hold all of them; else each use reads shared memory.
    """

    reader: Any
    source: Any
    rX: Any
    kept: bool

    @classmethod
    def of(cls, mma, sX, lane, kept, across=False):
        """Of shared memory, (16, width); ``across``: whether columns are contiguous."""
        atom = cute.make_copy_atom(LdMatrix8x8x16bOp(across, 4), sX.element_type)
        reader = cute.make_tiled_copy_A(atom, mma).get_slice(lane)
        rows = cls(reader, reader.partition_S(sX), mma.make_fragment_A(mma.get_slice(lane).partition_A(sX)), kept)
        if kept:
            for k in range(cute.size(rows.rX, mode=[2])):
                rows.read(k)
        return rows

    def __call__(self, k):
        if not self.kept:
            self.read(k)
        return self.rX[None, None, k]

    def read(self, k):
        cute.copy(self.reader, self.source[None, None, k], self.reader.retile(self.rX)[None, None, k])


@dataclass(frozen=True)
class Operand:
    """Stages of a tile in shared memory as the second operand of products.

    Attributes:
        mma: of a warp.
        reader, source, rX: loads from shared memory, what they load, registers.
    """

    mma: Any
    reader: Any
    source: Any
    rX: Any

    @classmethod
    def of(cls, mma, sX, lane, across):
        """Of shared memory, (rows, width, stages). ``across``: whether the columns of a product are those of the tile,
        and its rows are summed over; else its columns are the tile's rows.
        """
        if across:
            sX = cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))
        atom = cute.make_copy_atom(LdMatrix8x8x16bOp(across, 4), sX.element_type)
        reader = cute.make_tiled_copy_B(atom, mma).get_slice(lane)
        rX = mma.make_fragment_B(mma.get_slice(lane).partition_B(sX[None, None, 0]))
        return cls(mma, reader, reader.partition_S(sX), rX)

    @property
    def steps(self):
        """Over what is summed over."""
        return cute.size(self.rX, mode=[2])

    def read(self, k, stage):
        """The 16 elements of a step in registers: ``(mma, n)``."""
        cute.copy(self.reader, self.source[None, None, k, stage], self.reader.retile(self.rX)[None, None, k])
        return self.rX[None, None, k]

    def add_to(self, sums, first, stage):
        """Add products to each of some sums; ``first(i, k)``: 16 elements of the rows of the i-th one."""
        for k in range(self.steps):
            rX = self.read(k, stage)
            for i, rSum in enumerate(sums):
                cute.gemm(self.mma, rSum, first(i, k), rX, rSum)


class Source(NamedTuple):
    """The rows of a head in memory.

    Attributes:
        m: the tensor (seqlen, d, heads, batch).
        head, batch: which one.
        start: the row in the tensor that is the sequence's first.
        length: rows of the sequence.
    """

    m: Any
    head: Any
    batch: Any
    start: Any
    length: Any

    def address(self, row, column=0):
        return address_of(self.m, (self.start + row, column, self.head, self.batch))


def source_of(m, head, batch, rows, length):
    """``rows``: of a packed sequence, its first token and how many it has; else None, and ``length`` counts."""
    if rows is None:
        return Source(m, head, batch, Int32(0), length)
    return Source(m, head, Int32(0), *rows)


@cute.jit
def load_rows(source: cutlass.Constexpr, sX, first, tidx, threads: cutlass.Constexpr):
    """Start to copy rows from ``first`` on to shared memory, (rows, width), with all threads of a CTA; zeros behind the
    last one.
    """
    if first + cute.size(sX, mode=[0]) <= source.length:
        _load_rows(source, sX, first, tidx, threads, True)
    else:
        _load_rows(source, sX, first, tidx, threads, False)


@cute.jit
def _load_rows(source: cutlass.Constexpr, sX, first, tidx, threads: cutlass.Constexpr, whole: cutlass.Constexpr):
    rows, width = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    across, pitch = width // VECTOR, sX.stride[0] * 2
    readable, row_bytes = source.m.iterator.toint(), Int64(source.m.stride[0]) * 2
    # A thread has the same column each time, so many rows further down; or else it has any.
    regular, down = threads % across == 0, threads // across
    row, column = tidx // across, tidx % across
    target, place = (
        sX.iterator.toint() + (row * pitch + column * VECTOR_BYTES),
        source.address(first + row, column * VECTOR),
    )
    for i in cutlass.range_constexpr(-(-rows * across // threads)):
        offset = i * down * pitch
        if const_expr(not regular):
            row, column = (i * threads + tidx) // across, (i * threads + tidx) % across
            target, offset = sX.iterator.toint() + (row * pitch + column * VECTOR_BYTES), 0
            place = source.address(first + row, column * VECTOR)
        elif const_expr(i > 0):
            row, place = row + down, place + row_bytes * down
        there = None if const_expr(whole) else first + row < source.length
        if const_expr((i + 1) * threads <= rows * across):
            copy_or_clear((target, offset), place, readable, there)
        elif i * threads + tidx < rows * across:
            copy_or_clear((target, offset), place, readable, there)


@cute.jit
def following(index, end, step: cutlass.Constexpr, some: cutlass.Constexpr):
    """The next of numbers in steps of 1 or -1 up to ``end`` for which ``some(number)`` is true, of all if it is None;
    one behind ``end`` if there is none.
    """
    index = index + step
    if const_expr(some is not None):
        skips = Boolean((end - index) * step >= 0)
        while skips:
            skips = Boolean(False)
            if ~some(index):
                index = index + step
                skips = (end - index) * step >= 0
    return index


def place_of_warp(lane, tile, first, sizes, keys_down=False):
    """The place of a thread of a warp with 16 rows. ``first``: the warp's first row and column, and its columns."""
    row, column, columns = first
    row = row + lane // 4
    offsets = tuple(8 * (c // 2) + c % 2 for c in range(columns // 4))
    return Place(tile, (row, row + 8), column + lane % 4 * 2, offsets, keys_down, sizes)


def accumulators(mma, columns, value=None):
    """A thread's part of 16 rows and so many columns in float32."""
    rX = cute.make_rmem_tensor(mma.partition_shape_C((MMA_ROWS, columns)), Float32)
    if value is not None:
        rX.fill(value)
    return rX


def halves(columns, dtype):
    """A thread's part of 16 rows and so many columns in 16 bits, as the first operand of a product: accumulators of two
    blocks of 8 columns are, in their order, its part of 16.
    """
    return cute.make_rmem_tensor(((2, 2, 2), 1, columns // STEP), dtype)


def put_rows(rX, sX, lane):
    """Write a warp's 16 rows, :func:`halves`, to shared memory."""
    pairs, pitch = cute.recast_tensor(rX, Int32), sX.stride[0] // 2
    words = cute.make_ptr(Int32, sX.iterator.toint(), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    for i in range(cute.size(pairs)):
        (words + ((lane // 4 + 8 * (i % 2)) * pitch + 4 * (i // 2) + lane % 4)).store(pairs[i])


@cute.jit
def store_rows(rX, sX, source: cutlass.Constexpr, first, lane, dtype: cutlass.Constexpr):
    """Store a warp's 16 rows from ``first`` on, by way of their place in shared memory, which no other warp reads."""
    width = cute.size(rX) * WARP // MMA_ROWS
    pitch, across, rHalves = sX.stride[0] * 2, width // VECTOR, halves(width, dtype)
    store_packed(rX, rHalves)
    cute.arch.sync_warp()
    put_rows(rHalves, sX, lane)
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(-(-MMA_ROWS * across // WARP)):
        row, column = (i * WARP + lane) // across, (i * WARP + lane) % across * VECTOR
        if (i * WARP + lane < MMA_ROWS * across) & (first + row < source.length):
            rOut = fragment(dtype, VECTOR)
            place = sX.iterator + (row * (pitch // 2) + column)
            cute.autovec_copy(cute.make_tensor(place.align(VECTOR_BYTES), rOut.layout), rOut)
            store(rOut, source.address(first + row, column))
