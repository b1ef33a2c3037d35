"""Multi-head latent attention to a cache on Hopper: see :mod:`cute_ops.ops.attention.mla_decode`."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.boxes import EVICT_FIRST
from cute_ops.kernels.attention.config import LATENT_PARTS, LATENT_STAGES
from cute_ops.kernels.attention.latent import Latent, Tensors
from cute_ops.kernels.attention.pages import copy_bytes, of_lane, step_on
from cute_ops.kernels.attention.products import mma_of_scores, mma_of_weights, multiply_weights
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.softmax import GROWTH, OnlineSoftmax
from cute_ops.kernels.attention.tensors import slots, transposed
from cute_ops.kernels.attention.tiles import first_row
from cute_ops.kernels.lib.arguments import named
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP, RegisterBudget
from cute_ops.kernels.tensor_core.tma import load_tensor, tma_copy
from cute_ops.kernels.tensor_core.wgmma import multiply, tiled_mma

GROUPS = 2  # warpgroups that multiply
REGISTERS = RegisterBudget(load=40, multiply=232)
# Shared memory of 64 latents lies in tiles of 64 columns, rows of 128 bytes with 8 vectors each, swizzled.
COLUMNS, ROW_BYTES = 64, 128
STEPS_OF_TILE = COLUMNS // 16  # instructions along the columns of a tile
TILE_BYTES = MMA_M * ROW_BYTES
VECTORS = ROW_BYTES // VECTOR_BYTES
ROWS_AT_ONCE, ROWS_OF_WARP = WARPGROUP // VECTORS, WARP // VECTORS  # that a warpgroup, a warp copies at once
# Named barriers: weights of even and of odd blocks are there; a warpgroup's own; the end.
READY, OWN, END = 1, 3, 5


class Shared(NamedTuple):
    """Shared memory: queries; two blocks of keys, (keys, d, stages); weights of one block; which keys are there, and
    whether all of a warp's are; of each row and of even and odd blocks the largest score so far, and what earlier sums
    are to be multiplied by; the sums of both warpgroups; mbarriers of the queries, of parts of blocks that have come,
    of blocks that are read.
    """

    q: Any
    k: Any
    weights: Any
    there: Any
    whole: Any
    largest: Any
    factors: Any
    sums: Any
    queries: Any
    full: Any
    empty: Any


class Multiplying(NamedTuple):
    """A warpgroup's MMAs, with the views and registers of one of its threads.

    Attributes:
        mma_first, mma_scores: of queries and keys; the first one overwrites the scores, the other adds to them.
        mma_own, mma_other: of weights, in registers and in shared memory, and values.
        q, k, weights, values: operands in shared memory; ``values`` has the warpgroup's half of the columns.
        rS, rP, rO: scores, their weights, and sums of weighted values.
        rMax, rSum: the thread's two rows: the largest score so far, and the sum of weights of this warpgroup's blocks.
    """

    mma_first: Any
    mma_scores: Any
    mma_own: Any
    mma_other: Any
    q: Any
    k: Any
    weights: Any
    values: Any
    rS: Any
    rP: Any
    rO: Any
    rMax: Any
    rSum: Any


class MlaDecodeSm90(Latent):
    """``out = softmax(scale * q @ k.T) @ k[:, :rank]`` over the keys of each sequence, and the log-sum-exp of scores.

    Tile: a CTA has 64 rows, the queries of a sequence's heads, and goes through a part of its keys in blocks of 64. A
    warpgroup loads them, three parts of a block one after another: by TMA if a block lies in one page, else by
    ``cp.async``. Two warpgroups have the even and the odd blocks: each computes the scores of its own, exponentiates
    them and adds its half of the columns of weighted values, out of the block that the scores were computed of, with
    weights in its registers. It lays them into shared memory for the other one, which adds its half, too. Scores of odd
    blocks are multiplied while those of even ones are exponentiated, and values of even ones while scores of odd ones
    are. If keys are split, :class:`Combine` combines the results of CTAs in a fixed order.
    Shared memory: ``64 x d`` queries, two blocks of ``64 x d`` keys, ``64 x 64`` weights.
    Bytes moved per element: keys once, from memory for one block of rows, from L2 for the others.
    """

    def __init__(self, variant):
        super().__init__(variant)
        self.columns, self.tiles = self.e // GROUPS, self.d // COLUMNS
        self.softmax = OnlineSoftmax(variant.attrs["scale"], growth=GROWTH)
        each = -(-self.tiles // LATENT_PARTS)
        self.parts = [range(i * each, min((i + 1) * each, self.tiles)) for i in range(LATENT_PARTS)]

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = named(Tensors, self.variant, arguments), arguments[-1]
        self.dtype = tensors.q.element_type
        splits = Int32(tensors.partial_lse.shape[1])
        latents = self._latents(tensors.latent_cache) if const_expr(self.config.boxed) else None
        self.kernel(tensors, latents, splits).launch(
            grid=[Int32(tensors.q.shape[0]) * splits * self.blocks, 1, 1], block=[WARPGROUP * (1 + GROUPS), 1, 1],
            stream=stream, use_pdl=self.pdl, min_blocks_per_mp=1,
        )  # fmt: skip
        self.combine_parts(tensors, splits, stream)

    def _latents(self, mX):
        """The cache, (slots, d, pages), for TMA: tiles of 64 slots and columns."""
        mX, tile = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 2, 0])), (MMA_M, COLUMNS)
        count = LATENT_STAGES * self.tiles
        layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (MMA_M, *tile), self.dtype, count)
        return load_tensor(mX, layout, tile)

    @cute.kernel
    def kernel(self, tensors, latents, splits: Int32):
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        let_next_start(self.pdl)
        shared = self._shared()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.queries, WARPGROUP)
                for stage in range(LATENT_STAGES):
                    for part in range(LATENT_PARTS):
                        # Which keys are there comes with the first part.
                        arrivals = WARPGROUP * 2 if part == 0 else WARPGROUP
                        cute.arch.mbarrier_init(shared.full + (stage * LATENT_PARTS + part), arrivals)
                    cute.arch.mbarrier_init(shared.empty + stage, GROUPS * WARPGROUP // WARP)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        wait_for_previous(self.pdl)
        work = self.work(tensors, splits)
        if (work.begin < work.end) | (splits == 1):
            if warp < WARPGROUP // WARP:
                cute.arch.setmaxregister_decrease(REGISTERS.load)
                self._load(tensors, work, shared, (tidx, self._copy_of_tiles(latents, shared.k)))
            else:
                cute.arch.setmaxregister_increase(REGISTERS.multiply)
                self._attend(tensors, work, shared)
        else:
            self.leave_out(tensors, work, tidx)

    def _shared(self):
        smem, dtype, row = cutlass.utils.SmemAllocator(), self.dtype, LayoutEnum.ROW_MAJOR
        tile = MMA_M, MMA_M, self.d
        q = slots(smem, dtype, hopper.make_smem_layout_a(row, tile, dtype, 1))
        k = slots(smem, dtype, hopper.make_smem_layout_b(row, tile, dtype, LATENT_STAGES))
        weights = slots(smem, dtype, hopper.make_smem_layout_a(row, (MMA_M, MMA_M, MMA_M), dtype, 1))
        layouts = (
            (Int32, cute.make_layout((MMA_M, LATENT_STAGES))),
            (Int32, cute.make_layout((WARPGROUP // WARP, LATENT_STAGES))),
            *[(Float32, cute.make_layout((MMA_M, GROUPS)))] * 3,
        )
        others = [smem.allocate_tensor(kind, layout, 16) for kind, layout in layouts]
        barriers = [smem.allocate_array(Int64, count) for count in (1, LATENT_STAGES * LATENT_PARTS, LATENT_STAGES)]
        return Shared(q, k, weights, *others, *barriers)

    # --- the warpgroup that loads

    def _copy_of_tiles(self, latents, sK):
        """TMA's copy of tiles of the cache into those of shared memory; None if there is none."""
        if latents is None:
            return None
        gX = cute.local_tile(latents.tensor, (MMA_M, COLUMNS), (None, None, None))
        return tma_copy(latents.atom, cute.make_tensor(sK.iterator, latents.layout.outer), gX)

    @cute.jit
    def _load(
        self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, by: cutlass.Constexpr
    ):  # fmt: skip
        """Copy the queries, then block after block. Eight threads have 128 bytes of a row, and of four rows each. TMA
        copies blocks that have no key behind a sequence's last one, where numbers may be NaN.
        """
        tidx, copy = by
        row, vector = tidx // VECTORS, tidx % VECTORS
        within = row * ROW_BYTES + ((vector ^ (row % VECTORS)) * VECTOR_BYTES)
        rows = [row + i * ROWS_AT_ONCE for i in range(MMA_M // ROWS_AT_ONCE)]
        column = vector * (VECTOR_BYTES // 2)
        queries = [work.block * MMA_M + each for each in rows]
        sources = [
            self._source(tensors.q, self.address(tensors.q, work, each, column), each < self.rows) for each in queries
        ]
        self._copy(shared.q.iterator.toint() + within, sources, range(self.tiles))
        cute.arch.cp_async_mbarrier_arrive_noinc(shared.queries)
        # A lane looks up one of its warp's rows, and tells the others where it lies.
        lane, mX = tidx % WARP, tensors.latent_cache
        own = tidx // WARP * ROWS_OF_WARP + lane % ROWS_OF_WARP + lane // ROWS_OF_WARP % len(rows) * ROWS_AT_ONCE
        index, slot = self.place(tensors, work.begin * MMA_M + own)
        entry = self.found(tensors, work, index, work.begin * MMA_M + own)
        for block in cutlass.range(work.begin, work.end, unroll=1):
            stage, turn = self._turn(block - work.begin)
            page = self.page(tensors, entry)
            address, there = self.latent(mX, page, slot), Int32(cute.arch.vote_ballot_sync(page >= 0))
            others = [lane // VECTORS + i * ROWS_OF_WARP for i in range(len(rows))]
            sources = [
                self._source(mX, of_lane(address, other) + vector * VECTOR_BYTES, (there >> other) & 1 != 0)
                for other in others
            ]
            places, inside = (slot // MMA_M, page), (block + 1) * MMA_M <= work.keys
            # What the table has for a block is looked up one block ahead.
            if const_expr(self.config.paged):
                index, slot = step_on(index, slot, MMA_M, Int32(mX.shape[1]))
            else:
                slot = slot + MMA_M
            entry = self.found(tensors, work, index, (block + 1) * MMA_M + own)
            cute.arch.mbarrier_wait(shared.empty + stage, 1 - turn)
            if lane < ROWS_OF_WARP * len(rows):
                shared.there[own, stage] = Int32(page >= 0)
            if lane == 0:
                shared.whole[tidx // WARP, stage] = Int32(there == -1)
            full = shared.full + stage * LATENT_PARTS
            cute.arch.mbarrier_arrive(full)
            target = shared.k.iterator.toint() + (within + stage * (self.tiles * TILE_BYTES))
            if const_expr(copy is None):
                for part in cutlass.range_constexpr(LATENT_PARTS):
                    self._copy(target, sources, self.parts[part])
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + part)
            elif inside:
                self._copy_tiles(copy, places, stage, full, tidx)
            else:
                self._copy(target, sources, range(self.tiles))
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_view_async_shared()
                for part in cutlass.range_constexpr(LATENT_PARTS):
                    cute.arch.mbarrier_arrive(full + part)

    @cute.jit
    def _copy_tiles(
        self, copy: cutlass.Constexpr, places: cutlass.Constexpr, stage, full: cutlass.Constexpr, tidx
    ):  # fmt: skip
        """Start to copy a block's tiles by TMA: zeros of a page that is not there."""
        at, page = [cute.arch.shuffle_sync(each, 0) for each in places]  # of the block's first key
        for part, tiles in enumerate(self.parts):
            if tidx == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + part, len(tiles) * TILE_BYTES)
            else:
                cute.arch.mbarrier_arrive(full + part)
            if cute.arch.make_warp_uniform(tidx // WARP) == 0:
                for tile in tiles:
                    hint = Int64(EVICT_FIRST)
                    source, target = copy.tXgX[None, at, tile, page], copy.tXsX[None, stage * self.tiles + tile]
                    cute.copy(copy.atom, source, target, tma_bar_ptr=full + part, cache_policy=hint)

    def _source(self, mX, address, there):
        """An address to read, and how many bytes of it: none of what is not there, but of what can be read."""
        size = cutlass.select_(there, Int32(VECTOR_BYTES), Int32(0))
        return cutlass.select_(there, address, mX.iterator.toint()), size

    def _copy(self, target, sources, tiles):
        """Start to copy a vector of each row and tile of columns."""
        for tile in tiles:
            for i, (source, size) in enumerate(sources):
                offset = tile * TILE_BYTES + i * ROWS_AT_ONCE * ROW_BYTES
                copy_bytes((target, offset), source + tile * ROW_BYTES, size)

    def _turn(self, index):
        """The stage of a block, and how often it has been filled before, odd or even."""
        return index % LATENT_STAGES, index // LATENT_STAGES % 2

    # --- the warpgroups that multiply

    @cute.jit
    def _attend(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr):  # fmt: skip
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        group, thread = cute.arch.make_warp_uniform(tidx // WARPGROUP), tidx % WARPGROUP
        mma_first, mma_scores, *_, mma_other = mmas = self._mmas()
        mma_first.set(warpgroup.Field.ACCUMULATE, False)
        for mma in mmas[1:]:
            mma.set(warpgroup.Field.ACCUMULATE, True)
        scores, values = mma_scores.get_slice(0), mma_other.get_slice(0)
        rS, rO = (
            cute.make_rmem_tensor(mma.partition_shape_C((MMA_M, n)), Float32)
            for mma, n in ((mma_scores, MMA_M), (mma_other, self.columns))
        )
        # The scores of two tiles of 8 keys are, in this order, a thread's part of A for 16 keys.
        rP = cute.make_rmem_tensor(((2, 2, 2), 1, MMA_M // 16), self.dtype)
        rMax, rSum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        rO.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        own = Multiplying(
            *mmas, mma_scores.make_fragment_A(scores.partition_A(shared.q)),
            mma_scores.make_fragment_B(scores.partition_B(shared.k)),
            mma_other.make_fragment_A(values.partition_A(shared.weights)),
            mma_other.make_fragment_B(values.partition_B(self._values(shared.k, group))), rS, rP, rO, rMax, rSum,
        )  # fmt: skip
        cute.arch.mbarrier_wait(shared.queries, 0)
        cute.arch.fence_view_async_shared()
        if group == 0:
            self._go_through_even(own, work, shared, thread)
        else:
            self._go_through_odd(own, work, shared, thread)
        self._finish(own, tensors, work, shared, (group, thread))

    def _mmas(self):
        """Tiled MMAs of scores, of which the first one overwrites, and of a warpgroup's columns of values: with weights
        of its own and with those of the other one.
        """
        scores = [mma_of_scores(self.dtype, MMA_M, 1) for _ in range(2)]
        majors = OperandMajorMode.K, OperandMajorMode.MN
        own, other = mma_of_weights(self.dtype, self.columns, 1), tiled_mma((self.dtype,) * 2, majors, self.columns)
        return *scores, own, other

    def _values(self, sK, group):
        """A warpgroup's columns of blocks, as the operand B of values: (columns, keys, stages)."""
        layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (MMA_M, MMA_M, self.columns), self.dtype, 1)
        outer = cute.select(layout.outer, mode=[0, 1])
        layout = cute.make_layout((*outer.shape, LATENT_STAGES), stride=(*outer.stride, MMA_M * self.d))
        return transposed(cute.make_tensor(sK.iterator + group * (self.columns * MMA_M), layout))

    @cute.jit
    def _go_through_even(
        self, own: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, thread
    ):  # fmt: skip
        count = work.end - work.begin
        for index in cutlass.range(0, count, GROUPS, unroll=1):
            self._score(own, shared, (index, 0))
            whole = self._is_whole(work, shared, index, 0)
            warpgroup.wait_group(0)
            factors = self._weigh(own, work, shared, (index, 0, thread), whole)
            self._lay_weights(own, shared, (0, thread), factors)
            self._add_own(own, shared, (0, thread), factors)
            if index + 1 < count:
                self._begin_other(own, shared, 1, thread)
                self._end_other(shared, 1, thread)

    @cute.jit
    def _go_through_odd(
        self, own: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, thread
    ):  # fmt: skip
        """A block's scores are issued before the values of the even block, whose weights come later."""
        count = work.end - work.begin
        for index in cutlass.range(1, count, GROUPS, unroll=1):
            self._score(own, shared, (index, 1))
            self._begin_other(own, shared, 0, thread)
            whole = self._is_whole(work, shared, index, 1)
            warpgroup.wait_group(1)
            factors = self._weigh(own, work, shared, (index, 1, thread), whole)
            # ptxas would move the wait ahead of the exponentials, but not over a branch on their sums.
            if own.rSum[0] + own.rSum[1] < 0.0:
                cute.arch.sync_warp()
            self._end_other(shared, 0, thread)
            self._lay_weights(own, shared, (1, thread), factors)
            self._add_own(own, shared, (1, thread), factors)
        if count % GROUPS == 1:
            self._begin_other(own, shared, 0, thread)
            self._end_other(shared, 0, thread)

    @cute.jit
    def _score(self, own: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr):
        """Issue the scores of a block, part after part as they come."""
        index, stage = place
        turn = index // LATENT_STAGES % 2
        for part in cutlass.range_constexpr(LATENT_PARTS):
            cute.arch.mbarrier_wait(shared.full + (stage * LATENT_PARTS + part), turn)
            if const_expr(not self.config.boxed):
                cute.arch.fence_view_async_shared()
            if const_expr(part == 0):
                warpgroup.fence()
            tiles = self.parts[part]
            for k in cutlass.range_constexpr(tiles.start * STEPS_OF_TILE, tiles.stop * STEPS_OF_TILE):
                mma = own.mma_first if const_expr(k == 0) else own.mma_scores
                cute.gemm(mma, own.rS, own.q[None, None, k, 0], own.k[None, None, k, stage], own.rS)
        warpgroup.commit_group()

    def _is_whole(self, work, shared, index, stage):
        """Whether all queries attend to all keys of a block."""
        whole = (work.begin + index + 1) * MMA_M <= work.keys - (self.queries - 1)
        for warp in range(WARPGROUP // WARP):
            whole = whole & (shared.whole[warp, stage] != 0)
        return whole

    @cute.jit
    def _weigh(
        self, own: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr,
        whole,
    ):  # fmt: skip
        """Exponentiate a block's scores; returns what sums so far are to be multiplied by."""
        index, stage, thread = place
        if not whole:
            at = work.begin + index, stage, first_row(thread), thread % WARP
            self._hide(own.rS, work, shared.there, at)
        factors = self.softmax.add(own.rS, own.rMax, own.rSum)
        store_packed(own.rS, own.rP)
        return factors

    @cute.jit
    def _lay_weights(self, own: cutlass.Constexpr, shared: cutlass.Constexpr, at: cutlass.Constexpr, factors):
        """Lay weights into shared memory, and what sums so far are to be multiplied by, for the other warpgroup."""
        group, thread = at
        lane, row = thread % WARP, first_row(thread)
        for r in cutlass.range_constexpr(2):
            if lane % 4 == 0:
                shared.largest[row + 8 * r, group] = own.rMax[r]
                shared.factors[row + 8 * r, group] = factors[r]
        # All warps have read the other warpgroup's weights.
        cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
        atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        copy = cute.make_tiled_copy_C(atom, own.mma_scores).get_slice(thread)
        rP = cute.make_tensor(own.rP.iterator, own.rS.layout)
        cute.copy(copy, copy.retile(rP), copy.partition_D(shared.weights)[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=READY + group, number_of_threads=GROUPS * WARPGROUP)

    @cute.jit
    def _hide(self, rS, work: cutlass.Constexpr, there, place: cutlass.Constexpr):
        """Hide scores of keys that are not there, or behind a query's own."""
        (block, stage, row, lane), scores = place, by_row(rS)
        last = [work.keys - self.queries + (work.block * MMA_M + row + 8 * r) // self.heads for r in range(2)]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            column = lane % 4 * 2 + (8 * (c // 2) + c % 2)
            known = there[column, stage] != 0
            for r in cutlass.range_constexpr(2):
                seen = known & (block * MMA_M + column <= last[r])
                scores[r, c] = cutlass.select_(seen, scores[r, c], -Float32.inf)

    @cute.jit
    def _add_own(self, own: cutlass.Constexpr, shared: cutlass.Constexpr, at: cutlass.Constexpr, factors):
        """Add the weighted values of a block of this warpgroup."""
        group, thread = at
        self.softmax.rescale_grown(own.rO, factors)
        multiply_weights(own.mma_own, own.rP, own.values, own.rO, group)
        warpgroup.wait_group(0)
        self._release(shared, group, thread)

    @cute.jit
    def _begin_other(self, own: cutlass.Constexpr, shared: cutlass.Constexpr, group: cutlass.Constexpr, thread):
        """Issue the weighted values of a block of the other warpgroup, once it has the weights."""
        cute.arch.barrier(barrier_id=READY + group, number_of_threads=GROUPS * WARPGROUP)
        factors, row = cute.make_rmem_tensor(2, Float32), first_row(thread)
        for r in cutlass.range_constexpr(2):
            factors[r], own.rMax[r] = shared.factors[row + 8 * r, group], shared.largest[row + 8 * r, group]
            own.rSum[r] = own.rSum[r] * factors[r]
        self.softmax.rescale_grown(own.rO, factors)
        multiply(own.mma_other, (own.weights, own.values), own.rO, (0, group))

    def _end_other(self, shared, group, thread):
        """Wait for these values, and let the block be overwritten."""
        warpgroup.wait_group(0)
        self._release(shared, group, thread)

    @cute.jit
    def _release(self, shared: cutlass.Constexpr, stage, thread):
        """Let a stage be filled again, once both warpgroups have. One lane says so for its warp, once all lanes have
        read which keys are there.
        """
        cute.arch.sync_warp()
        if thread % WARP == 0:
            cute.arch.mbarrier_arrive(shared.empty + stage)

    @cute.jit
    def _finish(
        self, own: cutlass.Constexpr, tensors: cutlass.Constexpr, work: cutlass.Constexpr,
        shared: cutlass.Constexpr, at: cutlass.Constexpr,
    ):  # fmt: skip
        """Add the sums of both warpgroups up, and store the rows."""
        (group, thread), values = at, by_row(own.rO)
        lane, row = thread % WARP, first_row(thread)
        for r in cutlass.range_constexpr(2):
            total = own.rSum[r]
            for offset in (2, 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if lane % 4 == 0:
                shared.sums[row + 8 * r, group] = total
        cute.arch.barrier(barrier_id=END, number_of_threads=GROUPS * WARPGROUP)
        for r in cutlass.range_constexpr(2):
            inside = row + 8 * r
            total = shared.sums[inside, 0] + shared.sums[inside, 1]
            place = work.block * MMA_M + inside, group * self.columns + lane % 4 * 2, (group == 0) & (lane % 4 == 0)
            self.store(tensors, work, (own.rMax[r] * Float32(self.log2_scale), total), (values, r, place))
