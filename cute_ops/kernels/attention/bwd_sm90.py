"""The gradients of attention on Hopper: one kernel for those of queries, one for those of keys and values.

Both compute the scores again. So each gradient is summed by one CTA in a fixed order: results are deterministic, and
nothing is added up in memory. ``p = exp(score - lse)``, ``ds = p * (dout @ v.T - delta)`` with ``delta = sum(dout *
out) - dlse`` of a row; then ``dq = ds @ k``, ``dk = ds.T @ q``, ``dv = p.T @ dout``, and ``dsink = -sum(exp(sink - lse)
* delta)``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.attention.bwd_keys_sm90 import KeysBackward
from cute_ops.kernels.attention.bwd_queries_sm90 import QueriesBackward
from cute_ops.kernels.attention.config import AttentionBackwardConfig
from cute_ops.kernels.attention.mods import Mods
from cute_ops.kernels.attention.softmax import exp2
from cute_ops.kernels.attention.tiles import view
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.copy import fragment, load_if
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.tensor_core.sizes import WARP

WARPS = 8  # of a CTA that sums rows or sinks
VECTOR = 8  # elements of 16 bytes
TOGETHER = 320  # elements of heads of k and v whose gradients registers hold at a time


class AttentionBackward:
    """Launches a kernel for the rows' deltas, then those of the gradients."""

    def __init__(self, variant):
        config, dims = AttentionBackwardConfig.of(variant.config), variant.dims
        self.dv = dims["e"]
        mods = Mods(config.mask, config.bounds, config.score, config.dscore)
        scale = variant.attrs["scale"] or dims["d"] ** -0.5
        self.of_queries = QueriesBackward(config, dims["d"], dims["e"], mods, scale)
        parts = ("kv",) if dims["d"] + dims["e"] <= TOGETHER else ("k", "v")
        self.of_keys = [KeysBackward(config, dims["d"], dims["e"], mods, scale, part) for part in parts]

    @cute.jit
    def __call__(self, mQ, mK, mV, mOut, mLse, mDout, mDlse, mSinks, mDq, mDk, mDv, mDsinks, mDelta, stream):
        mQ, mK, mV, mOut, mDout, mDq, mDk, mDv = (view(m) for m in (mQ, mK, mV, mOut, mDout, mDq, mDk, mDv))
        mLse, mDelta = (folded(m, own=2) for m in (mLse, mDelta))
        mDlse = None if const_expr(mDlse is None) else folded(mDlse, own=2)
        rows = Int64(cute.size(mDelta))
        self.delta(mOut, mDout, mDlse, mDelta).launch(
            grid=[Int32((rows + (WARPS - 1)) // WARPS), 1, 1], block=[WARP * WARPS, 1, 1], stream=stream, use_pdl=True
        )
        if const_expr(mSinks is not None):
            self.sinks(mSinks, mLse, mDelta, mDsinks).launch(
                grid=[Int32(cute.size(mSinks)), 1, 1], block=[WARP * WARPS, 1, 1], stream=stream
            )
        self.of_queries.launch((mQ, mK, mV, mDout), (mLse, mDelta), mDq, stream)
        for each in self.of_keys:
            each.launch((mQ, mK, mV, mDout), (mLse, mDelta), (mDk, mDv), stream)

    @cute.kernel
    def delta(self, mOut, mDout, mDlse, mDelta):
        """A warp for each row of a head."""
        seqlen, heads = Int32(mDelta.shape[2]), Int32(mDelta.shape[1])
        lane = cute.arch.lane_idx()
        index = Int64(cute.arch.block_idx()[0]) * WARPS + cute.arch.warp_idx()
        let_next_start(True)
        wait_for_previous(True)
        if index < cute.size(mDelta):
            which = Int32(index // seqlen)
            row, batch = Int32(index - Int64(which) * seqlen), which // heads
            head = which - batch * heads
            rows = []
            for m in (mOut, mDout):
                rX = fragment(m.element_type, VECTOR, 0)
                offset = cute.crd2idx((row, 0, head, batch), m.layout)
                address = m.iterator.toint() + (Int64(offset) + lane * VECTOR) * (m.element_type.width // 8)
                load_if(lane * VECTOR < self.dv, rX, address)
                rows.append(rX.load().to(Float32))
            total = (rows[0] * rows[1]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for offset in (16, 8, 4, 2, 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            if lane == 0:
                if const_expr(mDlse is not None):
                    total = total - mDlse[batch, head, row]
                mDelta[batch, head, row] = total

    @cute.kernel
    def sinks(self, mSinks, mLse, mDelta, mDsinks):
        """A CTA for each head."""
        tidx, head = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        batches, seqlen = Int32(mLse.shape[0]), Int32(mLse.shape[2])
        sink, total = Float32(mSinks[head]), Float32(0.0)
        for batch in cutlass.range(batches, unroll=1):
            for row in cutlass.range(tidx, seqlen, WARP * WARPS, unroll=1):
                lse = mLse[batch, head, row]
                # A row whose lse is -inf has a sink of -inf: its share is 0.
                share = exp2((sink - lse) * Float32(LOG2_E))
                total += cutlass.select_(lse == -Float32.inf, Float32(0.0), share * mDelta[batch, head, row])
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
