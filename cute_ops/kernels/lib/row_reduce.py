"""Sums over the threads of a row: shuffles in a warp, shared memory in a CTA, distributed shared memory in a cluster.

Every thread of the row gets the same bits, in an order that depends on the tile alone.
"""

import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP


class Shared(NamedTuple):
    """Shared memory of an exchange: sums of warps and, in a cluster, an mbarrier per stage; None where not needed."""

    sums: Any
    barriers: Any


class RowSum:
    """Sums a few fp32 numbers per thread over the threads of each row of a tile.

    Shared memory: ``stages * rows * warps per row * cluster * values`` floats, plus one mbarrier per stage in a
    cluster. With several stages, successive sums need one barrier each. Two stages suffice when each thread reads a sum
    before contributing to the next: a stage is overwritten only after every thread has read it. Four suffice when a
    thread contributes to the next sum first.
    """

    def __init__(self, tile, values, stages):
        if stages & (stages - 1):
            raise ValueError(f"{stages} stages are not a power of two")
        self.tile = tile
        self.values = values
        self.stages = stages
        self.warps = max(tile.threads_per_row // WARP, 1)
        # A CTA may stand for several of a cluster: then it contributes their partial sums one after another.
        self.partials = self.warps * tile.cluster * tile.local
        self.alone = tile.threads_per_row <= WARP and self.partials == 1
        # Half a warp sums up the first number of a pair, the other half the second.
        self.halved = values % 2 == 0 and tile.threads_per_row >= WARP

    def allocate(self, smem):
        """The :class:`Shared` memory of the sums."""
        if self.alone:
            return Shared(None, None)
        layout = cute.make_layout(
            (self.values, self.partials, self.tile.rows, self.stages),
            stride=(1, self.values, self.values * self.partials, self.values * self.partials * self.tile.rows),
        )
        sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        return Shared(sSum, smem.allocate_array(Int64, self.stages) if self.tile.cluster > 1 else None)

    @cute.jit
    def prepare(self, shared, last: cutlass.Constexpr = True):
        """Initialise the mbarriers; :meth:`ready` waits until the whole cluster has done so. Of several exchanges the
        ``last`` one tells the cluster.
        """
        if const_expr(self.tile.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(shared.barriers + stage, 1)
            if const_expr(last):
                cute.arch.mbarrier_init_fence()
                cute.arch.cluster_arrive_relaxed()

    def ready(self):
        if self.tile.cluster > 1:
            cute.arch.cluster_wait()

    def __call__(self, values, shared, step):
        """Row sums of a tuple of fp32 values; every thread of the CTA must call it."""
        return self.wait(self.arrive(values, shared, step), shared, step)

    @cute.jit
    def arrive(self, values: cutlass.Constexpr, shared, step: Int32, local=0):
        """Add this thread's values to the sums of a step. Returns what :meth:`wait` needs."""
        return self.send(self.warp_sums(values), shared, step, local)

    def warp_sums(self, values):
        """Sums over the threads of a row in a warp; with :attr:`halved` each of a pair in one half of the warp."""
        if self.halved:
            return tuple(self._halve(*values[i : i + 2]) for i in range(0, len(values), 2))
        return tuple(self.warp_sum(v) for v in values)

    def warp_sum(self, value):
        """The sum of one value, in every lane."""
        return cute.arch.warp_reduction(value, operator.add, threads_in_group=min(self.tile.threads_per_row, WARP))

    @cute.jit
    def send(self, values: cutlass.Constexpr, shared, step: Int32, local=0):
        """Contribute a warp's sums to the sums of a step."""
        if const_expr(not self.alone):
            tidx = cute.arch.thread_idx()[0]
            warp = tidx // WARP
            partial = local * self.warps + warp % self.warps
            self._share(values, shared, self._stage(step), tidx % WARP, warp // self.warps, partial)
        return values

    def _stage(self, step):
        """The stage of a step, by a mask: a remainder would take more, since it must be right for negative steps."""
        return step & (self.stages - 1)

    @cute.jit
    def _halve(self, v0, v1):
        """Warp sums of two values, the first in lanes 0-15, the second in lanes 16-31, in half the shuffles."""
        upper = cute.arch.lane_idx() >= WARP // 2
        mine = cutlass.select_(upper, v1, v0)
        other = cutlass.select_(upper, v0, v1)
        mine = mine + cute.arch.shuffle_sync_bfly(other, offset=WARP // 2)
        return cute.arch.warp_reduction(mine, operator.add, threads_in_group=WARP // 2)

    @cute.jit
    def _share(self, values: cutlass.Constexpr, shared, stage, lane, row, partial):
        sSum, mbar = shared
        half = WARP // 2 if const_expr(self.halved) else WARP
        # Which of the sums a lane holds; the lanes of a half hold the same one.
        which, stride = lane // half, WARP // half
        if const_expr(self.tile.cluster == 1):
            if lane % half == 0:
                for i in cutlass.range_constexpr(len(values)):
                    sSum[which + i * stride, partial, row, stage] = values[i]
        else:
            if cute.arch.thread_idx()[0] == 0:
                size = self.values * self.partials * self.tile.rows * 4
                cute.arch.mbarrier_arrive_and_expect_tx(mbar + stage, size)
            peer = lane % half
            if peer < self.tile.cluster:
                index = cute.arch.block_idx_in_cluster() * self.warps + partial
                target = sSum.iterator + cute.crd2idx((which, index, row, stage), sSum.layout)
                sTarget = cute.arch.map_dsmem_ptr(target, peer).toint()
                sBarrier = cute.arch.map_dsmem_ptr(mbar + stage, peer).toint()
                for i in cutlass.range_constexpr(len(values)):
                    cute.arch.inline_ptx(
                        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
                        read_only_args=[Int32(sTarget + 4 * stride * i), values[i], Int32(sBarrier)],
                    )

    @cute.jit
    def wait(self, given: cutlass.Constexpr, shared, step: Int32):
        """The sums of a step, once every thread of the row has contributed."""
        if const_expr(self.alone):
            if const_expr(self.halved):
                return tuple(cute.arch.shuffle_sync(v, offset=i * (WARP // 2)) for v in given for i in range(2))
            return given
        stage = self._stage(step)
        if const_expr(self.tile.cluster == 1):
            cute.arch.barrier()
        else:
            cute.arch.mbarrier_wait(shared.barriers + stage, step >> self.stages.bit_length() - 1 & 1)
        tidx = cute.arch.thread_idx()[0]
        return self._combine(shared.sums, stage, tidx % WARP, tidx // WARP // self.warps)

    @cute.jit
    def _combine(self, sSum, stage, lane, row):
        if const_expr(self.partials <= 8):
            sums = [Float32(0.0) for _ in range(self.values)]
            for p in cutlass.range_constexpr(self.partials):
                for i in cutlass.range_constexpr(self.values):
                    sums[i] = sums[i] + sSum[i, p, row, stage]
            return tuple(sums)
        lanes = [Float32(0.0) for _ in range(self.values)]
        for p in cutlass.range_constexpr(0, self.partials, WARP):
            if const_expr(p + WARP <= self.partials):
                for i in cutlass.range_constexpr(self.values):
                    lanes[i] = lanes[i] + sSum[i, p + lane, row, stage]
            else:
                inside = p + lane < self.partials
                place = cutlass.select_(inside, p + lane, Int32(0))
                for i in cutlass.range_constexpr(self.values):
                    lanes[i] = lanes[i] + cutlass.select_(inside, sSum[i, place, row, stage], Float32(0.0))
        return tuple(cute.arch.warp_reduction(v, operator.add) for v in lanes)
