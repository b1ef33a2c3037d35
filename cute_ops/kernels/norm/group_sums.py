"""Sums of numbers over the CTAs of a cluster, and what the kernels of group norm share."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.activation import times_silu_derivative


class Tensors(NamedTuple):
    """Tensors of a group norm or of its gradient, None where the op lacks one."""

    x: Any
    dy: Any
    mean: Any
    rstd: Any
    weight: Any
    bias: Any
    out: Any
    dx: Any
    product: Any
    total: Any


class ClusterNumbers:
    """``count`` numbers of each CTA, in each of ``stages``, and their sums over the cluster in the order of the CTAs.

    Shared memory: 4 bytes for each number, CTA and stage, and in a cluster an mbarrier per stage.
    """

    def __init__(self, count, cluster, stages):
        self.count, self.cluster, self.stages = count, cluster, stages

    def allocate(self, smem):
        """(the numbers of all CTAs, mbarriers)"""
        layout = cute.make_layout(
            (self.count, self.cluster, self.stages), stride=(1, self.count, self.count * self.cluster)
        )
        sAll = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        return sAll, smem.allocate_array(Int64, self.stages) if self.cluster > 1 else None

    @cute.jit
    def prepare(self, shared):
        """Initialise the mbarriers; :meth:`ready` waits until the whole cluster has done so."""
        if const_expr(self.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(shared[1] + stage, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

    def ready(self, shared):
        """Let each stage take numbers, once no CTA can find an mbarrier that is not initialised."""
        self.meet()
        for stage in range(self.stages):
            self.expect(shared, stage)

    def meet(self):
        """Wait until the whole cluster has prepared."""
        if self.cluster > 1:
            cute.arch.cluster_wait()

    @cute.jit
    def expect(self, shared, stage):
        """Say how much a stage waits for, once for each time that it is used."""
        if const_expr(self.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(shared[1] + stage, self.count * self.cluster * 4)

    @cute.jit
    def send(self, shared, i: Int32, value: Float32, stage):
        """Tell all CTAs this one's i-th number; all lanes of a warp call it."""
        sAll, barriers = shared
        lane = cute.arch.lane_idx()
        if const_expr(self.cluster == 1):
            if lane == 0:
                sAll[i, 0, stage] = value
        elif lane < self.cluster:
            place = cute.crd2idx((i, cute.arch.block_idx_in_cluster(), stage), sAll.layout)
            sTarget = cute.arch.map_dsmem_ptr(sAll.iterator + place, lane).toint()
            sBarrier = cute.arch.map_dsmem_ptr(barriers + stage, lane).toint()
            cute.arch.inline_ptx(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
                read_only_args=[Int32(sTarget), value, Int32(sBarrier)],
            )

    def wait(self, shared, stage, phase=0):
        """Wait for a stage's numbers of all CTAs."""
        if self.cluster == 1:
            cute.arch.barrier()
        else:
            cute.arch.mbarrier_wait(shared[1] + stage, phase)

    def total(self, shared, i, stage):
        """The sum of the i-th numbers."""
        total = Float32(0.0)
        for rank in range(self.cluster):
            total = total + shared[0][i, rank, stage]
        return total


class ClusterChannels:
    """Two numbers of each of ``count`` channels of each CTA, and their sums over the cluster, each in one CTA: those of
    channel c in CTA ``c % cluster``. Without a cluster none are kept.

    Shared memory: 8 bytes for each channel, and an mbarrier.
    """

    def __init__(self, count, cluster):
        self.cluster, self.own = cluster, -(-count // cluster)
        self.padded = self.own * cluster

    def allocate(self, smem):
        """(the numbers of this CTA's channels, an mbarrier)"""
        if self.cluster == 1:
            return None, None
        layout = cute.make_layout((2, self.own, self.cluster), stride=(1, 2, 2 * self.own))
        return smem.allocate_tensor(Float32, layout, byte_alignment=16), smem.allocate_array(Int64, 1)

    @cute.jit
    def prepare(self, shared):
        """Initialise the mbarrier, before :class:`ClusterNumbers` tells the cluster."""
        if const_expr(self.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(shared[1], 1)

    @cute.jit
    def ready(self, shared):
        """Say how much this CTA waits for, after the cluster has met."""
        if const_expr(self.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(shared[1], 2 * self.padded * 4)

    def send(self, shared, channel, values):
        """Tell a channel's CTA what this one has of it; of every channel below ``padded`` once."""
        sOwn, barrier = shared
        peer = channel % self.cluster
        place = cute.crd2idx((0, channel // self.cluster, cute.arch.block_idx_in_cluster()), sOwn.layout)
        sTarget = cute.arch.map_dsmem_ptr(sOwn.iterator + place, peer).toint()
        sBarrier = cute.arch.map_dsmem_ptr(barrier, peer).toint()
        for i, value in enumerate(values):
            cute.arch.inline_ptx(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
                read_only_args=[Int32(sTarget + 4 * i), value, Int32(sBarrier)],
            )

    def wait(self, shared):
        if self.cluster > 1:
            cute.arch.mbarrier_wait(shared[1], 0)

    def totals(self, shared, i):
        """The sums of this CTA's i-th channel, in the order of the CTAs."""
        found = [Float32(0.0), Float32(0.0)]
        for rank in range(self.cluster):
            found = [total + shared[0][which, i, rank] for which, total in enumerate(found)]
        return found


def slope_of(dy, x, scale, bias, silu):
    """The gradient for ``x * scale + bias``, before the activation; x is the input less its mean."""
    return times_silu_derivative(dy, x * scale if bias is None else x * scale + bias) if silu else dy
