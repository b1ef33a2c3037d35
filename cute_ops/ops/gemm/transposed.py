"""Tiles of the output's transpose, for products of some hundred rows, and which products take them.

Rows of such a tile are columns of the output, and columns its rows, of which a tile may have any multiple of 16: 141
rows fill one of 144, where other tiles have 192.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.gemm.config import LEAST_STORED, OPERAND_BYTES, STORE_BYTES, Form, GemmConfig
from cute_ops.kernels.tensor_core.sizes import MMA_M
from cute_ops.ops.gemm import config as usual
from cute_ops.ops.gemm.config import EpilogueCost, GemmSize

# Form, columns and rows of the output; CTAs that share what they load, along columns and rows of the output.
TILES: tuple[tuple[Form, int, range], ...] = (
    ("pingpong", 64, range(80, 257, 16)), ("pingpong", 128, range(80, 193, 16)),
    ("cooperative", 128, range(144, 257, 16)), ("cooperative", 256, range(80, 193, 16)),
)  # fmt: skip
CLUSTERS: tuple[tuple[int, int], ...] = ((2, 1), (1, 2), (1, 1))
# Rows of products that may have them, and the factor by which the model must find them faster than other tiles. Of 16
# products of 73 to 128 rows one gained more than 6%: 93 x 2304 x 12288 takes 20.6 us by three CTAs a tile, and 26.2 by
# other tiles (H200).
ROWS, FASTER = range(129, 513), 1.06
# Registers of a thread more than EpilogueCost says, of gate_up weights and several outputs: 128 x 144 spilled one.
MORE_OF_HALVES = 32
# Cycles of a microsecond, and microseconds besides. FLOP of a microsecond at which power limits products.
CYCLES, MORE, MOST = 1900.0, 2.33, 7.8e8
# Bytes from L2 in a cycle, each SM's share; cycles from the load of a stage to its use; cycles more of a step of
# transposed tiles of 64 columns; the power of size.off_a and off_b by which L2 takes longer for rows off a line.
L2_BYTES, LATENCY, STEP_OF_64, OFF_A_LINE = 58, 1640, 32, 2.4
# Cycles of a tile besides its steps and its epilogue; cycles more where both warpgroups have the same tile, whose terms
# CTAs do not share.
TILE, SAME_TILE = 980, 2900
# What goes on at once takes the cubic mean of its times: nothing waits for the slowest alone.
POWER = 3


def configs(arch: str, sm_count: int, cost: EpilogueCost) -> tuple[GemmConfig, ...]:
    """All configs whose registers suffice; none for an epilogue that no transposed tile has."""
    return _configs(arch, sm_count, cost) if cost.transposes else ()


@lru_cache(maxsize=256)
def _configs(arch: str, sm_count: int, cost: EpilogueCost) -> tuple[GemmConfig, ...]:
    found = []
    for config in _shapes(sm_count, cost):
        fitting = list(usual.with_stages(config, arch, cost))
        more = MORE_OF_HALVES if cost.gate_up and len(cost.outputs) > 1 else 0
        if fitting and cost.registers(config) + more <= usual.MULTIPLY_REGISTERS:
            found.append(next((c for c in fitting if c.stages >= usual.ENOUGH_STAGES), fitting[-1]))
    return tuple(found)


def _shapes(sm_count: int, cost: EpilogueCost) -> Iterator[GemmConfig]:
    """Tiles and clusters, without stages."""
    least = min((*cost.outputs, *cost.tiles))
    for form, columns, each in TILES:
        clusters = [(*cluster, 1) for cluster in CLUSTERS]
        clusters += [(1, 1, count) for count in usual.CLUSTERS_K if form == "pingpong"]
        for rows, (cluster_m, cluster_n, count) in product(each, clusters):
            at_once = usual.clusters_at_once(sm_count, cluster_m * cluster_n * count)
            half, repeat = columns // (1 + cost.gate_up), MMA_M * (1 + (form == "cooperative"))
            if not at_once or rows % (LEAST_STORED * count) or half % math.lcm(cost.blocks * cluster_n, repeat):
                continue
            wide = STORE_BYTES if rows // count % (STORE_BYTES // least) == 0 else LEAST_STORED * least
            yield GemmConfig(
                form, columns, rows, 1, at_once, cluster_m, cluster_n, cluster_k=count, store_bytes=wide,
                transposed=True,
            )  # fmt: skip


def choose(size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int, by_rows: bool = False) -> GemmConfig | None:
    """The config of a product: that of :func:`cute_ops.ops.gemm.config.choose`, whose arguments these are, or one of
    transposed tiles.
    """
    found = usual.choose(size, cost, arch, sm_count, by_rows)
    if not by_rows or size.m not in ROWS or size.batch > 1 or size.n % (VECTOR_BYTES // OPERAND_BYTES[0]):
        return found
    times = {c: microseconds(c, size, cost) for c in configs(arch, sm_count, cost) if _fits(c, size.m)}
    fastest = min(times, key=lambda config: times[config], default=None)
    if fastest is None or (found and times[fastest] * FASTER > microseconds(found, size, cost)):
        return found
    return fastest


def _fits(config: GemmConfig, m: int) -> bool:
    """Whether no smaller tile takes as many tiles for so many rows."""
    return -(-m // config.tile_n) < -(-m // (config.tile_n - LEAST_STORED))


def microseconds(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> float:
    """How long a product of some hundred rows takes, by any config that loads by TMA. Fitted to 238 transposed configs
    and 128 others of 128 products: an eighth of them, left out of the fit in turns, is off by 7.4% (root mean square).
    254 configs of other products, none transposed, are off by 11% (H200).
    """
    tiles = usual.count_tiles(config, size, cost)
    waves, busy = -(-tiles // config.clusters), min(tiles, config.clusters) / config.clusters
    off = size._replace(off_a=size.off_a**OFF_A_LINE, off_b=size.off_b**OFF_A_LINE)
    past = usual.PAST_END * usual.rows_past_end(config, size, config.tile[1] // (1 + cost.gate_up))
    multiply = config.tile_m * config.tile_n * config.tile_k / usual.MMA
    load = (usual.loaded(config, off) + past) * config.tile_k * OPERAND_BYTES[0] * busy / L2_BYTES
    step = _together(multiply, load, LATENCY / (config.stages - 1))
    step += STEP_OF_64 if config.transposed and config.tile_m == MMA_M else 0
    steps = -(-size.k // (config.tile_k * config.cluster_k))
    after = usual.epilogue_cycles(config, size, cost)
    exchange = config.tile_m * config.tile_n * 4 / usual.EXCHANGE_BYTES if config.cluster_k > 1 else 0
    if config.form == "cooperative":
        sms = waves * (steps * step + TILE + after + (exchange or SAME_TILE))
    else:
        sms = waves * (steps * step + TILE + exchange) + after
    memory = usual.memory_cycles(size, cost, config.clusters * config.ctas)
    power = 2 * size.multiply_adds * (1 + cost.gate_up) / MOST * CYCLES
    return _together(sms, memory, power) / CYCLES + MORE


def _together(*cycles: float) -> float:
    return float(math.fsum(each**POWER for each in cycles) ** (1 / POWER))
