"""The largest numbers of short rows by sorting networks: see :mod:`cute_ops.ops.routing.topk`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import RowAccess
from cute_ops.kernels.lib.row_layout import RowTile, Vectors, clusters, row_count
from cute_ops.kernels.routing.keys import LAST, column, integers, key, key_type, no_key, numbers, order
from cute_ops.kernels.routing.results import names_of, store_results

# The larger and the smaller of two numbers, by one comparison: the compiler would take two.
_EXCHANGE = """{
.reg .pred p;
setp.gt.s64 p, {$r0}, {$r1};
selp.b64 {$w0}, {$r0}, {$r1}, p;
selp.b64 {$w1}, {$r1}, {$r0}, p;
}"""


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
        self.kind = key_type(variant.tensors["x"].itemsize)
        self.resident = config.resident
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mX, mIndex, mValues, mFound, stream):
        count = Int32((row_count(mX) + (self.tile.rows - 1)) // self.tile.rows)
        self.kernel(mX, mIndex, mValues, mFound).launch(
            **clusters(self.tile, count, self.resident), stream=stream, use_pdl=self.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mX, mIndex, mValues, mFound):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        t = tidx % self.tile.threads_per_row
        row = Int64(bidx) * self.tile.rows + tidx // self.tile.threads_per_row
        wait_for_previous(self.pdl)
        coord = self.access.coord(row, row_count(mX), t, 0)
        place = self.access.readable(coord)
        (vectors,) = self.access.load([self.access.row(mX, "x", place.row)], place)
        let_next_start(self.pdl)
        keys = self._shared(self._own(vectors, coord.first))[: self.k]
        if coord.valid:
            if t == 0:
                store_results(numbers(keys, mX.element_type), mValues, self.variant.tensors["values"], row, self.k)
            if t == self.tile.threads_per_row - 1:
                found = names_of(mIndex, self.variant, row, [column(each) for each in keys])
                store_results(found, mFound, self.variant.tensors["found"], row, self.k)

    def _own(self, vectors, first):
        """A thread's largest keys, in order."""
        keys, dtype = [], vectors[0].element_type
        for k, rX in enumerate(vectors):
            found = integers(order(rX), dtype, self.tile.vec)
            # Columns are counted from the thread's first one, and so far are constants.
            found = [key(each, LAST - self.tile.reach(k) - j, self.kind) for j, each in enumerate(found)]
            if self.tile.predicated(k) or self.tile.ends_outside(k):
                found = [self._inside(each, first[k] + j) for j, each in enumerate(found)]
            keys += found
        return [each - first[0] for each in self._in_order(keys)]

    def _in_order(self, keys):
        """The largest of some keys, in order."""
        keys = keys + [no_key(self.kind)] * (-len(keys) % self.size)
        lists = [self._sorted(keys[i : i + self.size]) for i in range(0, len(keys), self.size)]
        while len(lists) > 1:
            merged = [self._merged(*lists[i : i + 2]) for i in range(0, len(lists) - 1, 2)]
            lists = merged + lists[2 * len(merged) :]
        return lists[0]

    def _inside(self, key, column):
        return self.kind(cutlass.select_((column >= 0) & (column < self.n), key, no_key(self.kind)))

    def _shared(self, keys):
        """The largest of the threads that share a row, in each of them."""
        offset = 1
        while offset < self.tile.threads_per_row:
            keys = self._merged(keys, [self._of_lane(each, offset) for each in keys])
            offset *= 2
        return keys

    def _of_lane(self, key, offset):
        """The key of the lane whose number differs in one bit."""
        if self.kind is Int32:
            return cute.arch.shuffle_sync_bfly(key, offset=offset)
        upper, lower = (cute.arch.shuffle_sync_bfly(Int32(each), offset=offset) for each in (key >> 32, key & LAST))
        return (Int64(upper) << 32) + lower

    def _exchange(self, keys, i, j):
        """Bring two keys in order, the larger first."""
        a, b = keys[i], keys[j]
        if self.kind is Int32:
            keys[i], keys[j] = cutlass.max(a, b), cutlass.min(a, b)
        else:
            keys[i], keys[j] = cute.arch.inline_ptx(_EXCHANGE, write_only_types=[Int64, Int64], read_only_args=[a, b])

    def _sorted(self, keys):
        """By Batcher's odd-even merge sort."""
        keys, size, p = list(keys), len(keys), 1
        while p < size:
            step = p
            while step >= 1:
                for start in range(step % p, size - step, 2 * step):
                    for i in range(start, min(start + step, size - step)):
                        if i // (2 * p) == (i + step) // (2 * p):
                            self._exchange(keys, i, i + step)
                step //= 2
            p *= 2
        return keys

    def _merged(self, one, other):
        """The largest of two lists of one length, in order: their pairwise maxima, one from each end, rise and fall."""
        keys = [cutlass.max(a, b) for a, b in zip(one, reversed(other))]
        step = len(keys) // 2
        while step >= 1:
            for i in range(len(keys)):
                if not i & step:
                    self._exchange(keys, i, i + step)
            step //= 2
        return keys
