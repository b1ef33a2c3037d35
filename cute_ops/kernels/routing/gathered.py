"""Sums of rows that are named by an index, and dot products: see :mod:`cute_ops.ops.routing.gathered`."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load_if, narrow, store_if, store_masked, trim, widen
from cute_ops.kernels.lib.index import nan_unless, trap_unless
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.realign import bytes_past, fetch, settle
from cute_ops.kernels.lib.row_copy import PIECES_FROM
from cute_ops.kernels.lib.row_layout import extent, row_address
from cute_ops.kernels.routing.config import MOVED_FROM, GatherConfig


class NamedRows:
    """The base of kernels that an index tells which rows to read or to write.

    ``threads_per_row`` threads share a row. A vector is as long as the alignment of all rows and their length allow, so
    that none is masked. If that is less than half of 16 bytes, vectors are 16 bytes wide and aligned in the memory of
    ``own``: elements of its neighbouring rows are masked, and rows of ``other`` are moved into place, see
    :mod:`cute_ops.kernels.lib.realign`.

    Args:
        variant: the kernel's variant.
        others, own: the names of the tensors that have the rows.
    """

    def __init__(self, variant, *others, own):
        self.keys, self.config = variant.tensors, GatherConfig(**variant.config)
        self.n, self.k = variant.dims["n"], variant.dims["k"]
        keys = [self.keys[name] for name in (*others, own)]
        self.vec, widest = 1, VECTOR_BYTES // keys[0].itemsize
        while self.n % (2 * self.vec) == 0 and all(
            2 * self.vec * key.itemsize <= min(key.align, key.row_align, VECTOR_BYTES) for key in keys
        ):
            self.vec *= 2
        whole = keys[-1].layout == "flat" and keys[-1].align >= VECTOR_BYTES and self.n >= MOVED_FROM * widest
        self.moved = whole and 2 * self.vec < widest
        if self.moved:
            self.vec = widest
        self.rows = self.config.threads // self.config.threads_per_row
        self.step = self.config.threads_per_row * self.vec
        # Columns from a thread's first vector on, those of the row before included.
        self.columns = self.n + (self.vec - 1 if self.moved else 0)
        self.pdl = can_use_pdl(variant.arch)

    def launch(self, kernel, count, stream):
        count = (count + (self.rows - 1)) // self.rows
        threads = self.rows * self.config.threads_per_row
        kernel.launch(grid=[Int32(count), 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=self.pdl)

    def here(self):
        """A thread's row of the index, and the thread among those of the row."""
        tidx, bidx, share = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], self.config.threads_per_row
        return Int64(bidx) * self.rows + tidx // share, tidx % share

    def named(self, mIndex, name, row, count):
        """The ``count`` rows that a row of the index names, 0 in place of those that do not exist, and whether all
        exist.
        """
        gIndex = gmem_elements(mIndex.element_type, row_address(mIndex, self.keys[name], row, self.k), self.k)
        found = [Int64(gIndex[j]) for j in range(self.k)]
        there = Boolean(True)
        for each in found:
            there = there & (each >= 0) & (each < count)
        return [cutlass.select_((each >= 0) & (each < count), each, Int64(0)) for each in found], there

    def numbers(self, mX, name, row):
        """The numbers of a row of weights, in fp32; None where there are none."""
        if mX is None:
            return None
        gX = gmem_elements(mX.element_type, row_address(mX, self.keys[name], row, self.k), self.k)
        return [gX[j].to(Float32) for j in range(self.k)]

    def firsts(self, start, t, own):
        """First columns of a thread's next vectors, which are in flight together, for a row of ``own``."""
        shift = Int32((own * self.n) % self.vec) if self.moved else 0
        return [start + u * self.step + t * self.vec - shift for u in range(self.config.unroll)]

    def load(self, mX, name, row, first):
        """A row's vector from the column ``first`` on; its elements outside the row are undefined."""
        dtype, rX = mX.element_type, fragment(mX.element_type, self.vec, 0)
        address = row_address(mX, self.keys[name], row, self.n) + Int64(first) * (dtype.width // 8)
        if not self.moved:
            load_if(Boolean(first < self.n), rX, address)
            return rX
        past = bytes_past(address, dtype, self.vec)
        # The memory between strided rows, and after the last row, may not be readable.
        tail = Boolean(row + 1 >= extent(mX, 0)) if self.keys[name].layout == "flat" else Boolean(True)
        bound = cutlass.select_(tail, Int32(self.n - self.vec + 1), Int32(self.n))
        rPair = fragment(dtype, 2 * self.vec, 0)
        fetch(rPair, address - past, first - past // (dtype.width // 8), Int32(self.n), bound, tail)
        return settle(rPair, past)

    def store(self, rX, mX, name, row, first, here=True):
        """Store a vector's elements that lie in the row, if this thread's row is ``here``."""
        address = row_address(mX, self.keys[name], row, self.n) + Int64(first) * (mX.element_type.width // 8)
        if self.moved:
            self._store_inside(rX, address, first, Boolean(here))
        else:
            store_if((first < self.n) & here, rX, address)

    @cute.jit
    def _store_inside(self, rX: cute.Tensor, address: Int64, first: Int32, here: Boolean):
        if here & (first + self.vec > 0) & (first < self.n):
            store_masked(rX, address, first, Int32(self.n), pieces=self.n >= PIECES_FROM * self.vec)

    def inside(self, rX, first):
        """A vector in fp32, zeros outside the row."""
        if self.moved:
            trim(rX, first, Int32(self.n))
        return widen(rX)

    def begin_dots(self, mDots):
        """A thread's row and its place in it, the row that it reads, and zeros to add dot products to.

        Past the last row it reads the last one again: all lanes of a warp exchange their sums.
        """
        row, t = self.here()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        return row, t, cutlass.min(row, extent(mDots, 0) - 1), fragment(Float32, self.k, 0.0)

    def add_dot(self, rDots, j, rX, wide, first):
        """Add the product of a vector and one in fp32 to the j-th dot product."""
        rDots[j] = rDots[j] + (self.inside(rX, first) * wide).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    def store_dots(self, mDots, rDots, row, t):
        """Add up dot products over the threads of a row, a warp or a part of one, and store those of rows there are."""
        share = self.config.threads_per_row
        totals = [cute.arch.warp_reduction(rDots[j], operator.add, threads_in_group=share) for j in range(self.k)]
        self._store_totals(mDots, totals, row, (t == 0) & (row < extent(mDots, 0)))

    @cute.jit
    def _store_totals(self, mDots: cute.Tensor, totals: cutlass.Constexpr, row: Int64, here: Boolean):
        if here:
            dtype = mDots.element_type
            gDots = gmem_elements(dtype, row_address(mDots, self.keys["dots"], row, self.k), self.k)
            for j in cutlass.range_constexpr(self.k):
                gDots[j] = totals[j].to(dtype)


class GatheredSum(NamedRows):
    """``out[i] = sum_j weights[i, j] * y[index[i, j]]``, in fp32; single rows without a weight are copied.

    Tile: see :class:`NamedRows`; a CTA takes ``threads / threads_per_row`` rows. No shared memory.
    Bytes moved per element: each named row once, out once.
    """

    def __init__(self, variant):
        super().__init__(variant, "y", own="out")
        self.strict = variant.attrs["strict"]

    @cute.jit
    def __call__(self, mY, mIndex, mWeights, mOut, stream):
        self.launch(self.kernel(mY, mIndex, mWeights, mOut), extent(mOut, 0), stream)

    @cute.kernel
    def kernel(self, mY, mIndex, mWeights, mOut):
        row, t = self.here()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if row < extent(mOut, 0):
            self._sum(mY, mIndex, mWeights, mOut, row, t)

    @cute.jit
    def _sum(
        self, mY: cute.Tensor, mIndex: cute.Tensor, mWeights: cute.Tensor, mOut: cute.Tensor, row: Int64, t: Int32
    ):
        sources, there = self.named(mIndex, "index", row, extent(mY, 0))
        if const_expr(self.strict):
            trap_unless(there)
        weights = self.numbers(mWeights, "weights", row)
        for start in cutlass.range(0, self.columns, self.step * self.config.unroll, unroll=1):
            self._step(mY, mOut, (sources, there, weights), row, self.firsts(start, t, row))

    def _step(self, mY, mOut, given, row, firsts):
        sources, there, weights = given
        held = [[self.load(mY, "y", source, first) for source in sources] for first in firsts]
        for first, vectors in zip(firsts, held):
            if self.k == 1 and weights is None:
                nan_unless(there, vectors[0])
                self.store(vectors[0], mOut, "out", row, first)
                continue
            total = fragment(Float32, self.vec, 0.0)
            nan_unless(there, total)
            for j, rX in enumerate(vectors):
                x = widen(rX)
                total.store(total.load() + (x if weights is None else x * weights[j]))
            self.store(narrow(total.load(), mOut.element_type, self.vec), mOut, "out", row, first)


class ScatteredRows(NamedRows):
    """``out[place[i, j]] = weights[i, j] * x[i]``, in fp32; without weights rows are copied.

    Tile: see :class:`NamedRows`; a CTA takes ``threads / threads_per_row`` rows of x. No shared memory.
    Bytes moved per element: x once, out once; a row that is moved into place is read again, from L1, for each target.
    """

    def __init__(self, variant):
        super().__init__(variant, "x", own="out")

    @cute.jit
    def __call__(self, mX, mPlace, mWeights, mOut, stream):
        self.launch(self.kernel(mX, mPlace, mWeights, mOut), extent(mPlace, 0), stream)

    @cute.kernel
    def kernel(self, mX, mPlace, mWeights, mOut):
        row, t = self.here()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if row < extent(mPlace, 0):
            self._scatter(mX, mPlace, mWeights, mOut, row, t)

    @cute.jit
    def _scatter(
        self, mX: cute.Tensor, mPlace: cute.Tensor, mWeights: cute.Tensor, mOut: cute.Tensor, row: Int64, t: Int32
    ):
        targets, _ = self.named(mPlace, "place", row, extent(mOut, 0))
        weights = self.numbers(mWeights, "weights", row)
        for start in cutlass.range(0, self.columns, self.step * self.config.unroll, unroll=1):
            if const_expr(self.moved):
                for j, target in enumerate(targets):
                    firsts = self.firsts(start, t, target)
                    self._copy(mX, mOut, row, firsts, [target], None if weights is None else [weights[j]])
            else:
                self._copy(mX, mOut, row, self.firsts(start, t, row), targets, weights)

    def _copy(self, mX, mOut, row, firsts, targets, weights):
        held = [self.load(mX, "x", row, first) for first in firsts]
        for first, rX in zip(firsts, held):
            for j, target in enumerate(targets):
                rOut = rX if weights is None else narrow(widen(rX) * weights[j], mOut.element_type, self.vec)
                self.store(rOut, mOut, "out", target, first)


class GatheredDots(NamedRows):
    """``dots[i, j] = sum(y[index[i, j]] * dout[i])``, in fp32.

    Tile: see :class:`NamedRows`; a warp, or a part of one, takes a row. No shared memory.
    Bytes moved per element: each named row once, dout once.
    """

    def __init__(self, variant):
        super().__init__(variant, "y", own="dout")

    @cute.jit
    def __call__(self, mY, mIndex, mDout, mDots, stream):
        self.launch(self.kernel(mY, mIndex, mDout, mDots), extent(mDots, 0), stream)

    @cute.kernel
    def kernel(self, mY, mIndex, mDout, mDots):
        row, t, own, rDots = self.begin_dots(mDots)
        sources, there = self.named(mIndex, "index", own, extent(mY, 0))
        nan_unless(there, rDots)
        for start in cutlass.range(0, self.columns, self.step * self.config.unroll, unroll=1):
            self._step(mY, mDout, sources, own, rDots, self.firsts(start, t, own))
        self.store_dots(mDots, rDots, row, t)

    def _step(self, mY, mDout, sources, row, rDots, firsts):
        """Add some vectors' products."""
        held = [[self.load(mY, "y", source, first) for source in sources] for first in firsts]
        others = [self.load(mDout, "dout", row, first) for first in firsts]
        for first, rD, vectors in zip(firsts, others, held):
            d = self.inside(rD, first)
            for j, rX in enumerate(vectors):
                self.add_dot(rDots, j, rX, d, first)


class ScatteredDots(NamedRows):
    """``dy[place[i, j]] = weights[i, j] * dout[i]`` and ``dots[i, j] = sum(y[place[i, j]] * dout[i])``, in fp32.

    Tile: as of :class:`GatheredDots`.
    Bytes moved per element: dout, y and dy once each; where rows are moved into place, dout for each row of y, from L1.
    """

    def __init__(self, variant):
        super().__init__(variant, "y", "dout", own="dy")

    @cute.jit
    def __call__(self, *arguments):
        *tensors, stream = arguments
        self.launch(self.kernel(*tensors), extent(tensors[-1], 0), stream)

    @cute.kernel
    def kernel(self, mY, mPlace, mDout, mWeights, mDy, mDots):
        row, t, own, rDots = self.begin_dots(mDots)
        targets, _ = self.named(mPlace, "place", own, extent(mY, 0))
        tensors, known = (mY, mDout, mDy), (targets, self.numbers(mWeights, "weights", own))
        for start in cutlass.range(0, self.columns, self.step * self.config.unroll, unroll=1):
            self._step(tensors, known, (own, Boolean(row < extent(mDots, 0))), rDots, (start, t))
        self.store_dots(mDots, rDots, row, t)

    def _step(self, tensors, known, where, rDots, vectors):
        """Take some vectors: all places' from the same column on, unless rows are moved to where each one starts."""
        (start, t), targets, every = vectors, known[0], range(self.k)
        if not self.moved:
            self._spread(tensors, known, where, rDots, (every, self.firsts(start, t, where[0])))
            return
        for j in every:
            self._spread(tensors, known, where, rDots, ([j], self.firsts(start, t, targets[j])))

    def _spread(self, tensors, known, where, rDots, these):
        """Add the products of some places' vectors, and store their gradients."""
        (mY, mDout, mDy), (targets, weights), (row, here), (places, firsts) = tensors, known, where, these
        held = [[self.load(mY, "y", targets[j], first) for j in places] for first in firsts]
        own = [self.load(mDout, "dout", row, first) for first in firsts]
        for first, rD, vectors in zip(firsts, own, held):
            d = self.inside(rD, first)
            for j, rX in zip(places, vectors):
                self.add_dot(rDots, j, rX, d, first)
                rOut = narrow(d * weights[j], mDy.element_type, self.vec)
                self.store(rOut, mDy, "dy", targets[j], first, here)
