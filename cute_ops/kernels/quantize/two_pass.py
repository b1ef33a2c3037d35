"""Rows to float8_e4m3fn that are too long for the registers of a cluster, or of a length unknown at compile time.

See :mod:`cute_ops.kernels.quantize.one_pass` for the maths.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, load_elements, load_if, narrow, store_elements, store_if, trim
from cute_ops.kernels.lib.fp8 import BLOCK, largest_finite, scale_of, to_fp8
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import Row, store_number_if
from cute_ops.kernels.lib.row_layout import MAX_GRID, Vectors, WalkedRow, clusters, row_count
from cute_ops.kernels.lib.row_reduce import RowSum
from cute_ops.kernels.lib.row_reduce_max import RowMax, lanes_max


class QuantizeTwoPass:
    """A CTA walks a row up to three times: for its sum if it is normed, for its largest element if the row has one
    scale, and for its output. Each step takes one vector per thread, and no vector straddles two blocks.

    Aligned rows move whole vectors, all others go element by element, four to a thread.
    Shared memory: 4 bytes per warp, twice, for the sum and for the largest.
    Bytes moved per element: inputs once per walk, after the first from L2 where the row fits; outputs once.
    """

    def __init__(self, variant, config, source):
        self.variant = variant
        self.source = source
        v = Vectors(variant, (*source.names, "out", "residual_out"), variant.dims["n"], config.align_vectors)
        self.whole = not v.masked and v.vec >= BLOCK // WARP
        self.vec = v.vec if self.whole else BLOCK // WARP
        self.lanes = BLOCK // self.vec
        self.tile = WalkedRow(v, config)
        self.power_of_two = variant.attrs["power_of_two"]
        self.by_row = not variant.attrs["block"]
        self.sum = RowSum(self.tile, values=1, stages=2)
        self.max = RowMax(self.tile, stages=2)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, inputs, columns, mResidualOut, mOut, mScale, stream):
        rows = row_count(mOut)
        self.kernel(inputs, columns, mResidualOut, mOut, mScale).launch(
            **clusters(self.tile, Int32(cutlass.min(rows, Int64(MAX_GRID)))), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, inputs, columns, mResidualOut, mOut, mScale):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = cutlass.utils.SmemAllocator()
        sums, maxima = self.sum.allocate(smem), self.max.allocate(smem)
        n = Int32(mOut.shape[-1])
        stride = self.tile.threads * self.vec
        walk = (n + (stride - 1)) // stride
        start = tidx * self.vec
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        steps = Int32((row_count(mOut) - bidx + (grid - 1)) // Int64(grid))
        for step in cutlass.range(steps, unroll=1):
            row = Int64(bidx) + Int64(step) * Int64(grid)
            read, rstd = [self._row(m, name, row) for m, name in zip(inputs, self.source.names)], None
            gOut, gScale = self._row(mOut, "out", row), self._row(mScale, "scale", row)
            if const_expr(self.source.normed):
                squares = Float32(0.0)
                if const_expr(mResidualOut is not None):
                    gX, gResidual = read
                    # This thread's own stores are read back.
                    read = [self._row(mResidualOut, "residual_out", row)]
                    for i in cutlass.range(walk, unroll=2):
                        first = i * stride + start
                        h = self._read(gX, first, n) + self._read(gResidual, first, n)
                        rH = narrow(h, mResidualOut.element_type, self.vec)
                        self._write(rH, read[0], first, n)
                        h = rH.load().to(Float32)
                        squares = squares + (h * h).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                else:
                    read = read[:1]
                    for i in cutlass.range(walk, unroll=4):
                        h = self._read(read[0], i * stride + start, n)
                        squares = squares + (h * h).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                (total,) = self.sum((squares,), sums, step)
                rstd = cute.math.rsqrt(total / Float32(n) + self.source.eps, fastmath=True)
            inverse = Float32(0.0)
            if const_expr(self.by_row):
                largest = Float32(0.0)
                for i in cutlass.range(walk, unroll=2):
                    rY = self._value(read, rstd, columns, i * stride + start, n)
                    largest = largest_finite(rY, largest)
                (largest,) = self.max((largest,), maxima, step)
                factor, inverse = scale_of(largest, self.power_of_two)
                store_number_if(tidx == 0, factor, gScale.address)
            for i in cutlass.range(walk, unroll=2):
                first = i * stride + start
                rY = self._value(read, rstd, columns, first, n)
                if const_expr(not self.by_row):
                    self._scale_block(rY, gScale, first, n)
                else:
                    rY.store(rY.load() * inverse)
                self._write(to_fp8(rY.load(), self.vec), gOut, first, n)

    def _scale_block(self, rY, gScale, first, n):
        factor, inverse = scale_of(lanes_max(largest_finite(rY, Float32(0.0)), self.lanes), self.power_of_two)
        store_number_if((first % BLOCK == 0) & (first < n), factor, gScale.at(first // BLOCK))
        rY.store(rY.load() * inverse)

    def _row(self, mX, name, row):
        return None if mX is None else Row.of(mX, self.variant.tensors[name], row, mX.shape[-1])

    def _value(self, rows, rstd, columns, first, n):
        """A vector in fp32, zero outside the row."""
        wide = [self._read(gX, first, n) for gX in rows]
        parameters = [
            None if m is None else self._column(m, name, first, n) for m, name in zip(columns, ("weight", "bias"))
        ]
        rY = fragment(Float32, self.vec)
        rY.store(self.source(*wide, rstd, *parameters))
        trim(rY, first, n)
        return rY

    def _read(self, gX, first, n):
        return self._vector(gX, self.whole, first, n).load().to(Float32)

    def _column(self, mW, name, first, n):
        whole = self.whole and self.variant.tensors[name].align >= min(self.vec * mW.element_type.width // 8, 16)
        return self._vector(Row(mW.element_type, mW.iterator.toint()), whole, first, n)

    def _vector(self, gX, whole, first, n):
        rX = fragment(gX.element_type, self.vec, 0)
        if whole:
            load_if(first < n, rX, gX.at(first))
        else:
            load_elements(rX, gX.at(first), first, n)
        return rX

    def _write(self, rX, gX, first, n):
        if self.whole:
            store_if(first < n, rX, gX.at(first))
        else:
            store_elements(rX, gX.at(first), first, n)
