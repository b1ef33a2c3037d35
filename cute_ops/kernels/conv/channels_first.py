"""Causal convolutions whose positions are neighbours in memory: see :mod:`cute_ops.ops.conv.channels_first`."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.conv.config import FirstConfig
from cute_ops.kernels.lib.activation import silu, times_silu_derivative
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load_inside, narrow, store_masked
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_address, row_count
from cute_ops.kernels.rotary.layout import split_index


class Windows:
    """A thread's vector of a row of positions, with those before and behind it that the taps of its elements meet.

    Tile: a thread has ``vec`` neighbouring positions of one channel of one sequence, up to 16 bytes. Its neighbours'
    positions come from L1. No shared memory.
    """

    rows = ("x", "out")

    def __init__(self, variant):
        self.variant, self.keys, self.width = variant, variant.tensors, variant.dims["w"]
        self.threads, self.silu = FirstConfig.of(variant.config).threads, variant.attrs["activation"] == "silu"
        keys = [self.keys[name] for name in self.rows]
        self.vec = min(min(key.align, key.row_align, VECTOR_BYTES) // ITEMSIZE[key.dtype] for key in keys)
        if (ids := self.keys.get("seq_idx")) is not None and min(ids.align, ids.row_align) < VECTOR_BYTES:
            self.vec = min(self.vec, min(ids.align, ids.row_align) // ITEMSIZE[ids.dtype])
        self.taps = self.width - 1
        self.around = -(-self.taps // self.vec)  # vectors that hold the positions before or behind one
        self.pdl = can_use_pdl(variant.arch)

    def named(self, arguments):
        return dict(zip(self.variant.names, arguments))

    def elements(self, mX, name, place, before, behind):
        """The elements from ``before`` positions before the vector to ``behind`` behind it; zeros outside the row.
        ``place``: the row, the vector's first position, and the positions of a row.
        """
        row, first, s = place
        key, dtype = self.keys[name], mX.element_type
        base, found = row_address(mX, key, row, s), []
        for i in range(-self.around if before else 0, 1 + (self.around if behind else 0)):
            start = first + i * self.vec
            rX = fragment(dtype, self.vec, 0)
            load_inside((start >= 0) & (start < s), rX, base + Int64(start) * (dtype.width // 8), s - start)
            found += [rX[j] for j in range(self.vec)]
        place = self.around * self.vec if before else 0
        return found[place - before : place + self.vec + behind]

    def wide(self, *given):
        return [x.to(Float32) for x in self.elements(*given)]

    def sequences(self, tensors, place, before, behind):
        """The number of each position's sequence, as :meth:`elements`; None where all are of one."""
        mIds = tensors.get("seq_idx")
        if mIds is None:
            return None
        row, *others = place
        return self.elements(mIds, "seq_idx", (row // Int64(tensors["weight"].shape[0]), *others), before, behind)

    def parameters(self, tensors, channel):
        """The weights of a channel, and its bias."""
        mWeight, mBias = tensors["weight"], tensors.get("bias")
        address = mWeight.iterator.toint() + Int64(channel * self.width) * (mWeight.element_type.width // 8)
        gWeight = gmem_elements(mWeight.element_type, address, self.width)
        weights, bias = [gWeight[k].to(Float32) for k in range(self.width)], Float32(0.0)
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


class CausalConv1dFirst(Windows):
    """The convolution. Bytes moved per element: x and out once."""

    @cute.jit
    def __call__(self, *arguments):
        mX = self.named(arguments)["x"]
        s = Int32(mX.shape[-1])
        vectors = (s + (self.vec - 1)) // self.vec
        items = row_count(mX) * Int64(vectors)
        self.kernel(arguments[:-1]).launch(
            grid=[Int32((items + (self.threads - 1)) // self.threads), 1, 1], block=[self.threads, 1, 1],
            stream=arguments[-1], use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments):
        tensors = self.named(arguments)
        mX, mOut = tensors["x"], tensors["out"]
        s, channels = Int32(mX.shape[-1]), Int32(tensors["weight"].shape[0])
        vectors = (s + (self.vec - 1)) // self.vec
        start = Int64(cute.arch.block_idx()[0]) * self.threads
        row, place = split_index(start, cute.arch.thread_idx()[0], vectors)
        valid = row < row_count(mX)
        row = cutlass.min(row, row_count(mX) - 1)
        first = place * self.vec
        wait_for_previous(self.pdl)
        x = self.wide(mX, "x", (row, first, s), self.taps, 0)
        ids = self.sequences(tensors, (row, first, s), self.taps, 0)
        weights, bias = self.parameters(tensors, Int32(row % Int64(channels)))
        let_next_start(self.pdl)
        rOut = fragment(Float32, self.vec)
        for j, total in enumerate(self.convolved(x, ids, weights, bias)):
            rOut[j] = silu(total)[0] if const_expr(self.silu) else total
        address = row_address(mOut, self.keys["out"], row, s) + Int64(first) * (mOut.element_type.width // 8)
        end = cutlass.select_(valid, s, Int32(0))
        store_masked(narrow(rOut.load(), mOut.element_type, self.vec), address, first, end)


class CausalConv1dFirstBackward(Windows):
    """The gradient to x, and for each sequence and channel those to the weights and the bias.

    A CTA takes a row, its threads one vector after another. Shared memory: 4 bytes for each warp and sum. Bytes moved
    per element: x, dout and dx once.
    """

    rows = ("x", "dout", "dx")

    @cute.jit
    def __call__(self, *arguments):
        mX = self.named(arguments)["x"]
        self.kernel(arguments[:-1]).launch(
            grid=[Int32(row_count(mX)), 1, 1], block=[self.threads, 1, 1], stream=arguments[-1], use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, arguments):
        tensors = self.named(arguments)
        mX = tensors["x"]
        tidx, row = cute.arch.thread_idx()[0], Int64(cute.arch.block_idx()[0])
        s, channels = Int32(mX.shape[-1]), Int32(tensors["weight"].shape[0])
        smem = cutlass.utils.SmemAllocator()
        warps = self.threads // WARP
        sSum = smem.allocate_tensor(Float32, cute.make_layout((self.width + 1, warps)), byte_alignment=16)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        weights, bias = self.parameters(tensors, Int32(row % Int64(channels)))
        rSums = fragment(Float32, self.width + 1, 0.0)
        for first in cutlass.range(tidx * self.vec, s, self.threads * self.vec, unroll=1):
            self._vector(tensors, (row, first, s), weights, bias, rSums)
        for k in cutlass.range_constexpr(self.width + 1):
            total = cute.arch.warp_reduction(rSums[k], operator.add)
            if tidx % WARP == 0:
                sSum[k, tidx // WARP] = total
        cute.arch.sync_threads()
        if tidx < self.width + 1:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(warps):
                total = total + sSum[tidx, i]
            self._store_sum(tensors, row, tidx, total)

    def _store_sum(self, tensors, row, k, total):
        address = tensors["sums"].iterator.toint() + (row * (self.width + 1) + Int64(k)) * 4
        gmem_elements(Float32, address, 1)[0] = total

    def _vector(self, tensors, place, weights, bias, rSums):
        row, first, s = place
        mX, mD, mOut, taps = tensors["x"], tensors["dout"], tensors["dx"], self.taps
        x = self.wide(mX, "x", place, taps, taps)
        slopes = self.wide(mD, "dout", place, 0, taps)
        ids = self.sequences(tensors, place, taps, taps)
        if self.silu:
            slopes = [times_silu_derivative(g, c) for g, c in zip(slopes, self.convolved(x, ids, weights, bias))]
        rOut = fragment(Float32, self.vec)
        for t in range(self.vec):
            total = Float32(0.0)
            for k in range(self.width):
                later = t + taps - k  # the output that the element reaches by this tap
                total = total + weights[k] * self.same(ids, taps + t, taps + later, slopes[later])
                rSums[k] = rSums[k] + slopes[t] * self.same(ids, taps + t, t + k, x[t + k])
            rOut[t] = total
            rSums[self.width] = rSums[self.width] + slopes[t]
        address = row_address(mOut, self.keys["dx"], row, s) + Int64(first) * (mOut.element_type.width // 8)
        store_masked(narrow(rOut.load(), mOut.element_type, self.vec), address, first, s)
