"""Kernels of ``tensor_cores.py``, written with the parts of ``kernels/tensor_core`` as attention would be."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import pipeline_init_arrive, pipeline_init_wait
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.gemm.config import Barrier, GemmConfig
from cute_ops.kernels.gemm.epilogue import Epilogue
from cute_ops.kernels.gemm.linear import GemmKernel
from cute_ops.kernels.gemm.parts import EpiloguePart
from cute_ops.kernels.gemm.views import by_row
from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.tensor_core import wgmma
from cute_ops.kernels.tensor_core.accumulators import AccumulatorTile, as_operand_a
from cute_ops.kernels.tensor_core.pipeline import Consumer, Producer, tma_pipeline
from cute_ops.kernels.tensor_core.shared import SharedMemory
from cute_ops.kernels.tensor_core.shared_struct import Buffer, SharedStruct, mbarriers
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARP, WARPGROUP
from cute_ops.kernels.tensor_core.tma import TmaTensor, load_tensor, store_tensor, tma_copy
from tests.ops.tensor_cores import ScoresConfig

KEYS = 128  # of a tile
PAIRS = 4  # of columns that are computed at once


class Pipelines(NamedTuple):
    """Of q, of keys and of values."""

    q: Any
    k: Any
    v: Any


class Scores:
    """``out = f(q k^T) v`` for 64 rows of a CTA: one warp loads, one warpgroup multiplies.

    Scores are accumulated, replaced by an expression of them, rounded, and multiplied as they lie in registers.
    """

    def __init__(self, variant):
        self.config, self.d = ScoresConfig.of(variant.config), variant.dims["d"]
        self.epilogue, stages = Epilogue(variant, self.config, batched=False), self.config.stages
        self.epilogue.even = False  # an output has d columns, operands of scores have n, which may be odd
        self.struct = SharedStruct((
            Buffer("q", MMA_M * self.d * 2), Buffer("k", KEYS * self.d * 2 * stages),
            Buffer("v", KEYS * self.d * 2 * stages), mbarriers("q_full", 1), mbarriers("k_full", stages),
            mbarriers("v_full", stages),
        ))  # fmt: skip

    @cute.jit
    def __call__(self, mQ, mK, mV, mBias, mFactor, mOut, stream):
        dtype, stages, (m, n) = mQ.element_type, self.config.stages, (Int32(mQ.shape[0]), Int32(mK.shape[0]))
        self.dtype = dtype
        mQ, mK = (
            cute.make_tensor(x.iterator, cute.make_layout((s, self.d), stride=(self.d, 1)))
            for x, s in ((mQ, m), (mK, n))
        )
        mVt = cute.make_tensor(mV.iterator, cute.make_layout((self.d, n), stride=(1, self.d)))  # (d, n)
        keys, values = (MMA_M, KEYS, self.d), (MMA_M, self.d, KEYS)
        q = load_tensor(mQ, hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, keys, dtype, 1), (MMA_M, self.d))
        k = load_tensor(mK, hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, keys, dtype, stages), (KEYS, self.d))
        v = load_tensor(mVt, hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, values, dtype, stages), (self.d, KEYS))
        both = OperandMajorMode.K, OperandMajorMode.K
        mma_s = wgmma.tiled_mma((dtype, dtype), both, KEYS)
        mma_o = wgmma.tiled_mma(
            (dtype, dtype), (OperandMajorMode.K, OperandMajorMode.MN), self.d, 1, warpgroup.OperandSource.RMEM
        )
        self.kernel((mma_s, mma_o), (q, k, v), (mBias, mFactor), mOut, (m, n)).launch(
            grid=[1, 1, cute.ceil_div(m, MMA_M)], block=[2 * WARPGROUP, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, mmas, loaded, operands, mOut, shape):
        q, k, v = (TmaTensor(*tensor) for tensor in loaded)
        shared = SharedMemory(self.struct)
        sQ, sK, sV = (shared.tensor(name, self.dtype, t.layout) for name, t in (("q", q), ("k", k), ("v", v)))
        q_bytes, bytes_ = MMA_M * self.d * 2, KEYS * self.d * 2
        pipelines = Pipelines(
            tma_pipeline(shared.mbarriers("q_full"), 1, q_bytes, WARPGROUP),
            tma_pipeline(shared.mbarriers("k_full"), self.config.stages, bytes_, WARPGROUP),
            tma_pipeline(shared.mbarriers("v_full"), self.config.stages, bytes_, WARPGROUP),
        )
        cta = cute.make_layout((1, 1, 1))
        pipeline_init_arrive(cta, is_relaxed=True)
        pipeline_init_wait(cta)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < WARPGROUP // WARP:
            if warp == 0:
                copies = (
                    tma_copy(q.atom, sQ, cute.local_tile(q.tensor, (MMA_M, self.d), (None, 0))),
                    tma_copy(k.atom, sK, cute.local_tile(k.tensor, (KEYS, self.d), (None, 0))),
                    tma_copy(v.atom, sV, cute.local_tile(v.tensor, (self.d, KEYS), (0, None))),
                )
                self._load(pipelines, copies, cute.ceil_div(shape[1], KEYS))
        else:
            self._multiply(pipelines, mmas, (sQ, sK, sV), operands, (mOut, shape))

    @cute.jit
    def _load(self, pipelines: cutlass.Constexpr, copies: cutlass.Constexpr, tiles):
        q, k, v = (Producer(pipeline) for pipeline in pipelines)
        copies[0].load((cute.arch.block_idx()[2],), q.acquire_and_advance())
        for tile in cutlass.range(tiles, unroll=1):
            copies[1].load((tile,), k.acquire_and_advance())
            copies[2].load((tile,), v.acquire_and_advance())

    @cute.jit
    def _multiply(
        self, pipelines: cutlass.Constexpr, mmas: cutlass.Constexpr, stages: cutlass.Constexpr,
        operands: cutlass.Constexpr, output: cutlass.Constexpr,
    ):  # fmt: skip
        (mma_s, mma_o), (sQ, sK, sV), (mOut, (m, n)) = mmas, stages, output
        thread, row = cute.arch.thread_idx()[0] - WARPGROUP, cute.arch.block_idx()[2] * MMA_M
        tSrQ = mma_s.make_fragment_A(mma_s.get_slice(0).partition_A(sQ))  # (mma, 1, k, 1)
        tSrK = mma_s.make_fragment_B(mma_s.get_slice(0).partition_B(sK))  # (mma, 1, k, stages)
        tOrV = mma_o.make_fragment_B(mma_o.get_slice(0).partition_B(sV))  # (mma, 1, keys, stages)
        rS = wgmma.accumulators(mma_s, (MMA_M, KEYS))
        rO = wgmma.accumulators(mma_o, (MMA_M, self.d), zero=True)
        scores = AccumulatorTile.of(mma_s, rS, thread, (MMA_M, KEYS))
        q, k, v = (Consumer(pipeline) for pipeline in pipelines)
        q.wait()
        for tile in cutlass.range(cute.ceil_div(n, KEYS), unroll=1):
            wgmma.multiply(mma_s, (tSrQ, tSrK), rS, (0, k.wait()), zero_init=True)
            warpgroup.wait_group(0)
            k.release_and_advance()
            self._modify(scores, operands, (row, tile * KEYS), (m, n))
            rP = as_operand_a(rS, self.dtype)  # (mma, 1, keys)
            wgmma.multiply(mma_o, (rP, tOrV), rO, (None, v.wait()))
            warpgroup.wait_group(0)
            v.release_and_advance()
        self._store(AccumulatorTile.of(mma_o, rO, thread, (MMA_M, self.d)), mOut, (row, 0), (m, self.d))

    def _modify(self, scores, operands, origin, shape):
        for first in range(0, len(scores.columns), PAIRS):
            chunk = scores.chunk(0, range(first, first + PAIRS), origin, shape)
            loaded = [self.epilogue.load(t, mX, chunk) for t, mX in zip(self.epilogue.operands, operands, strict=True)]
            (rX,) = self.epilogue.compute(scores.values(chunk), loaded, chunk, {})
            scores.put(chunk, rX)

    def _store(self, out, mOut, origin, shape):
        for first in range(0, len(out.columns), PAIRS):
            chunk = out.chunk(0, range(first, first + PAIRS), origin, shape)
            rX, value = fragment(cutlass.Float32, chunk.size), out.values(chunk)
            for v in range(chunk.size):
                rX[v] = value(0, v, 0)
            self.epilogue.store(self.epilogue.outputs[0], mOut, rX, chunk)


def with_part(variant):
    """A product whose epilogue has one more part."""
    return GemmKernel(variant, (by_row, by_row), parts=(Doubled(variant),))


class Doubled(EpiloguePart):
    """Stores twice the output as another one, by TMA, through a buffer of its own for each group of warps."""

    names = ("twice",)
    barrier = max(Barrier) + 2  # the last of a product has a number for each warpgroup

    def __init__(self, variant):
        self.config, self.key = GemmConfig.of(variant.config), variant.tensors["twice"]
        self.subtile_shape, self.threads = self.config.subtile(2), self.config.sharing * WARPGROUP

    def buffers(self):
        rows, columns = self.subtile_shape
        return (Buffer("twice", rows * columns * 2 * self.config.groups),)

    def arguments(self, tensors):
        (mX,) = tensors
        self.dtype = mX.element_type
        layout = hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, self.subtile_shape, self.config.groups)
        return store_tensor(by_row(mX, self.key), layout, self.subtile_shape)

    def setup(self, arguments, shared):
        atom, mX, layout = arguments
        sX = shared.tensor("twice", self.dtype, layout)  # (sub_m, sub_n, groups)
        return sX, tma_copy(atom, sX, cute.local_tile(mX, self.subtile_shape, (None, None)))

    def subtile(self, state, subtile, tile):
        (sX, copy), (sub_m, sub_n), chunk = state, self.subtile_shape, subtile.chunk
        row, column = (chunk.rows[0] // sub_m, (chunk.columns[0] // sub_n))
        self._wait_for_buffer(tile)
        for v in range(chunk.size):
            at = (chunk.rows[v // 2 % 2] % sub_m, (chunk.columns[v // 4] + v % 2) % sub_n, tile.group)
            sX[at] = (subtile.results[0][v] * 2.0).to(self.dtype)
        cute.arch.fence_view_async_shared()
        self._send(copy, (row, column), tile)

    @cute.jit
    def _wait_for_buffer(self, tile: cutlass.Constexpr):
        if cute.arch.make_warp_uniform(tile.thread // WARP) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=self.barrier + tile.group, number_of_threads=self.threads)

    @cute.jit
    def _send(self, copy: cutlass.Constexpr, at: cutlass.Constexpr, tile: cutlass.Constexpr):
        cute.arch.barrier(barrier_id=self.barrier + tile.group, number_of_threads=self.threads)
        if cute.arch.make_warp_uniform(tile.thread // WARP) == 0:
            copy.store(at, tile.group)
            cute.arch.cp_async_bulk_commit_group()
