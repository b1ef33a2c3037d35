"""Forward of the norms, rows held in shared memory; see :mod:`cute_ops.kernels.norm.fwd` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.column_params import affine
from cute_ops.kernels.lib.copy import compiler_barrier, narrow, widen
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import present, row_count
from cute_ops.kernels.lib.smem_ring import RowRing
from cute_ops.kernels.norm.fwd import NormForward
from cute_ops.kernels.norm.statistics import normalised


class NormForwardSmem(NormForward):
    """One pass: a row stays in shared memory between its sum and its output.

    For long rows: more bytes are in flight than registers could receive, and the weight's loads with them. Each thread
    copies, and later reads, its own vectors.
    Tile: as in :class:`NormForward`.
    Shared memory: the CTA's share of the row; 4 bytes per sum, warp and CTA of the cluster.
    Bytes moved per element: x and out once each; with a residual also residual and residual_out.
    """

    def __init__(self, variant, config, centred):
        super().__init__(variant, config, centred)
        self.ring = RowRing(self.tile, present(variant, ("x", "residual")), 1)
        self.carveout = 100

    @cute.kernel
    def kernel(self, tensors):
        mX, mResidual, mWeight, mBias, mOut, mResidualOut = tensors
        bidx, local, t, rank = self.tile.here()
        smem = cutlass.utils.SmemAllocator()
        inputs = (mX, mResidual)
        _, slots = self.ring.allocate(smem, inputs)
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)

        count = row_count(mX)
        row = Int64(bidx) * self.tile.rows + local
        coord = self.access.coord(row, count, t, rank)

        wait_for_previous(self.pdl)
        columns = None
        if const_expr(not self.delay_weight_load):
            columns = self.access.columns(mWeight, mBias, coord)
        sources = self.ring.sources(inputs, slots, row, coord.first, count)
        self.ring.fetch_rows(sources, self.tile.edge(row, count), Int32(0))
        cute.arch.cp_async_commit_group()
        self.sum.ready()
        cute.arch.cp_async_wait_group(0)
        mean, rstd = self._statistics_from_smem(slots, mResidualOut, coord, shared)
        gOut = self.access.row(mOut, "out", row)
        gSum = None if const_expr(mResidual is None) else self.access.row(mResidualOut, "residual_out", row)
        for k in cutlass.range_constexpr(self.tile.per_thread):
            rH = self._hidden(slots, mResidualOut, k)
            if const_expr(mResidual is not None):
                self.access.store(gSum, rH, coord, k)
            y = normalised(widen(rH), mean, rstd)
            delayed = const_expr(self.delay_weight_load)
            rWeight, rBias = self.access.columns(mWeight, mBias, coord, [k])[0] if delayed else columns[k]
            if const_expr(rWeight is not None):
                compiler_barrier(rWeight)  # kept in its own dtype until here
            y = affine(y, rWeight, rBias, self.weight_offset)
            self.access.store(gOut, narrow(y, mOut.element_type, self.tile.vec), coord, k)
        let_next_start(self.pdl)

    def _statistics_from_smem(self, slots, mResidualOut, coord, shared):
        for k in range(self.tile.per_thread):
            if self.tile.predicated(k):
                self.ring.trim([sX for sX in slots if sX is not None], k, Int32(0), coord.first[k])
        return self.sum.row(lambda k: (widen(self._hidden(slots, mResidualOut, k)),), coord.first, shared, 0)

    def _hidden(self, slots, mResidualOut, k):
        """This thread's k-th vector of h."""
        rX = self.ring.read(slots[0], k, Int32(0))
        if slots[1] is None:
            return rX
        h = widen(rX) + widen(self.ring.read(slots[1], k, Int32(0)))
        return narrow(h, mResidualOut.element_type, self.tile.vec)
