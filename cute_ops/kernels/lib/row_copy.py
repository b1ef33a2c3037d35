"""Loads and stores of a thread's vectors of a row, and of tensors with one number per row."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.block_store import BlockRow, BlockStore
from cute_ops.kernels.lib.column_params import column_vectors
from cute_ops.kernels.lib.copy import (
    fetch_ahead,
    fragment,
    gmem_elements,
    load,
    load_first_if,
    load_if,
    load_inside,
    narrow,
    store,
    store_if,
    store_masked,
    trim,
)
from cute_ops.kernels.lib.row_layout import element_address, row_address

# Vectors of a row from which on its ends are stored by pieces: in shorter rows finding them takes longer.
PIECES_FROM = 32


@cute.jit
def load_tails(held: cutlass.Constexpr, first: cutlass.Constexpr, tile: cutlass.Constexpr, edge: cutlass.Constexpr):
    """Load the vectors that :meth:`RowTile.edge` does not allow to load whole, element by element, in one branch;
    ``held``: (a thread's vectors, the row) of each input.
    """
    bound, tail = edge
    if const_expr(tile.v.masked):
        if tail:
            _each_tail(held, first, tile, bound)


def _each_tail(held, first, tile, bound):
    for vectors, gRow in held:
        for k, rX in enumerate(vectors):
            if tile.ends_outside(k):
                inside = (first[k] >= bound) & (first[k] < tile.n)
                load_first_if(inside, rX, gRow.at(first[k]), tile.n - first[k])


class Coordinate(NamedTuple):
    """Which of ``count`` rows a thread works on: as thread ``t`` of those of its CTA, the CTA ``rank`` of its cluster,
    on the vectors from the columns ``first`` on.
    """

    row: Any
    count: Any
    t: Any
    rank: Any
    first: list

    @property
    def valid(self):
        """Whether the row exists."""
        return self.row < self.count


class Row(NamedTuple):
    """A row that starts anywhere, by its byte address."""

    element_type: Any
    address: Any

    @classmethod
    def of(cls, mX, key, row, n):
        """A row of a tensor with n elements in each."""
        return cls(mX.element_type, row_address(mX, key, row, n))

    def at(self, column):
        """Byte address of an element."""
        return self.address + Int64(column) * (self.element_type.width // 8)


class RowAccess:
    """Loads and stores of the vectors that a :class:`RowTile` gives a thread, by their addresses: rows start anywhere.
    ``empty`` is the value of elements outside a row, neutral in the kernel's reduction.
    """

    def __init__(self, variant, tile, empty=0):
        self.variant = variant
        self.tile = tile
        self.n = tile.n
        self.empty = empty

    def coord(self, row, count, t, rank):
        return Coordinate(row, count, t, rank, self.tile.columns(t, rank, row))

    def row(self, mX, name, row):
        """A row of a tensor."""
        return Row.of(mX, self.variant.tensors[name], row, self.n)

    def rows(self, tensors, names, row):
        """A row of each of several tensors, one after another: an address is computed where its loads are."""
        return (self.row(mX, name, row) for mX, name in zip(tensors, names))

    def fetch_ahead(self, rows, coord, predicate):
        """Prefetch this thread's vectors of rows that exist to L2."""
        for gRow in rows:
            for start in coord.first:
                fetch_ahead(gRow.at(start), predicate & (start >= 0) & (start < self.n))

    def readable(self, coord):
        """The place with a row that may be read: past the last row it is the last one again, so that no load depends on
        a condition, except where rows start anywhere in a vector.
        """
        return coord if self.tile.v.shifted else coord._replace(row=cutlass.min(coord.row, coord.count - 1))

    def load(self, rows, coord, predicate=None):
        """This thread's vectors of each of some rows, all in flight together; ``empty`` outside them. Without a
        predicate those rows that exist are loaded, and may be taken at the :meth:`readable` place.
        """
        held, (bound, tail) = [], self.tile.edge(coord.row, coord.count)
        valid = coord.valid if self.tile.v.shifted else True
        for gRow in rows:
            vectors = [fragment(gRow.element_type, self.tile.vec, self.empty) for _ in coord.first]
            if predicate is None:
                self._load(vectors, gRow, coord.first, bound, valid)
            else:
                self._load_if(predicate, vectors, gRow, coord.first, bound)
            held.append((vectors, gRow))
        if self.tile.v.masked:
            load_tails(held, coord.first, self.tile, (bound, tail & (valid if predicate is None else predicate)))
        return [vectors for vectors, _ in held]

    @cute.jit
    def _load_if(self, predicate: Boolean, vectors: cutlass.Constexpr, gRow, first: cutlass.Constexpr, bound):
        if predicate:
            self._load(vectors, gRow, first, bound, True)

    def _load(self, vectors, gRow, first, bound, predicate):
        for k, rX in enumerate(vectors):
            if self.tile.v.shifted or self.tile.ends_outside(k):
                load_if(predicate & self.tile.predicate(k, first[k], bound), rX, gRow.at(first[k]))
            else:
                load(rX, gRow.at(first[k]))

    def columns(self, mWeight, mBias, coord, ks=None):
        """(weight, bias) at the columns of each of this thread's vectors, or of some of them; None if absent."""
        ks = range(self.tile.per_thread) if ks is None else ks
        loaded = [
            [None] * len(ks) if m is None else column_vectors(m, self.variant.tensors[name], self.tile, coord.first, ks)
            for m, name in ((mWeight, "weight"), (mBias, "bias"))
        ]
        return list(zip(*loaded))

    def trim(self, rX, k, coord):
        """Overwrite a loaded vector's elements of neighbouring rows with ``empty``."""
        if self.tile.predicated(k):
            trim(rX, coord.first[k], Int32(self.n), self.empty)

    def allocate(self, smem, tensors, names):
        """Shared memory through which the CTA's rows of some outputs are stored, if these are short and unaligned."""
        self.block = BlockStore.of(self.tile, [self.variant.tensors[name] for name in names])
        return [self.block.allocate(smem, mX.element_type) for mX in tensors] if self.block else []

    def targets(self, rows, blocks):
        """Where :meth:`store` is to put these rows, one of each output."""
        local = cute.arch.thread_idx()[0] // self.tile.threads_per_row
        rows = [*rows]
        return [self.block.row(e, gRow.element_type, local) for e, gRow in zip(blocks, rows)] or rows

    def flush(self, blocks, rows, coord):
        """Store what is in shared memory once a thread has put all of its row there; ``rows(i)``: of the outputs."""
        first = coord.row - cute.arch.thread_idx()[0] // self.tile.threads_per_row
        for elements, gRow in zip(blocks, rows(first) if blocks else ()):
            self.block(elements, gRow.address, coord.count - first)

    def store(self, gRow, rX, coord, k, predicate=None):
        """Store this thread's k-th vector of a row; by default only if the row exists."""
        if isinstance(gRow, BlockRow):
            self.block.put(rX, gRow, coord.first[k], k)
            return
        predicate = coord.valid if predicate is None else predicate
        first, address = coord.first[k], gRow.at(coord.first[k])
        end = Int32(self.n) if predicate is True else cutlass.select_(predicate, Int32(self.n), Int32(0))
        if self.tile.partial(k):
            store_masked(rX, address, first, end, pieces=self.n >= PIECES_FROM * self.tile.vec)
        elif self.tile.starts_outside(k):
            store_if(self.tile.inside(k, first, end), rX, address)
        elif self.tile.ends_outside(k) or (self.tile.rows > 1 and predicate is not True):
            store_if(first < end, rX, address)
        else:
            store(rX, address)


class VectorAccess:
    """Loads and stores of single vectors, for threads that walk along rows. ``empty`` is the value of elements that are
    not read; ``shared`` loads see what other SMs wrote after a line came into L1.
    """

    def __init__(self, v, empty=0, shared=False):
        self.v, self.empty, self.shared = v, empty, shared

    def load(self, gRow, first, readable, predicate=None):
        """The vector of a row from column ``first`` on, by default if some of it lies in the row; its elements of
        neighbouring rows are undefined. ``readable``: columns of the row, and of the next one, that may be read.
        """
        rX = fragment(gRow.element_type, self.v.vec)
        if predicate is None and not self.v.masked:
            load(rX, gRow.at(first), self.shared)
            return rX
        rX.fill(self.empty)
        if self.v.masked:
            inside = first + self.v.vec > 0 if predicate is None else predicate
            load_inside(inside, rX, gRow.at(first), readable - first, self.shared)
        else:
            load_if(predicate, rX, gRow.at(first), self.shared)
        return rX

    def read(self, gRow, first, n, readable):
        """The vector of a row from column ``first`` on, in fp32, ``empty`` outside the row."""
        rX = self.load(gRow, first, readable)
        self.trim(rX, first, n)
        return rX.load().to(Float32)

    def trim(self, rX, first, n):
        """Overwrite a vector's elements outside the row with ``empty``."""
        if self.v.masked:
            trim(rX, first, n, self.empty)

    def write(self, gRow, x, first, n):
        """Round an fp32 vector and store its elements that lie in the row."""
        self.store(gRow, narrow(x, gRow.element_type, self.v.vec), first, n)

    def store(self, gRow, rX, first, n):
        """Store the elements of a vector that lie in the row."""
        if self.v.masked:
            store_masked(rX, gRow.at(first), first, n)
        else:
            store(rX, gRow.at(first))


@cute.jit
def number_or(mX: cute.Tensor, key: cutlass.Constexpr, row: Int64, valid: Boolean, other: cutlass.Constexpr):
    """A row's number, or ``other`` if the row does not exist."""
    rX = fragment(mX.element_type, 1, other)
    if valid:
        rX[0] = load_number(mX, key, row)
    return rX[0]


def load_number(mX, key, row):
    """A row's number in a tensor with one per row."""
    return gmem_elements(mX.element_type, element_address(mX, key, row), 1)[0]


def store_number(value, mX, key, row):
    gmem_elements(mX.element_type, element_address(mX, key, row), 1)[0] = value.to(mX.element_type)


@cute.jit
def store_number_if(valid: Boolean, value: Float32, address: Int64):
    if valid:
        gmem_elements(Float32, address, 1)[0] = value
