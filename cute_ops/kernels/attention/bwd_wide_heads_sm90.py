"""All gradients of attention from scores that are computed once, of heads of 192 elements on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineState, PipelineUserType, make_pipeline_state
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_in_parts_sm90 import OnePassInParts
from cute_ops.kernels.attention.bwd_keys_sm90 import Consumer, Products, Registers
from cute_ops.kernels.attention.bwd_one_pass_sm90 import DS
from cute_ops.kernels.attention.bwd_queries_sm90 import OWN, READ, store_if_first
from cute_ops.kernels.attention.products import multiply
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.sums import PartsByColumns
from cute_ops.kernels.attention.tensors import partition, transposed
from cute_ops.kernels.attention.tiles import first_row, place_of
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP

FREE = 9  # named barrier: the other warpgroup has read ds; that of the second one is 1 behind


class WideHeadsBackward(OnePassInParts):
    """What :class:`OnePassBackward` computes, of heads of 192 elements: by CTAs with 96 keys.

    Tile: 64 queries and 96 keys, 48 of them for each of two warpgroups. Registers hold sums of dk and dv, transposed:
    their rows are elements of the head, 64 at a time. Weights and ``ds`` are multiplied out of shared memory. A
    warpgroup writes 96 columns of dq, for TMA to add, while the product that gives dk goes on.
    :class:`LongHeadsBackward` adds half as much again to memory: 2 x 8192 with 16 heads take 7349 us instead of 9590.
    Shared memory: ``96 x (d + dv)`` keys and values, whose place the results take; ``stages`` slots of ``64 x d``
    queries, one of ``64 x dv`` cotangents; ``64 x 96`` weights and as many ``ds``; ``64 x d`` of dq in float32.
    """

    tile_k, reads_early, adds_first, stages_of_cotangents = 96, False, True, 1
    tiles_of_ds = 2  # weights, and ds
    keys_down = False

    @property
    def own_keys(self):
        """Keys of a warpgroup."""
        return self.tile_k // self.consumers

    @property
    def of_keys(self):
        return PartsByColumns(self.tiles, self.d, self.scale)

    def _mmas(self, dtype):
        by_rows, across, side_by_side = OperandMajorMode.K, OperandMajorMode.MN, (1, self.consumers, 1)

        def mma(first, second, columns):
            return hopper.make_trivial_tiled_mma(dtype, dtype, first, second, Float32, side_by_side, (MMA_M, columns))

        of_keys = mma(across, across, self.own_keys)
        return mma(by_rows, by_rows, self.own_keys), of_keys, of_keys, mma(by_rows, across, self.d // self.sharing)

    def _layout_of_ds(self, dtype):
        """Swizzled over as many columns as divide a warpgroup's."""
        atom = hopper.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, dtype)
        return cute.tile_to_shape(atom, (self.tile_q, self.tile_k, self.tiles_of_ds), order=(0, 1, 2))

    def _place(self, tidx, tile, queries, sizes):
        own = tile.block * self.tile_k + tidx // WARPGROUP * self.own_keys
        return place_of(tidx % WARPGROUP, tile, (queries * self.tile_q, own, self.own_keys), sizes)

    def _slots(self, slot):
        return slot.index, 0

    def _of_cotangents(self, slot, user):
        phase = slot.count % 2
        return PipelineState(1, slot.count, Int32(0), phase if user == PipelineUserType.Consumer else 1 - phase)

    def _release_cotangents(self, ring_o, slot):
        """They are released before."""

    def _adder(self, sums, tidx):
        group, write = cute.arch.make_warp_uniform(tidx // WARPGROUP), super()._adder(sums, tidx)

        def add(rDq, tile, queries, sizes):
            self._free_ds(group)
            write(rDq, tile, queries, sizes)

        return add

    def _free_ds(self, group):
        """Let the other warpgroup write its ``ds``: this one has read what lies there."""
        cute.arch.barrier_arrive(barrier_id=FREE + 1 - group, number_of_threads=self.consumers * WARPGROUP)

    def _numbers(self, x, slot, tidx):
        """Numbers of a thread's two rows as a function of row and column."""
        first = first_row(tidx % WARPGROUP)
        numbers = [x.s[first + 8 * r, 0, slot.index] for r in range(2)]
        return lambda r, c: numbers[r]

    @cute.jit
    def _multiply(
        self, rings: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr, own: cutlass.Constexpr,
        keys: cutlass.Constexpr, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        (ring_q, ring_k, ring_v, ring_o), (mma_first, mma_s, mma_dk, mma_dv, mma_new, mma_dq) = rings, mmas
        (q, k, v, dout, lse, delta, dk, dv), (sDs, sums, mParts) = moved, own
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        first_s, first_dk, first_dv, first_dq = (
            mma.get_slice(group * WARPGROUP) for mma in (mma_s, mma_dk, mma_dv, mma_dq)
        )
        of_scores, of_cotangents = (
            (mma_s.make_fragment_A(first_s.partition_A(a.s)), mma_s.make_fragment_B(first_s.partition_B(b.s)))
            for a, b in ((q, k), (dout, v))
        )
        tKrQ = mma_dk.make_fragment_A(first_dk.partition_A(transposed(q.s)))  # (mma, d, m, stages)
        tVrO = mma_dv.make_fragment_A(first_dv.partition_A(transposed(dout.s)))  # (mma, dv, m, stages)
        tKrDs = mma_dk.make_fragment_B(first_dk.partition_B(transposed(sDs)))  # (mma, n, m, tiles)
        tDrDs = mma_dq.make_fragment_A(first_dq.partition_A(sDs))  # (mma, m, n, tiles)
        tDrK = mma_dq.make_fragment_B(first_dq.partition_B(transposed(k.s)))  # (mma, d, n, 1)
        shape = mma_s.partition_shape_C((self.tile_q, self.tile_k))
        rS, rP = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        halves = ((2, 2, 2), 1, self.own_keys // 16)
        rWeights, rDs = (cute.make_rmem_tensor(halves, self.dtype) for _ in range(2))
        rDk, rDv = (
            cute.make_rmem_tensor(mma.partition_shape_C((width, self.tile_k)), Float32)
            for mma, width in ((mma_dk, self.d), (mma_dv, self.dv))
        )
        for each in (rDk, rDv):
            each.fill(0.0)
        rDq = cute.make_rmem_tensor(mma_dq.partition_shape_C((self.tile_q, self.d)), Float32)
        atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        writer = cute.make_tiled_copy_C(atom, mma_s).get_slice(tidx)

        def put(rX, tile):
            rows = cute.make_tensor(rX.iterator, cute.make_layout(shape))
            cute.copy(writer, writer.retile(rows), writer.partition_D(sDs)[None, None, None, tile])

        one = make_pipeline_state(PipelineUserType.Consumer, 1)
        ring_k.consumer_wait(one)
        ring_v.consumer_wait(one)
        registers, both = Registers(rS, rP, rWeights, rDs, rDk, rDv, rDq), (mma_first, mma_s)
        of_dv, of_dk = ((mma_dv, mma_dv), tVrO, tKrDs), ((mma_dk, mma_dk), tKrQ, tKrDs)
        of_dq = (mma_new, mma_dq), tDrDs, tDrK
        products = Products((both, *of_scores), (both, *of_cotangents), of_dv, of_dk, of_dq)
        stored = put, self._adder(sums, tidx)
        consumer = Consumer((ring_q, ring_o), products, registers, (lse, delta), tidx, keys, *stored)
        self._free_ds(group)
        self._differentiate_all(consumer, sizes)
        cute.arch.barrier(barrier_id=FREE + group, number_of_threads=self.consumers * WARPGROUP)
        cute.arch.barrier(barrier_id=READ, number_of_threads=self.consumers * WARPGROUP)
        self._finish((mma_dk, mma_dv), (rDk, rDv), (dk, dv, mParts), tidx, keys, sizes)

    @cute.jit
    def _differentiate(
        self, consumer: cutlass.Constexpr, slot: cutlass.Constexpr, at: cutlass.Constexpr, sizes: cutlass.Constexpr
    ):
        (_, ring_o), products, (lse, delta), tidx = consumer.rings, consumer.products, consumer.rows, consumer.tidx
        (tile, queries), (rS, rP, rWeights, rDs, rDk, rDv, rDq) = at, consumer.registers
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        own = self._of_cotangents(slot, PipelineUserType.Consumer)
        ring_o.consumer_wait(own)
        multiply(*products.cotangents, rP, (0, 0))
        place = self._place(tidx, tile, queries, sizes)
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block)
        self.weights.of_scores(rS, rWeights, place, self._numbers(lse, slot, tidx), whole, rest)
        consumer.put_ds(rWeights, 0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        multiply(*products.dv, rDv, (0, 0))
        of_row = self._numbers(delta, own, tidx)
        warpgroup.wait_group(1)
        self._cotangents_of_scores(rS, rP, of_row)
        store_packed(rS, rDs)
        cute.arch.barrier(barrier_id=FREE + group, number_of_threads=self.consumers * WARPGROUP)
        consumer.put_ds(rDs, 1)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
        multiply(*products.dq, rDq, (1, 0))
        warpgroup.wait_group(1)
        ring_o.consumer_release(own)
        multiply(*products.dk, rDk, (slot.index, 1))

    def _cotangents_of_scores(self, rS, rP, of_row):
        scores, cotangents = by_row(rS), by_row(rP)
        for r in range(2):
            for c in range(self.own_keys // 4):
                scores[r, c] = scores[r, c] * (cotangents[r, c] - of_row(r, c))

    def _store_sums(self, _, rX, out, at, rows):
        """Columns are rows of the result."""
        tidx, tile, scale, width = at
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        for i in range(cute.size(rX)):
            rX[i] = rX[i] * Float32(scale)
        rOut = cute.make_rmem_tensor_like(rX, self.dtype)
        rOut.store(rX.load().to(self.dtype))
        across = OperandMajorMode.MN
        mma = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, across, across, Float32, (1, 1, 1), (MMA_M, self.own_keys)
        )
        atom = hopper.get_smem_store_op(LayoutEnum.COL_MAJOR, self.dtype, Float32)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(tidx % WARPGROUP)
        cute.copy(copy, copy.retile(rOut), copy.partition_D(transposed(out.s))[None, None, None, group])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        tOsO, tOgO = partition(out, (self.own_keys, width), (None, 0, tile.head, tile.batch), rows)
        store_if_first(out, tOsO[None, group], tOgO[None, tile.block * self.consumers + group], tidx)
