"""Short rows that start anywhere to float8_e4m3fn; see :mod:`cute_ops.kernels.quantize.one_pass` for the maths."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from cute_ops.kernels.lib.column_params import column_vectors
from cute_ops.kernels.lib.copy import fragment, narrow, widen
from cute_ops.kernels.lib.fp8 import largest_of_each, scale_of, to_fp8
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_blocks import Elements, RowBlocks
from cute_ops.kernels.lib.row_copy import store_number_if
from cute_ops.kernels.lib.row_layout import RowTile, clusters, present, row_address, row_count
from cute_ops.kernels.lib.row_reduce_max import RowMax
from cute_ops.kernels.norm.statistics import row_statistics
from cute_ops.kernels.quantize.one_pass import QuantizeRows

OUT = ("out", "residual_out")


def blocks(variant, config, source):
    """The form ``blocks``; one pass of registers where rows do not follow on each other."""
    form = QuantizeRowsInBlocks(variant, config, source)
    if form.blocks.holds(present(variant, (*source.names, *OUT))):
        return form
    return QuantizeRows(variant, replace(config, form="one_pass", unroll=1, resident=1), source)


class QuantizeRowsInBlocks:
    """One pass: the rows of a CTA go through shared memory as whole vectors.

    Tile: ``threads_per_row`` threads of a warp hold a row, of which each takes every so many-th element; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows at a time, ``unroll`` times, with the weight in registers. Each
    row has one scale.
    Shared memory: the CTA's rows of inputs and of out; those of the residual become those of residual_out.
    Bytes moved per element: every tensor once.
    """

    def __init__(self, variant, config, source):
        self.variant, self.source, self.n = variant, source, variant.dims["n"]
        self.power_of_two = variant.attrs["power_of_two"]
        self.tile = RowTile(Elements(variant, (*source.names, *OUT), self.n), config)
        self.unroll, self.resident = config.unroll, config.resident
        self.blocks = RowBlocks(self.tile, self.tile.rows * self.unroll)
        # A row's threads are those of a warp, which exchange nothing through shared memory.
        self.sum = row_statistics(False, self.tile, source.eps, backward=False, stages=1)
        self.max = RowMax(self.tile, 1)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, inputs, columns, mResidualOut, mOut, mScale, stream):
        count = Int32((row_count(mOut) + (self.blocks.rows - 1)) // self.blocks.rows)
        self.kernel(inputs, columns, mResidualOut, mOut, mScale).launch(
            **clusters(self.tile, count, self.resident, 100), stream=stream, use_pdl=self.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(self, inputs, columns, mResidualOut, mOut, mScale):
        bidx, local, t, rank = self.tile.here()
        smem = cutlass.utils.SmemAllocator()
        rows_of = [self.blocks.allocate(smem, mX) for mX in inputs]
        sOut = smem.allocate_tensor(Uint8, cute.make_layout(self.blocks.size), byte_alignment=16)
        start, first = Int64(bidx) * self.blocks.rows, self.tile.columns(t, rank, Int64(0))
        rows = Int32(cutlass.min(row_count(mOut) - start, Int64(self.blocks.rows)))
        wait_for_previous(self.pdl)
        for mX, sX, name in zip(inputs, rows_of, self.source.names):
            if cutlass.const_expr(mX is not None):
                self.blocks.fetch(sX, self._address(mX, name, start), rows)
        cute.arch.cp_async_commit_group()
        loaded = [
            [None] * self.tile.per_thread
            if m is None
            else column_vectors(m, self.variant.tensors[name], self.tile, first)
            for m, name in zip(columns, ("weight", "bias"))
        ]
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        let_next_start(self.pdl)
        for u in cutlass.range(self.unroll, unroll=1):
            place = u * self.tile.rows + local
            speaks = (t == 0) & (place < rows)
            scale = speaks, row_address(mScale, self.variant.tensors["scale"], start + place, 1)
            self._row([sX for sX in rows_of if sX is not None], sOut, loaded, first, place, scale)
        cute.arch.barrier()
        self.blocks.send(sOut, self._address(mOut, "out", start), rows)
        if cutlass.const_expr(mResidualOut is not None):
            self.blocks.send(rows_of[1], self._address(mResidualOut, "residual_out", start), rows)

    def _address(self, mX, name, row):
        return row_address(mX, self.variant.tensors[name], row, self.n)

    def _row(self, rows_of, sOut, columns, first, local, scale):
        places = list(zip(first, [not self.tile.ends_outside(k) for k in range(self.tile.per_thread)]))
        held = [[widen(self.blocks.read(sX, local, *place)) for sX in rows_of] for place in places]
        rstd = None
        if self.source.normed:
            if len(rows_of) > 1:
                held = [[self._added(*each, rows_of[1], local, place)] for each, place in zip(held, places)]
            given = self.sum.thread(lambda k: (held[k][0],), first, None)
            _, rstd = self.sum.forward_terms(self.sum(given, None, Int32(0)), 1.0 / self.n)
        rY = fragment(Float32, self.tile.per_thread)
        for k, (each, place) in enumerate(zip(held, places)):
            rY[k] = self._value(each, rstd, columns[0][k], columns[1][k], *place)
        (largest,) = self.max(tuple(largest_of_each([rY])), None, Int32(0))
        factor, inverse = scale_of(largest, self.power_of_two)
        store_number_if(scale[0], factor, scale[1])
        rBytes = to_fp8(rY.load() * inverse, self.tile.per_thread)
        for k, place in enumerate(places):
            rOut = fragment(Uint8, 1)
            rOut[0] = rBytes[k]
            self.blocks.write(rOut, sOut, local, *place)

    def _added(self, x, residual, sResidual, local, place):
        """An element's sum, rounded, which takes the residual's place."""
        rH = narrow(x + residual, sResidual.element_type, 1)
        self.blocks.write(rH, sResidual, local, *place)
        return widen(rH)

    def _value(self, wide, rstd, rWeight, rBias, first, inside):
        """An element in fp32, zero outside the row, also where there is a bias."""
        y = self.source(*wide, rstd, rWeight, rBias)[0]
        return y if inside else cutlass.select_(first < self.n, y, Float32(0.0))
