"""Sums of rows that are named by an index, and dot products: see :mod:`cute_ops.ops.routing.gathered`."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load_if, narrow, store_if, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import extent, row_address
from cute_ops.kernels.routing.config import GatherConfig


class Gathered:
    """Rows named by an index, ``threads_per_row`` threads to each row of the index. Vectors are as long as all rows'
    alignment and their length allow, so that none has a mask.
    """

    def __init__(self, variant, names):
        self.keys, self.config = variant.tensors, GatherConfig(**variant.config)
        self.n, self.k = variant.dims["n"], variant.dims["k"]
        self.vec = 1
        while self.n % (2 * self.vec) == 0 and all(
            2 * self.vec * key.itemsize <= min(key.align, key.row_align, VECTOR_BYTES)
            for key in (self.keys[name] for name in names)
        ):
            self.vec *= 2
        self.rows = self.config.threads // self.config.threads_per_row
        self.step = self.config.threads_per_row * self.vec
        self.pdl = can_use_pdl(variant.arch)

    def launch(self, kernel, count, stream):
        count = (count + (self.rows - 1)) // self.rows
        threads = self.rows * self.config.threads_per_row
        kernel.launch(grid=[Int32(count), 1, 1], block=[threads, 1, 1], stream=stream, use_pdl=self.pdl)

    def here(self):
        """A thread's row of the index, and the thread among those of the row."""
        tidx, bidx, share = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], self.config.threads_per_row
        return Int64(bidx) * self.rows + tidx // share, tidx % share

    def sources(self, mY, mIndex, row):
        """Addresses of the rows that a row of the index names."""
        gIndex = gmem_elements(mIndex.element_type, row_address(mIndex, self.keys["index"], row, self.k), self.k)
        return [row_address(mY, self.keys["y"], Int64(gIndex[j]), self.n) for j in range(self.k)]

    def firsts(self, start, t):
        """First columns of a thread's next vectors, which are in flight together."""
        return [start + u * self.step + t * self.vec for u in range(self.config.unroll)]

    def load(self, mX, address, first):
        rX = fragment(mX.element_type, self.vec, 0)
        load_if(Boolean(first < self.n), rX, address + Int64(first) * (mX.element_type.width // 8))
        return rX


class GatheredSum(Gathered):
    """``out[i] = sum_j weights[i, j] * y[index[i, j]]``, in fp32.

    Tile: see :class:`Gathered`; a CTA takes ``threads / threads_per_row`` rows. No shared memory.
    Bytes moved per element: each named row once, out once.
    """

    def __init__(self, variant):
        super().__init__(variant, ("y", "out"))

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
        sources, weights = self.sources(mY, mIndex, row), None
        if const_expr(mWeights is not None):
            address = row_address(mWeights, self.keys["weights"], row, self.k)
            gWeights = gmem_elements(mWeights.element_type, address, self.k)
            weights = [gWeights[j].to(Float32) for j in range(self.k)]
        target = row_address(mOut, self.keys["out"], row, self.n)
        for start in cutlass.range(0, self.n, self.step * self.config.unroll, unroll=1):
            self._step(mY, mOut, sources, weights, target, self.firsts(start, t))

    def _step(self, mY, mOut, sources, weights, target, firsts):
        held = [[self.load(mY, source, first) for source in sources] for first in firsts]
        for first, vectors in zip(firsts, held):
            total = fragment(Float32, self.vec, 0.0)
            for j, rX in enumerate(vectors):
                x = widen(rX)
                total.store(total.load() + (x if weights is None else x * weights[j]))
            rOut = narrow(total.load(), mOut.element_type, self.vec)
            store_if(first < self.n, rOut, target + Int64(first) * (mOut.element_type.width // 8))


class GatheredDots(Gathered):
    """``dots[i, j] = sum(y[index[i, j]] * dout[i])``, in fp32.

    Tile: see :class:`Gathered`; a warp, or a part of one, takes a row. No shared memory.
    Bytes moved per element: each named row once, dout once.
    """

    def __init__(self, variant):
        super().__init__(variant, ("y", "dout"))

    @cute.jit
    def __call__(self, mY, mIndex, mDout, mDots, stream):
        self.launch(self.kernel(mY, mIndex, mDout, mDots), extent(mDots, 0), stream)

    @cute.kernel
    def kernel(self, mY, mIndex, mDout, mDots):
        row, t = self.here()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        count = extent(mDots, 0)
        # Past the last row it is taken again: all lanes of a warp exchange their sums.
        place = cutlass.min(row, count - 1)
        rDots, share = fragment(Float32, self.k, 0.0), self.config.threads_per_row
        sources, address = self.sources(mY, mIndex, place), row_address(mDout, self.keys["dout"], place, self.n)
        for start in cutlass.range(0, self.n, self.step * self.config.unroll, unroll=1):
            self._step(mY, mDout, sources, address, rDots, self.firsts(start, t))
        totals = [cute.arch.warp_reduction(rDots[j], operator.add, threads_in_group=share) for j in range(self.k)]
        if (t == 0) & (row < count):
            gDots = gmem_elements(Float32, row_address(mDots, self.keys["dots"], row, self.k), self.k)
            for j in cutlass.range_constexpr(self.k):
                gDots[j] = totals[j]

    def _step(self, mY, mDout, sources, address, rDots, firsts):
        """Add some vectors' products."""
        held = [[self.load(mY, source, first) for source in sources] for first in firsts]
        others = [self.load(mDout, address, first) for first in firsts]
        for rD, vectors in zip(others, held):
            d = widen(rD)
            for j, rX in enumerate(vectors):
                rDots[j] = rDots[j] + (widen(rX) * d).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
