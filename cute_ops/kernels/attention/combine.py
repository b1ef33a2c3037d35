"""Softmax results over parts of a row's keys, combined in a fixed order."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.registers import exp2
from cute_ops.kernels.attention.softmax import LN2
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.copy import fragment, load_if, store
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous


class Results(NamedTuple):
    """Results of parts, (rows, parts, e) and (rows, parts), their log-sum-exp of base 2; sinks of heads, or None; the
    op's outputs.
    """

    partial: Any
    partial_lse: Any
    sinks: Any
    out: Any
    lse: Any


class Combine:
    """``out = sum(2^(lse_i - lse) * out_i)`` over the parts of a row's keys.

    Tile: a CTA has a row, and each of its warps every fourth part, four columns a lane, several times where e > 128. A
    warp asks for some parts before it adds the first, because each comes from L2. Its sums are those from its first
    part to its last, and the row's those from the first warp to the last.
    Shared memory: ``warps x e`` sums.
    Bytes moved: parts, from L2, and outputs once.
    """

    warps = 4
    together = 8  # vectors that a lane asks for at once

    def __init__(self, e, pdl):
        self.e, self.pdl = e, pdl
        self.vectors = -(-e // (4 * WARP))
        self.ahead = max(self.together // self.vectors, 1)  # parts

    @cute.jit
    def __call__(self, results: cutlass.Constexpr, parts, stream):
        batches, queries, heads, _ = results.out.shape
        rows = Int32(batches) * Int32(queries) * Int32(heads)
        self.kernel(results, parts).launch(
            grid=[rows, 1, 1], block=[WARP * self.warps, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, results, parts: Int32):
        tidx, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        smem = cutlass.utils.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout((self.e, self.warps)), 16)
        sTotals = smem.allocate_tensor(Float32, cute.make_layout(self.warps), 16)
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        largest = self._largest(results, row, parts, lane)
        total = self._add(results, (row, parts, largest), (warp, lane), sSums)
        if lane == 0:
            sTotals[warp] = total
        cute.arch.barrier()
        self._store(results, (row, largest), tidx, (sSums, sTotals))

    @cute.jit
    def _largest(self, results: cutlass.Constexpr, row, parts, lane):
        """The largest log-sum-exp of a row's parts: every warp looks at all of them, four a lane at once."""
        largest = -Float32.inf
        for base in cutlass.range(0, parts, self.warps * WARP, unroll=1):
            for i in cutlass.range_constexpr(self.warps):
                largest = cute.arch.fmax(largest, self._score(results, row, base + i * WARP + lane, parts))
        for offset in (16, 8, 4, 2, 1):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
        return largest

    @cute.jit
    def _score(self, results: cutlass.Constexpr, row, part, parts):
        """The log-sum-exp of a part; -inf behind the last one."""
        score = -Float32.inf
        if part < parts:
            score = results.partial_lse[row, part]
        return score

    @cute.jit
    def _add(self, results: cutlass.Constexpr, of: cutlass.Constexpr, at: cutlass.Constexpr, sSums):
        """Sum a warp's parts, and keep the sums; returns the sum of their shares."""
        (row, parts, largest), (warp, lane) = of, at
        total = Float32(0.0)
        held = [fragment(Float32, 4, 0) for _ in range(self.vectors)]
        for base in cutlass.range(warp, parts, self.warps * WARP, unroll=1):
            share = self.share(self._score(results, row, base + lane * self.warps, parts), largest)
            total = total + share
            count = cutlass.min(cute.ceil_div(parts - base, self.warps), WARP)
            for first in cutlass.range(0, count, self.ahead, unroll=1):
                part = base + first * self.warps
                self._add_some(results, (Int64(row) * parts + part) * self.e, (share, first, lane), held)
        for i in cutlass.range_constexpr(self.vectors):
            column = (i * WARP + lane) * 4
            if column < self.e:
                place = sSums.iterator + (warp * self.e + column)
                cute.autovec_copy(held[i], cute.make_tensor(place.align(16), held[i].layout))
        for offset in (16, 8, 4, 2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        return total

    def _add_some(self, results, start, of, held):
        """Load the results of some of a warp's parts, from this element on, and add them. ``of``: the shares that lanes
        have, the first one's lane, and the thread's.
        """
        (share, first, lane), address = of, results.partial.iterator.toint()
        shares = [cute.arch.shuffle_sync(share, first + j) for j in range(self.ahead)]
        columns, loaded = [(i * WARP + lane) * 4 for i in range(self.vectors)], []
        for j, each in enumerate(shares):
            for column in columns:
                loaded.append(fragment(Float32, 4, 0))
                # A part without a key has no result.
                place = address + (start + j * self.warps * self.e + column) * 4
                load_if((each > 0.0) & (column < self.e), loaded[-1], place, True)
        for number, rX in enumerate(loaded):
            j, i = divmod(number, self.vectors)
            for c in range(4):
                held[i][c] = held[i][c] + shares[j] * rX[c]

    @cute.jit
    def _store(self, results: cutlass.Constexpr, of: cutlass.Constexpr, tidx, sums: cutlass.Constexpr):
        """Add the warps' sums up, four columns a thread, and store the row."""
        (row, largest), (sSums, sTotals), (out, lse) = of, sums, (results.out, results.lse)
        _, queries, heads, _ = (Int32(size) for size in out.shape)
        token, head, batch = row // heads % queries, row % heads, row // (heads * queries)
        total = sTotals[0]
        for warp in cutlass.range_constexpr(1, self.warps):
            total = total + sTotals[warp]
        sink = None if const_expr(results.sinks is None) else Float32(results.sinks[head])
        found, factor = self.finish(largest, total, sink)
        if tidx == 0:
            lse[batch, head, token] = found
        column = tidx * 4
        if column < self.e:
            rSum, rX, rOut = fragment(Float32, 4, 0), fragment(Float32, 4), fragment(out.element_type, 4)
            for warp in cutlass.range_constexpr(self.warps):
                place = sSums.iterator + (warp * self.e + column)
                cute.autovec_copy(cute.make_tensor(place.align(16), rX.layout), rX)
                for c in cutlass.range_constexpr(4):
                    rSum[c] = rSum[c] + rX[c]
            for c in cutlass.range_constexpr(4):
                rOut[c] = (rSum[c] * factor).to(out.element_type)
            at = Int64(batch) * out.stride[0] + Int64(token) * out.stride[1] + Int64(head) * out.stride[2]
            store(rOut, out.iterator.toint() + (at + column) * (out.element_type.width // 8))

    def share(self, score, largest):
        """``2^(score - largest)``; 0 where both are -inf, as without a key."""
        return exp2(score - cutlass.select_(largest == -Float32.inf, Float32(0.0), largest))

    def of_part(self, largest, total):
        """The log-sum-exp of base 2 of a part, -inf without a key, and the factor of its sum of values."""
        inverse = cute.arch.rcp_approx(cutlass.select_(total == 0.0, Float32.inf, total))
        return largest + cute.math.log2(total, fastmath=True), inverse

    def finish(self, largest, total, sink):
        """The log-sum-exp of a row, and the factor of its sum of values. ``sink``: one more score of the row, without a
        value; or None.
        """
        share = Float32(1.0)
        if sink is not None:
            score = sink * Float32(LOG2_E)
            highest = cute.arch.fmax(largest, score)
            # Without a key and a sink: -inf less -inf would be NaN.
            shift = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
            share = exp2(largest - shift)
            total, largest = total * share + exp2(score - shift), shift
        lse, factor = self.of_part(largest, total)
        return lse * Float32(LN2), share * factor


def store_pairs(values, r, factor, address, dtype):
    """Store a row's sums of values times a factor, a pair of columns at a time; a thread's pairs are 8 columns apart.

    Args:
        values: a thread's accumulators by row.
        r: which of its rows.
        factor: of the row.
        address: of the first pair, in bytes.
        dtype: of the memory.
    """
    rOut = fragment(dtype, 2)
    for c in range(cute.size(values, mode=[1]) // 2):
        for j in range(2):
            rOut[j] = (values[r, 2 * c + j] * factor).to(dtype)
        store(rOut, address + c * dtype.width)
