"""An expression of tiles, vectors and scalars, with sums of its values over rows, in one pass over ``[m, n]``."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, load, narrow, store_if, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_address
from cute_ops.kernels.rowwise.pointwise import number_address

THREADS = 256
# Loads of tiles that a thread has in flight: 16 bytes of each of these rows and tiles.
LOADS = 4


class ColumnPass:
    """Computes ``tiles, sums = compute(*inputs)`` in fp32; ``partials[p, c]`` are the sums over the rows of part p.

    Tile: a CTA of 256 threads takes ``width`` vectors of neighbouring columns, a warp's if rows have as many, and the
    ``256 / width`` rows of its part in every ``parts * 256 / width``. Its threads in a column add a row each, one after
    another in registers, then the CTA adds their sums, in a fixed order. Rows that are loaded at once are neighbours in
    memory. All loads of :data:`LOADS` vectors are in flight together, and none depends on a condition.
    Shared memory: 4 bytes for each thread and element of a vector. Bytes moved per element: every tensor once.

    Args:
        variant: the kernel's variant.
        inputs, tiles: pieces of tensors (:class:`~cute_ops.kernels.rowwise.pointwise.Piece`).
        sums: pieces of the row vectors or scalars; their partial sums are in the workspaces ``<name>_partials``.
        compute: fp32 elements to fp32 elements of the tiles, then of the sums.
        vec: elements of a vector, which divide the rows of every piece.
    """

    def __init__(self, variant, inputs, tiles, sums, compute, vec):
        self.inputs, self.tiles, self.sums, self.compute, self.vec = inputs, tiles, sums, compute, vec
        self.keys, self.n = variant.tensors, variant.dims["n"]
        vectors = WARP if self.n is None else -(-self.n // vec)
        self.width = next(width for width in (1, 2, 4, 8, 16, WARP) if width >= min(vectors, WARP))
        self.depth = THREADS // self.width
        self.unroll = max(LOADS // max(sum(piece.tile for piece in inputs), 1), 1)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, inputs, tiles, partials, rows, n, stream):
        columns = self.width * self.vec
        self.kernel(inputs, tiles, partials, rows, n).launch(
            grid=[Int32((n + (columns - 1)) // columns), Int32(partials[0].shape[0]), 1],
            block=[self.width, self.depth, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, inputs, tiles, partials, rows: Int64, n: Int64):
        x, y, _ = cute.arch.thread_idx()
        strip, part, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        layout = cute.make_layout((self.width * self.vec, self.depth), stride=(1, self.width * self.vec))
        sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        first = (strip * self.width + x) * self.vec
        inside = first < Int32(n)
        # A thread past the row's end loads its last vector.
        column = cutlass.min(first, Int32(n) - self.vec)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        shared = [self._shared(mX, piece, n, column) for mX, piece in zip(inputs, self.inputs)]
        rSums = [fragment(Float32, self.vec, 0.0) for _ in self.sums]
        # Rows are counted in 64 bits: some steps past the last one, 32 might not do.
        step = Int64(Int32(partials[0].shape[0]) * self.depth)
        top, stride = Int64(part * self.depth + y), step * self.unroll
        for i in cutlass.range(Int32((rows + (stride - 1)) // stride), unroll=1):
            # Rows past the end are the last one again, which is not counted.
            places = [top + i * stride + u * step for u in range(self.unroll)]
            loaded = []
            for place in places:
                row = cutlass.min(place, rows - 1)
                loaded.append(
                    [self._load(mX, piece, n, row, column, rX) for mX, piece, rX in zip(inputs, self.inputs, shared)]
                )
            for place, vectors in zip(places, loaded):
                counts = place < rows
                results = self._computed([widen(rX) for rX in vectors])
                for mX, piece, rX in zip(tiles, self.tiles, results):
                    address = self._address(mX, piece, n, place, column)
                    rOut = narrow(rX.load(), mX.element_type, self.vec)
                    store_if(counts & inside, rOut, address, True)
                for rSum, rX in zip(rSums, results[len(self.tiles) :]):
                    for j in cutlass.range_constexpr(self.vec):
                        rSum[j] = rSum[j] + cutlass.select_(counts, rX[j], Float32(0.0))
        for mPartials, piece, rSum in zip(partials, self.sums, rSums):
            self._add_up(mPartials, piece, rSum, sSum, strip * (self.width * self.vec), n)

    @cute.jit
    def _add_up(self, mPartials, piece: cutlass.Constexpr, rSum, sSum, start, n):
        """Store the sums of a CTA's columns over its threads."""
        x, y, _ = cute.arch.thread_idx()
        part = cute.arch.block_idx()[1]
        cute.arch.barrier()
        for j in cutlass.range_constexpr(self.vec):
            sSum[x * self.vec + j, y] = rSum[j]
        cute.arch.barrier()
        thread, columns = y * self.width + x, self.width * self.vec
        for i in cutlass.range_constexpr(-(-columns // THREADS)):
            column = i * THREADS + thread
            place = cutlass.min(column, columns - 1)
            total = Float32(0.0)
            for row in cutlass.range_constexpr(self.depth):
                total = total + sSum[place, row]
            if (column < columns) & (start + column < Int32(n)):
                mPartials[part, Int32(piece.index * n) + start + column] = total

    def _shared(self, mX, piece, n, column):
        """What all rows read of an input: a vector, or a number; None of one with rows."""
        if piece.rows:
            return None
        rX = fragment(mX.element_type, self.vec if piece.columns else 1)
        address = mX.iterator.toint()
        if piece.columns:
            address = address + (Int64(column) + piece.index * n) * (mX.element_type.width // 8)
        load(rX, address)
        return rX

    def _load(self, mX, piece, n, row, column, rShared):
        if rShared is not None:
            return rShared
        rX = fragment(mX.element_type, self.vec if piece.columns else 1)
        load(rX, self._address(mX, piece, n, row, column))
        return rX

    def _address(self, mX, piece, n, row, column):
        if not piece.columns:
            return number_address(mX, self.keys[piece.name], row)
        itemsize = mX.element_type.width // 8
        return row_address(mX, self.keys[piece.name], row, mX.shape[-1]) + (Int64(column) + piece.index * n) * itemsize

    def _computed(self, given):
        """fp32 fragments of the outputs."""
        results = [fragment(Float32, self.vec) for _ in (*self.tiles, *self.sums)]
        for j in range(self.vec):
            elements = [g[j if piece.columns else 0] for g, piece in zip(given, self.inputs)]
            for rX, value in zip(results, self.compute(*elements)):
                rX[j] = value
        return results
