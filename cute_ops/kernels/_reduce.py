"""Sums over the threads of a row: shuffles in a warp, shared memory in a CTA, distributed shared memory in a cluster.

Every thread of the row gets the same bits, in an order that depends on the tile alone.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

WARP = 32


class RowSum:
    """Sums ``values`` fp32 numbers per thread over the threads of each row of a :class:`RowTile`.

    Shared memory: ``stages * rows * warps per row * cluster * values`` floats, plus one mbarrier per stage in a
    cluster. Two stages let successive sums follow each other with one barrier each: whoever writes a stage again has
    seen everybody's contribution to the sum between, and they made it after reading.
    """

    def __init__(self, tile, values, stages):
        self.tile = tile
        self.values = values
        self.stages = stages
        self.warps = max(tile.threads_per_row // WARP, 1)
        self.parts = self.warps * tile.cluster
        self.alone = tile.threads_per_row <= WARP and tile.cluster == 1

    def allocate(self, smem):
        """Shared memory of the sums, and the mbarriers, or None."""
        if self.alone:
            return None, None
        layout = cute.make_layout(
            (self.values, self.parts, self.tile.rows, self.stages),
            stride=(1, self.values, self.values * self.parts, self.values * self.parts * self.tile.rows),
        )
        sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        mbar = smem.allocate_array(Int64, self.stages) if self.tile.cluster > 1 else None
        return sSum, mbar

    @cute.jit
    def prepare(self, mbar):
        """Initialise the mbarriers before any CTA of the cluster may signal them; :meth:`ready` completes it."""
        if const_expr(self.tile.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(mbar + stage, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

    def ready(self):
        if self.tile.cluster > 1:
            cute.arch.cluster_wait()

    @cute.jit
    def __call__(self, values: cutlass.Constexpr, sSum, mbar, stage: Int32, phase: Int32):
        """Row sums of a tuple of fp32 values; every thread of the CTA takes part."""
        group = min(self.tile.threads_per_row, WARP)
        values = tuple(cute.arch.warp_reduction(v, operator.add, threads_in_group=group) for v in values)
        if const_expr(self.alone):
            return values
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % WARP
        warp = tidx // WARP
        row = warp // self.warps
        part = warp % self.warps
        if const_expr(self.tile.cluster == 1):
            if lane == 0:
                for i in cutlass.range_constexpr(self.values):
                    sSum[i, part, row, stage] = values[i]
            cute.arch.barrier()
        else:
            self._exchange(values, sSum, mbar, stage, lane, row, part)
            cute.arch.mbarrier_wait(mbar + stage, phase)
        return self._combine(sSum, stage, lane, row)

    @cute.jit
    def _exchange(self, values: cutlass.Constexpr, sSum, mbar, stage, lane, row, part):
        if cute.arch.thread_idx()[0] == 0:
            size = self.values * self.parts * self.tile.rows * 4
            cute.arch.mbarrier_arrive_and_expect_tx(mbar + stage, size)
        if lane < self.tile.cluster:
            index = cute.arch.block_idx_in_cluster() * self.warps + part
            target = sSum.iterator + cute.crd2idx((0, index, row, stage), sSum.layout)
            sTarget = cute.arch.map_dsmem_ptr(target, lane).toint()
            sBarrier = cute.arch.map_dsmem_ptr(mbar + stage, lane).toint()
            for i in cutlass.range_constexpr(self.values):
                cute.arch.inline_ptx(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
                    read_only_args=[Int32(sTarget + 4 * i), values[i], Int32(sBarrier)],
                )

    @cute.jit
    def _combine(self, sSum, stage, lane, row):
        if const_expr(self.parts <= 8):
            sums = [Float32(0.0) for _ in range(self.values)]
            for p in cutlass.range_constexpr(self.parts):
                for i in cutlass.range_constexpr(self.values):
                    sums[i] = sums[i] + sSum[i, p, row, stage]
            return tuple(sums)
        lanes = [Float32(0.0) for _ in range(self.values)]
        for p in cutlass.range_constexpr(0, self.parts, WARP):
            if const_expr(p + WARP <= self.parts):
                for i in cutlass.range_constexpr(self.values):
                    lanes[i] = lanes[i] + sSum[i, p + lane, row, stage]
            else:
                inside = p + lane < self.parts
                place = cutlass.select_(inside, p + lane, Int32(0))
                for i in cutlass.range_constexpr(self.values):
                    lanes[i] = lanes[i] + cutlass.select_(inside, sSum[i, place, row, stage], Float32(0.0))
        return tuple(cute.arch.warp_reduction(v, operator.add) for v in lanes)
