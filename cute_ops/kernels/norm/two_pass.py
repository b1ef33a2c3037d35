"""The norms for rows too long for the registers of a cluster, or whose length is not known at compile time.

A CTA walks a row twice, once for its sums and once for its output; the second walk reads from L2 what it can.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.column_params import column_elements, scale
from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.lib.copy import fragment, load, load_elements, narrow, store, store_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import Row, VectorAccess
from cute_ops.kernels.lib.row_layout import MAX_GRID, Vectors, WalkedRow, clusters, readable, row_count
from cute_ops.kernels.norm.statistics import centre, row_statistics


class TwoPassRows:
    """A thread's walk along its vectors of a row, in the forward and in the backward.

    Vector ``i`` of thread ``t`` is ``i * threads + t``.
    """

    def __init__(self, variant, config, names, centred, backward):
        self.variant, self.config = variant, config
        self.static_n = variant.dims["n"]
        self.weight_offset = variant.attrs.get("weight_offset", 0.0)
        self.tile = WalkedRow(Vectors(variant, names, self.static_n, config.align_vectors), config)
        self.access = VectorAccess(self.tile.v)
        self.sum = row_statistics(centred, self.tile, variant.attrs["eps"], backward, stages=2, held=False)
        self.pdl = can_use_pdl(variant.arch)

    def vectors(self, n, shift):
        """Vectors of a row of n elements."""
        return (n + shift + (self.tile.vec - 1)) // self.tile.vec

    def row(self, mX, name, row):
        """A row of a tensor, None if the tensor is absent."""
        return None if mX is None else Row.of(mX, self.variant.tensors[name], row, mX.shape[-1])

    def column(self, mW, name, first, n):
        return column_elements(mW, self.variant.tensors[name], self.tile.v, first, n)


class NormForwardTwoPass(TwoPassRows):
    """Forward of the norms; see :class:`~cute_ops.kernels.norm.fwd.NormForward` for the maths.

    Shared memory: 4 bytes per sum and warp, twice. Bytes moved per element: x twice (the second time from L2 where the
    row fits), out once; with a residual also residual and residual_out once each.
    """

    def __init__(self, variant, config, centred):
        super().__init__(variant, config, ("x", "residual", "out", "residual_out"), centred, backward=False)

    @cute.jit
    def __call__(self, tensors, stream):
        rows = row_count(tensors.x)
        self.kernel(tensors).launch(
            **clusters(self.tile, Int32(cutlass.min(rows, Int64(MAX_GRID)))), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, tensors):
        mX, mResidual, mWeight, mBias, mOut, mResidualOut = tensors
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = cutlass.utils.SmemAllocator()
        shared = self.sum.allocate(smem)
        n, vec = Int32(mX.shape[-1]), self.tile.vec
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        steps = Int32((row_count(mX) - bidx + (grid - 1)) // Int64(grid))
        for step in cutlass.range(steps, unroll=1):
            row = Int64(bidx) + Int64(step) * Int64(grid)
            shift = self.tile.v.shift(row, mX.shape[-1])
            count = self.vectors(n, shift)
            within = readable(self.tile.v, n, row, row_count(mX))
            gX, gOut = self.row(mX, "x", row), self.row(mOut, "out", row)
            sums = self.sum.begin()
            if const_expr(mResidual is None):
                for v in cutlass.range(tidx, count, self.tile.threads, unroll=4):
                    first = v * vec - shift
                    sums = self.sum.add(sums, (self.access.read(gX, first, n, within),), first, n)
            else:
                gResidual = self.row(mResidual, "residual", row)
                gSum = self.row(mResidualOut, "residual_out", row)
                for v in cutlass.range(tidx, count, self.tile.threads, unroll=4):
                    first = v * vec - shift
                    h = self.access.read(gX, first, n, within) + self.access.read(gResidual, first, n, within)
                    self.access.write(gSum, h, first, n)
                    h = narrow(h, mResidualOut.element_type, vec).load().to(Float32)
                    sums = self.sum.add(sums, (h,), first, n)
            sums = self.sum(self.sum.whole(sums), shared, step)
            mean, rstd = self.sum.forward_terms(sums, 1.0 / Float32(n))
            for v in cutlass.range(tidx, count, self.tile.threads, unroll=2):
                first = v * vec - shift
                # With a residual, this thread's own stores are read back.
                if const_expr(mResidual is None):
                    h = self.access.read(gX, first, n, within)
                else:
                    h = self.access.read(gSum, first, n, within)
                y = centre(h, mean) * rstd
                if const_expr(mWeight is not None):
                    y = y * scale(self.column(mWeight, "weight", first, n), self.weight_offset)
                if const_expr(mBias is not None):
                    y = y + self.column(mBias, "bias", first, n).load().to(Float32)
                self.access.write(gOut, y, first, n)


class NormBackwardTwoPass(TwoPassRows):
    """Backward of the norms; see :class:`~cute_ops.kernels.norm.bwd_persistent.NormBackward` for the maths.

    Persistent: CTA ``c`` of ``ctas`` takes the rows ``c, c + ctas, ...`` and keeps its column sums in its row of the
    workspace. A thread always holds the same columns, so no other thread touches its elements of that row.
    Shared memory: 4 bytes per sum and warp, twice. Bytes moved per element: x and dout twice (the second time from L2
    where the row fits), dx once, the workspace's row read and written per row.
    """

    def __init__(self, variant, config, x, dx, centred):
        self.names = (x, "dout", "dresidual_out")
        self.dx_names = dx
        super().__init__(variant, config, (*self.names, *dx), centred, backward=True)
        self.column_sum = ColumnSum(self.static_n, variant.arch)

    @cute.jit
    def __call__(self, tensors, stream):
        inputs, partials = tensors.inputs, tensors.partials[:2]
        mPartials = partials[0] if const_expr(partials[0] is not None) else partials[1]
        rows = row_count(inputs[0])
        if const_expr(mPartials is not None):
            groups = Int32(mPartials.shape[0])
        else:
            groups = Int32(cutlass.min(rows, Int64(self.config.clusters)))
        self.kernel(inputs, tensors.columns[0], tensors.outputs, partials).launch(
            **clusters(self.tile, groups), stream=stream, use_pdl=self.pdl
        )
        if const_expr(mPartials is not None):
            self.column_sum(partials, tensors.dcolumns, stream)

    @cute.kernel
    def kernel(self, inputs, mWeight, outputs, partials):
        tidx, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        smem = cutlass.utils.SmemAllocator()
        shared = self.sum.allocate(smem)
        mX, _, mDres = inputs
        long_n, vec = mX.shape[-1], self.tile.vec
        n = Int32(long_n)
        steps = Int32((row_count(mX) - group + (groups - 1)) // Int64(groups))
        shift = self.tile.v.shift(Int64(group), long_n)
        count = self.vectors(n, shift)
        wait_for_previous(self.pdl)
        for mPartials in partials:
            if const_expr(mPartials is not None):
                for v in cutlass.range(tidx, count, self.tile.threads, unroll=1):
                    zero = fragment(Float32, vec, 0.0)
                    self._store_partial(zero, mPartials, group, v * vec - shift, n)
        for step in cutlass.range(steps, unroll=1):
            row = Int64(group) + Int64(step) * Int64(groups)
            rows = [self.row(m, name, row) for m, name in zip(inputs, self.names)]
            within = readable(self.tile.v, n, row, row_count(mX))
            targets = [self.row(m, name, row) for m, name in zip(outputs, self.dx_names)]
            sums = self.sum.begin()
            for v in cutlass.range(tidx, count, self.tile.threads, unroll=2):
                first = v * vec - shift
                x, _, g = self._terms(*rows[:2], mWeight, first, n, within)
                sums = self.sum.add(sums, (x, g), first, n)
            sums = self.sum(self.sum.whole(sums), shared, step)
            mean, rstd, pull, push = self.sum.backward_terms(sums, 1.0 / Float32(n))
            for v in cutlass.range(tidx, count, self.tile.threads, unroll=1):
                first = v * vec - shift
                x, dout, g = self._terms(*rows[:2], mWeight, first, n, within)
                x = centre(x, mean)
                dx = g * rstd - x * pull
                if const_expr(push is not None):
                    dx = dx - push
                if const_expr(mDres is not None):
                    dx = dx + self.access.read(rows[2], first, n, within)
                for gDx in targets:
                    if const_expr(gDx is not None):
                        self.access.write(gDx, dx, first, n)
                for mPartials, term in zip(partials, (dout * (x * rstd), dout)):
                    if const_expr(mPartials is not None):
                        rSum = self._load_partial(mPartials, group, first, n)
                        rSum.store(rSum.load() + term)
                        self._store_partial(rSum, mPartials, group, first, n)
        let_next_start(self.pdl)

    def _terms(self, gX, gDout, mWeight, first, n, within):
        x, dout = self.access.read(gX, first, n, within), self.access.read(gDout, first, n, within)
        if mWeight is None:
            return x, dout, dout
        return x, dout, dout * scale(self.column(mWeight, "weight", first, n), self.weight_offset)

    def _partial_address(self, mPartials, group, first):
        return mPartials.iterator.toint() + (Int64(group) * Int64(mPartials.shape[1]) + Int64(first)) * 4

    def _whole(self):
        return not self.tile.v.masked and self.tile.vec % 4 == 0

    def _load_partial(self, mPartials, group, first, n):
        rSum = fragment(Float32, self.tile.vec)
        address = self._partial_address(mPartials, group, first)
        if self._whole():
            load(rSum, address)
        else:
            load_elements(rSum, address, first, n)
        return rSum

    def _store_partial(self, rSum, mPartials, group, first, n):
        address = self._partial_address(mPartials, group, first)
        if self._whole():
            store(rSum, address)
        else:
            store_elements(rSum, address, first, n)
