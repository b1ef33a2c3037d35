"""Rows to float8_e4m3fn, held in registers.

``scale = max(largest / 448, 2^-126)``, where ``largest`` is the largest finite magnitude of a row, or of a block of
128 columns; 1 where that is zero. ``out = y / scale``, to nearest, saturating. What ``y`` is, subclasses say.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels._chain import can_chain, let_next_start, wait_for_previous
from cute_ops.kernels._forward import SMEM_PERCENT, NormForward
from cute_ops.kernels._fp8 import BLOCK, largest_finite, scale_of, to_fp8
from cute_ops.kernels._reduce import WARP
from cute_ops.kernels._row_max import RowMax, lanes_max
from cute_ops.kernels._rows import RowTile, Vectors, row_address, row_count
from cute_ops.kernels._statistics import row_statistics
from cute_ops.kernels._vectors import fragment, gmem_elements, trim


class QuantizeRows(NormForward):
    """One pass: a row stays in fp32 registers between its largest element and its output.

    Tile: as in :class:`~cute_ops.kernels._forward.NormForward`. The largest of a row travels like its sum. A block's is
    found by the lanes that hold it where a block is one vector each of neighbouring lanes; elsewhere by maxima in
    shared memory, which come out the same in any order.
    Shared memory: 4 bytes per warp and CTA of the cluster; elsewhere, 4 bytes per block.
    Bytes moved per element: every tensor once.
    """

    def __init__(self, variant, source):
        self.variant = variant
        self.source = source
        self.n = variant.dims["n"]
        self.tile = RowTile(Vectors(variant, (*source.names, "out", "residual_out"), self.n), variant.tile)
        self.resident = variant.tile.get("resident", 1)
        self.late = bool(variant.tile.get("late", 0))
        self.chained = can_chain(variant.arch)
        # A row within one block is one.
        self.by_row = not variant.attrs["block"] or self.n <= BLOCK
        self.blocks = 1 if self.by_row else -(-self.n // BLOCK)
        # Lanes that hold a block with one vector each.
        self.lanes = BLOCK // self.tile.vec
        apart = self.tile.v.shifted or self.lanes > WARP or self.tile.threads_per_row % self.lanes != 0
        self.straddling = not self.by_row and apart
        self.unroll = 1 if self.straddling else variant.tile.get("unroll", 1)
        stages = min(self.unroll, 2)
        self.sum = row_statistics(False, self.tile, source.eps, backward=False, stages=stages)
        self.max = RowMax(self.tile, stages)
        self.clustered = self.tile.cluster > 1 and (source.normed or self.by_row)

    @cute.jit
    def __call__(self, inputs, columns, mResidualOut, mOut, mScale, stream):
        cluster, rows = self.tile.cluster, self.tile.rows * self.unroll
        self.kernel(inputs, columns, mResidualOut, mOut, mScale).launch(
            grid=[Int32((row_count(mOut) + (rows - 1)) // rows), cluster, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, cluster, 1] if const_expr(self.clustered) else None,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=SMEM_PERCENT if const_expr(self.resident > 1) else None,
            stream=stream,
            use_pdl=self.chained,
        )

    @cute.kernel
    def kernel(self, inputs, columns, mResidualOut, mOut, mScale):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, rank, _ = cute.arch.block_idx()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        sums = self.sum.allocate(smem) if const_expr(self.source.normed) else None
        maxima = self._maxima(smem)
        self._prepare(sums, maxima)

        t = tidx % self.tile.threads_per_row
        count = row_count(mOut)
        local = tidx // self.tile.threads_per_row
        rows = [(Int64(bidx) * self.unroll + u) * self.tile.rows + local for u in range(self.unroll)]
        firsts = [self._first(t, rank, row) for row in rows]

        wait_for_previous(self.chained)
        held = [
            [self._load_row(m, name, row, count, first) for m, name in zip(inputs, self.source.names)]
            for row, first in zip(rows, firsts)
        ]
        loaded = None
        if const_expr(not self.late):
            loaded = self._load_weights(*columns, firsts)
        let_next_start(self.chained)
        if const_expr(self.clustered):
            cute.arch.cluster_wait()
        for u in cutlass.range_constexpr(self.unroll):
            row, first = rows[u], firsts[u]
            vectors, rstd = held[u], None
            if const_expr(self.source.normed):
                rH, _, rstd = self._statistics(*held[u], mResidualOut, row, count, first, *sums, u)
                vectors = [rH]
            if const_expr(self.late):
                loaded = self._load_weights(*columns, firsts)
            values = self._values(vectors, rstd, *loaded[u], first)
            self._quantise(values, mOut, mScale, row, count, first, t, rank, maxima, u)

    def _values(self, vectors, rstd, rWeight, rBias, first):
        """This thread's vectors of a row in fp32, zero outside the row."""
        found = []
        for k in range(self.tile.per_thread):
            wide = [rX[k].load().to(Float32) for rX in vectors]
            rY = fragment(Float32, self.tile.vec)
            rY.store(self.source(*wide, rstd, *(None if rW is None else rW[k] for rW in (rWeight, rBias))))
            # What stands outside the row: a bias, a neighbour's weight.
            if self._ragged(k):
                trim(rY, first[k], Int32(self.n))
            found.append(rY)
        return found

    def _maxima(self, smem):
        """Shared memory of the maxima: of rows, of blocks that vectors straddle, or none."""
        if self.by_row:
            return self.max.allocate(smem)
        if self.straddling:
            layout = cute.make_layout((self.blocks, self.tile.rows))
            return smem.allocate_tensor(Int32, layout, byte_alignment=16), None
        return None, None

    def _prepare(self, sums, maxima):
        if self.source.normed:
            if self.by_row:
                self.max.start(maxima[1])
            self.sum.prepare(sums[1])
        elif self.by_row:
            self.max.prepare(maxima[1])
        if self.straddling:
            self._clear(maxima[0])

    @cute.jit
    def _clear(self, sMax: cute.Tensor):
        flat = cute.make_tensor(sMax.iterator, cute.make_layout(cute.size(sMax)))
        for i in cutlass.range(cute.arch.thread_idx()[0], cute.size(sMax), self.tile.threads, unroll=1):
            flat[i] = 0
        cute.arch.barrier()

    def _quantise(self, values, mOut, mScale, row, count, first, t, rank, maxima, step):
        base = row_address(mScale, self.variant.tensors["scale"], row, self.blocks)
        if self.straddling:
            self._by_shared_block(values, base, row, count, first, t, maxima[0])
        elif self.by_row:
            largest = Float32(0.0)
            for rY in values:
                largest = largest_finite(rY, largest)
            (largest,) = self.max((largest,), *maxima, Int32(step))
            factor, inverse = scale_of(largest)
            store_number((t == 0) & (rank == 0) & (row < count), factor, base)
            for rY in values:
                rY.store(rY.load() * inverse)
        else:
            for rY, start in zip(values, first):
                factor, inverse = scale_of(lanes_max(largest_finite(rY, Float32(0.0)), self.lanes))
                here = (t % self.lanes == 0) & (start < self.n) & (row < count)
                store_number(here, factor, base + Int64(start // BLOCK) * 4)
                rY.store(rY.load() * inverse)
        for k in range(self.tile.per_thread):
            self._store_row(mOut, "out", to_fp8(values[k].load(), self.tile.vec), row, count, first[k], k)

    def _by_shared_block(self, values, base, row, count, first, t, sMax):
        """Vectors may straddle two blocks."""
        sRow = sMax[None, cute.arch.thread_idx()[0] // self.tile.threads_per_row]
        for rY, start in zip(values, first):
            _give_blocks(rY, sRow, start, self.n, self.tile.threads_per_row >= WARP)
        cute.arch.barrier()
        _store_scales(sRow, base, t, self.tile.threads_per_row, self.blocks, row < count)
        for rY, start in zip(values, first):
            _scale_blocks(rY, sRow, start, self.n)


def _blocks(first, vec, n):
    """The blocks of a vector's first and last element, and the column at which the second begins."""
    last = (n - 1) // BLOCK
    low = cutlass.min(cutlass.max(first, 0) // BLOCK, last)
    high = cutlass.min(cutlass.max(first + (vec - 1), 0) // BLOCK, last)
    return low, high, (low + 1) * BLOCK


@cute.jit
def _give_blocks(
    rY: cute.Tensor, sRow: cute.Tensor, first: Int32, n: cutlass.Constexpr, whole_warps: cutlass.Constexpr
):
    low, high, border = _blocks(first, cute.size(rY), n)
    halves = [fragment(Float32, cute.size(rY)) for _ in range(2)]
    for j in cutlass.range_constexpr(cute.size(rY)):
        below = first + j < border
        halves[0][j] = cutlass.select_(below, rY[j], Float32(0.0))
        halves[1][j] = cutlass.select_(below, Float32(0.0), rY[j])
    found = [largest_finite(half, Float32(0.0)) for half in halves]
    if const_expr(whole_warps):
        # The vectors of a warp lie in three blocks at most; one lane speaks for each.
        lane, start = cute.arch.lane_idx(), cute.arch.shuffle_sync(low, 0)
        mine = Float32(0.0)
        for i in cutlass.range_constexpr(3):
            below = cutlass.select_(low == start + i, found[0], Float32(0.0))
            above = cutlass.select_(high == start + i, found[1], Float32(0.0))
            mine = cutlass.select_(lane == i, lanes_max(cute.arch.fmax(below, above), WARP), mine)
        _raise_to(sRow, start + lane, mine)
    else:
        for largest, block in zip(found, (low, high)):
            _raise_to(sRow, block, largest)


@cute.jit
def _raise_to(sRow: cute.Tensor, block: Int32, largest: Float32):
    if largest > 0.0:
        cute.arch.atomic_max(sRow.iterator + block, largest.bitcast(Int32), sem="relaxed", scope="cta")


@cute.jit
def _scale_blocks(rY: cute.Tensor, sRow: cute.Tensor, first: Int32, n: cutlass.Constexpr):
    low, high, border = _blocks(first, cute.size(rY), n)
    _, inverse_low = scale_of(sRow[low].bitcast(Float32))
    _, inverse_high = scale_of(sRow[high].bitcast(Float32))
    for j in cutlass.range_constexpr(cute.size(rY)):
        rY[j] = rY[j] * cutlass.select_(first + j < border, inverse_low, inverse_high)


@cute.jit
def _store_scales(sRow: cute.Tensor, base: Int64, t: Int32, threads: cutlass.Constexpr, blocks: Int32, here: Boolean):
    for block in cutlass.range(t, blocks, threads, unroll=1):
        factor, _ = scale_of(sRow[block].bitcast(Float32))
        store_number(here, factor, base + Int64(block) * 4)


@cute.jit
def store_number(here: Boolean, value: Float32, address: Int64):
    if here:
        gmem_elements(Float32, address, 1)[0] = value
