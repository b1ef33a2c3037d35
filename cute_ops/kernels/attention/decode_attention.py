"""Attention of a few queries to caches of keys and values: see :mod:`cute_ops.ops.attention.decode_attention`."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.cache_tiles import tiles_of
from cute_ops.kernels.attention.combine import Combine, Results
from cute_ops.kernels.attention.config import MMA_ROWS, PADDING, DecodeConfig
from cute_ops.kernels.attention.mods import Mods, by_index
from cute_ops.kernels.attention.pages import Keys, first_place, load_tile, next_place, page_entry
from cute_ops.kernels.attention.registers import by_row, store_packed
from cute_ops.kernels.attention.softmax import GROWTH, OnlineSoftmax
from cute_ops.kernels.attention.tiles import Place, Sizes, Tile
from cute_ops.kernels.attention.warps import Rows, accumulators, halves, mma_of_warp, queries_fit
from cute_ops.kernels.lib.arguments import by_name, named
from cute_ops.kernels.lib.copy import fragment, load, store
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous

VECTOR = VECTOR_BYTES // 2  # elements of 16 bits


class Tensors(NamedTuple):
    """The op's arguments."""

    q: Any
    k_cache: Any
    v_cache: Any
    lengths: Any
    page_table: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


class Work(NamedTuple):
    """The work of a CTA: a block of queries of the heads that share a head of the caches, and a part of its keys.

    Attributes:
        batch, head: of the caches.
        block: of queries.
        split, splits: which part of the keys, and how many there are.
        keys: of the sequence.
        begin, end: its tiles of keys.
        sizes: of the sequence, and what a change of scores reads.
    """

    batch: Any
    head: Any
    block: Any
    split: Any
    splits: Any
    keys: Any
    begin: Any
    end: Any
    sizes: Any


class Accumulated(NamedTuple):
    """A warp's sums for a tile of queries: scores, weights in 16 bits, values; largest scores and sums of weights; the
    first key that each of a thread's rows attends to, and the last one; the queries and the heads of these rows; and
    what scores are multiplied by, or None.
    """

    scores: Any
    weights: Any
    values: Any
    largest: Any
    sums: Any
    low: Any
    high: Any
    tokens: Any
    heads: Any
    factors: Any


