"""Means and variances of groups of channels, of which each thread has some channels at some positions."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.hardware import WARP


class GroupMoments:
    """What :class:`~cute_ops.kernels.norm.group_examples.GroupExamplesForward` has beside its tile.

    A thread adds up what its channels differ from its first value of them by, and the squares: no thread waits for
    another before all of x is there, and a mean that is large beside the deviations costs no accuracy. Counts, means
    and squared deviations from them of threads, helpers, and CTAs of a cluster are combined one after another (Chan,
    Golub and LeVeque); within a level by what means differ from the first one by.
    Shared memory: 8 bytes for each thread and number of a vector, 12 for a helper, 8 for each group and CTA, and group.
    """

    def allocate(self, smem):
        """Shared memory of means and squared deviations: those of threads, those of helpers and how many numbers these
        are of, those of CTAs, and mean and rstd of groups.
        """
        width, helpers = self.of_width, self.helpers
        shapes = (width, self.depth, 2), (width, helpers, 3), (self.of_block, 2)
        found = [smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16) for shape in shapes]
        return found[0], found[1], self.numbers.allocate(smem), found[2]

    def pivots(self, x, place):
        """From a thread's first vector what it takes its channels' deviations from; 0 where it has none."""
        kept = [Float32(cutlass.select_(place.count > 0, x[j * self.part], Float32(0.0))) for j in range(self.parts)]
        return [kept[j // self.part] for j in range(self.vec)]

    def add(self, found, x, pivot):
        """Add a vector's deviations to the first sums, and their squares to the second ones."""
        for j in range(self.vec):
            apart = x[j] - pivot[j]
            found[0][j] = found[0][j] + apart
            found[1][j] = found[1][j] + apart * apart

    def combine(self, tensors, sums, found, where, turn=(0, 0)):
        """(mean, rstd) of the groups of this thread's channels, from all threads' sums; written for each group, too.

        ``found``: a thread's sums, and the pivots; ``where``: its place, and the first channel of the cluster's;
        ``turn``: stage and phase of the numbers that CTAs exchange.
        """
        (place, _), (stage, phase) = where, turn
        self._of_threads(found, sums, place)
        cute.arch.barrier()
        self._of_helpers(sums)
        cute.arch.barrier()
        self._of_cta(sums, stage)
        self.numbers.wait(sums[2], stage, phase)
        self._of_cluster(tensors, sums, where, stage)
        cute.arch.barrier()
        return [self.of_groups(lambda group, which=which: sums[3][group, which], place) for which in range(2)]

    @cute.jit
    def _of_threads(self, found: cutlass.Constexpr, sums: cutlass.Constexpr, place: cutlass.Constexpr):
        if cute.arch.thread_idx()[0] < self.across * self.depth:
            self._store_threads(found, sums, place)

    def _store_threads(self, found, sums, place):
        (found, pivot), top = found, cute.arch.thread_idx()[0] // self.across
        inverse = 1.0 / cutlass.max(Float32(Int32(place.count * self.part)), Float32(1.0))
        for j in range(self.parts):
            total, squares = (self._of_part(rSum, j) for rSum in found)
            off = total * inverse
            sums[0][place.vector * self.parts + j, top, 0] = pivot[j * self.part] + off
            sums[0][place.vector * self.parts + j, top, 1] = squares - total * off

    def _of_part(self, rSum, j):
        total = rSum[j * self.part]
        for more in range(1, self.part):
            total = total + rSum[j * self.part + more]
        return total

    @cute.jit
    def _of_helpers(self, sums: cutlass.Constexpr):
        sThreads, sHelpers, _, _ = sums
        positions = self._positions()
        for i in cutlass.range(cute.arch.thread_idx()[0], self.of_width * self.helpers, self.threads, unroll=1):
            column, helper = i % self.of_width, i // self.of_width
            pivot, count, total, squares = sThreads[column, helper, 0], Float32(0.0), Float32(0.0), Float32(0.0)
            for top in cutlass.range(helper, self.depth, self.helpers, unroll=4):
                here = Float32(Int32(cutlass.max(positions - top + (self.depth - 1), 0) // self.depth * self.part))
                off = sThreads[column, top, 0] - pivot
                count, total = count + here, total + here * off
                squares = squares + (sThreads[column, top, 1] + here * off * off)
            off = total / cutlass.max(count, Float32(1.0))
            sHelpers[column, helper, 0] = pivot + off
            sHelpers[column, helper, 1] = squares - total * off
            sHelpers[column, helper, 2] = count

    def _positions(self):
        """The positions of this CTA."""
        rank = cute.arch.block_idx()[1] if self.cluster > 1 else 0
        return Int32(cutlass.max(cutlass.min(Int32(self.s) - Int32(rank) * self.span, Int32(self.span)), Int32(0)))

    @cute.jit
    def _of_cta(self, sums: cutlass.Constexpr, stage):
        """Tell the cluster the means of this CTA's groups, and their squared deviations from these."""
        lane, count = cute.arch.lane_idx(), Float32(Int32(self._positions() * self.d))
        inverse = 1.0 / cutlass.max(count, Float32(1.0))
        for group in cutlass.range(
            cute.arch.thread_idx()[0] // WARP, self.of_block, self.threads // WARP, unroll=1
        ):  # fmt: skip
            pivot, total, squares = sums[1][group * self.of_each, 0, 0], Float32(0.0), Float32(0.0)
            for j in cutlass.range(lane, self.of_each * self.helpers, WARP, unroll=1):
                column, helper = group * self.of_each + j % self.of_each, j // self.of_each
                off = sums[1][column, helper, 0] - pivot
                here = sums[1][column, helper, 2] * off
                total, squares = total + here, squares + (sums[1][column, helper, 1] + here * off)
            total = cute.arch.warp_reduction(total, operator.add)
            squares = cute.arch.warp_reduction(squares, operator.add)
            self.numbers.send(sums[2], group, pivot + total * inverse, stage)
            self.numbers.send(sums[2], group + self.of_block, squares - total * total * inverse, stage)

    @cute.jit
    def _of_cluster(
        self, tensors: cutlass.Constexpr, sums: cutlass.Constexpr, where: cutlass.Constexpr, stage
    ):  # fmt: skip
        """Combine what the CTAs told of each group, a group to a thread."""
        for group in cutlass.range(cute.arch.thread_idx()[0], self.of_block, self.threads, unroll=1):
            self._keep(tensors, sums, where, group, self._of_group(sums, group, stage))

    def _of_group(self, sums, group, stage):
        """(mean, rstd) of a group."""
        ranks, each, sAll = range(self.cluster), 1.0 / (self.d * self.s), sums[2][0]
        counts = [max(min(self.s - rank * self.span, self.span), 0) * self.d for rank in ranks]
        means, mean, squares = [sAll[group, rank, stage] for rank in ranks], Float32(0.0), Float32(0.0)
        for own, count in zip(means, counts):
            mean = mean + own * (count * each)
        for rank, (own, count) in enumerate(zip(means, counts)):
            off = own - mean
            squares = squares + (sAll[group + self.of_block, rank, stage] + off * off * float(count))
        return mean, cute.math.rsqrt(squares * each + self.variant.attrs["eps"], fastmath=True)

    def _keep(self, tensors, sums, where, group, moments):
        """Keep a group's mean and rstd for all threads; the first CTA writes them."""
        place, start = where
        index = start // self.d + group
        first = (cute.arch.block_idx()[1] == 0) & (index < self.groups)
        for which, (name, value) in enumerate(zip(("mean", "rstd"), moments)):
            sums[3][group, which] = value
            self.store_if(first, self.row_numbers(getattr(tensors, name), name, place), index, value)
