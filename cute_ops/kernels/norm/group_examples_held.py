"""Group norm, channels after positions, with one part of an example in registers while the next one arrives."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import compiler_barrier, fragment, load, widen
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.norm.group_examples import GroupExamplesForward


class Shared(NamedTuple):
    """Shared memory: the vectors of x that are on their way, and sums."""

    slots: Any
    sums: Any


class GroupExamplesHeld(GroupExamplesForward):
    """:class:`GroupExamplesForward` by persistent clusters, which take one part of an example after another.

    Shared memory takes the vectors of the next part as soon as a thread has those of this one in registers: they arrive
    while sums are added up and exchanged, and while the outputs are stored. Threads read only what they copied
    themselves.
    Shared memory: as in the forward, and the numbers that CTAs exchange twice.
    """

    stages = 2

    def launched(self, tensors, stream):
        found = super().launched(tensors, stream)
        parts, *others = found["grid"]
        return {**found, "grid": [cutlass.min(parts, Int32(self.config.clusters)), *others]}

    @cute.kernel
    def kernel(self, tensors):
        smem = cutlass.utils.SmemAllocator()
        slots, sums = self.slots(smem, tensors), self.allocate(smem)
        shared = Shared(slots, sums)
        self.numbers.prepare(sums[2])
        parts = Int32(row_count(tensors.x, 2)) * self.blocks
        first, clusters = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        wait_for_previous(self.pdl)
        self.fetch(tensors, slots, self.place_of(first)[0])
        self.numbers.meet()
        let_next_start(self.pdl)
        for i in cutlass.range((parts - first + (clusters - 1)) // clusters, unroll=1):
            self._part(tensors, shared, (first + i * clusters, clusters, parts), i)

    @cute.jit
    def _part(self, tensors: cutlass.Constexpr, shared: cutlass.Constexpr, parts: cutlass.Constexpr, i: Int32):
        """Normalise the i-th part of a cluster, and let the next one come.

        ``parts``: the part's number, what comes to it for the next one, and how many there are.
        """
        part, more, count = parts
        (place, start), (ahead, _) = self.place_of(part), self.place_of(part + more, part + more < count)
        sums, stage = shared.sums, i % self.stages
        self.numbers.expect(sums[2], stage)
        rX = [fragment(tensors.x.element_type, self.vec) for _ in range(self.per_thread)]
        rWeight, rBias = (self._parameter(name, getattr(tensors, name), place) for name in ("weight", "bias"))
        pivot, found = None, [fragment(Float32, self.vec, 0.0) for _ in range(2)]
        for batch in cutlass.range_constexpr(self.batches):
            self._take(tensors, shared, rX, ahead, batch)
            if const_expr(batch == 0):
                pivot = self.pivots(widen(rX[0]), place)
            self._sum_held(rX, place, found, pivot, batch)
        mean, rstd = self.combine(tensors, sums, (found, pivot), (place, start), (stage, i // self.stages % 2))
        self._write_held(tensors, rX, place, (mean, rstd, rWeight, rBias))

    def _of(self, batch):
        """The numbers of a batch's vectors of a thread."""
        return range(batch * self.batch, min((batch + 1) * self.batch, self.per_thread))

    @cute.jit
    def _take(
        self, tensors: cutlass.Constexpr, shared: cutlass.Constexpr, rX: cutlass.Constexpr, ahead: cutlass.Constexpr,
        batch: cutlass.Constexpr,
    ):  # fmt: skip
        """Read a batch's vectors once they are there, and start copying those of the part ahead in their place."""
        tidx, (sX,) = cute.arch.thread_idx()[0], shared.slots
        # As many groups of copies are on their way as there are batches: this one's was the first of them.
        cute.arch.cp_async_wait_group(self.batches - 1)
        for k in self._of(batch):
            cute.autovec_copy(sX[None, tidx, k], rX[k])
        for k in self._of(batch):
            if k < ahead.count:
                self.copy(tensors, sX[None, tidx, k], ahead, k)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def _sum_held(
        self, rX: cutlass.Constexpr, place: cutlass.Constexpr, found: cutlass.Constexpr, pivot: cutlass.Constexpr,
        batch: cutlass.Constexpr,
    ):  # fmt: skip
        """:meth:`GroupExamplesForward._sum` of vectors in registers."""
        for k in self._of(batch):
            if k < place.count:
                self.add(found, widen(rX[k]), pivot)

    def _parameter(self, name, mW, place):
        """The elements of a parameter at this thread's channels, in its own dtype; None where it is absent."""
        if mW is None:
            return None
        itemsize = mW.element_type.width // 8
        rW, each = fragment(mW.element_type, self.vec), min(self.keys[name].align, VECTOR_BYTES) // itemsize
        each = math.gcd(self.vec, each)
        for j in range(0, self.vec, each):
            address = mW.iterator.toint() + (place.channel + j) * itemsize
            load(cute.make_tensor(rW.iterator + j, cute.make_layout(each)), address)
        return rW

    def _elements(self, rW):
        """A parameter's elements in fp32, taken out of their vector before any condition."""
        if rW is None:
            return None
        wide = widen(rW)
        return [wide[j] for j in range(self.vec)]

    @cute.jit
    def _write_held(
        self, tensors: cutlass.Constexpr, rX: cutlass.Constexpr, place: cutlass.Constexpr, numbers: cutlass.Constexpr
    ):  # fmt: skip
        mean, rstd, rWeight, rBias = numbers
        weight, bias = (self._elements(rW) for rW in (rWeight, rBias))
        scale = rstd if const_expr(weight is None) else [rstd[j] * weight[j] for j in range(self.vec)]
        terms = self.terms(mean, scale, bias, tensors.x.element_type)
        for k in cutlass.range_constexpr(self.per_thread):
            compiler_barrier(rX[k])  # It stays in registers in its own dtype, not widened.
            if k < place.count:
                self.write_normalised(tensors, place, k, widen(rX[k]), terms)


def group_examples(variant):
    """The forward that a config asks for."""
    return (GroupExamplesHeld if variant.config["form"] == "held" else GroupExamplesForward)(variant)
