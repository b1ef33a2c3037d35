"""The gradients of attention.

``p = exp(score - lse)``, ``ds = p * (dout @ v.T - delta)`` with ``delta = sum(dout * out) - dlse`` of a row; then
``dq = ds @ k``, ``dk = ds.T @ q``, ``dv = p.T @ dout``, and ``dsink = -sum(exp(sink - lse) * delta)``. Either one
kernel computes the scores again and adds dq up in memory, of long heads dk and dv, or two kernels do, one for dq, one
for dk and dv: then each gradient is summed by one CTA in a fixed order. On Hopper warpgroups multiply, elsewhere warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.attention.bwd_in_parts_sm90 import OnePassInParts
from cute_ops.kernels.attention.bwd_keys_sm90 import KeysBackward
from cute_ops.kernels.attention.bwd_long_heads_sm90 import LongHeadsBackward
from cute_ops.kernels.attention.bwd_long_sequences_sm90 import LongSequencesBackward
from cute_ops.kernels.attention.bwd_one_pass_sm80 import OnePassBackwardSm80
from cute_ops.kernels.attention.bwd_one_pass_sm90 import OnePassBackward
from cute_ops.kernels.attention.bwd_queries_sm90 import QueriesBackward
from cute_ops.kernels.attention.bwd_short_heads_sm90 import ShortHeadsBackward
from cute_ops.kernels.attention.bwd_sm80 import KeysBackwardSm80, QueriesBackwardSm80
from cute_ops.kernels.attention.bwd_tall_sm90 import TallOnePass
from cute_ops.kernels.attention.bwd_wide_heads_sm90 import WideHeadsBackward
from cute_ops.kernels.attention.config import LONG_TILE, AttentionBackwardConfig
from cute_ops.kernels.attention.mods import Mods, by_index
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.registers import exp2
from cute_ops.kernels.attention.sums import elements_of
from cute_ops.kernels.attention.tensors import address_of, row_at, view
from cute_ops.kernels.attention.tiles import Sizes, offsets_of, sizes_of
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.copy import fragment, load_if, store, store_if
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARP

WARPS = 8  # of a CTA that sums rows or sinks
VECTOR = 8  # elements of 16 bytes
ZEROS = 4  # numbers in float32 of 16 bytes
ROWS = 2  # whose outputs and cotangents a thread loads at once
LONGEST = 128  # elements of heads of which a CTA has 128 keys
TOGETHER = 320  # elements of heads of k and v whose gradients registers hold at a time


class AttentionBackward:
    """Launches a kernel for the rows' deltas, then those of the gradients."""

    def __init__(self, variant):
        config, dims = AttentionBackwardConfig.of(variant.config), variant.dims
        self.packed = "cu_seqlens_q" in variant.names
        self.divide(dims["e"])
        scale = variant.attrs["scale"] or dims["d"] ** -0.5
        self.mods = mods = Mods(scale, config.score, config.mask, config.bounds, config.dscore)
        own = config, dims["d"], dims["e"], mods, scale
        one_pass = one_pass_of(config, max(dims["d"], dims["e"]), mods, variant.attrs["deterministic"])
        of_queries, of_keys = QueriesBackward, KeysBackward
        if config.warps:
            one_pass, of_queries, of_keys = OnePassBackwardSm80, QueriesBackwardSm80, KeysBackwardSm80
        self.one_pass = one_pass(*own) if config.one_pass == "keys" else None
        self.long_heads = LongHeadsBackward(*own) if config.one_pass == "queries" else None
        self.of_queries = None if config.one_pass else of_queries(*own)
        parts = ("kv",) if dims["d"] + dims["e"] <= TOGETHER else ("k", "v")
        self.of_keys = [] if config.one_pass else [of_keys(*own, part) for part in parts]
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mQ, mK, mV, *others):
        offsets, (mOut, mLse, mDout, *others) = offsets_of(others, self.packed)
        *captured, mDlse, mSinks, mDq, mDk, mDv, mDsinks, mDelta, mLogs, mSums, mParts, mTurns = others[:-5]
        *tables, stream = others[-5:]
        mQ, mK, mV, mOut, mDout, mDq, mDk, mDv = (view(m) for m in (mQ, mK, mV, mOut, mDout, mDq, mDk, mDv))
        mLse, mDelta = (folded(m, own=2) for m in (mLse, mDelta))
        mSums, mParts = (None if const_expr(m is None) else view(m, (2, 3, 1, 0)) for m in (mSums, mParts))
        mDlse = None if const_expr(mDlse is None) else folded(mDlse, own=2)
        if const_expr(self.one_pass is not None):
            mLogs = folded(mLogs, own=2)
        captured = by_index(captured, self.mods)
        first, second = (sizes_of(mQ, mK, captured, tuple(each), offsets) for each in (tables[:2], tables[2:]))
        packed = tuple(second) if const_expr(self.packed and self.one_pass is not None) else None
        mTurns = None if const_expr(mTurns is None) else folded(mTurns, own=2)
        self.launch_delta(((mOut, mDout), (mLse, mDlse)), (mDelta, mLogs), (mSums, mTurns), packed, stream)
        if const_expr(mSinks is not None):
            self.sinks(mSinks, mLse, mDelta, mDsinks, packed).launch(
                grid=[Int32(cute.size(mSinks)), 1, 1], block=[WARP * WARPS, 1, 1], stream=stream
            )
        inputs = mQ, mK, mV, mDout
        if const_expr(self.one_pass is not None):
            Ranges(self.one_pass.tiles).launch(second, stream)
            parts = () if const_expr(mParts is None) else (mParts, mTurns)
            self.one_pass.launch(inputs, (mLogs, mDelta), (mDk, mDv), mSums, *parts, second, stream)
            self.one_pass.finish(mSums, (mDq,), packed, stream)
            if const_expr(mParts is not None):
                self._add_parts(mParts, (mDk, mDv), second, packed, stream)
        elif const_expr(self.long_heads is not None):
            Ranges(self.long_heads.tiles).launch(first, stream)
            self.long_heads.launch(inputs, (mLse, mDelta), mDq, first, stream, mSums)
            packed = tuple(first) if const_expr(self.packed) else None
            self.long_heads.finish(mSums, (mDk, mDv), packed, stream)
        else:
            Ranges(self.of_queries.tiles).launch(first, stream)
            self.of_queries.launch(inputs, (mLse, mDelta), mDq, first, stream)
            Ranges(self.of_keys[0].tiles).launch(second, stream)
            for each in self.of_keys:
                each.launch(inputs, (mLse, mDelta), (mDk, mDv), second, stream)

    def divide(self, dv):
        """Divide the rows of deltas, of ``dv`` elements, among threads."""
        self.dv, self.lanes = dv, 1 << (-(-dv // VECTOR) - 1).bit_length()  # that have a row's delta
        self.apart = WARP * WARPS // self.lanes  # rows between a thread's

    def launch_delta(self, inputs, found, begun, packed, stream):
        """Launch :meth:`delta`. ``inputs``: results and cotangents, then numbers of rows; ``begun``: the sums of dq and
        the turns, None where there are none.
        """
        (mSums, mTurns), (batches, heads, seqlen) = begun, found[0].shape
        ctas = cute.ceil_div(Int32(seqlen), ROWS * self.apart) * Int32(heads) * batches
        zeroed = None if const_expr(mSums is None) else Int32((elements_of(mSums) // ZEROS + (ctas - 1)) // ctas)
        self.delta(*inputs, found, (mSums, zeroed, mTurns), packed).launch(
            grid=[ctas, 1, 1],
            block=[WARP * WARPS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.jit
    def _add_parts(self, mParts, outs: cutlass.Constexpr, sizes: cutlass.Constexpr, packed: cutlass.Constexpr, stream):
        parts = self.one_pass.parts(mParts, sizes)
        if parts > 1:
            self.one_pass.of_keys.finish(mParts, outs, packed, stream, parts)

    @cute.kernel
    def delta(self, mOuts, of_rows, found, begun, packed):
        """Neighbouring lanes of a warp have a row of a head. In one pass there are rows without a query, whose weights
        are 0; the row's log-sum-exp of base 2 is kept, and sums of dq and turns begin with 0. ``packed``: sizes, where
        rows are those of the tiles of packed sequences.
        """
        (mLse, mDlse), (mDelta, mLogs), (mSums, zeroed, mTurns) = of_rows, found, begun
        seqlen, heads, seqlen_q = Int32(mDelta.shape[2]), Int32(mDelta.shape[1]), Int32(mLse.shape[2])
        cta, tidx, lane = cute.arch.block_idx()[0], cute.arch.thread_idx()[0], cute.arch.lane_idx() % self.lanes
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        if const_expr(mSums is not None):
            self._zero(mSums, zeroed, cta, tidx)
        block, head, batch = row_at(cta, cute.ceil_div(seqlen, ROWS * self.apart), heads)
        first = block * (ROWS * self.apart) + tidx // self.lanes
        rows = [first + i * self.apart for i in range(ROWS)]
        places = [self._place(row, (seqlen, seqlen_q), packed) for row in rows]
        loaded = [self._load(mOuts, place, (head, batch), lane) for place in places]
        totals = [self._product(*each) for each in loaded]
        # The first lane writes what belongs to the first row, the next one what belongs to the other.
        total, token, given = self._of_lane(lane, totals, places)
        row = first + lane * self.apart
        if (lane < ROWS) & (row < seqlen):
            at = batch, head, cutlass.min(token, seqlen_q - 1)
            if const_expr(mDlse is not None):
                total = total - mDlse[at]
            mDelta[batch, head, row] = cutlass.select_(given, total, Float32(0.0))
            if const_expr(mLogs is not None):
                mLogs[batch, head, row] = self.one_pass.weights.of_lse(mLse[at], given)
        if const_expr(mTurns is not None):
            # Fewer than threads: one of each tile of queries of a head.
            turn = Int64(cta) * (WARP * WARPS) + tidx
            zero = fragment(Int32, 1, 0)
            store_if(turn < cute.size(mTurns), zero, mTurns.iterator.toint() + turn * (Int32.width // 8))

    def _place(self, row, lengths, packed):
        """The token of a row, and whether there is one. ``lengths``: of rows, and of queries."""
        seqlen, seqlen_q = lengths
        if packed is None:
            return row, row < seqlen_q
        token, given = self.one_pass.tiles.token_of(row, Sizes(*packed))
        return token, given & (row < seqlen)

    def _load(self, mOuts, place, at, lane):
        """A lane's part of the row of each tensor, zeros where there is none."""
        (token, given), loaded = place, [fragment(m.element_type, VECTOR, 0) for m in mOuts]
        for m, rX in zip(mOuts, loaded):
            load_if(given & (lane * VECTOR < self.dv), rX, address_of(m, (token, 0, *at), lane * VECTOR))
        return loaded

    def _product(self, rX, rY):
        """The sum of the products of a row, which all of its lanes get."""
        total = (rX.load().to(Float32) * rY.load().to(Float32)).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        for offset in (16, 8, 4, 2, 1):
            if offset < self.lanes:
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        return total

    def _of_lane(self, lane, totals, places):
        """The product, the token and whether there is one of the row that a lane writes."""
        found = [(total, token, given) for total, (token, given) in zip(totals, places)]
        return [cutlass.select_(lane == 0, *each) for each in zip(*found)]

    @cute.jit
    def _zero(self, mSums, zeroed, cta, tidx):
        """Zero a CTA's share of the sums, ``zeroed`` vectors: first, as stores do not wait for loads."""
        zeros, first = fragment(Float32, ZEROS, 0.0), Int64(cta) * zeroed
        count = Int32(cutlass.min(elements_of(mSums) // ZEROS - first, Int64(zeroed)))
        start = mSums.iterator.toint() + first * (ZEROS * Float32.width // 8)
        for i in cutlass.range(tidx, count, WARP * WARPS, unroll=1):
            store(zeros, start + i * (ZEROS * Float32.width // 8))

    @cute.kernel
    def sinks(self, mSinks, mLse, mDelta, mDsinks, packed):
        """A CTA for each head. ``packed``: sizes, where deltas are those of the tiles of packed sequences."""
        tidx, head = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        batches, seqlen = Int32(mLse.shape[0]), Int32(mLse.shape[2])
        rows = seqlen if const_expr(packed is None) else Int32(mDelta.shape[2])
        sink, total = Float32(mSinks[head]), Float32(0.0)
        for batch in cutlass.range(batches, unroll=1):
            for row in cutlass.range(tidx, rows, WARP * WARPS, unroll=1):
                token, none = row, Boolean(False)
                if const_expr(packed is not None):
                    token, given = self.one_pass.tiles.token_of(row, Sizes(*packed))
                    token, none = cutlass.min(token, seqlen - 1), ~given
                lse = mLse[batch, head, token]
                # A row whose lse is -inf has a sink of -inf: its share is 0.
                share = exp2((sink - lse) * Float32(LOG2_E))
                total += cutlass.select_(none | (lse == -Float32.inf), Float32(0.0), share * mDelta[batch, head, row])
        for offset in (16, 8, 4, 2, 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=offset)
        sums = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        if tidx % WARP == 0:
            sums[tidx // WARP] = total
        cute.arch.sync_threads()
        if tidx == 0:
            whole = Float32(0.0)
            for i in range(WARPS):
                whole += sums[i]
            mDsinks[head] = (-whole).to(mDsinks.element_type)


def one_pass_of(config, longest, mods, in_turns):
    """The class of the kernel by warpgroups that computes all gradients, of heads of so many elements."""
    if longest <= MMA_M:
        return TallOnePass if config.tile_q > MMA_M else OnePassBackward if in_turns else ShortHeadsBackward
    if longest > LONGEST:
        return WideHeadsBackward
    if config.tile_q == LONG_TILE:
        return LongSequencesBackward
    in_parts = not config.score or mods.cap is not None  # as measured
    return OnePassInParts if in_parts else OnePassBackward
