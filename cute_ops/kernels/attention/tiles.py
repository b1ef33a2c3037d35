"""Sizes of a call of attention, places of scores, and which tiles of scores there are."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.attention.folding import Along
from cute_ops.kernels.tensor_core.sizes import WARP, RegisterBudget

REGISTERS = {2: RegisterBudget(load=24, multiply=240), 3: RegisterBudget(load=32, multiply=160)}  # by warpgroups
SHARED_BYTES, BARRIER_BYTES = 227 << 10, 1 << 10
# Of what is read again and again, what L2 holds beside what passes through.
CACHED_BYTES = 32 << 20


class Sizes(NamedTuple):
    """Sizes of a call, known at run time, and arrays that its functions read. Where sequences are packed, those of the
    call until :meth:`Tiles.placed` gives those of a tile's sequence.

    Attributes:
        captured: by number.
        ranges: tables of :mod:`ranges`, of queries and of keys; None where nothing is bounded so.
        offsets: the first token of each packed sequence and the end of the last one, of queries and of keys; or None.
        starts: the first token of a tile's sequence, of queries and of keys; None where they are not packed.
        slots: the number of its first tile among all sequences'.
        scales: of keys and values in float8, by head of the cache; None where there are none.
        keys: how many each sequence has in a cache, which has room for ``seqlen_k``; None where keys lie in no cache.
        parts: if keys may be split, the results of their parts, (rows, parts, dv), and log-sum-exps, (rows, parts).
        part: the number of the part of the keys that a CTA takes.
        read: what a change of scores reads for all tiles of a block: see :meth:`Mods.with_reads`.
        seen: what bounds say of tiles: see :meth:`Tiles.look`.
    """

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    heads_per_kv: Any
    batches: Any
    captured: Any = ()
    ranges: Any = (None, None)
    offsets: Any = None
    starts: Any = None
    slots: Any = None
    keys: Any = None
    scales: Any = (None, None)
    parts: Any = None
    part: Any = None
    read: Any = ()
    seen: Any = ()

    @property
    def lengths(self):
        """Of queries and of keys."""
        return self.seqlen_q, self.seqlen_k

    @property
    def splits(self):
        """How many parts keys have."""
        return Int32(self.parts[1].shape[1])

    @property
    def rows(self):
        """The first token of a tile's sequence and its tokens, of queries and of keys; None where these have a batch's
        number instead.
        """
        return (None, None) if self.starts is None else tuple(zip(self.starts, self.lengths))

    @property
    def first_slots(self):
        return self.slots or (0, 0)

    def of_query(self, tile, query):
        """Where numbers of rows, (batch, heads, seqlen), have that of a query."""
        if self.starts is None:
            return tile.batch, tile.head, query
        return 0, tile.head, self.starts[0] + query

    def row_of_query(self, tile, query):
        """The number of a query's row, (batch, seqlen, heads)."""
        batch, head, token = self.of_query(tile, query)
        return (Int64(batch) * self.seqlen_q + token) * self.heads + head

    @property
    def counts(self):
        """The sizes of coordinates, in float32."""
        return [*map(Float32, (self.batches, self.heads, self.seqlen_q, self.seqlen_k))]

    @property
    def shift(self):
        """What is added to a query to compare it with a key: the last one stands beside the last key."""
        return self.seqlen_k - self.seqlen_q


class Tile(NamedTuple):
    """A block of queries, or of keys, of one head."""

    block: Any
    head: Any
    batch: Any


