"""The gradients of attention's keys and values on Hopper."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_queries_sm90 import READ, store_rows
from cute_ops.kernels.attention.products import (
    mma_of_scores,
    mma_of_weights,
    multiply,
    multiply_weights,
    tma_copies,
)
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.tensors import Moved, by_sequence, partition, ring, slots, transposed
from cute_ops.kernels.attention.tiles import REGISTERS, Sizes, Tile, Tiles, place_of
from cute_ops.kernels.attention.weights import Weights, of_columns
from cute_ops.kernels.lib.copy import compiler_barrier
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP

MOST_NUMBERS = 224  # in registers of a thread, of scores and sums, while products are issued one after another


class Products(NamedTuple):
    """The products of a tile of queries: the MMAs and operands of each.

    Attributes:
        scores: ``k @ q.T``: the MMA that overwrites and the one that adds, and both operands.
        cotangents: ``v @ dout.T``, of weights, likewise.
        dv, dk: the MMA, and the operand beside weights, or beside ds.
        dq: ``ds @ k``, as scores; None where another kernel computes it.
    """

    scores: Any
    cotangents: Any
    dv: Any
    dk: Any
    dq: Any = None


class Registers(NamedTuple):
    """A multiplying thread's part of a tile and of the sums.

    Attributes:
        rS: scores of the tile, then ds in their place.
        rP: cotangents of the tile's weights.
        rWeights, rDs: weights and ds in 16 bits.
        rDk, rDv: sums of dk and dv over tiles.
        rDq: dq of the tile; None where another kernel computes it.
    """

    rS: Any
    rP: Any
    rWeights: Any
    rDs: Any
    rDk: Any
    rDv: Any
    rDq: Any = None


class Consumer(NamedTuple):
    """The state of a multiplying thread while it goes through all tiles of queries of a block of keys.

    Attributes:
        rings: of queries, of cotangents.
        products, registers: of a tile.
        rows: logarithms and deltas of queries.
        tidx: its number among threads that multiply.
        keys: the block of keys.
        put_ds, add: store ds, and add a tile's dq; None where another kernel computes dq.
    """

    rings: Any
    products: Products
    registers: Registers
    rows: Any
    tidx: Any
    keys: Any
    put_ds: Any = None
    add: Any = None


class KeysBackward:
    """``dk = ds.T @ q`` and ``dv = p.T @ dout``.

    Tile: a CTA has 128 keys of one head, 64 for each of two warpgroups, and goes through the queries of all heads that
    share it in tiles of ``tile_q``. Scores are computed transposed, so that their weights stay in registers for the
    products with queries and cotangents.
    Shared memory: ``128 x (d + dv)`` keys and values, whose place the results take; ``stages`` slots of ``tile_q x (d +
    dv)`` queries and cotangents.
    Bytes moved per element: k, v, dk and dv once; q and dout once as long as the heads walked together find them in L2.
    """

    tile_k, consumers, keys_down = 128, 2, True

    def __init__(self, config, d, dv, mods, scale, parts="kv"):
        """``parts``: ``k``, ``v`` or both: where heads are long, registers hold the sums of one of them."""
        self.of_k, self.of_v = "k" in parts, "v" in parts
        self.d, self.dv, self.tile_q, self.stages = d, dv, config.tile_q, config.query_stages
        self.mods, self.scale = mods, scale
        self.weights = Weights(mods, scale)
        self.tiles = Tiles(self.tile_q, self.tile_k, mods, True, self.keys_down)

    @cute.jit
    def launch(
        self,
        inputs: cutlass.Constexpr,
        rows: cutlass.Constexpr,
        gradients: cutlass.Constexpr,
        sizes: cutlass.Constexpr,
        stream,
    ):
        mQ, *_ = inputs
        self.dtype = dtype = mQ.element_type
        row = LayoutEnum.ROW_MAJOR
        mma_s = mma_of_scores(dtype, self.tile_q)
        mma_dk, mma_dv = (mma_of_weights(dtype, width) for width in (self.d, self.dv))
        shape_k, shape_v = (self.tile_k, self.tile_q, self.d), (self.tile_k, self.tile_q, self.dv)
        layouts = (
            hopper.make_smem_layout_b(row, shape_k, dtype, self.stages),
            hopper.make_smem_layout_a(row, shape_k, dtype, 1),
            hopper.make_smem_layout_a(row, shape_v, dtype, 1),
            hopper.make_smem_layout_b(row, shape_v, dtype, self.stages),
            hopper.make_smem_layout_epi(dtype, row, (MMA_M, self.d), self.consumers),
            hopper.make_smem_layout_epi(dtype, row, (MMA_M, self.dv), self.consumers),
        )
        shapes = (
            (self.tile_q, self.d), (self.tile_k, self.d), (self.tile_k, self.dv), (self.tile_q, self.dv),
            (MMA_M, self.d), (MMA_M, self.dv),
        )  # fmt: skip
        inputs, gradients = self._as_moved(inputs, gradients, sizes)
        moved = tma_copies((*inputs, *gradients), layouts, shapes, stored=2)
        self.kernel((mma_s, mma_s, mma_dk, mma_dv), (moved, layouts), rows, tuple(sizes)).launch(
            grid=[self._ctas(sizes), 1, 1],
            block=[WARPGROUP * (1 + self.consumers), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, mmas, moved, rows, sizes):
        mma_first, mma_s, mma_dk, mma_dv = mmas
        (moved, layouts), sizes = moved, Sizes(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        held = [slots(smem, dtype, layout) for layout in layouts[:4]]
        for place, layout in zip(held[1:3], layouts[4:]):
            start = cute.recast_ptr(place.iterator, layout.inner, dtype)
            held.append(cute.make_tensor(start, layout.outer))
        moved = [Moved(tma, m, s) for (tma, m), s in zip(moved, held)]
        stages = self.stages, 1, 1, self.stages
        rings = [ring(smem, dtype, layout, count) for layout, count in zip(layouts, stages)]
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        keys, sizes = self._tile(sizes)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(REGISTERS[self.consumers].load)
            if warp == 0:
                self._load(rings, moved, keys, sizes)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.consumers].multiply)
            mma_first.set(warpgroup.Field.ACCUMULATE, False)
            for mma in (mma_s, mma_dk, mma_dv):
                mma.set(warpgroup.Field.ACCUMULATE, True)
            self._multiply(rings, (mma_first, mma_s, mma_dk, mma_dv), moved, rows, keys, sizes)

    def _as_moved(self, inputs, gradients, sizes):
        """Tensors as TMA takes them."""
        if sizes.offsets is None:
            return inputs, gradients
        return tuple(tuple([by_sequence(m) for m in each]) for each in (inputs, gradients))

    def _ctas(self, sizes):
        blocks, batches = self.tiles.blocks(sizes, 1)
        return blocks * (sizes.heads // sizes.heads_per_kv) * batches

    def _tile(self, sizes):
        return self.tiles.keys_at(cute.arch.block_idx()[0], sizes, (self.d + self.dv) * self.dtype.width // 8)

    @cute.jit
    def _load(
        self, rings: cutlass.Constexpr, moved: cutlass.Constexpr, keys: cutlass.Constexpr, sizes: cutlass.Constexpr
    ):
        """Load keys and values, then the queries and the cotangents of each tile of each head."""
        ring_q, ring_k, ring_v, ring_o = rings
        _, k, v, *_ = moved
        one = make_pipeline_state(PipelineUserType.Producer, 1)
        for whole, x, width in ((ring_k, k, self.d), (ring_v, v, self.dv)):
            sX, gX = partition(x, (self.tile_k, width), (keys.block, 0, keys.head, keys.batch), sizes.rows[1])
            whole.producer_acquire(one)
            cute.copy(x.tma, gX, sX[None, 0], tma_bar_ptr=whole.producer_get_barrier(one))
        slot = make_pipeline_state(PipelineUserType.Producer, self.stages)
        for i in cutlass.range(self._rounds(sizes), unroll=1):
            head, queries, last, steps = self._steps(keys, sizes, i)
            first = queries
            for _ in cutlass.range(steps, unroll=1):
                tile = Tile(keys.block, head, keys.batch)
                copies = self._queries(moved, tile, sizes)
                if self.tiles.some(tile, sizes, queries, tile.block):
                    places = slot, self._of_cotangents(slot, PipelineUserType.Producer)
                    for each, place, together in zip((ring_q, ring_o), places, copies):
                        each.producer_acquire(place)
                        full = each.producer_get_barrier(place)
                        for tma, first_tile, tXsX, tXgX in together:
                            cute.copy(tma, tXgX[None, first_tile + queries], tXsX[None, place.index], tma_bar_ptr=full)
                    slot.advance()
                head, queries = following(head, queries, first, last)
        ring_q.producer_tail(slot)

    def _of_cotangents(self, slot, user):
        """The slot of cotangents of the tile whose queries have this one."""
        return slot

    def _rounds(self, sizes):
        """How many heads of queries are gone through by themselves: all where the mask tells them apart, else they are
        gone through in one row, so that products of one are issued while those of the one before are summed up.
        """
        return self._heads(sizes)[1] if self.mods.masks_by_head else 1

    def _heads(self, sizes):
        """The first head of queries that a CTA goes through, of those that share its keys, and how many."""
        return Int32(0), sizes.heads_per_kv

    def _steps(self, keys, sizes, i):
        """The first head of a round, its first and last tile of queries, and the tiles of all heads of the round."""
        begin, heads = self._heads(sizes)
        tile = Tile(keys.block, keys.head * sizes.heads_per_kv + begin + i, keys.batch)
        first, last = self.tiles.queries_of(tile, sizes)
        count = cutlass.max(last - first + 1, 0)
        return tile.head, first, last, count if self.mods.masks_by_head else count * heads

    def _queries(self, moved, tile, sizes):
        """TMA's views of the queries of a head, and of the cotangents: for each slot the copies that fill it."""
        q, _, _, dout, *_ = moved
        views = (
            (x.tma, 0, *partition(x, (self.tile_q, width), (None, 0, tile.head, tile.batch), sizes.rows[0]))
            for x, width in ((q, self.d), (dout, self.dv))
        )
        return [[view] for view in views]

    def _place(self, tidx, tile, queries, sizes):
        """The place of a thread's scores of a tile of keys and one of queries."""
        first = tile.block * self.tile_k, queries * self.tile_q, self.tile_q
        return place_of(tidx, tile, first, sizes, True)

    @cute.jit
    def _multiply(
        self, rings: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr, rows: cutlass.Constexpr,
        keys: cutlass.Constexpr, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        (ring_q, ring_k, ring_v, ring_o), (mma_first, mma_s, mma_dk, mma_dv) = rings, mmas
        q, k, v, dout, *_ = moved
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        of_scores, of_cotangents, tKrQ, tVrO = self._operands((mma_s, mma_dk, mma_dv), (q, k, v, dout), group)
        both = mma_first, mma_s
        products = Products((both, *of_scores), (both, *of_cotangents), (mma_dv, tVrO), (mma_dk, tKrQ))
        registers = Registers(*self._registers((mma_s, mma_dk, mma_dv)))
        one = make_pipeline_state(PipelineUserType.Consumer, 1)
        ring_k.consumer_wait(one)
        ring_v.consumer_wait(one)
        self._differentiate_all(Consumer((ring_q, ring_o), products, registers, rows, tidx, keys), sizes)
        cute.arch.barrier(barrier_id=READ, number_of_threads=self.consumers * WARPGROUP)
        if const_expr(self.of_k):
            store_rows(mma_dk, registers.rDk, moved[4], (tidx, keys, self.scale, self.d), sizes.rows[1])
        if const_expr(self.of_v):
            rDv = self._waited_for(registers.rDv)
            store_rows(mma_dv, rDv, moved[5], (tidx, keys, 1.0, self.dv), sizes.rows[1])

    @cute.jit
    def _differentiate_all(self, consumer: cutlass.Constexpr, sizes: cutlass.Constexpr):
        """Issue the products of all tiles of queries: the last ones of a tile go on while the next one's begin."""
        (ring_q, ring_o), keys = consumer.rings, consumer.keys
        slot = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        before = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        running = Boolean(False)
        for i in cutlass.range(self._rounds(sizes), unroll=1):
            head, queries, last, steps = self._steps(keys, sizes, i)
            first, seen = queries, self.tiles.nothing_seen()
            for _ in cutlass.range(steps, unroll=1):
                tile = Tile(keys.block, head, keys.batch)
                seen = self.tiles.look(seen, tile, sizes, (queries, tile.block))
                looked = sizes._replace(seen=seen)
                if self.tiles.some(tile, looked, queries, tile.block):
                    place, lse = self._begin(consumer, slot, (tile, queries), sizes)
                    if running:
                        ring_q.consumer_release(before)
                        ring_o.consumer_release(before)
                        before.advance()
                    running = Boolean(True)
                    self._differentiate(consumer, slot, (tile, queries), (place, lse), looked)
                    slot.advance()
                head, queries = following(head, queries, first, last)
            # Accumulators are not carried to the next round while instructions add to them.
            warpgroup.wait_group(0)
            if running:
                ring_q.consumer_release(before)
                ring_o.consumer_release(before)
                before.advance()
            running = Boolean(False)

    def _begin(self, consumer, slot, at, sizes):
        """Issue the products of scores and of their weights' cotangents, and wait for those of the tile before, and for
        the scores. ``at``: the tile of keys, and that of queries.

        Returns:
            The place of the scores, and the logarithms of their rows.
        """
        (ring_q, ring_o), products, registers = consumer.rings, consumer.products, consumer.registers
        place = self._place(consumer.tidx, *at, sizes)
        ring_q.consumer_wait(slot)
        multiply(*products.scores, registers.rS, (0, slot.index))
        ring_o.consumer_wait(slot)
        if self.of_k:
            multiply(*products.cotangents, registers.rP, (0, slot.index))
        lse = of_columns(consumer.rows[0], place, sizes)
        warpgroup.wait_group(int(self.of_k))
        return place, lse

    def _differentiate(self, consumer, slot, at, begun, sizes):
        """Compute weights and ds, and issue their products. ``begun``: what :meth:`_begin` returns."""
        (tile, queries), (place, lse), (rS, rP, rWeights, rDs, rDk, rDv, _) = at, begun, consumer.registers
        (mma_dv, tVrO), (mma_dk, tKrQ) = consumer.products.dv, consumer.products.dk
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        logs = [self.weights.of_lse(*each) for each in lse]
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block)
        self.weights.of_scores(rS, rWeights if self.of_v else None, place, lambda r, c: logs[c], whole, rest)
        if self.of_v:
            multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        if self.of_k:
            delta = of_columns(consumer.rows[1], place, sizes)
            warpgroup.wait_group(int(self.of_v))
            scores, cotangents = by_row(rS), by_row(rP)
            for r, c, *_ in place.each():
                scores[r, c] = scores[r, c] * (cotangents[r, c] - delta[c][0])
            store_packed(rS, rDs)
            multiply_weights(mma_dk, rDs, tKrQ, rDk, slot.index)

    def _waited_for(self, rDv):
        """Sums that LLVM rounds no earlier than they are waited for, or ptxas would wait after every product of the
        kernel. That costs less where registers do not hold scores, cotangents, both of them rounded, and factors of a
        change of scores, or where sums have few columns.
        """
        of_scores = 3 if self.mods.score is None else 4
        if self.dv >= MMA_M and (of_scores * self.tile_q + self.d + self.dv) // 2 <= MOST_NUMBERS:
            compiler_barrier(rDv)
        return rDv

    def _operands(self, mmas, moved, group):
        """A warpgroup's operands in shared memory: both of the scores and ``v @ dout.T``, the second of dk and dv."""
        (mma_s, mma_dk, mma_dv), (q, k, v, dout) = mmas, moved
        first_s, first_dk, first_dv = (mma.get_slice(group * WARPGROUP) for mma in mmas)
        of_scores = [
            (mma_s.make_fragment_A(first_s.partition_A(a.s)), mma_s.make_fragment_B(first_s.partition_B(b.s)))
            for a, b in ((k, q), (v, dout))
        ]
        tKrQ = mma_dk.make_fragment_B(first_dk.partition_B(transposed(q.s)))  # (mma, d, m, stages)
        tVrO = mma_dv.make_fragment_B(first_dv.partition_B(transposed(dout.s)))  # (mma, dv, m, stages)
        return *of_scores, tKrQ, tVrO

    def _registers(self, mmas):
        """A thread's registers: scores and ``v @ dout.T``; weights and ds in 16 bits; the sums of dk and dv, 0 at
        first, of 8 columns where this kernel does not compute them.
        """
        mma_s, *others = mmas
        shape, halves = mma_s.partition_shape_C((self.tile_k, self.tile_q)), ((2, 2, 2), 1, self.tile_q // 16)
        widths = self.d if self.of_k else 8, self.dv if self.of_v else 8
        scores = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        rounded = [cute.make_rmem_tensor(halves, self.dtype) for _ in range(2)]
        sums = [
            cute.make_rmem_tensor(mma.partition_shape_C((self.tile_k, width)), Float32)
            for mma, width in zip(others, widths)
        ]
        for each in sums:
            each.fill(0.0)
        return *scores, *rounded, *sums


def following(head, queries, first, last):
    """The head and the tile of queries behind these."""
    ended = queries == last
    return head + cutlass.select_(ended, Int32(1), Int32(0)), cutlass.select_(ended, first, queries + 1)
