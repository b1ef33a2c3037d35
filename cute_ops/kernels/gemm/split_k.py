"""The second kernel of a product whose k is split: it adds up the partial sums and computes the epilogue."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.kernels.lib.copy import fragment, load
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.accumulators import Chunk

PAIR = 2  # neighbouring rows of a thread, and neighbouring columns


class ReduceSplitK:
    """``outputs = epilogue(sum of the partial sums)``, in a fixed order.

    These are ``(partials, columns, rows)`` in fp32, as :class:`~cute_ops.kernels.gemm.sm90.GemmSm90` stores them;
    of gate_up weights the columns of both halves.
    Tile: 16 rows and 32 columns; a warp has 8 of the columns, a thread two neighbours in two rows. No shared memory.
    Bytes moved: the partial sums, from L2, operands and outputs once.
    """

    warps, lanes_m, lanes_n = 4, 8, 4  # lanes of a warp along m and along n
    rows, columns = PAIR * lanes_m, PAIR * lanes_n * warps

    def __init__(self, epilogue, arch):
        self.epilogue, self.pdl = epilogue, can_use_pdl(arch)

    @cute.jit
    def __call__(self, mPartials, count, operands, outputs, shape: cutlass.Constexpr, stream):
        m, n = shape
        tiles_m, tiles_n = cute.ceil_div(m, self.rows), cute.ceil_div(n, self.columns)
        self.kernel(mPartials, count, operands, outputs, m, n).launch(
            grid=[tiles_m * tiles_n, 1, 1], block=[32 * self.warps, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mPartials, count: Int32, operands, outputs, m: Int32, n: Int32):
        tidx, bidx, tiles = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], cute.ceil_div(m, self.rows)
        row = bidx % tiles * self.rows + tidx % self.lanes_m * PAIR
        column = bidx // tiles * self.columns + tidx // self.lanes_m * PAIR
        chunk = Chunk((row, row + 1), (column,), (m, n), (0,))
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        loaded = [self.epilogue.load(tensor, mX, chunk) for tensor, mX in zip(self.epilogue.operands, operands)]
        halves = [fragment(Float32, PAIR * PAIR) for _ in range(self.epilogue.halves)]
        for h, rSums in enumerate(halves):
            self._sum(rSums, mPartials, count, row, [cutlass.min(column + j, n - 1) + h * n for j in range(PAIR)])
        results = self.epilogue.compute(lambda h, v, distance: halves[h][v], loaded, chunk, {})
        for tensor, mX, rX in zip(self.epilogue.outputs, outputs, results):
            self.epilogue.store(tensor, mX, rX, chunk)

    @cute.jit
    def _sum(self, rSums, mPartials, count, row, columns: cutlass.Constexpr):
        """This thread's sums, row by row. A thread past the last row adds up the last rows again."""
        rows = Int64(mPartials.shape[2])
        address, step = mPartials.iterator.toint(), Int64(mPartials.shape[1]) * rows * 4
        row = cutlass.min(row, Int32(rows) - PAIR)
        rSums.fill(0.0)
        for _ in cutlass.range(count, unroll=4):
            for j, column in enumerate(columns):
                rPartial = fragment(Float32, PAIR)
                load(rPartial, address + (column * rows + row) * 4)
                for r in range(PAIR):
                    rSums[PAIR * r + j] += rPartial[r]
            address += step
