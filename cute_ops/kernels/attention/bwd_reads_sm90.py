"""The gradient of what a change of scores reads on Hopper, summed over the scores that read the same element."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_queries_sm90 import READ
from cute_ops.kernels.attention.bwd_sm80 import times_cotangents
from cute_ops.kernels.attention.mods import Evaluated
from cute_ops.kernels.attention.products import mma_of_scores, multiply, tma_copies
from cute_ops.kernels.attention.sums_of_reads import SumsOfReads
from cute_ops.kernels.attention.tensors import Moved, partition, ring, slots
from cute_ops.kernels.attention.tiles import REGISTERS, Sizes, first_row, place_of
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP

CONSUMERS = 2


class ReadAhead(Evaluated):
    """A change of scores whose arrays are read before the scores of a tile are there."""

    in_pairs = False  # what a tile reads is there

    def __init__(self, mod):
        super().__init__(mod)
        self.tile = {}

    def read_tile(self, place):
        """Read what changes the scores of a thread's place."""
        self.tile, loaded = {}, {}
        for _, _, at, coordinates in place.each(down=True):
            super().operands((Float32(0.0), *coordinates), place.sizes.captured, loaded, at)
        self.tile = loaded

    def operands(self, given, captured, loaded, at, numbers=None):
        return super().operands(given, captured, {**loaded, **self.tile}, at, numbers)


