"""Rows to float8_e4m3fn, held in registers.

``scale = max(largest / 448, 2^-126)``, where ``largest`` is the largest finite magnitude of a row, or of a block of
128 columns; 1 if that is zero. ``out = y / scale``, rounded to nearest, saturating. ``source`` computes ``y``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, narrow, trim, widen
from cute_ops.kernels.lib.fp8 import BLOCK, largest_of_each, scale_of, to_fp8
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.realign import bytes_past, fetch, settle_all
from cute_ops.kernels.lib.realign_store import ColumnStore, ColumnVectors
from cute_ops.kernels.lib.row_copy import RowAccess, store_number_if
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, RowTile, row_address, row_count
from cute_ops.kernels.lib.row_reduce_max import RowMax, lanes_max
from cute_ops.kernels.norm.statistics import row_statistics


class QuantizeRows:
    """One pass: a row stays in fp32 registers between its largest element and its output.

    Tile: as in :class:`~cute_ops.kernels.norm.fwd.NormForward`, but a row's first vector always starts with its first
    column, so that neighbouring lanes hold a block with one vector each and find its largest element. The largest of a
    row is exchanged like a sum.
    Shared memory: 4 bytes per warp and CTA of the cluster; for outputs whose rows start anywhere, a row.
    Bytes moved per element: every tensor once.
    """

    def __init__(self, variant, config, source):
        self.variant, self.config = variant, config
        self.source = source
        self.n = variant.dims["n"]
        # A row within one block has one scale.
        self.power_of_two = variant.attrs["power_of_two"]
        self.by_row = not variant.attrs["block"] or self.n <= BLOCK
        v = self._vectors(variant, (*source.names, "out", "residual_out"))
        self.tile = RowTile(v, config)
        self.access = RowAccess(variant, self.tile)
        self.resident = config.resident
        self.carveout = SMEM_PERCENT
        self.delay_weight_load = config.delay_weight_load
        self.pdl = can_use_pdl(variant.arch)
        self.blocks = 1 if self.by_row else -(-self.n // BLOCK)
        # Lanes that hold a block with one vector each.
        self.lanes = BLOCK // self.tile.vec
        if not self.by_row and (self.lanes > WARP or self.tile.threads_per_row % self.lanes != 0):
            raise ValueError(f"{self.tile.threads_per_row} threads of a row share a block of {self.lanes} vectors")
        vector_bytes = [v.unaligned[name] for name in ("out", "residual_out") if name in v.unaligned]
        self.column_store = ColumnStore(self.tile, max(vector_bytes)) if vector_bytes else None
        self.unroll = 1 if self.column_store else config.unroll
        stages = min(self.unroll, 2)
        self.sum = row_statistics(False, self.tile, source.eps, backward=False, stages=stages)
        self.max = RowMax(self.tile, stages)
        self.clustered = self.tile.cluster > 1 and (source.normed or self.by_row)

    def _vectors(self, variant, names):
        return ColumnVectors(variant, names, self.n, self.config.align_vectors, BLOCK // WARP)

    @cute.jit
    def __call__(self, inputs, columns, mResidualOut, mOut, mScale, stream):
        cluster, rows = self.tile.cluster, self.tile.rows * self.unroll
        self.kernel(inputs, columns, mResidualOut, mOut, mScale).launch(
            grid=[Int32((row_count(mOut) + (rows - 1)) // rows), cluster, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, cluster, 1] if const_expr(self.clustered) else None,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=self.carveout if const_expr(self.resident > 1) else None,
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, inputs, columns, mResidualOut, mOut, mScale):
        smem = cutlass.utils.SmemAllocator()
        sums, maxima = self._exchange(smem)
        sRows = self.column_store.allocate(smem) if const_expr(self.column_store is not None) else None
        bidx, local, t, rank = self.tile.here()
        group, count = Int64(bidx), row_count(mOut)
        sRow = sRows[None, local] if const_expr(self.column_store is not None) else None
        rows = [(group * self.unroll + u) * self.tile.rows + local for u in range(self.unroll)]
        coords = [self.access.coord(row, count, t, rank) for row in rows]

        wait_for_previous(self.pdl)
        held = [self._load(inputs, coord) for coord in coords]
        loaded = None
        if const_expr(not self.delay_weight_load):
            loaded = self.access.columns(*columns, coords[0])
        let_next_start(self.pdl)
        if const_expr(self.clustered):
            cute.arch.cluster_wait()
        for u in cutlass.range_constexpr(self.unroll):
            vectors, rstd = [self._in_place(rX) for rX in held[u]], None
            if const_expr(self.source.normed):
                rH, rstd = self._normed(vectors, mResidualOut, sums, u, coords[u], sRow)
                vectors = [rH]
            if const_expr(self.delay_weight_load):
                loaded = self.access.columns(*columns, coords[0])
            values = self._values(vectors, rstd, loaded, coords[u])
            self._quantise(values, (mOut, mScale), maxima, u, coords[u], sRow)

    def _load(self, inputs, coord):
        """This thread's vectors of a row of each input; for an input whose rows start anywhere (pairs of aligned
        vectors, bytes to skip).
        """
        held = []
        for m, name in zip(inputs, self.source.names):
            if m is not None and name in self.tile.v.unaligned:
                held.append(self._load_pairs(m, name, coord))
            elif m is not None:
                (vectors,) = self.access.load([self.access.row(m, name, self.access.readable(coord).row)], coord)
                held.append(vectors)
        return held

    def _load_pairs(self, mX, name, coord):
        vec, dtype, itemsize = self.tile.vec, mX.element_type, mX.element_type.width // 8
        base = row_address(mX, self.variant.tensors[name], coord.row, self.n)
        past = bytes_past(base, dtype, vec)
        end = cutlass.select_(coord.valid, Int32(self.n), Int32(-2 * vec))
        pairs = []
        for start in coord.first:
            rPair = fragment(dtype, 2 * vec)
            begin = start - past // itemsize
            fetch(rPair, base - past + Int64(start) * itemsize, begin, end, *self.tile.edge(coord.row, coord.count))
            pairs.append(rPair)
        return pairs, past

    def _in_place(self, loaded):
        if not isinstance(loaded, tuple):
            return loaded
        pairs, past = loaded
        return settle_all(pairs, past)

    def _normed(self, held, mResidualOut, shared, step, coord, sRow):
        """The row's h, which is stored if there is a residual, and its rstd."""
        for vectors in held:
            for k, rX in enumerate(vectors):
                self.access.trim(rX, k, coord)
        rH = held[0]
        if len(held) > 1:
            sums = [widen(a) + widen(b) for a, b in zip(*held)]
            rH = [narrow(h, mResidualOut.element_type, self.tile.vec) for h in sums]
            self._put(rH, mResidualOut, "residual_out", coord, sRow)
        given = self.sum.thread(lambda k: (widen(rH[k]),), coord.first, None)
        _, rstd = self.sum.forward_terms(self.sum(given, shared, Int32(step)), 1.0 / self.n)
        return rH, rstd

    def _put(self, vectors, mX, name, coord, sRow):
        """Store this thread's vectors of a row."""
        if name in self.tile.v.unaligned:
            if name == "out" and "residual_out" in self.tile.v.unaligned:
                cute.arch.barrier()
            address = row_address(mX, self.variant.tensors[name], coord.row, self.n)
            self.column_store(vectors, sRow, address, coord.t, coord.rank, coord.valid)
        else:
            gRow = self.access.row(mX, name, coord.row)
            for k, rX in enumerate(vectors):
                self.access.store(gRow, rX, coord, k)

    def _values(self, vectors, rstd, columns, coord):
        """This thread's vectors of a row in fp32."""
        return [
            self._value([widen(rX[k]) for rX in vectors], rstd, *columns[k], coord.first[k], k)
            for k in range(self.tile.per_thread)
        ]

    def _value(self, wide, rstd, rWeight, rBias, first, k):
        """This thread's k-th vector of a row in fp32, zero outside the row, also where there is a bias."""
        rY = fragment(Float32, self.tile.vec)
        rY.store(self.source(*wide, rstd, rWeight, rBias))
        if self.tile.predicated(k):
            trim(rY, first, Int32(self.n))
        return rY

    def _exchange(self, smem):
        """Shared memory for exchanging a row's sum and its largest element, initialised."""
        sums = self.sum.allocate(smem) if self.source.normed else None
        maxima = self.max.allocate(smem) if self.by_row else None
        if self.by_row:
            self.max.prepare(maxima, last=not self.source.normed)
        if self.source.normed:
            self.sum.prepare(sums)
        return sums, maxima

    def _quantise(self, values, outputs, maxima, step, coord, sRow):
        mOut, mScale = outputs
        base = row_address(mScale, self.variant.tensors["scale"], coord.row, self.blocks)
        if self.by_row:
            largest = Float32(0.0)
            for found in largest_of_each(values):
                largest = cute.arch.fmax(largest, found)
            inverse = self._row_scale(largest, maxima, base, step, (coord.t == 0) & (coord.rank == 0) & coord.valid)
            for rY in values:
                rY.store(rY.load() * inverse)
        else:
            for rY, start, found in zip(values, coord.first, largest_of_each(values)):
                inverse = self._block_scale(found, base, start, (coord.t % self.lanes == 0) & coord.valid)
                rY.store(rY.load() * inverse)
        out = [to_fp8(rY.load(), self.tile.vec) for rY in values]
        self._put(out, mOut, "out", coord, sRow)

    def _row_scale(self, largest, maxima, base, step, speaks):
        """The reciprocal of a row's scale; the thread for which ``speaks`` is true stores the scale."""
        (largest,) = self.max((largest,), maxima, Int32(step))
        factor, inverse = scale_of(largest, self.power_of_two)
        store_number_if(speaks, factor, base)
        return inverse

    def _block_scale(self, largest, base, first, speaks):
        """The reciprocal of a block's scale; the thread for which ``speaks`` is true stores the scale."""
        factor, inverse = scale_of(lanes_max(largest, self.lanes), self.power_of_two)
        store_number_if(speaks & (first < self.n), factor, base + Int64(first // BLOCK) * 4)
        return inverse
