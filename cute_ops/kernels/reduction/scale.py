"""Rows times a number each: see :mod:`cute_ops.ops.reduction.scale` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, load, narrow, store_if, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import load_number
from cute_ops.kernels.lib.row_layout import extent, row_address, row_count
from cute_ops.kernels.reduction.config import ScaleConfig


class Scale:
    """``out = x * factor[..., None]``; a row whose factor is one is not touched if ``out`` has the memory of x.

    Tile: rows are cut into blocks of ``unroll`` vectors per thread, ``threads`` apart, which ``ctas`` persistent CTAs
    take in turn. All loads of a block are in flight together. Output rows are compact, so their length is a multiple of
    the vector, which all rows' alignment bounds. No shared memory. Bytes moved per element: x once, out once.
    """

    def __init__(self, variant):
        self.keys = variant.tensors
        config = ScaleConfig.of(variant.config)
        self.threads, self.unroll, self.ctas = config.threads, config.unroll, config.ctas
        rows = [self.keys["x"], self.keys["out"]]
        self.vec = min(VECTOR_BYTES, *(min(key.align, key.row_align) for key in rows)) // ITEMSIZE[rows[0].dtype]
        self.block = self.threads * self.unroll * self.vec
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mX, mFactor, mOut, stream):
        blocks = row_count(mOut) * self._per_row(mOut)
        self.kernel(mX, mFactor, mOut).launch(
            grid=[Int32(cutlass.min(blocks, Int64(self.ctas))), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    def _length(self, mX):
        """Elements of a row, of which there may be more than 2^31."""
        return extent(mX, len(mX.shape) - 1)

    def _per_row(self, mX):
        return (self._length(mX) + (self.block - 1)) // self.block

    @cute.kernel
    def kernel(self, mX, mFactor, mOut):
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        rows, per_row = row_count(mOut), self._per_row(mOut)
        same = mX.iterator.toint() == mOut.iterator.toint()
        # One division here instead of one per step, which would take as long as skipping a block.
        steps = Int32((rows * per_row - bidx + (grid - 1)) // Int64(grid))
        # A gradient is one row: skipping its blocks one by one would take longer than the launch.
        none = same & (rows == 1) & (load_number(mFactor, self.keys["factor"], Int64(0)) == Float32(1.0))
        steps = cutlass.select_(none, Int32(0), steps)
        row, rows_on = Int64(bidx) // per_row, Int64(grid) // per_row
        block, blocks_on = Int64(bidx) - row * per_row, Int64(grid) - rows_on * per_row
        for _ in cutlass.range(steps, unroll=1):
            factor = load_number(mFactor, self.keys["factor"], row)
            # Strided rows of x cannot be the output itself, which is compact.
            if const_expr(self.keys["x"].layout == "flat"):
                if not (same & (factor == Float32(1.0))):
                    self._scale(mX, mOut, factor, row, block)
            else:
                self._scale(mX, mOut, factor, row, block)
            over = block + blocks_on >= per_row
            row = row + rows_on + cutlass.select_(over, Int64(1), Int64(0))
            block = block + blocks_on - cutlass.select_(over, per_row, Int64(0))

    def _scale(self, mX, mOut, factor, row, block):
        """One block of a row."""
        tidx, _, _ = cute.arch.thread_idx()
        n, itemsize = self._length(mOut), mX.element_type.width // 8
        left = n - block * self.block
        sources, targets = (
            row_address(m, self.keys[name], row, n) + block * (self.block * itemsize)
            for m, name in ((mX, "x"), (mOut, "out"))
        )
        loaded = []
        for u in range(self.unroll):
            first = (Int32(u * self.threads) + tidx) * self.vec
            valid = Int64(first) < left
            # A vector past the end loads the block's first one instead: a condition would make the next load wait.
            rX = fragment(mX.element_type, self.vec)
            load(rX, sources + Int64(cutlass.select_(valid, first, Int32(0))) * itemsize)
            loaded.append((rX, first, valid))
        for rX, first, valid in loaded:
            rOut = fragment(Float32, self.vec)
            wide = widen(rX)
            for j in range(self.vec):
                rOut[j] = wide[j] * factor
            store_if(valid, narrow(rOut.load(), mOut.element_type, self.vec), targets + Int64(first) * itemsize, True)
