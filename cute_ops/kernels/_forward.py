"""Forward of the RMS norms, rows held in registers.

``out = h * rsqrt(mean(h^2) + eps) * (weight_offset + weight) + bias``, where ``h`` is ``x``, or ``x + residual``
rounded to the residual's dtype, which is stored too.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels._columns import column_vector, scale
from cute_ops.kernels._reduce import RowSum
from cute_ops.kernels._rows import RowTile, Vectors, row_address, row_count
from cute_ops.kernels._vectors import fragment, load, load_if, narrow, store, store_if, store_masked, widen

ROW_TENSORS = ("x", "residual", "out", "residual_out")


class NormForward:
    """One pass: a row stays in registers between its sum and its output.

    Tile: ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row, ``per_thread`` vectors each; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows. All loads of a thread, the weight's too, are in flight
    together. The sum of squares crosses a warp by shuffles, a CTA by shared memory, a cluster by distributed shared
    memory.
    Shared memory: 4 bytes per warp and CTA of the cluster; none where a row fits a warp.
    Bytes moved per element: x and out once each; with a residual also residual and residual_out.
    """

    def __init__(self, variant):
        self.variant = variant
        self.n = variant.dims["n"]
        self.eps = variant.attrs["eps"]
        self.weight_offset = variant.attrs["weight_offset"]
        self.tile = RowTile(Vectors(variant, ROW_TENSORS, self.n), variant.tile)
        self.sum = RowSum(self.tile, values=1, stages=1)

    @cute.jit
    def __call__(self, mX, mResidual, mWeight, mBias, mOut, mResidualOut, stream):
        cluster = self.tile.cluster
        self.kernel(mX, mResidual, mWeight, mBias, mOut, mResidualOut).launch(
            grid=[cute.ceil_div(row_count(mX), self.tile.rows), cluster, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, cluster, 1] if const_expr(cluster > 1) else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX, mResidual, mWeight, mBias, mOut, mResidualOut):
        tile, n, vec = self.tile, self.n, self.tile.vec
        tidx, _, _ = cute.arch.thread_idx()
        bidx, rank, _ = cute.arch.block_idx()
        if const_expr(tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        sSum, mbar = self.sum.allocate(smem)
        self.sum.prepare(mbar)

        t = tidx % tile.threads_per_row
        wanted = Int64(bidx) * tile.rows + tidx // tile.threads_per_row
        count = row_count(mX)
        # Threads past the last row repeat it and store nothing: all of them take part in the sums.
        row = cutlass.min(wanted, count - 1)
        shift = tile.v.shift(row, n)
        first = [tile.vector(t, rank, k) * vec - shift for k in range(tile.per_thread)]

        rX = self._load_row(mX, "x", row, first)
        rResidual = self._load_row(mResidual, "residual", row, first)
        rWeight = self._load_columns(mWeight, "weight", first)
        rBias = self._load_columns(mBias, "bias", first)

        squares = Float32(0.0)
        rH = []
        for k in cutlass.range_constexpr(tile.per_thread):
            low, high = tile.starts_outside(k), tile.v.masked and tile.ends_outside(k)
            h = widen(rX[k], first[k], n, low, high)
            if const_expr(mResidual is not None):
                h = h + widen(rResidual[k], first[k], n, low, high)
                rRounded = narrow(h, mResidualOut.element_type, vec)
                self._store_row(mResidualOut, "residual_out", rRounded, row, wanted < count, first[k], k)
                h = rRounded.load().to(Float32)
            rH.append(h)
            squares = squares + (h * h).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

        self.sum.ready()
        (total,) = self.sum((squares,), sSum, mbar, Int32(0), Int32(0))
        rstd = cute.math.rsqrt(total * (1.0 / n) + self.eps, fastmath=True)
        for k in cutlass.range_constexpr(tile.per_thread):
            y = rH[k] * rstd
            if const_expr(mWeight is not None):
                y = y * scale(rWeight[k], self.weight_offset)
            if const_expr(mBias is not None):
                y = y + rBias[k].load().to(Float32)
            rOut = narrow(y, mOut.element_type, vec)
            self._store_row(mOut, "out", rOut, row, wanted < count, first[k], k)

    def _load_row(self, mX, name, row, first):
        if mX is None:
            return None
        base = row_address(mX, self.variant.tensors[name], row, self.n)
        itemsize = mX.element_type.width // 8
        vectors = []
        for k in range(self.tile.per_thread):
            rX = fragment(mX.element_type, self.tile.vec)
            if self.tile.ends_outside(k):
                rX.fill(0)
                load_if(first[k] < self.n, rX, base + Int64(first[k]) * itemsize, True)
            else:
                load(rX, base + Int64(first[k]) * itemsize, True)
            vectors.append(rX)
        return vectors

    def _store_row(self, mX, name, rX, row, valid, first, k):
        itemsize = mX.element_type.width // 8
        address = row_address(mX, self.variant.tensors[name], row, self.n) + Int64(first) * itemsize
        end = cutlass.select_(valid, Int32(self.n), Int32(0))
        if self.tile.starts_outside(k) or (self.tile.v.masked and self.tile.ends_outside(k)):
            store_masked(rX, address, first, end, True)
        elif self.tile.ends_outside(k) or self.tile.rows > 1:
            store_if(first < end, rX, address, True)
        else:
            store(rX, address, True)

    def _load_columns(self, mW, name, first):
        if mW is None:
            return None
        key, tile = self.variant.tensors[name], self.tile
        return [
            column_vector(mW, key, tile.v, first[k], self.n, tile.ends_outside(k)) for k in range(tile.per_thread)
        ]
