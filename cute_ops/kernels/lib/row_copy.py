"""How a thread reaches its vectors of a row, and the numbers that a row has one of."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cute_ops.kernels.lib.copy import (
    fetch_ahead,
    fragment,
    gmem_elements,
    load,
    load_first_if,
    load_if,
    store,
    store_if,
    store_masked,
    trim,
)
from cute_ops.kernels.lib.row_layout import element_address, row_address, row_count


@cute.jit
def load_tails(held: cutlass.Constexpr, first: cutlass.Constexpr, tile: cutlass.Constexpr, edge: cutlass.Constexpr):
    """Load the vectors that :meth:`RowTile.edge` leaves of a row of each input, element by element, by one branch.

    Args:
        held: a thread's vectors of each input, and the address of its row.
        first: the columns that these vectors begin with.
    """
    bound, tail = edge
    if const_expr(tile.v.masked):
        if tail:
            _each_tail(held, first, tile, bound)


def _each_tail(held, first, tile, bound):
    for vectors, base in held:
        for k, rX in enumerate(vectors):
            if tile.ends_outside(k):
                address = base + Int64(first[k]) * (rX.element_type.width // 8)
                load_first_if((first[k] >= bound) & (first[k] < tile.n), rX, address, tile.n - first[k])


class RowAccess:
    """Loads and stores of the vectors that a :class:`RowTile` gives a thread.

    Args:
        variant: the kernel's variant.
        tile: the mapping.
        empty: what stands outside a row, the neutral element of the kernel's reduction.
    """

    def __init__(self, variant, tile, empty=0):
        self.variant = variant
        self.tile = tile
        self.n = tile.n
        self.empty = empty

    def first(self, t, rank, row):
        """First columns of this thread's vectors of a row."""
        shift = self.tile.v.shift(row, self.n)
        return [self.tile.vector(t, rank, k) * self.tile.vec - shift for k in range(self.tile.per_thread)]

    def predicated(self, k):
        """Whether some thread's k-th vector may be part inside, part outside the row."""
        return self.tile.starts_outside(k) or (self.tile.v.masked and self.tile.ends_outside(k))

    def fetch_ahead(self, mX, name, row, first, predicate):
        """Have L2 fetch this thread's vectors of a row that is there."""
        base = row_address(mX, self.variant.tensors[name], row, self.n)
        for start in first:
            inside = (start >= 0) & (start < self.n)
            fetch_ahead(base + Int64(start) * (mX.element_type.width // 8), predicate & inside)

    def load(self, inputs, names, row, first, predicate):
        """This thread's vectors of a row of each input, all on their way together; ``empty`` where the row is not
        wanted.
        """
        held = []
        bound, tail = self.tile.edge(row, row_count(inputs[0])) if inputs else (None, False)
        for mX, name in zip(inputs, names):
            base = row_address(mX, self.variant.tensors[name], row, self.n)
            vectors = [fragment(mX.element_type, self.tile.vec) for _ in first]
            for rX in vectors:
                rX.fill(self.empty)
            self._load(vectors, base, first, bound, predicate)
            held.append((vectors, base))
        if self.tile.v.masked:
            load_tails(held, first, self.tile, (bound, tail & predicate))
        return [vectors for vectors, _ in held]

    @cute.jit
    def _load(self, vectors: cutlass.Constexpr, base, first: cutlass.Constexpr, bound, predicate: Boolean):
        if predicate:
            for k in cutlass.range_constexpr(self.tile.per_thread):
                address = base + Int64(first[k]) * (vectors[k].element_type.width // 8)
                if const_expr(self.tile.v.shifted or self.tile.ends_outside(k)):
                    load_if(self.tile.predicate(k, first[k], bound), vectors[k], address)
                else:
                    load(vectors[k], address)

    def trim(self, rX, k, first):
        """Make what a loaded vector holds of the row's neighbours ``empty``."""
        if self.predicated(k):
            trim(rX, first[k], Int32(self.n), self.empty)

    def store(self, mX, name, rX, row, first, k, predicate):
        """Store this thread's k-th vector of a row that is there."""
        base = row_address(mX, self.variant.tensors[name], row, self.n)
        address = base + Int64(first[k]) * (mX.element_type.width // 8)
        end = cutlass.select_(predicate, Int32(self.n), Int32(0))
        if self.predicated(k):
            store_masked(rX, address, first[k], end)
        elif self.tile.ends_outside(k) or self.tile.rows > 1:
            store_if(first[k] < end, rX, address)
        else:
            store(rX, address)


@cute.jit
def number_or(mX: cute.Tensor, key: cutlass.Constexpr, row: Int64, valid: Boolean, other: cutlass.Constexpr):
    """A row's number where the row is there."""
    rX = cute.make_rmem_tensor((1,), mX.element_type)
    rX.fill(other)
    if valid:
        rX[0] = load_number(mX, key, row)
    return rX[0]


def load_number(mX, key, row):
    """The number that a row has in a tensor of one per row."""
    return gmem_elements(mX.element_type, element_address(mX, key, row), 1)[0]


def store_number(value, mX, key, row):
    gmem_elements(mX.element_type, element_address(mX, key, row), 1)[0] = value.to(mX.element_type)
