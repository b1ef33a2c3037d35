"""Routing of tokens to a few of up to 1024 experts, in one pass: see :mod:`cute_ops.ops.routing.route`."""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.copy import fetch_ahead, fragment, gmem_elements, load, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import RowAccess
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, RowTile, Vectors, row_count
from cute_ops.kernels.lib.row_reduce_lse import exponentials
from cute_ops.kernels.routing.config import RouteConfig
from cute_ops.kernels.routing.keys import LAST, column, integers, key, key_type, numbers, order, tops
from cute_ops.kernels.routing.results import store_results
from cute_ops.kernels.routing.sort import SortedTopK

# Threads of the CTA that adds up what the others have of each expert, and groups of them that share an expert.
ADDING, GROUPS = 1024, 32
LINE = 128  # bytes of a cache line


class WholeVectors(Vectors):
    """Vectors that begin and end inside a row, however narrow: a thread has the same columns of each row."""

    def __init__(self, variant, name, n):
        super().__init__(variant, (name,), n)
        if self.masked:
            tensor = variant.tensors[name]
            aligned = min(tensor.align, tensor.row_align, VECTOR_BYTES) // tensor.itemsize
            self.vec = self.unit = math.gcd(n, aligned)
            self.shifted = self.masked = False


class RoutedRows(SortedTopK):
    """The k largest logits of each row, their softmax, and the balance ``n * sum(mean(p) * load)`` of all rows.

    Persistent CTAs take rows by tiles, as :class:`SortedTopK` sorts them. Each thread adds up the probabilities of its
    columns in registers; how often an expert is chosen is counted in shared memory. A second launch of one CTA adds up
    the sums of all CTAs in a fixed order.
    Shared memory: 4 bytes for each column of a tile, and for each expert.
    Bytes moved per element: logits once; k weights and indices per row. By vectors, those that are sorted are read
    again, from L1.
    """

    def __init__(self, variant):
        config = RouteConfig.of(variant.config)
        self.variant, self.k, self.normalize = variant, variant.attrs["k"], variant.attrs["normalize"]
        self.size, self.n = 1 << (self.k - 1).bit_length(), variant.dims["n"]
        self.tile = RowTile(WholeVectors(variant, "logits", self.n), config)
        self.access = RowAccess(variant, self.tile, -math.inf)
        self.compare_by(key_type(variant.tensors["logits"].itemsize))
        self.ctas, self.resident, self.unroll = config.ctas, config.resident, config.unroll
        self.ahead = config.ahead if variant.tensors["logits"].layout == "flat" else 0
        self.groups = min(ADDING // self.n, GROUPS)
        # A thread's part of the `size` vectors whose largest numbers are the largest.
        self.part = self.size * self.tile.vec // self.tile.threads_per_row
        self.by_vectors = config.form == "vectors"
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, *arguments):
        mLogits, mWeights, mIndex, mBalance, mLoad, mTotals, mCounts, stream = arguments
        tiles = (row_count(mLogits) + (self.tile.rows - 1)) // self.tile.rows
        parts = Int32(cutlass.max(cutlass.min(tiles, Int64(self.ctas)), Int64(1)))
        self.kernel(mLogits, mWeights, mIndex, mTotals, mCounts).launch(
            grid=[parts, 1, 1], block=[self.tile.threads, 1, 1], min_blocks_per_mp=self.resident,
            preferred_smem_carveout=SMEM_PERCENT, stream=stream, use_pdl=self.pdl,
        )  # fmt: skip
        self.add_up(mLogits, mBalance, mLoad, mTotals, mCounts, parts).launch(
            grid=[1, 1, 1], block=[ADDING, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mLogits, mWeights, mIndex, mTotals, mCounts):
        tidx, cta, parts = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        local, t = tidx // self.tile.threads_per_row, tidx % self.tile.threads_per_row
        smem = cutlass.utils.SmemAllocator()
        layout = cute.make_layout((self.n, self.tile.rows))
        sTotal = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        sCount = smem.allocate_tensor(Int32, cute.make_layout(self.n), byte_alignment=16)
        for e in cutlass.range(tidx, self.n, self.tile.threads, unroll=1):
            sCount[e] = Int32(0)
        cute.arch.sync_threads()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        count = row_count(mLogits)
        rTotal = fragment(Float32, self.tile.per_thread * self.tile.vec, 0.0)
        tiles = (count + (self.tile.rows - 1)) // self.tile.rows
        steps = Int32((tiles - cta + (parts - 1)) // Int64(parts))
        for step in cutlass.range((steps + (self.unroll - 1)) // self.unroll, unroll=1):
            tile = Int64(cta) + Int64(step) * self.unroll * parts
            if cutlass.const_expr(self.ahead > 0):
                self._fetch_ahead(mLogits, tile + Int64(parts) * self.ahead, tidx)
            rows = [(tile + u * Int64(parts)) * self.tile.rows + local for u in range(self.unroll)]
            coords = [self.access.coord(row, count, t, 0) for row in rows]
            self._rows((mLogits, mWeights, mIndex), sCount, rTotal, coords)
        for k, first in enumerate(self.tile.columns(t, 0, Int64(0))):
            self._share(sTotal[None, local], rTotal, first, k)
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, self.n, self.tile.threads, unroll=1):
            total = Float32(0.0)
            for i in cutlass.range(self.tile.rows, unroll=4):
                total = total + sTotal[e, i]
            mTotals[cta, e] = total
            mCounts[cta, e] = sCount[e]

    def _fetch_ahead(self, mLogits, tile, tidx):
        """Prefetch a tile's logits to L2, a line a thread: until they are loaded a tile is computed."""
        size = self.n * self.tile.rows * (mLogits.element_type.width // 8)
        end = row_count(mLogits) * (self.n * (mLogits.element_type.width // 8))
        for first in range(0, size, LINE * self.tile.threads):
            place = Int64(tile) * size + (first + tidx * LINE)
            inside = first + tidx * LINE < size
            fetch_ahead(mLogits.iterator.toint() + place, inside & (place < end))

    @cute.jit
    def _share(self, sTotal: cute.Tensor, rTotal: cute.Tensor, first: Int32, k: cutlass.Constexpr):
        if first < self.n:
            for j in cutlass.range_constexpr(self.tile.vec):
                sTotal[first + j] = rTotal[k * self.tile.vec + j]

    def _rows(self, tensors, sCount, rTotal, coords):
        """Route some rows of a thread, all of which load together."""
        places = [self.access.readable(coord) for coord in coords]
        found = [self.access.row(tensors[0], "logits", place.row) for place in places]
        loaded = [self.access.load([gRow], place)[0] for gRow, place in zip(found, places)]
        for logits, gRow, coord in zip(loaded, found, coords):
            self._row(tensors, (sCount, rTotal), logits, gRow, coord)

    def _row(self, tensors, sums, logits, gRow, coord):
        """Choose a row's experts, and add its probabilities to the sums of this thread's columns."""
        (mLogits, mWeights, mIndex), (sCount, rTotal) = tensors, sums
        dtype = mLogits.element_type
        if self.by_vectors:
            keys = self.whole.shared(self._of_vectors(logits, gRow, coord))[: self.k]
            rTop, columns = numbers(keys, dtype), [column(each) for each in keys]
        else:
            vectors = [fragment(dtype, self.tile.vec) for _ in logits]
            for rX, rKept in zip(logits, vectors):
                rKept.store(rX.load())
            rTop, columns = self._chosen(vectors, gRow, coord)
        top = [rTop[i].to(Float32) for i in range(self.k)]
        each, total = [exponentials(widen(rX), top[0]) for rX in logits], Float32(0.0)
        for found in each:
            total = total + found.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction(total, operator.add, threads_in_group=self.tile.threads_per_row)
        share = Float32(1.0) / total
        # Past the last row it is taken again, and counts nothing.
        counted = cutlass.select_(coord.valid, share, Float32(0.0))
        for k, found in enumerate(each):
            for j in range(self.tile.vec):
                rTotal[k * self.tile.vec + j] = rTotal[k * self.tile.vec + j] + found[j] * counted
        chosen = [exponentials(x, top[0]) for x in top]
        if self.normalize:
            share = Float32(1.0) / sum(chosen[1:], chosen[0])
        rWeights = fragment(dtype, self.k)
        for i, x in enumerate(chosen):
            rWeights[i] = (x * share).to(dtype)
        self._store(mWeights, mIndex, sCount, rWeights, columns, coord)

    def _of_vectors(self, logits, gRow, coord):
        """A thread's largest keys, in order, of some of the row's vectors: of ``size`` of them, which together have the
        ``size`` largest numbers of the row, since each of them has one that is larger than those of other vectors.
        """
        share, vec, size = self.tile.threads_per_row, self.tile.vec, self.size
        keys = [key(each, LAST - k * share, self.kind) for k, each in enumerate(tops(logits))]
        if self.tile.count % share:
            keys[-1] = self._inside(keys[-1], coord.first[-1], self.kind)
        found = self.whole.shared([each - coord.t for each in self.whole.in_order(keys)])
        length = min(self.part, vec)
        each, rest = max(self.part // vec, 1), vec // length
        keys = []
        for i in range(0, size, size // each):
            named = found[i]
            for j in range(1, size // each):
                named = self.kind(cutlass.select_(coord.t // rest == j, found[i + j], named))
            first = column(named) * vec + coord.t % rest * length
            rX = fragment(gRow.element_type, length)
            load(rX, gRow.at(first))
            keys += [
                key(x, LAST - j, self.kind) - first for j, x in enumerate(integers(order(rX), rX.element_type, length))
            ]
        return self.whole.in_order(keys)

    @cute.jit
    def _store(
        self, mWeights: cute.Tensor, mIndex: cute.Tensor, sCount: cute.Tensor, rWeights: cute.Tensor,
        columns: cutlass.Constexpr, coord: cutlass.Constexpr,
    ):  # fmt: skip
        if coord.valid:
            share = self.tile.threads_per_row
            if coord.t == 0:
                store_results(rWeights, mWeights, self.variant.tensors["weights"], coord.row, self.k)
            if coord.t == share - 1:
                rIndex = fragment(Int32, self.k)
                for i in cutlass.range_constexpr(self.k):
                    rIndex[i] = columns[i]
                store_results(rIndex, mIndex, self.variant.tensors["index"], coord.row, self.k)
            for i in cutlass.range_constexpr(self.k):
                if coord.t == i % share:
                    cute.arch.atomic_add(sCount.iterator + columns[i], Int32(1))

    @cute.kernel
    def add_up(self, mLogits, mBalance, mLoad, mTotals, mCounts, parts):
        tidx = cute.arch.thread_idx()[0]
        group, e = tidx // self.n, tidx % self.n
        smem = cutlass.utils.SmemAllocator()
        layout = cute.make_layout((self.n, self.groups))
        sTotal = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        sCount = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        sWarp = smem.allocate_tensor(Float32, cute.make_layout(ADDING // WARP), byte_alignment=16)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        self._add_group(mTotals, mCounts, (sTotal, sCount), (group, e), parts)
        cute.arch.sync_threads()
        rows = Float32(cutlass.max(row_count(mLogits), Int64(1)))
        found = cute.arch.warp_reduction(self._expert(sTotal, sCount, mLoad, tidx, rows), operator.add)
        if tidx % WARP == 0:
            sWarp[tidx // WARP] = found
        cute.arch.sync_threads()
        if tidx < WARP:
            found = cute.arch.warp_reduction(sWarp[tidx], operator.add)
            if tidx == 0:
                gBalance = gmem_elements(Float32, mBalance.iterator.toint(), 1)
                gBalance[0] = found

    @cute.jit
    def _add_group(self, mTotals, mCounts, sums: cutlass.Constexpr, where: cutlass.Constexpr, parts: Int32):
        """Add up an expert's sums of every ``groups``-th CTA."""
        (group, e), total, count = where, Float32(0.0), Int32(0)
        if group < self.groups:
            for cta in cutlass.range(group, parts, self.groups, unroll=8):
                total = total + mTotals[cta, e]
                count = count + mCounts[cta, e]
            sums[0][e, group] = total
            sums[1][e, group] = count

    @cute.jit
    def _expert(self, sTotal: cute.Tensor, sCount: cute.Tensor, mLoad: cute.Tensor, e: Int32, rows: Float32):
        """An expert's part of the balance: how probable it was, times how often it was chosen, which is stored."""
        total, load = Float32(0.0), Float32(0.0)
        if e < self.n:
            count = Int32(0)
            for group in cutlass.range_constexpr(self.groups):
                total = total + sTotal[e, group]
                count = count + sCount[e, group]
            load = Float32(count) / rows * (Float32(self.n) / rows)
            mLoad[e] = load
        return total * load
