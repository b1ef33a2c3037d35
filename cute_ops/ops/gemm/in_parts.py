"""Products whose terms are cut into parts, so that tiles fill whole waves of all SMs, and which products take them.

A product of few tiles, or of a few more than a wave, leaves SMs idle. Tiles of each part of the terms are tiles of a
batch, whose sums in float32 a second kernel adds up: as many parts as fill one, two or three waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.gemm.config import OPERAND_BYTES, Form, GemmConfig
from cute_ops.kernels.tensor_core.sizes import MMA_M
from cute_ops.ops.gemm import config as usual
from cute_ops.ops.gemm import transposed
from cute_ops.ops.gemm.config import EpilogueCost, GemmSize

TILES: tuple[tuple[Form, int, int], ...] = (
    *(("pingpong", 128, n) for n in (96, 128, 160)), *(("cooperative", 128, n) for n in (128, 160, 192, 256)),
    ("cooperative", 256, 128), ("pingpong", 64, 128), ("pingpong", 64, 256),
)  # fmt: skip
CLUSTERS = ((1, 1), (2, 1), (1, 2))
# Waves of all tiles; terms of a part at least; parts, and bytes of their sums, at most; terms of a row and of a column
# of the output at least, as all products have that were measured.
WAVES, LEAST_TERMS, MOST_PARTS, MOST_BYTES, TERMS_OF_OUTPUT = (1, 2, 3), 512, 24, 2**26, 2
# Of the time that the model of transposed tiles expects: what the first kernel takes, and what products without parts
# take. Bytes of sums of a microsecond that the second kernel adds up, and microseconds besides. The factor by which the
# model must find parts faster; the part of the time of multiplying that they must leave tiles of more than 64 rows.
FIRST, WITHOUT, ADD_BYTES, ADD_MORE, FASTER, FEWER = 0.91, 1.017, 5.27e6, 2.89, 1.08, 0.95
SUMS = EpilogueCost((4,))


@lru_cache(maxsize=64)
def _tiles(arch: str, sm_count: int, blocks: int) -> tuple[GemmConfig, ...]:
    """All tiles and clusters, without the number of parts."""
    found = []
    for tile, cluster in product(TILES, CLUSTERS):
        at_once = usual.clusters_at_once(sm_count, cluster[0] * cluster[1])
        if at_once and tile[2] % (blocks * cluster[0]) == 0:
            fitting = list(usual.with_stages(GemmConfig(*tile, 1, at_once, *cluster), arch, SUMS))
            found += [next((c for c in fitting if c.stages >= usual.ENOUGH_STAGES), fitting[-1])] if fitting else []
    return tuple(found)


def configs(size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int) -> Iterator[GemmConfig]:
    """Of each number of waves the tiles, with as many parts as fill it, that the model of cycles finds fastest; none
    where an epilogue or a size has no parts.
    """
    whole = size._replace(n=size.n * (1 + cost.gate_up))
    most = min(size.k // LEAST_TERMS, MOST_PARTS, MOST_BYTES // (whole.m * whole.n * SUMS.outputs[0]))
    few = MMA_M < size.m <= size.k // TERMS_OF_OUTPUT and whole.n <= size.k // TERMS_OF_OUTPUT
    if not cost.parts or not few or most < 2 or size.batch > 1 or size.n % (VECTOR_BYTES // OPERAND_BYTES[0]):
        return
    tiles = [(config, usual.count_tiles(config, whole, SUMS)) for config in _tiles(arch, sm_count, cost.blocks)]
    for waves in WAVES:
        found = [replace(c, parts=min(waves * c.clusters // count, most)) for c, count in tiles]
        times = {c: _cycles(c, whole) for c in found if c.parts > 1}
        if times:
            yield min(times, key=lambda config: times[config])


def _cycles(config: GemmConfig, whole: GemmSize) -> float:
    """About how long both kernels take, beside others with as many waves."""
    adding = _sums(config, whole) / (ADD_BYTES / transposed.CYCLES)
    return usual.cycles(replace(config, parts=1), _of_parts(config, whole), SUMS) + adding


def choose(size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int, by_rows: bool = False) -> GemmConfig | None:
    """The config of a product: that of :func:`cute_ops.ops.gemm.transposed.choose`, whose arguments these are, or one
    of parts.
    """
    found = transposed.choose(size, cost, arch, sm_count, by_rows)
    times = {config: microseconds(config, size, cost) for config in configs(size, cost, arch, sm_count)}
    fastest = min(times, key=lambda config: times[config], default=None)
    if fastest is None or (found and times[fastest] * FASTER > WITHOUT * transposed.microseconds(found, size, cost)):
        return found
    if found and found.tile_m > MMA_M and _multiplying(fastest, size, cost) > FEWER * _multiplying(found, size, cost):
        return found
    return fastest


def _multiplying(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> float:
    """How long an SM's Tensor Cores are taken, as elements of tiles with all terms."""
    whole = size._replace(n=size.n * (1 + cost.gate_up)) if config.parts > 1 else size
    tiles = config.parts * usual.count_tiles(config, whole, SUMS if config.parts > 1 else cost)
    waves = -(-tiles // config.clusters)
    return waves * config.tile_m * config.tile_n / (config.parts * config.cluster_k)


def microseconds(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> float:
    """How long both kernels take. Fitted to 165 configs of 64 drawn products: each product, left out of the fit, is off
    by 6.5% (root mean square, H200).
    """
    whole = size._replace(n=size.n * (1 + cost.gate_up))
    first = transposed.microseconds(replace(config, parts=1), _of_parts(config, whole), SUMS)
    return FIRST * first + _sums(config, whole) / ADD_BYTES + ADD_MORE


def _of_parts(config: GemmConfig, whole: GemmSize) -> GemmSize:
    """The batch of parts."""
    return whole._replace(k=-(-whole.k // config.parts), batch=config.parts)


def _sums(config: GemmConfig, whole: GemmSize) -> int:
    """Bytes of the sums of all parts."""
    return SUMS.outputs[0] * config.parts * whole.m * whole.n
