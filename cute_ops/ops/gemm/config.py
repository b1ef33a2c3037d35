"""Which tiles a matrix product is cut into: a model of the cycles that each choice takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cute_ops.declaration.config import POWERS, Config, Needs, Problem, Space
from cute_ops.hardware import ARCHES
from cute_ops.kernels.gemm.config import OPERAND_BYTES, Form, GemmConfig
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP
from cute_ops.ops.batches import batch_of

# Form, rows and columns of a tile. Larger tiles leave too few registers for most epilogues.
TILES: tuple[tuple[Form, int, int], ...] = (
    ("pingpong", 128, 192), ("pingpong", 128, 160), ("pingpong", 128, 128), ("pingpong", 64, 256),
    ("pingpong", 64, 192), ("pingpong", 64, 128), ("pingpong", 64, 64),
    ("cooperative", 128, 256), ("cooperative", 256, 128), ("cooperative", 128, 192), ("cooperative", 128, 128),
)  # fmt: skip
CLUSTERS: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (1, 1))
# Up to m = SMALL_M a product takes as long as reading the other operand. Then a tile has SMALL_M_TILE rows of that
# operand, ENOUGH_SMS of all SMs suffice to read it, and k has at least LEAST_STEPS steps for each partial sum.
SMALL_M, SMALL_M_TILE, ENOUGH_SMS, LEAST_STEPS = 64, 128, 0.7, 4
MOST_SPLITS = 32  # partial sums of a split k, that are measured
# Stages of the operands at most and at least, and stages of subtiles: fewer of these where the operands would otherwise
# have fewer than ENOUGH_STAGES.
MAX_STAGES, ENOUGH_STAGES, LEAST_STAGES, SUBTILE_STAGES = 8, 4, 3, (4, 3, 2)
SWIZZLED = 64  # 16-bit elements of a row of 128 bytes in shared memory, which TMA and WGMMA permute
ALIGNMENT = 1024  # bytes: of the first buffer in shared memory
# Registers of a thread that multiplies, and those of them that hold addresses, coordinates and constants.
MULTIPLY_REGISTERS, OTHER_REGISTERS = 232, 30
# What an SM does in a cycle: multiply-adds of 16-bit numbers; bytes of shared memory; bytes from L2; exponentials and
# reciprocals; other instructions. With this number for L2 and those below, the configs chosen for 24 shapes of models
# take 0.6% longer than the fastest ones (H200): 0.9% where power slows all of them down alike, 0.2% in the mean of that
# and of single products after pauses, whose times differ more.
MMA, SHARED_BYTES, L2_BYTES, MUFU, FMA = 2048, 128, 48, 16, 128
# Cycles: SUBTILE to store a warpgroup's subtile, besides its bytes and its instructions; TURN between the last product
# of one warpgroup and the first one of the other; RESUME until both multiply at full speed again after an epilogue. If
# shared memory is busy for longer than the Tensor Cores, one in CONTENTION of these cycles is lost.
SUBTILE, TURN, RESUME, CONTENTION = 100, 500, 1500, 12


class GemmSize(NamedTuple):
    """The size of a product: m rows and n columns of sums of k terms, for each matrix of a batch."""

    m: int
    n: int
    k: int
    batch: int = 1

    @classmethod
    def of(cls, problem: Problem, dims: tuple[str, str, str]) -> GemmSize:
        """From the names of the dims of rows, columns and terms."""
        m, n, k = map(problem.size, dims)
        return cls(m, n, k, batch_of(problem))


class EpilogueCost(NamedTuple):
    """The cost of a product's epilogue beside the accumulators.

    Attributes:
        outputs: bytes of an element of each output.
        tiles: bytes of an element of each operand ``(m, n)``.
        gate_up: whether an element needs two columns of the product, one of the gate's and one of the up projection's.
        blocks: columns of b that share a row of 128 bytes in shared memory. A CTA loads a multiple of them, so
            that TMA writes whole rows.
        vectors: registers of a thread for row and column vectors.
        live: float32 values of an element that are needed at once.
        mufu: instructions for each element that an SM does 16 of in a cycle.
        fma: other instructions for each element.
        group: columns of a group, which must lie in one tile.
    """

    outputs: tuple[int, ...] = (2,)
    tiles: tuple[int, ...] = ()
    gate_up: bool = False
    blocks: int = 8
    vectors: int = 0
    live: int = 1
    mufu: int = 0
    fma: int = 0
    group: int = 1

    def registers(self, config: GemmConfig) -> int:
        """The registers of a thread while it computes its first subtile: accumulators, what is loaded for this subtile
        and the next, results.
        """
        rows, columns = config.subtile(*self.outputs, *self.tiles)
        per_thread = rows * columns // (WARPGROUP * config.sharing)
        loaded = per_thread * (sum(self.outputs) + sum(self.tiles)) // 4
        return config.accumulators + loaded + self.vectors + self.live + OTHER_REGISTERS


PLAIN = EpilogueCost()


@lru_cache(maxsize=256)
def configs(arch: str, sm_count: int, cost: EpilogueCost = PLAIN) -> tuple[GemmConfig, ...]:
    """All configs whose registers suffice, with as many stages of the operands as fit in shared memory. They take most
    of the time of a choice, and are the same for products of all sizes.
    """
    return tuple(_configs(arch, sm_count, cost))


def _configs(arch: str, sm_count: int, cost: EpilogueCost) -> Iterator[GemmConfig]:
    for (form, tile_m, tile_n), (cluster_m, cluster_n) in product(TILES, CLUSTERS):
        config = GemmConfig(form, tile_m, tile_n, 1, sm_count // (cluster_m * cluster_n), cluster_m, cluster_n)
        _, sub_n = config.subtile(*cost.outputs, *cost.tiles)
        columns = tile_n // (1 + cost.gate_up)
        if columns % sub_n or columns % (cost.blocks * cluster_m) or columns % cost.group:
            continue
        if cost.registers(config) > MULTIPLY_REGISTERS:
            continue
        fitting = list(_with_stages(config, arch, cost))
        if fitting:
            yield next((c for c in fitting if c.stages >= ENOUGH_STAGES), fitting[-1])


def _with_stages(config: GemmConfig, arch: str, cost: EpilogueCost) -> Iterator[GemmConfig]:
    """A config with fewer and fewer stages of subtiles, and so more and more of the operands."""
    sub_m, sub_n = config.subtile(*cost.outputs, *cost.tiles)
    subtiles = config.tile_m * (config.tile_n // (1 + cost.gate_up)) // (sub_m * sub_n)
    for count in SUBTILE_STAGES:
        if subtiles % count == 0:
            made = replace(config, store_stages=count, tile_stages=count if cost.tiles else 0, stages=0)
            made = _with_most_stages(made, arch, cost.outputs, cost.tiles)
            if made.stages >= LEAST_STAGES:
                yield made


def _with_most_stages(config: GemmConfig, arch: str, outputs: Sequence[int], tiles: Sequence[int] = ()) -> GemmConfig:
    """A config without stages, with as many as fit beside subtiles of outputs and operands of these sizes."""
    room = ARCHES[arch].shared_per_cta - ALIGNMENT - config.shared(outputs, tiles)
    return replace(config, stages=min(room // config.stage_bytes, MAX_STAGES))


def choose(size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int) -> GemmConfig | None:
    """The config that takes the fewest cycles by the model, of equals the one that loads least, of these the first;
    None where the epilogue fits none.
    """
    possible = configs(arch, sm_count, cost)
    return min(possible, key=lambda config: (cycles(config, size, cost), loaded(config)), default=None)


def small_m(size: GemmSize, arch: str, sm_count: int) -> GemmConfig:
    """The config for small m: tiles of the other operand's rows, with k split no more than keeps enough SMs busy."""
    tiles, steps, count = -(-size.n // SMALL_M_TILE), -(-size.k // SWIZZLED), 1
    while tiles * count < ENOUGH_SMS * sm_count and steps >= 2 * count * LEAST_STEPS:
        count *= 2
    return _split(count, 32 if size.m <= 32 else 64, arch, sm_count)


def _split(count: int, tile_n: int, arch: str, sm_count: int) -> GemmConfig:
    config = GemmConfig("cooperative", SMALL_M_TILE, tile_n, 0, sm_count, store_stages=2, split_k=count)
    return _with_most_stages(config, arch, (4,))


def without_tma(vec_a: int, vec_b: int) -> GemmConfig:
    """The config for operands that TMA cannot load: threads load vectors of so many elements."""
    return GemmConfig("mma_sync", 128, 128, 2, 0, tile_k=32, vec_a=vec_a, vec_b=vec_b)


def cycles(config: GemmConfig, size: GemmSize, cost: EpilogueCost = PLAIN) -> int:
    """About how long a product takes: waves of tiles, each as long as the slower of multiplying and loading from L2.

    An instruction reads its 64 rows and all of the tile's columns from shared memory. Two warpgroups that share a tile
    do not multiply while they compute its epilogue. Of two with a tile each, one computes its epilogue while the other
    multiplies, except for the last tile.
    """
    rows, columns, steps = config.tile_m, config.tile_n, -(-size.k // config.tile_k)
    row_bytes = config.tile_k * OPERAND_BYTES[0]
    multiply = rows * columns * config.tile_k // MMA
    shared = (rows + columns + rows // MMA_M * (MMA_M + columns)) * row_bytes // SHARED_BYTES
    multiply += max(shared - multiply, 0) // CONTENTION
    inside = steps * max(multiply, loaded(config) * row_bytes // L2_BYTES)
    width = columns // (1 + cost.gate_up)
    sub_m, sub_n = config.subtile(*cost.outputs, *cost.tiles)
    moved = rows * width * 2 * (sum(cost.outputs) + sum(cost.tiles)) // SHARED_BYTES
    after = moved + rows * width * cost.mufu // MUFU + rows * width * cost.fma // FMA
    after += SUBTILE * rows * width // (sub_m * sub_n)
    tiles = size.batch * -(-size.m // (rows * config.cluster_m)) * -(-size.n // (width * config.cluster_n))
    waves = -(-tiles // config.clusters)
    if config.form == "pingpong":
        return waves * (max(inside, after) + TURN) + after
    return waves * (inside + after + RESUME)


def loaded(config: GemmConfig) -> int:
    """Rows of both operands that a CTA loads; what the CTAs of a cluster share counts for each by its share."""
    return config.tile_m // config.cluster_n + config.tile_n // config.cluster_m


def busy(config: GemmConfig, size: GemmSize, sm_count: int) -> float:
    """The fraction of a product's time in which the Tensor Cores multiply."""
    return math.prod(size) / (MMA * sm_count * cycles(config, size))


# --- search space

# Measured are configs that take at most so much longer than the fastest, by the model of cycles; and of the
# heuristic's own, other numbers of tiles that are walked together.
NEAR, RASTERS = 1.25, (4, 16)
# Sizes up to which a winner holds: of rows powers of two, of columns and terms steps of 256, of long ones 1024.
ROWS = tuple(2**i for i in range(6, 17))
COLUMNS = (*range(256, 8192, 256), *range(8192, 65537, 1024))
BUCKETS: dict[str, tuple[int, ...]] = {"m": ROWS, "n": COLUMNS, "k": COLUMNS}
BATCH: dict[str, tuple[int, ...]] = {"b": POWERS}
# Registers that a thread has when a CTA starts, before those that load give theirs to those that multiply.
START_REGISTERS = 168


def bucket(name: str, size: int) -> int:
    """The size that stands for all of its bucket, so that all of them have one search space."""
    sizes: tuple[int, ...] = {**BUCKETS, **BATCH}[name]
    return next((s for s in sizes if size <= s), sizes[-1])


def space_of(sizes: tuple[str, str, str], epilogue_cost: Callable[[Problem], EpilogueCost], batched: bool) -> Space:
    """The search space of a product, or of a batch of them, with these dims of rows, columns and terms."""

    def configs(problem: Problem, flat: Config) -> Iterator[GemmConfig]:
        heuristic, target = GemmConfig.of(flat), (problem.arch, problem.sm_count)
        m, n, k = (bucket(name, problem.size(name)) for name in sizes)
        size = GemmSize(m, n, k, bucket("b", problem.size("b")) if batched else 1)
        if heuristic.form == "mma_sync":
            return
        if heuristic.split_k:
            found = other_splits(heuristic, size, *target)
        else:
            found = others(heuristic, size, epilogue_cost(problem), *target)
        names = ("expression", "reads", "writes", "half_align")
        yield from (replace(config, **{name: getattr(heuristic, name) for name in names}) for config in found)

    def needs(problem: Problem, flat: Config) -> Needs:
        config, wanted = GemmConfig.of(flat), epilogue_cost(problem)
        moved = ((4,), ()) if config.split_k else (wanted.outputs, wanted.tiles)
        return Needs(config.threads, START_REGISTERS, config.shared(*moved) + ALIGNMENT)

    return Space(configs, needs, {**BUCKETS, **(BATCH if batched else {})})


def others(heuristic: GemmConfig, size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int) -> Iterator[GemmConfig]:
    """Other tiles, forms and clusters, and of the heuristic's config other stages and another walk over tiles."""
    times = {c: cycles(c, size, cost) for c in configs(arch, sm_count, cost)}
    least = min(times.values())
    yield from (config for config, time in times.items() if time <= NEAR * least)
    yield from _with_stages(heuristic, arch, cost)
    yield from (replace(heuristic, group=group) for group in RASTERS)


def other_splits(heuristic: GemmConfig, size: GemmSize, arch: str, sm_count: int) -> Iterator[GemmConfig]:
    """With small m: k split into more partial sums, or fewer, each of at least two steps."""
    steps, count = -(-size.k // heuristic.tile_k), 1
    while count <= MOST_SPLITS and steps >= count * 2:
        yield _split(count, heuristic.tile_n, arch, sm_count)
        count *= 2
