"""How sequences and channels spread over threads: who walks where, and how a thread reaches its rows.

A thread holds a vector of neighbouring channels and walks along a *span*: some consecutive rows of one sequence. It
keeps the last rows in registers, so that each is loaded once; only the ``taps`` rows before a span are loaded again.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.conv.config import ConvConfig
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load, load_if, widen
from cute_ops.kernels.lib.pdl import can_use_pdl
from cute_ops.kernels.lib.row_layout import ITEMSIZE, extent, present, row_address, row_count

WARP = 32
PART = 2**30  # spans
VECTOR_BYTES = 16
# Enough for the sums and what the system keeps of any number of CTAs; the rest is L1, which finds rows loaded twice.
SMEM_PERCENT = 50


class Cuts(NamedTuple):
    """How sequences are cut into spans. A part is some whole sequences, so many that 32 bits count their spans: a
    64-bit division is a call, around which a kernel spills registers.

    Attributes:
        span: rows of a span.
        each: spans of a sequence.
        part: sequences of a part.
        spans: those of a part.
        sequences: all of them.
        parts: how many there are.
    """

    span: Int32
    each: Int32
    part: Int32
    spans: Int32
    sequences: Int64
    parts: Int32


class Rows:
    """The rows of one sequence of a tensor, at a thread's channels."""

    def __init__(self, mX, key, sequence, channel):
        dim = len(mX.shape) - 2
        itemsize, n = ITEMSIZE[key.dtype], mX.shape[dim + 1]
        start = row_address(mX, key, sequence * extent(mX, dim), n)
        self.start = start + Int64(channel) * itemsize
        self.step = (n if key.layout == "flat" else Int64(mX.stride[dim])) * itemsize

    def address(self, t, more=0):
        """Of the row ``more``, a static number, after row t: constants beside one product, where steps are static."""
        return self.start + Int64(t) * self.step + more * self.step


