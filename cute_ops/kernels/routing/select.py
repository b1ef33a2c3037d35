"""The largest numbers of long rows, or many of them, by a bound from below: see :mod:`cute_ops.ops.routing.topk`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.copy import compiler_barrier, fragment, gmem_elements, load_if
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, row_address, row_count
from cute_ops.kernels.routing.config import SEGMENT
from cute_ops.kernels.routing.keys import LAST, LEAST, NONE, NONES, column, integers, key, key_type, numbers, order
from cute_ops.kernels.routing.results import names_of

# Candidates that are ranked. More are left only where very many numbers are nearly equal.
ROOM = 1024
# Groups of which the least maximum is a bound; of more, it would be reached by too many.
MOST_GROUPS = 16
# Upper bits of an integer that the first bound is exact to.
BOUND_BITS = 18
BITS = 32


class SelectedTopK:
    """The k largest of every segment of a row, in order.

    The least of the maxima of k groups of columns, or the k-th largest of those of more groups, is a bound of the k-th
    largest number from below, which few other numbers reach: those are collected, and each counts how many are larger
    than itself, which is its place. Where more than ``ROOM`` reach it, the k-th largest key is searched for bit by bit.
    Tile: a CTA per segment, which holds it in registers.
    Shared memory: 4 bytes per group; the keys of ``ROOM`` candidates.
    Bytes moved per element: x once; k values and indices per segment.
    """

    def __init__(self, variant, config):
        self.variant, self.k = variant, variant.attrs["k"]
        self.n = variant.dims["n"]
        tensor = variant.tensors["x"]
        self.vec = 1
        while 2 * self.vec * tensor.itemsize <= min(tensor.align, tensor.row_align, VECTOR_BYTES) and (
            self.n % (2 * self.vec) == 0
        ):
            self.vec *= 2
        self.threads, self.warps = config.threads, config.threads // WARP
        self.columns = min(self.n, SEGMENT)
        self.segments = -(-self.n // SEGMENT)
        self.per_thread = -(-self.columns // (self.threads * self.vec))
        self.groups = config.groups // self.threads
        # Lanes of a group, where there are as many groups as numbers are asked for, or up to twice as many.
        self.lanes = next((g for g in (WARP, 16, 8) if self.threads // g >= self.k <= MOST_GROUPS), 0)
        # Whether the last segment may have fewer columns than are asked for.
        self.short = self.n % SEGMENT != 0 and self.n % SEGMENT < self.k
        self.resident = config.resident
        self.kind = key_type(tensor.itemsize)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mX, mIndex, mValues, mFound, stream):
        self.kernel(mX, mIndex, mValues, mFound).launch(
            grid=[Int32(row_count(mX)), self.segments, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=SMEM_PERCENT,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mX, mIndex, mValues, mFound):
        t, _, _ = cute.arch.thread_idx()
        bidx, segment, _ = cute.arch.block_idx()
        row, start = Int64(bidx), segment * SEGMENT
        dtype, size = mX.element_type, mX.element_type.width // 8
        smem = cutlass.utils.SmemAllocator()
        sTop = smem.allocate_tensor(Int32, cute.make_layout(self.groups * self.threads), byte_alignment=16)
        sSum = smem.allocate_tensor(Int32, cute.make_layout(2 * WARP), byte_alignment=16)
        sKey = smem.allocate_tensor(self.kind, cute.make_layout(ROOM), byte_alignment=16)
        # The bound, the columns of numbers that are equal to it, and how many candidates there are.
        sFound = smem.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
        wait_for_previous(self.pdl)
        words = self._load(mX, row, start + t * self.vec)
        let_next_start(self.pdl)
        top = self._tops(words, dtype, sTop, t)
        if t == 0:
            sFound[1] = sFound[2] = Int32(0)
        cute.arch.sync_threads()
        bound = self._bound(sTop, sFound, t)
        gX = gmem_elements(dtype, row_address(mX, self.variant.tensors["x"], row, self.n) + Int64(start) * size, self.n)
        self._collect(words, gX, t, sKey, sFound, (top, bound, None))
        cute.arch.sync_threads()
        count = sFound[2]
        if count > ROOM:
            self._search(words, dtype, t, sSum, sFound)
            self._collect(words, gX, t, sKey, sFound, (top, sFound[0], sFound[1]))
            cute.arch.sync_threads()
            count = sFound[2]
        self._rank(sKey, count, t, (mX, mIndex, mValues, mFound), row, segment)

    def _load(self, mX, row, first):
        """A thread's numbers as words of integers."""
        address, words = row_address(mX, self.variant.tensors["x"], row, self.n), []
        step, size = self.threads * self.vec, mX.element_type.width // 8
        vectors = [fragment(mX.element_type, self.vec) for _ in range(self.per_thread)]
        for k, rX in enumerate(vectors):
            load_if(first + k * step < self.n, rX, address + Int64(first + k * step) * size)
        none = NONE if mX.element_type.width == 32 else NONES
        for k, rX in enumerate(vectors):
            rWords = order(rX)
            for i in range(cute.size(rWords)):
                rWords[i] = Int32(cutlass.select_(first + k * step < self.n, rWords[i], Int32(none)))
            words.append(rWords)
        return words

    def _column(self, i, t):
        """The column in its segment of a thread's i-th number."""
        return (i // self.vec * self.threads + t) * self.vec + i % self.vec

    def _tops(self, words, dtype, sTop, t):
        """Share the largest number of each group; a thread's own largest one is returned."""
        found = self._integers(words, dtype)
        if self.lanes:
            top = _largest(found)
            best = cute.arch.warp_reduction(top, cutlass.max, threads_in_group=self.lanes)
            sTop[t // self.lanes] = best
            return top
        each = -(-len(found) // self.groups)
        tops = [_largest(found[g * each : (g + 1) * each]) for g in range(self.groups)]
        for g, top in enumerate(tops):
            sTop[g * self.threads + t] = top
        return _largest(tops)

    def _bound(self, sTop, sFound, t):
        """A number that at least k reach: the least of the groups' maxima where these are few."""
        if self.lanes:
            bound = sTop[0]
            for i in range(1, self.threads // self.lanes):
                bound = cutlass.min(bound, sTop[i])
            return cutlass.max(bound, Int32(NONE + 1))
        self._search_tops(sTop, sFound, t)
        cute.arch.sync_threads()
        return sFound[0]

    @cute.jit
    def _search_tops(self, sTop: cute.Tensor, sFound: cute.Tensor, t: Int32):
        """The k-th largest of the groups' maxima, rounded down, by the first warp."""
        if t < WARP:
            tops = [sTop[i * WARP + t] for i in range(self.groups * self.warps)]
            bound = Int32(LEAST)
            for i in cutlass.range(BOUND_BITS, unroll=1):
                above = bound + (Int32(1) << (BITS - 1 - i))
                count = cute.arch.warp_redux_sync(_count([each >= above for each in tops]), "add")
                bound = Int32(cutlass.select_(count >= self.k, above, bound))
            if t == 0:
                sFound[0] = cutlass.max(bound, Int32(NONE + 1))

    @cute.jit
    def _collect(
        self, words: cutlass.Constexpr, gX: cute.Tensor, t: Int32, sKey: cute.Tensor, sFound: cute.Tensor,
        limits: cutlass.Constexpr,
    ):  # fmt: skip
        """The keys of the numbers that reach a bound; where there is an end of columns, of those that are equal to it
        only what is before. ``limits``: the thread's largest number, the bound and the end.

        A thread notes which of its numbers these are, bit by bit, and loads them again, since their registers have no
        numbers at run time.
        """
        top, bound, end = limits
        if top >= bound:
            found = self._integers(words, gX.element_type)
            left = _bits([each >= bound for each in found])
            if const_expr(end is not None):
                left = _bits([each > bound for each in found])
                equal, before = _bits([each == bound for each in found]), self._before(end, t)
                left = [one | (two & three) for one, two, three in zip(left, equal, before)]
            for w in cutlass.range_constexpr(len(left)):
                word = left[w]
                for _ in cutlass.range(cute.arch.popc(word), unroll=1):
                    column = self._column(w * BITS + cute.arch.popc((word & -word) - 1), t)
                    word = word & (word - 1)
                    rX = fragment(gX.element_type, 1)
                    rX[0] = gX[column]
                    place = cute.arch.atomic_add(sFound.iterator + 2, Int32(1))
                    if place < ROOM:
                        sKey[place] = key(integers(order(rX), gX.element_type, 1)[0], LAST - column, self.kind)

    def _integers(self, words, dtype):
        """A thread's numbers as integers, no earlier than here: until then two of 16 bits share a register."""
        for rWords in words:
            compiler_barrier(rWords)
        return [each for rWords in words for each in integers(rWords, dtype, self.vec)]

    def _before(self, end, t):
        """Words of bits, one for each of a thread's numbers: whether its column is before an end."""
        across = self.threads * self.vec
        rest = cutlass.min(cutlass.max(end % across - t * self.vec, Int32(0)), Int32(self.vec))
        count, words = end // across * self.vec + rest, -(-self.per_thread * self.vec // BITS)
        counts = [cutlass.max(count - w * BITS, Int32(0)) for w in range(words)]
        return [Int32(cutlass.select_(n < BITS, (Int32(1) << (n & (BITS - 1))) - 1, Int32(-1))) for n in counts]

    @cute.jit
    def _search(
        self, words: cutlass.Constexpr, dtype: cutlass.Constexpr, t: Int32, sSum: cute.Tensor, sFound: cute.Tensor
    ):
        """The k-th largest number, and the end of the columns of those equal to it that are among the k first."""
        bound, end = Int32(LEAST), Int32(0)
        found = self._integers(words, dtype)
        for i in cutlass.range(BITS, unroll=1):
            above = bound + (Int32(1) << (BITS - 1 - i))
            count = self._total(_count([each >= above for each in found]), sSum, i)
            bound = Int32(cutlass.select_(count >= self.k, above, bound))
        found = self._integers(words, dtype)
        larger = self._total(_count([each > bound for each in found]), sSum, Int32(0))
        equal = _bits([each == bound for each in found])
        for i in cutlass.range(SEGMENT.bit_length(), unroll=1):
            further = end + (Int32(1) << (SEGMENT.bit_length() - 1 - i))
            both = [cute.arch.popc(one & two) for one, two in zip(equal, self._before(further, t))]
            count = self._total(sum(both[1:], both[0]), sSum, i + 1)
            end = Int32(cutlass.select_(larger + count < self.k, further, end))
        if t == 0:
            sFound[0], sFound[1], sFound[2] = bound, end + 1, Int32(0)
        cute.arch.sync_threads()

    def _total(self, count, sSum, step):
        """The sum over a CTA; successive steps take turns at two places."""
        t, _, _ = cute.arch.thread_idx()
        count = cute.arch.warp_redux_sync(count, "add")
        sSum[(step & 1) * WARP + t // WARP] = count
        cute.arch.sync_threads()
        total = sSum[(step & 1) * WARP]
        for i in range(1, self.warps):
            total = total + sSum[(step & 1) * WARP + i]
        return total

    @cute.jit
    def _rank(self, sKey, count, t, tensors, row, segment):
        """Store each candidate at its place, if that is among the first k."""
        mX, mIndex, mValues, mFound = tensors
        gValues = self._place(mValues, "values", row, segment)
        gFound = self._place(mFound, "found", row, segment)
        for i in range(t, count, self.threads):
            mine, place = sKey[i], Int32(0)
            for j in cutlass.range(count, unroll=4):
                place = place + Int32(cutlass.select_(sKey[j] > mine, Int32(1), Int32(0)))
            if place < self.k:
                gValues[place] = numbers([mine], mX.element_type)[0]
                gFound[place] = names_of(mIndex, self.variant, row, [segment * SEGMENT + column(mine)])[0]
        if const_expr(self.short):
            for i in range(count + t, self.k, self.threads):
                gValues[i] = mX.element_type(-mX.element_type.inf)
                gFound[i] = Int32(-1)

    def _place(self, mOut, name, row, segment):
        """The results of a segment."""
        address = row_address(mOut, self.variant.tensors[name], row, self.segments * self.k)
        address = address + Int64(segment) * (self.k * (mOut.element_type.width // 8))
        return gmem_elements(mOut.element_type, address, self.k)


def _largest(found):
    top = Int32(NONE)
    for integer in found:
        top = cutlass.max(top, integer)
    return top


def _bits(conditions):
    """Words whose bits say which conditions hold."""
    words = []
    for start in range(0, len(conditions), BITS):
        word = Int32(0)
        for i, each in enumerate(conditions[start : start + BITS]):
            bit = (1 << i) - (1 << BITS if i == BITS - 1 else 0)
            word = word | Int32(cutlass.select_(each, Int32(bit), Int32(0)))
        words.append(word)
    return words


def _count(conditions):
    """How many of a thread's conditions hold."""
    total = Int32(0)
    for each in conditions:
        total = total + Int32(cutlass.select_(each, Int32(1), Int32(0)))
    return total
