"""Gradient of an embedding's table: see :mod:`cute_ops.ops.embedding.sorted_embedding_bwd` for the maths."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.embedding.config import LEAST_VECTORS, EmbeddingConfig
from cute_ops.kernels.lib.arguments import named
from cute_ops.kernels.lib.column_reduce import fold
from cute_ops.kernels.lib.copy import (
    fragment,
    load_elements,
    load_if,
    narrow,
    store_elements,
    store_if,
    store_masked,
    widen,
)
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.realign import bytes_past, fetch, settle
from cute_ops.kernels.lib.row_layout import extent, row_address

# Percent of an SM's L1 that is shared memory: enough for all CTAs that fit the SM.
SMEM_PERCENT = 30
# Rows of tokens that a thread has in flight.
UNROLL = 4


class Tensors(NamedTuple):
    """The op's tensors, and its workspace."""

    ends: Any
    classes: Any
    order: Any
    dout: Any
    dweight: Any
    partials: Any


class Coordinate(NamedTuple):
    """Where a thread works: a block of classes, a group of threads in it, the group's columns from ``column`` on, and
    whether these are ``inside`` the row.
    """

    block: Any
    group: Any
    column: Any
    inside: Any


class Tokens(NamedTuple):
    """``count`` sorted tokens from ``begin`` on, of which ``head`` come before a gap of ``gap`` others."""

    begin: Any
    head: Any
    gap: Any
    count: Any