class SumsOfReadsSm90(SumsOfReads):
    """``sums = sum(ds * dscore / dread)`` over the scores that read the same element, by warpgroups.

    Tile: scores of 128 queries, 64 for each of two warpgroups, and ``tile_k`` keys; a warp of a third one loads
    queries, cotangents, keys and values of each tile into a ring. Sums are those of :class:`SumsOfReads`.
    Shared memory: ``stages`` slots of ``(128 + tile_k) x (d + dv)``; a tile of sums takes their place.
    Bytes moved per element: each tile's operands, which mostly L2 holds; sums once.
    """

    def __init__(self, config, d, dv, mods, scale):
        super().__init__(config, d, dv, mods, scale)
        self.threads = CONSUMERS * WARPGROUP
        self.ahead = mods.score = ReadAhead(mods.score.mod)

    def meet(self):
        cute.arch.barrier(barrier_id=READ, number_of_threads=self.threads)

    @cute.jit
    def start(
        self,
        inputs: cutlass.Constexpr,
        rows: cutlass.Constexpr,
        found: cutlass.Constexpr,
        sizes: cutlass.Constexpr,
        ctas,
        stream,
    ):
        dtype, row = self.dtype, LayoutEnum.ROW_MAJOR
        mma = mma_of_scores(dtype, self.tile_k)
        shapes = [(self.block, self.tile_k, width) for width in (self.d, self.dv)]
        layouts = (
            hopper.make_smem_layout_a(row, shapes[0], dtype, self.stages),
            hopper.make_smem_layout_b(row, shapes[0], dtype, self.stages),
            hopper.make_smem_layout_b(row, shapes[1], dtype, self.stages),
            hopper.make_smem_layout_a(row, shapes[1], dtype, self.stages),
        )
        tiles = (self.block, self.d), (self.tile_k, self.d), (self.tile_k, self.dv), (self.block, self.dv)
        moved = tma_copies(inputs, layouts, tiles, stored=0)
        self.kernel((mma, mma), (moved, layouts), rows, found, tuple(sizes)).launch(
            grid=[ctas, 1, 1], block=[self.threads + WARPGROUP, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mmas, moved, rows, found, sizes):
        sizes, (moved, layouts) = Sizes(*sizes), moved
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        held = [slots(smem, self.dtype, layout) for layout in layouts]
        moved = [Moved(tma, m, s) for (tma, m), s in zip(moved, held)]
        own = (self.block + self.tile_k) * (self.d + self.dv) * (self.dtype.width // 8)
        first = cute.size(cute.select(layouts[0], mode=[0, 1])) * (self.dtype.width // 8)
        loaded = ring(smem, self.dtype, layouts[0], self.stages, CONSUMERS, own - first)
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        unit, part, ends = self.own_steps(found[1], sizes)
        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(REGISTERS[CONSUMERS].load)
            if warp == 0:
                self._load(loaded, moved, (unit, ends), sizes)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[CONSUMERS].multiply)
            mmas[0].set(warpgroup.Field.ACCUMULATE, False)
            mmas[1].set(warpgroup.Field.ACCUMULATE, True)
            tidx = cute.arch.thread_idx()[0] - WARPGROUP
            rSum = self._multiply(loaded, mmas, moved, rows, (unit, ends, tidx, sizes))
            place = place_of(tidx, None, (0, 0, self.tile_k), sizes)
            self.write(rSum, place, (unit, part, tidx), held[0].iterator.toint(), found, sizes)

    @cute.jit
    def _load(
        self, loaded: cutlass.Constexpr, moved: cutlass.Constexpr, at: cutlass.Constexpr, sizes: cutlass.Constexpr
    ):
        """Load the queries, cotangents, keys and values of each tile."""
        unit, (first, last) = at
        slot = make_pipeline_state(PipelineUserType.Producer, self.stages)
        widths, rows = (self.d, self.d, self.dv, self.dv), (self.block, self.tile_k, self.tile_k, self.block)
        views = [partition(x, (length, width), (None, 0, None, None)) for x, length, width in zip(moved, rows, widths)]
        for index in cutlass.range(first, last + 1, unroll=1):
            tile, keys = self.tile_at(unit, index, sizes)
            if self.tiles.some(tile, sizes, tile.block, keys):
                kv_head = tile.head // sizes.heads_per_kv
                loaded.producer_acquire(slot)
                full = loaded.producer_get_barrier(slot)
                for i in cutlass.range_constexpr(4):
                    number, head = (keys, kv_head) if const_expr(i in (1, 2)) else (tile.block, tile.head)
                    tXsX, tXgX = views[i]
                    source = tXgX[None, number, head, tile.batch]
                    cute.copy(moved[i].tma, source, tXsX[None, slot.index], tma_bar_ptr=full)
                slot.advance()
        loaded.producer_tail(slot)

    @cute.jit
    def _multiply(
        self, loaded: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr, rows: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        """A thread's part of the sum of a CTA's tiles."""
        unit, (first, last), tidx, sizes = at
        q, k, v, dout = moved
        own = mmas[1].get_slice(cute.arch.make_warp_uniform(tidx // WARPGROUP) * WARPGROUP)
        tSrQ, tPrO = (mmas[1].make_fragment_A(own.partition_A(x.s)) for x in (q, dout))
        tSrK, tPrV = (mmas[1].make_fragment_B(own.partition_B(x.s)) for x in (k, v))
        shape = mmas[1].partition_shape_C((self.block, self.tile_k))
        rS, rP, rSum = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
        rSum.fill(0.0)
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        for index in cutlass.range(first, last + 1, unroll=1):
            tile, keys = self.tile_at(unit, index, sizes)
            if self.tiles.some(tile, sizes, tile.block, keys):
                row = tile.block * self.block
                place = place_of(tidx, tile, (row, keys * self.tile_k, self.tile_k), sizes)
                # Before products are waited for: memory is slower than these.
                lse, delta = self.weights.of_rows(rows, row + first_row(tidx), tile, sizes)
                self.ahead.read_tile(place)
                loaded.consumer_wait(slot)
                multiply(mmas, tSrQ, tSrK, rS, (slot.index, slot.index))
                multiply(mmas, tPrO, tPrV, rP, (slot.index, slot.index))
                warpgroup.wait_group(1)
                self.weights.of_scores(rS, None, place, lse, self.tiles.whole(tile, sizes, tile.block, keys))
                warpgroup.wait_group(0)
                loaded.consumer_release(slot)
                times_cotangents(rS, rP, delta)
                rSum.store(rSum.load() + rS.load())
                slot.advance()
        return rSum
