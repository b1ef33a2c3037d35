"""Tiles of keys and values that a warp copies from caches in pages, or from contiguous ones, to shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.config import KEYS_OF_TILE, PADDING

VECTOR = VECTOR_BYTES // 2  # units of 16 bits


class Keys(NamedTuple):
    """The keys of a sequence.

    Attributes:
        form: see :class:`cute_ops.kernels.attention.config.DecodeConfig`.
        table: pages of each sequence; None of contiguous caches.
        batch: the sequence.
        count: its keys.
    """

    form: str
    table: Any
    batch: Any
    count: Any

    @property
    def paged(self):
        return self.form != "contiguous"


@cute.jit
def page_entry(keys: cutlass.Constexpr, mCache, tile, lane):
    """What the table has for a tile of keys, or for the key of a lane where a tile lies in several pages; -1 behind the
    last key.
    """
    entry = Int32(-1)
    if const_expr(keys.paged):
        key = tile * KEYS_OF_TILE
        if const_expr(keys.form == "any_pages"):
            key = key + lane % KEYS_OF_TILE
        if key < keys.count:
            entry = page_of(keys.table, mCache, keys.batch, key)
    return entry


@cute.jit
def page_of(table, mCache, batch, key):
    """The page that a table has for a key of a sequence; -1 where that is none of the cache's."""
    page, found = Int64(table[batch, key // Int32(mCache.shape[1])]), Int32(-1)
    if (page >= 0) & (page < mCache.shape[0]):
        found = Int32(page)
    return found


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
        at: head of the caches; the tile, and that which follows the last one.
        found: what the table has for the tile, the stage, and the thread's lane.
    """
    (head, tile, end), (entry, stage, lane) = at, found
    if tile < end:
        key = tile * KEYS_OF_TILE
        whole = key + KEYS_OF_TILE <= keys.count
        if const_expr(keys.paged):
            mask = Int32(cute.arch.vote_ballot_sync(entry >= 0))
            if lane == 0:
                masks[stage] = mask
            whole = whole & (mask == -1)
        for mX, sX in caches:
            _load_rows(_Rows(keys, mX, (head, key), (entry, lane), sX[None, None, stage]), whole)
    cute.arch.cp_async_commit_group()


@cute.jit
def _load_rows(rows: cutlass.Constexpr, whole):
    """Start all copies of a tile: without conditions, if ``whole``."""
    if whole:
        _Rows.load(rows, True)
    else:
        _Rows.load(rows, False)


class _Rows:
    """Where 16 rows of a cache lie, and where they go in units of 16 bits: 16 bytes a thread.

    Args:
        keys: of the sequence.
        mX: the cache.
        at: head and first key.
        found: what the table has, and the thread's lane.
        sX: shared memory.
    """

    def __init__(self, keys, mX, at, found, sX):
        (head, key), (entry, lane) = at, found
        self.keys, self.key, self.entry, self.lane, self.width = keys, key, entry, lane, cute.size(sX, mode=[1])
        self.across, self.pitch = self.width // VECTOR, (self.width + PADDING) * 2
        self.start, self.target = mX.iterator.toint(), sX.iterator.toint()
        itemsize = mX.element_type.width // 8
        self.row_bytes, slot = Int64(mX.stride[1]) * itemsize, key
        self.base, page = self.start + Int64(head) * mX.stride[2] * itemsize, keys.batch
        if keys.paged:
            page = entry
            if keys.form == "any_pages":
                # A lane has the address of a key, which the lanes that copy it ask for.
                slot = key + lane % KEYS_OF_TILE
            slot = slot % Int32(mX.shape[1])
        self.base = self.base + Int64(page) * mX.stride[0] * itemsize + Int64(slot) * self.row_bytes

    def load(self, whole):
        """Start all copies. ``whole``: whether all rows are there."""
        passes = KEYS_OF_TILE * self.across // WARP
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
                there = cute.arch.shuffle_sync(self.entry, row) >= 0 if not whole else there
            elif self.keys.paged:
                there = there & (self.entry >= 0)
            if regular and per_row > 1:
                place = place + i % per_row * WARP * VECTOR_BYTES
            copy_or_clear((target, offset), place, self.start, None if whole else there)


def of_lane(number, lane):
    """A number of 64 bits of another lane."""
    low, high = (cute.arch.shuffle_sync(Int32(part), lane) for part in (number & 0xFFFFFFFF, number >> 32))
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def copy_or_clear(target, source, readable, there):
    """``cp.async`` of 16 bytes or, if they are not ``there``, of zeros, which reads nothing. Checkers of memory take a
    copy of no bytes for a whole one, so that it has an address which can be read.

    Args:
        target: an address in shared memory, and a constant to add.
        source, readable: addresses in memory.
        there: a condition; None if they are.
    """
    size = None
    if there is not None:
        source = cutlass.select_(there, source, readable)
        size = cutlass.select_(there, Int32(VECTOR_BYTES), Int32(0))
    copy_bytes(target, source, size)


def copy_bytes(target, source, size):
    """``cp.async`` of 16 bytes, of which the first ``size`` are read and the others 0; of all, if it is None."""
    (address, offset), said = target, ""
    arguments = [Int32(address), source]
    if size is not None:
        arguments.append(size)
        said = ", {$r2}"
    ptx = f"cp.async.cg.shared.global [{{$r0}}+{offset}], [{{$r1}}], 16{said};"
    cute.arch.inline_ptx(ptx, read_only_args=arguments)
