"""Group norm and its gradients, channels after positions: a cluster takes some groups of an example."""

import math
import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.activation import silu
from cute_ops.kernels.lib.arguments import named
from cute_ops.kernels.lib.copy import (
    copy_vector,
    fragment,
    gmem_elements,
    gmem_pointer,
    load,
    load_if,
    narrow,
    store,
    widen,
)
from cute_ops.kernels.lib.kept import KeptVectors
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, row_address, row_count
from cute_ops.kernels.norm.group_config import GroupConfig, groups_of
from cute_ops.kernels.norm.group_moments import GroupMoments
from cute_ops.kernels.norm.group_sums import ClusterChannels, ClusterNumbers, Tensors, slope_of

# Parts of a thread's vectors that it waits for one after another.
BATCHES = 4


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class Place:
    """Where a thread works: an example, the channel that its vector begins with, the vector's number among those of the
    cluster, and its positions: ``count``, from ``first`` on.
    """

    example: Any
    channel: Any
    vector: Any
    first: Any
    count: Any


class GroupExamples:
    """Parts that the forward and its gradients share.

    Tile: a cluster takes ``width`` channels, some groups, of an example, and each of its CTAs some of the positions. A
    thread has a vector of channels, the same at every ``depth``-th position, so that it adds its channels up in
    registers; sums over threads, channels and CTAs follow in a fixed order. In the form ``smem`` each thread copies its
    vectors to shared memory once; with ``passes`` it reads them again.
    Shared memory: the vectors; 4 bytes for each thread and element of a vector, 8 for a channel and its helpers.
    """

    inputs = ("x",)
    target = "out"
    values, stages, by_channel = 2, 1, True

    def __init__(self, variant):
        self.variant, self.config, self.keys = variant, GroupConfig.of(variant.config), variant.tensors
        self.s, self.c = variant.dims["m"], variant.dims["n"]
        self.groups, self.silu = groups_of(variant.attrs, variant.dims), variant.attrs["silu"]
        self.d, self.width, self.cluster = self.c // self.groups, self.config.width, self.config.cluster
        itemsize = ITEMSIZE[self.keys["x"].dtype]
        present = [self.keys[name] for name in (*self.inputs, self.target) if self.keys.get(name)]
        aligned = min(min(key.align, key.row_align, VECTOR_BYTES) for key in present) // itemsize
        self.vec = self.config.vec
        self.access = min(aligned, self.vec)
        self.across = self.width // self.vec
        self.threads = self.config.threads
        self.depth = self.threads // self.across
        self.span = -(-self.s // self.cluster)
        self.per_thread = -(-self.span // self.depth)
        self.batches = 1 if self.config.form == "passes" else min(BATCHES, self.per_thread)
        self.batch = -(-self.per_thread // self.batches)
        # Neighbouring channels of a vector of which a thread has one sum, and these numbers of a vector, of a cluster
        # and of a group.
        self.part = 1 if self.by_channel else math.gcd(self.vec, self.d)
        self.parts, self.of_width, self.of_each = (size // self.part for size in (self.vec, self.width, self.d))
        self.together = min(self.part, 2) if self.by_channel else 2
        # Threads that add up such a number, each over a part of the threads that have it.
        self.helpers = max(min(self.threads // self.of_width, self.depth, WARP), 1)
        self.blocks, self.of_block = -(-self.c // self.width), self.width // self.d
        self.numbers = ClusterNumbers(self.values * self.of_block, self.cluster, self.stages)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, *arguments):
        tensors = named(Tensors, self.variant, arguments)
        self.kernel(tensors).launch(**self.launched(tensors, arguments[-1]))

    def launched(self, tensors, stream):
        """The arguments of a launch."""
        held = self.config.form != "passes"
        return {
            "grid": [Int32(row_count(tensors.x, 2)) * self.blocks, self.cluster, 1], "block": [self.threads, 1, 1],
            "cluster": [1, self.cluster, 1] if self.cluster > 1 else None, "min_blocks_per_mp": self.config.resident,
            "preferred_smem_carveout": 100 if held else SMEM_PERCENT, "stream": stream, "use_pdl": self.pdl,
        }  # fmt: skip

    def place(self):
        """This thread's place, and the first channel of the cluster's."""
        return self.place_of(cute.arch.block_idx()[0])

    def place_of(self, block, there=True):
        """This thread's place in a cluster's part, with no positions unless it is ``there``; its first channel."""
        rank, tidx = cute.arch.block_idx()[1], cute.arch.thread_idx()[0]
        example, start = block // self.blocks, block % self.blocks * self.width
        vector, top = tidx % self.across, tidx // self.across
        begin = Int32(rank if self.cluster > 1 else 0) * self.span
        end = cutlass.min(begin + self.span, Int32(self.s))
        here = (top < self.depth) & (start + vector * self.vec < self.c)
        here = here if there is True else here & there
        count = cutlass.select_(here, cutlass.max((end - begin - top + (self.depth - 1)) // self.depth, 0), Int32(0))
        channel = cutlass.min(start + vector * self.vec, self.c - self.vec)
        return Place(example, channel, vector, begin + top, Int32(count)), start

    def slots(self, smem, tensors):
        """Shared memory of each input: (elements of a vector, threads, vectors of a thread); None in two passes."""
        if self.config.form == "passes":
            return [None for _ in self.inputs]
        layout = cute.make_layout(
            (self.vec, self.threads, self.per_thread), stride=(1, self.vec, self.vec * self.threads)
        )
        inputs = [getattr(tensors, name) for name in self.inputs]
        return [smem.allocate_tensor(mX.element_type, layout, byte_alignment=VECTOR_BYTES) for mX in inputs]

    def address(self, mX, name, place, k):
        """Where a thread's k-th vector is: in compact tensors a constant, or one product, beyond its first one."""
        key, itemsize = self.keys[name], mX.element_type.width // 8
        row, more = Int64(place.example) * self.s + Int64(place.first), Int64(k) * self.depth
        if key.layout != "flat":
            row, more = row + more, 0
        return row_address(mX, key, row, self.c) + Int64(place.channel) * itemsize + more * (self.c * itemsize)

    @cute.jit
    def fetch(self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, place: cutlass.Constexpr):
        """Start copying this thread's vectors, a batch after another."""
        tidx = cute.arch.thread_idx()[0]
        for batch in cutlass.range_constexpr(self.batches):
            for sX, name in zip(slots, self.inputs):
                if const_expr(sX is not None):
                    begin, end = self.of_batch(place, batch)
                    for k in cutlass.range(begin, end, unroll=4):
                        self.copy(tensors, sX[None, tidx, k], place, k, name)
            cute.arch.cp_async_commit_group()

    def copy(self, tensors, sVector, place, k, name="x"):
        """Start copying a thread's k-th vector."""
        mX = getattr(tensors, name)
        dtype = mX.element_type
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
        source = gmem_pointer(dtype, self.address(mX, name, place, k), self.vec)
        copy_vector(atom, dtype, self.vec, source, sVector.iterator)

    def of_batch(self, place, batch):
        """The first of a batch's vectors of a thread, and the one after its last."""
        return Int32(batch * self.batch), cutlass.min(place.count, (batch + 1) * self.batch)

    def arrived(self, batch):
        """Wait for a batch: what is added up first is so while later ones are on their way."""
        cute.arch.cp_async_wait_group(self.batches - 1 - batch)

    def read(self, tensors, slots, place, k, i=0):
        """A thread's k-th vector of the i-th input, in fp32."""
        sX, name = slots[i], self.inputs[i]
        mX = getattr(tensors, name)
        rX = fragment(mX.element_type, self.vec)
        if sX is None:
            for piece, start in self.accesses(rX, self.address(mX, name, place, k)):
                load(piece, start)
        else:
            cute.autovec_copy(sX[None, cute.arch.thread_idx()[0], k], rX)
        return widen(rX)

    def accesses(self, rX, address):
        """A vector in memory by what one access reads or writes: parts of the fragment, and their addresses."""
        if self.access == self.vec:
            return [(rX, address)]
        layout, size = cute.make_layout((self.access,)), rX.element_type.width // 8
        starts = range(0, self.vec, self.access)
        return [(cute.make_tensor(rX.iterator + i, layout), address + i * size) for i in starts]

    def write(self, mX, name, place, k, rOut):
        """Round a thread's k-th vector and store it."""
        rX = narrow(rOut.load(), mX.element_type, self.vec)
        for piece, start in self.accesses(rX, self.address(mX, name, place, k)):
            store(piece, start)

    def columns(self, mW, place):
        """The elements of a parameter at this thread's channels, in fp32; None where it is absent."""
        if mW is None:
            return None
        gW = gmem_elements(mW.element_type, mW.iterator.toint(), self.c)
        return [gW[place.channel + j].to(Float32) for j in range(self.vec)]

    def row_numbers(self, m, name, place):
        """The numbers of an example's groups."""
        address = row_address(m, self.keys[name], Int64(place.example), self.groups)
        return gmem_elements(Float32, address, self.groups)

    @cute.jit
    def store_if(self, valid: Boolean, target: cute.Tensor, i: Int32, value: Float32):
        if valid:
            target[i] = value

    def allocate(self, smem):
        """Shared memory of sums: those of threads, those of helpers, and the numbers of the cluster."""
        width, helpers = self.of_width, self.helpers
        layout = cute.make_layout((width, self.depth, self.together), stride=(1, width, width * self.depth))
        sThreads = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        layout = cute.make_layout((width, helpers, 2), stride=(1, width, width * helpers))
        return sThreads, smem.allocate_tensor(Float32, layout, byte_alignment=16), self.numbers.allocate(smem)

    def add_up(self, found, sums, place):
        """Add up one or two numbers of each of the threads' channels; afterwards helpers have the sums."""
        for which in range(0, len(found), self.together):
            self._add_up(found[which : which + self.together], sums, place, which)

    @cute.jit
    def _add_up(
        self, found: cutlass.Constexpr, sums: cutlass.Constexpr, place: cutlass.Constexpr, which: cutlass.Constexpr
    ):  # fmt: skip
        sThreads, sHelpers, _ = sums
        tidx = cute.arch.thread_idx()[0]
        if const_expr(which > 0):
            cute.arch.barrier()  # nobody reads the sums before
        if tidx < self.across * self.depth:
            for i, rSum in enumerate(found):
                for j in cutlass.range_constexpr(self.parts):
                    total = rSum[j * self.part]
                    for more in cutlass.range_constexpr(1, self.part):
                        total = total + rSum[j * self.part + more]
                    sThreads[place.vector * self.parts + j, tidx // self.across, i] = total
        cute.arch.barrier()
        for i in cutlass.range(tidx, self.of_width * self.helpers, self.threads, unroll=1):
            column, helper = i % self.of_width, i // self.of_width
            totals = [Float32(0.0) for _ in found]
            for top in cutlass.range(helper, self.depth, self.helpers, unroll=4):
                totals = [total + sThreads[column, top, more] for more, total in enumerate(totals)]
            for more, total in enumerate(totals):
                sHelpers[column, helper, which + more] = total

    def of_channel(self, sums, column, which):
        """The sum of a channel, or of the channels of a part, over this CTA."""
        total = Float32(0.0)
        for helper in range(self.helpers):
            total = total + sums[1][column, helper, which]
        return total

    @cute.jit
    def of_group(self, sums: cutlass.Constexpr, group: Int32, sWeight: cutlass.Constexpr):
        """Both sums of a group over this CTA, of channels times their weights; a warp calls it."""
        totals = [Float32(0.0) for _ in range(2)]
        for j in cutlass.range(cute.arch.lane_idx(), self.of_each * self.helpers, WARP, unroll=1):
            column = group * self.of_each + j % self.of_each
            weight = Float32(1.0) if const_expr(sWeight is None) else sWeight[column]
            found = [sums[1][column, j // self.of_each, which] * weight for which in range(2)]
            totals = [total + each for total, each in zip(totals, found)]
        return [cute.arch.warp_reduction(total, operator.add) for total in totals]

    def of_groups(self, number, place):
        """``number`` of the groups of this thread's channels, each computed once."""
        found = {}
        for j in range(self.vec):
            new = j == 0 or (j % self.part == 0 and self.d % self.vec)
            found[j] = number((place.vector * self.vec + j) // self.d) if new else found[j - 1]
        return [found[j] for j in range(self.vec)]


class GroupExamplesForward(GroupMoments, GroupExamples):
    """``out = activation((x - mean) * rstd * weight + bias)``, and mean and rstd of each group.

    Sums are taken while x arrives; see :class:`~cute_ops.kernels.norm.group_moments.GroupMoments`.
    Bytes moved per element: x and out once each.
    """

    by_channel = False

    @cute.kernel
    def kernel(self, tensors):
        smem = cutlass.utils.SmemAllocator()
        slots, sums = self.slots(smem, tensors), self.allocate(smem)
        self.numbers.prepare(sums[2])
        place, start = self.place()
        wait_for_previous(self.pdl)
        self.fetch(tensors, slots, place)
        weight, bias = (self.columns(mW, place) for mW in (tensors.weight, tensors.bias))
        self.numbers.ready(sums[2])
        found = [fragment(Float32, self.vec, 0.0) for _ in range(2)]
        self.arrived(0)
        pivot = self.pivots(self.first(tensors, slots, place), place)
        for batch in cutlass.range_constexpr(self.batches):
            self.arrived(batch)
            self._sum(tensors, slots, place, found, pivot, batch)
        mean, rstd = self.combine(tensors, sums, (found, pivot), (place, start))
        let_next_start(self.pdl)
        self._write(tensors, slots, place, (mean, rstd, weight, bias))

    def first(self, tensors, slots, place):
        """A thread's first vector, if it has one, in fp32."""
        if slots[0] is not None:
            return self.read(tensors, slots, place, 0)
        rX = fragment(tensors.x.element_type, self.vec, 0)
        for piece, start in self.accesses(rX, self.address(tensors.x, "x", place, 0)):
            load_if(place.count > 0, piece, start)
        return widen(rX)

    @cute.jit
    def _sum(
        self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, place: cutlass.Constexpr, found: cutlass.Constexpr,
        pivot: cutlass.Constexpr, batch: cutlass.Constexpr,
    ):  # fmt: skip
        begin, end = self.of_batch(place, batch)
        for k in cutlass.range(begin, end, unroll=2):
            self.add(found, self.read(tensors, slots, place, k), pivot)

    @cute.jit
    def _write(
        self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, place: cutlass.Constexpr, numbers: cutlass.Constexpr
    ):  # fmt: skip
        mean, rstd, weight, bias = numbers
        scale = rstd if const_expr(weight is None) else [rstd[j] * weight[j] for j in range(self.vec)]
        terms = self.terms(mean, scale, bias, tensors.x.element_type)
        for k in cutlass.range(place.count, unroll=2):
            self.write_normalised(tensors, place, k, self.read(tensors, slots, place, k), terms)

    def terms(self, mean, scale, bias, dtype):
        """What :meth:`write_normalised` takes x by. For 16-bit inputs that is one FMA: rounding mean * scale loses less
        than the input's own rounding.
        """
        each = range(self.vec)
        if dtype.width > 16:
            return mean, scale, bias
        return None, scale, [(0.0 if bias is None else bias[j]) - mean[j] * scale[j] for j in each]

    def write_normalised(self, tensors, place, k, x, terms):
        """Store a thread's k-th vector of the output."""
        (mean, scale, bias), rOut = terms, fragment(Float32, self.vec)
        for j in range(self.vec):
            y = (x[j] if mean is None else x[j] - mean[j]) * scale[j]
            y = y if bias is None else y + bias[j]
            rOut[j] = silu(y)[0] if self.silu else y
        self.write(tensors.out, "out", place, k, rOut)


class GroupExamplesBackward(GroupExamples):
    """Gradients as of :class:`~cute_ops.kernels.norm.group_rows.GroupRowsBackward`.

    Shared memory: 4 bytes for each weight; with ``keep`` also 16 for each vector of 16-bit dtypes.
    Bytes moved per element: x, dy and dx once each.
    """

    inputs = ("x", "dy")
    target = "dx"

    def __init__(self, variant):
        super().__init__(variant)
        self.channels = ClusterChannels(self.width, self.cluster)

    @cute.kernel
    def kernel(self, tensors):
        smem = cutlass.utils.SmemAllocator()
        slots, sums, owned = self.slots(smem, tensors), self.allocate(smem), self.channels.allocate(smem)
        kept = KeptVectors.beside(smem, slots[1]) if const_expr(self.config.keep) else None
        sWeight = self._weights(smem, tensors.weight)
        self.channels.prepare(owned)
        self.numbers.prepare(sums[2])
        place, start = self.place()
        wait_for_previous(self.pdl)
        self.fetch(tensors, slots, place)
        weight, bias = (self.columns(mW, place) for mW in (tensors.weight, tensors.bias))
        mean, rstd = (self._numbers(getattr(tensors, name), name, place) for name in ("mean", "rstd"))
        scale = rstd if const_expr(weight is None) else [rstd[j] * weight[j] for j in range(self.vec)]
        numbers = mean, rstd, scale, bias
        self._keep_weights(tensors.weight, sWeight, start)
        self.numbers.ready(sums[2])
        self.channels.ready(owned)
        found = [fragment(Float32, self.vec, 0.0) for _ in range(2)]
        self._sum(tensors, slots, kept, place, found, numbers)
        self.add_up(found, sums, place)
        cute.arch.barrier()
        self._tell(sums, sWeight)
        self._tell_channels(tensors, sums, owned, start)
        self.numbers.wait(sums[2], 0)
        let_next_start(self.pdl)
        if const_expr(tensors.dx is not None):
            pulls = [self._means(sums, place, which) for which in range(2)]
            self._write(tensors, slots, kept, place, numbers, pulls)
        self.channels.wait(owned)
        self._store_sums(tensors, owned, start)

    def _weights(self, smem, mWeight):
        """Shared memory of the weights of the cluster's channels: a load from elsewhere takes microseconds while all
        SMs read and write, and all threads would wait for it between their sums and what follows from them.
        """
        return (
            None if mWeight is None else smem.allocate_tensor(Float32, cute.make_layout(self.width), byte_alignment=16)
        )

    @cute.jit
    def _keep_weights(self, mWeight: cutlass.Constexpr, sWeight: cutlass.Constexpr, start: Int32):
        """Keep the weights, past the last channel that one's; a barrier comes before they are read."""
        if const_expr(sWeight is not None):
            gW = gmem_elements(mWeight.element_type, mWeight.iterator.toint(), self.c)
            for i in cutlass.range(cute.arch.thread_idx()[0], self.width, self.threads, unroll=1):
                sWeight[i] = gW[cutlass.min(start + i, self.c - 1)].to(Float32)

    @cute.jit
    def _tell(self, sums: cutlass.Constexpr, sWeight: cutlass.Constexpr):
        """Tell the cluster both sums of each of this CTA's groups, of channels times their weights."""
        for group in cutlass.range(cute.arch.thread_idx()[0] // WARP, self.of_block, self.threads // WARP, unroll=1):
            totals = self.of_group(sums, group, sWeight)
            for which in cutlass.range_constexpr(2):
                self.numbers.send(sums[2], group + which * self.of_block, totals[which], 0)

    def _means(self, sums, place, which):
        """The means of a number over the groups of this thread's channels."""
        count, first = 1.0 / (self.d * self.s), which * self.of_block
        return self.of_groups(lambda group: self.numbers.total(sums[2], group + first, 0) * count, place)

    def _numbers(self, m, name, place):
        """The numbers of the groups of this thread's channels."""
        g = self.row_numbers(m, name, place)
        if self.d % self.vec == 0:
            return [g[place.channel // self.d]] * self.vec
        return [g[(place.channel + j) // self.d] for j in range(self.vec)]

    def _slopes(self, tensors, slots, kept, place, numbers, apart, k):
        """The gradients to what the activation is of, of a thread's k-th vector; ``apart``: x less the mean."""
        if kept is not None:
            return kept.load(cute.arch.thread_idx()[0], k)
        _, _, scale, bias = numbers
        dy = self.read(tensors, slots, place, k, 1)
        each = [None if bias is None else bias[j] for j in range(self.vec)]
        return [slope_of(dy[j], apart[j], scale[j], each[j], self.silu) for j in range(self.vec)]

    @cute.jit
    def _sum(
        self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, kept: cutlass.Constexpr, place: cutlass.Constexpr,
        found: cutlass.Constexpr, numbers: cutlass.Constexpr,
    ):  # fmt: skip
        mean, rstd, _, _ = numbers
        for batch in cutlass.range_constexpr(self.batches):
            self.arrived(batch)
            begin, end = self.of_batch(place, batch)
            for k in cutlass.range(begin, end, unroll=2):
                x, rSlope = self.read(tensors, slots, place, k), fragment(Float32, self.vec)
                apart = [x[j] - mean[j] for j in range(self.vec)]
                slopes = self._slopes(tensors, slots, None, place, numbers, apart, k)
                for j in cutlass.range_constexpr(self.vec):
                    rSlope[j] = slopes[j]
                    found[0][j] = found[0][j] + slopes[j] * apart[j]
                    found[1][j] = found[1][j] + slopes[j]
                if const_expr(kept is not None):
                    kept.store(rSlope, cute.arch.thread_idx()[0], k)
        for j in cutlass.range_constexpr(self.vec):
            found[0][j] = found[0][j] * rstd[j]

    @cute.jit
    def _tell_channels(
        self, tensors: cutlass.Constexpr, sums: cutlass.Constexpr, owned: cutlass.Constexpr, start: Int32
    ):
        """Tell the cluster this CTA's sums of channels, or write them."""
        for column in cutlass.range(cute.arch.thread_idx()[0], self.channels.padded, self.threads, unroll=1):
            place = cutlass.min(column, self.width - 1)
            values = [self.of_channel(sums, place, which) for which in range(2)]
            if const_expr(self.cluster > 1):
                self.channels.send(owned, column, values)
            else:
                self._store(tensors, start + column, values)

    @cute.jit
    def _store_sums(self, tensors: cutlass.Constexpr, owned: cutlass.Constexpr, start: Int32):
        """Write the sums of this CTA's channels of a cluster."""
        if const_expr(self.cluster > 1):
            rank = cute.arch.block_idx()[1]
            for i in cutlass.range(cute.arch.thread_idx()[0], self.channels.own, self.threads, unroll=1):
                column = i * self.cluster + rank
                if column < self.width:
                    self._store(tensors, start + column, self.channels.totals(owned, i))

    def _store(self, tensors, channel, values):
        """Write a channel's sums; those of channels past the last one have no place."""
        example = Int64(cute.arch.block_idx()[0] // self.blocks)
        for name, value in zip(("product", "total"), values):
            address = row_address(getattr(tensors, name), self.keys[name], example, self.c)
            self.store_if(channel < self.c, gmem_elements(Float32, address, self.c), channel, value)

    @cute.jit
    def _write(
        self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, kept: cutlass.Constexpr, place: cutlass.Constexpr,
        numbers: cutlass.Constexpr, pulls: cutlass.Constexpr,
    ):  # fmt: skip
        (mean, rstd, scale, _), each = numbers, range(self.vec)
        push, pull = self._terms(mean, rstd, pulls, tensors.x.element_type)
        for k in cutlass.range(place.count, unroll=2):
            x = self.read(tensors, slots, place, k)
            apart, rOut = [x[j] - mean[j] for j in each], fragment(Float32, self.vec)
            slopes = self._slopes(tensors, slots, kept, place, numbers, apart, k)
            off = apart if const_expr(tensors.x.element_type.width > 16) else [x[j] for j in each]
            for j in cutlass.range_constexpr(self.vec):
                rOut[j] = slopes[j] * scale[j] - push[j] - off[j] * pull[j]
            self.write(tensors.dx, "dx", place, k, rOut)

    def _terms(self, mean, rstd, pulls, dtype):
        """What the gradient loses: a number, and one times x less the mean; times x itself for 16-bit inputs, as in
        :meth:`GroupExamplesForward.terms`.
        """
        pull, push = ([of_group[j] * rstd[j] for j in range(self.vec)] for of_group in pulls)
        pull = [p * r for p, r in zip(pull, rstd)]
        if dtype.width > 16:
            return push, pull
        return [push[j] - mean[j] * pull[j] for j in range(self.vec)], pull
