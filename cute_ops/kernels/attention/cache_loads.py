"""Tiles of keys and values that a warpgroup copies from caches, in pages or contiguous, to WGMMA's shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.cache_tiles import two_pairs
from cute_ops.kernels.attention.pages import copy_bytes, page_of, table_entry
from cute_ops.kernels.attention.registers import pack
from cute_ops.kernels.lib.copy import fragment, load
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP

WARPS = WARPGROUP // WARP
SWIZZLED = (128, 64, 32)  # bytes of a row of a tile of columns
WAITING = 4  # loads of 16 bytes that a thread has on their way where it converts numbers


class Fixed:
    """What loops take as it is: the compiler takes an object whose methods they call for one that they change."""

    def __get_mlir_types__(self):
        return []

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, _):
        return self


class CopyRing(Fixed):
    """Slots that a warpgroup fills by ``cp.async`` and other warpgroups empty; what waits is named as for TMA's rings.

    Args:
        smem: shared memory.
        stages: slots.
        consumers: warpgroups that read them.
        marked: whether a slot has a bit for each of its keys: whether the key is there.
    """

    def __init__(self, smem, stages, consumers, marked):
        self.full, self.empty = (smem.allocate_array(Int64, stages) for _ in range(2))
        self.stages, self.readers, self.marks = stages, consumers * WARPS, None
        if marked:
            self.marks = smem.allocate_tensor(Int32, cute.make_layout((WARPS, stages)), 16)

    @property
    def arrivals(self):
        """After which a slot is full."""
        return WARPGROUP * (2 if self.marks is not None else 1)

    def start(self):
        """Initialize the barriers: of one thread."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, self.arrivals)
            cute.arch.mbarrier_init(self.empty + stage, self.readers)

    def producer_acquire(self, slot):
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase)

    @cute.jit
    def mark(self, slot: cutlass.Constexpr, there, warp, lane):
        """Say which of the warp's keys are there."""
        if const_expr(self.marks is not None):
            bits = cute.arch.vote_ballot_sync(there)
            if lane == 0:
                self.marks[warp, slot.index] = Int32(bits)
            cute.arch.mbarrier_arrive(self.full + slot.index)

    def producer_commit(self, slot, stored=False):
        """The slot is full once the thread's copies have come, or at once where it has stored them."""
        if const_expr(stored):
            cute.arch.fence_view_async_shared()
            cute.arch.mbarrier_arrive(self.full + slot.index)
        else:
            cute.arch.cp_async_mbarrier_arrive_noinc(self.full + slot.index)

    def consumer_wait(self, slot):
        cute.arch.mbarrier_wait(self.full + slot.index, slot.phase)
        cute.arch.fence_view_async_shared()

    def marked(self, slot):
        """The bits of a slot's keys, a word for each loading warp."""
        return tuple([self.marks[warp, slot.index] for warp in range(WARPS)])

    @cute.jit
    def consumer_release(self, slot: cutlass.Constexpr):
        """Let a slot be filled again: one lane says so, once all of its warp have read what is marked."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + slot.index)


class Found(NamedTuple):
    """The key of a lane: what the table has for it, or the sequence of contiguous caches, and -1 where it is not there;
    its slot.
    """

    entry: Any
    slot: Any


def find_key(table, mCache, batch, key, count):
    """Where a key lies of a sequence that has ``count`` of them.

    Args:
        table: the pages of each sequence; None if caches are contiguous.
        mCache: (pages, page size, heads, d).
        batch: the sequence's number.
        key: its number in the sequence; one that does not exist has entry -1.
        count: of keys.
    """
    there = (key >= 0) & (key < count)
    if const_expr(table is None):
        return Found(cutlass.select_(there, batch, Int32(-1)), key)
    size = Int32(mCache.shape[1])
    return Found(table_entry(table, batch, key // size, there), key % size)


def page_found(table, mCache, entry):
    """The page of a key that was found, or the sequence; -1 where it is not there."""
    return entry if const_expr(table is None) else page_of(entry, mCache)


class CacheLoads(Fixed):
    """What copies tiles of ``keys`` keys, of which each warp has a quarter.

    A lane looks one key up, and says the others of its warp where it lies. Shared memory has tiles of columns as wide
    as WGMMA's swizzle, with 16 bytes for each of a few neighbouring lanes.

    Args:
        keys: of a tile.
        table: pages of each sequence; None of contiguous caches.
    """

    def __init__(self, keys, table):
        self.keys, self.of_warp, self.table = keys, keys // WARPS, table

    def find(self, mCache, batch, tile, count):
        """The key of this thread's lane in a tile, of a sequence of ``count`` keys."""
        tidx = cute.arch.thread_idx()[0]
        return find_key(
            self.table, mCache, batch, tile * self.keys + tidx // WARP * self.of_warp + tidx % WARP, count
        )  # fmt: skip

    def copy(self, mCache, head, sX, stage, found):
        """Start to copy a tile of one head, zeros where no key is.

        Args:
            mCache: (pages, page size, heads, d).
            head: of the cache.
            sX: slots of shared memory.
            stage: the slot.
            found: the keys of lanes.
        """
        rows = _Rows(self, mCache, head, sX, stage, found)
        for step in range(rows.steps):
            row, (source, there) = rows.row(step), rows.source(step)
            size = cutlass.select_(there, Int32(VECTOR_BYTES), Int32(0))
            for tile in range(rows.tiles):
                copy_bytes((rows.target(row, 0), tile * rows.tile_bytes), source + tile * rows.row_bytes, size)

    def convert(self, mCache, head, sX, stage, found):
        """Store a tile of a cache in float8_e4m3fn as numbers of shared memory's 16-bit dtype, which has all of them.
        Arguments as of :meth:`copy`.
        """
        rows, dtype = _Rows(self, mCache, head, sX, stage, found), sX.element_type
        together = max(WAITING // rows.tiles, 1)  # steps
        for first in range(0, rows.steps, together):
            loaded = []
            for step in range(first, min(first + together, rows.steps)):
                source, there = rows.source(step)
                for tile in range(rows.tiles):
                    rX = fragment(Int32, 4)
                    load(rX, source + tile * rows.row_bytes)
                    loaded.append((step, tile, there, rX))
            for step, tile, there, rX in loaded:
                words = [each for i in range(4) for each in widened(cutlass.select_(there, rX[i], Int32(0)), dtype)]
                for half in range(2):
                    rHalf = fragment(Int32, 4)
                    for i in range(4):
                        rHalf[i] = words[4 * half + i]
                    place = rows.target(rows.row(step), half) + tile * rows.tile_bytes
                    shared = cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
                    cute.autovec_copy(rHalf, cute.make_tensor(shared, rHalf.layout))


class _Rows:
    """The rows of a warp's part of a tile, each 16 bytes of a cache at a time, of several neighbouring lanes.

    Attributes:
        steps: in which the warp goes through its rows.
        tiles: of columns.
        row_bytes, tile_bytes: of a row of such a tile in the cache, and of the tile in shared memory.
    """

    def __init__(self, loads, mCache, head, sX, stage, found):
        tidx, itemsize, columns = cute.arch.thread_idx()[0], mCache.element_type.width // 8, cute.size(mCache, mode=[3])
        self.m, self.found, self.itemsize = mCache, found, itemsize
        self.width = next(width for width in SWIZZLED if columns * 2 % width == 0)
        self.tiles, self.tile_bytes = columns * 2 // self.width, loads.keys * self.width
        self.row_bytes = self.width // 2 * itemsize
        self.vectors = self.row_bytes // VECTOR_BYTES
        self.steps = loads.of_warp * self.vectors // WARP
        self.lane, self.first = tidx % WARP, tidx // WARP * loads.of_warp
        self.start = mCache.iterator.toint()
        self.base = self.start + Int64(head) * mCache.stride[2] * itemsize + self.lane % self.vectors * VECTOR_BYTES
        self.shared = sX.iterator.toint() + stage * (loads.keys * columns * 2)

    def row(self, step):
        """Of this thread, in the warp's part."""
        return step * (WARP // self.vectors) + self.lane // self.vectors

    def source(self, step):
        """The address of a thread's 16 bytes, and whether they are there; else it has one that can be read."""
        page, slot = (cute.arch.shuffle_sync(x, self.row(step)) for x in self.found)
        place = (Int64(page) * self.m.stride[0] + Int64(slot) * self.m.stride[1]) * self.itemsize
        return cutlass.select_(page >= 0, self.base + place, self.start), page >= 0

    def target(self, row, half):
        """The address of 16 bytes in shared memory, which are all or the first or second half of the thread's."""
        vector = self.lane % self.vectors * (2 // self.itemsize) + half
        place = (self.first + row) * self.width + vector * VECTOR_BYTES
        return self.shared + (place ^ ((place >> 7 & self.width // VECTOR_BYTES - 1) << 4))


def widened(word, dtype):
    """The four numbers of float8 of a word as two words of a 16-bit dtype."""
    pairs = two_pairs(word)
    if dtype is Float16:
        return pairs
    rX = fragment(Int32, 2)
    rX[0], rX[1] = pairs
    numbers = cute.recast_tensor(rX, Float16)
    return [pack(numbers[i].to(Float32), numbers[i + 1].to(Float32), dtype) for i in (0, 2)]
