"""Sums of columns in a fixed order, of the weight gradients: over a workspace's rows, and over the threads of a CTA."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous

BATCH = 8
# Columns of a CTA by those of a workspace. With FEW_LEVELS_FROM of them one thread adds up what those of a column have.
COLUMNS = ((2048, 8), (8192, 16), (32768, 32), (float("inf"), 128))
FEW_LEVELS_FROM = 128
TERMS = 64  # that a thread adds one after another before it folds their sum into a total


def fold(rSum, rTotal):
    """Add a thread's running sum to a total; what rounding the total loses is left in the running sum.

    One sum of k terms in fp32 loses about ``sqrt(k) / 4`` units in its last place. Folded every some terms, it loses
    what that many terms do, however many there are (Kahan).
    """
    old, term = rTotal.load(), rSum.load()
    rTotal.store(old + term)
    rSum.store(term - (rTotal.load() - old))


class ColumnSum:
    """``out[c] = sum_p partials[p, c]`` in fp32, rounded once to out's dtype.

    Tile: a CTA of 512 threads takes ``columns`` columns of one workspace. The ``512 / columns`` threads of a column add
    every ``512 / columns``-th row each, then a warp adds their sums, or one of them if they are few. CTAs take few
    columns if there are few altogether, and many of long rows, of which a workspace has few.
    Shared memory: 2 KB. Bytes moved: the workspaces once, mostly from L2.

    Args:
        n: columns of all workspaces, or of one of them if they are equally wide; None if not known.
    """

    def __init__(self, n, arch):
        self.columns = next((columns for most, columns in COLUMNS if n is not None and n <= most), 32)
        self.depth = 512 // self.columns
        self.pdl = can_use_pdl(arch)

    @cute.jit
    def __call__(self, partials, outputs, stream):
        blocks = Int32(0)
        for mPartials in partials:
            if const_expr(mPartials is not None):
                blocks = blocks + self._blocks(mPartials)
        self.kernel(partials, outputs).launch(
            grid=[blocks, 1, 1],
            block=[self.columns, self.depth, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, partials, outputs):
        smem = cutlass.utils.SmemAllocator()
        sSum = smem.allocate_tensor(Float32, cute.make_layout((self.columns + 1, self.depth)), byte_alignment=16)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        block = cute.arch.block_idx()[0]
        for mPartials, mOut in zip(partials, outputs):
            if const_expr(mPartials is not None):
                if block >= 0 and block < self._blocks(mPartials):
                    self._sum(mPartials, mOut, sSum, block * self.columns)
                block = block - self._blocks(mPartials)

    def _blocks(self, mPartials):
        """CTAs for the columns of a workspace."""
        return cute.ceil_div(Int32(mPartials.shape[1]), self.columns)

    @cute.jit
    def _sum(self, mPartials, mOut, sSum, start: Int32):
        x, level, _ = cute.arch.thread_idx()
        n = Int32(mPartials.shape[1])
        total = Float32(0.0)
        if start + x < n:
            count = Int32(mPartials.shape[0])
            for p in cutlass.range(level, count, self.depth * BATCH, unroll=1):
                # BATCH loads at a time; past the end they load the last row again, which is then not counted.
                rPartials = fragment(Float32, BATCH)
                for i in cutlass.range_constexpr(BATCH):
                    rPartials[i] = mPartials[cutlass.min(p + i * self.depth, count - 1), start + x]
                for i in cutlass.range_constexpr(BATCH):
                    total = total + cutlass.select_(p + i * self.depth < count, rPartials[i], Float32(0.0))
        sSum[x, level] = total
        cute.arch.barrier()
        if const_expr(self.columns >= FEW_LEVELS_FROM):
            if (level == 0) & (start + x < n):
                for d in cutlass.range_constexpr(1, self.depth):
                    total = total + sSum[x, d]
                mOut[start + x] = total.to(mOut.element_type)
        else:
            self._add_levels(mOut, sSum, start, n)

    @cute.jit
    def _add_levels(self, mOut, sSum, start: Int32, n: Int32):
        x, level, _ = cute.arch.thread_idx()
        thread = level * self.columns + x
        lane, warp = thread % WARP, thread // WARP
        for c in cutlass.range(warp, self.columns, 512 // WARP, unroll=1):
            total = Float32(0.0)
            for d in cutlass.range_constexpr(0, self.depth, WARP):
                if const_expr(d + WARP <= self.depth):
                    total = total + sSum[c, d + lane]
                elif lane < self.depth:
                    total = sSum[c, lane]
            total = cute.arch.warp_reduction(total, operator.add)
            if lane == 0 and start + c < n:
                mOut[start + c] = total.to(mOut.element_type)


class TileColumnSum:
    """The sums of columns over the rows of a tile, a :class:`~cute_ops.kernels.lib.row_layout.RowTile`, in fp32.

    Shared memory: a row of sums for each row of the tile, in memory that is there already.
    """

    def __init__(self, tile):
        self.tile = tile
        self.width = tile.threads_per_row * tile.per_thread * tile.vec

    @cute.jit
    def __call__(self, rSums: cutlass.Constexpr, base: cutlass.Constexpr, address: Int64, group: Int32, rank):
        """Store them at an address; ``rSums``: this thread's sums, a fragment for each of its vectors, over the row
        groups from ``group`` on.
        """
        tile, tidx = self.tile, cute.arch.thread_idx()[0]
        t, local = tidx % tile.threads_per_row, tidx // tile.threads_per_row
        layout = cute.make_layout((self.width, tile.rows), stride=(1, self.width))
        sRows = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
        # After the barrier no thread reads what was in this memory, or the sums of the call before.
        cute.arch.barrier()
        for k in cutlass.range_constexpr(tile.per_thread):
            for j in cutlass.range_constexpr(tile.vec):
                sRows[tile.vector(t, rank, k) * tile.vec + j, local] = rSums[k][j]
        cute.arch.barrier()
        gSums = cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem), cute.make_layout(tile.n))
        for column in cutlass.range(tidx, tile.n, tile.threads, unroll=1):
            total = Float32(0.0)
            for r in cutlass.range_constexpr(self.tile.rows):
                total = total + sRows[self._place(column, group, r), r]
            gSums[column] = total

    def _place(self, column, group, r):
        """The index of a column's sum in the r-th row of sums."""
        return column + self.tile.v.shift(Int64(group) * self.tile.rows + r, self.tile.n)


