"""How the kernels of group norm are configured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from cute_ops.declaration.config import Problem
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import ARCHES, MAX_THREADS, VECTOR_BYTES, WARP
from cute_ops.kernels.norm.group_config import GroupConfig, groups_of
from cute_ops.ops.rows import RESERVED_BYTES, next_power, ring_bytes

# Bytes of shared memory that a CTA takes at most where a cluster can share more: then two fit an SM, of which one loads
# while the other computes.
CTA_BYTES = 100_000
# Clusters of up to so many CTAs rather have this much of one: more of them take turns.
SMALL_CLUSTER, SMALL_CTA_BYTES = 4, 50_000
# Steps that a team takes for a channel beside those for its vectors, to add up over its threads.
TEAM_STEPS = 2
# Threads of a CTA, of which each has about so many vectors of each input; threads of an SM.
MOST_THREADS, VECTORS, SM_THREADS = 512, 6, 1024
# Threads of an SM where a CTA has a team of whole warps for each channel.
TEAM_SM_THREADS = 1152
# With channels last threads keep numbers of each of their channels: they are fewer, and their sums take shared memory.
LAST_BYTES, LAST_THREADS, LAST_VECTORS, LAST_SM_THREADS = 92_000, 384, 8, 768
# What CTAs of a cluster lose beside each other: SMs of a group (GPC) that no cluster fits into, and their meeting.
CLUSTER_COST = {1: 1.0, 2: 1.01, 4: 1.03, 8: 1.06, 16: 1.1}
SECTOR_BYTES = 32
# Where a forward's pieces of a position are shorter than a line, or its CTAs have less than SMALL_LAST_BYTES, each
# piece counts PIECE_BYTES more: 592 x 1024 x 256 takes 0.86 of a copy's rate by pieces of 256 bytes, 0.70 by those of
# 32, and 4141 x 64 x 320 by whole positions 0.89 in place of 0.77. Threads of a CTA, and of an SM, where pieces are
# whole lines, and one line each: 66 x 4096 x 256 takes 0.86 by three CTAs, by two of twice as many threads 0.81;
# 516 x 1024 x 128 0.87, by pieces of two lines 0.72.
# Of pieces that are no whole lines those of MOST_PIECE and more count alike: 143 x 1600 x 192 runs at 0.73 by two CTAs
# and 96 bytes, by four CTAs and 192 bytes at 0.70; 400 x 576 x 192 at 0.83 by one CTA, by two at 0.77.
LINE_BYTES, SMALL_LAST_BYTES, PIECE_BYTES, MOST_PIECE = 128, 16_000, 4, 96
LINE_THREADS, LINE_SM_THREADS = 512, 1024
ONE_LINE_THREADS, ONE_LINE_SM_THREADS = 256, 768
# Bytes of a CTA of a forward whose pieces are no whole lines: 60 x 4096 x 192 runs at 0.77 by four CTAs, by eight at
# 0.70.
WIDE_LAST_BYTES = 100_000
# Factor of the gradient's cost for pieces shorter than two sectors: 516 x 1024 x 128 runs at 0.81 of a copy's rate by
# 64 bytes and two CTAs, at 0.71 by 32 bytes and one; 66 x 4096 x 256 at 0.70 by eight CTAs, by four at 0.61.
SHORT_PIECE = 1.2
# Threads, and the most vectors of one, of pairs of CTAs that hold a part in registers while the next one arrives, alone
# on their SMs: in place of clusters of four and more, of which not all may run at once, if pieces are no whole lines.
# 61 x 2304 x 192 runs at 0.75, in shared memory of four CTAs at 0.68; 70 x 1600 x 320 at 0.75, at 0.72. Without need
# 143 x 1600 x 192 runs at 0.80, in shared memory of two at 0.81.
HELD_THREADS, HELD_VECTORS, HELD_CLUSTER = 384, 22, 2
# Elements of a CTA that reads twice, where a cluster can share more, and CTAs of the largest of these.
PASSES, MOST_PASSES = 1 << 14, 8


def rows_bwd(problem: Problem) -> GroupConfig:
    """A group in the shared memory of as few CTAs as let two of these fit an SM."""
    dims, itemsize = problem.dims, ITEMSIZE[problem.dtypes["x"]]
    positions, unit, largest = dims["n"], VECTOR_BYTES // itemsize, ARCHES[problem.arch].cluster
    n, room = dims["d"] * positions, ring_bytes(problem)
    for keep in _kept(problem):
        each = _bytes_held(itemsize, 2, keep)
        cluster = _cluster_of_rows(n * each, largest)
        span = -(-n // (cluster * unit)) * unit
        slot = span * each
        if slot <= room - RESERVED_BYTES - 16 * dims["d"]:
            break
    else:
        slot = 0
    aligned = min(problem.aligns[name] for name in ("x", "dy") if name in problem.aligns)
    # A row that is aligned may end within a vector.
    if aligned < VECTOR_BYTES or positions % unit or not slot:
        cluster = min(_cluster_of_passes(n), largest)
        span, slot = -(-n // (cluster * unit)) * unit, 0
    vec = next(v for v in (8, 4, 2, 1) if v <= min(unit, aligned // itemsize) and positions % v == 0)
    threads = min(max(next_power(-(-span // (vec * VECTORS))), WARP), MOST_THREADS)
    resident = max(min(SM_THREADS // threads, room // slot if slot else SM_THREADS, ARCHES[problem.arch].ctas), 1)
    channels, vectors = min(-(-span // positions), dims["d"]), -(-min(positions, span) // vec)
    team = _team(threads, channels, vectors)
    if slot and team > WARP:  # few channels, each of which one team takes
        resident = min(room // slot, ARCHES[problem.arch].ctas)
        threads, team = _even_teams(min(TEAM_SM_THREADS // resident, MOST_THREADS), channels, vectors)
    return GroupConfig("smem" if slot else "passes", threads, cluster, resident, team, keep=keep and slot > 0)


def _even_teams(most: int, channels: int, vectors: int) -> tuple[int, int]:
    """(threads of a CTA, those of a channel): whole warps, up to ``most`` threads, that take the fewest steps."""
    options = [(count * team, team) for team in range(WARP, most + 1, WARP) for count in range(1, most // team + 1)]

    def steps(option: tuple[int, int]) -> tuple[int, int]:
        threads, team = option
        return -(-channels // (threads // team)) * (-(-vectors // team) + TEAM_STEPS), threads

    return min(options, key=steps)


def _kept(problem: Problem) -> tuple[bool, ...]:
    """Whether gradients to what the activation is of may be kept, preferred first."""
    return (True, False) if problem.attrs["silu"] and "dy" in problem.dtypes else (False,)


def _bytes_held(itemsize: int, inputs: int, keep: bool) -> int:
    """Bytes of shared memory for each element of so many inputs; ``keep``: of the last in fp32."""
    return itemsize * (inputs - keep) + 4 * keep


def _cluster_of_rows(size: int, largest: int) -> int:
    """CTAs that share a group of so many bytes."""
    cluster = 1
    while cluster < largest:
        if size <= cluster * (SMALL_CTA_BYTES if cluster < SMALL_CLUSTER else CTA_BYTES):
            break
        cluster *= 2
    return cluster


def _cluster_of_passes(elements: int) -> int:
    """CTAs that share so many elements, which they read twice."""
    return min(next_power(-(-elements // PASSES)), MOST_PASSES)


def on_chip(shape: tuple[int, int], groups: int, itemsize: int, inputs: int) -> bool:
    """Whether a cluster of the largest size keeps some groups of an example, ``(positions, channels)``, of so many
    inputs.
    """
    positions, channels = shape
    each = itemsize * inputs * positions
    return any(width * each <= LAST_BYTES * max(CLUSTER_COST) for width in _widths(channels, groups, itemsize))


def examples(problem: Problem) -> GroupConfig:
    """The most channels with which clusters read whole sectors and two CTAs fit an SM, in the fewest CTAs."""
    dims, itemsize = problem.dims, ITEMSIZE[problem.dtypes["x"]]
    positions, channels, groups = dims["m"], dims["n"], groups_of(problem.attrs, dims)
    inputs = [name for name in ("x", "dy") if name in problem.aligns]
    aligned = min(problem.aligns[name] for name in inputs)
    limits, room, unit = ARCHES[problem.arch], ring_bytes(problem), VECTOR_BYTES // itemsize

    def made(
        width: int, cluster: int, vec: int, form: Literal["smem", "passes"], each: int = 0
    ) -> tuple[GroupConfig, int]:  # fmt: skip
        """A config, and the bytes of shared memory that it takes; ``each``: those of an element."""
        across, span = width // vec, -(-positions // cluster)
        wanted = -(-span * across // (LAST_VECTORS * WARP)) * WARP
        lines = form == "smem" and len(inputs) == 1 and width * itemsize % LINE_BYTES == 0
        most, of_sm = (LINE_THREADS, LINE_SM_THREADS) if lines else (LAST_THREADS, LAST_SM_THREADS)
        if lines and width * itemsize == LINE_BYTES:
            most, of_sm = ONE_LINE_THREADS, ONE_LINE_SM_THREADS
        threads = _threads(across, min(max(wanted, WARP), most))
        slot = -(-span // (threads // across)) * threads * vec * each
        if len(inputs) == 1:
            # Means and squares of what groups share of a vector, of threads, helpers, CTAs and groups.
            part, blocks = math.gcd(vec, channels // groups), -(-width * groups // channels)
            taken = slot + 8 * threads * (vec // part) + 12 * max(threads, width) + 8 * blocks * (cluster + 1)
        else:
            taken = slot + 4 * threads * vec + 16 * max(threads, width) + 4 * width * ("weight" in problem.dtypes)
        resident = max(min(of_sm // threads, room // taken, limits.ctas), 1)
        return GroupConfig(form, threads, cluster, resident, width=width, vec=vec), taken

    if aligned >= VECTOR_BYTES and channels % unit == 0:
        widths = list(_widths(channels, groups, itemsize))
        for keep in _kept(problem):
            each = _bytes_held(itemsize, len(inputs), keep)
            for width, cluster in _spread((positions, channels), widths, (itemsize, each), limits.cluster):
                found, taken = made(width, cluster, unit, "smem", each)
                if taken + RESERVED_BYTES + 8 * width <= limits.shared_per_cta:
                    return (len(inputs) == 1 and _held(problem, found)) or replace(found, keep=keep)
    width, vec = _of_passes(channels, groups, min(aligned, VECTOR_BYTES) // itemsize, unit)
    cluster = min(_cluster_of_passes(positions * width), next_power(positions), limits.cluster)
    return made(width, cluster, vec, "passes")[0]


def _held(problem: Problem, found: GroupConfig) -> GroupConfig | None:
    """The pairs of CTAs that hold parts in registers, in place of larger clusters; None where they are not faster."""
    size, across = found.width * ITEMSIZE[problem.dtypes["x"]], found.width // found.vec
    if found.cluster <= HELD_CLUSTER or size % LINE_BYTES == 0 or across > HELD_THREADS:
        return None
    span = -(-problem.dims["m"] // HELD_CLUSTER)
    per_thread = -(-span // (HELD_THREADS // across))
    # A vector of a thread, and the most that it takes of shared memory beside its vectors.
    taken = HELD_THREADS * (per_thread * VECTOR_BYTES + 8 * found.vec + 12)
    if per_thread > HELD_VECTORS or taken > ring_bytes(problem):
        return None
    if HELD_THREADS * per_thread * VECTOR_BYTES + _sums_held(problem, found) > ARCHES[problem.arch].shared_per_cta:
        return None
    clusters = max(problem.sm_count // HELD_CLUSTER, 1)
    return replace(found, form="held", threads=HELD_THREADS, cluster=HELD_CLUSTER, resident=1, clusters=clusters)


def _sums_held(problem: Problem, found: GroupConfig) -> int:
    """Bytes of shared memory for sums of such a pair: more than its threads suggest where groups have few channels."""
    each = int(problem.dims["n"] // groups_of(problem.attrs, problem.dims))
    numbers, blocks = found.width // math.gcd(found.vec, each), found.width // each
    depth = HELD_THREADS // (found.width // found.vec)
    helpers = max(min(HELD_THREADS // numbers, depth, WARP), 1)
    # Means and squares of threads, helpers and their counts, what CTAs exchange twice, and groups; alignment.
    return 4 * numbers * (2 * depth + 3 * helpers) + 8 * blocks * (2 * HELD_CLUSTER + 1) + 8 * VECTOR_BYTES


def _of_passes(channels: int, groups: int, aligned: int, unit: int) -> tuple[int, int]:
    """Channels of a cluster, and those of a thread: what one access reads, unless that are too many threads for a
    group. ``aligned``, ``unit``: elements of an access, of whole vectors.
    """
    group = channels // groups
    for width, vec in ((math.lcm(group, unit), aligned), (group, aligned), (group, unit)):
        vec = math.gcd(width, channels, vec)
        if width <= channels and width // vec <= MAX_THREADS:
            break
    return width, vec


def _spread(
    shape: tuple[int, int], widths: Iterable[int], sizes: tuple[int, int], largest: int
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """(channels, CTAs) of clusters that hold what they read, the best ones first. ``shape``: positions and channels;
    ``sizes``: bytes of an element, and of those of all inputs.
    """
    (positions, channels), (itemsize, each), found = shape, sizes, []
    most, forward = min(largest, next_power(positions)), each == itemsize
    for width in widths:
        size = width * itemsize
        held = WIDE_LAST_BYTES if forward and size % LINE_BYTES else LAST_BYTES
        worse = SHORT_PIECE if size < 2 * SECTOR_BYTES and not forward else 1.0
        for c, cost in CLUSTER_COST.items():
            if c <= most and -(-positions // c) * width * each <= held:
                found.append((_waste(size) * cost * worse, width, c))
    found.sort()
    if forward and found:
        _, width, c = found[0]
        if width * itemsize < LINE_BYTES or -(-positions // c) * width * each < SMALL_LAST_BYTES:
            pieces = {width: PIECE_BYTES / _piece(width, channels, itemsize) for _, width, _ in found}
            found.sort(key=lambda one: (channels % one[1] > 0, one[0] + pieces[one[1]], -one[1]))
    return (one[1:] for one in found)


def _piece(width: int, channels: int, itemsize: int) -> int:
    """The bytes by which a piece of a position counts: longer ones gain nothing."""
    size = width * itemsize
    return min(size, 2 * LINE_BYTES if size % LINE_BYTES == 0 or width == channels else MOST_PIECE)


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


def _team(threads: int, channels: int, vectors: int) -> int:
    """The threads of a channel with which all channels take the fewest steps."""
    most = next_power(vectors)
    teams = [1 << i for i in range(threads.bit_length()) if min(WARP, most) <= 1 << i <= most]
    return min(teams, key=lambda team: (-(-channels * team // threads) * (-(-vectors // team) + TEAM_STEPS), -team))
