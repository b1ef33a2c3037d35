"""All gradients of attention from scores that are computed once, on Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state, pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.bwd_keys_sm90 import Consumer, KeysBackward, Products, Registers
from cute_ops.kernels.attention.bwd_queries_sm90 import READ, store_rows
from cute_ops.kernels.attention.products import (
    keep_rows,
    mma_of_kept,
    mma_of_scores,
    mma_of_weights,
    multiply,
    multiply_kept,
    multiply_weights,
    tma_copies,
)
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.sums import TOGETHER, PartsOfKeys, SumsOfTiles
from cute_ops.kernels.attention.tensors import Moved, address_of, partition, ring, slots, transposed
from cute_ops.kernels.attention.tiles import REGISTERS, Sizes, Tile
from cute_ops.kernels.attention.weights import InPairs
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARP, WARPGROUP

# Named barriers: all of ds lies in shared memory; a share of a tile of dq may be written, and may be added to memory:
# those of the second share are 2 behind.
DS, EMPTY, FULL = 4, 5, 6
# Without a mask a query counts as so many times its bytes. Fewer heads then run together, and L2 holds their sums, too:
# 64 x 512 with 16 heads of 128 take 910 us instead of 1239.
WHOLE = 64


class OnePassBackward(SumsOfTiles, KeysBackward):
    """``dk = ds.T @ q``, ``dv = p.T @ dout``, and for each tile of keys what it adds to ``dq = ds @ k``.

    Tile: a CTA has 128 keys of one head, as :class:`KeysBackward`. It computes the scores of a tile of queries, writes
    ``ds`` to shared memory and multiplies it with its keys; TMA adds the product to float32 sums in memory, in the
    order in which CTAs come, so that dq is not deterministic, or in turns. Five products a tile, where two kernels
    compute seven. Where the heads that share keys are split, so that all SMs have work to the end, each CTA writes its
    part of dk and dv in float32, and a kernel adds them in their order.
    Shared memory: as :class:`KeysBackward`, and ``tile_q x 128`` of ``ds``, ``tile_q x d`` in float32.
    Bytes moved per element: as :class:`KeysBackward`; the sums of dq are read and written by L2 once for each tile of
    keys, and once more to zero and to round them.

    Attributes:
        tiles_of_ds: in shared memory.
    """

    sharing, tiles_of_ds = KeysBackward.consumers, 1

    @property
    def keeps(self):
        """Whether keys and values stay in registers as first operands."""
        return max(self.d, self.dv) <= MMA_M

    @property
    def reads_early(self):
        """Whether the numbers of a tile's queries are read before scores are waited for: beside keys, or factors of a
        change of scores, registers have no room for them.
        """
        return not self.keeps and self.mods.score is None

    @property
    def stages_of_cotangents(self):
        return self.stages

    @property
    def pitch(self):
        """Numbers from those of one tile's queries in shared memory to the next one's, where TMA writes 128 bytes."""
        return -(-self.tile_q // WARP) * WARP

    @property
    def by_queries(self):
        """Whether rows of ds in shared memory are queries, as the product that gives dq reads it faster, or keys, as
        registers are written faster. Measured together with early reads.
        """
        return self.reads_early

    @cute.jit
    def launch(
        self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, gradients: cutlass.Constexpr, mSums, mParts, mTurns,
        sizes: cutlass.Constexpr, stream,
    ):  # fmt: skip
        mQ, *_ = inputs
        self.dtype = dtype = mQ.element_type
        self.scale = self.weights.scale * self.weights.leave_out(dtype)
        row, rows_of_keys = LayoutEnum.ROW_MAJOR, self.tile_k // self.consumers
        mma_s, mma_dk, mma_dv, mma_dq = self._mmas(dtype)
        shape_k, shape_v = (self.tile_k, self.tile_q, self.d), (self.tile_k, self.tile_q, self.dv)
        of_row, of_last = (
            cute.make_layout((self.tile_q, 1, n), stride=(1, self.tile_q, self.pitch))
            for n in (self.stages, self.stages_of_cotangents)
        )
        layouts = (
            hopper.make_smem_layout_b(row, shape_k, dtype, self.stages),
            self._layout_of_keys(),
            hopper.make_smem_layout_a(row, shape_v, dtype, 1),
            hopper.make_smem_layout_b(row, shape_v, dtype, self.stages_of_cotangents),
            of_row,
            of_last,
            hopper.make_smem_layout_epi(dtype, row, (rows_of_keys, self.d), self.consumers),
            hopper.make_smem_layout_epi(dtype, row, (rows_of_keys, self.dv), self.consumers),
        )
        shapes = (
            (self.tile_q, self.d), (self.tile_k, self.d), (self.tile_k, self.dv), (self.tile_q, self.dv),
            (self.tile_q, 1), (self.tile_q, 1), (rows_of_keys, self.d), (rows_of_keys, self.dv),
        )  # fmt: skip
        inputs, gradients = self._as_moved(inputs, gradients, sizes)
        rows = [by_query(m) for m in rows]
        moved = tma_copies((*inputs, *rows, *gradients), layouts, shapes, stored=2)
        of_ds = self._layout_of_ds(dtype)
        mmas = mma_s, mma_s, mma_dk, mma_dv, mma_dq, mma_dq
        self.kernel(mmas, (moved, layouts), of_ds, self._added(mSums), (mParts, mTurns), tuple(sizes)).launch(
            grid=[self._ctas(sizes) * self.parts(mParts, sizes), 1, 1],
            block=[WARPGROUP * (1 + self.consumers), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _mmas(self, dtype):
        """Of scores, dk, dv and dq."""
        across = OperandMajorMode.MN
        of_ds = OperandMajorMode.K if self.by_queries else across
        mma_dq = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            of_ds,
            across,
            Float32,
            (self.consumers // self.sharing, self.sharing, 1),
            (MMA_M, self.d // self.sharing),
        )
        mma_s = (mma_of_kept if self.keeps else mma_of_scores)(dtype, self.tile_q)
        return mma_s, mma_of_weights(dtype, self.d), mma_of_weights(dtype, self.dv), mma_dq

    def _layout_of_ds(self, dtype):
        shape = (self.tile_q, 0, self.tile_k) if self.by_queries else (self.tile_k, 0, self.tile_q)
        return hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, dtype, self.tiles_of_ds)

    @property
    def of_keys(self):
        return PartsOfKeys(self.tiles, self.d, self.scale)

    def parts(self, mParts, sizes):
        """How many CTAs share a block of keys; ``mParts``: (tokens, d, heads, batches) of both gradients of each."""
        batches = Int32(1) if const_expr(sizes.offsets is not None) else sizes.batches
        return cutlass.max(Int32(mParts.shape[3]) // cutlass.max(2 * batches, 1), 1)

    def _tile_and_part(self, mParts, in_turns, sizes):
        """The block of keys of a CTA, and the sizes of its sequence; their ``part`` is the number of its part of the
        heads, and how many parts there are.
        """
        parts, index = self.parts(mParts, sizes), cute.arch.block_idx()[0]
        number = index // parts
        bytes_of_query = (self.d + self.dv) * self.dtype.width // 8
        if const_expr(self.mods.mask is None and not in_turns and sizes.offsets is None):
            bytes_of_query *= WHOLE  # blocks take equally long, in any order
        keys, own = self.tiles.keys_at(number, sizes, bytes_of_query, in_turns)
        return keys, own._replace(part=(index - number * parts, parts))

    def _heads(self, sizes):
        (part, parts), heads = sizes.part, sizes.heads_per_kv
        first = part * heads // parts
        return first, (part + 1) * heads // parts - first

    def _added(self, mSums):
        """How a tile is added to the sums: TMA's copy and its coordinates, and the tile in shared memory, in shares."""
        rows = self.tile_q // self.shares
        of_sums = cute.make_layout((rows, self.d, self.shares), stride=(self.d, 1, rows * self.d))
        added = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(), mSums, cute.select(of_sums, mode=[0, 1]), (rows, self.d)
        )
        return [*added], of_sums

    def _place_of_sums(self, added, smem):
        """The sums, with the place of a tile in shared memory."""
        (tma, m), of_sums = added
        return Moved(tma, m, smem.allocate_tensor(Float32, of_sums, byte_alignment=128))

    def _layout_of_keys(self):
        """The layout of keys in shared memory, by rows: swizzled over as many columns as a warpgroup has of dq."""
        kinds, columns = warpgroup.SmemLayoutAtomKind, self.d // self.sharing
        kind = next(
            kind
            for kind, width in ((kinds.K_SW128, 64), (kinds.K_SW64, 32), (kinds.K_SW32, 16), (kinds.K_INTER, 8))
            if columns % width == 0
        )
        atom = hopper.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (self.tile_k, self.d, 1), order=(0, 1, 2))

    @cute.kernel
    def kernel(self, mmas, moved, of_ds, added, more, sizes):
        mma_first, mma_s, mma_dk, mma_dv, mma_new, mma_dq = mmas
        (moved, layouts), (mParts, mTurns), sizes = moved, more, Sizes(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, dtype = cutlass.utils.SmemAllocator(), self.dtype
        held = [slots(smem, dtype, layout) for layout in layouts[:4]]
        held += [smem.allocate_tensor(Float32, layout, byte_alignment=128) for layout in layouts[4:6]]
        for place, layout in zip(held[1:3], layouts[6:]):
            start = cute.recast_ptr(place.iterator, layout.inner, dtype)
            held.append(cute.make_tensor(start, layout.outer))
        moved = [Moved(tma, m, s) for (tma, m), s in zip(moved, held)]
        sDs, sums = slots(smem, dtype, of_ds), self._place_of_sums(added, smem)
        stages = self.stages, 1, 1, self.stages_of_cotangents
        of_rows = self.tile_q * Float32.width // 8
        rings = [
            ring(smem, dtype, layout, count, more=bytes)
            for layout, count, bytes in zip(layouts, stages, (of_rows, 0, 0, of_rows))
        ]
        pipeline_init_arrive(cute.make_layout((1, 1, 1)), is_relaxed=True)
        pipeline_init_wait(cute.make_layout((1, 1, 1)))
        keys, sizes = self._tile_and_part(mParts, mTurns is not None, sizes)
        if warp < WARPGROUP // WARP:
            cute.arch.setmaxregister_decrease(REGISTERS[self.consumers].load)
            if warp == 0:
                self._load(rings, moved, keys, sizes)
            if warp == 1:
                self._add(sums, mTurns, keys, sizes)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.consumers].multiply)
            for mma in (mma_first, mma_new):
                mma.set(warpgroup.Field.ACCUMULATE, False)
            for mma in (mma_s, mma_dk, mma_dv, mma_dq):
                mma.set(warpgroup.Field.ACCUMULATE, True)
            self._multiply(rings, mmas, moved, (sDs, sums, mParts), keys, sizes)

    def _queries(self, moved, tile, sizes):
        """TMA's views of the queries and the cotangents of a head, and of the numbers of their rows."""
        at, first = (None, 0, tile.head, self._batch(tile, sizes)), sizes.first_slots[0]
        views = [(x.tma, first, *partition(x, (self.tile_q, 1), at)) for x in moved[4:6]]
        return [[*own, view] for own, view in zip(super()._queries(moved, tile, sizes), views)]

    def _batch(self, tile, sizes):
        """The batch in workspaces, which have the tiles of packed sequences one after another."""
        return tile.batch if sizes.offsets is None else 0

    @cute.jit
    def _add(self, sums: cutlass.Constexpr, mTurns, keys: cutlass.Constexpr, sizes: cutlass.Constexpr):
        """Add each tile's part of dq to the sums in memory; in turns from the last block of keys to the first one, so
        that a CTA waits for one that began before it. Where offsets of packed sequences do not ascend, no CTA may have
        the block that another one would wait for: none waits.
        """
        shares, threads = self.shares, self.consumers * WARPGROUP // self.shares + WARP
        begin, heads = self._heads(sizes)
        turn, waits = Int64(0), Boolean(True)
        if const_expr(mTurns is not None and sizes.offsets is not None):
            waits = self.tiles.ascend(sizes)
        for i in cutlass.range(heads, unroll=1):
            tile = Tile(keys.block, keys.head * sizes.heads_per_kv + begin + i, keys.batch)
            of_head = self._of_head(sums, tile, sizes)
            first, last = self.tiles.queries_of(tile, sizes)
            for queries in cutlass.range(first, last + 1, unroll=1):
                if self.tiles.some(tile, sizes, queries, tile.block):
                    for share in cutlass.range_constexpr(shares):
                        cute.arch.cp_async_bulk_wait_group(shares - 1 - share, read=True)
                        cute.arch.barrier_arrive(barrier_id=EMPTY + 2 * share, number_of_threads=threads)
                    if const_expr(mTurns is not None):
                        end_turn(turn, tile.block)
                        of_turn = self._batch(tile, sizes), tile.head, sizes.first_slots[0] + queries
                        turn = address_of(mTurns, of_turn)
                        if waits:
                            wait_for_turn(turn, self.tiles.block_behind(tile, sizes, queries))
                    for share in cutlass.range_constexpr(shares):
                        cute.arch.barrier(barrier_id=FULL + 2 * share, number_of_threads=threads)
                        self._add_share(sums, of_head, queries, share, sizes)
                        cute.arch.cp_async_bulk_commit_group()
        if const_expr(mTurns is not None):
            end_turn(turn, keys.block)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _of_head(self, sums, tile, sizes):
        """TMA's views of a head's sums, for :meth:`_add_share`."""
        rows = self.tile_q // self.shares
        return partition(sums, (rows, self.d), (None, 0, tile.head, self._batch(tile, sizes)))

    def _add_share(self, sums, of_head, queries, share, sizes):
        """Let TMA add a share of a tile."""
        (tDsD, tDgD), place = of_head, self.shares * (sizes.first_slots[0] + queries) + share
        cute.copy(sums.tma, tDsD[None, share], tDgD[None, place])

    @cute.jit
    def _multiply(
        self, rings: cutlass.Constexpr, mmas: cutlass.Constexpr, moved: cutlass.Constexpr, own: cutlass.Constexpr,
        keys: cutlass.Constexpr, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        """Compute a block's gradients: the products of all tiles of queries, then dk and dv are stored."""
        (ring_q, ring_k, ring_v, ring_o), (mma_first, mma_s, mma_dk, mma_dv, mma_new, mma_dq) = rings, mmas
        (q, k, v, dout, lse, delta, dk, dv), (sDs, sums, mParts) = moved, own
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        of_scores, of_cotangents, tKrQ, tVrO = self._operands((mma_s, mma_dk, mma_dv), (q, k, v, dout), group)
        *of_dq, rDq = self._product_of_queries(mma_dq, self._rows_of_ds(sDs, True), k, group)
        registers = Registers(*self._registers((mma_s, mma_dk, mma_dv)), rDq)
        stored = self._store(mma_s, sDs, tidx), self._adder(sums, tidx)
        one = make_pipeline_state(PipelineUserType.Consumer, 1)
        ring_k.consumer_wait(one)
        ring_v.consumer_wait(one)
        if const_expr(self.keeps):
            of_scores, of_cotangents = (
                (keep_rows(mma_s, x.s[None, None, 0], tidx), operands[1])
                for x, operands in ((k, of_scores), (v, of_cotangents))
            )
        both, of_dq = (mma_first, mma_s), ((mma_new, mma_dq), *of_dq)
        products = Products((both, *of_scores), (both, *of_cotangents), (mma_dv, tVrO), (mma_dk, tKrQ), of_dq)
        consumer = Consumer((ring_q, ring_o), products, registers, (lse, delta), tidx, keys, *stored)
        self._differentiate_all(consumer, sizes)
        cute.arch.barrier(barrier_id=READ, number_of_threads=self.consumers * WARPGROUP)
        self._finish((mma_dk, mma_dv), (registers.rDk, registers.rDv), (dk, dv, mParts), tidx, keys, sizes)

    def _product_of_queries(self, mma_dq, sDs, k, group):
        """Both operands of the product that gives dq, and its accumulators. ``sDs``: rows are queries."""
        first_dq = mma_dq.get_slice(group * WARPGROUP)
        tDrDs = mma_dq.make_fragment_A(first_dq.partition_A(sDs))  # (mma, m, n, tiles)
        tDrK = mma_dq.make_fragment_B(first_dq.partition_B(transposed(k.s)))  # (mma, d, n, 1)
        return tDrDs, tDrK, cute.make_rmem_tensor(mma_dq.partition_shape_C((self.tile_q, self.d)), Float32)

    def _begin(self, consumer, slot, at, sizes):
        (ring_q, ring_o), products, registers = consumer.rings, consumer.products, consumer.registers
        place = self._place(consumer.tidx, *at, sizes)
        ring_q.consumer_wait(slot)
        of_column = self._numbers(consumer.rows[0], slot, consumer.tidx)
        self._score(products.scores, registers.rS, slot)
        ring_o.consumer_wait(slot)
        self._score(products.cotangents, registers.rP, slot)
        warpgroup.wait_group(1)
        return place, of_column

    def _differentiate(self, consumer, slot, at, begun, sizes):
        (tile, queries), (place, lse), (rS, rP, rWeights, rDs, rDk, rDv, rDq) = at, begun, consumer.registers
        (mma_dv, tVrO), (mma_dk, tKrQ) = consumer.products.dv, consumer.products.dk
        whole = self.tiles.whole(tile, sizes, queries, tile.block)
        rest = self.tiles.rest_of(tile, sizes, queries, tile.block)
        self.weights.of_scores(rS, rWeights, place, lse, whole, rest)
        multiply_weights(mma_dv, rWeights, tVrO, rDv, slot.index)
        delta = self._numbers(consumer.rows[1], slot, consumer.tidx)
        warpgroup.wait_group(1)
        self._cotangents_of_scores(rS, rP, delta)
        store_packed(rS, rDs)
        # Both warpgroups have read the tile of ds that lay there.
        of_ds = slot.index if self.tiles_of_ds > 1 else 0
        consumer.put_ds(rDs, of_ds)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS, number_of_threads=self.consumers * WARPGROUP)
        multiply(*consumer.products.dq, rDq, (of_ds, 0))
        multiply_weights(mma_dk, rDs, tKrQ, rDk, slot.index)
        warpgroup.wait_group(1)
        consumer.add(rDq, tile, queries, sizes)

    @cute.jit
    def _finish(
        self, mmas: cutlass.Constexpr, sums: cutlass.Constexpr, gradients: cutlass.Constexpr, tidx: Int32,
        keys: cutlass.Constexpr, sizes: cutlass.Constexpr,
    ):  # fmt: skip
        """Store dk and dv, or a part of them."""
        (mma_dk, mma_dv), (rDk, rDv), (dk, dv, mParts), (part, parts) = mmas, sums, gradients, sizes.part
        if parts > 1:
            batches = Int32(mParts.shape[3]) // (2 * parts)
            first = 2 * part * batches + self._batch(keys, sizes)
            place = sizes.first_slots[1] + keys.block, keys.head, (first, first + batches)
            self.of_keys.put(mParts, (rDk, rDv), place, tidx)
        else:
            self._store_sums(mma_dk, rDk, dk, (tidx, keys, self.scale, self.d), sizes.rows[1])
            self._store_sums(mma_dv, rDv, dv, (tidx, keys, 1.0, self.dv), sizes.rows[1])

    def _store_sums(self, mma, rX, out, at, rows):
        """Store a warpgroup's part of dk or dv; see :func:`store_rows`."""
        store_rows(mma, rX, out, at, rows)

    def _score(self, product, rX, slot):
        """Issue a product of keys, or values, and a slot."""
        if self.keeps:
            multiply_kept(*product, rX, slot.index)
        else:
            multiply(*product, rX, (0, slot.index))

    def _of_queries(self, x, slot, tidx):
        """Pairs of neighbouring numbers in shared memory: those of a thread's columns, which are queries."""
        layout = cute.make_layout((2, 4, self.tile_q // 8, self.stages), stride=(1, 2, 8, self.pitch))
        return cute.make_tensor(x.s.iterator, layout)[None, tidx % 4, None, slot.index]

    def _numbers(self, x, slot, tidx):
        """Numbers of a thread's columns as a function of row and column."""
        pairs = self._of_queries(x, slot, tidx)
        if not self.reads_early:
            return InPairs(pairs)
        rX = cute.make_rmem_tensor((2, self.tile_q // 8), Float32)
        for i in range(self.tile_q // 8):
            # ptxas moves loads that are not volatile to where they are used, behind waits for products.
            rX[0, i], rX[1, i] = cute.arch.inline_ptx(
                "ld.volatile.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Float32, Float32],
                read_only_args=[Int32(pairs[None, i].iterator.toint())],
            )
        return lambda r, c: rX[c]

    def _cotangents_of_scores(self, rS, rP, of_column):
        """Replace ``p * dscore`` by ``ds``."""
        scores, cotangents = by_row(rS), by_row(rP)
        for c in range(self.tile_q // 4):
            for r in range(2):
                scores[r, c] = scores[r, c] * (cotangents[r, c] - of_column(r, c))

    def _rows_of_ds(self, sDs, are_queries):
        """Slots of ds whose rows are queries, or keys."""
        return sDs if are_queries == self.by_queries else transposed(sDs)

    def _store(self, mma_s, sDs, tidx):
        """A function that writes a thread's part of ds to a tile in shared memory."""
        order = LayoutEnum.COL_MAJOR if self.by_queries else LayoutEnum.ROW_MAJOR
        atom = hopper.get_smem_store_op(order, self.dtype, Float32)
        of_keys = self._rows_of_ds(sDs, False)
        of_ds = cute.make_tiled_copy_C(atom, mma_s).get_slice(tidx)
        shape = mma_s.partition_shape_C((self.tile_k, self.tile_q))

        def put_ds(rDs, tile):
            rows = cute.make_tensor(rDs.iterator, cute.make_layout(shape))
            cute.copy(of_ds, of_ds.retile(rows), of_ds.partition_D(of_keys)[None, None, None, tile])

        return put_ds

    def _adder(self, sums, tidx):
        """A function that writes a thread's part of dq to shared memory, for the warp that adds it to the sums."""
        threads, share = self.consumers * WARPGROUP // self.shares, Int32(0)
        if self.shares > 1:
            share = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        numbers = self.tile_q * self.d // self.shares
        of_tile = cute.make_layout(
            (TOGETHER, threads, numbers // (threads * TOGETHER), self.shares),
            stride=(1, TOGETHER, threads * TOGETHER, numbers),
        )
        own = cute.make_tensor(sums.s.iterator, of_tile)[None, tidx % threads, None, share]

        def add(rDq, tile, queries, sizes):
            # The warp that adds has read the tile before and, of one share, both warpgroups have read ds.
            cute.arch.barrier(barrier_id=EMPTY + 2 * share, number_of_threads=threads + WARP)
            cute.autovec_copy(cute.make_tensor(rDq.iterator, cute.make_layout(own.shape)), own)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier_arrive(barrier_id=FULL + 2 * share, number_of_threads=threads + WARP)

        return add


def by_query(m):
    """Numbers of rows, (batch, heads, seqlen), as TMA takes those of a head's queries."""
    batches, heads, seqlen = map(Int32, m.shape)
    strides = [cute.assume(Int64(stride), divby=4) for stride in m.stride[:2]]
    return cute.make_tensor(
        m.iterator, cute.make_layout((seqlen, 1, heads, batches), stride=(1, 1, strides[1], strides[0]))
    )


@cute.jit
def wait_for_turn(address: Int64, block: Int32):
    """Wait until a block of keys has added its part to a tile of queries; ``block``: -1 if there is none."""
    last = Int32(-1)
    while last != block:
        last = cute.arch.make_warp_uniform(turn_at(address)) - 1


@cute.jit
def end_turn(address: Int64, block: Int32):
    """Write a block's number once all that its warp added is in memory; ``address``: 0 if that is nothing."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    if address != 0:
        with cute.arch.elect_one():
            cute.arch.inline_ptx("st.release.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[address, block + 1])


def turn_at(address):
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )
