"""How the kernels of group norm are configured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import ARCHES, VECTOR_BYTES, WARP
from cute_ops.kernels.norm.group_config import GroupConfig
from cute_ops.ops.rows import RESERVED_BYTES, next_power, ring_bytes

# Bytes of shared memory that a CTA takes at most where a cluster can share more: then two fit an SM, of which one loads
# while the other computes.
CTA_BYTES = 100_000
# Threads of a CTA, of which each has about so many vectors of each input; threads of an SM.
MOST_THREADS, VECTORS, SM_THREADS = 512, 6, 1024
# With channels last threads keep numbers of each of their channels: they are fewer, and their sums take shared memory.
LAST_BYTES, LAST_THREADS, LAST_VECTORS, LAST_SM_THREADS = 92_000, 384, 8, 768
# What CTAs of a cluster lose beside each other: SMs of a group (GPC) that no cluster fits into, and their meeting.
CLUSTER_COST = {1: 1.0, 2: 1.01, 4: 1.03, 8: 1.06, 16: 1.1}
SECTOR_BYTES = 32
# Elements of a CTA that reads twice, where a cluster can share more.
PASSES = 1 << 14


def rows_bwd(problem: Problem) -> GroupConfig:
    """A group in the shared memory of as few CTAs as let two of these fit an SM."""
    dims, itemsize = problem.dims, ITEMSIZE[problem.dtypes["x"]]
    positions, unit, largest = dims["n"], VECTOR_BYTES // itemsize, ARCHES[problem.arch].cluster
    n = dims["d"] * positions
    cluster = 1
    while cluster < largest and 2 * n * itemsize > cluster * CTA_BYTES:
        cluster *= 2
    room, span = ring_bytes(problem), -(-n // (cluster * unit)) * unit
    slot = 2 * span * itemsize
    aligned = min(problem.aligns[name] for name in ("x", "dy") if name in problem.aligns)
    if aligned < VECTOR_BYTES or slot > room - RESERVED_BYTES - 16 * dims["d"]:
        cluster = 1
        while cluster < min(largest, 8) and n > cluster * PASSES:
            cluster *= 2
        span, slot = -(-n // (cluster * unit)) * unit, 0
    vec = next(v for v in (8, 4, 2, 1) if v <= min(unit, aligned // itemsize) and positions % v == 0)
    threads = min(max(next_power(-(-span // (vec * VECTORS))), WARP), MOST_THREADS)
    resident = max(min(SM_THREADS // threads, room // slot if slot else SM_THREADS, ARCHES[problem.arch].ctas), 1)
    team = _team(threads, min(-(-span // positions), dims["d"]), -(-min(positions, span) // vec))
    return GroupConfig("smem" if slot else "passes", threads, cluster, resident, team)


def rows_workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """The sums of each CTA's channels, a row for each example and CTA of a cluster."""
    dims, cluster = problem.dims, GroupConfig.of(flat).cluster
    return _partials(problem, (problem.m * cluster, dims["h"] * dims["d"]))


def on_chip(shape: tuple[int, int], groups: int, itemsize: int, inputs: int) -> bool:
    """Whether a cluster of the largest size keeps some groups of an example, ``(positions, channels)``, of so many
    inputs.
    """
    positions, channels = shape
    each = itemsize * inputs * positions
    return any(width * each <= LAST_BYTES * max(CLUSTER_COST) for width in _widths(channels, groups, itemsize))


def examples(problem: Problem) -> GroupConfig:
    """As many channels as let clusters read whole sectors and two CTAs fit an SM, and as few CTAs as then do."""
    dims, itemsize = problem.dims, ITEMSIZE[problem.dtypes["x"]]
    positions, channels, groups = dims["m"], dims["n"], problem.attrs.get("groups") or dims["g"]
    inputs = [name for name in ("x", "dy") if name in problem.aligns]
    aligned = min(problem.aligns[name] for name in inputs)
    room, each = ring_bytes(problem), itemsize * len(inputs)
    most = min(ARCHES[problem.arch].cluster, next_power(positions))
    found = []
    for width in _widths(channels, groups, itemsize) if aligned >= VECTOR_BYTES else ():
        cluster = next((c for c in CLUSTER_COST if c <= most and -(-positions // c) * width * each <= LAST_BYTES), 0)
        if cluster and cluster <= most:
            found.append((_waste(width * itemsize) * CLUSTER_COST[cluster], width, cluster))
    if found:
        _, width, cluster = min(found)
    else:
        width = next(_widths(channels, groups, itemsize), channels)
        cluster = next((c for c in (1, 2, 4) if c >= most or positions * width <= c * PASSES), min(most, 8))
    vec = math.gcd(width, channels, min(aligned, VECTOR_BYTES) // itemsize)
    across, span = width // vec, -(-positions // cluster)
    wanted = -(-span * across // (LAST_VECTORS * WARP)) * WARP
    threads = _threads(across, min(max(wanted, WARP), LAST_THREADS))
    slot = -(-span // (threads // across)) * threads * vec * each if found else 0
    taken = slot + 4 * threads * vec + 16 * max(threads, width)
    resident = max(min(LAST_SM_THREADS // threads, room // taken, ARCHES[problem.arch].ctas), 1)
    return GroupConfig("smem" if found else "passes", threads, cluster, resident, width=width)


def examples_workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """The sums of each CTA's channels, a row for each example and CTA of a cluster."""
    return _partials(problem, (problem.size("b") * GroupConfig.of(flat).cluster, problem.dims["n"]))


def _widths(channels: int, groups: int, itemsize: int) -> Iterator[int]:
    """Channels of whole groups that are whole vectors."""
    each = channels // groups
    for count in range(1, groups + 1):
        if each * count * itemsize % VECTOR_BYTES == 0 and each * count // (VECTOR_BYTES // itemsize) <= LAST_THREADS:
            yield each * count


def _waste(size: int) -> float:
    """Sectors that a cluster reads for each one of its channels, in each of which it has so many bytes."""
    return 1 + (SECTOR_BYTES - math.gcd(size, SECTOR_BYTES)) / size


def _threads(across: int, most: int) -> int:
    """Whole warps, about ``most`` threads, of which as many as possible have one of ``across`` vectors."""
    least = -(-across // WARP) * WARP
    counts = range(max(least, most // 2 // WARP * WARP), max(most, least) + 1, WARP)
    return max(counts, key=lambda threads: (threads // across * across / threads * min(threads, most), threads))


def _partials(problem: Problem, shape: tuple[int, int]) -> dict[str, Array | None]:
    wanted = {name: name in problem.dtypes for name in ("dweight", "dbias")}
    return {f"{name}_partials": Array(shape, "float32") if here else None for name, here in wanted.items()}


def _team(threads: int, channels: int, vectors: int) -> int:
    """The threads of a channel with which all channels take the fewest steps."""
    teams = [1 << i for i in range(threads.bit_length()) if 1 << i <= next_power(vectors)]
    return min(teams, key=lambda team: (-(-channels * team // threads) * -(-vectors // team), -team))
