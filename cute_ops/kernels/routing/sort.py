"""The largest numbers of short rows by sorting networks: see :mod:`cute_ops.ops.routing.topk`."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import RowAccess
from cute_ops.kernels.lib.row_layout import RowTile, Vectors, clusters, row_count
from cute_ops.kernels.routing.keys import (
    LAST,
    column,
    integers,
    key,
    key_type,
    no_key,
    number,
    numbers,
    order,
    ordered_number,
)
from cute_ops.kernels.routing.results import names_of, store_results

# Of fewer numbers the comparisons that short keys save are fewer than those that tell whether they suffice.
SHORT_FROM = 4
# The larger and the smaller of two numbers, by one comparison: the compiler would take two.
_EXCHANGE = """{
.reg .pred p;
setp.gt.s64 p, {$r0}, {$r1};
selp.b64 {$w0}, {$r0}, {$r1}, p;
selp.b64 {$w1}, {$r1}, {$r0}, p;
}"""


def short_columns(tile):
    """The bits of a short key that say a column, also one before a row that is read from the vector it starts in."""
    return (1 << (tile.n + (tile.vec if tile.v.shifted else 0) - 1).bit_length()) - 1


class Network:
    """Comparisons of keys of one type, of which ``size`` stay.

    Args:
        kind: the type.
        size: k or the next power of two.
        threads_per_row: threads that share a row.
    """

    def __init__(self, kind, size, threads_per_row):
        self.kind, self.size, self.threads_per_row = kind, size, threads_per_row

    def in_order(self, keys):
        """The largest of some keys, in order."""
        keys = keys + [no_key(self.kind)] * (-len(keys) % self.size)
        lists = [self.sorted(keys[i : i + self.size]) for i in range(0, len(keys), self.size)]
        while len(lists) > 1:
            merged = [self.merged(*lists[i : i + 2]) for i in range(0, len(lists) - 1, 2)]
            lists = merged + lists[2 * len(merged) :]
        return lists[0]

    def shared(self, keys):
        """The largest of the threads that share a row, in each of them."""
        offset = 1
        while offset < self.threads_per_row:
            keys = self.merged(keys, [self.of_lane(each, offset) for each in keys])
            offset *= 2
        return keys

    def of_lane(self, key, offset):
        """The key of the lane whose number differs in one bit."""
        if self.kind is Int32:
            return cute.arch.shuffle_sync_bfly(key, offset=offset)
        upper, lower = (cute.arch.shuffle_sync_bfly(Int32(each), offset=offset) for each in (key >> 32, key & LAST))
        return (Int64(upper) << 32) + lower

    def exchange(self, keys, i, j):
        """Bring two keys in order, the larger first."""
        a, b = keys[i], keys[j]
        if self.kind is Int32:
            keys[i], keys[j] = cutlass.max(a, b), cutlass.min(a, b)
        else:
            keys[i], keys[j] = cute.arch.inline_ptx(_EXCHANGE, write_only_types=[Int64, Int64], read_only_args=[a, b])

    def sorted(self, keys):
        """By Batcher's odd-even merge sort."""
        keys, size, p = list(keys), len(keys), 1
        while p < size:
            step = p
            while step >= 1:
                for start in range(step % p, size - step, 2 * step):
                    for i in range(start, min(start + step, size - step)):
                        if i // (2 * p) == (i + step) // (2 * p):
                            self.exchange(keys, i, i + step)
                step //= 2
            p *= 2
        return keys

    def merged(self, one, other):
        """The largest of two lists of one length, in order: their pairwise maxima, one from each end, rise and fall."""
        keys = [cutlass.max(a, b) for a, b in zip(one, reversed(other))]
        step = len(keys) // 2
        while step >= 1:
            for i in range(len(keys)):
                if not i & step:
                    self.exchange(keys, i, i + step)
            step //= 2
        return keys


