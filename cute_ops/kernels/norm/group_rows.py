"""Gradients of group norm, channels before positions: a group is a row."""

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.arguments import named
from cute_ops.kernels.lib.copy import copy_vector, fragment, gmem_elements, gmem_pointer, load, narrow, store, widen
from cute_ops.kernels.lib.kept import KeptVectors
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, element_address, row_address, row_count
from cute_ops.kernels.norm.group_config import GroupConfig
from cute_ops.kernels.norm.group_sums import ClusterChannels, ClusterNumbers, Tensors, slope_of


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class Walk:
    """A thread's view of its group.

    Attributes:
        begin, end: the CTA's span of the group's elements; ``end`` is the one after the last.
        mean, rstd: of the group.
        sources: the group's elements of x and of dy, in memory.
        spans: the CTA's spans of both, in shared memory.
        slopes: what takes the place of dy there; None where it is computed twice.
        weights, biases: of the group's channels, in shared memory.
    """

    begin: Any
    end: Any
    mean: Any
    rstd: Any
    sources: Any
    spans: Any
    slopes: Any
    weights: Any
    biases: Any


@dataclass(frozen=True)
class Group:
    """A group in memory: the address of its first channel, and elements from one channel to the next."""

    dtype: Any
    address: Any
    step: Any
    positions: int

    def at(self, channel, e):
        """The address of the group's e-th element, which is one of this channel."""
        place = Int64(channel) * (self.step - self.positions) + Int64(e)
        return self.address + place * (self.dtype.width // 8)


class GroupRowsBackward:
    """``dx = rstd * (s * weight - mean(s * weight) - y * mean(s * weight * y))``, where y is x normalised and ``s`` the
    gradient of ``y * weight + bias``; ``product`` and ``total`` are the sums of ``s * y`` and ``s`` over positions.

    Tile: the CTAs of a cluster share a group, each a span of whole vectors. A team of ``team`` threads takes a channel
    of the span after another, for sums first and then for the gradient. In the form ``smem`` the span is copied to
    shared memory once; with ``passes`` it is read twice, by vectors as wide as channels allow.
    Shared memory: the span of x and dy, with ``keep`` 16 bytes more for each vector of 16-bit dtypes; 8 bytes for each
    channel and warp of a team, 8 more for a channel.
    Bytes moved per element: x, dy and dx once each.
    """

    def __init__(self, variant):
        self.variant, self.config, self.keys = variant, GroupConfig.of(variant.config), variant.tensors
        self.heads, self.d, self.s = (variant.dims[name] for name in ("h", "d", "n"))
        self.silu, self.n = variant.attrs["silu"], self.d * self.s
        itemsize = ITEMSIZE[self.keys["x"].dtype]
        self.unit = VECTOR_BYTES // itemsize
        present = [self.keys[name] for name in ("x", "dy", "dx") if self.keys.get(name)]
        aligned = min(min(key.align, key.row_align) for key in present) // itemsize
        self.vec = next(v for v in (8, 4, 2, 1) if v <= min(self.unit, aligned) and self.s % v == 0)
        self.threads, self.cluster, self.team = self.config.threads, self.config.cluster, self.config.team
        self.span = -(-self.n // (self.cluster * self.unit)) * self.unit
        # Channels that a span may have elements of.
        self.most = self.span // self.s if self.span % self.s == 0 else (self.span + self.s - 2) // self.s + 1
        self.most = max(min(self.most, self.d), 1)
        self.warps = max(self.team // WARP, 1)
        self.numbers = ClusterNumbers(2, self.cluster, 1)
        self.channels = ClusterChannels(self.d, self.cluster)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, *arguments):
        tensors = named(Tensors, self.variant, arguments)
        self.kernel(tensors).launch(
            grid=[Int32(row_count(tensors.x, 2)), self.cluster, 1], block=[self.threads, 1, 1],
            cluster=[1, self.cluster, 1] if self.cluster > 1 else None, min_blocks_per_mp=self.config.resident,
            preferred_smem_carveout=100 if self.config.form == "smem" else SMEM_PERCENT,
            stream=arguments[-1], use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors):
        group, rank, _ = cute.arch.block_idx()
        if const_expr(self.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        spans = [self._span(smem, mX) for mX in (tensors.x, tensors.dy)]
        slopes = KeptVectors.beside(smem, spans[1]) if const_expr(self.config.keep and self.vec == self.unit) else None
        sums = smem.allocate_tensor(
            Float32, cute.make_layout((2, self.warps, self.most), stride=(1, 2, 2 * self.warps)), byte_alignment=16
        )
        parameters = [
            None if const_expr(mW is None) else smem.allocate_tensor(Float32, cute.make_layout(self.most))
            for mW in (tensors.weight, tensors.bias)
        ]
        shared, owned = self.numbers.allocate(smem), self.channels.allocate(smem)
        self.channels.prepare(owned)
        self.numbers.prepare(shared)
        row = Int64(group)
        head = Int32(row % self.heads)
        begin = cutlass.min(Int32(rank) * self.span, Int32(self.n))
        end = cutlass.min(begin + self.span, Int32(self.n))
        sources = [self._group(m, self.keys[name], row) for m, name in ((tensors.x, "x"), (tensors.dy, "dy"))]
        wait_for_previous(self.pdl)
        if const_expr(self.config.form == "smem"):
            self._fetch(spans, sources, begin, end)
        mean, rstd = (
            gmem_elements(m.element_type, element_address(m, self.keys[name], row), 1)[0]
            for m, name in ((tensors.mean, "mean"), (tensors.rstd, "rstd"))
        )
        first = begin // self.s
        self._parameters(tensors, parameters, head, first)
        self.numbers.ready(shared)
        self.channels.ready(owned)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        walk = Walk(begin, end, mean, rstd, sources, spans, slopes, *parameters)
        self._add_up(walk, sums)
        cute.arch.barrier()
        if cute.arch.thread_idx()[0] < WARP:
            self._finish(tensors, walk, sums, (shared, owned), row)
        self.numbers.wait(shared, 0)
        let_next_start(self.pdl)
        if const_expr(tensors.dx is not None):
            means = [self.numbers.total(shared, i, 0) * (1.0 / self.n) for i in range(2)]
            self._write(walk, self._group(tensors.dx, self.keys["dx"], row), means)
        self.channels.wait(owned)
        self._store_sums(tensors, owned, row, rank)

    def _group(self, mX, key, row):
        """A row's group in a tensor."""
        step = self.s if key.layout == "flat" else Int64(mX.stride[len(mX.shape) - 2])
        return Group(mX.element_type, row_address(mX, key, row * self.d, self.s), step, self.s)

    def _span(self, smem, mX):
        """Shared memory of a span, by vectors of channels; None where it is read again."""
        if self.config.form != "smem":
            return None
        layout = cute.make_layout((self.vec, self.span // self.vec), stride=(1, self.vec))
        return smem.allocate_tensor(mX.element_type, layout, byte_alignment=VECTOR_BYTES)

    @cute.jit
    def _fetch(self, spans: cutlass.Constexpr, sources: cutlass.Constexpr, begin: Int32, end: Int32):
        """Start copying the spans, by 16 bytes."""
        for sX, source in zip(spans, sources):
            dtype, count = source.dtype, (end - begin) // self.unit
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)
            for i in cutlass.range(cute.arch.thread_idx()[0], count, self.threads, unroll=4):
                e = begin + i * self.unit
                place = gmem_pointer(dtype, source.at(e // self.s, e), self.unit)
                copy_vector(atom, dtype, self.unit, place, sX.iterator + i * self.unit)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _parameters(self, tensors: cutlass.Constexpr, kept: cutlass.Constexpr, head: Int32, first: Int32):
        """The weights and biases of a span's channels, to shared memory in fp32."""
        for name, mW, sW in zip(("weight", "bias"), (tensors.weight, tensors.bias), kept):
            if const_expr(mW is not None):
                gW = gmem_elements(mW.element_type, row_address(mW, self.keys[name], Int64(head), self.d), self.d)
                for i in cutlass.range(cute.arch.thread_idx()[0], self.most, self.threads, unroll=1):
                    sW[i] = gW[cutlass.min(first + i, self.d - 1)].to(Float32)

    def _channels(self, walk):
        """(a thread's place in its team, the first channel of the span, how many the span has, rounds of all teams)"""
        tidx = cute.arch.thread_idx()[0]
        first = walk.begin // self.s
        count = (walk.end + (self.s - 1)) // self.s - first
        count = cutlass.select_(walk.end > walk.begin, count, Int32(0))
        return tidx % self.team, tidx // self.team, first, count, -(-self.most * self.team // self.threads)

    def _bounds(self, walk, channel, here):
        """A channel's elements in the span; none if it is not ``here``."""
        lower = cutlass.max(channel * self.s, walk.begin)
        upper = cutlass.min((channel + 1) * self.s, walk.end)
        return lower, Int32(cutlass.select_(here, upper, lower))

    def _numbers(self, walk, place):
        """The scale ``rstd * weight`` of a channel, and its bias."""
        weight, bias = (None if sW is None else sW[place] for sW in (walk.weights, walk.biases))
        return walk.rstd if weight is None else walk.rstd * weight, bias

    def _read(self, walk, i, channel, e):
        """The vector of x or, with ``i`` 1, of dy from a channel's element on, in fp32."""
        sX, source = walk.spans[i], walk.sources[i]
        rX = fragment(source.dtype, self.vec)
        if sX is None:
            load(rX, source.at(channel, e))
        else:
            cute.autovec_copy(sX[None, (e - walk.begin) // self.vec], rX)
        return widen(rX)

    def _slopes(self, walk, x, channel, numbers, e):
        """The gradients to what the activation is of, from a channel's element on."""
        if walk.slopes is not None:
            return walk.slopes.load((e - walk.begin) // self.vec)
        scale, bias = numbers
        dy = self._read(walk, 1, channel, e)
        return [slope_of(dy[j], x[j] - walk.mean, scale, bias, self.silu) for j in range(self.vec)]

    @cute.jit
    def _add_up(self, walk: cutlass.Constexpr, sums: cute.Tensor):
        """The sums of the slope times y and of the slope, of each channel."""
        lane, team, first, count, rounds = self._channels(walk)
        for i in cutlass.range(rounds, unroll=1):
            place = i * (self.threads // self.team) + team
            here = place < count
            safe = cutlass.min(place, self.most - 1)
            lower, upper = self._bounds(walk, first + place, here)
            scale, bias = self._numbers(walk, safe)
            product, total = Float32(0.0), Float32(0.0)
            for e in cutlass.range(lower + lane * self.vec, upper, self.team * self.vec, unroll=2):
                x, dy = (self._read(walk, i, first + place, e) for i in range(2))
                rSlope = fragment(Float32, self.vec)
                for j in cutlass.range_constexpr(self.vec):
                    apart = x[j] - walk.mean
                    rSlope[j] = slope_of(dy[j], apart, scale, bias, self.silu)
                    product = product + rSlope[j] * apart
                    total = total + rSlope[j]
                if const_expr(walk.slopes is not None):
                    walk.slopes.store(rSlope, (e - walk.begin) // self.vec)
            together = min(self.team, WARP)
            product, total = (
                cute.arch.warp_reduction(value, operator.add, threads_in_group=together) for value in (product, total)
            )
            if here & (lane % together == 0):
                sums[0, lane // WARP, safe] = product * walk.rstd
                sums[1, lane // WARP, safe] = total

    @cute.jit
    def _finish(
        self, tensors: cutlass.Constexpr, walk: cutlass.Constexpr, sums: cute.Tensor, shared: cutlass.Constexpr,
        row: Int64,
    ):  # fmt: skip
        """Tell the cluster the sums of the group, and those of channels, or write these; by the first warp."""
        numbers, owned = shared
        lane, first = cute.arch.lane_idx(), walk.begin // self.s
        count = self._channels(walk)[3]
        pull, push = Float32(0.0), Float32(0.0)
        for channel in cutlass.range(lane, self.channels.padded, WARP, unroll=1):
            inside = (channel >= first) & (channel < first + count)
            place = cutlass.min(cutlass.max(channel - first, 0), self.most - 1)
            product, total = (cutlass.select_(inside, x, Float32(0.0)) for x in self._of_warps(sums, place))
            if const_expr(self.cluster > 1):
                self.channels.send(owned, channel, (product, total))
            else:
                self._store(tensors, row, channel, (product, total))
            weight = Float32(1.0) if const_expr(walk.weights is None) else walk.weights[place]
            pull = pull + product * weight
            push = push + total * weight
        for i, value in enumerate((pull, push)):
            self.numbers.send(numbers, Int32(i), cute.arch.warp_reduction(value, operator.add), 0)

    def _store(self, tensors, row, channel, values):
        """Write a channel's sums."""
        for name, value in zip(("product", "total"), values):
            address = row_address(getattr(tensors, name), self.keys[name], row, self.d)
            gmem_elements(Float32, address, self.d)[channel] = value

    @cute.jit
    def _store_sums(self, tensors: cutlass.Constexpr, owned: cutlass.Constexpr, row: Int64, rank):
        """Write the sums of this CTA's channels of a cluster."""
        if const_expr(self.cluster > 1):
            for i in cutlass.range(cute.arch.thread_idx()[0], self.channels.own, self.threads, unroll=1):
                channel = i * self.cluster + rank
                if channel < self.d:
                    self._store(tensors, row, channel, self.channels.totals(owned, i))

    def _of_warps(self, sums, place):
        """A channel's sums over the warps of its team."""
        found = []
        for which in range(2):
            each = [sums[which, warp, place] for warp in range(self.warps)]
            found.append(reduce(operator.add, each))
        return found

    @cute.jit
    def _write(self, walk: cutlass.Constexpr, target: cutlass.Constexpr, means: cutlass.Constexpr):
        """Write the gradient; ``means``: those of the slope times weight times y, and of the slope times weight."""
        lane, team, first, count, rounds = self._channels(walk)
        pull, push = (mean * walk.rstd for mean in means)
        for i in cutlass.range(rounds, unroll=1):
            place = i * (self.threads // self.team) + team
            safe = cutlass.min(place, self.most - 1)
            lower, upper = self._bounds(walk, first + place, place < count)
            numbers = self._numbers(walk, safe)
            for e in cutlass.range(lower + lane * self.vec, upper, self.team * self.vec, unroll=2):
                x = self._read(walk, 0, first + place, e)
                slopes, rOut = self._slopes(walk, x, first + place, numbers, e), fragment(Float32, self.vec)
                for j in cutlass.range_constexpr(self.vec):
                    normed = (x[j] - walk.mean) * walk.rstd
                    rOut[j] = slopes[j] * numbers[0] - push - normed * pull
                store(narrow(rOut.load(), target.dtype, self.vec), target.at(first + place, e))
