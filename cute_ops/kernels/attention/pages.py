"""Tiles of keys and values that a warp copies from caches in pages, or from contiguous ones, to shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.config import PADDING

VECTOR = VECTOR_BYTES // 2  # units of 16 bits
# Loads whole lines of 128 bytes to L2. In 19 of 19 shapes attention to caches takes less time so, 0.4 to 2.4% where it
# takes 50 us or more (H200).
LINES = ".L2::128B"


class Keys(NamedTuple):
    """The keys of a sequence, and how a warp goes through their tiles.

    Attributes:
        form: see :class:`cute_ops.kernels.attention.config.DecodeConfig`.
        of_tile: keys of a tile.
        table: pages of each sequence; None of contiguous caches.
        batch: the sequence.
        count: its keys.
        page_size: slots of a page.
        step: keys from one of a warp's tiles to its next.
    """

    form: str
    of_tile: int
    table: Any
    batch: Any
    count: Any
    page_size: Any
    step: int

    @property
    def paged(self):
        return self.form != "contiguous"

    def key(self, tile, lane):
        """The key whose page a lane looks up: a tile's first one, or its own where a tile lies in several pages."""
        return tile * self.of_tile + (lane % self.of_tile if self.form == "any_pages" else 0)


def first_place(keys, tile, lane):
    """Which of the table's pages has a lane's key of a tile, and which of the page's slots."""
    key = keys.key(tile, lane)
    return (key // keys.page_size, key % keys.page_size) if keys.paged else (Int32(0), Int32(0))


def next_place(keys, index, slot):
    """The place in the warp's next tile, without a division, which a tile would wait for."""
    if not keys.paged:
        return index, slot
    return step_on(index, slot, keys.step, keys.page_size)


def step_on(index, slot, step, size):
    """The place so many keys behind one, in pages of a size."""
    slot = slot + step % size
    over = slot >= size
    return index + step // size + cutlass.select_(over, Int32(1), Int32(0)), cutlass.select_(over, slot - size, slot)


@cute.jit
def page_entry(keys: cutlass.Constexpr, index, tile, lane):
    """The table's entry for the page of a lane's key of a tile; -1 behind the last key."""
    entry = Int32(-1)
    if const_expr(keys.paged):
        entry = table_entry(keys.table, keys.batch, index, keys.key(tile, lane) < keys.count)
    return entry


@cute.jit
def table_entry(table, batch, index, there):
    """The entry of a page table for one page of a sequence; -1 unless ``there``.

    The entry is not compared here, because a comparison waits for the load. :func:`page_of` does that when the page is
    needed.
    """
    entry = table.element_type(-1)
    if there:
        entry = table[batch, index]
    return entry


def page_of(entry, mCache):
    """The number of the page that a table's entry names; -1 where the cache has no such page."""
    page = Int64(entry)
    return cutlass.select_((page >= 0) & (page < mCache.shape[0]), Int32(page), Int32(-1))


@cute.jit
def load_tile(
    keys: cutlass.Constexpr, caches: cutlass.Constexpr, masks: cute.Tensor, at: cutlass.Constexpr,
    found: cutlass.Constexpr,
):  # fmt: skip
    """Start to copy a tile of keys and values, as one group of copies; zeros where no key is.

    Args:
        keys: of the sequence.
        caches: each with its stages in shared memory.
        masks: get a bit for each key of a stage whose page is in the pool.
        at: head of the caches; the tile, and that which follows the last one; the stage, and the thread's lane.
        found: what the table has for a lane's key of the tile, and the key's slot.
    """
    (head, tile, end, stage, lane), (entry, slot) = at, found
    if tile < end:
        key = tile * keys.of_tile
        whole, page = key + keys.of_tile <= keys.count, keys.batch
        if const_expr(keys.paged):
            page = page_of(entry, caches[0][0])
            mask = Int32(cute.arch.vote_ballot_sync(page >= 0))
            if lane == 0:
                masks[stage] = mask
            whole = whole & (mask == -1)
        place = page, slot if const_expr(keys.paged) else key
        for mX, sX in caches:
            _load_rows(_Rows(keys, mX, (head, key), (*place, lane), sX[None, None, stage]), whole)
    cute.arch.cp_async_commit_group()


@cute.jit
def _load_rows(rows: cutlass.Constexpr, whole):
    """Start all copies of a tile: without conditions, if ``whole``."""
    if whole:
        _Rows.load(rows, True)
    else:
        _Rows.load(rows, False)


class _Rows:
    """Where a tile's rows of a cache lie, and where they go in units of 16 bits: 16 bytes a thread.

    Args:
        keys: of the sequence.
        mX: the cache.
        at: head and first key.
        found: the page and the slot of a lane's key, and the thread's lane.
        sX: shared memory.
    """

    def __init__(self, keys, mX, at, found, sX):
        (head, key), (page, slot, lane) = at, found
        self.keys, self.key, self.page, self.lane, self.width = keys, key, page, lane, cute.size(sX, mode=[1])
        self.across, self.pitch = self.width // VECTOR, (self.width + PADDING) * 2
        self.start, self.target = mX.iterator.toint(), sX.iterator.toint()
        itemsize = mX.element_type.width // 8
        self.row_bytes = Int64(mX.stride[1]) * itemsize
        # Where a tile lies in several pages, a lane has the address of a key, which the lanes that copy it ask for.
        self.base = self.start + Int64(head) * mX.stride[2] * itemsize
        self.base = self.base + Int64(page) * mX.stride[0] * itemsize + Int64(slot) * self.row_bytes

    def load(self, whole):
        """Start all copies. ``whole``: whether all rows are there."""
        passes = self.keys.of_tile * self.across // WARP
        # In each pass a lane has the same column, so many rows further down; or else it has any.
        regular = WARP % self.across == 0 or self.across % WARP == 0
        row, column = self.lane // self.across, self.lane % self.across
        down, per_row = max(WARP // self.across, 1), max(self.across // WARP, 1)
        target = self.target + (row * self.pitch + column * VECTOR_BYTES)
        source, step = self.base + Int64(row) * self.row_bytes + column * VECTOR_BYTES, self.row_bytes * down
        for i in range(passes):
            offset = i // per_row * down * self.pitch + i % per_row * WARP * VECTOR_BYTES
            if not regular:
                row, column = (i * WARP + self.lane) // self.across, (i * WARP + self.lane) % self.across
                target, offset = self.target + (row * self.pitch + column * VECTOR_BYTES), 0
                source = self.base + Int64(row) * self.row_bytes + column * VECTOR_BYTES
            elif i % per_row == 0 and i > 0:
                row, source = row + down, source + step
            there, place = self.key + row < self.keys.count, source
            if self.keys.form == "any_pages":
                place = of_lane(self.base, row) + column * VECTOR_BYTES
                there = cute.arch.shuffle_sync(self.page, row) >= 0 if not whole else there
            elif self.keys.paged:
                there = there & (self.page >= 0)
            if regular and per_row > 1:
                place = place + i % per_row * WARP * VECTOR_BYTES
            copy_or_clear((target, offset), place, self.start, None if whole else there, LINES)


def of_lane(number, lane):
    """A number of 64 bits of another lane."""
    low, high = (cute.arch.shuffle_sync(Int32(part), lane) for part in (number & 0xFFFFFFFF, number >> 32))
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def copy_or_clear(target, source, readable, there, ahead=""):
    """``cp.async`` of 16 bytes or, if they are not ``there``, of zeros, which reads nothing. Checkers of memory take a
    copy of no bytes for a whole one, so that it has an address which can be read.

    Args:
        target: an address in shared memory, and a constant to add.
        source, readable: addresses in memory.
        there: a condition; None if they are.
        ahead: see :func:`copy_bytes`.
    """
    size = None
    if there is not None:
        source = cutlass.select_(there, source, readable)
        size = cutlass.select_(there, Int32(VECTOR_BYTES), Int32(0))
    copy_bytes(target, source, size, ahead)


def copy_bytes(target, source, size, ahead=""):
    """``cp.async`` of 16 bytes, of which the first ``size`` are read and the others 0; all if it is None. ``ahead``:
    what L2 is to load besides, as PTX says it.
    """
    (address, offset), said = target, ""
    arguments = [Int32(address), source]
    if size is not None:
        arguments.append(size)
        said = ", {$r2}"
    ptx = f"cp.async.cg.shared.global{ahead} [{{$r0}}+{offset}], [{{$r1}}], 16{said};"
    cute.arch.inline_ptx(ptx, read_only_args=arguments)
