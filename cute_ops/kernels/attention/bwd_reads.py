"""The gradient of what a change of scores reads, summed over the scores that read the same element.

``sums = sum(ds * dscore / dread)`` with ``ds`` of :mod:`cute_ops.kernels.attention.bwd`.
"""

import cutlass.cute as cute
from cutlass import const_expr

from cute_ops.kernels.attention.bwd import AttentionBackward
from cute_ops.kernels.attention.bwd_reads_sm80 import SumsOfReadsSm80
from cute_ops.kernels.attention.bwd_reads_sm90 import SumsOfReadsSm90
from cute_ops.kernels.attention.mods import Mods, by_index
from cute_ops.kernels.attention.ranges import Ranges
from cute_ops.kernels.attention.reads_config import ReadsConfig
from cute_ops.kernels.attention.tensors import view
from cute_ops.kernels.attention.tiles import sizes_of
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import can_use_pdl


class ReadsBackward(AttentionBackward):
    """Launches a kernel for the rows' deltas, one that sums tiles of scores, and one that adds up its parts."""

    def __init__(self, variant):
        config, dims = ReadsConfig.of(variant.config), variant.dims
        self.divide(dims["e"])
        scale = variant.attrs["scale"] or dims["d"] ** -0.5
        mods = Mods(scale, config.score, config.mask, config.bounds, config.dscore)
        self.mods, sums = mods, SumsOfReadsSm80 if config.warps else SumsOfReadsSm90
        self.sums = sums(config, dims["d"], dims["e"], mods, scale)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mQ, mK, mV, mOut, mLse, mDout, *others):
        *captured, mDlse, mSums, mDelta, mParts = others[:-3]
        *tables, stream = others[-3:]
        mQ, mK, mV, mOut, mDout = (view(m) for m in (mQ, mK, mV, mOut, mDout))
        mLse, mDelta = (folded(m, own=2) for m in (mLse, mDelta))
        mDlse = None if const_expr(mDlse is None) else folded(mDlse, own=2)
        sizes = sizes_of(mQ, mK, by_index(captured, self.mods), tuple(tables))
        self.launch_delta(((mOut, mDout), (mLse, mDlse)), (mDelta, None), (None, None), None, stream)
        Ranges(self.sums.tiles).launch(sizes, stream)
        self.sums.launch((mQ, mK, mV, mDout), (mLse, mDelta), (mSums, mParts), sizes, stream)
