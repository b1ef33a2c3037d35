"""Products of few rows whose operands' rows begin anywhere: read where they lie, by vectors, as TMA cannot."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu.warp import MmaF16BF16Op

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.gemm.config import WARPS, GemmConfig
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load, load_first
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.accumulators import Chunk
from cute_ops.kernels.tensor_core.sizes import WARP

THREADS = WARPS * WARP
MOST = 2**31 - 1  # elements of a row and of what follows on it that are counted
VECTOR = 8  # elements of 16 bits
STEP = 256  # columns of a step, of both operands
PIECES = STEP // 32  # vectors of a row that a thread has of a step
# Elements of x that a step needs before its first column, since rows of the weight begin up to 7 elements earlier.
BEFORE = VECTOR
# In shared memory every fourth word of a row of x follows on the one before, so that a warp's words lie in different
# banks: words of a quarter of a row, and of a row.
QUARTER = 40
PITCH = 4 * QUARTER + 4
# Bytes that a permutation takes of two words: the first one, or its upper half and the lower half of the second.
EVEN, ODD = 0x3210, 0x5432


class Row(NamedTuple):
    """A thread's row of b.

    Attributes:
        base: its address, rounded down to vectors.
        begin: the element behind this address at which it begins.
        end: the one at which it ends.
        last: the one at which the matrix ends.
        column: of the tile.
    """

    base: Any
    begin: Any
    end: Any
    last: Any
    column: Any


class GemmInPlace:
    """``outputs = epilogue(a @ b.T, operands)``: a ``(m, k)`` of few rows and b ``(n, k)``, 16 bits, at any alignment.

    Every eighth row of b begins alike in its vectors of 16 bytes. A warp has such rows alone, 16 of them, as the first
    operand of ``mma.sync``, whose columns are permuted so that a thread's elements are vectors as they lie in memory:
    none is moved. Elements of a, the second operand, are moved instead: shared memory has some columns of all its rows,
    of which a warp reads those that meet its vectors.

    Tile: ``tile_m`` rows of a and ``tile_n`` of b of a CTA of 8 warps. While a step of 256 columns is multiplied, the
    vectors of the next one are on their way to registers, and its columns of a, which go to the other half of shared
    memory. What lies beside a row, which may be NaN, is replaced by zeros in both operands.
    Shared memory: two times ``tile_m x 328`` elements, and the tile's sums, by which threads then compute neighbouring
    columns.
    Bytes moved per element: b once, from memory; a once by each CTA, from L2; out once.
    """

    def __init__(self, variant, epilogue, parts=()):
        if parts or epilogue.rows.reductions or epilogue.batched:
            raise NotImplementedError("operands read in place are matrices, of an epilogue without other parts")
        self.config, self.epilogue, self.parts = GemmConfig.of(variant.config), epilogue, ()
        self.pdl = can_use_pdl(variant.arch)
        self.columns = self.config.tile_n // epilogue.halves  # of an output's tile
        self.blocks = self.config.tile_m // 8  # of rows of a

    @cute.jit
    def launch(self, product, epilogue, stream):
        """Launch the kernel; arguments as those of :meth:`GemmSm90.launch`."""
        ((mA,), mB), (operands, outputs, _) = product, epilogue
        self.dtype = mA.element_type
        mma = cute.make_tiled_mma(MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)))
        grid = [cute.ceil_div(mB[0].shape[0], self.columns), cute.ceil_div(mA.shape[0], self.config.tile_m), 1]
        self.kernel(mma, mA, mB, operands, outputs).launch(
            grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, mA, mB, operands, outputs):
        tidx, (column, row, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        sX = smem.allocate_tensor(Int32, cute.make_layout(2 * self.config.tile_m * PITCH), VECTOR_BYTES)
        pitch = self.config.tile_n + 4
        sums = cute.make_layout((self.config.tile_m, self.config.tile_n), stride=(pitch, 1))
        sSums = smem.allocate_tensor(Float32, sums, VECTOR_BYTES)
        first = row * self.config.tile_m
        k = Int32(mA.shape[1])
        rows, shift = self._rows(mB, column, tidx), self._shift(mB, column, tidx)
        sums = [cute.make_rmem_tensor(((2, 2), 1, 1), Float32) for _ in range(self.blocks)]
        for rSum in sums:
            rSum.fill(0.0)
        both = [[fragment(Int32, 4) for _ in range(2 * PIECES)] for _ in range(2)]
        rX = fragment(self.dtype, self.config.tile_m + 1)
        wait_for_previous(self.pdl)
        # The last columns of a row that begins late in its vector may need one more step.
        steps = cute.ceil_div(k + VECTOR - 1, STEP)
        self._fetch(both[0], rows, Int32(0), k, tidx)
        self._fetch_x(rX, mA, first, Int32(0), tidx)
        self._put_x(rX, sX, Int32(0), tidx)
        cute.arch.barrier()
        for step in cutlass.range(0, steps, 2, unroll=1):
            for i in cutlass.range_constexpr(2):
                at = step + i
                # Past the last step only zeros are loaded.
                self._fetch(both[1 - i], rows, at + 1, k, tidx)
                self._fetch_x(rX, mA, first, at + 1, tidx)
                self._mask(both[i], rows, at, k, tidx)
                self._multiply(mma, both[i], (sX, i), sums, shift, tidx)
                # All threads have passed the barrier behind the reads of the other half.
                self._put_x(rX, sX, at + 1, tidx)
                cute.arch.barrier()
        let_next_start(self.pdl)
        self._exchange(sums, sSums, rows, tidx)
        cute.arch.barrier()
        self._store(sSums, (operands, outputs), (first, column * self.columns, Int32(mA.shape[0])), mB[0], tidx)

    def _rows(self, mB, column, tidx):
        """A thread's two rows of b. Rows of the up projection, which follow on the gate's, begin as those of the gate
        do that are n rows apart from them, modulo 8.
        """
        warp, lane = tidx // WARP, tidx % WARP
        n, k = Int32(mB[0].shape[0]), Int32(mB[0].shape[1])
        found = []
        for i in range(2):
            half = i if len(mB) == 2 else 0
            m = mB[half]
            within = (warp - half * n & 7) + 8 * (lane // 4 + (8 * i if len(mB) == 1 else 0))
            mine = column * self.columns + within
            address = self._address(m, cutlass.select_(mine < n, mine, 0))
            begin = Int32(address & (VECTOR_BYTES - 1)) // 2
            base = address - Int64(begin) * 2
            last = Int32(cutlass.min((self._address(m, n - 1) - base) // 2 + k, Int64(MOST)))
            found.append(Row(base, begin, begin + k, last, within + half * self.columns))
        return found

    def _shift(self, mB, column, tidx):
        """The elements before the rows of this thread's warp in their first vectors."""
        row = column * self.columns + tidx // WARP
        return Int32(self._address(mB[0], row) & (VECTOR_BYTES - 1)) // 2

    def _address(self, m, row):
        return m.iterator.toint() + Int64(row) * Int64(m.stride[0]) * 2

    @cute.jit
    def _fetch(self, vectors: cutlass.Constexpr, rows: cutlass.Constexpr, step, k, tidx):
        """Load this thread's vectors of a step, zeros where a row has ended."""
        column = step * STEP + tidx % 4 * VECTOR
        if (step + 1) * STEP <= k:
            for v in cutlass.range_constexpr(2 * PIECES):
                load(vectors[v], rows[v % 2].base + Int64(column + v // 2 * 32) * 2)
        else:
            for v in cutlass.range_constexpr(2 * PIECES):
                vectors[v].fill(0)
                row, at = rows[v % 2], column + v // 2 * 32
                if at < row.end:
                    if at + VECTOR <= row.last:
                        load(vectors[v], row.base + Int64(at) * 2)
                    else:
                        elements = cute.recast_tensor(vectors[v], self.dtype)
                        load_first(elements, row.base + Int64(at) * 2, row.last - at)

    @cute.jit
    def _mask(self, vectors: cutlass.Constexpr, rows: cutlass.Constexpr, step, k, tidx):
        """Replace by zeros what lies beside the rows: in the first step and in the last ones."""
        if (step == 0) | ((step + 1) * STEP > k):
            for v in cutlass.range_constexpr(2 * PIECES):
                for word in cutlass.range_constexpr(4):
                    column = step * STEP + tidx % 4 * VECTOR + v // 2 * 32 + 2 * word
                    begin, end = rows[v % 2].begin, rows[v % 2].end
                    lower = cutlass.select_((column >= begin) & (column < end), Int32(0xFFFF), Int32(0))
                    upper = cutlass.select_((column + 1 >= begin) & (column + 1 < end), Int32(-65536), Int32(0))
                    vectors[v][word] = vectors[v][word] & (lower | upper)

    @cute.jit
    def _fetch_x(self, rX, mA, first, step, tidx):
        """Load this thread's elements of a step of a: one of each row, then one of those before the next step's."""
        (m, k), size = mA.shape, self.config.tile_m
        for i in cutlass.range_constexpr(size + 1):
            row, column = self._place(i, tidx)
            row, column = first + row, step * STEP - BEFORE + column
            rX[i] = self.dtype(0.0)
            inside = (row < m) & (column >= 0) & (column < k)
            if inside & ((i < size) | (tidx < VECTOR * size)):
                rX[i] = gmem_elements(self.dtype, self._address(mA, row) + Int64(column) * 2, 1)[0]

    def _place(self, i, tidx):
        """Row and column of a thread's i-th element of a step."""
        return (i, tidx) if i < self.config.tile_m else (tidx // VECTOR, STEP + tidx % VECTOR)

    @cute.jit
    def _put_x(self, rX, sX, step, tidx):
        """Store this thread's elements of a step in shared memory."""
        halves = cute.recast_tensor(sX, self.dtype)
        for i in cutlass.range_constexpr(self.config.tile_m + 1):
            row, column = self._place(i, tidx)
            word = column // 2
            at = (step % 2 * self.config.tile_m + row) * PITCH + word % 4 * QUARTER + word // 4
            if (i < self.config.tile_m) | (tidx < VECTOR * self.config.tile_m):
                halves[2 * at + column % 2] = rX[i]

    def _multiply(self, mma, vectors, half_of, sums, shift, tidx):
        """Add the products of a step, whose elements of a are in this half of shared memory, to the sums of each 8 rows
        of a.
        """
        (sX, slot), lane = half_of, tidx % WARP
        odd, word = shift % 2 == 1, (BEFORE - shift) // 2
        selector = cutlass.select_(odd, Int32(ODD), Int32(EVEN))
        words = [word + j for j in range(4)] + [cutlass.select_(odd, word + 4, word)]
        places = [w % 4 * QUARTER + w // 4 + lane % 4 for w in words]
        for piece in range(PIECES):
            operands = []
            for half in range(2):
                rA = cute.make_rmem_tensor(((2, 2, 2), 1), self.dtype)
                rWords = cute.recast_tensor(rA, Int32)
                for j in range(4):
                    rWords[j] = vectors[2 * piece + j % 2][2 * half + j // 2]
                operands.append(rA)
            for block, rSum in enumerate(sums):
                start = (slot * self.config.tile_m + 8 * block + lane // 4) * PITCH + 4 * piece
                found = [sX[start + place] for place in places]
                moved = [cute.arch.prmt(found[j], found[j + 1], selector) for j in range(4)]
                for half in range(2):
                    rB = cute.make_rmem_tensor(((2, 2), 1), self.dtype)
                    rWords = cute.recast_tensor(rB, Int32)
                    for j in range(2):
                        rWords[j] = moved[2 * half + j]
                    part = cute.make_tensor(rSum.iterator, cute.make_layout(((2, 2), 1, 1)))
                    cute.gemm(mma, part, operands[half], rB, part)

    def _exchange(self, sums, sSums, rows, tidx):
        """Write this thread's sums to shared memory: of two rows of b, neighbouring rows of a."""
        for block, rSum in enumerate(sums):
            for v in range(4):
                sSums[8 * block + tidx % 4 * 2 + v % 2, rows[v // 2].column] = rSum[v]

    @cute.jit
    def _store(self, sSums, epilogue: cutlass.Constexpr, at: cutlass.Constexpr, mB, tidx):
        """Compute and store the outputs, a pair of columns in two rows of each thread at once."""
        (operands, outputs), (first, column, m), apart = epilogue, at, self.config.tile_m // 2
        pairs = self.columns // 2
        for i in cutlass.range_constexpr(cute.ceil_div(apart * pairs, THREADS)):
            item = tidx + i * THREADS
            if item < apart * pairs:
                row, pair = item // pairs, item % pairs
                rows = tuple([first + row + r * apart for r in range(2)])
                chunk = Chunk(rows, (column + 2 * pair,), (m, Int32(mB.shape[0])), (0,))

                def value(half, v, distance, row=row, pair=pair):
                    return sSums[row + v // 2 % 2 * apart, half * self.columns + 2 * pair + v % 2]

                loaded = [self.epilogue.load(tensor, mX, chunk) for tensor, mX in zip(self.epilogue.operands, operands)]
                results = self.epilogue.compute(value, loaded, chunk, {})
                for tensor, mX, rX in zip(self.epilogue.outputs, outputs, results):
                    self.epilogue.store(tensor, mX, rX, chunk)
