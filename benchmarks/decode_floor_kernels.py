"""Kernels of attention to caches with their parts switched off: what decode_floor.py measures. Their results are wrong.

All have the grid, warps, shared memory and copies of the kernels that the ops run.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.attention import decode_attention, decode_attention_sm90, mla_decode_sm90
from cute_ops.kernels.attention.config import LATENT_PARTS, LATENT_STAGES, DecodeConfig
from cute_ops.kernels.attention.pages import Keys, first_place, load_tile, next_place, page_entry
from cute_ops.kernels.attention.registers import store_packed
from cute_ops.kernels.tensor_core.pipeline import Consumer


class NoResults:
    """Nothing is combined or stored."""

    def __init__(self, variant):
        super().__init__(variant)
        self.combine = lambda *_: None

    def _keep_nothing(self, *_):
        pass


class Loads(NoResults, decode_attention.DecodeAttention):
    """Tiles are copied, and nobody reads them."""

    @cute.jit
    def _attend(
        self, mma, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        (_, _, (sK, sV, masks, _, _)), (tidx, warp), warps = shared, at, self.config.warps
        lane, stages, page_size = tidx % WARP, self.config.stages, Int32(tensors.k_cache.shape[1])
        keys = Keys(
            self.config.form, self.keys, tensors.page_table, work.batch, work.keys, page_size, self.keys * warps
        )  # fmt: skip
        caches, stage = [(tensors.k_cache, sK), (tensors.v_cache, sV)], Int32(0)
        first = work.begin + warp
        index, slot = first_place(keys, first, lane)
        entry = page_entry(keys, index, first, lane)
        for tile in cutlass.range(first, work.end, warps, unroll=1):
            load_tile(keys, caches, masks, (work.head, tile, work.end, stage, lane), (entry, slot))
            index, slot = next_place(keys, index, slot)
            entry = page_entry(keys, index, tile + warps, lane)
            stage = cutlass.select_(stage == stages - 1, Int32(0), stage + 1)
            cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.cp_async_wait_group(0)


class LoadsByBoxes(NoResults, decode_attention_sm90.DecodeAttentionSm90):
    """TMA loads boxes into slots, which are free again at once."""

    @cute.jit
    def _attend(
        self, mma, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr,
        at: cutlass.Constexpr,
    ):  # fmt: skip
        _, _, (pipeline, _) = shared
        consumer, lane = Consumer(pipeline), cute.arch.lane_idx()
        for _ in cutlass.range(work.begin, work.end, self.config.warps, unroll=1):
            for _ in cutlass.range_constexpr(2):
                stage = consumer.wait()
                consumer.advance()
                self._release(pipeline, stage, lane)


class LatentProducts(mla_decode_sm90.MlaDecodeSm90):
    """Both blocks in shared memory are loaded once, and multiplied as often as the sequence has others."""

    softmaxed = True

    def _turn(self, index):
        self.index = index
        return super()._turn(index)

    @cute.jit
    def _copy_tiles(
        self, copy: cutlass.Constexpr, places: cutlass.Constexpr, stage, full: cutlass.Constexpr, tidx
    ):  # fmt: skip
        if self.index < LATENT_STAGES:
            mla_decode_sm90.MlaDecodeSm90._copy_tiles(self, copy, places, stage, full, tidx)
        else:
            for part in cutlass.range_constexpr(LATENT_PARTS):
                cute.arch.mbarrier_arrive(full + part)

    @cute.jit
    def _weigh(
        self, own: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, place: cutlass.Constexpr,
        whole,
    ):  # fmt: skip
        if const_expr(self.softmaxed):
            return mla_decode_sm90.MlaDecodeSm90._weigh(self, own, work, shared, place, whole)
        factors = cute.make_rmem_tensor(2, Float32)
        factors.fill(1.0)
        store_packed(own.rS, own.rP)
        return factors


class LatentProductsAlone(LatentProducts):
    """Nor are scores exponentiated."""

    softmaxed = False


def loads(variant):
    """Loads alone."""
    return (LoadsByBoxes if DecodeConfig.of(variant.config).box else Loads)(variant)


def latent_products(variant):
    """Products and exponentials."""
    return LatentProducts(variant)


def latent_products_alone(variant):
    """Products alone."""
    return LatentProductsAlone(variant)
