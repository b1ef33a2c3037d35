"""Which tiles of scores read the same elements of an array, and sums of what belongs to each element."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.attention.registers import by_row
from cute_ops.kernels.attention.sums import elements_of
from cute_ops.kernels.attention.tiles import Sizes, Tile, Tiles
from cute_ops.kernels.attention.weights import Weights
from cute_ops.kernels.lib.copy import fragment, gmem_elements, store
from cute_ops.kernels.tensor_core.sizes import WARP

THREADS = 256  # of a CTA that adds parts up


class SumsOfReads:
    """Base of the kernels by warps and by warpgroups that sum the gradient of a read.

    A CTA has a set of tiles of scores, of ``block`` queries and ``tile_k`` keys, that read the same elements in the
    same places: those of all batches, or heads, where these read the same; along a diagonal, where elements are read by
    distance; in a row or a column, or all. It adds them up in registers, then what of the tile's sum belongs to one
    element, always in the same order. Several CTAs may have parts of a set, which a second kernel adds up. A subclass
    has ``start``, which launches the first one, and ``threads`` that have sums.
    """

    def __init__(self, config, d, dv, mods, scale):
        self.d, self.dv, self.mods, self.block = d, dv, mods, config.block
        self.weights = Weights(mods, scale)
        self.tile_k, self.stages, self.share = config.tile_k, config.key_stages, config.share
        self.by_batch, self.by_head = config.by_batch, config.by_head
        self.tiles, self.ratio = Tiles(self.block, self.tile_k, mods), self.block // self.tile_k

    @property
    def pitch(self):
        """Numbers of a tile that a CTA writes as a part."""
        lengths = {"distance": self.block + self.tile_k, "query": self.block}
        return lengths.get(self.share, self.tile_k)

    @cute.jit
    def launch(
        self, inputs: cutlass.Constexpr, rows: cutlass.Constexpr, found: cutlass.Constexpr, sizes: cutlass.Constexpr,
        stream,
    ):  # fmt: skip
        self.dtype, (mSums, mParts) = inputs[0].element_type, found
        units, parts = self.heads(sizes) * self.places(sizes), Int32(mParts.shape[0])
        self.start(inputs, rows, found, sizes, units * parts, stream)
        if const_expr(self.share != "score"):
            self._finish(mSums, mParts, sizes, stream)
        elif parts > 1:
            self._finish(mSums, mParts, sizes, stream)

    @cute.jit
    def _finish(self, mSums, mParts, sizes: cutlass.Constexpr, stream):
        threads = elements_of(mSums) * (WARP if self.share == "all" else 1)
        self.add_parts(mSums, mParts, tuple(sizes)).launch(
            grid=[Int32((threads + (THREADS - 1)) // THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    def counts(self, sizes):
        """Blocks of queries and tiles of keys of a head."""
        return cute.ceil_div(sizes.seqlen_q, self.block), cute.ceil_div(sizes.seqlen_k, self.tile_k)

    def heads(self, sizes):
        """Heads of all batches that read different elements."""
        return (sizes.batches if self.by_batch else 1) * (sizes.heads if self.by_head else 1)

    def places(self, sizes):
        """How many sets of tiles of a head read different elements."""
        queries, keys = self.counts(sizes)
        if self.share == "score":
            return queries * keys
        if self.share == "distance":
            return self.ratio * (queries - 1) + keys
        return {"query": queries, "key": keys}.get(self.share, Int32(1))

    def diagonal(self, place, sizes):
        """The first tile of a diagonal, a block of queries and a tile of keys, and how many it has: the difference of
        ``ratio`` times a block's number and that of its keys is the same.
        """
        queries, keys = self.counts(sizes)
        number = place - (keys - 1)
        first = cutlass.max(cute.ceil_div(number + self.ratio * keys, self.ratio) - keys, 0)
        last = cutlass.min((number + keys - 1) // self.ratio, queries - 1)
        return first, self.ratio * first - number, cutlass.max(last - first + 1, 0)

    def tiles_of(self, place, sizes):
        """How many tiles of a head are a set."""
        queries, keys = self.counts(sizes)
        if self.share == "distance":
            return self.diagonal(place, sizes)[2]
        return {"query": keys, "key": queries, "all": queries * keys}.get(self.share, Int32(1))

    def tile_at(self, unit, step, sizes):
        """The block of queries of a CTA's step, its head and batch, and the tile of keys."""
        places = self.places(sizes)
        which, place = unit // places, unit % places
        count = cutlass.max(self.tiles_of(place, sizes), 1)
        block, of_keys = self._tile_of_set(place, step % count, sizes)
        head, batch = self._example(which, step // count, sizes)
        return Tile(block, head, batch), of_keys

    def _tile_of_set(self, place, index, sizes):
        """The block of queries and the tile of keys of a tile of a set."""
        keys = self.counts(sizes)[1]
        if self.share == "distance":
            block, of_keys, _ = self.diagonal(place, sizes)
            return block + index, of_keys + self.ratio * index
        number = {"score": place, "all": index}.get(self.share)
        if number is not None:
            return number // keys, number % keys
        return (place, index) if self.share == "query" else (index, place)

    def _example(self, which, rest, sizes):
        """The head and the batch of a step, from the numbers of what reads different elements and the same."""
        if self.by_head:
            return which % sizes.heads, which // sizes.heads if self.by_batch else rest
        return rest % sizes.heads, which if self.by_batch else rest // sizes.heads

    def own_steps(self, mParts, sizes):
        """The number of a CTA's set of tiles, that of its part, and the first and the last of its steps."""
        cta, units, parts = cute.arch.block_idx()[0], self.heads(sizes) * self.places(sizes), Int32(mParts.shape[0])
        unit, part = cta % units, cta // units
        repeats = (1 if self.by_batch else sizes.batches) * (1 if self.by_head else sizes.heads)
        steps = self.tiles_of(unit % self.places(sizes), sizes) * repeats
        each = cute.ceil_div(steps, parts)
        return unit, part, (part * each, cutlass.min((part + 1) * each, steps) - 1)

    def meet(self):
        """Wait for the threads that have sums."""
        cute.arch.barrier()

    @cute.jit
    def write(
        self, rSum, place: cutlass.Constexpr, at: cutlass.Constexpr, shared, found: cutlass.Constexpr,
        sizes: cutlass.Constexpr,
    ):  # fmt: skip
        """Write what a CTA's tiles add up to.

        Args:
            rSum: a thread's part.
            place: of the thread in a tile.
            at: the numbers of the set of tiles, of the part, and of the thread.
            shared: an address in shared memory whose numbers have been read by all threads, or will be when they meet.
            found: the sums, and the parts.
        """
        (unit, part, tidx), (mSums, mParts) = at, found
        if const_expr(self.share == "score"):
            self._store_tile(rSum, place, (unit, part, Int32(mParts.shape[0])), mSums, mParts, sizes)
        else:
            start = cute.make_ptr(Float32, shared, cute.AddressSpace.smem, assumed_align=16)
            layout = cute.make_layout((self.block, self.tile_k), stride=(self.tile_k + 1, 1))
            number = part * (self.heads(sizes) * self.places(sizes)) + unit
            self._store_part(rSum, place, cute.make_tensor(start, layout), mParts, (number, tidx))

    @cute.jit
    def _store_tile(
        self, rSum, place: cutlass.Constexpr, at: cutlass.Constexpr, mSums, mParts, sizes: cutlass.Constexpr
    ):
        """Write a tile of scores to the sums, or to one of several parts of them."""
        unit, part, parts = at
        places, (_, keys) = self.places(sizes), self.counts(sizes)
        which, index = unit // places, unit % places
        of_head = Int64(sizes.seqlen_q) * sizes.seqlen_k
        start, number = mSums.iterator.toint(), Int64(which)
        if parts > 1:
            start, number = mParts.iterator.toint(), Int64(part) * self.heads(sizes) + which
        sums, column = by_row(rSum), index % keys * self.tile_k + place.start
        for r in cutlass.range_constexpr(2):
            row = index // keys * self.block + place.rows[r]
            address = start + (number * of_head + Int64(row) * sizes.seqlen_k + column) * 4
            if row < sizes.seqlen_q:
                if (sizes.seqlen_k % 2 == 0) & (start % 8 == 0):
                    rX = fragment(Float32, 2)
                    for c in cutlass.range_constexpr(0, len(place.columns), 2):
                        if column + place.columns[c] < sizes.seqlen_k:
                            rX[0], rX[1] = sums[r, c], sums[r, c + 1]
                            store(rX, address + place.columns[c] * 4)
                else:
                    for c in cutlass.range_constexpr(len(place.columns)):
                        if column + place.columns[c] < sizes.seqlen_k:
                            gmem_elements(Float32, address + place.columns[c] * 4, 1)[0] = sums[r, c]

    @cute.jit
    def _store_part(self, rSum, place: cutlass.Constexpr, sSum, mParts, at: cutlass.Constexpr):
        """Add up what of a tile of sums belongs to one element, and write these as a part."""
        (number, tidx), sums = at, by_row(rSum)
        self.meet()
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(len(place.columns)):
                sSum[place.rows[r], place.start + place.columns[c]] = sums[r, c]
        self.meet()
        gX = gmem_elements(Float32, mParts.iterator.toint() + Int64(number) * (self.pitch * 4), self.pitch)
        for i in cutlass.range(tidx, self.pitch, self.threads, unroll=1):
            total = Float32(0.0)
            if const_expr(self.share == "distance"):  # row - column = i - (tile_k - 1)
                shift = i - (self.tile_k - 1)
                first, last = cutlass.max(-shift, 0), cutlass.min(self.block - shift, self.tile_k)
                for c in cutlass.range(first, last, unroll=4):
                    total += sSum[c + shift, c]
            elif const_expr(self.share == "query"):
                for c in cutlass.range(self.tile_k, unroll=4):
                    total += sSum[i, c]
            else:
                for r in cutlass.range(self.block, unroll=4):
                    total += sSum[r, i]
            gX[i] = total

    @cute.kernel
    def add_parts(self, mSums, mParts, sizes):
        """Each thread adds up an element, or each warp where all scores of a head share it."""
        sizes, thread = Sizes(*sizes), Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        number, lane = (thread // WARP, thread % WARP) if const_expr(self.share == "all") else (thread, Int64(0))
        total = self._total(cutlass.min(number, elements_of(mSums) - 1), lane, mParts, sizes)
        if const_expr(self.share == "all"):
            for offset in (16, 8, 4, 2, 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
        if (lane == 0) & (number < elements_of(mSums)):
            gmem_elements(Float32, mSums.iterator.toint() + number * 4, 1)[0] = total

    @cute.jit
    def _total(self, number, lane, mParts, sizes: cutlass.Constexpr):
        parts, start, total = Int32(mParts.shape[0]), mParts.iterator.toint(), Float32(0.0)
        heads, places = self.heads(sizes), self.places(sizes)
        if const_expr(self.share == "score"):
            of_part = Int64(heads) * sizes.seqlen_q * sizes.seqlen_k
            for part in cutlass.range(parts, unroll=4):
                total += gmem_elements(Float32, start + (part * of_part + number) * 4, 1)[0]
        else:
            lengths = {"query": sizes.seqlen_q, "key": sizes.seqlen_k, "all": Int32(1)}
            length = lengths.get(self.share, sizes.seqlen_q + sizes.seqlen_k - 1)
            which, x = Int32(number // length), Int32(number % length)
            for i in cutlass.range_constexpr(self.ratio + 1 if self.share == "distance" else 1):
                # Neighbouring diagonals of tiles share distances.
                place, slot = x // self.pitch, x % self.pitch
                if const_expr(self.share == "distance"):
                    tiles = self.counts(sizes)[1]
                    shift = x - (sizes.seqlen_k - 1) + (tiles * self.tile_k - 1)
                    place = shift // self.tile_k - i
                    slot = shift - place * self.tile_k
                inside = (place >= 0) & (place < places) & (slot < self.pitch)
                for part in cutlass.range(parts, unroll=4):
                    at = (Int64(part) * heads * places + which * places + place) * self.pitch
                    if const_expr(self.share == "all"):
                        for j in cutlass.range_constexpr(self.tile_k // WARP):
                            total += gmem_elements(Float32, start + (at + lane + j * WARP) * 4, 1)[0]
                    elif inside:
                        total += gmem_elements(Float32, start + (at + slot) * 4, 1)[0]
        return total
