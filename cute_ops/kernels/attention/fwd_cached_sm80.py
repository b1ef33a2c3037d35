"""Attention to caches on any GPU from SM 8.0 on: see :mod:`cute_ops.ops.attention.attention_cached`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.attention.cache_loads import Fixed, find_key, page_found, widened
from cute_ops.kernels.attention.cached import Cached, hide_missing
from cute_ops.kernels.attention.fwd_sm80 import AttentionFwdSm80
from cute_ops.kernels.attention.pages import copy_bytes
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.tensors import view
from cute_ops.kernels.lib.copy import fragment, load
from cute_ops.kernels.lib.matrix import folded


class AttentionCachedSm80(Cached, AttentionFwdSm80):
    """:class:`AttentionFwdSm80` of keys and values in caches; each sequence has as many as its length says.

    While a tile is computed, threads of the first warps look up the pages of the next one's keys, one key each, and
    show all threads where it lies. Elements of 16 bits are copied by ``cp.async``; float8 is loaded before products are
    computed, and converted after them.
    Shared memory: that of :class:`AttentionFwdSm80`; for two tiles the page and the slot of each key, and a bit for
    each.
    """

    @cute.jit
    def __call__(self, *arguments):
        given, stream = self._given(arguments), arguments[-1]
        mQ, mOut = view(given["q"]), view(given["out"])  # (seqlen, d, heads, batch)
        self.dtype, sizes = mQ.element_type, self._sizes(given, mQ)
        Ranges(self.tiles).launch(sizes, stream)
        keys, mLse = (given["k"], given["v"], given.get("page_table")), folded(given["lse"], own=2)
        self._launch((mQ, keys, mOut), given.get("sinks"), mLse, sizes, stream)
        self._combine(given, sizes, stream)

    def _more_shared(self, smem, keys):
        found = smem.allocate_tensor(Int32, cute.make_layout((2, self.tile_n, 2)), 16)
        marks = smem.allocate_tensor(Int32, cute.make_layout((-(-self.tile_n // WARP), 2)), 16)
        return found, marks

    def _loads(self, keys, shared, at):
        (tile, own, tidx), (sK, sV, more) = at, shared
        head = tile.head // own.heads_per_kv
        return CacheRows(keys, (head, tile.batch, own.seqlen_k), ((sK, sV), *more), tidx, self.threads)

    def _hide_missing(self, scores, there):
        hide_missing(scores, there, WARP, cute.arch.lane_idx())

    @cute.jit
    def _finish(
        self, mine: cutlass.Constexpr, sink: cutlass.Constexpr, mLse, out: cutlass.Constexpr, at: cutlass.Constexpr
    ):
        if at[1].splits == 1:
            AttentionFwdSm80._finish(self, mine, sink, mLse, out, at)
        else:
            self._store_part(mine.values, (mine.largest, mine.sums), mine.first + at[2] // 4, at)


class CacheRows(Fixed):
    """Copies of tiles of keys, 0, and of values, 1, from caches, with the methods of
    :class:`~cute_ops.kernels.attention.fwd_sm80.RowLoads`.

    Args:
        caches: of keys and of values, (pages, page size, heads, d); then the pages of each sequence, None if caches are
            contiguous.
        sequence: the head of the caches, the sequence's number, and how many keys it has.
        shared: a tile of keys and one of values; for two tiles the page and the slot of each key, (2, keys, tiles), and
            a bit for each key: whether it is there.
        tidx, threads: of the CTA.
    """

    def __init__(self, caches, sequence, shared, tidx, threads):
        *self.caches, self.table = caches
        (self.head, self.batch, self.count), (self.shared, self.found, self.marks) = sequence, shared
        self.tidx, self.threads = tidx, threads
        self.keys, self.float8 = cute.size(self.found, mode=[1]), self.caches[0].element_type.width == 8

    def begin(self, last, first):
        """Copy the last tile of keys, and wait for it and all copies before."""
        self.keep(self.look_up(last, first), Int32(0))
        cute.arch.barrier()
        self.finish(0, self.start(0, last, first, Int32(0)))
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def look_up(self, tile, first):
        """Find this thread's key of a tile; a tile before the first one has no keys."""
        count = cutlass.select_(tile >= first, self.count, Int32(0))
        return find_key(self.table, self.caches[0], self.batch, tile * self.keys + self.tidx, count)

    @cute.jit
    def keep(self, found: cutlass.Constexpr, stage):
        """Show all threads where the keys of a tile lie."""
        if self.tidx < -(-self.keys // WARP) * WARP:
            page = page_found(self.table, self.caches[0], found.entry)
            bits = cute.arch.vote_ballot_sync((page >= 0) | (self.tidx >= self.keys))
            if self.tidx % WARP == 0:
                self.marks[self.tidx // WARP, stage] = Int32(bits)
            if self.tidx < self.keys:
                self.found[0, self.tidx, stage] = page
                self.found[1, self.tidx, stage] = found.slot

    def there(self, stage):
        """Which keys of the tile are there."""
        return tuple([self.marks[i, stage] for i in range(cute.size(self.marks, mode=[0]))])

    def start(self, which, tile, first, stage):
        """Start to copy a tile, zeros where no key is; returns what :meth:`finish` converts."""
        mX, sX, loaded = self.caches[which], self.shared[which], []
        itemsize, row_bytes = mX.element_type.width // 8, sX.stride[0] * 2
        across, rows = cute.size(sX, mode=[1]) * itemsize // VECTOR_BYTES, self.keys
        start, target = mX.iterator.toint(), sX.iterator.toint()
        base = start + Int64(self.head) * mX.stride[2] * itemsize
        for i in range(-(-rows * across // self.threads)):
            index = i * self.threads + self.tidx
            inside = True if (i + 1) * self.threads <= rows * across else index < rows * across
            row, column = cutlass.min(index // across, rows - 1), index % across * VECTOR_BYTES
            page, slot = self.found[0, row, stage], self.found[1, row, stage]
            place = (Int64(page) * mX.stride[0] + Int64(slot) * mX.stride[1]) * itemsize
            source = cutlass.select_(page >= 0, base + place + column, start)
            if self.float8:
                rX = fragment(Int32, VECTOR_BYTES // 4)
                load(rX, source)
                loaded.append((rX, page >= 0, target + row * row_bytes + column * 2, inside))
            else:
                size = cutlass.select_(page >= 0, Int32(VECTOR_BYTES), Int32(0))
                _copy_inside((target + row * row_bytes + column, 0), source, size, inside)
        cute.arch.cp_async_commit_group()
        return loaded

    def finish(self, which, started):
        """Wait for copies, or convert what was loaded to 16 bits and store it."""
        if not self.float8:
            cute.arch.cp_async_wait_group(0)
        for rX, there, target, inside in started:
            words = [cutlass.select_(there, rX[i], Int32(0)) for i in range(cute.size(rX))]
            words = [each for word in words for each in widened(word, self.shared[which].element_type)]
            for half in range(2):
                rHalf = fragment(Int32, 4)
                for i in range(4):
                    rHalf[i] = words[4 * half + i]
                _store_inside(rHalf, target + half * VECTOR_BYTES, inside)


@cute.jit
def _copy_inside(target: cutlass.Constexpr, source, size, inside):
    """Start to copy 16 bytes if ``inside``."""
    if inside:
        copy_bytes(target, source, size)


@cute.jit
def _store_inside(rX, address, inside):
    place = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    if inside:
        cute.autovec_copy(rX, cute.make_tensor(place, rX.layout))
