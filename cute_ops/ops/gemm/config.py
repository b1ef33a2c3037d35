"""Which tiles a matrix product is cut into: a model of the cycles that each choice takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cute_ops.declaration.config import POWERS, Config, Needs, Problem, Space
from cute_ops.hardware import ARCHES, VECTOR_BYTES
from cute_ops.kernels.gemm.config import LEAST_STORED, OPERAND_BYTES, STORE_BYTES, Form, GemmConfig
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP
from cute_ops.ops.batches import batch_of

# Form, rows and columns of a tile: columns by 32, which are stored at once, or NARROW. Larger tiles leave too few
# registers for most epilogues.
TILES: tuple[tuple[Form, int, int], ...] = (
    ("pingpong", 128, 192), ("pingpong", 128, 160), ("pingpong", 128, 128), ("pingpong", 128, 96),
    *(("pingpong", 64, n) for n in (256, 224, 192, 160, 144, 128, 112, 96, 80, 64)),
    ("cooperative", 128, 256), ("cooperative", 256, 128), ("cooperative", 128, 224), ("cooperative", 128, 192),
    ("cooperative", 128, 160), ("cooperative", 128, 128), ("cooperative", 256, 96),
    *(("pingpong", 192, n) for n in (128, 96, 64)),
)  # fmt: skip
# Rows of a tile of three blocks; the numbers of rows of products that may have such tiles; and the factor by which the
# model must find such a tile faster than the others. Their clusters are along n. 165 x 16384 x 3976 takes 46.3 us with
# these tiles and 51.9 with others, 176 x 11008 x 4096 32.5 and 39.4; of 23 drawn products 21 take 2 to 23% less time,
# none longer (H200). A product whose epilogue reads tiles has them only if it is one wave: in several waves three such
# products took 1 to 3% longer.
THREE_BLOCKS, OF_THREE_BLOCKS, FASTER_BY_THREE = 192, range(129, 513), 1.06
# Clusters of four CTAs are for tiles of 64 rows, which load most from L2 for what they multiply.
CLUSTERS: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (1, 1), (2, 2), (4, 1))
# CTAs of a cluster that share the terms of a tile; of these tiles only.
CLUSTERS_K = (2, 3, 4, 6)
TILES_K: tuple[tuple[Form, int, int], ...] = (
    *(("pingpong", 64, n) for n in (64, 96, 128, 160, 192)), *(("cooperative", 128, n) for n in (64, 96, 128)),
)  # fmt: skip
# Columns of the tiles of 64 rows that are stored by 16 columns, and how many CTAs share their terms: 64 x 13824 x 6144
# takes 44.0 us by 124 CTAs with tiles of 112 columns, and 45.8 by 62 with 224 (H200).
NARROW = {(80, 1), (112, 1), (144, 1), (160, 2), (64, 2), (64, 4), (96, 6)}
# Columns of the tiles of 128 rows that are stored by 16 columns, and how many CTAs share their terms.
NARROW_128 = {(64, 4), (96, 6)}
# Columns of the tiles of 128 rows that only products of more than MMA_M rows have, and how many CTAs share their terms:
# 128 x 1024 x 11008 takes 14.3 us by four CTAs a tile of 64 columns, and 17.0 by other tiles (H200).
SHARED_128 = {*NARROW_128, (96, 3)}
# Products of up to MMA_M rows have tiles of NARROW with more than MMA_M columns only where their CTAs are on more than
# this part of all SMs, or on at most half of them where CTAs share terms: so none of 12 drawn products took longer than
# by wider tiles. With CTAs on 77 of 132 SMs some took up to a fifth longer (H200).
MOST_BUSY = 0.9
# The factor by which the model must find tiles of half rows faster, see has_half_rows. Of 23 drawn gradients of weights
# 17 then have another config, and all take 0.91 of their time before in the mean, none 2% longer; of 17 of x 0.955, one
# 6% longer. With operands off lines 8192 x 1152 x 1560 took 1.22 times as long (H200).
FASTER_BY_HALF = 1.04
EDGES = (8, 16, 32, 64)  # rows of a that are loaded of a tile at the edge
MORE_EDGES = (96, 128, 144, 160, 176)  # those that tiles of THREE_BLOCKS may have besides EDGES
GPC_SMS = 18  # of a group of SMs at most, in which a cluster must fit; their number is even
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
# Bytes from memory in a cycle, each SM's share; cycles of a step of k at least, until its stage is free again; rows
# that TMA could load in the time of one past the end. Fitted to 246 products of up to 512 rows (H200).
MEMORY_BYTES, LEAST_STEP, PAST_END = 19, 200, 3
# Cycles: SUBTILE to store a warpgroup's subtile, besides its bytes and its instructions; TURN between the last product
# of one warpgroup and the first one of the other; RESUME until both multiply at full speed again after an epilogue. If
# shared memory is busy for longer than the Tensor Cores, one in CONTENTION of these cycles is lost.
SUBTILE, TURN, RESUME, CONTENTION = 100, 500, 1500, 12
# Elements that the threads of an SM store in a cycle where rows of an output do not begin at vectors, as TMA wants
# them. Fitted to 15 drawn products of up to 512 terms (H200), of which it is the most of the time.
OFF_VECTOR = 10
# Configs for one wave only take this part of the model's cycles, beside others: of 109 drawn products the choices then
# are 0.5% behind the faster config (H200), by the cycles themselves 1.1%. Fitted to half of them, so is the other half.
ONE_WAVE = 0.94
# Tiles that are stored by few columns, whose terms four or six CTAs share, take this part of the model's cycles (52
# products of more than MMA_M rows).
STORED_BY_FEW = 0.85
# Configs that take at most so much longer than the fastest one, by the model, are as fast: the one that loads least is
# taken. Of 298 drawn products 14 then get another config; of the 11 that are measured in both nine take less time, 3.4%
# in the mean of all, one 9% more (H200).
AS_FAST = 1.005
# Bytes that memory takes of outputs in a cycle at most, each SM's share: no config is faster, whatever its tiles take.
# Gradients of weights by 62 to 64 rows then have tiles of 128 columns, not 192: 14336 x 6400 takes 49.3 us instead of
# 55.5, 18944 x 9216 99 instead of 106, 10240 x 14336 83 instead of 90 (H200). These take up to LONGEST_STORED of the
# fastest config's time by the model; what takes longer was not measured, and would have tiles of 64 rows.
STORED_BYTES, LONGEST_STORED = 17, 1.12
# Cycles until the CTAs of a cluster have each other's sums, more for each CTA beyond four, bytes that they
# exchange in a cycle; cycles to start another CTA.
EXCHANGE, PEER, EXCHANGE_BYTES, START = 600, 250, 8, 2000
# Rows of an operand that do not begin at lines of L2 take it so much longer, by the bytes that divide their stride: 128
# of them then lie in two lines, and of strides of 16 bytes in five sectors. Fitted to 116 products (H200).
LINE, OFF_A_LINE = 128, {16: 1.35, 32: 1.1, 64: 1.1, 128: 1.0}


class GemmSize(NamedTuple):
    """The size of a product: m rows and n columns of sums of k terms, for each matrix of a batch.

    Attributes:
        off_a: how much longer L2 takes for a than where its rows begin at lines.
        off_b: of b.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    off_a: float = 1.0
    off_b: float = 1.0

    @classmethod
    def of(cls, problem: Problem, dims: tuple[str, str, str], strides: Sequence[int]) -> GemmSize:
        """From the names of the dims of rows, columns and terms, and both operands' strides, in 16-bit elements. TMA
        loads those off a vector from copies whose rows begin at lines. A product of nothing, which is not launched, has
        the config of one element.
        """
        m, n, k = (max(problem.size(dim), 1) for dim in dims)
        dividing = [math.gcd(stride * OPERAND_BYTES[0], LINE) for stride in strides]
        return cls(m, n, k, max(batch_of(problem), 1), *(OFF_A_LINE.get(each, 1.0) for each in dividing))

    @property
    def multiply_adds(self) -> int:
        return self.batch * self.m * self.n * self.k


