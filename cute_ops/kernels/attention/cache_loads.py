"""Tiles of keys and values that a warpgroup copies from caches, in pages or contiguous, to WGMMA's shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.pages import copy_bytes, page_of
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP

WARPS = WARPGROUP // WARP
SWIZZLED = (128, 64, 32)  # bytes of a row of a tile of columns


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

    def start(self):
        """Initialize the barriers: of one thread."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, WARPGROUP * (2 if self.marks is not None else 1))
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

    def producer_commit(self, slot):
        """The slot is full once the thread's copies have come."""
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + slot.index)

    def consumer_wait(self, slot):
        cute.arch.mbarrier_wait(self.full + slot.index, slot.phase)
        cute.arch.fence_view_async_shared()

    def marked(self, slot):
        """The bits of a slot's keys, a word for each loading warp."""
        return tuple([self.marks[warp, slot.index] for warp in range(WARPS)])

    @cute.jit
    def consumer_release(self, slot: cutlass.Constexpr):
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + slot.index)


class Found(NamedTuple):
    """The key of a lane: its page, or the sequence of contiguous caches, and -1 where it is not there; its slot."""

    page: Any
    slot: Any


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
        key = tile * self.keys + tidx // WARP * self.of_warp + tidx % WARP
        slot = key if const_expr(self.table is None) else key % Int32(mCache.shape[1])
        return Found(self._page(mCache, batch, key, count), slot)

    @cute.jit
    def _page(self, mCache, batch, key, count):
        page = Int32(-1)
        if (key >= 0) & (key < count):
            if const_expr(self.table is None):
                page = batch
            else:
                page = page_of(self.table, mCache, batch, key)
        return page

    def copy(self, mCache, head, sX, stage, found):
        """Start to copy a tile of one head, zeros where no key is.

        Args:
            mCache: (pages, page size, heads, d).
            head: of the cache.
            sX: slots of shared memory.
            stage: the slot.
            found: the keys of lanes.
        """
        itemsize, columns = mCache.element_type.width // 8, cute.size(mCache, mode=[3])
        width = next(width for width in SWIZZLED if columns * itemsize % width == 0)
        vectors, tiles = width // VECTOR_BYTES, columns * itemsize // width
        tidx = cute.arch.thread_idx()[0]
        lane, first = tidx % WARP, tidx // WARP * self.of_warp
        start = mCache.iterator.toint()
        base = start + Int64(head) * mCache.stride[2] * itemsize + lane % vectors * VECTOR_BYTES
        target = sX.iterator.toint() + stage * (self.keys * columns * itemsize)
        for step in range(self.of_warp * vectors // WARP):
            row = step * (WARP // vectors) + lane // vectors
            page, slot = (cute.arch.shuffle_sync(x, row) for x in found)
            source = base + (Int64(page) * mCache.stride[0] + Int64(slot) * mCache.stride[1]) * itemsize
            there = page >= 0
            source = cutlass.select_(there, source, start)
            size = cutlass.select_(there, Int32(VECTOR_BYTES), Int32(0))
            place = (first + row) * width + lane % vectors * VECTOR_BYTES
            place = place ^ ((place >> 7 & vectors - 1) << 4)
            for tile in range(tiles):
                copy_bytes((target + place, tile * self.keys * width), source + tile * width, size)
