"""The product's kernel on Hopper with its parts switched off one by one: what tensor_cores.py measures.

All have the warps, registers, clusters, order of tiles and matrix instructions of
:class:`cute_ops.kernels.gemm.sm90.GemmSm90`. Their results are wrong, except for :class:`NoStores`, which has none.
"""

from dataclasses import fields

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState, PipelineTmaAsync, PipelineUserType, make_pipeline_state

from cute_ops.kernels.gemm import linear
from cute_ops.kernels.gemm.scheduler import tile_count
from cute_ops.kernels.gemm.sm90 import GemmSm90
from cute_ops.kernels.lib.pdl import let_next_start

PRODUCTS = {"linear": linear.Linear, "linear_dx": linear.LinearDx, "linear_dweight": linear.LinearDweight}


class NoStores(GemmSm90):
    """No epilogue: a thread keeps its accumulators alive by a store to shared memory. The compiler leaves out matrix
    instructions whose results nobody reads, so that one of each block of rows has to be read.
    """

    def _store(self, mma, rAcc, ahead, held, inputs, outputs, places, group, tile_slot):
        (*_, sD), *_ = outputs[0]
        blocks = cute.size(rAcc, mode=[1])  # of rAcc: (mma, blocks, 1)
        alive = rAcc[0]
        for block in range(1, blocks):
            alive += rAcc[block * cute.size(rAcc) // blocks]
        sD[places[2] % self.subtile[0], 0, 0] = alive.to(sD.element_type)
        return tile_slot


class FewBlocks(NoStores):
    """Nor reads of memory: as many blocks of k as there are slots are loaded again and again, from L2."""

    again = True

    @cute.jit
    def _load(self, ring, ranks, order: cutlass.Constexpr, a: cutlass.Constexpr, b: cutlass.Constexpr):
        (tma_a, mA, sA), (((tma_b, mB),), sB), config = a, b, self.config
        x, y, _ = place = ranks.get_flat_coord(cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))
        loads = []
        for tma, m, slots, rows, rank, sharers, mode in (
            (tma_a, mA, sA, config.tile_m, y, config.cluster_n, 1),
            (tma_b, mB, sB, config.tile_n, x, config.cluster_m, 0),
        ):
            tiles = cute.local_tile(m, (rows, config.tile_k), (None, None))  # (rows, tile_k, rest, rest_k)
            to, source = cpasync.tma_partition(
                tma, rank, cute.make_layout(sharers), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
            )  # (tma, stages), (tma, rest, rest_k)
            mask = cute.make_layout_image_mask(ranks, place, mode=mode) if const_expr(sharers > 1) else None
            loads.append((tma, source, to, mask))

        slot = make_pipeline_state(PipelineUserType.Producer, config.stages)
        first, step = cute.arch.block_idx()[2], cute.arch.grid_dim()[2]
        end, steps = first + 1, Int32(config.stages)
        if const_expr(self.again):
            end, steps = tile_count(order), cute.size(mA, mode=[1]) // config.tile_k
        for index in cutlass.range(first, end, step, unroll=1):
            at = self._tile(index, order)
            for k in cutlass.range(steps, unroll=1):
                ring.producer_acquire(slot)
                full = ring.producer_get_barrier(slot)
                for i, (tma, source, to, mask) in enumerate(loads):
                    block = source[None, at[i], k % config.stages]
                    cute.copy(tma, block, to[None, slot.index], tma_bar_ptr=full, mcast_mask=mask)
                slot.advance()
        let_next_start(self.pdl)
        if const_expr(self.again):
            ring.producer_tail(slot)


class Resident(FewBlocks):
    """Nor loads: the slots are filled once, and multiplied as often as the product would."""

    again = False

    def _multiply(self, product, ring, slot, steps, turn):
        filled = Filled(*[getattr(ring, field.name) for field in fields(ring)])
        return super()._multiply(product, filled, slot, steps, turn)


class Filled(PipelineTmaAsync):
    """A ring whose slots were filled once and stay so."""

    def consumer_wait(self, state):
        super().consumer_wait(PipelineState(state.stages, state.count, state.index, Int32(0)))

    def consumer_release(self, state):
        pass


def _with(kernel, variant):
    product = PRODUCTS[variant.op](variant)
    product.form = kernel(variant, product.epilogue)
    return product


def no_stores(variant):
    return _with(NoStores, variant)


def few_blocks(variant):
    return _with(FewBlocks, variant)


def resident(variant):
    return _with(Resident, variant)