class EmbeddingRows:
    """``dweight[c] = sum of dout[order[j]] for j from ends[c - 1] to ends[c]``: each row is written once.

    Two launches. The first adds up, in fp32, each chunk of ``chunk`` sorted tokens that are all of one class; of other
    chunks it reads two numbers. The second writes the table.
    Tile: a group of ``threads_per_group`` threads, a vector of columns each, takes ``classes`` classes. It writes zeros
    for classes without tokens, then adds one token after another, a few in flight, and writes a row when the class
    changes. If one of its classes has a whole chunk of tokens or more, all groups of the CTA add up these classes
    together, using the first launch's sums for whole chunks. So no class, however common, keeps one group busy for
    long, and bits depend only on the config and on a class's positions among the sorted tokens.
    Shared memory: 4 bytes per thread and element of a vector, a number.
    Bytes moved per element: dout and dweight once; of chunks of one class 4 bytes more for every ``chunk`` rows, twice.
    """

    before = 0  # elements of the row before that a row's first vector may have

    def __init__(self, variant):
        self.variant, self.keys, self.n = variant, variant.tensors, variant.dims["n"]
        config = EmbeddingConfig.of(variant.config)
        self.lanes, self.classes, self.chunk = config.threads_per_group, config.classes, config.chunk
        self.threads, self.resident = config.threads, config.resident
        self.groups = self.threads // self.lanes
        self.vec = self._vec()
        self.pdl = can_use_pdl(variant.arch)

    def _vec(self):
        """Elements of a vector that all rows start on."""
        rows = [self.keys["dout"], self.keys["dweight"]]
        return min(min(key.align, key.row_align) // ITEMSIZE[key.dtype] for key in rows)

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = named(Tensors, self.variant, arguments), arguments[-1]
        mEnds, mClasses, mOrder, mDout, mDweight, mPartials = tensors
        segments = self._segments(mDweight)
        chunks = Int32(extent(mClasses, 0)) // self.chunk
        self.sum_chunks(mClasses, mOrder, mDout, mPartials).launch(
            grid=[cutlass.max(chunks, 1) * segments, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )
        self.write_rows(tensors).launch(
            grid=[self._blocks(mEnds) * segments, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=SMEM_PERCENT,
        )

    def _segments(self, mDweight):
        """CTAs that share a row."""
        span = self.lanes * self.vec
        return (self._columns(mDweight) + (span - 1 + self.before)) // span

    def _columns(self, mDweight):
        return Int32(extent(mDweight, 1)) if self.n is None else self.n

    def _coordinate(self, mDweight):
        """The :class:`Place` of this thread."""
        tidx, bidx = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        segments = self._segments(mDweight)
        block = bidx // segments
        column = ((bidx - block * segments) * self.lanes + tidx % self.lanes) * self.vec
        group = tidx // self.lanes
        return Coordinate(
            block, group, column, (group < self.groups) & (column < self._columns(mDweight) + self.before)
        )

    def _allocate(self):
        smem = cutlass.utils.SmemAllocator()
        layout = cute.make_layout(
            (self.groups, self.vec, self.lanes), stride=(self.vec * self.lanes, self.lanes, 1)
        )  # fmt: skip
        return smem.allocate_tensor(Float32, layout, byte_alignment=16), smem.allocate_tensor(
            Int32, cute.make_layout(1), byte_alignment=16
        )

    @cute.kernel
    def sum_chunks(self, mClasses, mOrder, mDout, mPartials):
        sSum, _ = self._allocate()
        coord = self._coordinate(mPartials)
        chunk, group, column, inside = coord
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        first = chunk * self.chunk
        if first + self.chunk <= Int32(extent(mClasses, 0)):
            if mClasses[first] == mClasses[first + self.chunk - 1]:
                rSum = fragment(Float32, self.vec, 0.0)
                c, tokens = mClasses[first], Tokens(first, Int32(self.chunk), Int32(0), self.chunk)
                self._add_tokens(mOrder, mDout, coord, rSum, c, tokens)
                self._combine(rSum, sSum, group)
                self._store_partial(inside & (group == 0), mPartials, rSum, chunk, c, column)

    @cute.kernel
    def write_rows(self, tensors):
        mEnds, mDweight = tensors.ends, tensors.dweight
        sSum, sLong = self._allocate()
        coord = self._coordinate(mDweight)
        block, group, column, inside = coord
        if cute.arch.thread_idx()[0] == 0:
            sLong[0] = 0
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        cute.arch.barrier()
        count = Int32(extent(mEnds, 0))
        first = self._first(mEnds, block, cutlass.min(group, self.groups - 1))
        begin = self._begin(mEnds, first, count)
        ends = [mEnds[cutlass.min(first + i, count - 1)] for i in range(self.classes)]
        rZero = fragment(mDweight.element_type, self.vec, 0)
        for i in cutlass.range_constexpr(self.classes):
            empty = ends[i] == (begin if const_expr(i == 0) else ends[i - 1])
            self._store_vector(inside & (first + i < count) & empty, mDweight, rZero, first + i, column)
        end = ends[self.classes - 1]
        self._walk(tensors, coord, sLong, begin, end)
        cute.arch.barrier()
        if sLong[0] != 0:
            self._together(tensors, coord, sSum)

    def _blocks(self, mEnds):
        of_block = self.groups * self.classes
        return (Int32(extent(mEnds, 0)) + (of_block - 1)) // of_block

    def _first(self, mEnds, block, group):
        """The first of a group's classes. Common classes, neighbours in most vocabularies, are spread over CTAs."""
        return (group * self._blocks(mEnds) + block) * self.classes

    @staticmethod
    def _begin(mEnds, c, count):
        """Where the tokens of a class begin; past the last class, where those of all end."""
        before = mEnds[cutlass.max(cutlass.min(c, count) - 1, 0)]
        return cutlass.select_(c > 0, before, Int32(0))

    def _address(self, mX, name, row, column):
        itemsize = mX.element_type.width // 8
        return row_address(mX, self.keys[name], Int64(row), self._columns(mX)) + Int64(column) * itemsize

    def _token(self, mDout, row, c, column, predicate):
        """A token's vector for a class's row, zeros if the predicate is false."""
        rX = fragment(mDout.element_type, self.vec, 0)
        load_if(predicate, rX, self._address(mDout, "dout", row, column))
        return rX

    @cute.jit
    def _walk(self, tensors, coord: cutlass.Constexpr, sLong: cute.Tensor, begin: Int32, end: Int32):
        """Add one token after another if there is no whole chunk of them; else mark the group in ``sLong``."""
        _, mClasses, mOrder, mDout, mDweight, _ = tensors
        column, inside = coord.column, coord.inside
        if inside & (end - begin >= self.chunk):
            sLong[0] = 1
        if inside & (end > begin) & (end - begin < self.chunk):
            rSum, rClass = fragment(Float32, self.vec, 0.0), fragment(Int32, 1)
            rClass[0] = mClasses[begin]
            for j in cutlass.range(begin, end, UNROLL, unroll=1):
                # Past the end the last token's place is read again, and zeros are added.
                places = [cutlass.min(j + u, end - 1) for u in range(UNROLL)]
                classes = [mClasses[p] for p in places]
                rows = [mOrder[p] for p in places]
                each = enumerate(zip(rows, classes))
                held = [self._token(mDout, row, c, column, j + u < end) for u, (row, c) in each]
                for u in cutlass.range_constexpr(UNROLL):
                    self._next_class(mDweight, rSum, rClass, classes[u], column)
                    rSum.store(rSum.load() + widen(held[u]))
            self._store(mDweight, rSum, rClass[0], column, Boolean(True))

    @cute.jit
    def _next_class(self, mDweight, rSum: cute.Tensor, rClass: cute.Tensor, c: Int32, column: Int32):
        if c != rClass[0]:
            self._store(mDweight, rSum, rClass[0], column, Boolean(True))
            rSum.fill(0.0)
            rClass[0] = c

    def _store(self, mDweight, rSum, c, column, predicate):
        self._store_vector(predicate, mDweight, narrow(rSum.load(), mDweight.element_type, self.vec), c, column)

    def _store_vector(self, predicate, mDweight, rOut, c, column):
        store_if(predicate, rOut, self._address(mDweight, "dweight", c, column))

    def _store_partial(self, predicate, mPartials, rSum, chunk, c, column):
        store_if(predicate, rSum, self._address(mPartials, "partials", chunk, column))

    def _load_partial(self, predicate, mPartials, rPartial, chunk, c, column):
        load_if(predicate, rPartial, self._address(mPartials, "partials", chunk, column))

    @cute.jit
    def _together(self, tensors, coord: cutlass.Constexpr, sSum: cute.Tensor):
        """The classes of all marked groups, one after another, by the whole CTA."""
        mEnds, (block, group, column, inside) = tensors.ends, coord
        count = Int32(extent(mEnds, 0))
        for g in cutlass.range(self.groups, unroll=1):
            first = self._first(mEnds, block, g)
            start = self._begin(mEnds, first, count)
            if mEnds[cutlass.min(first + self.classes, count) - 1] - start >= self.chunk:
                for c in cutlass.range(first, cutlass.min(first + self.classes, count), 1, unroll=1):
                    begin, end = self._begin(mEnds, c, count), mEnds[c]
                    if end > begin:
                        rSum = fragment(Float32, self.vec, 0.0)
                        self._add_class(tensors, coord, rSum, c, begin, end)
                        self._combine(rSum, sSum, group)
                        self._store(tensors.dweight, rSum, c, column, inside & (group == 0))

    @cute.jit
    def _add_class(self, tensors, coord: cutlass.Constexpr, rSum: cute.Tensor, c: Int32, begin: Int32, end: Int32):
        """Add this group's share of a class: of the tokens before and after the whole chunks, and of these chunks."""
        mPartials, (_, group, column, inside) = tensors.partials, coord
        low = (begin + (self.chunk - 1)) // self.chunk
        whole = cutlass.max(end // self.chunk - low, 0)
        head = cutlass.min(low * self.chunk, end) - begin
        tokens = Tokens(begin, head, whole * self.chunk, end - begin - whole * self.chunk)
        self._add_tokens(tensors.order, tensors.dout, coord, rSum, c, tokens)
        # Of a class as common as padding there may be a hundred thousand chunks.
        rTotal = fragment(Float32, self.vec, 0.0)
        for k in cutlass.range(group, whole, self.groups * UNROLL, unroll=1):
            held = []
            for u in cutlass.range_constexpr(UNROLL):
                rPartial = fragment(Float32, self.vec, 0.0)
                chunk = k + u * self.groups
                self._load_partial(inside & (chunk < whole), mPartials, rPartial, low + chunk, c, column)
                held.append(rPartial)
            for u in cutlass.range_constexpr(UNROLL):
                rSum.store(rSum.load() + held[u].load())
            fold(rSum, rTotal)
        rSum.store(rTotal.load() + rSum.load())

    @cute.jit
    def _add_tokens(
        self, mOrder, mDout, coord: cutlass.Constexpr, rSum: cute.Tensor, c: Int32, tokens: cutlass.Constexpr
    ):  # fmt: skip
        """Add this group's share of some tokens."""
        (_, group, column, inside), (begin, head, gap, count) = coord, tokens
        for k in cutlass.range(group, count, self.groups * UNROLL, unroll=1):
            places = [cutlass.min(k + u * self.groups, count - 1) for u in range(UNROLL)]
            rows = [mOrder[begin + p + cutlass.select_(p >= head, gap, Int32(0))] for p in places]
            predicate = [inside & (k + u * self.groups < count) for u in range(UNROLL)]
            held = [self._token(mDout, row, c, column, want) for row, want in zip(rows, predicate)]
            for u in cutlass.range_constexpr(UNROLL):
                rSum.store(rSum.load() + widen(held[u]))

    @cute.jit
    def _combine(self, rSum: cute.Tensor, sSum: cute.Tensor, group: Int32):
        """Group 0 gets the sum over the groups."""
        lane = cute.arch.thread_idx()[0] % self.lanes
        cute.arch.barrier()
        if group < self.groups:
            for j in cutlass.range_constexpr(self.vec):
                sSum[group, j, lane] = rSum[j]
        cute.arch.barrier()
        if group == 0:
            for g in cutlass.range(1, self.groups, unroll=1):
                for j in cutlass.range_constexpr(self.vec):
                    rSum[j] = rSum[j] + sSum[g, j, lane]


class EmbeddingRowsAnywhere(EmbeddingRows):
    """:class:`EmbeddingRows` for rows that start anywhere: vectors are those of dweight's memory, 16 bytes wide.

    All stores but those at a row's ends are whole. A token's elements for a vector begin anywhere in its row: they are
    loaded as two aligned vectors and moved into place, see :mod:`cute_ops.kernels.lib.realign`.
    """

    def __init__(self, variant):
        super().__init__(variant)
        self.before = self.vec - 1

    def _vec(self):
        return VECTOR_BYTES // ITEMSIZE[self.keys["dweight"].dtype]

    def _start(self, c, column):
        """The first column of a thread's vector in a class's row; below 0 where it begins in the row before."""
        return column - Int32((Int64(c) * self.n) % self.vec)

    def _token(self, mDout, row, c, column, predicate):
        dtype, first, n = mDout.element_type, self._start(c, column), Int32(self.n)
        address = self._address(mDout, "dout", row, first)
        past = bytes_past(address, dtype, self.vec)
        flat = self.keys["dout"].layout == "flat"
        tail = Int64(row) + 1 >= extent(mDout, 0) if flat else Boolean(True)
        rPair, begin = fragment(dtype, 2 * self.vec, 0), first - past // (dtype.width // 8)
        end = cutlass.select_(predicate, n, Int32(-2 * self.vec))
        fetch(rPair, address - past, begin, end, cutlass.select_(tail, n - self.vec + 1, n), tail)
        return settle(rPair, past)

    @cute.jit
    def _store_vector(self, predicate: Boolean, mDweight, rOut: cute.Tensor, c: Int32, column: Int32):
        first = self._start(c, column)
        if predicate & (first + self.vec > 0) & (first < self.n):
            store_masked(rOut, self._address(mDweight, "dweight", c, first), first, Int32(self.n))

    @cute.jit
    def _store_partial(self, predicate: Boolean, mPartials, rSum: cute.Tensor, chunk: Int32, c: Int32, column: Int32):
        first = self._start(c, column)
        if predicate:
            store_elements(rSum, self._address(mPartials, "partials", chunk, first), first, Int32(self.n))

    @cute.jit
    def _load_partial(
        self, predicate: Boolean, mPartials, rPartial: cute.Tensor, chunk: Int32, c: Int32, column: Int32
    ):  # fmt: skip
        first = self._start(c, column)
        if predicate:
            load_elements(rPartial, self._address(mPartials, "partials", chunk, first), first, Int32(self.n))


def EmbeddingBackward(variant):
    """The kernel: of rows that start on vectors or half of one, or anywhere."""
    n, key = variant.dims["n"], variant.tensors["dweight"]
    wide = VECTOR_BYTES // ITEMSIZE[key.dtype]
    narrow_rows = min(min(k.align, k.row_align) for k in (key, variant.tensors["dout"])) * 2 < VECTOR_BYTES
    whole = key.layout == "flat" and key.align >= VECTOR_BYTES and n is not None and n >= LEAST_VECTORS * wide
    return (EmbeddingRowsAnywhere if narrow_rows and whole else EmbeddingRows)(variant)
