"""Matrix products by instructions of one warp (mma.sync): every GPU from SM 8.0 on, rows of any alignment."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op

from cute_ops.kernels.gemm.config import WARPS, GemmConfig
from cute_ops.kernels.gemm.parts import RowPartials
from cute_ops.kernels.gemm.scheduler import bytes_by_grouping, tile_count, tile_of_batch
from cute_ops.kernels.gemm.views import is_last_contiguous
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.accumulators import AccumulatorTile

THREADS = 32 * WARPS
CHUNK = 4  # columns of a thread that are computed and stored at once, with the ones next to them
PADDING = 8  # elements between rows in shared memory, so that eight neighbouring rows lie in different banks


class GemmSm80:
    """``outputs = epilogue(a @ b.T, operands)`` by ``mma.sync`` without TMA: a ``(m, k)`` and b ``(n, k)`` of 16 bits.

    Tile: ``tile_m x tile_n`` of a CTA of 8 warps, ``warps_n`` of them along n. While a step of ``tile_k`` is
    multiplied, each thread holds its vectors of the next step in registers; vectors are as long as alignments and sizes
    allow.
    Shared memory: two slots of ``(tile_m + tile_n) x tile_k`` elements, padded.
    Bytes moved per element: a and b once from memory as long as tiles that run together find them in L2, out once.
    """

    def __init__(self, variant, epilogue, parts=()):
        if parts:
            raise NotImplementedError("parts of an epilogue run on Hopper, with operands that TMA can load")
        self.config, self.epilogue = GemmConfig.of(variant.config), epilogue
        self.pdl = can_use_pdl(variant.arch)
        self.parts = (RowPartials(epilogue.rows),) if epilogue.rows.reductions else ()
        self.columns = self.config.tile_n // epilogue.halves  # of an output's tile
        self.warps_m, self.warps_n = WARPS // self.config.warps_n, self.config.warps_n

    @cute.jit
    def launch(self, product, epilogue, stream):
        """Launch the kernel; arguments as those of :meth:`GemmSm90.launch`."""
        config, ((mA,), mB), (operands, outputs, parts) = self.config, product, epilogue
        mPartials = parts[0][0] if const_expr(len(parts) > 0) else None
        self.dtype = mA.element_type
        mma = cute.make_tiled_mma(
            MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), (self.warps_m, self.warps_n, 1),
            permutation_mnk=(16 * self.warps_m, 16 * self.warps_n, 16),
        )  # fmt: skip
        m, n = mA.shape[0], mB[0].shape[0]
        rows, columns = cute.ceil_div(m, config.tile_m), cute.ceil_div(n, self.columns)
        grouped_rows, grouped_columns = bytes_by_grouping(rows, columns, config.group, Int64(m), Int64(n))
        batch = (cute.size(mA, mode=[2]),) if const_expr(self.epilogue.batched) else ()
        order = (rows, columns, Int32(grouped_columns < grouped_rows), *batch)
        self.kernel(mma, (mA, mB), (operands, outputs, mPartials), order).launch(
            grid=[tile_count(order), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, product, epilogue, order):
        (mA, mB), (*epilogue, mPartials) = product, epilogue
        config, tidx = self.config, cute.arch.thread_idx()[0]
        row, column, *batch = tile_of_batch(cute.arch.block_idx()[0], order, config.group)
        if const_expr(self.epilogue.batched):
            mA, mB = mA[None, None, batch[0]], tuple([m[None, None, batch[0]] for m in mB])
        smem = cutlass.utils.SmemAllocator()
        sA, sB = (self._slots(smem, m, size) for m, size in ((mA, config.tile_m), (mB[0], config.tile_n)))
        loaders = [self._loader(mA, sA, (config.tile_m, config.tile_k), row, config.vec_a, tidx)]
        for i, m in enumerate(mB):
            tile = (self.columns, config.tile_k)
            loaders.append(self._loader(m, cute.local_tile(sB, tile, (i, 0, None)), tile, column, config.vec_b, tidx))
        mine = mma.get_slice(tidx)
        tCrA = mma.make_fragment_A(mine.partition_A(sA[None, None, 0]))
        tCrB = mma.make_fragment_B(mine.partition_B(sB[None, None, 0]))
        rAcc = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        rAcc.fill(0.0)
        read_a = self._reader(cute.make_tiled_copy_A, mma, mA).get_slice(tidx)
        read_b = self._reader(cute.make_tiled_copy_B, mma, mB[0]).get_slice(tidx)

        wait_for_previous(self.pdl)
        steps = cute.ceil_div(mA.shape[1], config.tile_k)
        for loader in loaders:
            self._fetch(loader, Int32(0))
        for loader in loaders:
            self._put(loader, Int32(0))
        cute.arch.barrier()
        for step in cutlass.range(steps, unroll=1):
            # Past the last step only zeros are loaded.
            for loader in loaders:
                self._fetch(loader, step + 1)
            slot = step % 2
            for k in cutlass.range_constexpr(config.tile_k // 16):
                cute.copy(read_a, read_a.partition_S(sA)[None, None, k, slot], read_a.retile(tCrA)[None, None, k])
                cute.copy(read_b, read_b.partition_S(sB)[None, None, k, slot], read_b.retile(tCrB)[None, None, k])
                cute.gemm(mma, rAcc, tCrA[None, None, k], tCrB[None, None, k], rAcc)
            # Threads that read the other slot have passed the previous barrier.
            for loader in loaders:
                self._put(loader, 1 - slot)
            cute.arch.barrier()
        let_next_start(self.pdl)
        acc = AccumulatorTile.of(mma, rAcc, tidx, (config.tile_m, config.tile_n), self.epilogue.halves)
        # Warps are numbered down the rows first.
        partial = column * self.warps_n + tidx // (32 * self.warps_m)
        origin = (row * config.tile_m, column * self.columns)
        at = (origin, (mA.shape[0], mB[0].shape[0]), batch)
        self._store(acc, epilogue, at, (mPartials, partial))

    def _slots(self, smem, m, size):
        """Two slots of an operand: (size, tile_k, slot), contiguous as in memory."""
        k = self.config.tile_k
        inner = k if is_last_contiguous(m) else size
        pitch = inner + PADDING
        stride = (pitch, 1) if is_last_contiguous(m) else (1, pitch)
        total = pitch * (size if is_last_contiguous(m) else k)
        return smem.allocate_tensor(self.dtype, cute.make_layout((size, k, 2), stride=(*stride, total)), 16)

    def _reader(self, make, mma, m):
        """Loads of an operand's fragments from shared memory, four matrices of 8 x 8 at once."""
        atom = cute.make_copy_atom(LdMatrix8x8x16bOp(not is_last_contiguous(m), 4), self.dtype)
        return make(atom, mma)

    def _loader(self, m, slots, tile, at, vec, tidx):
        """This thread's vectors of an operand: in memory, their coordinates, in shared memory, and registers."""
        atom = cute.make_copy_atom(CopyUniversalOp(), self.dtype, num_bits_per_copy=vec * self.dtype.width)
        across = (tile[1] if is_last_contiguous(m) else tile[0]) // vec
        shape, value, stride = (THREADS // across, across), (1, vec), (across, 1)
        if not is_last_contiguous(m):
            shape, value, stride = shape[::-1], value[::-1], stride[::-1]
        copy = cute.make_tiled_copy_tv(atom, cute.make_layout(shape, stride=stride), cute.make_layout(value))
        mine = copy.get_slice(tidx)
        tXgX = mine.partition_S(cute.local_tile(m, tile, (at, None)))  # (vec, rows, columns, steps)
        tXcX = mine.partition_S(cute.local_tile(cute.make_identity_tensor(m.shape), tile, (at, None)))
        tXsX = mine.partition_D(slots)  # (vec, rows, columns, slots)
        return atom, m.shape, tXgX, tXcX, tXsX, cute.make_rmem_tensor_like(tXsX[None, None, None, 0])

    @cute.jit
    def _fetch(self, loader: cutlass.Constexpr, step):
        """Load this thread's vectors of a step into registers, zeros where the operand ends."""
        atom, shape, tXgX, tXcX, _, rX = loader
        rX.fill(0.0)
        for i in cutlass.range_constexpr(cute.size(rX, mode=[1])):
            for j in cutlass.range_constexpr(cute.size(rX, mode=[2])):
                if cute.elem_less(tXcX[0, i, j, step], shape):
                    cute.copy(atom, tXgX[None, i, j, step], rX[None, i, j])

    def _put(self, loader, slot):
        """Store this thread's vectors of a step in shared memory."""
        atom, _, _, _, tXsX, rX = loader
        cute.copy(atom, rX, tXsX[None, None, None, slot])

    @cute.jit
    def _store(
        self, acc: cutlass.Constexpr, epilogue: cutlass.Constexpr, at: cutlass.Constexpr, partials: cutlass.Constexpr
    ):  # fmt: skip
        """Compute and store the outputs, 16 rows of each warp at once.

        Args:
            acc: the :class:`AccumulatorTile`.
            epilogue: the epilogue's operands and outputs.
            at: row and column at which the tile begins, the output's shape, the matrix of a batch.
            partials: the workspace of reductions of rows, and which of a row's partial results is this warp's.
        """
        (operands, outputs), rows, pairs = epilogue, self.epilogue.rows, len(acc.columns)
        for i in cutlass.range_constexpr(acc.repeats_m):
            totals, groups = rows.start(), {}
            for first in cutlass.range_constexpr(0, pairs, CHUNK):
                chunk = acc.chunk(i, range(first, min(first + CHUNK, pairs)), *at)
                loaded = [self.epilogue.load(tensor, m, chunk) for tensor, m in zip(self.epilogue.operands, operands)]
                results = self.epilogue.compute(acc.values(chunk), loaded, chunk, groups)
                rows.add(totals, results[len(outputs) :], chunk)
                for tensor, m, rX in zip(self.epilogue.outputs, outputs, results):
                    self.epilogue.store(tensor, m, rX, chunk)
            if const_expr(len(totals) > 0):
                rows.store(totals, partials[0], chunk.rows, chunk.shape[0], partials[1])
