"""Matrix products by instructions of one warp (mma.sync): every GPU from SM 8.0 on, rows of any alignment."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, MmaF16BF16Op

from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.kernels.gemm.scheduler import bytes_by_grouping, tile_of
from cute_ops.kernels.gemm.views import is_last_contiguous
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous

WARPS_M, WARPS_N = 2, 4
THREADS = 32 * WARPS_M * WARPS_N
PADDING = 8  # elements between rows in shared memory, so that eight neighbouring rows lie in different banks


class GemmSm80:
    """``out = epilogue(a @ b.T)``, as :class:`~cute_ops.kernels.gemm.sm90.GemmSm90`, without TMA.

    Tile: ``tile_m x tile_n`` of a CTA of 2 x 4 warps. While a step of ``tile_k`` is multiplied, each thread holds its
    vectors of the next step in registers; vectors are as long as alignments and sizes allow.
    Shared memory: two slots of ``(tile_m + tile_n) x tile_k`` elements, padded.
    Bytes moved per element: a and b once from memory as long as tiles that run together find them in L2, out once.
    """

    def __init__(self, variant, epilogue):
        self.config, self.epilogue = GemmConfig.of(variant.config), epilogue
        self.pdl = can_use_pdl(variant.arch)
        out = variant.args[-1]
        self.out_vec = min(out.row_align // out.itemsize, 2)

    @cute.jit
    def launch(self, mA, mB, mD, stream):
        tile = self.config
        self.dtype, self.out_dtype = mA.element_type, mD.element_type
        mma = cute.make_tiled_mma(
            MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), (WARPS_M, WARPS_N, 1),
            permutation_mnk=(16 * WARPS_M, 16 * WARPS_N, 16),
        )  # fmt: skip
        m, n = mD.shape
        rows, columns = cute.ceil_div(m, tile.tile_m), cute.ceil_div(n, tile.tile_n)
        grouped_rows, grouped_columns = bytes_by_grouping(rows, columns, tile.group, Int64(m), Int64(n))
        order = (rows, columns, Int32(grouped_columns < grouped_rows))
        self.kernel(mma, mA, mB, mD, order).launch(
            grid=[rows * columns, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, mA, mB, mD, order):
        tile, tidx = self.config, cute.arch.thread_idx()[0]
        row, column = tile_of(cute.arch.block_idx()[0], order[0], order[1], tile.group, order[2])
        smem = cutlass.utils.SmemAllocator()
        sA, sB = (self._slots(smem, m, size) for m, size in ((mA, tile.tile_m), (mB, tile.tile_n)))
        a = self._loader(mA, sA, (tile.tile_m, tile.tile_k), row, tile.vec_a, tidx)
        b = self._loader(mB, sB, (tile.tile_n, tile.tile_k), column, tile.vec_b, tidx)
        mine = mma.get_slice(tidx)
        tCrA = mma.make_fragment_A(mine.partition_A(sA[None, None, 0]))
        tCrB = mma.make_fragment_B(mine.partition_B(sB[None, None, 0]))
        rAcc = cute.make_rmem_tensor(mma.partition_shape_C((tile.tile_m, tile.tile_n)), Float32)
        rAcc.fill(0.0)
        read_a = self._reader(cute.make_tiled_copy_A, mma, mA).get_slice(tidx)
        read_b = self._reader(cute.make_tiled_copy_B, mma, mB).get_slice(tidx)

        wait_for_previous(self.pdl)
        steps = cute.ceil_div(mA.shape[1], tile.tile_k)
        self._fetch(a, Int32(0))
        self._fetch(b, Int32(0))
        self._put(a, Int32(0))
        self._put(b, Int32(0))
        cute.arch.barrier()
        for step in cutlass.range(steps, unroll=1):
            # Past the last step nothing is loaded but zeros.
            self._fetch(a, step + 1)
            self._fetch(b, step + 1)
            slot = step % 2
            for k in cutlass.range_constexpr(tile.tile_k // 16):
                cute.copy(read_a, read_a.partition_S(sA)[None, None, k, slot], read_a.retile(tCrA)[None, None, k])
                cute.copy(read_b, read_b.partition_S(sB)[None, None, k, slot], read_b.retile(tCrB)[None, None, k])
                cute.gemm(mma, rAcc, tCrA[None, None, k], tCrB[None, None, k], rAcc)
            # Who reads the other slot has arrived at the barrier before.
            self._put(a, 1 - slot)
            self._put(b, 1 - slot)
            cute.arch.barrier()
        let_next_start(self.pdl)
        self._store(mine, rAcc, mD, row, column)

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
        """Store them in shared memory."""
        atom, _, _, _, tXsX, rX = loader
        cute.copy(atom, rX, tXsX[None, None, None, slot])

    @cute.jit
    def _store(self, mine, rAcc, mD, row, column):
        shape, at = (self.config.tile_m, self.config.tile_n), (row, column)
        tCgD = mine.partition_C(cute.local_tile(mD, shape, at))
        tCcD = mine.partition_C(cute.local_tile(cute.make_identity_tensor(mD.shape), shape, at))
        rOut = cute.make_rmem_tensor_like(rAcc, self.out_dtype)
        rOut.store(self.epilogue(rAcc.load()).to(self.out_dtype))
        for i in cutlass.range_constexpr(0, cute.size(rAcc), self.out_vec):
            if cute.elem_less(tCcD[i], mD.shape):
                for v in cutlass.range_constexpr(self.out_vec):
                    tCgD[i + v] = rOut[i + v]
