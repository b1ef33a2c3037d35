"""The largest numbers of each segment of a row: see :mod:`cute_ops.ops.routing.topk`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_address, row_count
from cute_ops.kernels.routing.config import SEGMENT, TopkConfig

NAN, NONE = 0x7FFFFFFF, -0x80000000  # keys above and below those of all numbers


class TopK:
    """The k largest of every ``SEGMENT`` columns, in order; of equal ones those of lower columns.

    Numbers are compared as integers of the same order, NaN above all. Each of k steps finds the largest key of a warp
    by shuffles and takes it out of the lane that holds it.
    Tile: a warp per segment; lane ``t`` holds its columns ``32 j + t``. No shared memory.
    Bytes moved per element: x once, and its index where that is given; k values and indices per segment.
    """

    def __init__(self, variant):
        self.variant, self.k = variant, variant.attrs["k"]
        self.n = variant.dims["n"]
        self.per = -(-min(self.n, SEGMENT) // WARP)
        self.segments = -(-self.n // SEGMENT)
        self.warps = TopkConfig(**variant.config).warps
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mX, mIndex, mValues, mFound, stream):
        self.kernel(mX, mIndex, mValues, mFound).launch(
            grid=[Int32((row_count(mX) + (self.warps - 1)) // self.warps), self.segments, 1],
            block=[self.warps * WARP, 1, 1], stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mX, mIndex, mValues, mFound):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, segment, _ = cute.arch.block_idx()
        row = Int64(bidx) * self.warps + tidx // WARP
        lane, start = tidx % WARP, segment * SEGMENT
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if row < row_count(mX):
            rKey = self._keys(mX, row, start + lane)
            place = row_address(mFound, self.variant.tensors["found"], row, self.segments * self.k)
            gFound = gmem_elements(Int32, place + Int64(segment) * (self.k * 4), self.k)
            width = mValues.element_type.width // 8
            place = row_address(mValues, self.variant.tensors["values"], row, self.segments * self.k)
            gValues = gmem_elements(mValues.element_type, place + Int64(segment) * (self.k * width), self.k)
            for i in cutlass.range(self.k, unroll=1):
                best, where = self._largest(rKey, start + lane)
                top = cute.arch.warp_reduction(best, cutlass.max)
                column = cute.arch.warp_reduction(Int32(cutlass.select_(best == top, where, Int32(NAN))), cutlass.min)
                for j in cutlass.range_constexpr(self.per):
                    rKey[j] = Int32(cutlass.select_(start + lane + j * WARP == column, Int32(NONE), rKey[j]))
                if lane == 0:
                    gValues[i] = _number(top).to(mValues.element_type)
                    gFound[i] = self._index(mIndex, row, column)

    def _keys(self, mX, row, first):
        """A lane's keys."""
        rKey = fragment(Int32, self.per, NONE)
        address = row_address(mX, self.variant.tensors["x"], row, self.n)
        for j in range(self.per):
            self._load(rKey, j, mX, address, first + j * WARP)
        return rKey

    @cute.jit
    def _load(self, rKey: cute.Tensor, j: cutlass.Constexpr, mX: cute.Tensor, address: Int64, column: Int32):
        if column < self.n:
            at = address + Int64(column) * (mX.element_type.width // 8)
            # Adding zero makes -0 the number that is equal to it.
            x = gmem_elements(mX.element_type, at, 1)[0].to(Float32) + Float32(0.0)
            bits = x.bitcast(Int32)
            key = bits ^ ((bits >> 31) & Int32(NAN))
            rKey[j] = Int32(cutlass.select_(x == x, key, Int32(NAN)))

    def _largest(self, rKey, first):
        """A lane's largest key and its column, the lowest of equal ones."""
        best, where = rKey[0], first
        for j in range(1, self.per):
            larger = rKey[j] > best
            best = Int32(cutlass.select_(larger, rKey[j], best))
            where = Int32(cutlass.select_(larger, first + j * WARP, where))
        return best, where

    @cute.jit
    def _index(self, mIndex: cute.Tensor, row: Int64, column: Int32):
        """What the column is called: by default its number."""
        rIndex = fragment(Int32, 1)
        rIndex[0] = column
        if const_expr(mIndex is not None):
            if column < self.n:
                address = row_address(mIndex, self.variant.tensors["index"], row, self.n)
                rIndex[0] = gmem_elements(Int32, address + Int64(column) * 4, 1)[0]
        return rIndex[0]


def _number(key):
    """The number of a key; -inf where a segment has fewer columns than are asked for."""
    bits = key ^ ((key >> 31) & Int32(NAN))
    x = Int32(bits).bitcast(Float32)
    x = Float32(cutlass.select_(key == Int32(NONE), -Float32.inf, x))
    return Float32(cutlass.select_(key == Int32(NAN), Float32.nan, x))
