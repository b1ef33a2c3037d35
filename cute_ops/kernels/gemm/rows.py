"""The outputs of an epilogue that have no columns: reductions of rows, and values computed from them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.expressions.text import text_of
from cute_ops.kernels.emit.emitter import Emitter
from cute_ops.kernels.emit.primitives import COMBINE, NEUTRAL
from cute_ops.kernels.lib.copy import fragment, load, store_if
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import store_number_if


class RowReductions:
    """Reductions over a warp's columns of a tile. Lanes ``4 r .. 4 r + 3`` hold the rows ``r`` and ``r + 8``, by the
    layout of the matrix instructions.

    The results go to the workspace ``row_partials``, ``(rows, partials, reductions)`` in fp32: each warp along a row
    has one.
    ``reductions`` are primitives of :data:`COMBINE`.
    """

    def __init__(self, reductions):
        self.reductions = reductions

    def start(self):
        """The results for no columns: two rows for each reduction."""
        return [fragment(Float32, 2, NEUTRAL[primitive]) for primitive in self.reductions]

    def add(self, results, terms, chunk):
        """Add the terms of a chunk, a fragment for each reduction, except for columns outside."""
        for v in range(chunk.size):
            r, inside = v // 2 % 2, chunk.columns[v // 4] + v % 2 < chunk.shape[1]
            for primitive, rX, rTerm in zip(self.reductions, results, terms):
                rX[r] = COMBINE[primitive](rX[r], cutlass.select_(inside, rTerm[v], Float32(NEUTRAL[primitive])))

    @cute.jit
    def store(self, results: cutlass.Constexpr, mPartials, rows: cutlass.Constexpr, m, partial):
        """Store the results of two rows, as this one of their partial results."""
        count = len(self.reductions)
        for r in cutlass.range_constexpr(2):
            rX = fragment(Float32, count)
            for i, primitive in enumerate(self.reductions):
                rX[i] = cute.arch.warp_reduction(results[i][r], COMBINE[primitive], threads_in_group=4)
            at = address(mPartials, rows[r], partial, count)
            for i in cutlass.range_constexpr(count):
                store_number_if((cute.arch.thread_idx()[0] % 4 == 0) & (rows[r] < m), rX[i], at + 4 * i)


def address(mPartials, row, partial, count):
    """The address of one of a row's partial results: a number for each of ``count`` reductions."""
    return mPartials.iterator.toint() + (Int64(row) * Int64(mPartials.shape[1]) + partial) * (4 * count)


class FinishRows:
    """Combines the partial results of each row, in a fixed order, and computes the outputs without columns.

    Tile: 8 threads take a row, each every eighth partial result. No shared memory. Bytes moved: these, from L2, and the
    outputs once.

    Args:
        expression: computes the outputs from the reductions' results, followed by all operands of the epilogue.
        operands: the tensors of the operands that it reads, by their index in the expression.
    """

    threads, lanes = 128, 8

    def __init__(self, expression, reductions, operands, outputs, arch):
        self.emit, self.reductions = Emitter(text_of(expression)), reductions
        self.operands, self.outputs, self.pdl = operands, outputs, can_use_pdl(arch)

    @cute.jit
    def __call__(self, mPartials, operands, outputs, n, stream):
        m = Int32(mPartials.shape[0])
        self.kernel(mPartials, operands, outputs, n).launch(
            grid=[cute.ceil_div(m, self.threads // self.lanes), 1, 1], block=[self.threads, 1, 1], stream=stream,
            use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mPartials, operands, outputs, n: Int32):
        tidx, bidx = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        m, partials = Int32(mPartials.shape[0]), Int32(mPartials.shape[1])
        mine, lane = bidx * (self.threads // self.lanes) + tidx // self.lanes, tidx % self.lanes
        row = cutlass.min(mine, m - 1)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        results = fragment(Float32, max(len(self.reductions), 1))
        for i, primitive in enumerate(self.reductions):
            results[i] = Float32(NEUTRAL[primitive])
        for partial in cutlass.range(lane, partials, self.lanes, unroll=4):
            for i, primitive in enumerate(self.reductions):
                one = fragment(Float32, 1)
                load(one, address(mPartials, row, partial, len(self.reductions)) + 4 * i)
                results[i] = COMBINE[primitive](results[i], one[0])
        elements = [None] * len(self.emit.expression.operands)
        for i, primitive in enumerate(self.reductions):
            elements[i] = cute.arch.warp_reduction(results[i], COMBINE[primitive], threads_in_group=self.lanes)
        for (i, tensor), mX in zip(self.operands.items(), operands):
            one = fragment(mX.element_type, 1)
            load(one, tensor.address(mX, row, n))
            elements[i] = one[0].to(Float32)
        for tensor, mX, x in zip(self.outputs, outputs, self.emit(*elements, length=n)):
            one = fragment(mX.element_type, 1)
            one[0] = x.to(mX.element_type)
            store_if((lane == 0) & (mine < m), one, tensor.address(mX, row, n))
