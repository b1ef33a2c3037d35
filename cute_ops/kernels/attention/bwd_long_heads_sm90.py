"""All gradients of attention from scores that are computed once, of long heads on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_queries_sm90 import QueriesBackward
from cute_ops.kernels.attention.sums import CHUNK, TOGETHER, SumsOfTiles, add_four
from cute_ops.kernels.attention.tensors import address_of, slots, transposed
from cute_ops.kernels.tensor_core.sizes import WARPGROUP

# Named barriers: both warpgroups have read ds and weights; all of them lie in shared memory.
FREE, WRITTEN = 4, 5
COLUMNS = 64  # of a gradient that a warpgroup computes at a time


class LongHeadsBackward(SumsOfTiles, QueriesBackward):
    """``dq = ds @ k``, and for each tile of queries what it adds to ``dk = ds.T @ q`` and ``dv = p.T @ dout``.

    Tile: a CTA has 128 queries of one head, as :class:`QueriesBackward`: of long heads registers hold the sums of one
    gradient. It writes ``ds`` and the weights of a tile of 64 keys to shared memory; one warpgroup multiplies the first
    with queries, the other one the second with cotangents, 64 columns at a time. Threads add these to float32 sums in
    memory while the next ones are multiplied, in the order in which CTAs come: dk and dv are not deterministic. Five
    products a tile, where two kernels compute seven, or three of them eight.
    Shared memory: as :class:`QueriesBackward`, and ``128 x 64`` of ``ds`` and of weights.
    Bytes moved per element: as :class:`QueriesBackward`; the sums of dk and dv are read and written by L2 once for each
    tile of queries, and once more to zero and to round them.
    """

    axis, releases_later = 1, False

    @property
    def width(self):
        """Columns of sums: what dk or dv has fewer is not used."""
        return max(self.d, self.dv)

    def _tile(self, sizes):
        # L2 holds sums, too. 2 x 4096 causal with 16 heads of 256 take 1786 us instead of 1971.
        return self.tiles.queries_at(cute.arch.block_idx()[0], sizes, (self.d + self.dv) * 4)

    def _places(self, smem, layouts):
        """Cotangents lie behind queries, as rows of the same width, so that a warpgroup takes one of both by its
        number.
        """
        of_q, of_k, of_v, of_o = layouts
        both = slots(smem, self.dtype, self._rows_of_queries(self.width))
        places = [
            cute.make_tensor(both.iterator + i * (self.tile_q * self.width), of.outer)
            for i, of in enumerate((of_q, of_o))
        ]
        return [places[0], slots(smem, self.dtype, of_k), slots(smem, self.dtype, of_v), places[1]]

    def _of_keys(self, smem, mSums):
        """The places of ds and of weights, and the sums of dk and dv."""
        return slots(smem, self.dtype, self._rows_of_queries(self.tile_k)), mSums

    def _rows_of_queries(self, columns):
        """The layout of two tiles of so many columns."""
        return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (self.tile_q, 0, columns), self.dtype, 2)

    def _keys(self, of_keys, given, at):
        (sDs, mSums), (mma_s, q, rS, rP, rDs), (tile, sizes, tidx) = of_keys, given, at
        group, thread = cute.arch.make_warp_uniform(tidx // WARPGROUP), tidx % WARPGROUP
        across, both = OperandMajorMode.MN, self.consumers * WARPGROUP
        mmas = [
            hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, across, across, Float32, (1, 1, 1), (self.tile_k, COLUMNS)
            )
            for _ in range(2)
        ]
        for mma, adds in zip(mmas, (False, True)):
            mma.set(warpgroup.Field.ACCUMULATE, adds)
        own = mmas[0].get_slice(0)
        tXrA = mmas[0].make_fragment_A(own.partition_A(transposed(sDs)))  # (mma, keys, m, 2)
        sBoth = cute.make_tensor(q.s.iterator, self._rows_of_queries(self.width).outer)
        columns = cute.local_tile(transposed(sBoth), (COLUMNS, self.tile_q), (None, 0, None))
        tXrB = mmas[0].make_fragment_B(own.partition_B(columns))  # (mma, 1, m, parts of 64 columns, 2)
        atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        writer = cute.make_tiled_copy_C(atom, mma_s).get_slice(tidx)
        shape = mma_s.partition_shape_C((self.tile_q, self.tile_k))
        rWeights = cute.make_rmem_tensor_like(rDs)
        batch = tile.batch if const_expr(sizes.offsets is None) else Int32(0)
        place = 0, 0, tile.head // sizes.heads_per_kv, group * (Int32(mSums.shape[3]) // 2) + batch
        sums, slots_before = address_of(mSums, place, thread * TOGETHER), sizes.first_slots[1]

        def put(rX, which):
            rows = cute.make_tensor(rX.iterator, cute.make_layout(shape))
            cute.copy(writer, writer.retile(rows), writer.partition_D(sDs)[None, None, None, which])

        def issue(part, rX):
            warpgroup.fence()
            for m in range(cute.size(tXrA, mode=[2])):
                cute.gemm(mmas[m > 0], rX, tXrA[None, None, m, group], tXrB[None, None, m, part, group], rX)
            warpgroup.commit_group()

        def begin_keys():
            cute.arch.barrier(barrier_id=FREE, number_of_threads=both)
            put(rWeights, 1)

        def add_keys(keys, release):
            put(rDs, 0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=WRITTEN, number_of_threads=both)
            address = sums + Int64(slots_before + keys) * (self.tile_k * self.width * Float32.width // 8)
            registers, count = (rS, rP), self.width // COLUMNS
            issue(0, registers[0])
            for i in range(count):
                if i + 1 < count:
                    issue(i + 1, registers[(i + 1) % 2])
                warpgroup.wait_group(int(i + 1 < count))
                if i == 0:
                    release()
                widths = [width for width in (self.d, self.dv) if i < width // COLUMNS]
                add_part(registers[i % 2], address, i, len(widths) == 2 or group == int(widths[0] == self.dv))

        @cute.jit
        def add_part(rX, address, part: cutlass.Constexpr, there):
            """Add 64 columns to the sums, where a warpgroup's gradient has these."""
            if there:
                for block in cutlass.range_constexpr(COLUMNS // CHUNK):
                    step = (part * (COLUMNS // CHUNK) + block) * (WARPGROUP * TOGETHER * Float32.width // 8)
                    add_four(address + step, [rX[TOGETHER * block + j] for j in range(TOGETHER)])

        return rWeights, begin_keys, add_keys
