"""Forward of the norms, rows held in registers.

``out = h * rsqrt(mean(h^2) + eps) * (weight_offset + weight) + bias``, where ``h`` is ``x``, or ``x + residual``
rounded to the residual's dtype, which is stored too; in a layer norm, ``x`` minus its mean.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.lib.column_params import affine
from cute_ops.kernels.lib.copy import AHEAD, compiler_barrier, narrow, store_masked, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import RowAccess
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, RowTile, Vectors, clusters, row_count
from cute_ops.kernels.norm.statistics import normalised, row_statistics

ROW_TENSORS = ("x", "residual", "out", "residual_out")


class NormForward:
    """One pass: a row stays in registers between its sum and its output.

    Tile: ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row, ``per_thread`` vectors each; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows, ``unroll`` times. All loads of a thread are in flight
    together, the weight's too unless registers are short. If rows are few, x is prefetched to L2 while the previous
    kernel is busy. Sums go through a warp by shuffles, through a CTA by shared memory, through a cluster by distributed
    shared memory.
    Shared memory: 4 bytes per sum, warp and CTA of the cluster, none where a row fits a warp; short unaligned rows.
    Bytes moved per element: x and out once each; with a residual also residual and residual_out.
    """

    def __init__(self, variant, config, centred):
        self.variant = variant
        self.n = variant.dims["n"]
        self.weight_offset = variant.attrs.get("weight_offset", 0.0)
        self.tile = RowTile(Vectors(variant, ROW_TENSORS, self.n, config.align_vectors, lines=config.lines), config)
        self.access = RowAccess(variant, self.tile)
        self.resident = config.resident
        # With a vector each, all threads wait for the one that stores the end of h's row before the sum. Elements take
        # it less time than pieces: add_rmsnorm of 16384 x 4097 takes 132 us, with pieces 148 (H200).
        self.by_elements = "residual_out" in variant.tensors and self.tile.per_thread == 1
        # Long rows would fill the registers in fp32, so they are kept in their own dtype.
        self.keep_dtype = config.keep_dtype and self.tile.vec > 1
        self.delay_weight_load = config.delay_weight_load
        self.unroll = config.unroll
        # Row groups of a CTA lie so far apart that their rows start at the same place of a vector.
        self.period = self.tile.v.unit if self.tile.v.shifted and self.unroll > 1 else 1
        narrow = ITEMSIZE[variant.tensors["x"].dtype] == 2
        self.sum = row_statistics(centred, self.tile, variant.attrs["eps"], False, min(self.unroll, 2), narrow=narrow)
        self.carveout = SMEM_PERCENT
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, tensors, stream):
        rows = self.tile.rows * self.unroll * self.period
        count = Int32((row_count(tensors.x) + (rows - 1)) // rows * self.period)
        self.kernel(tensors).launch(
            **clusters(self.tile, count, self.resident, self.carveout if self.resident > 1 else None),
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors):
        mX, mResidual, mWeight, mBias, mOut, mResidualOut = tensors
        bidx, local, t, rank = self.tile.here()
        smem = cutlass.utils.SmemAllocator()
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)
        outputs = [mOut] if const_expr(mResidualOut is None) else [mOut, mResidualOut]
        names = ("out", "residual_out")[: len(outputs)]
        blocks = self.access.allocate(smem, outputs, names)

        count = row_count(mX)
        group = Int64(bidx // self.period * (self.period * self.unroll) + bidx % self.period)
        rows = [(group + u * self.period) * self.tile.rows + local for u in range(self.unroll)]
        first = self.access.coord(rows[0], count, t, rank)
        coords = [first._replace(row=row) for row in rows]
        inputs = [mX] if const_expr(mResidual is None) else [mX, mResidual]

        if const_expr(self.pdl):
            few = cute.arch.grid_dim()[0] <= AHEAD
            for coord in coords:
                rows = self.access.rows(inputs, ROW_TENSORS, cutlass.min(coord.row, count - 1))
                self.access.fetch_ahead(rows, coord, few)
        wait_for_previous(self.pdl)
        held = [
            self.access.load(self.access.rows(inputs, ROW_TENSORS, self.access.readable(coord).row), coord)
            for coord in coords
        ]
        columns = None
        if const_expr(not self.delay_weight_load):
            columns = self.access.columns(mWeight, mBias, first)
        let_next_start(self.pdl)
        self.sum.ready()
        for u in cutlass.range_constexpr(self.unroll):
            rH, *moments = self._statistics(held[u], mResidualOut, coords[u], shared, u, blocks[1:])
            if const_expr(self.delay_weight_load):
                columns = self.access.columns(mWeight, mBias, first)
            self._postprocess(rH, moments, columns, mOut, coords[u], blocks[:1])
        self.access.flush(blocks, partial(self.access.rows, outputs, names), first)

    def _statistics(self, held, mResidualOut, coord, shared, step, blocks):
        """The row's h, which is stored if there is a residual, its mean and its rstd."""
        for k in range(self.tile.per_thread):
            for vectors in held:
                self.access.trim(vectors[k], k, coord)
        rH = held[0]
        if len(held) > 1:
            rH = [narrow(widen(a) + widen(b), mResidualOut.element_type, self.tile.vec) for a, b in zip(*held)]
            (gRow,) = self.access.targets([self.access.row(mResidualOut, "residual_out", coord.row)], blocks)
            for k, rX in enumerate(rH):
                self._store(gRow, rX, coord, k)
        return rH, *self.sum.row(lambda k: (widen(rH[k]),), coord.first, shared, step)

    def _postprocess(self, rH, moments, columns, mOut, coord, blocks):
        for k, (rWeight, rBias) in enumerate(columns):
            if self.keep_dtype:
                compiler_barrier(rH[k])
            y = affine(normalised(widen(rH[k]), *moments), rWeight, rBias, self.weight_offset)
            rOut = narrow(y, mOut.element_type, self.tile.vec)
            (gRow,) = self.access.targets([self.access.row(mOut, "out", coord.row)], blocks)
            self._store(gRow, rOut, coord, k)

    def _store(self, gRow, rX, coord, k):
        """Store a vector of a row that exists, at a row's end by elements or by pieces."""
        if self.by_elements and self.tile.partial(k) and not self.access.block:
            end = cutlass.select_(coord.valid, Int32(self.n), Int32(0))
            store_masked(rX, gRow.at(coord.first[k]), coord.first[k], end)
        else:
            self.access.store(gRow, rX, coord, k)
