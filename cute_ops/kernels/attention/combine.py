"""Softmax results over parts of a row's keys, combined in a fixed order."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.attention.softmax import LN2, exp2
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.copy import fragment, load, store
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

    Tile: a warp has a row, four columns a lane, several times where e > 128. It reads the parts from the first to the
    last. No shared memory.
    Bytes moved: parts, from L2, and outputs once.
    """

    warps = 4

    def __init__(self, e, pdl):
        self.e, self.pdl = e, pdl

    @cute.jit
    def __call__(self, results: cutlass.Constexpr, parts, stream):
        batches, queries, heads, _ = results.out.shape
        rows = Int32(batches) * Int32(queries) * Int32(heads)
        self.kernel(results, rows, parts).launch(
            grid=[cute.ceil_div(rows, self.warps), 1, 1], block=[WARP * self.warps, 1, 1], stream=stream,
            use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, results, rows: Int32, parts: Int32):
        tidx = cute.arch.thread_idx()[0]
        row = cute.arch.block_idx()[0] * self.warps + cute.arch.make_warp_uniform(tidx // WARP)
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        if row < rows:
            self._combine(results, row, parts, tidx % WARP)

    @cute.jit
    def _combine(self, results: cutlass.Constexpr, row, parts, lane):
        partial, partial_lse, sinks, out, lse = results
        _, queries, heads, _ = (Int32(size) for size in out.shape)
        token, head = row // heads % queries, row % heads
        batch = row // (heads * queries)
        largest = -Float32.inf
        for part in cutlass.range(lane, parts, WARP, unroll=1):
            largest = cute.arch.fmax(largest, partial_lse[row, part])
        for offset in (16, 8, 4, 2, 1):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
        total, vectors = Float32(0.0), -(-self.e // (4 * WARP))
        held = [fragment(Float32, 4, 0) for _ in range(vectors)]
        for part in cutlass.range(parts, unroll=4):
            share = self.share(partial_lse[row, part], largest)
            total = total + share
            # A part without a key has no result.
            if share > 0.0:
                for i in cutlass.range_constexpr(vectors):
                    column, rX = (i * WARP + lane) * 4, fragment(Float32, 4, 0)
                    if column < self.e:
                        start = (Int64(row) * parts + part) * self.e + column
                        load(rX, partial.iterator.toint() + start * 4, shared=True)
                    for j in cutlass.range_constexpr(4):
                        held[i][j] = held[i][j] + share * rX[j]
        sink = None if const_expr(sinks is None) else Float32(sinks[head])
        found, factor = self.finish(largest, total, sink)
        if lane == 0:
            lse[batch, head, token] = found
        for i in cutlass.range_constexpr(vectors):
            column, rOut = (i * WARP + lane) * 4, fragment(out.element_type, 4)
            for j in cutlass.range_constexpr(4):
                rOut[j] = (held[i][j] * factor).to(out.element_type)
            if column < self.e:
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