class Place(NamedTuple):
    """The coordinates of a thread's accumulators: two rows, and columns from a first one on.

    Attributes:
        tile: batch and head, or a tuple of the heads of both rows.
        rows, start, columns: of the thread.
        keys_down: whether rows are keys and columns queries.
        sizes: of the call.
    """

    tile: Any
    rows: Any
    start: Any
    columns: Any
    keys_down: bool
    sizes: Any

    @property
    def heads_by_row(self):
        """Whether rows are of different heads."""
        return isinstance(self.tile.head, tuple)

    @property
    def shifts(self):
        """What is added to rows and to columns for their coordinates."""
        return (Int32(0), self.sizes.shift) if self.keys_down else (self.sizes.shift, Int32(0))

    @property
    def first(self):
        """The coordinate of the column from which on those of the thread are counted."""
        return Float32(self.start + self.shifts[1])

    @property
    def last_query(self):
        """The last of the thread's queries."""
        return self.start + self.columns[-1] if self.keys_down else self.rows[-1]

    def along(self, c):
        """The coordinate of a column."""
        return Along(self.first, 1.0, float(self.columns[c]))

    def numbers(self, r, c):
        """The coordinates of a score as whole numbers: batch, head, q, k."""
        row, column = self.rows[r] + self.shifts[0], self.start + self.columns[c] + self.shifts[1]
        head = self.tile.head[r] if self.heads_by_row else self.tile.head
        return self.tile.batch, head, *((column, row) if self.keys_down else (row, column))

    def each(self, down=False):
        """Of each score row and column; both as the numbers of a query and a key; and, in float32, its coordinates
        (batch, head, q, k) and their sizes. The last query stands beside the last key.

        Args:
            down: whether columns are gone through one after another, so that what is read for one is not kept.
        """
        batch, counts = Float32(self.tile.batch), self.sizes.counts
        heads = [Float32(head) for head in (self.tile.head if self.heads_by_row else [self.tile.head] * 2)]
        start, rows = self.first, [Float32(row + self.shifts[0]) for row in self.rows]
        every = [(r, c) for r in range(len(rows)) for c in range(len(self.columns))]
        for r, c in sorted(every, key=lambda at: at[::-1]) if down else every:
            across = start + Float32(self.columns[c])
            at, place = ((c, r), (across, rows[r])) if self.keys_down else ((r, c), (rows[r], across))
            yield r, c, at, (batch, heads[r], *place, *counts)


def first_row(tidx):
    """The first of a thread's two rows of accumulators; the other is 8 further down."""
    return tidx // 32 * 16 + tidx % 32 // 4


