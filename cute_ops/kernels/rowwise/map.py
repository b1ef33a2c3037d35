"""Outputs that follow from a row's inputs and its numbers, element by element."""

from dataclasses import replace
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.copy import AHEAD, fragment, load_elements, store_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import Row, RowAccess
from cute_ops.kernels.lib.row_layout import RowTile, Vectors, WalkedRow, row_count
from cute_ops.kernels.rowwise.function import Columns


class Segments:
    """One pass.

    Tile: a CTA of ``threads`` holds ``threads / threads_per_row`` rows or one of the ``segments`` of a long row.
    Shared memory: short unaligned rows of outputs. Bytes moved per element: every row tensor once. Each thread reads
    its elements before it writes them, so an output may have an input's memory. CTAs that start while the previous
    kernel is busy prefetch their inputs to L2.
    """

    def __init__(self, variant, config, function):
        self.variant = variant
        self.function = function
        self.n = variant.dims["n"]
        vectors = Vectors(variant, (*function.inputs, *function.outputs), self.n, config.align_vectors)
        self.segments = config.segments
        self.pdl = can_use_pdl(variant.arch)
        self.known = config.form != "elements"
        if self.known:
            self.tile = RowTile(vectors, replace(config, cluster=config.segments))
            self.access = RowAccess(variant, self.tile)
        else:
            self.tile = WalkedRow(vectors, config)

    @cute.jit
    def __call__(self, inputs, outputs, numbers, stream):
        rows = self.tile.rows
        self.kernel(inputs, outputs, numbers).launch(
            grid=[Int32((row_count(outputs[0]) + (rows - 1)) // rows), self.segments, 1],
            block=[self.tile.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, inputs, outputs, numbers):
        bidx, local, t, rank = self.tile.here()
        row = Int64(bidx) * self.tile.rows + local
        count = row_count(outputs[0])
        coord, blocks = None, []
        if const_expr(self.known):
            coord = self.access.coord(row, count, t, rank)
            blocks = self.access.allocate(cutlass.utils.SmemAllocator(), outputs, self.function.outputs)
        if const_expr(self.known and self.pdl):
            self._fetch_ahead(inputs, coord, bidx)
        wait_for_previous(self.pdl)
        context, predicate = self.function.begin(self.variant, numbers, row, row < count)
        if const_expr(self.known):
            self._vectors(inputs, outputs, coord, predicate, context, blocks)
        else:
            self._elements(inputs, outputs, t, row, context)

    def _fetch_ahead(self, inputs, coord, bidx):
        index = bidx if self.segments == 1 else bidx + coord.rank * cute.arch.grid_dim()[0]
        rows = self.access.rows(inputs, self.function.inputs, coord.row)
        self.access.fetch_ahead(rows, coord, coord.valid & (index < AHEAD))

    def _vectors(self, inputs, outputs, coord, predicate, context, blocks):
        function = self.function
        rows = partial(self.access.rows, outputs, function.outputs)
        held = self.access.load(self.access.rows(inputs, function.inputs, coord.row), coord, predicate)
        let_next_start(self.pdl)
        for k, first in enumerate(coord.first):
            values = tuple(rX[k].load().to(Float32) for rX in held)
            emitted = function.emit(values, (), context, Columns(first, self.tile.vec))
            for x, gRow in zip(emitted, self.access.targets(rows(coord.row), blocks)):
                self.access.store(gRow, function.rounded(x, gRow.element_type, self.tile.vec), coord, k)
        self.access.flush(blocks, rows, coord)

    @cute.jit
    def _elements(self, inputs, outputs, tidx, row, context: cutlass.Constexpr):
        """A row whose length is not known at compile time, element by element."""
        long_n = outputs[0].shape[-1]
        n = Int32(long_n)
        sources, targets = (
            [Row.of(m, self.variant.tensors[name], row, long_n) for m, name in zip(tensors, names)]
            for tensors, names in ((inputs, self.function.inputs), (outputs, self.function.outputs))
        )
        let_next_start(self.pdl)
        for column in cutlass.range(tidx, n, self.tile.threads, unroll=4):
            self._element(sources, targets, column, n, context)

    def _element(self, sources, targets, column, n, context):
        values = []
        for gRow in sources:
            rX = fragment(gRow.element_type, 1)
            load_elements(rX, gRow.at(column), column, n)
            values.append(rX.load().to(Float32))
        for x, gRow in zip(self.function.emit(tuple(values), (), context, Columns(column, 1)), targets):
            store_elements(self.function.rounded(x, gRow.element_type, 1), gRow.at(column), column, n)
