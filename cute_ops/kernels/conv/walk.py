"""How sequences and channels spread over threads, and how a thread reaches its rows.

A thread holds a vector of neighbouring channels and walks along a *span*: some consecutive rows of one sequence. It
keeps the last rows in registers, so that each is loaded once; only the ``taps`` rows before a span are loaded again.
The next rows are on their way through a ring in shared memory. Loads to registers would take fewer instructions, but
the compiler moves them to the end of a loop, beside the stores, so that most of the time too few are under way.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.conv.config import ConvConfig
from cute_ops.kernels.lib.copy import access_bits, fragment, gmem_elements, gmem_vector, load, load_if, store_if, widen
from cute_ops.kernels.lib.pdl import can_use_pdl
from cute_ops.kernels.lib.row_layout import extent, present, row_address

LEAST_ROWS = 3  # of a step
SMEM_BYTES = 228 * 1024  # of an SM, L1 included: Hopper's, of others less


class SequenceRows:
    """The rows of one sequence of a tensor, at a thread's channels."""

    def __init__(self, mX, key, sequence, channel):
        dim = len(mX.shape) - 2
        itemsize, n = ITEMSIZE[key.dtype], mX.shape[dim + 1]
        start = row_address(mX, key, sequence * extent(mX, dim), n)
        self.start, self.channel = start + Int64(channel) * itemsize, channel
        self.step = (n if key.layout == "flat" else Int64(mX.stride[dim])) * itemsize

    def address(self, t, more=0):
        """Of the row ``more``, a static number, after row t: constants beside one product, where steps are static."""
        return self.start + Int64(t) * self.step + more * self.step


