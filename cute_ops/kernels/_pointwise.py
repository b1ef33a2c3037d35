"""One pass over ``[m, n]``, element by element."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.kernels._chain import can_chain, let_next_start, wait_for_previous
from cute_ops.kernels._rows import ITEMSIZE, present, row_address, row_count
from cute_ops.kernels._vectors import fragment, load_if, narrow, store_masked

VECTOR_BYTES = 16


class Pointwise:
    """Computes ``outputs = compute(*inputs)`` in fp32.

    Compact tensors are one long row, whatever n; others go row by row. Tile: a CTA of ``threads`` takes ``unroll``
    vectors per thread, ``threads`` apart, and all loads of a thread are in flight together. No shared memory.
    Bytes moved per element: every tensor once.

    Args:
        variant: the kernel's variant.
        inputs, outputs: names of the tensors.
        compute: fp32 vectors to a tuple of fp32 vectors.
    """

    def __init__(self, variant, inputs, outputs, compute):
        self.inputs = [variant.tensors[name] for name in inputs]
        self.outputs = [variant.tensors[name] for name in outputs]
        self.compute = compute
        self.n = variant.dims["n"]
        keys = present(variant, (*inputs, *outputs))
        self.one_row = all(key.layout == "flat" for key in keys)
        starts = [key.align if self.one_row else min(key.align, key.row_align) for key in keys]
        self.vec = min(min(a, VECTOR_BYTES) // ITEMSIZE[key.dtype] for a, key in zip(starts, keys))
        self.threads = variant.tile.get("threads", 256)
        self.unroll = variant.tile.get("unroll", 2)
        self.block = self.threads * self.unroll
        self.chained = can_chain(variant.arch)

    @cute.jit
    def __call__(self, inputs, outputs, stream):
        rows, n = self._shape(inputs[0])
        vectors = rows * ((n + (self.vec - 1)) // self.vec)
        self.kernel(inputs, outputs).launch(
            grid=[Int32((vectors + (self.block - 1)) // self.block), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.chained,
        )

    def _shape(self, mX):
        """(rows, elements of a row) as the kernel walks them, in 64 bits."""
        rows = row_count(mX)
        n = Int64(mX.shape[len(mX.shape) - 1]) if self.n is None else self.n
        return (Int64(1), rows * n) if self.one_row else (rows, n)

    @cute.kernel
    def kernel(self, inputs, outputs):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        rows, n = self._shape(inputs[0])
        start = Int64(bidx) * self.block
        places = []
        for u in cutlass.range_constexpr(self.unroll):
            places.append(self._place(start, Int32(u * self.threads) + tidx, rows, n))
        wait_for_previous(self.chained)
        loaded = []
        for u in cutlass.range_constexpr(self.unroll):
            loaded.append([self._load(mX, key, *places[u]) for mX, key in zip(inputs, self.inputs)])
        let_next_start(self.chained)
        for u in cutlass.range_constexpr(self.unroll):
            results = self.compute(*(rX.load().to(cutlass.Float32) for rX in loaded[u]))
            for mX, key, x in zip(outputs, self.outputs, results):
                self._store(x, mX, key, *places[u])

    def _place(self, start, index, rows, n):
        """Where a vector lies: (its row, the element of the row it starts at, elements left in that row)."""
        if self.one_row:
            left = n - start * self.vec
            first = index * self.vec
            return Int64(0), start * self.vec + first, Int32(cutlass.min(left, Int64(self.block * self.vec))) - first
        per_row = (n + (self.vec - 1)) // self.vec
        # One division in 64 bits per CTA, the rest in 32.
        above = start // per_row
        local = Int32(start - above * per_row) + index
        below = local // Int32(per_row)
        first = (local - below * Int32(per_row)) * self.vec
        row = above + below
        return row, Int64(first), cutlass.select_(row < rows, Int32(n) - first, Int32(0))

    def _address(self, mX, key, row, first):
        itemsize = mX.element_type.width // 8
        if self.one_row:
            return mX.iterator.toint() + first * itemsize
        return row_address(mX, key, row, mX.shape[len(mX.shape) - 1]) + first * itemsize

    def _load(self, mX, key, row, first, left):
        rX = fragment(mX.element_type, self.vec)
        load_if(left > 0, rX, self._address(mX, key, row, first))
        return rX

    def _store(self, x, mX, key, row, first, left):
        rX = narrow(x, mX.element_type, self.vec)
        store_masked(rX, self._address(mX, key, row, first), Int32(0), left, True)
