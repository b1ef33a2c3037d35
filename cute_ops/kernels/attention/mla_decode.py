"""Multi-head latent attention of a few queries to a cache: see :mod:`cute_ops.ops.attention.mla_decode`."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.config import MMA_ROWS, PADDING
from cute_ops.kernels.attention.latent import Latent, Tensors
from cute_ops.kernels.attention.pages import copy_or_clear, of_lane
from cute_ops.kernels.attention.registers import by_row, exp2, pack
from cute_ops.kernels.attention.warps import mma_of_warp
from cute_ops.kernels.lib.arguments import named
from cute_ops.kernels.lib.copy import fragment, load
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous

VECTOR = VECTOR_BYTES // 2  # elements
KEYS_OF_WARP = 16


class Shared(NamedTuple):
    """Shared memory: queries; chunks of keys, (keys, d, stages); which keys are there; weights; of each row the largest
    score and the sum of weights over each 16 keys, and what earlier sums are to be multiplied by.
    """

    q: Any
    k: Any
    there: Any
    weights: Any
    largest: Any
    sums: Any
    factors: Any


class Scores(NamedTuple):
    """A warp's scores of 16 rows and 16 keys, the rows' largest so far and sums of weights, and the last key that each
    of a thread's rows attends to.
    """

    scores: Any
    largest: Any
    sums: Any
    last: Any


class MlaDecode(Latent):
    """``out = softmax(scale * q @ k.T) @ k[:, :rank]`` over the keys of each sequence, and the log-sum-exp of scores.

    Tile: a CTA has ``16 * tiles_m`` rows, the queries of a sequence's heads, and goes through a part of its keys, block
    by block, which are loaded in chunks. A warp has the scores of 16 rows and 16 keys; their weights go to shared
    memory, where the warps take them for sums of values, of which each has a part of the columns. Both products are by
    ``mma.sync``, and read the same block. If keys are split, :class:`Combine` combines the results of CTAs in a fixed
    order.
    Shared memory: ``16 * tiles_m x d`` queries, ``stages`` chunks of ``chunk x d`` keys, weights of one block; padded.
    Bytes moved per element: keys once, from memory for one block of rows, from L2 for the others.
    """

    def __init__(self, variant):
        super().__init__(variant)
        config = self.config
        self.threads = WARP * config.warps
        # For sums of values: warps beside and below one another, and each one's columns and tiles of rows.
        self.across = min(config.warps, 4)
        self.columns, self.tiles = self.e // self.across, config.tiles_m * self.across // config.warps
        self.rows_of_warp, self.parts = config.chunk // config.warps, config.keys // KEYS_OF_WARP
        self.ahead = config.stages - config.chunks  # chunks that are loaded before a block's are read

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = named(Tensors, self.variant, arguments), arguments[-1]
        self.dtype = tensors.q.element_type
        splits = Int32(tensors.partial_lse.shape[1])
        self.kernel(mma_of_warp(self.dtype), tensors, splits).launch(
            grid=[Int32(tensors.q.shape[0]) * splits * self.blocks, 1, 1], block=[self.threads, 1, 1], stream=stream,
            use_pdl=self.pdl, min_blocks_per_mp=1,
        )  # fmt: skip
        self.combine_parts(tensors, splits, stream)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, tensors, splits: Int32):
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        work, shared = self.work(tensors, splits), self._shared()
        if (work.begin < work.end) | (splits == 1):
            self._attend(mma, tensors, work, shared, (warp, tidx % WARP))
        else:
            self.leave_out(tensors, work, tidx)

    def _shared(self):
        smem, config, pitch = cutlass.utils.SmemAllocator(), self.config, self.d + PADDING
        layouts = (
            (self.dtype, cute.make_layout((config.rows, self.d), stride=(pitch, 1))),
            (self.dtype, cute.make_layout(
                (config.chunk, self.d, config.stages), stride=(pitch, 1, config.chunk * pitch)
            )),
            (Int32, cute.make_layout((config.chunk, config.stages))),
            (self.dtype, cute.make_layout((config.rows, config.keys), stride=(config.keys + PADDING, 1))),
            (Float32, cute.make_layout((config.rows, self.parts))),
            (Float32, cute.make_layout((config.rows, self.parts))),
            (Float32, cute.make_layout(config.rows)),
        )  # fmt: skip
        return Shared(*(smem.allocate_tensor(dtype, layout, 16) for dtype, layout in layouts))

    @cute.jit
    def _attend(
        self, mma, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        (warp, lane), chunks = at, self.config.chunks
        first, end = work.begin * chunks, work.end * chunks
        for i in cutlass.range(self.ahead, unroll=1):
            entry = self._entry(tensors, work, first + i, at)
            self._load(tensors.latent_cache, shared, (first + i, end, i), self.page(tensors, entry), at)
        # The pages of chunks are looked up one block ahead of their copies.
        entries = self.entries(tensors, chunks)
        for j in cutlass.range_constexpr(chunks):
            entries[j] = self._entry(tensors, work, first + self.ahead + j, at)
        self._load_queries(tensors.q, shared.q, work, at)
        mine, tiles_m = mma.get_slice(lane), self.config.tiles_m
        # Scores of 16 rows and 16 keys; sums of some tiles of rows and a part of the columns.
        of_rows, of_keys = warp % tiles_m, warp // tiles_m
        down, beside = warp // self.across, warp % self.across
        found = self._start(mma, work, of_rows, lane)
        sums = [
            cute.make_rmem_tensor(mma.partition_shape_C((MMA_ROWS, self.columns)), Float32) for _ in range(self.tiles)
        ]
        for rO in sums:
            rO.fill(0.0)
        sQ = cute.local_tile(shared.q, (MMA_ROWS, self.d), (of_rows, 0))
        parts = self.config.chunk // KEYS_OF_WARP
        sK = cute.local_tile(shared.k, (KEYS_OF_WARP, self.d), (of_keys % parts, 0, None))
        sV = cute.local_tile(shared.k, (self.config.chunk, self.columns), (0, beside, None))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))  # (columns, keys, stages)
        rows_of_sums = MMA_ROWS * self.tiles
        sP = cute.local_tile(shared.weights, (rows_of_sums, self.config.keys), (down, 0))
        readers = self._readers(mma, lane)
        stage = Int32(0)
        for block in cutlass.range(work.begin, work.end, unroll=1):
            cute.arch.cp_async_wait_group(self.ahead - chunks)
            # All copies of the block are seen, and all warps have read the stages that are loaded now.
            cute.arch.barrier()
            for j in cutlass.range_constexpr(chunks):
                chunk, free = block * chunks + self.ahead + j, self._later(stage, self.ahead + j)
                page = self.page(tensors, entries[j])
                self._load(tensors.latent_cache, shared, (chunk, end, free), page, at)
                entries[j] = self._entry(tensors, work, chunk + chunks, at)
            own = self._later(stage, of_keys // parts)
            self._score(mma, mine, readers, (sQ, sK[None, None, own]), found.scores)
            self._hide(found, shared.there, (block, own), (of_keys, lane))
            self._weigh(found, shared, (of_rows, of_keys, lane))
            cute.arch.barrier()
            values = [sVt[None, None, self._later(stage, j)] for j in range(chunks)]
            self._add_values(mma, mine, readers, (sP, values, shared.factors), (sums, down, lane))
            stage = self._later(stage, chunks)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        self._keep(found, shared, (of_rows, of_keys, lane))
        cute.arch.barrier()
        for i in cutlass.range_constexpr(self.tiles):
            first = (down * self.tiles + i) * MMA_ROWS
            self._finish(tensors, work, shared, sums[i], (first, beside, lane))

    def _later(self, stage, count):
        """The stage that comes so many after this one, fewer than there are."""
        stage = stage + count
        return cutlass.select_(stage >= self.config.stages, stage - self.config.stages, stage)

    # --- copies

    def _entry(self, tensors, work, chunk, at):
        """The page of the key of a lane, one of its warp's in a chunk; see :meth:`entry`."""
        warp, lane = at
        key = chunk * self.config.chunk + warp * self.rows_of_warp + lane % self.rows_of_warp
        return self.entry(tensors, work, key)

    @cute.jit
    def _load(
        self, mX, shared: cutlass.Constexpr, place: cutlass.Constexpr, entry, at: cutlass.Constexpr
    ):  # fmt: skip
        """Start to copy a warp's keys of a chunk to a stage, as one group of copies; zeros where no key is."""
        (chunk, end, stage), (warp, lane) = place, at
        if chunk < end:
            first = warp * self.rows_of_warp
            key = chunk * self.config.chunk + first + lane % self.rows_of_warp
            slot = key % Int32(mX.shape[1]) if const_expr(self.config.paged) else key
            start, address = mX.iterator.toint(), self.latent(mX, entry, slot)
            if lane < self.rows_of_warp:
                shared.there[first + lane, stage] = Int32(entry >= 0)
            vectors, pitch = self.d // VECTOR, 2 * (self.d + PADDING)
            target = shared.k.iterator.toint() + (stage * self.config.chunk + first) * pitch + lane * VECTOR_BYTES
            for i in cutlass.range_constexpr(self.rows_of_warp):
                source = of_lane(address, i) + lane * VECTOR_BYTES
                there = cute.arch.shuffle_sync(entry, i) >= 0
                for j in cutlass.range_constexpr(-(-vectors // WARP)):
                    offset = j * WARP * VECTOR_BYTES
                    if const_expr((j + 1) * WARP <= vectors):
                        copy_or_clear((target, i * pitch + offset), source + offset, start, there)
                    elif lane < vectors - j * WARP:
                        copy_or_clear((target, i * pitch + offset), source + offset, start, there)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _load_queries(self, mQ, sQ, work: cutlass.Constexpr, at: cutlass.Constexpr):
        """Copy the block's queries to shared memory, zeros for rows past the last."""
        (warp, lane), across = at, self.d // VECTOR
        for first in cutlass.range(0, self.config.rows * across, self.threads, unroll=1):
            index = first + warp * WARP + lane
            at_row, column, rX = index // across, index % across * VECTOR, fragment(self.dtype, VECTOR, 0)
            row = work.block * self.config.rows + at_row
            inside = index < self.config.rows * across
            if inside & (row < self.rows):
                load(rX, self.address(mQ, work, row, column))
            if inside:
                place = sQ.iterator + (at_row * (self.d + PADDING) + column)
                cute.autovec_copy(rX, cute.make_tensor(place, rX.layout))

    # --- scores

    def _readers(self, mma, lane):
        """Loads from shared memory: of rows, of keys as they lie, and of values across."""
        makes = (cute.make_tiled_copy_A, cute.make_tiled_copy_B, cute.make_tiled_copy_B)
        return [
            make(cute.make_copy_atom(LdMatrix8x8x16bOp(across, 4), self.dtype), mma).get_slice(lane)
            for make, across in zip(makes, (False, False, True))
        ]

    def _start(self, mma, work, of_rows, lane):
        """No score so far."""
        scores = cute.make_rmem_tensor(mma.partition_shape_C((MMA_ROWS, KEYS_OF_WARP)), Float32)
        largest, sums = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        largest.fill(-Float32.inf)
        sums.fill(0.0)
        last = cute.make_rmem_tensor(2, Int32)
        for r in range(2):
            row = work.block * self.config.rows + of_rows * MMA_ROWS + lane // 4 + 8 * r
            last[r] = cutlass.select_(row < self.rows, work.keys - self.queries + row // self.heads, Int32(-1))
        return Scores(scores, largest, sums, last)

    def _score(self, mma, mine, readers, operands, scores):
        """Products of 16 queries and 16 keys, in two sums that do not wait for each other."""
        (sQ, sK), others = operands, cute.make_rmem_tensor_like(scores)
        tSrQ = mma.make_fragment_A(mine.partition_A(sQ))
        tSrK = mma.make_fragment_B(mine.partition_B(sK))
        for each in (scores, others):
            each.fill(0.0)
        for k in range(self.d // 16):
            for reader, s, r in ((readers[0], sQ, tSrQ), (readers[1], sK, tSrK)):
                cute.copy(reader, reader.partition_S(s)[None, None, k], reader.retile(r)[None, None, k])
            part = (scores, others)[k % 2]
            cute.gemm(mma, part, tSrQ[None, None, k], tSrK[None, None, k], part)
        for i in range(cute.size(scores)):
            scores[i] = scores[i] + others[i]

    @cute.jit
    def _hide(self, found: cutlass.Constexpr, there, place: cutlass.Constexpr, at: cutlass.Constexpr):
        """Hide scores of keys that are not there, or behind a query's own."""
        (block, stage), (of_keys, lane), scores = place, at, by_row(found.scores)
        within = of_keys * KEYS_OF_WARP + lane % 4 * 2
        first = block * self.config.keys + within
        for c in cutlass.range_constexpr(4):
            offset = 8 * (c // 2) + c % 2
            known = there[within % self.config.chunk + offset, stage] != 0
            for r in cutlass.range_constexpr(2):
                seen = known & (first + offset <= found.last[r])
                scores[r, c] = cutlass.select_(seen, scores[r, c], -Float32.inf)

    @cute.jit
    def _weigh(self, found: cutlass.Constexpr, shared: cutlass.Constexpr, at: cutlass.Constexpr):
        """Exponentials of scores, less the largest of their rows so far, to shared memory; the warps agree on it."""
        (of_rows, of_keys, lane), scores = at, by_row(found.scores)
        for r in cutlass.range_constexpr(2):
            highest = cute.arch.fmax(
                cute.arch.fmax(scores[r, 0], scores[r, 1]), cute.arch.fmax(scores[r, 2], scores[r, 3])
            )
            for offset in (2, 1):
                highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=offset))
            if lane % 4 == 0:
                shared.largest[of_rows * MMA_ROWS + lane // 4 + 8 * r, of_keys] = highest
        cute.arch.barrier()
        for r in cutlass.range_constexpr(2):
            row, before = of_rows * MMA_ROWS + lane // 4 + 8 * r, found.largest[r]
            highest = before
            for part in cutlass.range_constexpr(self.parts):
                highest = cute.arch.fmax(highest, shared.largest[row, part])
            # A row without a key so far: -inf less -inf would be NaN.
            shift = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest) * Float32(self.log2_scale)
            factor = exp2(before * Float32(self.log2_scale) - shift)
            total = found.sums[r] * factor
            for c in cutlass.range_constexpr(4):
                scores[r, c] = exp2(scores[r, c] * Float32(self.log2_scale) - shift)
                total = total + scores[r, c]
            found.sums[r], found.largest[r] = total, highest
            if (of_keys == 0) & (lane % 4 == 0):
                shared.factors[row] = factor
            for half in cutlass.range_constexpr(2):
                column = of_keys * KEYS_OF_WARP + half * 8 + lane % 4 * 2
                place = row * (self.config.keys + PADDING) + column
                words = cute.recast_ptr(shared.weights.iterator, dtype=Int32)
                (words + place // 2).store(pack(scores[r, 2 * half], scores[r, 2 * half + 1], self.dtype))

    # --- values

    def _add_values(self, mma, mine, readers, operands, sums):
        """Multiply sums by what their rows' largest scores have grown by, and add a block's weighted values."""
        (sP, chunks, factors), (sums, down, lane) = operands, sums
        for i, rO in enumerate(sums):
            values = by_row(rO)
            for r in range(2):
                factor = factors[(down * self.tiles + i) * MMA_ROWS + lane // 4 + 8 * r]
                for c in range(cute.size(values, mode=[1])):
                    values[r, c] = values[r, c] * factor
        tiles = [cute.local_tile(sP, (MMA_ROWS, self.config.keys), (i, 0)) for i in range(self.tiles)]
        weights = [mma.make_fragment_A(mine.partition_A(tile)) for tile in tiles]
        tOrV, reader = mma.make_fragment_B(mine.partition_B(chunks[0])), readers[2]
        for k in range(self.config.keys // 16):
            for sTile, tOrP in zip(tiles, weights):
                source = readers[0].partition_S(sTile)
                cute.copy(readers[0], source[None, None, k], readers[0].retile(tOrP)[None, None, k])
            j, of_chunk = divmod(k, self.config.chunk // 16)
            source = reader.partition_S(chunks[j])
            cute.copy(reader, source[None, None, of_chunk], reader.retile(tOrV)[None, None, of_chunk])
            for tOrP, rO in zip(weights, sums):
                cute.gemm(mma, rO, tOrP[None, None, k], tOrV[None, None, of_chunk], rO)

    # --- after the loop

    @cute.jit
    def _keep(self, found: cutlass.Constexpr, shared: cutlass.Constexpr, at: cutlass.Constexpr):
        """Store the sums of weights of 16 keys of each block, and the rows' largest scores."""
        of_rows, of_keys, lane = at
        for r in cutlass.range_constexpr(2):
            row, total = of_rows * MMA_ROWS + lane // 4 + 8 * r, found.sums[r]
            for offset in (2, 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if lane % 4 == 0:
                shared.sums[row, of_keys] = total
                shared.largest[row, of_keys] = found.largest[r]

    @cute.jit
    def _finish(
        self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, rO: cute.Tensor,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        """Divide by the rows' sums, and store two columns at once."""
        (first, beside, lane), values = at, by_row(rO)
        for r in cutlass.range_constexpr(2):
            inside, total = first + lane // 4 + 8 * r, Float32(0.0)
            for part in cutlass.range_constexpr(self.parts):
                total = total + shared.sums[inside, part]
            largest = shared.largest[inside, 0] * Float32(self.log2_scale)
            column = beside * self.columns + lane % 4 * 2
            place = work.block * self.config.rows + inside, column, (beside == 0) & (lane % 4 == 0)
            self.store(tensors, work, (largest, total), (values, r, place))
