"""The gradient of attention's queries on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.products import (
    mma_of_scores,
    mma_of_weights,
    multiply,
    multiply_weights,
    tma_copies,
)
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.tensors import Moved, by_sequence, partition, ring, slots, transposed
from cute_ops.kernels.attention.tiles import REGISTERS, Sizes, Tiles, first_row, place_of
from cute_ops.kernels.attention.weights import Weights
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP

OWN, READ = 1, 3  # named barriers: one of a warpgroup's threads, and that both have read shared memory


class QueriesBackward:
    """``dq = ds @ k``.

    Tile: a CTA has 128 queries of one head, 64 for each of two warpgroups, and goes through the keys in tiles of
    ``tile_k``. One warp of a third warpgroup loads queries and cotangents once, keys and values into a ring. The
    product with keys of one tile runs while the scores of the next are issued.
    Shared memory: ``128 x (d + dv)`` queries and cotangents, whose place the result takes; ``stages`` slots of ``tile_k
    x (d + dv)``.
    Bytes moved per element: q, dout and dq once; k and v once as long as the heads walked together find them in L2.
    """

    tile_q, consumers = 128, 2

    @property
    def releases_later(self):
        """Whether keys are released while the next tile is multiplied: else it needs their place."""
        return self.stages > 1

    def __init__(self, config, d, dv, mods, scale):
        self.d, self.dv, self.tile_k, self.stages = d, dv, config.tile_k, config.key_stages
        self.mods, self.scale = mods, scale
        self.weights, self.tiles = Weights(mods, scale), Tiles(self.tile_q, self.tile_k, mods)

    @cute.jit
    def launch(
        self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, mDq, sizes: cutlass.Constexpr, stream, mSums=None
    ):  # fmt: skip
        mQ, *_ = inputs
        self.dtype = dtype = mQ.element_type
        row = LayoutEnum.ROW_MAJOR
        mma_s, mma_dq = mma_of_scores(dtype, self.tile_k), mma_of_weights(dtype, self.d)
        shape_q, shape_v = (self.tile_q, self.tile_k, self.d), (self.tile_q, self.tile_k, self.dv)
        layouts = (
            hopper.make_smem_layout_a(row, shape_q, dtype, 1),
            hopper.make_smem_layout_b(row, shape_q, dtype, self.stages),
            hopper.make_smem_layout_b(row, shape_v, dtype, self.stages),
            hopper.make_smem_layout_a(row, shape_v, dtype, 1),
            hopper.make_smem_layout_epi(dtype, row, (MMA_M, self.d), self.consumers),
        )
        shapes = (
            (self.tile_q, self.d), (self.tile_k, self.d), (self.tile_k, self.dv), (self.tile_q, self.dv),
            (MMA_M, self.d),
        )  # fmt: skip
        if const_expr(sizes.offsets is not None):
            inputs, mDq = [by_sequence(m) for m in inputs], by_sequence(mDq)
        moved = tma_copies((*inputs, mDq), layouts, shapes, stored=1)
        blocks, batches = self.tiles.blocks(sizes, 0)
        self.kernel((mma_s, mma_s, mma_dq), (moved, layouts), mSums, rows, tuple(sizes)).launch(
            grid=[blocks * sizes.heads * batches, 1, 1],
            block=[WARPGROUP * (1 + self.consumers), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, mmas, moved, mSums, rows, sizes):
        mma_first, mma_s, mma_dq = mmas
        (moved, layouts), sizes = moved, Sizes(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        held, of_keys = self._places(smem, layouts[:4]), self._of_keys(smem, mSums)
        start = cute.recast_ptr(held[0].iterator, layouts[4].inner, dtype)
        held.append(cute.make_tensor(start, layouts[4].outer))
        moved = [Moved(tma, m, s) for (tma, m), s in zip(moved, held)]
        stages = 1, self.stages, self.stages, 1
        rings = [ring(smem, dtype, layout, count) for layout, count in zip(layouts, stages)]
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        tile, sizes = self._tile(sizes)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(REGISTERS[self.consumers].load)
            if warp == 0:
                self._load(rings, moved, tile, sizes)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.consumers].multiply)
            mma_first.set(warpgroup.Field.ACCUMULATE, False)
            for mma in (mma_s, mma_dq):
                mma.set(warpgroup.Field.ACCUMULATE, True)
            self._multiply(rings, (mma_first, mma_s, mma_dq), moved, (rows, of_keys), tile, sizes)

    def _places(self, smem, layouts):
        """The places in shared memory of queries, keys, values and cotangents."""
        return [slots(smem, self.dtype, layout) for layout in layouts]

    def _of_keys(self, smem, mSums):
        """Places for gradients of keys and values, in subclasses that compute these."""

    def _tile(self, sizes):
        return self.tiles.queries_at(cute.arch.block_idx()[0], sizes, (self.d + self.dv) * self.dtype.width // 8)

    @cute.jit
    def _load(
        self, rings: cutlass.Constexpr, moved: cutlass.Constexpr, tile: cutlass.Constexpr, sizes: cutlass.Constexpr
    ):
        """Load queries and cotangents, then the keys and the values of each tile."""
        ring_q, ring_k, ring_v, ring_o = rings
        q, k, v, dout, _ = moved
        (of_q, of_k), kv_head = sizes.rows, tile.head // sizes.heads_per_kv
        one = make_pipeline_state(PipelineUserType.Producer, 1)
        for whole, x, width in ((ring_q, q, self.d), (ring_o, dout, self.dv)):
            sX, gX = partition(x, (self.tile_q, width), (tile.block, 0, tile.head, tile.batch), of_q)
            whole.producer_acquire(one)
            cute.copy(x.tma, gX, sX[None, 0], tma_bar_ptr=whole.producer_get_barrier(one))
        tKsK, tKgK = partition(k, (self.tile_k, self.d), (None, 0, kv_head, tile.batch), of_k)
        tVsV, tVgV = partition(v, (self.tile_k, self.dv), (None, 0, kv_head, tile.batch), of_k)
        slot = make_pipeline_state(PipelineUserType.Producer, self.stages)
        first, last = self.tiles.keys_of(tile, sizes)
        for i in cutlass.range(last - first + 1, unroll=1):
            keys = last - i
            if self.tiles.some(tile, sizes, tile.block, keys):
                for tma, each, tXsX, tXgX in ((k.tma, ring_k, tKsK, tKgK), (v.tma, ring_v, tVsV, tVgV)):
                    each.producer_acquire(slot)
                    full = each.producer_get_barrier(slot)
                    cute.copy(tma, tXgX[None, keys], tXsX[None, slot.index], tma_bar_ptr=full)
                slot.advance()
        ring_k.producer_tail(slot)

    @cute.jit
    def _multiply(
        self, rings: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr, own: cutlass.Constexpr,
        tile: cutlass.Constexpr, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        (ring_q, ring_k, ring_v, ring_o), (mma_first, mma_s, mma_dq), (q, k, v, dout, _) = rings, mmas, moved
        rows, of_keys = own
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        first_s, first_dq = mma_s.get_slice(group * WARPGROUP), mma_dq.get_slice(group * WARPGROUP)
        tSrQ, tSrK = mma_s.make_fragment_A(first_s.partition_A(q.s)), mma_s.make_fragment_B(first_s.partition_B(k.s))
        tPrO, tPrV = mma_s.make_fragment_A(first_s.partition_A(dout.s)), mma_s.make_fragment_B(first_s.partition_B(v.s))
        tDrK = mma_dq.make_fragment_B(first_dq.partition_B(transposed(k.s)))  # (mma, d, n, stages)
        shape = mma_s.partition_shape_C((self.tile_q, self.tile_k))
        rS, rP = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        rDs = cute.make_rmem_tensor(((2, 2, 2), 1, self.tile_k // 16), self.dtype)
        rDq = cute.make_rmem_tensor(mma_dq.partition_shape_C((self.tile_q, self.d)), Float32)
        rDq.fill(0.0)
        rWeights, begin_keys, add_keys = self._keys(of_keys, (mma_s, q, rS, rP, rDs), (tile, sizes, tidx))
        lse, delta = self.weights.of_rows(rows, tile.block * self.tile_q + first_row(tidx), tile, sizes)

        one = make_pipeline_state(PipelineUserType.Consumer, 1)
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        before = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        ring_q.consumer_wait(one)
        ring_o.consumer_wait(one)
        first, last = self.tiles.keys_of(tile, sizes)
        running = Boolean(False)
        for i in cutlass.range(last - first + 1, unroll=1):
            keys = last - i
            if self.tiles.some(tile, sizes, tile.block, keys):
                ring_k.consumer_wait(slot)
                multiply((mma_first, mma_s), tSrQ, tSrK, rS, (0, slot.index))
                ring_v.consumer_wait(slot)
                multiply((mma_first, mma_s), tPrO, tPrV, rP, (0, slot.index))
                warpgroup.wait_group(1)
                if running:
                    ring_k.consumer_release(before)
                    before.advance()
                running = Boolean(self.releases_later)
                place = place_of(tidx, tile, (tile.block * self.tile_q, keys * self.tile_k, self.tile_k), sizes)
                whole = self.tiles.whole(tile, sizes, tile.block, keys)
                self.weights.of_scores(
                    rS, rWeights, place, lse, whole, self.tiles.rest_of(tile, sizes, tile.block, keys)
                )
                begin_keys()
                warpgroup.wait_group(0)
                ring_v.consumer_release(slot)
                scores, cotangents = by_row(rS), by_row(rP)
                for r, c, *_ in place.each():
                    scores[r, c] = scores[r, c] * (cotangents[r, c] - delta(r, c))
                store_packed(rS, rDs)
                multiply_weights(mma_dq, rDs, tDrK, rDq, slot.index)
                add_keys(keys, lambda: ring_k.consumer_release(slot))
                slot.advance()
        warpgroup.wait_group(0)
        if running:
            ring_k.consumer_release(before)
        cute.arch.barrier(barrier_id=READ, number_of_threads=self.consumers * WARPGROUP)
        store_rows(mma_dq, rDq, moved[4], (tidx, tile, self.scale, self.d), sizes.rows[0])

    def _keys(self, of_keys, given, at):
        """Steps for gradients of keys and values, in subclasses that compute these.

        Returns:
            (registers for a tile's weights or None, a function to call once the weights are computed, a function to
            call once the products with keys are issued: it calls ``release`` when keys may be replaced).
        """

        def add_keys(keys, release):
            if self.stages == 1:
                warpgroup.wait_group(0)
                release()

        return None, lambda: None, add_keys


def store_rows(mma, rX, out, at, rows=None):
    """Store a warpgroup's 64 rows, scaled. Both have read what the result takes the place of. ``rows``: of a packed
    sequence.
    """
    tidx, tile, scale, width = at
    group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
    for i in range(cute.size(rX)):
        rX[i] = rX[i] * Float32(scale)
    rOut = cute.make_rmem_tensor_like(rX, out.s.element_type)
    rOut.store(rX.load().to(out.s.element_type))
    atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, out.s.element_type, Float32)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(tidx % WARPGROUP)
    cute.copy(copy, copy.retile(rOut), copy.partition_D(out.s)[None, None, None, group])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
    tOsO, tOgO = partition(out, (MMA_M, width), (None, 0, tile.head, tile.batch), rows)
    store_if_first(out, tOsO[None, group], tOgO[None, tile.block * 2 + group], tidx)


@cute.jit
def store_if_first(out: cutlass.Constexpr, tOsO, tOgO, tidx):
    """One warp of a warpgroup stores its slot."""
    if cute.arch.make_warp_uniform(tidx // 32) % 4 == 0:
        cute.copy(out.tma, tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
