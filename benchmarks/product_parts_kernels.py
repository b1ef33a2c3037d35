"""The product's kernel on Hopper with its parts switched off one by one: what tensor_cores.py measures.

All have the warps, registers, clusters, order of tiles and matrix instructions of
:class:`cute_ops.kernels.gemm.sm90.GemmSm90`. Their results are wrong, except for :func:`no_stores`, which has none.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.pipeline import PipelineState

from cute_ops.kernels.gemm import linear
from cute_ops.kernels.gemm.mainloop import Mainloop
from cute_ops.kernels.gemm.store import Store
from cute_ops.kernels.tensor_core.pipeline import Consumer, Producer
from cute_ops.kernels.tensor_core.scheduler import persistent

PRODUCTS = {"linear": linear.Linear, "linear_dx": linear.LinearDx, "linear_dweight": linear.LinearDweight}


class NoStore(Store):
    """No epilogue: a thread keeps its accumulators alive by a store to shared memory. The compiler leaves out matrix
    instructions whose results nobody reads, so that one of each block of rows has to be read.
    """

    @cute.jit
    def store(
        self, stages: cutlass.Constexpr, acc: cutlass.Constexpr, tile: cutlass.Constexpr, loads: cutlass.Constexpr,
        consumer,
    ):  # fmt: skip
        alive = acc.acc[0, 0]
        for block in range(1, acc.repeats_m):
            alive += acc.acc[2 * block, 0]
        (sD,) = stages.outputs.sD
        sD[tile.thread % self.subtiles.shape[0], 0, 0] = alive.to(sD.element_type)
        return consumer


class FewBlocks(Mainloop):
    """No reads of memory: as many blocks of k as there are stages are loaded again and again, from L2."""

    again = True

    @cute.jit
    def load(self, stages: cutlass.Constexpr, ranks, tiles: cutlass.Constexpr):
        tile_copies = self._tile_copies(stages, ranks)
        producer, work = Producer(stages.pipeline), persistent(tiles.count)
        end, steps = work.first + 1, Int32(self.config.stages)
        if const_expr(self.again):
            end, steps = work.end, cute.size(tile_copies[0].tXgX, mode=[2])
        for index in cutlass.range(work.first, end, work.step, unroll=1):
            row, column, *_ = tiles.coordinate(index)
            for k in cutlass.range(steps, unroll=1):
                stage = producer.acquire_and_advance()
                for copy, at in zip(tile_copies, (row, column), strict=True):
                    copy.load((at, k % self.config.stages), stage)
        return producer


class Resident(FewBlocks):
    """Nor loads: the stages are filled once, and multiplied as often as the product would."""

    again = False

    def consumer(self, stages):
        return FilledOnce(stages.pipeline)


class FilledOnce(Consumer):
    """The consumer of stages that were filled once and stay so."""

    def wait(self):
        at = self.at
        self.pipeline.consumer_wait(PipelineState(at.stages, at.count, at.index, Int32(0)))
        return at.index

    def release_and_advance(self):
        self.advance()


def _with(mainloop, variant):
    product = PRODUCTS[variant.op](variant)
    kernel = product.form
    kernel.store = NoStore(kernel.config, product.epilogue)
    kernel.mainloop = mainloop(kernel.config, product.epilogue.halves)
    return product


def no_stores(variant):
    return _with(Mainloop, variant)


def few_blocks(variant):
    return _with(FewBlocks, variant)


def resident(variant):
    return _with(Resident, variant)
