"""Sums over the CTAs of a cluster that share the terms of a tile, each a range of k."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.kernels.gemm.config import EXCHANGE, GemmConfig
from cute_ops.kernels.tensor_core.sizes import WARP, WARPGROUP

PER_BLOCK = 4  # accumulators that a thread has of 8 neighbouring columns


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class ClusterSums:
    """Adds up a tile's partial sums in the order of the CTAs, and gives each CTA a part of the columns.

    A thread sends its accumulators of the columns that another CTA stores to the thread of the same number there, 16
    bytes at a time, by asynchronous stores to the cluster's shared memory; an mbarrier counts the bytes. They go where
    the operands' stages were, once all warps of the CTA that gets them have multiplied. A cluster has one tile, so each
    mbarrier has one phase, and no CTA ends before all bytes for it have come.

    Attributes:
        config: of the product.
        sums: shared memory, ``tile_m * tile_n`` floats: ``(4, threads, vectors of a part, cluster_k)``.
        ready: the mbarrier at which the warps of all CTAs arrive when a CTA has multiplied.
        full: the mbarrier that counts bytes.
    """

    config: GemmConfig
    sums: Any
    ready: Any
    full: Any

    @classmethod
    def of(cls, config, shared):
        # The stages of b follow on those of a, whose size is a multiple of their alignment.
        sums, mbarriers = cute.recast_ptr(shared.pointers["a"], dtype=Float32), shared.mbarriers(EXCHANGE)
        return cls(config, sums, mbarriers, mbarriers + 1)

    @property
    def threads(self):
        """Threads that multiply a tile."""
        return self.config.sharing * WARPGROUP

    @property
    def bytes(self):
        return self.config.tile_m * self.config.tile_n * 4

    @cute.jit
    def setup(self):
        """Initialise the mbarriers, before the cluster meets."""
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(self.ready, self.config.cluster_k * self.threads // WARP)
            cute.arch.mbarrier_init(self.full, 1)

    @cute.jit
    def exchange(self, acc: cutlass.Constexpr, part: cutlass.Constexpr, thread, halves: cutlass.Constexpr):
        """Send the accumulators ``acc`` of the whole tile, and fill those of this CTA's part, ``(rows, columns)``; of
        ``halves`` side by side each CTA takes a part.
        """
        ranks = self.config.cluster_k
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full, self.bytes)
        if thread % WARP == 0:
            for peer in cutlass.range_constexpr(ranks):
                cute.arch.mbarrier_arrive(self.ready, Int32(peer))
        cute.arch.mbarrier_wait(self.ready, 0)
        blocks = cute.size(part, mode=[1]) // 2
        repeats, within = cute.size(part, mode=[0]) // 2, blocks // halves
        rank, vectors = cute.arch.block_idx()[0], repeats * blocks
        for peer in cutlass.range_constexpr(ranks):
            start = self.sums + (rank * vectors * self.threads + thread) * PER_BLOCK
            target = cute.arch.map_dsmem_ptr(start, Int32(peer)).toint()
            barrier = cute.arch.map_dsmem_ptr(self.full, Int32(peer)).toint()
            for v in cutlass.range_constexpr(vectors):
                repeat, (half, block) = v // blocks, divmod(v % blocks, within)
                column = 2 * (half * within * ranks + peer * within + block)
                values = [acc[2 * repeat + i // 2, column + i % 2] for i in range(PER_BLOCK)]
                cute.arch.inline_ptx(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                    "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
                    read_only_args=[Int32(target + v * self.threads * PER_BLOCK * 4), *values, Int32(barrier)],
                )
        cute.arch.mbarrier_wait(self.full, 0)
        layout = cute.make_layout((PER_BLOCK, self.threads, vectors, ranks))
        sSums = cute.make_tensor(self.sums, layout)
        for v in cutlass.range_constexpr(vectors):
            repeat, block = divmod(v, blocks)
            found = [sSums[None, thread, v, peer].load() for peer in range(ranks)]
            total = found[0]
            for each in found[1:]:
                total = total + each
            for i in cutlass.range_constexpr(PER_BLOCK):
                part[2 * repeat + i // 2, 2 * block + i % 2] = total[i]
