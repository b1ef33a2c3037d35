"""Forward of the norms, rows held in registers.

``out = h * rsqrt(mean(h^2) + eps) * (weight_offset + weight) + bias``, where ``h`` is ``x``, or ``x + residual``
rounded to the residual's dtype, which is stored too; in a layer norm, ``x`` less its mean.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.column_params import column_vectors, scale
from cute_ops.kernels.lib.copy import (
    AHEAD,
    compiler_barrier,
    fetch_ahead,
    fragment,
    load,
    load_if,
    narrow,
    store,
    store_if,
    store_masked,
    trim,
    widen,
)
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import load_tails
from cute_ops.kernels.lib.row_layout import ITEMSIZE, RowTile, Vectors, row_address, row_count
from cute_ops.kernels.norm.statistics import normalised, row_statistics

# Enough for the sums and what the system keeps of any number of CTAs.
SMEM_PERCENT = 50
ROW_TENSORS = ("x", "residual", "out", "residual_out")


class NormForward:
    """One pass: a row stays in registers between its sum and its output.

    Tile: ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row, ``per_thread`` vectors each; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows, ``unroll`` times. All loads of a thread are in flight
    together; the weight's too, except where registers are short. Of few rows L2 fetches x while the previous kernel is
    busy. The sums cross a warp by shuffles, a CTA by shared
    memory, a cluster by distributed shared memory.
    Shared memory: 4 bytes per sum, warp and CTA of the cluster; none where a row fits a warp.
    Bytes moved per element: x and out once each; with a residual also residual and residual_out.

    Args:
        variant: the kernel's variant.
        config: how it is configured.
        centred: whether the row's mean is subtracted.
    """

    def __init__(self, variant, config, centred):
        self.variant = variant
        self.n = variant.dims["n"]
        self.weight_offset = variant.attrs.get("weight_offset", 0.0)
        self.tile = RowTile(Vectors(variant, ROW_TENSORS, self.n, config.align_vectors), config)
        self.resident = config.resident
        # Long rows would fill the registers with fp32: keep them in their own dtype meanwhile.
        self.keep_dtype = config.keep_dtype and self.tile.vec > 1
        self.delay_weight_load = config.delay_weight_load
        self.unroll = config.unroll
        # Row groups of a CTA lie so far apart that their rows start at the same place of a vector.
        self.period = self.tile.v.unit if self.tile.v.shifted and self.unroll > 1 else 1
        narrow = ITEMSIZE[variant.tensors["x"].dtype] == 2
        self.sum = row_statistics(centred, self.tile, variant.attrs["eps"], False, min(self.unroll, 2), narrow)
        self.carveout = SMEM_PERCENT
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mX, mResidual, mWeight, mBias, mOut, mResidualOut, stream):
        cluster, rows = self.tile.cluster, self.tile.rows * self.unroll * self.period
        self.kernel(mX, mResidual, mWeight, mBias, mOut, mResidualOut).launch(
            grid=[Int32((row_count(mX) + (rows - 1)) // rows * self.period), cluster, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, cluster, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=self.carveout if const_expr(self.resident > 1) else None,
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mX, mResidual, mWeight, mBias, mOut, mResidualOut):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, rank, _ = cute.arch.block_idx()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        sSum, mbar = self.sum.allocate(smem)
        self.sum.prepare(mbar)

        t = tidx % self.tile.threads_per_row
        count = row_count(mX)
        local = tidx // self.tile.threads_per_row
        group = Int64(bidx // self.period * (self.period * self.unroll) + bidx % self.period)
        rows = [(group + u * self.period) * self.tile.rows + local for u in range(self.unroll)]
        firsts = [self._first(t, rank, rows[0])] * self.unroll

        if const_expr(self.pdl):
            few = cute.arch.grid_dim()[0] <= AHEAD
            self._fetch_ahead(mX, "x", rows, count, firsts, few)
            self._fetch_ahead(mResidual, "residual", rows, count, firsts, few)
        wait_for_previous(self.pdl)
        held = [
            (self._load_row(mX, "x", row, count, first), self._load_row(mResidual, "residual", row, count, first))
            for row, first in zip(rows, firsts)
        ]
        for row, first, vectors in zip(rows, firsts, held):
            self._load_tails(((mX, "x"), (mResidual, "residual")), vectors, row, count, first)
        columns = None
        if const_expr(not self.delay_weight_load):
            columns = self._load_weights(mWeight, mBias, firsts)
        let_next_start(self.pdl)
        self.sum.ready()
        for u in cutlass.range_constexpr(self.unroll):
            row, first = rows[u], firsts[u]
            rH, mean, rstd = self._statistics(*held[u], mResidualOut, row, count, first, sSum, mbar, u)
            if const_expr(self.delay_weight_load):
                columns = self._load_weights(mWeight, mBias, firsts)
            self._postprocess(rH, mean, rstd, *columns[u], mOut, row, count, first)

    def _fetch_ahead(self, mX, name, rows, count, firsts, predicate):
        """Have L2 fetch this thread's vectors of its rows."""
        if mX is None:
            return
        for row, first in zip(rows, firsts):
            base = row_address(mX, self.variant.tensors[name], cutlass.min(row, count - 1), self.n)
            for start in first:
                inside = (start >= 0) & (start < self.n)
                fetch_ahead(base + Int64(start) * (mX.element_type.width // 8), predicate & inside)

    def _first(self, t, rank, row):
        """First columns of this thread's vectors of a row."""
        shift = self.tile.v.shift(row, self.n)
        return [self.tile.vector(t, rank, k) * self.tile.vec - shift for k in range(self.tile.per_thread)]

    def _load_weights(self, mWeight, mBias, firsts):
        """Weight and bias for each row, all of which start at the same place of a vector."""
        loaded = self._load_columns(mWeight, "weight", firsts[0]), self._load_columns(mBias, "bias", firsts[0])
        return [loaded] * len(firsts)

    def _statistics(self, rX, rResidual, mResidualOut, row, count, first, sSum, mbar, step):
        """The row's h, stored where there is a residual, its mean and rstd."""
        rH = list(rX)
        for k in range(self.tile.per_thread):
            if self._predicated(k):
                trim(rX[k], first[k], Int32(self.n))
            if rResidual is not None:
                if self._predicated(k):
                    trim(rResidual[k], first[k], Int32(self.n))
                h = widen(rX[k]) + widen(rResidual[k])
                rRounded = narrow(h, mResidualOut.element_type, self.tile.vec)
                self._store_row(mResidualOut, "residual_out", rRounded, row, count, first[k], k)
                rH[k] = rRounded
        return rH, *self.sum.row(lambda k: (widen(rH[k]),), first, sSum, mbar, step)

    def _postprocess(self, rH, mean, rstd, rWeight, rBias, mOut, row, count, first):
        for k in range(self.tile.per_thread):
            if self.keep_dtype:
                compiler_barrier(rH[k])
            y = normalised(widen(rH[k]), mean, rstd, rH[k].element_type)
            if rWeight is not None:
                y = y * scale(rWeight[k], self.weight_offset)
            if rBias is not None:
                y = y + widen(rBias[k])
            rOut = narrow(y, mOut.element_type, self.tile.vec)
            self._store_row(mOut, "out", rOut, row, count, first[k], k)

    def _predicated(self, k):
        """Whether some thread's k-th vector may be part inside, part outside the row."""
        return self.tile.starts_outside(k) or (self.tile.v.masked and self.tile.ends_outside(k))

    def _load_row(self, mX, name, row, count, first):
        if mX is None:
            return None
        if not self.tile.v.shifted:
            # Threads past the last row repeat it and store nothing: all of them take part in the sums.
            row = cutlass.min(row, count - 1)
        base = row_address(mX, self.variant.tensors[name], row, self.n)
        edge = self.tile.edge(row, count)
        vectors = []
        for k in range(self.tile.per_thread):
            rX = fragment(mX.element_type, self.tile.vec)
            address = base + Int64(first[k]) * (mX.element_type.width // 8)
            if self.tile.v.shifted or self.tile.ends_outside(k):
                rX.fill(0)
                predicate = self.tile.predicate(k, first[k], edge[0])
                load_if((row < count) & predicate if self.tile.v.shifted else predicate, rX, address)
            else:
                load(rX, address)
            vectors.append(rX)
        return vectors

    def _load_tails(self, tensors, held, row, count, first):
        """Load what :meth:`_load_row` leaves of a row of each tensor."""
        bound, tail = self.tile.edge(row, count)
        if self.tile.v.shifted:
            tail = tail & (row < count)
        else:
            row = cutlass.min(row, count - 1)
        found = [
            (vectors, row_address(m, self.variant.tensors[name], row, self.n))
            for (m, name), vectors in zip(tensors, held)
            if isinstance(vectors, list)
        ]
        load_tails(found, first, self.tile, (bound, tail))

    def _store_row(self, mX, name, rX, row, count, first, k):
        address = row_address(mX, self.variant.tensors[name], row, self.n)
        address = address + Int64(first) * (mX.element_type.width // 8)
        end = cutlass.select_(row < count, Int32(self.n), Int32(0))
        if self._predicated(k):
            store_masked(rX, address, first, end)
        elif self.tile.ends_outside(k) or self.tile.rows > 1:
            store_if(first < end, rX, address)
        else:
            store(rX, address)

    def _columns(self, mWeight, mBias, first, ks):
        """Weight and bias for some of this thread's vectors."""
        loaded = [
            [None] * len(ks) if m is None else column_vectors(m, self.variant.tensors[name], self.tile, first, ks)
            for m, name in ((mWeight, "weight"), (mBias, "bias"))
        ]
        return list(zip(*loaded))

    def _load_columns(self, mW, name, first):
        if mW is None:
            return None
        key, tile = self.variant.tensors[name], self.tile
        return column_vectors(mW, key, tile, first)