class SortedTopK:
    """The k largest of whole rows, in order.

    A thread sorts its keys by ``size``, k or the next power of two, and merges the lists two by two, of which the
    ``size`` largest stay; then threads that share a row merge theirs by shuffles. Each comparison is a minimum and a
    maximum, so that a row of 128 takes some 11 instructions per number for k = 8.
    Tile: ``threads_per_row`` threads hold a row, 32 columns each if it is long enough. No shared memory.
    Bytes moved per element: x once; k values and indices per row.
    """

    def __init__(self, variant, config):
        self.variant, self.k = variant, variant.attrs["k"]
        self.size = 1 << (self.k - 1).bit_length()
        self.n = variant.dims["n"]
        self.tile = RowTile(Vectors(variant, ("x",), self.n), config)
        self.access = RowAccess(variant, self.tile)
        self.compare_by(key_type(variant.tensors["x"].itemsize))
        self.resident, self.unroll = config.resident, config.unroll
        self.pdl = can_use_pdl(variant.arch)

    def compare_by(self, kind):
        """Compare keys of this type, and short ones."""
        self.kind, self.short = kind, short_columns(self.tile)
        self.whole, self.brief = (Network(each, self.size, self.tile.threads_per_row) for each in (kind, Int32))

    @cute.jit
    def __call__(self, mX, mIndex, mValues, mFound, stream):
        rows = self.tile.rows * self.unroll
        count = Int32((row_count(mX) + (rows - 1)) // rows)
        self.kernel(mX, mIndex, mValues, mFound).launch(
            **clusters(self.tile, count, self.resident), stream=stream, use_pdl=self.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mX, mIndex, mValues, mFound):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        t = tidx % self.tile.threads_per_row
        row = Int64(bidx) * (self.tile.rows * self.unroll) + tidx // self.tile.threads_per_row
        wait_for_previous(self.pdl)
        coords = [self.access.coord(row + u * self.tile.rows, row_count(mX), t, 0) for u in range(self.unroll)]
        places = [self.access.readable(coord) for coord in coords]
        loaded = [self.access.load([self.access.row(mX, "x", place.row)], place)[0] for place in places]
        let_next_start(self.pdl)
        for coord, vectors in zip(coords, loaded):
            gRow = self.access.row(mX, "x", cutlass.min(coord.row, coord.count - 1))
            self._store_row((mIndex, mValues, mFound), *self._chosen(vectors, gRow, coord), coord)

    @cute.jit
    def _store_row(
        self, tensors: cutlass.Constexpr, rTop: cute.Tensor, columns: cutlass.Constexpr, coord: cutlass.Constexpr
    ):  # fmt: skip
        mIndex, mValues, mFound = tensors
        if coord.valid:
            if coord.t == 0:
                store_results(rTop, mValues, self.variant.tensors["values"], coord.row, self.k)
            if coord.t == self.tile.threads_per_row - 1:
                named = names_of(mIndex, self.variant, coord.row, columns)
                store_results(named, mFound, self.variant.tensors["found"], coord.row, self.k)

    def _chosen(self, vectors, gRow, coord):
        """(the k largest numbers of a row, their columns), in order.

        Of numbers of 32 bits by short keys first, which take a third of the instructions: they lack a number's lowest
        bits. Where two of the k or another number have the same upper bits, or one is NaN, by whole keys.
        """
        if self.kind is Int32 or self.size < SHORT_FROM:
            keys = self.whole.shared(self._own(vectors, coord.first))[: self.k]
            return numbers(keys, gRow.element_type), [column(each) for each in keys]
        keys = self.brief.shared(self._own(vectors, coord.first, self.short))[: self.k]
        rTop, rColumn = fragment(gRow.element_type, self.k), fragment(Int32, self.k)
        for i, each in enumerate(keys):
            # Where few numbers are not NaN, a key may be that of no column.
            rColumn[i] = cutlass.min(self.short - (each & self.short), Int32(self.n - 1))
            rTop[i] = gmem_elements(gRow.element_type, gRow.at(rColumn[i]), 1)[0]
        equal = Boolean(self._reached(vectors, coord.first, keys[-1] & ~self.short) != self.k) | (rTop[0] != rTop[0])
        for i in range(1, self.k):
            equal = equal | (((keys[i - 1] ^ keys[i]) & ~self.short) == 0)
        self._by_whole_keys(vectors, coord.first, rTop, rColumn, equal)
        return rTop, [rColumn[i] for i in range(self.k)]

    def _reached(self, vectors, first, bound):
        """How many numbers of a row, or NaN, are at least that of an integer."""
        x, count = number(bound), Int32(0)
        for k, rX in enumerate(vectors):
            for j in range(self.tile.vec):
                below = rX[j] < x
                if self.tile.predicated(k) or self.tile.ends_outside(k):
                    below = below | (first[k] + j < 0) | (first[k] + j >= self.n)
                count = count + Int32(cutlass.select_(below, Int32(0), Int32(1)))
        return cute.arch.warp_reduction(count, operator.add, threads_in_group=self.tile.threads_per_row)

    @cute.jit
    def _by_whole_keys(
        self, vectors: cutlass.Constexpr, first: cutlass.Constexpr, rTop: cute.Tensor, rColumn: cute.Tensor,
        equal: Boolean,
    ):  # fmt: skip
        if cute.arch.vote_ballot_sync(equal) != 0:
            keys = self.whole.shared(self._own(vectors, first))[: self.k]
            rTop.store(numbers(keys, rTop.element_type).load())
            for i in cutlass.range_constexpr(self.k):
                rColumn[i] = column(keys[i])

    def _own(self, vectors, first, short=0):
        """A thread's largest keys, in order; ``short``: the bits of a short key that say its column."""
        keys, dtype, network = [], vectors[0].element_type, self.brief if short else self.whole
        for k, rX in enumerate(vectors):
            # Columns are counted from the thread's first one, and so far are constants.
            backs = [-self.tile.reach(k) - j for j in range(self.tile.vec)]
            if short:
                found = [ordered_number(rX[j]) & ~short | (short + back) for j, back in enumerate(backs)]
            else:
                found = integers(order(rX), dtype, self.tile.vec)
                found = [key(each, LAST + back, self.kind) for each, back in zip(found, backs)]
            if self.tile.predicated(k) or self.tile.ends_outside(k):
                found = [self._inside(each, first[k] + j, network.kind) for j, each in enumerate(found)]
            keys += found
        return [each - first[0] for each in network.in_order(keys)]

    def _inside(self, key, column, kind):
        return kind(cutlass.select_((column >= 0) & (column < self.n), key, no_key(kind)))
