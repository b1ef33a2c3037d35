"""Causal convolutions whose positions are neighbours in memory: see :mod:`cute_ops.ops.conv.channels_first`."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.conv.config import FirstConfig
from cute_ops.kernels.lib.activation import silu, times_silu_derivative
from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.lib.copy import (
    access_bits,
    fetch_ahead,
    fragment,
    gmem_elements,
    load,
    load_if,
    load_inside,
    narrow,
    store_if,
    store_masked,
    trim,
    widen,
)
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.realign import bytes_past
from cute_ops.kernels.lib.row_layout import row_address, row_count

# CTAs in the second and the third dimension of a grid.
MOST_CTAS = 65535


class Windows:
    """A thread's vector of a row of positions, with those before it that the taps of its elements meet.

    Tile: a thread has ``vec`` neighbouring positions of one channel of one sequence, up to 16 bytes. Its neighbours'
    positions come from L1. Vectors of compact rows that start anywhere are ``shifted``: they are aligned in memory, and
    begin before the row.
    """

    rows = ("x", "out")

    def __init__(self, variant):
        self.variant, self.keys, self.width = variant, variant.tensors, variant.dims["w"]
        self.config, self.silu = FirstConfig.of(variant.config), variant.attrs["activation"] == "silu"
        self.threads = self.config.threads
        keys = [self.keys[name] for name in self.rows]
        self.vec = min(min(key.align, key.row_align, VECTOR_BYTES) // ITEMSIZE[key.dtype] for key in keys)
        if (ids := self.keys.get("seq_idx")) is not None:
            keys.append(ids)
            if min(ids.align, ids.row_align) < VECTOR_BYTES:
                self.vec = min(self.vec, min(ids.align, ids.row_align) // ITEMSIZE[ids.dtype])
        # Compact rows that start on vectors are whole vectors.
        self.whole = all(key.layout == "flat" for key in keys)
        self.shifted = self.whole and ids is None and all(key.align >= VECTOR_BYTES for key in keys)
        self.shifted &= self.vec * ITEMSIZE[keys[0].dtype] < VECTOR_BYTES // 2
        if self.shifted:
            self.vec = VECTOR_BYTES // ITEMSIZE[keys[0].dtype]
        self.taps = self.width - 1
        self.around = -(-self.taps // self.vec)  # vectors that hold the positions before or behind one
        self.pdl = can_use_pdl(variant.arch)

    def named(self, arguments):
        return dict(zip(self.variant.names, arguments))

    def row(self, tensors, name, batch, channel):
        """Byte address of a channel of a sequence, by strides where these are two: a row's number takes divisions."""
        mX, key = tensors[name], self.keys[name]
        if key.layout != "flat" and len(mX.shape) == 3:
            offset = batch * Int64(mX.stride[0]) + Int64(channel) * Int64(mX.stride[1])
            return mX.iterator.toint() + offset * (mX.element_type.width // 8)
        row = batch * Int64(tensors["weight"].shape[0]) + Int64(channel)
        return row_address(mX, key, row, Int32(mX.shape[-1]))

    def shift(self, mX, base):
        """How many elements a row starts behind a vector, which is what all tensors have in common; 0 if all start on
        one.
        """
        width = mX.element_type.width // 8
        return bytes_past(base, mX.element_type, self.vec) // width if self.shifted else Int32(0)

    def count(self, s, shift=None):
        """The vectors of a row of s positions; of any row where its ``shift`` is not said."""
        most = 0 if not self.shifted else self.vec - 1 if shift is None else shift
        return (s + (self.vec - 1) + most) // self.vec

    def fragments(self, mX, place, before, behind):
        """The vectors that have the elements from ``before`` positions before one to ``behind`` behind it; zeros
        outside the row. ``place``: the row's address, the vector's first position, and the positions of a row.
        """
        (base, first, s), dtype = place, mX.element_type
        vectors = range(-self.around if before else 0, 1 + (self.around if behind else 0))
        found = [fragment(dtype, self.vec, 0) for _ in vectors]
        if self.shifted:
            self._load_shifted(found, mX, base, first + vectors[0] * self.vec, s)
            return found
        for i, rX in zip(vectors, found):
            start = first + i * self.vec
            inside, address = (start >= 0) & (start < s), base + Int64(start) * (dtype.width // 8)
            if self.whole:
                load_if(inside, rX, address)
            else:
                load_inside(inside, rX, address, s - start)
        return found

    @cute.jit
    def _load_shifted(self, found: cutlass.Constexpr, mX, base: Int64, start: Int32, s: Int32):
        """Load neighbouring vectors from the position ``start`` on. Few of them are not in the row as a whole."""
        width = mX.element_type.width // 8
        address = base + Int64(start) * width
        if start >= 0 and start + len(found) * self.vec <= s:
            for i in cutlass.range_constexpr(len(found)):
                load(found[i], address + i * VECTOR_BYTES)
        else:
            # No memory behind the last row may be read.
            end = mX.iterator.toint() + row_count(mX) * Int64(s) * width
            for i in cutlass.range_constexpr(len(found)):
                here, place = start + i * self.vec, address + i * VECTOR_BYTES
                room = Int32(cutlass.min(end - place, VECTOR_BYTES)) // width
                load_inside((here > -self.vec) & (here < s), found[i], place, room)
                trim(found[i], here, s)

    def elements(self, vectors, before, behind):
        """The elements of :meth:`fragments`, or of these in fp32."""
        found = [rX[j] for rX in vectors for j in range(self.vec)]
        place = self.around * self.vec if before else 0
        return found[place - before : place + self.vec + behind]

    def wide(self, vectors, before):
        found = []
        for rX in vectors:
            rWide = fragment(Float32, self.vec)
            rWide.store(widen(rX))
            found.append(rWide)
        return self.elements(found, before, 0)

    def sequences(self, tensors, batch, place, behind):
        """The number of each position's sequence, from the first tap's; None where all are of one."""
        mIds = tensors.get("seq_idx")
        if mIds is None:
            return None
        first, s = place
        base = row_address(mIds, self.keys["seq_idx"], batch, s)
        return self.elements(self.fragments(mIds, (base, first, s), self.taps, behind), self.taps, behind)

    def parameters(self, tensors, channel):
        """The weights of a channel, and its bias."""
        mWeight, mBias = tensors["weight"], tensors.get("bias")
        dtype, key = mWeight.element_type, self.keys["weight"]
        address, rWeight = row_address(mWeight, key, Int64(channel), self.width), fragment(dtype, self.width)
        if self.width != 3 and min(key.align, key.row_align) >= access_bits(dtype, self.width) // 8:
            load(rWeight, address)
        else:
            gWeight = gmem_elements(dtype, address, self.width)
            for k in range(self.width):
                rWeight[k] = gWeight[k]
        weights, bias = [rWeight[k].to(Float32) for k in range(self.width)], Float32(0.0)
        if mBias is not None:
            address = mBias.iterator.toint() + Int64(channel) * (mBias.element_type.width // 8)
            bias = gmem_elements(mBias.element_type, address, 1)[0].to(Float32)
        return weights, bias

    def convolved(self, x, ids, weights, bias):
        """The convolution before the activation, of all positions that have all taps in ``x``."""
        found = []
        for t in range(self.taps, len(x)):
            total = bias
            for k in range(self.width):
                term = x[t - self.taps + k]
                total = total + weights[k] * self.same(ids, t, t - self.taps + k, term)
            found.append(total)
        return found

    def same(self, ids, t, other, value):
        """A value, or zero where two positions are of different sequences."""
        return value if ids is None or t == other else Float32(cutlass.select_(ids[t] == ids[other], value, 0.0))

    def save(self, rWide, mX, address, first, s):
        """Store the positions of a vector that the row has."""
        rX = narrow(rWide.load(), mX.element_type, self.vec)
        address = address + Int64(first) * (mX.element_type.width // 8)
        if self.whole and not self.shifted:
            store_if(first < s, rX, address)
        else:
            store_masked(rX, address, first, s)


class CausalConv1dFirst(Windows):
    """The convolution. Bytes moved per element: x and out once.

    Tile: a CTA has ``lanes`` vectors, a power of two that suffices for a row where that is short, of each of
    ``threads / lanes`` channels of a sequence; a thread has :attr:`steps` vectors of a channel, whose weights it reads
    once. The grid has segments of rows, channels and sequences: no thread divides to find its own. No shared memory.
    """

    def __init__(self, variant):
        super().__init__(variant)
        self.steps = self.config.steps

    @cute.jit
    def __call__(self, *arguments):
        tensors = self.named(arguments)
        s, channels = Int32(tensors["x"].shape[-1]), Int32(tensors["weight"].shape[0])
        vectors, bits = self.count(s), Int32(0)
        for i in range(self.threads.bit_length() - 1):
            bits = bits + Int32(cutlass.select_(vectors > (self.steps << i), Int32(1), Int32(0)))
        span, depth = Int32(self.steps) << bits, Int32(self.threads) >> bits
        blocks, batches = (channels + (depth - 1)) // depth, Int32(row_count(tensors["x"], inner=2))
        columns, planes = cutlass.min(blocks, MOST_CTAS), cutlass.min(batches, MOST_CTAS)
        rounds = (blocks + (columns - 1)) // columns, (batches + (planes - 1)) // planes
        self.kernel(arguments[:-1], bits, rounds).launch(
            grid=[(vectors + (span - 1)) // span, columns, planes], block=[self.threads, 1, 1], stream=arguments[-1],
            use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments, bits: Int32, rounds):
        """``bits``: of a lane's number. ``rounds``: of the grid, over channels and over sequences."""
        tensors = self.named(arguments)
        (segment, column, plane), tidx = cute.arch.block_idx(), cute.arch.thread_idx()[0]
        _, columns, planes = cute.arch.grid_dim()
        lane = tidx & ((Int32(1) << bits) - 1)
        firsts = [(((segment * self.steps + u) << bits) + lane) * self.vec for u in range(self.steps)]
        channels, batches = Int32(tensors["weight"].shape[0]), Int32(row_count(tensors["x"], inner=2))
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        for i in cutlass.range(rounds[1], unroll=1):
            batch = i * planes + plane
            for j in cutlass.range(rounds[0], unroll=1):
                channel = (((j * columns + column) * self.threads) >> bits) + (tidx >> bits)
                if (batch < batches) & (channel < channels):
                    self._channel(tensors, Int64(batch), channel, firsts)

    def _channel(self, tensors, batch, channel, firsts):
        mX, s = tensors["x"], Int32(tensors["x"].shape[-1])
        base, target = (self.row(tensors, name, batch, channel) for name in self.rows)
        shift = self.shift(mX, base)
        firsts = [first - shift for first in firsts]
        loaded = [self.fragments(mX, (base, first, s), self.taps, 0) for first in firsts]
        weights, bias = self.parameters(tensors, channel)
        for first, vectors in zip(firsts, loaded):
            ids, rOut = self.sequences(tensors, batch, (first, s), 0), fragment(Float32, self.vec)
            for j, total in enumerate(self.convolved(self.wide(vectors, self.taps), ids, weights, bias)):
                rOut[j] = silu(total)[0] if self.silu else total
            self.save(rOut, tensors["out"], target, first, s)


class CausalConv1dFirstBackward(Windows):
    """The gradient to x, and those to the weights and the bias: a workspace has those of each sequence and channel, and
    a second kernel adds up its rows.

    Tile: a CTA takes a row, of which each of its warps walks a part from the end to the start, a vector a lane. An
    element reaches positions behind it by its taps. The slopes of those behind a lane's vector are the next lanes', by
    shuffles; behind the last lane's they are those of the first lanes in the step before. A part that others follow has
    one more step, for these slopes alone. Of rows that are shorter than a warp's vectors, some ``lanes`` of a warp take
    one as a whole. Shared memory: 4 bytes for each warp and sum, where warps share a row. Bytes moved per element: x,
    dout and dx once.
    """

    rows = ("x", "dout", "dx")

    def __init__(self, variant):
        super().__init__(variant)
        self.lanes = self.config.lanes
        self.column_sum = ColumnSum(None, variant.arch)

    @cute.jit
    def __call__(self, *arguments):
        tensors = self.named(arguments)
        rows, kernel, each = row_count(tensors["x"]), self.kernel, 1
        if const_expr(self.lanes < WARP):
            kernel, each = self.short_rows, self.threads // self.lanes
        kernel(arguments[:-1]).launch(
            grid=[Int32((rows + (each - 1)) // each), 1, 1], block=[self.threads, 1, 1], stream=arguments[-1],
            use_pdl=self.pdl,
        )  # fmt: skip
        mPartials = tensors["dweight_partials"]
        columns = cute.make_tensor(tensors["dweight"].iterator, cute.make_layout(mPartials.shape[1]))
        partials = mPartials, tensors.get("dbias_partials")
        self.column_sum(partials, (columns, tensors.get("dbias")), arguments[-1])

    @cute.kernel
    def kernel(self, arguments):
        tensors = self.named(arguments)
        tidx, row = cute.arch.thread_idx()[0], Int64(cute.arch.block_idx()[0])
        s, channels = Int32(tensors["x"].shape[-1]), Int64(tensors["weight"].shape[0])
        smem, warps = cutlass.utils.SmemAllocator(), self.threads // WARP
        sSum = smem.allocate_tensor(Float32, cute.make_layout((self.width + 1, warps)), byte_alignment=16)
        (batch, channel), bases, kept = self._begin(tensors, row, channels)
        shift = self.shift(tensors["x"], bases["x"])
        lane, chunks = tidx % WARP, (self.count(s, shift) + (WARP - 1)) // WARP
        begin, end = (cutlass.min((tidx // WARP + i) * ((chunks + (warps - 1)) // warps), chunks) for i in range(2))
        last = Int32(cutlass.select_(end < chunks, end, end - 1))
        for i in range(self.config.ahead):
            self._prefetch(tensors, bases, (last - i, begin), (s, shift))
        parameters = self.parameters(tensors, channel)
        for i in cutlass.range(last - begin + 1, unroll=1):
            chunk = last - i
            first = (chunk * WARP + lane) * self.vec - shift
            if const_expr(self.config.ahead > 0):
                self._prefetch(tensors, bases, (chunk - self.config.ahead, begin), (s, shift))
            self._vector(tensors, bases, (batch, first, s), parameters, kept, chunk < end)
        rSums, _ = kept
        for k in cutlass.range_constexpr(self.width + 1):
            total = cute.arch.warp_reduction(rSums[k], operator.add)
            if lane == 0:
                sSum[k, tidx // WARP] = total
        cute.arch.sync_threads()
        if tidx < self.width + 1:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(warps):
                total = total + sSum[tidx, i]
            self._store_sum(tensors, row, tidx, total)

    @cute.kernel
    def short_rows(self, arguments):
        """Some lanes take a row: all walk as many steps, since they shuffle together, and those past the last row take
        it again and store nothing.
        """
        tensors = self.named(arguments)
        tidx, rows = cute.arch.thread_idx()[0], row_count(tensors["x"])
        s, channels = Int32(tensors["x"].shape[-1]), Int64(tensors["weight"].shape[0])
        place = Int64(cute.arch.block_idx()[0]) * (self.threads // self.lanes) + tidx // self.lanes
        row, valid, lane = cutlass.min(place, rows - 1), place < rows, tidx % self.lanes
        (batch, channel), bases, kept = self._begin(tensors, row, channels)
        shift, chunks = self.shift(tensors["x"], bases["x"]), (self.count(s) + (self.lanes - 1)) // self.lanes
        parameters = self.parameters(tensors, channel)
        for i in cutlass.range(chunks, unroll=1):
            first = ((chunks - 1 - i) * self.lanes + lane) * self.vec - shift
            self._vector(tensors, bases, (batch, first, s), parameters, kept, valid)
        rSums, _ = kept
        for k in cutlass.range_constexpr(self.width + 1):
            total = cute.arch.warp_reduction(rSums[k], operator.add, threads_in_group=self.lanes)
            if (lane == 0) & valid:
                self._store_sum(tensors, row, Int32(k), total)

    def _begin(self, tensors, row, channels):
        """Wait for the kernel before.

        Returns:
            A row's sequence and channel; the addresses of its tensors; a thread's sums, and the slopes behind its
            vector, 0 at first.
        """
        batch = row // channels
        channel = Int32(row - batch * channels)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        bases = {name: self.row(tensors, name, batch, channel) for name in self.rows}
        return (batch, channel), bases, (fragment(Float32, self.width + 1, 0.0), fragment(Float32, self.vec, 0.0))

    def _prefetch(self, tensors, bases, chunks, row):
        """Bring a chunk of the warp's part, if there is one, to L2."""
        (chunk, begin), (s, shift) = chunks, row
        first = (chunk * WARP + cute.arch.lane_idx()) * self.vec - shift
        for name in ("x", "dout"):
            address = bases[name] + Int64(first) * (tensors[name].element_type.width // 8)
            fetch_ahead(address, (chunk >= begin) & (first < s))

    @cute.jit
    def _store_sum(self, tensors: cutlass.Constexpr, row: Int64, k: Int32, total: Float32):
        """Write the sum of a tap, or the bias's as the last one."""
        mWeight, mBias = tensors["dweight_partials"], tensors.get("dbias_partials")
        gWeight = gmem_elements(Float32, mWeight.iterator.toint() + row * (4 * self.width), self.width)
        if k < self.width:
            gWeight[k] = total
        if const_expr(mBias is not None):
            gBias = gmem_elements(Float32, mBias.iterator.toint() + row * 4, 1)
            if k == self.width:
                gBias[0] = total

    def _vector(self, tensors, bases, place, parameters, kept, wanted):
        (batch, first, s), (weights, bias), (rSums, rLater), taps = place, parameters, kept, self.taps
        x = self.fragments(tensors["x"], (bases["x"], first, s), taps, 0)
        slopes = self.fragments(tensors["dout"], (bases["dout"], first, s), 0, 0)
        ids = self.sequences(tensors, batch, (first, s), taps)
        x, slopes = self.wide(x, taps), self.wide(slopes, 0)
        if self.silu:
            slopes = [times_silu_derivative(g, c) for g, c in zip(slopes, self.convolved(x, ids, weights, bias))]
        slopes += self._behind(slopes, rLater)
        self._add(tensors["dx"], (bases["dx"], first, s), (x, slopes, ids, weights), rSums, wanted)
        for j in range(self.vec):
            rLater[j] = slopes[j]

    def _behind(self, slopes, rLater):
        """The slopes of the positions behind this lane's vector, which the next lanes have."""
        lane, found = cute.arch.lane_idx(), []
        own_lane = lane % self.lanes
        for t in range(self.taps):
            ahead, j = 1 + t // self.vec, t % self.vec
            own = Float32(cutlass.select_(own_lane < ahead, rLater[j], slopes[j]))
            found.append(cute.arch.shuffle_sync(own, lane - own_lane + (own_lane + ahead) % self.lanes))
        return found

    @cute.jit
    def _add(
        self, mOut, place: cutlass.Constexpr, given: cutlass.Constexpr, rSums: cute.Tensor, wanted: Boolean
    ):  # fmt: skip
        """Write a vector's gradient and add to the sums, if ``wanted``."""
        (base, first, s), (x, slopes, ids, weights) = place, given
        taps, rOut = self.taps, fragment(Float32, self.vec)
        if wanted:
            for t in cutlass.range_constexpr(self.vec):
                total = Float32(0.0)
                for k in cutlass.range_constexpr(self.width):
                    later = t + taps - k  # the output that the element reaches by this tap
                    total = total + weights[k] * self.same(ids, taps + t, taps + later, slopes[later])
                    rSums[k] = rSums[k] + slopes[t] * self.same(ids, taps + t, t + k, x[t + k])
                rOut[t] = total
                rSums[self.width] = rSums[self.width] + slopes[t]
            self.save(rOut, mOut, base, first, s)