class Rates(NamedTuple):
    """How fast SMs read: products of few rows, which wait for memory, have other rates than those of many.

    Attributes:
        l2: bytes that an SM gets from L2 in a cycle.
        pair: bytes that two SMs beside each other get from memory.
    """

    l2: int
    pair: int


# With the bytes of pairs the tiles of 135 drawn products of up to 181 rows take 2.5% longer than the fastest ones,
# without them 5.1%. Few rows are fitted to 457 configs of 45 products: by a fit to other products times are off by 8%
# (root mean square), by the rates of many rows by 11%, and the chosen configs take 1.5% longer than the fastest ones
# instead of 5.9% (H200).
FEW_ROWS, MANY_ROWS = Rates(70, 66), Rates(L2_BYTES, 54)


class EpilogueCost(NamedTuple):
    """The cost of a product's epilogue beside the accumulators.

    Attributes:
        outputs: bytes of an element of each output.
        tiles: bytes of an element of each operand ``(m, n)``.
        gate_up: whether an element needs two columns of the product, one of the gate's and one of the up projection's.
        blocks: columns of b that share a row of 128 bytes in shared memory, see :func:`loads_whole_rows`.
        vectors: registers of a thread for row and column vectors.
        live: float32 values of an element that are needed at once.
        mufu: instructions for each element that an SM does 16 of in a cycle.
        fma: other instructions for each element.
        group: columns of a group, which must lie in one tile.
        transposes: whether tiles may be of the output's transpose.
        parts: whether terms may be cut into parts, whose sums a second kernel adds up.
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
    transposes: bool = False
    parts: bool = False

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
    for config in _shapes(sm_count):
        if not config.clusters:
            continue
        stored = config.stored_n // (1 + cost.gate_up)
        if stored % cost.group or not loads_whole_rows(config, cost):
            continue
        if stored % config.subtile(*cost.outputs, *cost.tiles)[1]:
            narrow = {MMA_M: NARROW, 2 * MMA_M: NARROW_128}.get(config.tile_m, ())
            if (config.tile_n, config.cluster_k) not in narrow or stored % LEAST_STORED or cost.tiles:
                continue
            config = replace(config, store_bytes=LEAST_STORED * min(cost.outputs))
        if cost.registers(config) > MULTIPLY_REGISTERS:
            continue
        fitting = list(with_stages(config, arch, cost))
        if fitting:
            yield next((c for c in fitting if c.stages >= ENOUGH_STAGES), fitting[-1])


def has_half_rows(config: GemmConfig, cost: EpilogueCost) -> bool:
    """Whether b's tile has rows of half as many columns as ``cost.blocks``, which do not divide its columns."""
    return cost.blocks == SWIZZLED and not cost.gate_up and config.tile_n % SWIZZLED == SWIZZLED // 2


