"""Rows to float8_e4m3fn, held in shared memory; see :mod:`cute_ops.kernels._quantize` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels._chain import let_next_start, wait_for_previous
from cute_ops.kernels._columns import column_vectors
from cute_ops.kernels._fp8 import largest_of_each, to_fp8
from cute_ops.kernels._quantize import QuantizeRows
from cute_ops.kernels._ring import RowRing
from cute_ops.kernels._rows import present, row_address, row_count
from cute_ops.kernels._vectors import forget, narrow, widen


class QuantizeStaged(QuantizeRows):
    """One pass: a row stays in shared memory in its own dtype, and is made fp32 as often as it is looked at.

    For long rows that start on a vector: more bytes are on their way than registers could receive, and the weight's
    loads with them. Each thread copies, and later reads, its own vectors.
    Shared memory: the CTA's part of the row; 4 bytes per warp and CTA of the cluster, twice.
    Bytes moved per element: every tensor once.
    """

    def __init__(self, variant, source):
        super().__init__(variant, source)
        self.ring = RowRing(self.tile, present(variant, source.names), 1)
        self.carveout = 100

    @cute.kernel
    def kernel(self, inputs, columns, mResidualOut, mOut, mScale):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, rank, _ = cute.arch.block_idx()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        _, slots = self.ring.allocate(smem, inputs, self.source.names)
        sums = self.sum.allocate(smem) if const_expr(self.source.normed) else None
        maxima = self.max.allocate(smem) if const_expr(self.by_row) else (None, None)
        self._prepare(sums, maxima)

        count = row_count(mOut)
        t = tidx % self.tile.threads_per_row
        row = Int64(bidx) * self.tile.rows + tidx // self.tile.threads_per_row
        first = self._first(t, rank, row)
        base = row_address(mScale, self.variant.tensors["scale"], row, self.blocks)

        wait_for_previous(self.chained)
        loaded = None
        if const_expr(not self.late):
            loaded = [self._parameters(columns, first, k) for k in range(self.tile.per_thread)]
        for m, sX, name in zip(inputs, slots, self.source.names):
            if const_expr(m is not None):
                address = row_address(m, self.variant.tensors[name], row, self.n)
                self.ring.fetch(sX, address, first, row < count, Int32(0))
        cute.arch.cp_async_commit_group()
        if const_expr(self.clustered):
            cute.arch.cluster_wait()
        cute.arch.cp_async_wait_group(0)
        self._trim(slots, first)
        rstd = None
        if const_expr(self.source.normed):
            given = self.sum.thread(lambda k: (widen(self._hidden(slots, mResidualOut, k)),), first, None)
            _, rstd = self.sum.forward_terms(self.sum(given, *sums, Int32(0)), 1.0 / self.n)

        given = slots, mResidualOut, rstd, columns, loaded, first
        inverse = None
        if const_expr(self.by_row):
            largest = Float32(0.0)
            for k in cutlass.range_constexpr(self.tile.per_thread):
                largest = cute.arch.fmax(largest, *largest_of_each([self._again(*given, k)]))
            inverse = self._row_scale(largest, maxima, base, 0, (t == 0) & (rank == 0) & (row < count))
        for k in cutlass.range_constexpr(self.tile.per_thread):
            rY = self._again(*given, k)
            if const_expr(not self.by_row):
                speaks = (t % self.lanes == 0) & (row < count)
                inverse = self._block_scale(*largest_of_each([rY]), base, first[k], speaks)
            out = to_fp8(rY.load() * inverse, self.tile.vec)
            self._store_row(mOut, "out", out, row, count, first[k], k)
            if const_expr(mResidualOut is not None):
                rH = self._hidden(slots, mResidualOut, k)
                self._store_row(mResidualOut, "residual_out", rH, row, count, first[k], k)
        let_next_start(self.chained)

    def _again(self, slots, mResidualOut, rstd, columns, loaded, first, k):
        """This thread's k-th vector of y."""
        parameters = self._parameters(columns, first, k) if self.late else loaded[k]
        for rW in parameters:
            if rW is not None:
                forget(rW)  # kept in its own dtype until here
        return self._value(self._wide(slots, mResidualOut, k), rstd, *parameters, first[k], k)

    def _parameters(self, columns, first, k):
        """Weight and bias for this thread's k-th vector."""
        return tuple(
            None if m is None else column_vectors(m, self.variant.tensors[name], self.tile, first, [k])[0]
            for m, name in zip(columns, ("weight", "bias"))
        )

    def _trim(self, slots, first):
        for k in range(self.tile.per_thread):
            if self._ragged(k):
                self.ring.trim([sX for sX in slots if sX is not None], k, Int32(0), first[k])

    def _hidden(self, slots, mResidualOut, k):
        """This thread's k-th vector of h."""
        rX = self.ring.read(slots[0], k, Int32(0))
        if mResidualOut is None:
            return rX
        h = widen(rX) + widen(self.ring.read(slots[1], k, Int32(0)))
        return narrow(h, mResidualOut.element_type, self.tile.vec)

    def _wide(self, slots, mResidualOut, k):
        """What the source takes of this thread's k-th vector."""
        if self.source.normed:
            return [widen(self._hidden(slots, mResidualOut, k))]
        return [widen(self.ring.read(sX, k, Int32(0))) for sX in slots]