class Walk:
    """Parts that forward and backward share.

    Tile: a CTA is ``lanes`` vectors of channels, side by side, times ``depth`` spans. Row tensors have one dtype; the
    alignment of all of them, compact outputs among them, makes a vector so long that it divides ``n``: none has a mask.
    A step of the walk takes ``unit`` rows, those of one or two stages of the ring.

    Args:
        variant: the kernel's variant.
        names: the row tensors, those that a ring holds first.
        streams: how many these are.
        spare: places of a window, and stages of the ring, beyond those that hold rows: 1 where the next row comes while
            the oldest one is still needed, and the next stage while the oldest one is read.
    """

    units = WARP  # of memory that hold a row's elements at a warp's channels

    def __init__(self, variant, names, streams, spare=0):
        self.variant, self.config = variant, ConvConfig.of(variant.config)
        self.keys, self.n, self.width = variant.tensors, variant.dims["n"], variant.dims["w"]
        self.taps = self.width - 1
        # Of a step. A multiple of the places: then each row of the window is in the same registers at every step.
        self.places = self.taps + spare
        self.unit = -(-LEAST_ROWS // self.places) * self.places
        # Of a stage. Where it is half a step, the same rows are on their way more evenly.
        self.batch = self.unit // 2 if spare and self.unit % 2 == 0 else self.unit
        # No fewer rows than the taps: whole steps end before a span does, whatever is on its way then.
        self.stages = -(-max(self.config.ahead, self.taps) // self.batch)
        self.ahead, self.slots = self.stages * self.batch, self.stages + spare
        self.silu = variant.attrs["activation"] == "silu"
        start = start_of(variant, names)
        self.vec = self.config.vec(self.n, start)
        self.lanes, self.depth, self.ctas = self.config.spread(self.n, start)
        self.pdl = can_use_pdl(variant.arch)
        self.names, self.threads = names[:streams], self.lanes * self.depth
        sums = self.width + 1 if "dout" in names else 0
        ring = self.slots * self.batch * streams * ITEMSIZE[self.keys["x"].dtype] * self.units / WARP
        each = self.vec * (ring + 4 * sums)
        # For CTAs with the kilobyte that the system takes of each; the rest is L1, which finds rows loaded twice.
        shared = self.ctas * (self.threads * each + 1024)
        self.carveout = min(int(-(-100 * shared // SMEM_BYTES)) + 1, 100)

    def channels(self, mX):
        return Int32(mX.shape[len(mX.shape) - 1]) if self.n is None else self.n

    def blocks(self, mX):
        """CTAs that share a row."""
        return (self.channels(mX) + (self.lanes * self.vec - 1)) // (self.lanes * self.vec)

    def seqlen(self, mX):
        return Int32(extent(mX, len(mX.shape) - 2))

    def coordinate(self, mX):
        """(row of CTAs, first channel, depth in the CTA, whether the channel exists) of this thread."""
        lane, level, _ = cute.arch.thread_idx()
        level = 0 if self.depth == 1 else level
        group, first = self.cta_coordinate(mX)
        channel = first + lane * self.vec
        return group, channel, level, channel < self.channels(mX)

    def cta_coordinate(self, mX):
        """(row of CTAs, first channel) of this thread's CTA."""
        bidx, _, _ = cute.arch.block_idx()
        group = bidx // self.blocks(mX)
        return group, (bidx - group * self.blocks(mX)) * (self.lanes * self.vec)

    def inner(self, start, last, rows):
        """Where whole steps from ``start`` on end whose rows, and those that they fetch, are before row ``last``."""
        return start + cutlass.max(last - start - self.ahead, 0) // self.unit * self.unit

    def ring(self, smem, mX):
        """The rows of each stream that are on their way: (element, thread, row). A thread copies what it reads itself,
        so that no barrier is needed: the thread's own wait does.
        """
        layout = cute.make_layout((self.vec, self.threads, self.slots * self.batch))
        return [smem.allocate_tensor(mX.element_type, layout, byte_alignment=VECTOR_BYTES) for _ in self.names]

    def thread(self):
        lane, level, _ = cute.arch.thread_idx()
        return lane if self.depth == 1 else level * self.lanes + lane

    def fetch(self, ring, rows, t, more, end, stage):
        """Start copying rows to a stage of the ring: from ``more``, a static number, after row t on, those before row
        ``end``.
        """
        for u in range(self.batch):
            for sX, name in zip(ring, self.names):
                valid, address = before(t + (more + u), end), rows[name].address(t, more + u)
                copy_if(valid, address, sX[None, self.thread(), stage * self.batch + u])
        cute.arch.cp_async_commit_group()

    def start(self, ring, rows, start, end):
        """Start copying as many rows as the ring holds, from row ``start`` on."""
        for stage in range(self.stages):
            self.fetch(ring, rows, start, stage * self.batch, end, stage)

    def wait(self):
        """Until the stage that was fetched first is there."""
        cute.arch.cp_async_wait_group(self.stages - 1)

    def taken(self):
        """Called when a stage has been read, before copies to it start."""

    def take(self, ring, rows, t, stage):
        """The rows of a stage, whose first one is row t: for each row a vector of each stream."""
        held = [[fragment(sX.element_type, self.vec) for sX in ring] for _ in range(self.batch)]
        for u, vectors in enumerate(held):
            for sX, rX in zip(ring, vectors):
                cute.autovec_copy(sX[None, self.thread(), stage * self.batch + u], rX)
        return held

    def next(self, stage):
        return cutlass.select_(stage + 1 == self.slots, Int32(0), stage + 1)

    def rows(self, tensors, names, span):
        """A thread's :class:`SequenceRows` of the span's sequence by name, None of an absent tensor."""
        given = {name: getattr(tensors, name) for name in names}
        return {
            name: None if m is None else SequenceRows(m, self.keys[name], span.sequence, span.channel)
            for name, m in given.items()
        }

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
            self.get(Boolean(t + i >= self.taps), rX, x.address(t, i - self.taps), x.channel)
        else:
            address = cutlass.select_(t + i >= self.taps, x.address(t, i - self.taps), state.address(t, i))
            self.get(Boolean(True), rX, address, x.channel)

    def get(self, valid, rX, address, channel):
        """Load a row's elements at a thread's channels, the first of which is ``channel``, if ``valid``."""
        load_if(valid, rX, address)

    def put(self, valid, rX, address, channel):
        """Store a row's elements at a thread's channels if ``valid``."""
        store_if(valid, rX, address, True)

    def emit(self, to, rX, valid, t, more):
        """Store a step's next row, ``more`` rows after row t, if ``valid``, at once or in :meth:`flush`.

        ``to``: the tensor's rows, the ring, and a list of the stores that :meth:`flush` has to do.
        """
        self.put(valid, rX, to[0].address(t, more), to[0].channel)

    def flush(self, to, t):
        """Do the stores that :meth:`emit` has put off."""

    def place(self, channel):
        """(which of a thread's channels it is, the thread of the row) of one of the CTA's channels."""
        return channel % self.vec, channel // self.vec

    def columns(self, channel, each):
        """(elements of a thread's columns that are neighbours, the first column, which of the thread's channels)."""
        return [(self.vec * each, channel * each, 0)]

    def window(self, dtype, start, rows):
        """The ``taps`` rows before a span, in fp32. The row at ``start + i`` takes the i-th :meth:`newest` place."""
        held = [fragment(dtype, self.vec) for _ in range(self.taps)]
        for i, rX in enumerate(held):
            self.load_padded(rX, start, i, rows)
        window = [fragment(Float32, self.vec) for _ in range(self.places)]
        for rWide, rX in zip(window, held):
            rWide.store(widen(rX))
        return window

    def older(self, window, u):
        """The rows before the u-th of a step, the oldest first."""
        return [window[(u + i) % self.places] for i in range(self.taps)]

    def newest(self, window, u):
        """The place of the u-th row of a step: a spare one, or the oldest row's."""
        return window[(u + self.taps) % self.places]

    def convolved(self, rows, rWeight, rBias):
        """``bias + sum_j weight_j * row_j``."""
        total = rWeight[0].load() * rows[0] if rBias is None else rBias.load() + rWeight[0].load() * rows[0]
        for rTap, row in zip(rWeight[1:], rows[1:]):
            total = total + rTap.load() * row
        return total


def start_of(variant, names):
    """The elements, at most a vector, of which the rows of all these tensors start on multiples."""
    keys = present(variant, names)
    return min(min(key.align, key.row_align, VECTOR_BYTES) // ITEMSIZE[key.dtype] for key in keys)


def before(t, end):
    """Whether row t comes before ``end``; every row does where that is None."""
    return Boolean(True) if end is None else t < end


@cute.jit
def copy_if(valid: Boolean, address: Int64, sX: cute.Tensor):
    """Start copying a vector to shared memory."""
    if valid:
        dtype, vec = sX.element_type, cute.size(sX)
        bits = access_bits(dtype, vec)
        if const_expr(bits >= 32):
            mode = LoadCacheMode.GLOBAL if const_expr(bits == 128) else LoadCacheMode.ALWAYS
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), dtype, num_bits_per_copy=bits)
            cute.copy(atom, cute.coalesce(gmem_vector(dtype, address, vec)), sX)
        else:
            # Asynchronous copies move no less than 4 bytes.
            rX = fragment(dtype, vec)
            load(rX, address)
            cute.autovec_copy(rX, sX)


def _transposed(rW, vec):
    """Numbers of ``vec`` channels one after another as fp32 vectors over the channels."""
    width = cute.size(rW) // vec
    wide = [fragment(Float32, vec) for _ in range(width)]
    for j, rTap in enumerate(wide):
        for c in range(vec):
            rTap[c] = rW[c * width + j].to(Float32)
    return wide