class CTAColumnSum:
    """``out[start + c]`` is the sum of column ``c`` over the threads of a CTA, in fp32, rounded once to out's dtype.

    ``depth`` threads share each of ``vectors`` vectors of ``vec`` columns, of n altogether; others have no sum. Threads
    that lie side by side add a column together. Shared memory: 4 bytes for each of these threads and columns.
    """

    def __init__(self, threads, vectors, vec, depth, n):
        self.threads, self.vec, self.depth, self.n = threads, vec, depth, n
        self.width = vectors * vec
        self.every = vectors * depth == threads
        self.group = min(1 << ((threads // self.width) | 1).bit_length() - 1, WARP)

    def allocate(self, smem):
        layout = cute.make_layout((self.width, self.depth), stride=(1, self.width + 4))
        return smem.allocate_tensor(Float32, layout, byte_alignment=16)

    @cute.jit
    def __call__(self, mD, rSum, sColumns, vector, top, start):
        """Store the sums; ``rSum`` are those of this thread, the ``top``-th of the threads that share the vector."""
        tidx, group = cute.arch.thread_idx()[0], self.group
        cute.arch.barrier()
        if const_expr(self.every):
            self._put(rSum, sColumns, vector, top)
        elif top < self.depth:
            self._put(rSum, sColumns, vector, top)
        cute.arch.barrier()
        side = self.threads // group
        for i in cutlass.range_constexpr(-(-self.width // side)):
            column = i * side + tidx // group
            place = cutlass.min(column, self.width - 1)
            total = Float32(0.0)
            for row in cutlass.range_constexpr(0, self.depth, group):
                if const_expr(row + group <= self.depth):
                    total = total + sColumns[place, row + tidx % group]
                elif row + tidx % group < self.depth:
                    total = total + sColumns[place, row + tidx % group]
            total = cute.arch.warp_reduction(total, operator.add, threads_in_group=group)
            if (tidx % group == 0) & (column < self.width) & (start + column < self.n):
                mD[start + column] = total.to(mD.element_type)

    def _put(self, rSum, sColumns, vector, top):
        for j in range(self.vec):
            sColumns[vector * self.vec + j, top] = rSum[j]
