"""Which tiles a matrix product is cut into: a model of the cycles that each choice takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cute_ops.hardware import ARCHES
from cute_ops.kernels.gemm.config import MMA_K, MMA_M, Form, GemmConfig

# Form, rows and columns of a tile. Those with more accumulators leave too few registers for most epilogues.
TILES: tuple[tuple[Form, int, int], ...] = (
    ("cooperative", 128, 256), ("cooperative", 256, 128), ("cooperative", 128, 192), ("cooperative", 128, 128),
    ("pingpong", 128, 160), ("pingpong", 128, 128), ("pingpong", 64, 256), ("pingpong", 64, 192), ("pingpong", 64, 128),
    ("pingpong", 64, 64),
)  # fmt: skip
CLUSTERS = ((2, 1), (1, 2), (1, 1))
MAX_STAGES, STORE_STAGES = 8, (4, 3, 2)
ALIGNMENT = 1024  # bytes: of the ring in shared memory
# Of an SM in a cycle: 16-bit products added up; bytes of shared memory; bytes from L2 (an estimate).
MMA, SHARED_BYTES, L2_BYTES = 2048, 128, 40


def configs(arch: str, sm_count: int, itemsize: int, out_itemsize: int) -> Iterator[GemmConfig]:
    """All configs, with as many slots in the ring as shared memory holds."""
    for (form, tile_m, tile_n), (cluster_m, cluster_n) in product(TILES, CLUSTERS):
        config = GemmConfig(form, tile_m, tile_n, 1, sm_count // (cluster_m * cluster_n), cluster_m, cluster_n)
        sub_m, sub_n = config.subtile(out_itemsize)
        subtiles = tile_m * tile_n // (sub_m * sub_n)
        config = replace(config, store_stages=next(count for count in STORE_STAGES if subtiles % count == 0))
        room = ARCHES[arch].shared_per_cta - config.store_bytes() - ALIGNMENT
        yield replace(config, stages=min(room // (config.shared(itemsize) - config.store_bytes()), MAX_STAGES))


def choose(m: int, n: int, k: int, itemsize: int, out_itemsize: int, arch: str, sm_count: int) -> GemmConfig:
    """The config that takes the fewest cycles by the model; of equals the first."""
    return min(
        configs(arch, sm_count, itemsize, out_itemsize),
        key=lambda config: cycles(config, m, n, k, itemsize, out_itemsize),
    )


def without_tma(vec_a: int, vec_b: int) -> GemmConfig:
    """For operands that are loaded in vectors of so many elements."""
    return GemmConfig("mma_sync", 128, 128, 2, 0, tile_k=32, vec_a=vec_a, vec_b=vec_b)


def cycles(config: GemmConfig, m: int, n: int, k: int, itemsize: int, out_itemsize: int) -> int:
    """About how long a product takes: waves of tiles, each as long as the slowest of multiplying, shared memory and L2.

    Two warpgroups that share a tile store it while nobody multiplies; of two with a tile each, one stores while the
    other multiplies, but for the last tile.
    """
    rows, columns, steps = config.tile_m, config.tile_n, -(-k // config.tile_k)
    multiply = rows * columns * config.tile_k // MMA
    # Each instruction reads its rows of a and all columns of b from shared memory, which TMA has written once.
    reads = rows // MMA_M * (config.tile_k // MMA_K) * (MMA_M + columns) * MMA_K
    shared = (reads + (rows + columns) * config.tile_k) * itemsize // SHARED_BYTES
    loaded = rows // config.cluster_n + columns // config.cluster_m
    l2 = loaded * config.tile_k * itemsize // L2_BYTES
    inside, store = steps * max(multiply, shared, l2), 2 * rows * columns * out_itemsize // SHARED_BYTES
    tiles = -(-m // (rows * config.cluster_m)) * -(-n // (columns * config.cluster_n))
    waves = -(-tiles // config.clusters)
    if config.form == "pingpong":
        return waves * max(inside, store) + store
    return waves * (inside + store)
