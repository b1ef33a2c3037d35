"""How the kernels of group norm are configured."""

from __future__ import annotations

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


def _partials(problem: Problem, shape: tuple[int, int]) -> dict[str, Array | None]:
    wanted = {name: name in problem.dtypes for name in ("dweight", "dbias")}
    return {f"{name}_partials": Array(shape, "float32") if here else None for name, here in wanted.items()}


def _team(threads: int, channels: int, vectors: int) -> int:
    """The threads of a channel with which all channels take the fewest steps."""
    teams = [1 << i for i in range(threads.bit_length()) if 1 << i <= next_power(vectors)]
    return min(teams, key=lambda team: (-(-channels * team // threads) * -(-vectors // team), -team))
