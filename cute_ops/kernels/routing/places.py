"""Places of numbers in the order of their classes, by counting: see :mod:`cute_ops.ops.routing.places`."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load, store_if
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import extent, row_address
from cute_ops.kernels.routing.config import QUAD, PlacesConfig


class ClassPlaces:
    """``place[i]``: how many numbers come before the i-th in a stable sort by class, and where each class ends.

    Two launches of ``ctas`` CTAs, of which each has an equal share of consecutive numbers. The first counts the
    classes in each share. In the second a CTA adds up the counts of all shares and of those before its own, and a warp
    walks its part of the share, 32 numbers at a time: ballots on the bits of the class tell which lanes have equal
    classes. Numbers that are no class come after all others.
    Shared memory: 12 bytes per class, and 4 more for each warp.
    Bytes moved per number: index twice, place once; the counts once for each CTA, from L2.
    """

    def __init__(self, variant):
        self.variant, self.keys, self.config = variant, variant.tensors, PlacesConfig(**variant.config)
        self.k, self.classes = variant.dims["k"], variant.attrs["classes"]
        self.bins = self.classes + 1
        self.quads, self.chunks = -(-self.bins // QUAD), -(-self.bins // WARP)
        self.threads, self.warps = self.config.threads, self.config.threads // WARP
        self.groups = self.threads // self.quads
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mIndex, mPlace, mEnds, mCounts, stream):
        launch = {
            "grid": [self.config.ctas, 1, 1], "block": [self.threads, 1, 1], "stream": stream, "use_pdl": self.pdl,
        }  # fmt: skip
        self.count(mIndex, mCounts).launch(**launch)
        self.order(mIndex, mPlace, mEnds, mCounts).launch(**launch)

    def _share(self, parts, part, begin, end):
        """The part with this number, if the numbers from ``begin`` to before ``end`` are cut into equal ``parts``."""
        size = (end - begin + (parts - 1)) // parts
        first = cutlass.min(begin + part * size, end)
        return first, cutlass.min(first + size, end)

    def _own(self, mIndex):
        """This CTA's share of the numbers: the first one, and the one after the last."""
        total = Int32(extent(mIndex, 0)) * self.k
        return self._share(self.config.ctas, cute.arch.block_idx()[0], Int32(0), total)

    def _bin(self, mIndex, i):
        row = i // self.k
        address = row_address(mIndex, self.keys["index"], Int64(row), self.k)
        found = gmem_elements(mIndex.element_type, address, self.k)[i - row * self.k]
        inside = (found >= 0) & (found < self.classes)
        return Int32(cutlass.select_(inside, Int32(found), Int32(self.classes)))

    @cute.kernel
    def count(self, mIndex, mCounts):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = cutlass.utils.SmemAllocator()
        sCount = smem.allocate_tensor(Int32, cute.make_layout(self.bins), byte_alignment=16)
        for e in cutlass.range(tidx, self.bins, self.threads, unroll=1):
            sCount[e] = Int32(0)
        cute.arch.sync_threads()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        first, end = self._own(mIndex)
        for i in cutlass.range(first + tidx, end, self.threads, unroll=4):
            cute.arch.atomic_add(sCount.iterator + self._bin(mIndex, i), Int32(1))
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, self.bins, self.threads, unroll=1):
            mCounts[cta, e] = sCount[e]

    @cute.kernel
    def order(self, mIndex, mPlace, mEnds, mCounts):
        tidx, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = tidx // WARP, tidx % WARP
        smem = cutlass.utils.SmemAllocator()
        sTotal = smem.allocate_tensor(Int32, cute.make_layout(self.bins), byte_alignment=16)
        sStart = smem.allocate_tensor(Int32, cute.make_layout(self.chunks * WARP), byte_alignment=16)
        sChunk = smem.allocate_tensor(Int32, cute.make_layout(self.chunks), byte_alignment=16)
        sBefore = smem.allocate_tensor(Int32, cute.make_layout(self.bins), byte_alignment=16)
        layout = cute.make_layout((self.bins + 1, self.warps))  # the last one of lanes without a number
        sNext = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        for e in cutlass.range(tidx, self.bins, self.threads, unroll=1):
            sTotal[e] = Int32(0)
            sBefore[e] = Int32(0)
            for w in cutlass.range_constexpr(self.warps):
                sNext[e, w] = Int32(0)
        cute.arch.sync_threads()
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        first, end = self._own(mIndex)
        first, end = self._share(self.warps, warp, first, end)
        for i in cutlass.range(first + lane, end, WARP, unroll=4):
            cute.arch.atomic_add(sNext[None, warp].iterator + self._bin(mIndex, i), Int32(1))
        self._add_shares(mCounts, sTotal, sBefore, cta)
        cute.arch.sync_threads()
        for chunk in cutlass.range(warp, self.chunks, self.warps, unroll=1):
            self._start_chunk(sTotal, sStart, sChunk, chunk, lane)
        cute.arch.sync_threads()
        for e in cutlass.range(tidx, self.bins, self.threads, unroll=1):
            start = sStart[e]
            for chunk in cutlass.range(e // WARP, unroll=1):
                start += sChunk[chunk]
            self._place_bin(mEnds, sBefore, sNext, (e, start, sTotal[e]), cta)
        cute.arch.sync_threads()
        steps = (end - first + (WARP - 1)) // WARP
        for step in cutlass.range(steps, unroll=1):
            self._place(mIndex, mPlace, sNext[None, warp], first + step * WARP, end, lane)

    @cute.jit
    def _add_shares(self, mCounts: cute.Tensor, sTotal: cute.Tensor, sBefore: cute.Tensor, cta: Int32):
        """Add up the counts of all shares and of those before this CTA's: a thread those of four classes in every
        ``groups``-th share.
        """
        tidx = cute.arch.thread_idx()[0]
        group, e = tidx // self.quads, tidx % self.quads * QUAD
        if group < self.groups:
            rTotal, rBefore = fragment(Int32, QUAD, 0), fragment(Int32, QUAD, 0)
            for row in cutlass.range(group, self.config.ctas, self.groups, unroll=8):
                rFound = fragment(Int32, QUAD)
                load(rFound, mCounts.iterator.toint() + (row * self.quads * QUAD + e) * 4)
                for j in cutlass.range_constexpr(QUAD):
                    rTotal[j] = rTotal[j] + rFound[j]
                    rBefore[j] = rBefore[j] + Int32(cutlass.select_(row < cta, rFound[j], Int32(0)))
            for j in cutlass.range_constexpr(QUAD):
                if e + j < self.bins:
                    cute.arch.atomic_add(sTotal.iterator + (e + j), rTotal[j])
                    cute.arch.atomic_add(sBefore.iterator + (e + j), rBefore[j])

    @cute.jit
    def _start_chunk(self, sTotal: cute.Tensor, sStart: cute.Tensor, sChunk: cute.Tensor, chunk: Int32, lane: Int32):
        """Add up a warp's classes: those before each, and all."""
        e = chunk * WARP + lane
        own = Int32(0)
        if e < self.bins:
            own = sTotal[e]
        total = own
        for step in cutlass.range_constexpr(WARP.bit_length() - 1):
            below = cute.arch.shuffle_sync(total, (lane - (1 << step)) & (WARP - 1))
            total = total + Int32(cutlass.select_(lane >= 1 << step, below, Int32(0)))
        sStart[e] = total - own
        if lane == WARP - 1:
            sChunk[chunk] = total

    @cute.jit
    def _place_bin(self, mEnds, sBefore: cute.Tensor, sNext: cute.Tensor, known: cutlass.Constexpr, cta: Int32):
        """Find a class's first place for each warp of this CTA, and write where the class ends."""
        e, start, total = known
        if (cta == 0) & (e < self.classes):
            mEnds[e] = start + total
        start += sBefore[e]
        for w in cutlass.range_constexpr(self.warps):
            found = sNext[e, w]
            sNext[e, w] = start
            start += found

    @cute.jit
    def _place(self, mIndex, mPlace, sNext: cute.Tensor, first: Int32, end: Int32, lane: Int32):
        """Write the places of the next numbers, one to a lane."""
        i = first + lane
        here = i < end
        own = self._bin(mIndex, cutlass.min(i, end - 1))
        own = Int32(cutlass.select_(here, own, Int32(self.bins)))
        same = Int32(-1)
        for bit in cutlass.range_constexpr(self.bins.bit_length()):
            ones = Int32(cute.arch.vote_ballot_sync(Boolean(((own >> bit) & 1) != 0)))
            same = same & Int32(cutlass.select_(((own >> bit) & 1) != 0, ones, ~ones))
        before = cute.arch.popc(same & ((Int32(1) << lane) - 1))
        place = sNext[own] + before
        row = i // self.k
        address = row_address(mPlace, self.keys["place"], Int64(row), self.k) + Int64(i - row * self.k) * 4
        store_if(here, _one(place), address)
        cute.arch.sync_warp()
        if here & (before + 1 == cute.arch.popc(same)):
            sNext[own] = place + 1
        cute.arch.sync_warp()


def _one(number):
    rX = fragment(Int32, 1)
    rX[0] = number
    return rX