class Walk:
    """What forward and backward share.

    Tile: a CTA is ``lanes`` vectors of channels, side by side, times ``depth`` spans. Row tensors have one dtype; the
    alignment of all of them, compact outputs among them, makes a vector so long that it divides ``n``: none has a mask.

    Args:
        variant: the kernel's variant.
        names: the row tensors.
    """

    def __init__(self, variant, names):
        self.config = ConvConfig.of(variant.config)
        self.keys, self.n, self.width = variant.tensors, variant.dims["n"], variant.dims["w"]
        self.taps = self.width - 1
        # A multiple of the taps: then each row of the window is in the same registers at every step.
        self.ahead = -(-self.config.ahead // self.taps) * self.taps
        self.silu = variant.attrs["activation"] == "silu"
        starts = [min(key.align, key.row_align, VECTOR_BYTES) // ITEMSIZE[key.dtype] for key in present(variant, names)]
        self.vec = min(self.config.channels, *starts)
        self.lanes = WARP
        if self.n is not None:
            vectors = self.n // self.vec
            self.lanes = -(-vectors // -(-vectors // self.config.threads))
        self.depth = max(self.config.threads // self.lanes, 1)
        self.pdl = can_use_pdl(variant.arch)

    def channels(self, mX):
        return Int32(mX.shape[len(mX.shape) - 1]) if self.n is None else self.n

    def blocks(self, mX):
        """CTAs that share a row."""
        return (self.channels(mX) // self.vec + (self.lanes - 1)) // self.lanes

    def seqlen(self, mX):
        return Int32(extent(mX, len(mX.shape) - 2))

    def cuts(self, mX, span):
        """The :class:`Cuts` into spans of so many rows, computed on the host."""
        each = (Int64(self.seqlen(mX)) + (span - 1)) // span
        sequences = row_count(mX) // self.seqlen(mX)
        part = cutlass.min(cutlass.max(PART // each, 1), sequences)
        return Cuts(span, Int32(each), Int32(part), Int32(part * each), sequences, Int32((sequences + (part - 1)) // part))

    def span(self, mX, walkers):
        """Rows of a span where so many threads that run at once share the rows: ``config.span`` at most, in whole steps
        of ``ahead``, and such that all get as many.
        """
        share = (row_count(mX) + (walkers - 1)) // walkers
        count = (share + (self.config.span - 1)) // self.config.span
        steps = (share + (count * self.ahead - 1)) // (count * self.ahead)
        return Int32(steps * self.ahead)

    def place(self, mX):
        """(row of CTAs, first channel, depth in the CTA, whether the channel exists) of this thread."""
        lane, level, _ = cute.arch.thread_idx()
        level = 0 if self.depth == 1 else level
        bidx, _, _ = cute.arch.block_idx()
        blocks = self.blocks(mX)
        group = bidx // blocks
        channel = ((bidx - group * blocks) * self.lanes + lane) * self.vec
        return group, channel, level, channel < self.channels(mX)

    def bounds(self, mX, cuts, part, index):
        """(sequence, first row, row after the last) of a part's span."""
        sequence = index // cuts.each
        start = (index - sequence * cuts.each) * cuts.span
        return Int64(part) * cuts.part + sequence, start, cutlass.min(start + cuts.span, self.seqlen(mX))

    def inner(self, start, last):
        """Where whole steps from ``start`` on end whose rows, and those that they load, are all before row ``last``."""
        return start + cutlass.max(last - start - self.ahead, 0) // self.ahead * self.ahead

    def rows(self, tensors, sequence, channel):
        """A thread's :class:`Rows` of a sequence by name, None of an absent tensor."""
        return {k: m if m is None else Rows(m, self.keys[k], sequence, channel) for k, m in tensors.items()}

    def column(self, mBias, channel):
        """A thread's numbers of a parameter of one per channel, in fp32."""
        return _transposed(self._contiguous(mBias, self.keys["bias"], channel, 1), self.vec)[0]

    def weights(self, mWeight, channel):
        """A thread's weights, in fp32: a vector of channels for each tap."""
        key = self.keys["weight"]
        if key.layout == "flat":
            return _transposed(self._contiguous(mWeight, key, channel, self.width), self.vec)
        rWeight = fragment(mWeight.element_type, self.vec * self.width)
        for c in range(self.vec):
            address = row_address(mWeight, key, Int64(channel + c), self.width)
            gWeight = gmem_elements(mWeight.element_type, address, self.width)
            for j in range(self.width):
                rWeight[c * self.width + j] = gWeight[j]
        return _transposed(rWeight, self.vec)

    def _contiguous(self, mW, key, channel, width):
        """``width`` numbers of each of a thread's channels, in the order of memory."""
        count, itemsize = self.vec * width, ITEMSIZE[key.dtype]
        each = math.gcd(count, min(key.align, VECTOR_BYTES) // itemsize)
        rW = fragment(mW.element_type, count)
        address = mW.iterator.toint() + Int64(channel) * (width * itemsize)
        for i in range(0, count, each):
            load(cute.make_tensor(rW.iterator + i, cute.make_layout(each)), address + i * itemsize)
        return rW

    @cute.jit
    def load_padded(self, rX: cute.Tensor, t: Int32, i: cutlass.Constexpr, rows: cutlass.Constexpr):
        """Load the i-th of the ``taps`` rows before row t of x: before the first one, a row of the initial state; zeros
        where there is none.
        """
        x, state = rows["x"], rows["initial_state"]
        if const_expr(state is None):
            rX.fill(0)
            load_if(t + i >= self.taps, rX, x.address(t, i - self.taps))
        else:
            load(rX, cutlass.select_(t + i >= self.taps, x.address(t, i - self.taps), state.address(t, i)))

    def window(self, dtype, start, rows):
        """The ``taps`` rows before a span, in fp32. The row at ``start + i`` takes the place of the oldest one, the
        ``i % taps``-th.
        """
        held = [fragment(dtype, self.vec) for _ in range(self.taps)]
        for i, rX in enumerate(held):
            self.load_padded(rX, start, i, rows)
        window = [fragment(Float32, self.vec) for _ in held]
        for rWide, rX in zip(window, held):
            rWide.store(widen(rX))
        return window

    def older(self, window, u):
        """The rows before the u-th of a step, the oldest first; the oldest's place is the next one's."""
        return [window[(u + i) % self.taps] for i in range(self.taps)]

    def convolved(self, rows, rWeight, rBias):
        """``bias + sum_j weight_j * row_j``."""
        total = rWeight[0].load() * rows[0] if rBias is None else rBias.load() + rWeight[0].load() * rows[0]
        for rTap, row in zip(rWeight[1:], rows[1:]):
            total = total + rTap.load() * row
        return total


def before(t, end):
    """Whether row t comes before ``end``; every row does where that is None."""
    return Boolean(True) if end is None else t < end


def _transposed(rW, vec):
    """Numbers of ``vec`` channels one after another as fp32 vectors over the channels."""
    width = cute.size(rW) // vec
    wide = [fragment(Float32, vec) for _ in range(width)]
    for j, rTap in enumerate(wide):
        for c in range(vec):
            rTap[c] = rW[c * width + j].to(Float32)
    return wide
