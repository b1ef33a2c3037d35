"""The sums of a product whose terms are cut into parts, and its epilogue: a second kernel."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.expressions.groups import sizes
from cute_ops.kernels.lib.copy import fragment, load
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.accumulators import Chunk


class AddParts:
    """``outputs = epilogue(parts[0] + parts[1] + ..., operands)``, for parts ``(parts, m, n)`` in float32.

    Tile: a thread has two neighbouring columns in two rows, of packed weights those of the gate and of the up
    projection. No shared memory. Bytes moved: the parts, which are in L2, operands and outputs once. The order of the
    parts is fixed: equal calls give equal bits.
    """

    threads = 256

    def __init__(self, variant, epilogue, parts):
        groups = sizes(epilogue.expression) or any(tensor.period for tensor in epilogue.operands)
        if epilogue.rows.reductions or epilogue.batched or groups:
            raise NotImplementedError("terms of batches, of reductions and of groups are not cut into parts")
        self.epilogue, self.parts, self.pdl = epilogue, parts, can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mParts, operands, outputs, stream):
        m, n = Int32(mParts.shape[1]), Int32(mParts.shape[2]) // self.epilogue.halves
        grid = [cute.ceil_div(cute.ceil_div(m, 2) * cute.ceil_div(n, 2), self.threads), 1, 1]
        self.kernel(mParts, operands, outputs, (m, n)).launch(
            grid=grid, block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mParts, operands, outputs, shape):
        m, n = shape
        item, pairs = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0], cute.ceil_div(n, 2)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if item < cute.ceil_div(m, 2) * pairs:
            row, column = 2 * (item // pairs), 2 * (item % pairs)
            self._compute(mParts, operands, outputs, Chunk((row, row + 1), (column,), (m, n), (0,)))

    def _compute(self, mParts, operands, outputs, chunk):
        """Compute and store the outputs of a chunk."""
        epilogue = self.epilogue
        sums = [self._sum(mParts, chunk, half) for half in range(epilogue.halves)]

        def value(half, v, distance):
            return sums[half][v]

        loaded = [epilogue.load(tensor, mX, chunk) for tensor, mX in zip(epilogue.operands, operands)]
        results = epilogue.compute(value, loaded, chunk, {})
        for tensor, mX, rX in zip(epilogue.outputs, outputs, results):
            epilogue.store(tensor, mX, rX, chunk)

    def _sum(self, mParts, chunk, half):
        """The sums of a chunk, of the gate's columns or of those behind them: of two rows two neighbours each."""
        (m, n), (column,) = chunk.shape, chunk.columns
        found = fragment(Float32, 4)
        for r in range(2):
            row = cutlass.min(chunk.rows[r], m - 1)
            for i in range(self.parts):
                at = (Int64(i) * m + row) * (n * self.epilogue.halves) + half * n + column
                part = fragment(Float32, 2)
                load(part, mParts.iterator.toint() + at * 4)
                for j in range(2):
                    found[2 * r + j] = part[j] if i == 0 else found[2 * r + j] + part[j]
        return found
