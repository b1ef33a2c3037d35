"""Group norms' parts without their sums: kernels of :mod:`row_floor`."""

import cutlass
import cutlass.cute as cute

from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.norm.group_examples import GroupExamplesBackward, GroupExamplesForward


class PartsAlone:
    """A mixin before a kernel of examples: each thread loads what the kernel's does, waits until the cluster's parts
    are there, as in any kernel that reads its input once, and stores the sum of its inputs.
    """

    @cute.kernel
    def kernel(self, tensors):
        smem = cutlass.utils.SmemAllocator()
        slots, _ = self.slots(smem, tensors), self.allocate(smem)
        place, _ = self.place()
        wait_for_previous(self.pdl)
        self.fetch(tensors, slots, place)
        self.arrived(self.batches - 1)
        if self.cluster > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()
        let_next_start(self.pdl)
        self.copied(tensors, slots, place)

    @cute.jit
    def copied(self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, place: cutlass.Constexpr):
        for k in cutlass.range(place.count, unroll=2):
            read = [self.read(tensors, slots, place, k, i) for i in range(len(slots))]
            rOut = fragment(cutlass.Float32, self.vec)
            for j in cutlass.range_constexpr(self.vec):
                rOut[j] = sum((each[j] for each in read[1:]), read[0][j])
            self.write(getattr(tensors, self.target), self.target, place, k, rOut)


class PartsForward(PartsAlone, GroupExamplesForward):
    """Of the forward."""


class PartsBackward(PartsAlone, GroupExamplesBackward):
    """Of the gradient."""
