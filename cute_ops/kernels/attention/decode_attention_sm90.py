"""Attention of a few queries to caches on Hopper: see :mod:`cute_ops.ops.attention.decode_attention`."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.boxes import EVICT_FIRST, FAR, columns_of, copies_of, slots_of, swizzle_of
from cute_ops.kernels.attention.config import LONGEST_OF_TWO, PADDING, RESIDENT
from cute_ops.kernels.attention.decode_attention import DecodeAttention
from cute_ops.kernels.attention.pages import page_of, table_entry
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT
from cute_ops.kernels.tensor_core.pipeline import Consumer, Producer, tma_pipeline

MOST_OF_TWO = 4  # warps that multiply, of each of two CTAs on an SM
ATOM_BYTES = 1024  # that a swizzle repeats after
QUERIES, END, CLEARED = 1, 2, 3  # named barriers of the warps that multiply, the last ones of those that share keys


class Slots(NamedTuple):
    """Slots of shared memory, each of which has a tile of keys or of values.

    Attributes:
        address: of the first one.
        boxes: for keys and for values the slots as TMA fills them, (box, row of boxes, column of boxes, slot).
        tiles: likewise what a warp reads of them, (keys, units of 16 bits, slot).
        masks: a bit for each key that is there, (word, slot).
        results: sums of values, largest scores and sums of weights, which take the place of slots.
    """

    address: Any
    boxes: Any
    tiles: Any
    masks: Any
    results: Any


class DecodeAttentionSm90(DecodeAttention):
    """:class:`DecodeAttention` of tiles that TMA loads.

    A warp loads tiles of keys and of values in turn, box by box, into slots that all other warps share: each has 16 or
    32 of a tile's keys, or two have, each for 16 queries of its own. A box lies in one page; one of a page outside of
    the pool is behind the end of a page, so that it has zeros. Values behind the last key are cleared where they are
    read.
    Shared memory: ``stages`` slots of a tile of keys or of values, swizzled.
    """

    def __init__(self, variant):
        super().__init__(variant)
        config, self.producers, self.resident, self.carveout = self.config, WARP, 1, SMEM_PERCENT
        # Registers hold the sums of two CTAs, each of five warps, where those of one are short.
        if config.tiles_m * max(self.d, self.e) <= LONGEST_OF_TWO and self.warps <= MOST_OF_TWO:
            self.resident = RESIDENT
        self.tile, self.box, self.together = config.keys * config.warps, config.box, config.warps
        self.units = [width * config.itemsize // 2 for width in (self.d, self.e)]
        self.columns = [columns_of(width) for width in self.units]

    def _moved(self, tensors):
        return copies_of((tensors.k_cache, tensors.v_cache), self.product, self.box, self.columns)

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, tensors, moved, captured, heads: Int32, splits: Int32):
        tidx, config = cute.arch.thread_idx()[0], self.config
        warp = cute.arch.make_warp_uniform(tidx // WARP)
        let_next_start(self.pdl)
        if warp == self.warps:
            for atom, _ in moved:
                cpasync.prefetch_descriptor(atom)
        smem = cutlass.utils.SmemAllocator()
        slots = self._slots(smem, warp % config.warps)
        layout = cute.make_layout((config.rows, self.d), stride=(self.d + PADDING, 1))
        sQ = smem.allocate_tensor(self.product, layout, VECTOR_BYTES)
        sFactors = smem.allocate_tensor(Float32, cute.make_layout(config.rows), VECTOR_BYTES)
        pipeline = tma_pipeline(smem.allocate_array(Int64, 2 * config.stages), config.stages, 0, self.threads)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        wait_for_previous(self.pdl)
        work = self._work(tensors, captured, heads, splits)
        if (work.begin < work.end) | (splits == 1):
            if warp == self.warps:
                self._load(tensors, moved, work, (pipeline, slots))
            else:
                self._attend(mma, tensors, work, (sQ, sFactors, (pipeline, slots)), (tidx, warp))
        else:
            self._keep_nothing(tensors, work, (heads, sFactors), tidx)
        self._combine_parts(tensors, work, (slots.results[0], sFactors), tidx)

    def _combine_parts(self, tensors, work, shared, tidx):
        """Parts lie in memory, where another kernel combines them."""

    def _slots(self, smem, warp):
        config, pitch = self.config, max(self.units)
        base = smem.allocate(config.slots_bytes(self.d, self.e), ATOM_BYTES)
        boxes, tiles = [], []
        for width, columns in zip(self.units, self.columns):
            swizzle, slot = swizzle_of(self.product, self.box, columns), self.tile * pitch
            box, tile = (self.box, columns), (self.tile, width)
            boxes.append(slots_of(base, self.product, box, tile, (config.stages, slot)))
            start = (base + warp * (self.keys * columns * 2)).toint()
            own = cute.make_ptr(Uint8, start, cute.AddressSpace.smem, assumed_align=self.keys * columns * 2)
            layout = cute.make_layout(
                (self.keys, (columns, width // columns), config.stages),
                stride=(columns, (1, self.tile * columns), slot),
            )
            tiles.append(cute.make_tensor(cute.recast_ptr(own, swizzle, self.product), layout))
        masks = smem.allocate_tensor(Int32, cute.make_layout((self.tile // WARP, config.stages)), VECTOR_BYTES)
        return Slots(base, boxes, tiles, masks, self._results(base, 4 * config.rows * (self.e + 2)))

    @cute.jit
    def _load(
        self, tensors: cutlass.Constexpr, moved: cutlass.Constexpr, work: cutlass.Constexpr, ring: cutlass.Constexpr
    ):  # fmt: skip
        """Load tiles of keys and of values in turn. A lane looks up the page of one box, a tile ahead."""
        (pipeline, slots), warps, count = ring, self.config.warps, self.tile // self.box
        lane, paged, copies = cute.arch.lane_idx(), tensors.page_table is not None, []
        for (atom, m), sX, columns in zip(moved, slots.boxes, self.columns):
            gX = cute.local_tile(m, (self.box, columns), (None, None, work.head, None))
            copies.append((atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), sX, cute.group_modes(gX, 0, 2))))
        producer, of_lane = Producer(pipeline), lane % count * self.box
        entry, slot = self._find(tensors, work, work.begin * self.keys + of_lane)
        for tile in cutlass.range(work.begin, work.end, warps, unroll=1):
            page, row, words = work.batch, tile * self.keys // self.box, []
            if const_expr(paged):
                page = page_of(entry, tensors.k_cache)
                row = cutlass.select_(page >= 0, slot // self.box, Int32(FAR))
                page = cutlass.max(page, Int32(0))
                for i in cutlass.range_constexpr(self.tile // WARP):
                    there = cute.arch.shuffle_sync(row, (i * WARP + lane) // self.box) < FAR
                    words.append(Int32(cute.arch.vote_ballot_sync(there)))
            for i in cutlass.range_constexpr(2):
                (atom, tXsX, tXgX), width = copies[i], self.units[i]
                if const_expr(paged and i == 0):
                    at = producer.at
                    # Before it is said that the slot fills.
                    pipeline.sync_object_empty.wait(at.index, at.phase)
                    if lane == 0:
                        for j in cutlass.range_constexpr(len(words)):
                            slots.masks[j, at.index] = words[j]
                    cute.arch.sync_warp()
                stage = producer.acquire_and_advance(2 * self.tile * width)
                for box in cutlass.range_constexpr(count):
                    at_row, at_page = self._box_at(row, page, box, paged)
                    for column in cutlass.range_constexpr(width // self.columns[i]):
                        source, target = tXgX[None, at_row, column, at_page], tXsX[None, box, column, stage.index]
                        cute.copy(atom, source, target, tma_bar_ptr=stage.full, cache_policy=Int64(EVICT_FIRST))
            entry, slot = self._find(tensors, work, (tile + warps) * self.keys + of_lane)

    def _box_at(self, row, page, box, paged):
        """Where a box of a tile lies, in boxes, and in which page."""
        return [cute.arch.shuffle_sync(x, box) for x in (row, page)] if paged else (row + box, page)

    @cute.jit
    def _find(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, key):
        """What the table has for the page of a key, and the key's slot there."""
        entry, slot = Int32(-1), key
        if const_expr(tensors.page_table is not None):
            size = Int32(tensors.k_cache.shape[1])
            entry, slot = table_entry(tensors.page_table, work.batch, key // size, key < work.keys), key % size
        return entry, slot

    @cute.jit
    def _attend(
        self, mma, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        (sQ, sFactors, (pipeline, slots)), (tidx, warp), lane = shared, at, cute.arch.lane_idx()
        sharer, warp = warp // self.config.warps, warp % self.config.warps
        first_tile = sharer * self.own if const_expr(self.config.sharers > 1) else 0
        self._load_queries(tensors.q, (sQ, sFactors), work, tidx)
        cute.arch.barrier(barrier_id=QUERIES, number_of_threads=self.threads)
        rows, queries = self._start_rows(mma, tensors.k_scale, (sQ, sFactors), work, lane, first_tile)
        operands, consumer, values = self.tiles.operands(mma, *slots.tiles, lane), Consumer(pipeline), Int32(0)
        for first in cutlass.range(work.begin, work.end, self.config.warps, unroll=1):
            tile, keys = first + warp, consumer.wait()
            consumer.advance()
            if first > work.begin:
                self._release(pipeline, values, lane)
            for row in rows:
                row.scores.fill(0.0)
            self.tiles.score(operands, lambda i, k: queries[i](k), rows, keys)
            mask = self._mask(slots.masks, keys, warp, tensors.page_table is not None)
            for row in rows:
                self._weigh(row, work, tile, mask, lane)
            values = consumer.wait()
            consumer.advance()
            self._release(pipeline, keys, lane)
            self._clear(slots.address, values, work, (tile, warp, lane), sharer)
            self.tiles.add_values(operands, rows, values)
        # All warps have read their tiles, whose place results take.
        cute.arch.barrier(barrier_id=END, number_of_threads=self.threads)
        for i, row in enumerate(rows):
            self._keep(row, first_tile + i, slots.results, warp, lane)
        cute.arch.barrier(barrier_id=END, number_of_threads=self.threads)
        self._finish(tensors, work, (*slots.results, sFactors), tidx)

    @cute.jit
    def _release(self, pipeline: cutlass.Constexpr, stage, lane):
        """Let a slot be filled again, once the next one has been waited for. An ``ldmatrix`` may be under way when the
        barrier is told, unless what it loads has been multiplied: told earlier, TMA overwrote what was not read yet.
        """
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(pipeline.sync_object_empty.get_barrier(stage))

    def _mask(self, masks, stage, warp, paged):
        """A word with a bit for each of a warp's keys, again and again."""
        if not paged:
            return Int32(-1)
        word = masks[warp * self.keys // WARP, stage]
        if self.keys == WARP:
            return word
        half = (word >> (warp * self.keys % WARP)) & 0xFFFF
        return half | (half << 16)

    @cute.jit
    def _clear(self, address, stage, work: cutlass.Constexpr, at: cutlass.Constexpr, sharer):
        """Store zeros as values behind the last key, which may be NaN in memory; the first of the warps that share them
        does so, and the others wait.
        """
        tile, warp, lane = at
        width, columns, vector = self.units[1], self.columns[1], VECTOR_BYTES // 2
        if (tile + 1) * self.keys > work.keys:
            start = Int32(address.toint()) + (stage * (self.tile * max(self.units)) + warp * (self.keys * columns)) * 2
            rX, across = cute.make_rmem_tensor(4, Int32), width // vector
            rX.fill(0)
            for i in cutlass.range(self.keys * across // WARP, unroll=1):
                row, column = (i * WARP + lane) // across, (i * WARP + lane) % across * vector
                if (tile * self.keys + row >= work.keys) & (sharer == 0):
                    place = column // columns * (self.tile * columns) + row * columns + column % columns
                    to = cute.make_ptr(Int32, start + 2 * place, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
                    cute.autovec_copy(rX, cute.make_tensor(to, rX.layout))
            if const_expr(self.config.sharers > 1):
                cute.arch.barrier(barrier_id=CLEARED + warp, number_of_threads=WARP * self.config.sharers)
            cute.arch.sync_warp()
