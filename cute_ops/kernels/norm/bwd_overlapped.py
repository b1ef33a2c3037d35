"""Backward of the norms for some hundred rows; see :mod:`cute_ops.kernels.norm.bwd_persistent` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.column_reduce import CTAColumnSum
from cute_ops.kernels.lib.copy import fragment, widen
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import Row, VectorAccess
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.norm.bwd_persistent import NormBackward
from cute_ops.kernels.norm.persistent import Groups
from cute_ops.kernels.norm.statistics import centre


class NormBackwardOverlapped(NormBackward):
    """Two launches that overlap: one goes by rows, the other by columns, and waits for two numbers of each row only.

    The first launch writes the rows' gradients, a row group per cluster, and each row's mean and rstd to the workspace.
    By then the second has loaded its columns of x and dout of all rows into registers.
    Tile: rows as in :class:`NormBackward`, one step each. Columns: ``column_threads`` threads share a vector of columns
    and hold ``rows_per_thread`` rows each.
    Shared memory: as in :class:`NormBackward`; of the second kernel, 4 bytes per thread and element of a vector.
    Bytes moved per element: x and dout twice, the second time mostly from L2, dx once.
    """

    threads = 256

    def __init__(self, variant, config, x, dx, centred):
        super().__init__(variant, config, x, dx, centred)
        self.early = True
        self.column_threads, self.rows_per_thread = config.column_threads, config.rows_per_thread
        self.width = self.threads // self.column_threads
        self.threads_sum = CTAColumnSum(self.threads, self.width, self.tile.vec, self.column_threads, self.n)

    @cute.jit
    def __call__(self, tensors, stream):
        """Launch both kernels. The last workspace is (rows, 2), None without a weight."""
        mTerms, inputs, dcolumns = tensors.partials[2], tensors.inputs, tensors.dcolumns
        rows = row_count(inputs[0])
        groups = Int32((rows + (self.tile.rows - 1)) // self.tile.rows)
        self.launch(Groups(inputs, tensors.columns[0], tensors.outputs, (mTerms,)), groups, stream)
        if const_expr(any(m is not None for m in dcolumns)):
            self.by_columns(inputs, dcolumns, mTerms).launch(
                grid=[-(-self.n // (self.width * self.tile.vec)), 1, 1],
                block=[self.threads, 1, 1],
                stream=stream,
                use_pdl=self.pdl,
            )

    def _accumulate(self, partials):
        return partials[0]

    def _accumulate_nothing(self, partials, memory, rank, line):
        pass

    def _store_accumulated(self, partials, memory, walk, rank, line):
        pass

    def _postprocess(self, walk, row, step, sums):
        mTerms = walk.accumulated
        super()._postprocess(walk._replace(accumulated=(None, None)), row, step, sums)
        if mTerms is not None:
            mean, rstd, _, _ = self.sum.backward_terms(sums, 1.0 / self.n)
            self._store_terms(mTerms, row, mean, rstd)

    @cute.jit
    def _store_terms(self, mTerms, row: Int64, mean: cutlass.Constexpr, rstd: Float32):
        alone = cute.arch.thread_idx()[0] % self.tile.threads_per_row == 0
        if const_expr(self.tile.cluster > 1):
            alone = alone & (cute.arch.block_idx_in_cluster() == 0)
        if alone:
            mTerms[row, 1] = rstd
            if const_expr(mean is not None):
                mTerms[row, 0] = mean

    @cute.kernel
    def by_columns(self, inputs, dcolumns, mTerms):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        vec, width = self.tile.vec, self.width * self.tile.vec
        smem = cutlass.utils.SmemAllocator()
        sColumns = self.threads_sum.allocate(smem)
        vector, top = tidx % self.width, tidx // self.width
        column = bidx * width + vector * vec
        count = row_count(inputs[0])
        rows = [Int64(i * self.column_threads + top) for i in range(self.rows_per_thread)]
        held = [
            tuple(self._load(inputs[i], self.names[i], row, column, count) for i in range(2)) for row in rows
        ]  # fmt: skip
        # The loads above need no wait, since the first kernel let this one start after its own wait. Its results do.
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        sums = [fragment(Float32, vec, 0.0) for _ in dcolumns]
        for row, (rX, rDout) in zip(rows, held):
            dout = widen(rDout)
            if const_expr(mTerms is not None):
                place = cutlass.min(row, count - 1)
                mean = mTerms[place, 0] if const_expr(self.sum.centred) else None
                rNormed = fragment(Float32, vec)
                rNormed.store(centre(widen(rX), mean) * mTerms[place, 1] * dout)
                # Past the last row, its numbers are read again. They may be NaN.
                for j in cutlass.range_constexpr(vec):
                    sums[0][j] = sums[0][j] + cutlass.select_(row < count, rNormed[j], Float32(0.0))
            sums[1].store(sums[1].load() + dout)
        for mD, rSum in zip(dcolumns, sums):
            if const_expr(mD is not None):
                self.threads_sum(mD, rSum, sColumns, vector, top, bidx * width)

    def _load(self, mX, name, row, column, count):
        """A vector of a row, zero past the last row; loaded from L2, which has what earlier kernels wrote."""
        gRow = Row.of(mX, self.variant.tensors[name], row, self.n)
        wanted = (row < count) & (column < self.n)
        return VectorAccess(self.tile.v, shared=True).load(gRow, column, self.n, wanted)