def loads_whole_rows(config: GemmConfig, cost: EpilogueCost) -> bool:
    """Whether a CTA loads whole rows of b's tile in shared memory."""
    row = cost.blocks // 2 if has_half_rows(config, cost) else cost.blocks
    return config.tile_n // (1 + cost.gate_up) % (row * config.cluster_m) == 0


def _shapes(sm_count: int) -> Iterator[GemmConfig]:
    """Tiles and clusters, without stages."""
    for (form, tile_m, tile_n), cluster in product(TILES, CLUSTERS):
        if (math.prod(cluster) <= 2 and (tile_m != THREE_BLOCKS or cluster[0] == 1)) or tile_m == MMA_M:
            yield GemmConfig(form, tile_m, tile_n, 1, clusters_at_once(sm_count, math.prod(cluster)), *cluster)
    for (form, tile_m, tile_n), count in product(TILES_K, CLUSTERS_K):
        if tile_n % (8 * count) == 0:
            yield GemmConfig(form, tile_m, tile_n, 1, clusters_at_once(sm_count, count), cluster_k=count)


def clusters_at_once(sm_count: int, ctas: int) -> int:
    """Clusters of so many CTAs that run at once: those of three or four leave up to two SMs of each group. So 30 of
    four ran on the H200 that was measured; on another it may be 29. A group has 16 SMs at least for larger ones. None
    where there are fewer SMs.
    """
    found = sm_count // ctas
    if ctas <= 2:
        return found
    if ctas <= 4:
        return min(found, max((sm_count - 2 * -(-sm_count // GPC_SMS)) // ctas, 1))
    return min(found, max(sm_count // (GPC_SMS - 2) * ((GPC_SMS - 2) // ctas), 1))


def with_stages(config: GemmConfig, arch: str, cost: EpilogueCost) -> Iterator[GemmConfig]:
    """A config with fewer and fewer stages of subtiles, and so more and more of the operands."""
    sub_m, sub_n = config.subtile(*cost.outputs, *cost.tiles)
    subtiles = config.tile_m * (config.stored_n // (1 + cost.gate_up)) // (sub_m * sub_n)
    for count in SUBTILE_STAGES:
        # Stages that do not divide the subtiles take a few more instructions.
        if subtiles % count == 0 or (count == SUBTILE_STAGES[-1] and subtiles % 2):
            made = replace(config, store_stages=count, tile_stages=count if cost.tiles else 0, stages=0)
            made = _with_most_stages(made, arch, cost.outputs, cost.tiles)
            if made.stages >= LEAST_STAGES and (made.cluster_k == 1 or made.fits_sums):
                yield made


def _with_most_stages(config: GemmConfig, arch: str, outputs: Sequence[int], tiles: Sequence[int] = ()) -> GemmConfig:
    """A config without stages, with as many as fit beside subtiles of outputs and operands of these sizes."""
    room = ARCHES[arch].shared_per_cta - ALIGNMENT - config.shared(outputs, tiles)
    return replace(config, stages=min(room // config.stage_bytes, MAX_STAGES))


def choose(size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int, by_rows: bool = False) -> GemmConfig | None:
    """The config that takes the fewest cycles by the model, of those as fast the one that loads least, of these the
    faster; None where the epilogue fits none.

    Args:
        by_rows: whether a's rows are contiguous: of a tile at the edge fewer can be loaded then.
    """
    possible = tuple(config for config in configs(arch, sm_count, cost) if _is_for(config, size, cost))
    if by_rows:
        possible = tuple(with_edge(config, size.m) for config in possible)
    stored = size.batch * size.m * size.n * sum(cost.outputs) // (STORED_BYTES * sm_count)

    def fastest(found: Iterable[GemmConfig]) -> GemmConfig | None:
        times = {config: _expected_cycles(config, size, cost) for config in found}
        least = min(times.values(), default=0)
        most = max(AS_FAST * least, min(stored, LONGEST_STORED * least))
        near = [config for config, time in times.items() if time <= most]
        chosen = min(near, key=lambda config: (*_loads(config, size), times[config]), default=None)
        return _without_cluster(chosen, near) if chosen and size.k <= SWIZZLED else chosen

    usual = fastest(config for config in possible if not _for_one_wave(config))
    # Of 93 drawn products these took 0.87 of the time of the others in one wave, and as long in more waves (H200).
    least = max(_busy_sms(usual, size, cost) if usual else 0, MOST_BUSY * sm_count)
    alone = fastest(c for c in possible if _fits_one_wave(c, size, cost, least, sm_count))
    if usual and alone:
        part = STORED_BY_FEW if alone.tile_m > MMA_M and stores_few(alone) else ONE_WAVE
        if cycles(alone, size, cost) * part >= cycles(usual, size, cost):
            return usual
    return alone or usual


def _expected_cycles(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> float:
    """The cycles by which configs are compared: a tile of three blocks counts as FASTER_BY_THREE times as slow, one of
    half rows as FASTER_BY_HALF.
    """
    found = slowest_cycles(config, size, cost) * (FASTER_BY_THREE if config.tile_m == THREE_BLOCKS else 1)
    return found * (FASTER_BY_HALF if has_half_rows(config, cost) else 1)


def _loads(config: GemmConfig, size: GemmSize) -> tuple[float, int]:
    """What decides between configs that are as fast: what a CTA loads, then how many CTAs wait for each other.

    With one row of tiles the CTAs of a cluster share the rows of a alone, which gains nothing while all wait for
    memory: 19 drawn products take 1.1% less time without, up to 4% less, one 4% more (H200).
    """
    if size.m <= MMA_M and size.off_a == 1:
        return config.tile_m + config.tile_n * size.off_b, config.ctas
    return loaded(config, size), 1


def _without_cluster(chosen: GemmConfig, near: Iterable[GemmConfig]) -> GemmConfig:
    """The config whose tiles share no columns, of a product whose tiles are one step of terms: with these clusters 15
    drawn gradients of weights by 8 to 64 rows took 2.7% longer, up to 7%, none more than 0.8% less (H200).
    """
    tile = chosen.form, chosen.tile_m, chosen.tile_n
    alone = (c for c in near if (c.form, c.tile_m, c.tile_n) == tile and c.ctas == 1)
    return next(alone, chosen) if chosen.cluster_n > 1 else chosen


def _is_for(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> bool:
    """Whether a config was measured not to lose in products of so many rows."""
    if has_half_rows(config, cost) and max(size.off_a, size.off_b) > 1:
        return False
    if config.tile_m == THREE_BLOCKS:
        return size.m in OF_THREE_BLOCKS and (not cost.tiles or count_tiles(config, size, cost) <= config.clusters)
    if config.tile_m == 2 * MMA_M and (config.tile_n, config.cluster_k) in SHARED_128:
        return size.m > MMA_M
    return size.m <= MMA_M or not _for_few_rows(config)


def stores_few(config: GemmConfig) -> bool:
    """Whether a tile is stored by few columns at a time, as tiles of NARROW and NARROW_128 are."""
    return config.store_bytes < STORE_BYTES and not config.transposed


def _for_few_rows(config: GemmConfig) -> bool:
    """Whether a config was measured with one row of tiles of MMA_M rows alone."""
    return config.tile_m == MMA_M and stores_few(config) and config.tile_n > MMA_M


def _for_one_wave(config: GemmConfig) -> bool:
    """Whether a config is taken only where all of its clusters run at once."""
    return stores_few(config) or config.cluster_m * config.cluster_n > 2


def count_tiles(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> int:
    """The tiles of a product, or clusters' groups of them."""
    (rows, columns), (cluster_m, cluster_n) = config.tile, config.cluster
    rows, columns = rows * cluster_m, columns // (1 + cost.gate_up) * cluster_n
    return size.batch * -(-size.m // rows) * -(-size.n // columns)


def _fits_one_wave(config: GemmConfig, size: GemmSize, cost: EpilogueCost, least: float, sm_count: int) -> bool:
    """Whether a config for one wave computes a product in one. Of few rows, tiles that are stored by few columns gain
    by keeping most SMs busy, those whose terms CTAs share where they keep few busy.
    """
    if not _for_one_wave(config) or count_tiles(config, size, cost) > config.clusters:
        return False
    busy = _busy_sms(config, size, cost)
    if not _for_few_rows(config):
        return True
    return busy > least if config.cluster_k == 1 else 2 * busy <= sm_count


def _busy_sms(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> float:
    """The CTAs that run at once, in the mean of all waves."""
    tiles = count_tiles(config, size, cost)
    return tiles / -(-tiles // config.clusters) * config.ctas


def with_edge(config: GemmConfig, m: int) -> GemmConfig:
    """The config with as many rows of a as are loaded of the last tile of m rows, if these are fewer than a tile's."""
    left, three = m % config.tile_m, config.tile_m == THREE_BLOCKS
    edges = (*EDGES, *MORE_EDGES) if three else EDGES
    rows = next((rows for rows in edges if 0 < left <= rows < config.tile_m), 0)
    return replace(config, edge_m=rows) if rows and (three or config.cluster_n == 1) else config


def without_tma(vec_a: int, vec_b: int) -> GemmConfig:
    """The config for operands that TMA cannot load: threads load vectors of so many elements."""
    return GemmConfig("mma_sync", 128, 128, 2, 0, tile_k=32, vec_a=vec_a, vec_b=vec_b)


def in_place(m: int) -> GemmConfig | None:
    """The config for few rows of operands that begin off vectors, which are read where they lie; None for more."""
    tile = next((rows for rows in IN_PLACE_ROWS if m <= rows), None)
    return GemmConfig("in_place", tile, 128, 2, 0, tile_k=256) if tile else None


def cycles(config: GemmConfig, size: GemmSize, cost: EpilogueCost = PLAIN) -> int:
    """About how long a product takes: its tiles and memory each wait for the other at times."""
    return int(math.hypot(sm_cycles(config, size, cost), memory_cycles(size, cost, config.clusters * config.ctas)))


def slowest_cycles(config: GemmConfig, size: GemmSize, cost: EpilogueCost = PLAIN) -> int:
    """How long those SMs take that have the most to do. Two beside each other share a path to memory: 24 x 11008 x 1024
    took 11.0 us by 69 CTAs with tiles of 160 columns, and 9.2 by 63 with 176.
    """
    tiles = count_tiles(config, size, cost)
    at_once = min(tiles, config.clusters) * config.ctas
    waves = -(-tiles // config.clusters)
    tiles_m = -(-size.m // config.tile_m)
    tiles_n = -(-size.n * (1 + cost.gate_up) // config.tile_n)
    # What several CTAs read comes from L2 for all but one of them.
    rows = config.tile_m / tiles_n + config.tile_n / tiles_m
    terms = size.k / config.cluster_k * waves * (2 if 2 * at_once > config.clusters * config.ctas else 1)
    return max(sm_cycles(config, size, cost), int(rows * terms * OPERAND_BYTES[0] / rates_of(size).pair))


def cycles_of_few_rows(config: GemmConfig, size: GemmSize, cost: EpilogueCost = PLAIN) -> int:
    """:func:`cycles` of a product that memory bounds: not all SMs wait for it equally long, and longer for rows that
    begin off lines.
    """
    sm_count = config.clusters * config.ctas
    found = math.hypot(slowest_cycles(config, size, cost), memory_cycles(size, cost, sm_count))
    return int(found * math.sqrt(size.off_b))


def memory_cycles(size: GemmSize, cost: EpilogueCost, sm_count: int) -> int:
    """How long memory takes to give both operands and the epilogue's tiles, and to take the outputs. Of these half
    counts: nothing waits for what is written.
    """
    operands = (size.m + size.n * (1 + cost.gate_up)) * size.k * OPERAND_BYTES[0]
    moved = size.batch * (operands + size.m * size.n * (sum(cost.outputs) // 2 + sum(cost.tiles)))
    return moved // (MEMORY_BYTES * sm_count)


def sm_cycles(config: GemmConfig, size: GemmSize, cost: EpilogueCost = PLAIN) -> int:
    """Waves of tiles, each as long as the slower of multiplying and loading from L2.

    An instruction reads its 64 rows and all of the tile's columns from shared memory. Two warpgroups that share a tile
    do not multiply while they compute its epilogue. Of two with a tile each, one computes its epilogue while the other
    multiplies, except for the last tile.
    """
    rows, columns, width = config.tile_m, config.tile_n, config.tile[1] // (1 + cost.gate_up)
    rates, tiles = rates_of(size), count_tiles(config, size, cost)
    waves, at_once = -(-tiles // config.clusters), min(tiles, config.clusters)
    steps, row_bytes = -(-size.k // (config.tile_k * config.cluster_k)), config.tile_k * OPERAND_BYTES[0]
    multiply = rows * columns * config.tile_k // MMA
    shared = (rows + columns + rows // MMA_M * (MMA_M + columns)) * row_bytes // SHARED_BYTES
    multiply += max(shared - multiply, 0) // CONTENTION
    step_bytes = (loaded(config, size) + PAST_END * rows_past_end(config, size, width)) * row_bytes
    inside = steps * max(multiply, LEAST_STEP, int(step_bytes * at_once) // (config.clusters * rates.l2))
    after = epilogue_cycles(config, size, cost)
    if config.cluster_k > 1:
        exchange = EXCHANGE + rows * columns * 4 // EXCHANGE_BYTES + PEER * max(config.cluster_k - 4, 0)
        return waves * (inside + after + exchange) + (waves - 1) * START
    if config.form == "pingpong":
        return waves * (max(inside, after) + TURN) + after
    return waves * (inside + after + RESUME)


def rates_of(size: GemmSize) -> Rates:
    return FEW_ROWS if size.m <= MMA_M else MANY_ROWS


def epilogue_cycles(config: GemmConfig, size: GemmSize, cost: EpilogueCost) -> int:
    """The cycles of a tile's epilogue."""
    elements, (sub_m, sub_n) = (
        config.tile_m * (config.stored_n // (1 + cost.gate_up)),
        config.subtile(*cost.outputs, *cost.tiles),
    )
    moved = elements * 2 * (sum(cost.outputs) + sum(cost.tiles)) // SHARED_BYTES
    moved += elements * sum(size.n * itemsize % VECTOR_BYTES > 0 for itemsize in cost.outputs) // OFF_VECTOR
    return moved + elements * cost.mufu // MUFU + elements * cost.fma // FMA + SUBTILE * elements // (sub_m * sub_n)


def rows_past_end(config: GemmConfig, size: GemmSize, width: int) -> int:
    """Rows past the end of both operands that a CTA loads beside others, in the mean."""
    (tile_m, tile_n), (cluster_m, cluster_n) = config.tile, config.cluster
    tiles_m = -(-size.m // (tile_m * cluster_m)) * cluster_m
    tiles_n = -(-size.n // (width * cluster_n)) * cluster_n
    past_m, past_n = tiles_m * tile_m - size.m, tiles_n * width - size.n
    if config.edge_m:
        past_m -= tile_m - config.edge_m
    return past_m // tiles_m + past_n * (tile_n // width) // tiles_n


def loaded(config: GemmConfig, size: GemmSize) -> float:
    """Rows of both operands that a CTA loads; what the CTAs of a cluster share counts for each by its share, and rows
    off a line by the time that L2 takes for them.
    """
    (tile_m, tile_n), (cluster_m, cluster_n) = config.tile, config.cluster
    return tile_m // cluster_n * size.off_a + tile_n // cluster_m * size.off_b


def busy(config: GemmConfig, size: GemmSize, sm_count: int) -> float:
    """The fraction of a product's time in which the Tensor Cores multiply."""
    return size.multiply_adds / (MMA * sm_count * cycles(config, size))


# --- search space

# Measured are configs that take at most so much longer than the fastest, by the model of cycles; and of the
# heuristic's own, other numbers of tiles that are walked together.
NEAR, RASTERS = 1.25, (4, 16)
# Sizes up to which a winner holds: of rows powers of two, of columns and terms steps of 256, of long ones 1024.
ROWS = tuple(2**i for i in range(6, 17))
COLUMNS = (*range(256, 8192, 256), *range(8192, 65537, 1024))
BUCKETS: dict[str, tuple[int, ...]] = {"m": ROWS, "n": COLUMNS, "k": COLUMNS}
BATCH: dict[str, tuple[int, ...]] = {"b": POWERS}
# Rows of x that a CTA has at once where operands are read in place.
IN_PLACE_ROWS = (8, 16, 32)
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
        if heuristic.form in ("mma_sync", "in_place"):
            return
        found = others(heuristic, size, epilogue_cost(problem), *target)
        names = ("expression", "reads", "writes", "half_align")
        edge = heuristic.edge_m
        for config in found:
            rows = edge if config.cluster_n == 1 and edge < config.tile_m else 0
            yield replace(config, edge_m=rows, **{name: getattr(heuristic, name) for name in names})

    def needs(problem: Problem, flat: Config) -> Needs:
        config, wanted = GemmConfig.of(flat), epilogue_cost(problem)
        return Needs(config.threads, START_REGISTERS, config.shared(wanted.outputs, wanted.tiles) + ALIGNMENT)

    return Space(configs, needs, {**BUCKETS, **(BATCH if batched else {})})


def others(heuristic: GemmConfig, size: GemmSize, cost: EpilogueCost, arch: str, sm_count: int) -> Iterator[GemmConfig]:
    """Other tiles, forms and clusters, and of the heuristic's config other stages and another walk over tiles. None
    beside parts of the terms, whose kernels have a workspace.
    """
    if heuristic.parts > 1:
        return
    possible = (c for c in configs(arch, sm_count, cost) if _is_for(c, size, cost))
    times = {c: slowest_cycles(c, size, cost) for c in possible}
    least = min((time for config, time in times.items() if not _for_one_wave(config)), default=math.inf)
    yield from (c for c, time in times.items() if time <= least * (1 if _for_one_wave(c) else NEAR))
    yield from with_stages(heuristic, arch, cost)
    yield from (replace(heuristic, group=group) for group in RASTERS)