class DecodeAttention:
    """``out = softmax(softcap(scale * q @ k.T)) @ v`` over the keys of each sequence, and the log-sum-exp of scores.

    Tile: a CTA has ``16 * tiles_m`` rows, the queries of all heads that share one of the caches, and a part of a
    sequence's keys. Its warps go through them 16 or 32 keys at a time, each by itself: a warp copies tiles into a ring
    of its own, so that no barrier stops the loop, and multiplies by ``mma.sync``. At the end the CTA combines the
    results of its warps; if keys are split, :class:`Combine` does so with those of CTAs. Both do it in a fixed order.
    Shared memory: ``16 * tiles_m x d`` queries; ``stages`` tiles of ``keys x (d + e)`` keys and values of each warp,
    whose place its results take; padded.
    Bytes moved per element: keys and values once, from memory if there is one block of queries, else from L2.
    """

    def __init__(self, variant):
        self.variant, self.config = variant, DecodeConfig.of(variant.config)
        dims, attrs, keys = variant.dims, variant.attrs, variant.tensors
        self.d, self.e, self.shared_by, self.queries = (dims[name] for name in "ders")
        self.rows = self.shared_by * self.queries  # of a head of the caches
        self.window, self.itemsize = attrs["window"], ITEMSIZE[keys["q"].dtype]
        self.scale = attrs["scale"] or self.d**-0.5
        self.mods = Mods(self.scale, self.config.score)
        self.softmax = OnlineSoftmax(*self.mods.outer, GROWTH)
        self.keys = self.config.keys  # of a tile
        # Warps of a CTA, and tiles of queries that each of them has.
        self.warps, self.own = self.config.warps * self.config.sharers, self.config.tiles_m // self.config.sharers
        self.threads, self.pdl = WARP * self.warps, can_use_pdl(variant.arch)
        self.producers, self.resident, self.carveout = 0, 1, None
        self.together = 1  # parts of the keys begin with a multiple of so many tiles
        # What stays in registers: queries, beside sums of values.
        self.keeps_queries = queries_fit(self.own, self.d, self.e) and self.config.sharers == 1
        self.combine, self.tiles = Combine(self.e, self.pdl), tiles_of(self.config.itemsize, self.d, self.e)

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = named(Tensors, self.variant, arguments), arguments[-1]
        self.dtype = tensors.q.element_type
        self.product = self.tiles.product_dtype(self.dtype)
        mma = mma_of_warp(self.product)
        batches, heads = (Int32(tensors.k_cache.shape[2]) if i else Int32(tensors.q.shape[0]) for i in range(2))
        splits = Int32(tensors.partial_lse.shape[1])
        blocks = -(-self.rows // self.config.rows)
        given = by_name(self.variant, arguments)
        captured = by_index([given[name] for name in given if name not in Tensors._fields], self.mods)
        self.kernel(mma, tensors, self._moved(tensors), captured, heads, splits).launch(
            grid=[batches * heads * splits * blocks, 1, 1], block=[self.threads + self.producers, 1, 1], stream=stream,
            use_pdl=self.pdl, min_blocks_per_mp=self.resident, preferred_smem_carveout=self.carveout,
            cluster=[self.config.cluster, 1, 1] if const_expr(self.config.cluster > 1) else None,
        )  # fmt: skip
        if const_expr(self.config.cluster == 1):
            if splits > 1:
                results = Results(tensors.partial, tensors.partial_lse, tensors.sinks, tensors.out, tensors.lse)
                self.combine(results, splits, stream)

    def _moved(self, tensors):
        """What TMA copies: nothing."""
        return ()

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, tensors, moved, captured, heads: Int32, splits: Int32):
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        work = self._work(tensors, captured, heads, splits)
        smem = cutlass.utils.SmemAllocator()
        rows = self.config.rows
        sQ = smem.allocate_tensor(self.product, cute.make_layout((rows, self.d), stride=(self.d + PADDING, 1)), 16)
        sFactors = smem.allocate_tensor(Float32, cute.make_layout(rows), 16)
        ring = self._ring(smem, warp)
        if (work.begin < work.end) | (splits == 1):
            self._attend(mma, tensors, work, (sQ, sFactors, ring), (tidx, warp))
        else:
            self._keep_nothing(tensors, work, (heads, sFactors), tidx)

    @cute.jit
    def _keep_nothing(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, of: cutlass.Constexpr, tidx):
        """Of a part without keys."""
        heads, _ = of
        row = work.block * self.config.rows + tidx
        if (tidx < self.config.rows) & (row < self.rows):
            tensors.partial_lse[self._place(row, work, heads), work.split] = -Float32.inf

    def _work(self, tensors, captured, heads, splits):
        """The CTA's part; row blocks that read the same keys run together."""
        bidx, blocks = cute.arch.block_idx()[0], -(-self.rows // self.config.rows)
        index = bidx // blocks
        head = index // splits
        batch = head // heads
        size = Int32(tensors.k_cache.shape[1])
        if const_expr(tensors.page_table is not None):
            size = size * Int32(tensors.page_table.shape[1])
        # In 64 bits, before it is cut: a length may be any number.
        keys = Int32(cutlass.max(cutlass.min(Int64(tensors.lengths[batch]), Int64(size)), Int64(0)))
        begin, end, split = Int32(0), cute.ceil_div(keys, self.keys), index - head * splits
        if const_expr(self.window > 0):
            before = cutlass.max(keys - (self.queries - 1 + self.window), Int32(0))
            begin = before // (self.keys * self.together) * self.together
        if const_expr(self.config.split_keys > 0):
            tiles = self.config.split_keys // self.keys
            begin, end = cutlass.max(begin, split * tiles), cutlass.min(end, (split + 1) * tiles)
        else:
            # Each warp has a tile of a group; parts differ by one group at most.
            groups = cute.ceil_div(end - begin, self.config.warps)
            each = groups // splits
            more = groups - each * splits
            begin = begin + (split * each + cutlass.min(split, more)) * self.config.warps
            each = each + cutlass.select_(split < more, Int32(1), Int32(0))
            end = cutlass.min(end, begin + each * self.config.warps)
        sizes = Sizes(
            Int32(self.queries), keys, heads * self.shared_by, self.shared_by, Int32(tensors.q.shape[0]), captured
        )  # fmt: skip
        return Work(batch, head - batch * heads, bidx - index * blocks, split, splits, keys, begin, end, sizes)

    def _ring(self, smem, warp):
        """A warp's tiles of keys and values, (keys, units of 16 bits, stages), its masks of keys, and the memory of all
        warps as float32 results: values of each row, the largest score and the sum of weights of each row.
        """
        config, warps = self.config, self.config.warps
        stage, rows = config.stage_bytes(self.d, self.e), config.rows
        size = max(config.stages * stage, 4 * rows * (self.e + 2))
        base = smem.allocate(size * warps, 16)
        tiles = []
        units = [width * config.itemsize // 2 for width in (self.d, self.e)]
        for start, width in zip((0, 2 * self.keys * (units[0] + PADDING)), units):
            address = (base + (warp * size + start)).toint()
            pointer = cute.make_ptr(self.product, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
            shape, strides = (self.keys, width, config.stages), (width + PADDING, 1, stage // 2)
            tiles.append(cute.make_tensor(pointer, cute.make_layout(shape, stride=strides)))
        masks = smem.allocate_array(Int32, warps * config.stages)
        masks = cute.make_tensor(masks + warp * config.stages, cute.make_layout(config.stages))
        return (*tiles, masks, *self._results(base, size))

    def _results(self, base, size):
        """Of all warps, so many bytes from one to the next: (row, column, warp) and (largest or sum, row, warp)."""
        rows, warps, results = self.config.rows, self.config.warps, cute.recast_ptr(base, dtype=Float32)
        values = cute.make_tensor(results, cute.make_layout((rows, self.e, warps), stride=(self.e, 1, size // 4)))
        sums = cute.make_layout((2, rows, warps), stride=(rows, 1, size // 4))
        return values, cute.make_tensor(results + rows * self.e, sums)

    @cute.jit
    def _attend(
        self, mma, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        (sQ, sFactors, (sK, sV, masks, sValues, sSums)), (tidx, warp), warps = shared, at, self.config.warps
        lane, stages = tidx % WARP, self.config.stages
        form, table, page_size = self.config.form, tensors.page_table, Int32(tensors.k_cache.shape[1])
        keys = Keys(form, self.keys, table, work.batch, work.keys, page_size, self.keys * warps)
        caches = [(tensors.k_cache, sK), (tensors.v_cache, sV)]
        first = work.begin + warp
        # The page of a tile is looked up one tile ahead of its copies.
        index, slot = first_place(keys, first, lane)
        entry = page_entry(keys, index, first, lane)
        for i in cutlass.range(stages - 1, unroll=1):
            tile = first + i * warps
            load_tile(keys, caches, masks, (work.head, tile, work.end, i, lane), (entry, slot))
            index, slot = next_place(keys, index, slot)
            entry = page_entry(keys, index, tile + warps, lane)
        self._load_queries(tensors.q, (sQ, sFactors), work, tidx)
        cute.arch.barrier()
        rows, queries = self._start_rows(mma, tensors.k_scale, (sQ, sFactors), work, lane)
        operands = self.tiles.operands(mma, sK, sV, lane)
        stage = Int32(0)
        for tile in cutlass.range(first, work.end, warps, unroll=1):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_warp()
            # All lanes have read the stage that is loaded now.
            ahead = tile + (stages - 1) * warps
            free = cutlass.select_(stage == 0, Int32(stages - 1), stage - 1)
            load_tile(keys, caches, masks, (work.head, ahead, work.end, free, lane), (entry, slot))
            index, slot = next_place(keys, index, slot)
            entry = page_entry(keys, index, ahead + warps, lane)
            for row in rows:
                row.scores.fill(0.0)
            self.tiles.score(operands, lambda i, k: queries[i](k), rows, stage)
            mask = masks[stage] if const_expr(keys.paged) else Int32(-1)
            for row in rows:
                self._weigh(row, work, tile, mask, lane)
            self.tiles.add_values(operands, rows, stage)
            stage = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
        cute.arch.cp_async_wait_group(0)
        # All warps have read their tiles, whose place results take.
        cute.arch.barrier()
        for i, row in enumerate(rows):
            self._keep(row, i, (sValues, sSums), warp, lane)
        cute.arch.barrier()
        self._finish(tensors, work, (sValues, sSums, sFactors), tidx)

    # --- before the loop

    def _load_queries(self, mQ, shared, work, tidx):
        """Copy the block's queries to shared memory, zeros for rows past the last."""
        if not self.tiles.scaled:
            self._copy_queries(mQ, shared[0], work, tidx)
            return

        def place(row):
            token, head = self._of_row(work.block * self.config.rows + row, work)
            return token < self.queries, self._address(mQ, work.batch, token, head, 0)

        at = self.dtype, tidx // WARP, tidx % WARP, self.warps
        self.tiles.load_queries(self.config.rows, place, *shared, at)

    @cute.jit
    def _copy_queries(self, mQ, sQ, work: cutlass.Constexpr, tidx):
        across = self.d // VECTOR
        for first in cutlass.range_constexpr(0, self.config.rows * across, self.threads):
            index = first + tidx
            row, column = index // across, index % across * VECTOR
            rX = fragment(self.dtype, VECTOR, 0)
            token, head = self._of_row(work.block * self.config.rows + row, work)
            if (index < self.config.rows * across) & (token < self.queries):
                load(rX, self._address(mQ, work.batch, token, head, column))
            if index < self.config.rows * across:
                cute.autovec_copy(rX, cute.make_tensor(sQ.iterator + (row * (self.d + PADDING) + column), rX.layout))

    def _of_row(self, row, work):
        """The query and the head of q that a row stands for; past the last row there are further queries."""
        token = row // self.shared_by
        return token, work.head * self.shared_by + row - token * self.shared_by

    def _address(self, mX, batch, token, head, column):
        """Byte address of an element of q or out."""
        at = Int64(batch) * mX.stride[0] + Int64(token) * mX.stride[1] + Int64(head) * mX.stride[2] + column
        return mX.iterator.toint() + at * self.itemsize

    def _place(self, row, work, heads):
        """A row's number in the order of outputs."""
        token, head = self._of_row(row, work)
        return (Int64(work.batch) * self.queries + token) * (heads * self.shared_by) + head

    def _start_rows(self, mma, mScale, shared, work, lane, first=0):
        """For each of a warp's tiles of rows, from the first one on, sums of nothing and queries."""
        rows, queries = [], []
        for i in range(self.own):
            tile = cute.local_tile(shared[0], (MMA_ROWS, self.d), (first + i, 0))
            queries.append(Rows.of(mma, tile, lane, self.keeps_queries))
            rows.append(self._start(mma, work, first + i, lane))
            self._start_factors(rows[i], (mScale, shared[1]), work, first + i, lane)
        return rows, queries

    def _start(self, mma, work, i, lane):
        """Sums of nothing."""
        rows, keys = [cute.make_rmem_tensor(2, Float32) for _ in range(2)], []
        values = accumulators(mma, self.e, 0.0)
        rows[0].fill(-Float32.inf)
        rows[1].fill(0.0)
        for _ in range(2):
            keys.append(cute.make_rmem_tensor(2, Int32))
        for r in range(2):
            row = work.block * self.config.rows + i * MMA_ROWS + lane // 4 + 8 * r
            token = row // self.shared_by
            last = work.keys - self.queries + token
            keys[0][r] = last - self.window + 1 if self.window else Int32(0)
            keys[1][r] = cutlass.select_(token < self.queries, last, Int32(-1))
        scores, weights = accumulators(mma, self.keys), halves(self.keys, self.product)
        factors = cute.make_rmem_tensor(2, Float32) if self.tiles.scaled else None
        both = [work.block * self.config.rows + i * MMA_ROWS + lane // 4 + 8 * r for r in range(2)]
        tokens, heads = zip(*(self._of_row(row, work) for row in both))
        return Accumulated(scores, weights, values, *rows, *keys, tokens, heads, factors)

    def _start_factors(self, row, scales, work, i, lane):
        """The factor of scores: a row's factor of queries times the cache's scale."""
        if self.tiles.scaled:
            mScale, sFactors = scales
            for r in range(2):
                scale = Float32(1.0) if mScale is None else mScale[work.head]
                row.factors[r] = sFactors[i * MMA_ROWS + lane // 4 + 8 * r] * scale

    # --- in the loop

    @cute.jit
    def _weigh(self, row: cutlass.Constexpr, work: cutlass.Constexpr, tile, mask, lane):
        """Exponentials of a tile's scores, and what they do to the sums so far."""
        scores, start = by_row(row.scores), tile * self.keys + lane % 4 * 2
        columns = tuple(8 * (c // 2) + c % 2 for c in range(self.keys // 4))
        if const_expr(row.factors is not None):
            self.softmax.rescale(row.scores, row.factors)
        if const_expr(self.mods.score is not None):
            place = Place(Tile(0, row.heads, work.batch), row.tokens, start, columns, False, work.sizes)
            self.mods.change(scores, place)
        # All queries attend to all keys of a tile, if it is none of the last or of the window's first ones.
        before = work.keys - self.queries
        whole = ((tile + 1) * self.keys <= before + 1) & (mask == -1)
        if const_expr(self.window > 0):
            whole = whole & (tile * self.keys >= work.keys - self.window)
        if not whole:
            for r in cutlass.range_constexpr(2):
                for c, offset in enumerate(columns):
                    there = (mask >> (lane % 4 * 2 + offset)) & 1
                    seen = (start + offset <= row.high[r]) & (start + offset >= row.low[r]) & (there != 0)
                    scores[r, c] = cutlass.select_(seen, scores[r, c], -Float32.inf)
        factors = self.softmax.add(row.scores, row.largest, row.sums)
        self.softmax.rescale_grown(row.values, factors)
        store_packed(row.scores, row.weights)

    # --- after the loop

    @cute.jit
    def _keep(self, row: cutlass.Constexpr, i: cutlass.Constexpr, results: cutlass.Constexpr, warp, lane):
        """Store a warp's sums in shared memory."""
        (sValues, sSums), values = results, by_row(row.values)
        for r in cutlass.range_constexpr(2):
            at, total = i * MMA_ROWS + lane // 4 + 8 * r, row.sums[r]
            for offset in (2, 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if lane % 4 == 0:
                sSums[0, at, warp] = self.softmax.log2(row.largest[r])
                sSums[1, at, warp] = total
            for c in cutlass.range_constexpr(self.e // 4):
                sValues[at, self.tiles.column(lane, c), warp] = values[r, c]

    @cute.jit
    def _finish(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, results: cutlass.Constexpr, tidx):
        """Combine the warps' sums of each row, four columns a thread, and store them."""
        (sValues, sSums, _), across, warps = results, self.e // 4, self.config.warps
        for first in cutlass.range_constexpr(0, self.config.rows * across, self.threads):
            at, column = (first + tidx) // across, (first + tidx) % across * 4
            row = work.block * self.config.rows + at
            if (first + tidx < self.config.rows * across) & (row < self.rows):
                largest = sSums[0, at, 0]
                for w in cutlass.range_constexpr(1, warps):
                    largest = cute.arch.fmax(largest, sSums[0, at, w])
                total, rX = Float32(0.0), fragment(Float32, 4, 0)
                for w in cutlass.range_constexpr(warps):
                    share = self.combine.share(sSums[0, at, w], largest)
                    total = total + share * sSums[1, at, w]
                    for j in cutlass.range_constexpr(4):
                        rX[j] = rX[j] + share * sValues[at, column + j, w]
                token, head = self._of_row(row, work)
                scale = Float32(1.0) if const_expr(tensors.v_scale is None) else tensors.v_scale[work.head]
                if work.splits == 1:
                    sink = None if const_expr(tensors.sinks is None) else Float32(tensors.sinks[head])
                    lse, factor = self.combine.finish(largest, total, sink)
                    self._store_row(tensors, (work.batch, token, head, column), rX, (lse, factor * scale))
                else:
                    lse, factor = self.combine.of_part(largest, total)
                    for j in cutlass.range_constexpr(4):
                        rX[j] = rX[j] * (factor * scale)
                    self._store_part(tensors, work, results, (at, column, lse), rX)

    @cute.jit
    def _store_row(
        self, tensors: cutlass.Constexpr, place: cutlass.Constexpr, rX: cutlass.Constexpr, found: cutlass.Constexpr
    ):  # fmt: skip
        """Store four columns of a row of the outputs."""
        (batch, token, head, column), (lse, factor), rOut = place, found, fragment(self.dtype, 4)
        if column == 0:
            tensors.lse[batch, head, token] = lse
        for j in cutlass.range_constexpr(4):
            rOut[j] = (rX[j] * factor).to(self.dtype)
        store(rOut, self._address(tensors.out, batch, token, head, column))

    @cute.jit
    def _store_part(
        self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, results: cutlass.Constexpr, at: cutlass.Constexpr,
        rX: cutlass.Constexpr,
    ):  # fmt: skip
        """Store four columns of a row's result for a part of the keys."""
        row, column, lse = at
        place = self._place(work.block * self.config.rows + row, work, Int32(tensors.k_cache.shape[2]))
        if column == 0:
            tensors.partial_lse[place, work.split] = lse
        store(rX, tensors.partial.iterator.toint() + ((place * work.splits + work.split) * self.e + column) * 4)