def place_of(tidx, tile, first, sizes, keys_down=False):
    """The place of a thread of warpgroups of 64 rows. ``first``: the tile's first row and column, and its columns."""
    lane, (row, column, columns) = tidx % 32, first
    row = row + first_row(tidx)
    offsets = tuple(8 * (c // 2) + c % 2 for c in range(columns // 4))
    return Place(tile, (row, row + 8), column + lane % 4 * 2, offsets, keys_down, sizes)


def sizes_of(mQ, mK, captured=(), ranges=(None, None), offsets=None):
    """The sizes of a call, of tensors (seqlen, d, heads, batch), and arrays that its functions read."""
    seqlen_q, seqlen_k, heads, kv_heads, batches = (
        Int32(cute.size(m, mode=[mode])) for m, mode in ((mQ, 0), (mK, 0), (mQ, 2), (mK, 2), (mQ, 3))
    )
    if offsets is not None:
        batches = Int32(cute.size(offsets[0])) - 1
    return Sizes(seqlen_q, seqlen_k, heads, heads // kv_heads, batches, captured, ranges, offsets)


def offsets_of(given, packed):
    """Where sequences are packed, the first two arrays, which say where they begin; else None; and the others."""
    return (tuple(given[:2]), given[2:]) if packed else (None, given)


class Tiles:
    """Tiles of ``tile_q`` queries and ``tile_k`` keys, and what a mask leaves of them."""

    def __init__(self, tile_q, tile_k, mods, looks_down=False, keys_down=None):
        """``looks_down``: whether a kernel goes through the tiles of queries of a block of keys; ``keys_down``:
        whether a thread's rows of scores are keys, as they are by default where it looks down.
        """
        self.tile_q, self.tile_k, self.mods, self.looks_down = tile_q, tile_k, mods, looks_down
        self.keys_down = looks_down if keys_down is None else keys_down

    def walk(self, index, blocks, heads, together):
        """The block, the head and the batch's head of an index: ``together`` heads first, whose operands fit into L2,
        and of these the last blocks first, which have most keys under a causal mask.
        """
        together = cutlass.min(together, heads)
        section = index // (together * blocks)
        within = index - section * together * blocks
        members = cutlass.min(together, heads - section * together)
        row = within // members
        return blocks - 1 - row, section * together + within - row * members

    def blocks(self, sizes, axis):
        """How many blocks a head has of queries, 0, or of keys, 1, and how many batches.

        The blocks of all packed sequences are in one row, of which some are empty: sequence ``i`` begins with number
        ``start // tile + i``. What follows the last sequence is one more, which attends to nothing.
        """
        tile, length = (self.tile_q, self.tile_k)[axis], sizes.lengths[axis]
        if sizes.offsets is not None:
            return length // tile + sizes.batches + 1, Int32(1)
        return cute.ceil_div(length, tile), sizes.batches

    def queries_at(self, index, sizes, bytes_of_key):
        """The block of queries with an index, and the sizes of its sequence; ``bytes_of_key``: of a key and its
        value.
        """
        blocks, batches = self.blocks(sizes, 0)
        together = self.heads_together(sizes, bytes_of_key)
        block, head = self.walk(index, blocks, sizes.heads * batches, together)
        batch = head // sizes.heads
        return self.placed(block, head - batch * sizes.heads, batch, sizes, 0)

    def heads_together(self, sizes, bytes_of_key):
        """How many heads of queries L2 holds the keys and values of."""
        of_head = Int64(sizes.seqlen_k) * bytes_of_key
        together = Int32(cutlass.max(Int64(CACHED_BYTES) // cutlass.max(of_head, 1), 1)) * sizes.heads_per_kv
        return cutlass.min(together, sizes.heads * self.blocks(sizes, 0)[1])

    def keys_at(self, index, sizes, bytes_of_query, in_turns=False):
        """The block of keys with an index, of a head of k, and the sizes of its sequence: under a causal mask the first
        ones have most queries, or fewest where blocks add in turns, so that none waits for long. ``bytes_of_query``: of
        a query and its cotangent.
        """
        of_head = Int64(sizes.seqlen_q) * sizes.heads_per_kv * bytes_of_query
        together = Int32(cutlass.max(Int64(CACHED_BYTES) // of_head, 1))
        (blocks, batches), kv_heads = self.blocks(sizes, 1), sizes.heads // sizes.heads_per_kv
        block, head = self.walk(index, blocks, kv_heads * batches, together)
        batch = head // kv_heads
        block = block if in_turns else blocks - 1 - block
        return self.placed(block, head - batch * kv_heads, batch, sizes, 1)

    def placed(self, block, head, batch, sizes, axis):
        """The tile of a block of queries, 0, or of keys, 1, and the sizes of its sequence. An empty block has nothing
        to attend to.
        """
        if sizes.keys is not None and (axis == 1 or sizes.offsets is None):
            return Tile(block, head, batch), sizes._replace(seqlen_k=keys_of(sizes, batch))
        if sizes.offsets is None:
            return Tile(block, head, batch), sizes
        tile = (self.tile_q, self.tile_k)[axis]
        number, first = self.sequence_of(block, sizes, axis)
        own = extent(sizes.offsets[axis], number, sizes.lengths[axis])
        if sizes.keys is None:
            other = extent(sizes.offsets[1 - axis], number, sizes.lengths[1 - axis])
        else:
            other = Int32(0), keys_of(sizes, number)
        block = block - cutlass.min(first, block)
        rest = number == sizes.batches
        length = Int32(cutlass.select_(rest, sizes.lengths[axis] - own[0], own[1]))
        nothing = rest | (block * tile >= length)
        others = Int32(cutlass.select_(nothing, Int32(0), other[1]))
        starts, lengths = (own[0], other[0]), (length, others)
        slots = first, other[0] // (self.tile_k, self.tile_q)[axis] + (number if sizes.keys is None else 0)
        if axis == 1:
            starts, lengths, slots = (each[::-1] for each in (starts, lengths, slots))
        own_sizes = sizes._replace(seqlen_q=lengths[0], seqlen_k=lengths[1], starts=starts, slots=slots)
        return Tile(block, head, number), own_sizes

    @cute.jit
    def sequence_of(self, block, sizes: cutlass.Constexpr, axis: cutlass.Constexpr):
        """The packed sequence that a block is of, and the number of its first block. All lanes of a warp ask for the
        same block, and each looks at another sequence.
        """
        tile, low, count = (self.tile_q, self.tile_k)[axis], Int32(0), sizes.batches
        while count > 0:  # the sequence is one of low ... low + count
            step = cute.ceil_div(count, WARP)
            number = low + (cute.arch.lane_idx() + 1) * step
            first = extent(sizes.offsets[axis], number, sizes.lengths[axis])[0] // tile + number
            begun = cute.arch.popc(cute.arch.vote_ballot_sync((number <= low + count) & (first <= block)))
            count = cutlass.min(step - 1, count - begun * step)
            low = low + begun * step
        return low, extent(sizes.offsets[axis], low, sizes.lengths[axis])[0] // tile + low

    @cute.jit
    def ascend(self, sizes: cutlass.Constexpr):
        """Whether offsets of packed sequences ascend, as far as they lie among the tokens. All lanes of a warp ask."""
        falls = Boolean(False)
        for axis in cutlass.range_constexpr(2):
            for base in cutlass.range(0, sizes.batches, WARP, unroll=1):
                number = cutlass.min(base + cute.arch.lane_idx(), sizes.batches - 1)
                starts = [extent(sizes.offsets[axis], i, sizes.lengths[axis])[0] for i in (number, number + 1)]
                falls = falls | (starts[1] < starts[0])
        return ~cute.arch.vote_any_sync(falls)

    def token_of(self, row, sizes, axis=0):
        """The token that a row of queries, 0, or of keys, 1, stands for where sequences have whole tiles, and whether
        there is one.
        """
        size = (self.tile_q, self.tile_k)[axis]
        tile, own = self.placed(row // size, Int32(0), Int32(0), sizes, axis)
        place = tile.block * size + row % size
        return own.starts[axis] + place, place < own.lengths[axis]

    def bounds(self, tile, sizes, queries, keys, rest=None, row=None):
        """What :meth:`Mods.bounds` says of a tile, or of a ``row`` of it: a key where those of the ``rest`` are."""
        q, k, tiles = queries * self.tile_q, keys * self.tile_k, (queries, keys)
        q_high = cutlass.min(q + self.tile_q, sizes.seqlen_q) - 1
        k_high = cutlass.min(k + self.tile_k, sizes.seqlen_k) - 1
        if row is not None:
            q, k, q_high, k_high, tiles = (
                (q, row, q_high, row, (queries, None)) if rest else (row, k, row, k_high, (None, keys))
            )
        return self.mods.bounds(tile, ((q, q_high), (k, k_high)), tiles, sizes, rest)

    def bounds_of_rows(self, tile, sizes, rows, keys):
        """:meth:`bounds` of some queries of a tile, the first one and how many, of a mask that reads nothing."""
        (q, count), k = rows, keys * self.tile_k
        q_high, k_high = (cutlass.min(end, size) - 1 for end, size in zip((q + count, k + self.tile_k), sizes.lengths))
        return self.mods.bounds(tile, ((q, cutlass.max(q_high, q)), (k, k_high)), (None, None), sizes)

    def some(self, tile, sizes, queries, keys):
        """Whether the mask lets a score of a tile pass, as far as its bounds tell."""
        if sizes.seen:
            return _bit_of(sizes.seen[1], queries if self.looks_down else keys)
        return Boolean(True) if self.mods.mask is None else self.bounds(tile, sizes, queries, keys)[1]

    def whole(self, tile, sizes, queries, keys, rows=None):
        """Whether no score of a tile, or of its ``rows``, is left out: by the mask, or because it lies behind the last
        key.
        """
        if sizes.seen:
            return _bit_of(sizes.seen[2], queries if self.looks_down else keys)
        inside = (keys + 1) * self.tile_k <= sizes.seqlen_k
        if self.mods.mask is None:
            return inside
        if rows is not None:
            return inside & self.bounds_of_rows(tile, sizes, rows, keys)[0]
        return inside & self.bounds(tile, sizes, queries, keys)[0]

    @property
    def has_rest(self):
        """See :meth:`Mods.has_rest`."""
        return self.mods.has_rest(self.keys_down)

    def rest_of(self, tile, sizes, queries, keys):
        """A function for the :meth:`bounds` of the rest of a mask, of a tile, or of the row that it is given; None
        without one.
        """
        if not self.has_rest:
            return None

        def rest(row=None):
            if row is None and sizes.seen:
                return _bit_of(sizes.seen[3], queries if self.looks_down else keys), None
            return self.bounds(tile, sizes, queries, keys, self.keys_down, row)

        return rest

    def nothing_seen(self):
        """What :meth:`look` is given first: nothing where it does not keep what bounds say, as they read nothing."""
        if self.mods.mask is None or self.mods.is_interval:
            return []
        return [Int32(-1)] + [Int32(0)] * (2 + self.has_rest)

    @cute.jit
    def look(self, seen, tile: cutlass.Constexpr, sizes: cutlass.Constexpr, at: cutlass.Constexpr):
        """For :attr:`Sizes.seen` the number of 32 tiles of keys among which one is, or of queries for a block of keys,
        and as bits what bounds say of each: :meth:`some`, :meth:`whole`, and whether the rest of the mask, if it has
        one, is true of all scores. So a warp looks once for all of them, each lane at another one.

        Args:
            seen: what there was before.
            at: the tile of queries and that of keys.
        """
        if const_expr(len(seen) > 0):
            number = at[not self.looks_down] // WARP
            if number != seen[0]:
                seen = self._look(number, tile, sizes, at)
        return seen

    def _look(self, number, tile, sizes, at):
        """What :meth:`look` returns for a number of 32 tiles."""
        axis, at = int(not self.looks_down), [*at]
        length, size = sizes.lengths[axis], (self.tile_q, self.tile_k)[axis]
        at[axis] = cutlass.min(number * WARP + cute.arch.lane_idx(), cute.ceil_div(length, size) - 1)
        every, some = self.bounds(tile, sizes, *at)
        found = [some, every & ((at[1] + 1) * self.tile_k <= sizes.seqlen_k)]
        if self.has_rest:
            found.append(self.bounds(tile, sizes, *at, self.keys_down)[0])
        return [number] + [Int32(cute.arch.vote_ballot_sync(each)) for each in found]

    def keys_of(self, tile, sizes):
        """The first and the last tile of keys of a block of queries; first > last if there is none."""
        count = cute.ceil_div(sizes.seqlen_k, self.tile_k)
        return self._ends(count, lambda keys: self.some(tile, sizes, tile.block, keys))

    def queries_of(self, tile, sizes):
        """The first and the last tile of queries of a block of keys; first > last if there is none."""
        count = cute.ceil_div(sizes.seqlen_q, self.tile_q)
        return self._ends(count, lambda queries: self.some(tile, sizes, queries, tile.block))

    @cute.jit
    def block_behind(self, tile: cutlass.Constexpr, sizes: cutlass.Constexpr, queries: Int32):
        """The first block of keys behind one of which the mask lets scores of a tile of queries pass; -1 if none is."""
        count, found, base = cute.ceil_div(sizes.seqlen_k, self.tile_k), Int32(-1), tile.block + 1
        while (found < 0) & (base < count):
            index = base + cute.arch.lane_idx()
            some = self.some(tile, sizes, queries, cutlass.min(index, count - 1))
            seen = cute.arch.vote_ballot_sync((index < count) & some)
            if seen != 0:
                found = base + cute.arch.popc((seen & -seen) - 1)
            base += WARP
        return cute.arch.make_warp_uniform(found)

    @cute.jit
    def _ends(self, count, some: cutlass.Constexpr):
        """The first and the last of so many tiles that the mask lets a score of pass."""
        first, last = Int32(0), count - 1
        if const_expr(self.mods.mask is not None):
            first, last = count, Int32(-1)
            for base in cutlass.range(0, count, 32, unroll=1):
                index = base + cute.arch.lane_idx()
                if index < count:
                    if some(index):
                        first, last = cutlass.min(first, index), cutlass.max(last, index)
            first, last = _over_warp(first, last)
        return cute.arch.make_warp_uniform(first), cute.arch.make_warp_uniform(last)


def _bit_of(word, number):
    """The bit of a number modulo 32."""
    return ((word >> (number % WARP)) & 1) != 0


@cute.jit
def keys_of(sizes: cutlass.Constexpr, number):
    """How many keys a sequence has in a cache: none behind the last one, at most all that there is room for."""
    found = Int32(0)
    if number < sizes.batches:
        # In 64 bits, before it is cut: a length may be any number.
        found = Int32(cutlass.max(cutlass.min(Int64(sizes.keys[number]), Int64(sizes.seqlen_k)), Int64(0)))
    return found


def extent(mOffsets, number, tokens):
    """The first token of a packed sequence and how many it has: none behind the last one, whatever offsets say."""
    last = Int32(cute.size(mOffsets)) - 1
    start, end = (
        cutlass.max(cutlass.min(mOffsets[cutlass.min(i, last)], tokens), Int32(0)) for i in (number, number + 1)
    )
    return start, cutlass.max(end - start, Int32(0))


def _over_warp(first, last):
    for offset in (16, 8, 4, 2, 1):
        first = cutlass.min(first, cute.arch.shuffle_sync_bfly(first, offset=offset))
        last = cutlass.max(last, cute.arch.shuffle_sync_bfly(last, offset=offset))
    return first, last
