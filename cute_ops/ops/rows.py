"""How the vectors of a row spread over threads, CTAs and clusters: what the heuristics of all families share.

Lengths are in 16-byte vectors unless a name says otherwise. A *span* is what one CTA holds of a row. Rows are unaligned
if they do not all start on a vector.
Forward configs do not depend on the number of rows, so that a row's bits do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from cute_ops.declaration.config import Needs, Problem
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import ARCHES, VECTOR_BYTES, WARP
from cute_ops.kernels.lib.row_config import RowConfig

# The names that row tensors have in the declarations.
TENSORS = (
    "x", "residual", "out", "residual_out", "dout", "dresidual_out", "dx", "dresidual", "logits", "dlogits",
)  # fmt: skip
# Unaligned rows are read from the start of a cache line, of LINE_VECTORS, if they have at least LONG_ROW elements. In
# shorter ones too many threads would have nothing to do.
LINE_VECTORS, LONG_ROW = 8, 1024
# Elements of the widest vector. Rows of any length start at the same offset in a line again after at most
# WIDEST_VECTOR * LINE_VECTORS rows.
WIDEST_VECTOR = 8
# Bytes of an SM's shared memory that rows may fill: (its shared memory at most, bytes for rows).
RING_BYTES = ((102_400, 96_000), (167_936, 160_000), (math.inf, 220_000))
# Bytes of shared memory that a CTA needs beside its rows: for sums, and what the system reserves.
RESERVED_BYTES = 2048
# Vectors that one CTA holds in registers.
CTA_VECTORS = 1024
# Unaligned rows up to this length are read element by element, about eight to a thread.
SHORTEST_ROW = 8
# Threads of longer ones, of up to some 40 vectors; of one tensor up to FEW_UNEVEN_VECTORS.
UNEVEN_THREADS, FEW_UNEVEN_THREADS, FEW_UNEVEN_VECTORS = 8, 4, 24
# Aligned rows of one CTA have two vectors per thread up to this length; longer ones four, if elements are narrow.
TWO_VECTORS_ROW = 512
# Threads of a CTA in two passes: for rows of unknown length, and for rows too long for every other form.
TWO_PASS_THREADS, TWO_PASS_LONG_THREADS = 512, 1024
# Rows in shared memory: vectors per thread, threads per CTA, and vectors per CTA: 4096, wherever in a line they start.
SMEM_PER_THREAD, SMEM_THREADS = 8, 512 + WARP
SMEM_VECTORS = 4096 + LINE_VECTORS
# What rows in shared memory may take of an SM: bytes that load at a time, and threads. With more, CTAs slow each other
# down. With SMEM_SM_THREADS_FULL there is no bound on bytes: for rows that take longer to compute than to load.
SMEM_BYTES_IN_FLIGHT, SMEM_SM_THREADS, SMEM_SM_THREADS_FULL = 165_000, 1536, 1664
# By cluster size: how many clusters fewer than SMs / size run at once. None can span two groups of SMs (GPCs).
CLUSTERS_LOST = {1: 0, 2: 2, 4: 3, 8: 2, 16: 1}
# Registers that a thread needs at least beside the vectors that it holds; bytes of a register.
LEAST_REGISTERS, REGISTER_BYTES = 16, 4
# Vectors per thread that the search space tries, for rows within a warp and for longer ones.
FEW_VECTORS, MORE_VECTORS = (1, 2, 4), (1, 2, 3, 4, 6, 8)

T = TypeVar("T")
C = TypeVar("C", bound=RowConfig)
Ladder = Sequence[tuple[float, T]]


def step(ladder: Ladder[T], value: float) -> T:
    """The value of the first step ``(upper bound, found)`` of a ladder whose bound is not below ``value``."""
    return next(found for bound, found in ladder if value <= bound)


class RowProblem(NamedTuple):
    """A row of a problem: what holds for all its row tensors, and what its GPU offers.

    Attributes:
        n: elements.
        itemsize: bytes of an element in the widest dtype.
        aligned: whether rows start on a vector in every tensor.
        max_cluster: CTAs of the largest cluster.
        ring_bytes: bytes of an SM's shared memory that rows may fill.
    """

    n: int
    itemsize: int
    aligned: bool
    max_cluster: int
    ring_bytes: int

    @property
    def vectors(self) -> int:
        """16-byte vectors in the widest dtype."""
        return -(-self.n * self.itemsize // VECTOR_BYTES)

    @property
    def vector_elements(self) -> int:
        return VECTOR_BYTES // self.itemsize

    @property
    def align_vectors(self) -> int:
        """The start of an unaligned row is rounded down to a multiple of so many vectors."""
        return LINE_VECTORS if self.n >= LONG_ROW else 1

    @property
    def touched(self) -> int:
        """Vectors that are read of a row: more of an unaligned one."""
        return self.vectors + (0 if self.aligned else self.align_vectors)

    @property
    def touched_at_most(self) -> int:
        """Vectors that are read of a row from the start of a line, whatever its length: the search space counts so."""
        return self.vectors + (0 if self.aligned else LINE_VECTORS)


def row_of(problem: Problem, names: Iterable[str] = TENSORS) -> RowProblem:
    """The rows of those of these tensors that the call has; ``n`` is a compile-time constant."""
    present = [name for name in names if name in problem.dtypes]
    return RowProblem(
        n=problem.dims["n"], itemsize=max(ITEMSIZE[problem.dtypes[name]] for name in present),
        aligned=min(problem.aligns[name] for name in present) >= VECTOR_BYTES, max_cluster=ARCHES[problem.arch].cluster,
        ring_bytes=ring_bytes(problem),
    )  # fmt: skip


def ring_bytes(problem: Problem) -> int:
    """Bytes of an SM's shared memory that rows may fill."""
    return step(RING_BYTES, ARCHES[problem.arch].shared)


def bytes_of(problem: Problem, names: Iterable[str]) -> int:
    """Bytes per element, summed over those of these tensors that the call has."""
    return sum(ITEMSIZE[problem.dtypes[name]] for name in names if name in problem.dtypes)


def next_power(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def threads_for(vectors: int, per_thread: int, most: int = 1024) -> int:
    """Threads that hold so many vectors: a power of two within a warp, whole warps beyond."""
    threads = -(-vectors // per_thread)
    return next_power(threads) if threads <= WARP else min(-(-threads // WARP) * WARP, most)


def even_threads(vectors: int, least: int, most: int) -> int:
    """Threads of a row, with ``least`` to ``most`` of so many vectors each, that hold the fewest past its end; of equal
    ones the fewest, which exchange less.
    """
    counts = (*(1 << i for i in range(WARP.bit_length())), *range(2 * WARP, 1024 + 1, WARP))
    held = {threads: -(-vectors // threads) for threads in counts}
    fitting = [threads for threads, each in held.items() if least <= each <= most]
    return min(fitting, key=lambda threads: (held[threads] * threads, threads), default=threads_for(vectors, least))


def cluster_for(vectors: int, per_cta: int, most: int) -> int:
    """CTAs, a power of two up to ``most``, that hold at most ``per_cta`` vectors each where possible."""
    ctas = 1
    while ctas < most and vectors > ctas * per_cta:
        ctas *= 2
    return ctas


def are_contiguous(problem: Problem, names: Iterable[str]) -> bool:
    """Whether each row of these tensors begins where the one before it ends, as far as their alignment tells."""
    sizes = {name: problem.dims["n"] * ITEMSIZE[problem.dtypes[name]] for name in names if name in problem.dtypes}
    return all(problem.aligns[name] == min(size & -size, VECTOR_BYTES) for name, size in sizes.items())


def uneven_share(row: RowProblem) -> int | None:
    """Threads of an aligned row of up to a warp's vectors, about three each, where with one each many would have none;
    None for other rows.
    """
    some = row.aligned and SHORTEST_ROW < row.vectors < WARP
    return threads_for(row.vectors, 3) if some and row.vectors & (row.vectors - 1) else None


def row_threads(row: RowProblem) -> int:
    """Threads of a row that one CTA holds in registers."""
    if row.vectors <= WARP:
        shortest = not row.aligned and row.vectors <= SHORTEST_ROW
        return threads_for(row.n, 8) if shortest else threads_for(row.vectors, 1)
    if not row.aligned:
        return threads_for(row.vectors, 3)
    if WARP * 2 < row.vectors <= WARP * 3:
        return WARP
    return threads_for(row.vectors, 2 if row.vectors <= TWO_VECTORS_ROW or row.itemsize == 4 else 4)


def uneven_threads(row: RowProblem) -> int:
    """Threads of a short unaligned row of one tensor."""
    return FEW_UNEVEN_THREADS if row.vectors <= FEW_UNEVEN_VECTORS else UNEVEN_THREADS


def reduced_row_threads(row: RowProblem, most: int = 5 * UNEVEN_THREADS, *, pair: bool = False) -> int:
    """Threads of a row of a norm or a softmax that one CTA holds in registers; ``pair``: of two inputs.

    With a vector each, threads of short unaligned rows would mostly mask it and exchange sums, so rows of up to
    ``most`` vectors have fewer. Three warps of a CTA would leave one of an SM's four schedulers idle.
    """
    if not row.aligned and row.vectors <= most:
        return UNEVEN_THREADS if pair else uneven_threads(row)
    return 2 * WARP if row.aligned and 4 * WARP < row.vectors <= 5 * WARP else row_threads(row)


def threads_of_pairs(vectors: int, most: int) -> tuple[int, int]:
    """(threads of a CTA, threads of a row) for aligned rows of two inputs that one CTA holds in registers.

    A thread takes one vector of each input, in CTAs of at least 256 threads: when rows are few, their last bytes arrive
    sooner. It takes two where a row has more than ``most`` vectors, or where whole CTAs of one row would fill at most
    7/8 of an SM's 2048 threads: when rows are many, too few bytes would be in flight.
    """
    row = threads_for(vectors, 1)
    if vectors > most or 2048 // row * row <= 2048 * 7 // 8:
        row = threads_for(vectors, 2)
        return row, row
    return -(-256 // row) * row, row


def of_scheduler(vectors: int, per_thread: int, most: int = 1024) -> int:
    """Vectors of the busiest of an SM's four schedulers, where threads of one CTA have so many of a row's vectors."""
    return -(-threads_for(vectors, per_thread, most) // (4 * WARP)) * per_thread


def period_of(row: RowProblem, align_vectors: int) -> int:
    """After how many rows they start at the same place of ``align_vectors`` vectors again."""
    unit = row.vector_elements * align_vectors
    return 1 if row.aligned else unit // math.gcd(row.n, unit)


def in_step(clusters: int, row: RowProblem, align_vectors: int) -> int:
    """At most ``clusters``, such that all unaligned rows of a cluster start at the same place of a vector."""
    period = period_of(row, align_vectors)
    return max(clusters // period, 1) * period


def alignment_in_step(clusters: int, row: RowProblem) -> int:
    """Vectors that row starts are rounded down to: a line's, or fewer where :func:`in_step` would then leave out more
    than a tenth of the clusters that run at once, or have more of them than do.
    """
    aligns = [row.align_vectors >> i for i in range(row.align_vectors.bit_length())]
    running = {align: clusters - clusters % period_of(row, align) for align in aligns}
    return next(align for align in aligns if running[align] >= 0.9 * max(running.values()))


def resident_clusters(problem: Problem, cluster: int) -> int:
    """Clusters that surely run at once, one CTA to an SM.

    SMs come in groups (GPCs) that a cluster cannot span, and a group may have SMs left over. One cluster too many
    doubles the time: it starts when others have ended.
    """
    return max(problem.sm_count // cluster - CLUSTERS_LOST[cluster], 1)


class Spread(NamedTuple):
    """How a row spreads over threads and CTAs: fields of :class:`RowConfig`."""

    threads: int
    threads_per_row: int
    cluster: int
    resident: int


def spread_in_smem(
    row: RowProblem,
    vectors: int,
    row_bytes: int,
    per_cta: int = SMEM_VECTORS,
    *,
    full: bool = False,
    shallow: bool = False,
) -> Spread | None:
    """A long row in the shared memory of a cluster; None where it does not fit.

    Args:
        row: the row.
        vectors: how many of its vectors are held.
        row_bytes: bytes per element, summed over the inputs.
        per_cta: vectors of a CTA at most, unless the largest cluster needs more.
        full: as many CTAs on an SM as find room, instead of SMEM_BYTES_IN_FLIGHT.
        shallow: four vectors per thread instead of eight, if 800 threads then hold a CTA's span.
    """
    cluster = cluster_for(vectors, per_cta, row.max_cluster)
    span = -(-vectors // cluster)
    shallow = shallow and span <= 4 * 800
    per_thread = 4 if shallow else SMEM_PER_THREAD
    threads = threads_for(span, per_thread, 1024 if shallow else SMEM_THREADS)
    slot = threads * per_thread * row.vector_elements * row_bytes
    if span > per_thread * threads or slot > row.ring_bytes - RESERVED_BYTES:
        return None
    room = row.ring_bytes if full else min(SMEM_BYTES_IN_FLIGHT, row.ring_bytes)
    resident = min(room // slot, (SMEM_SM_THREADS_FULL if full else SMEM_SM_THREADS) // threads)
    return Spread(threads, threads, cluster, max(1, resident))


# What search spaces vary


def vary_threads(row: RowProblem, config: C) -> Iterator[C]:
    """Other threads per row, and other rows per CTA, where one CTA holds a row."""
    counts = MORE_VECTORS if row.touched_at_most > WARP else FEW_VECTORS
    for share in dict.fromkeys(threads_for(row.touched_at_most, k) for k in counts):
        for threads in dict.fromkeys(max(some // share, 1) * share for some in (config.threads, 128, 256)):
            yield replace(config, threads=threads, threads_per_row=share)


def vary_cluster(row: RowProblem, config: C, per_thread: Sequence[int]) -> Iterator[C]:
    """Other CTAs per row and vectors per thread, with about as many threads per SM."""
    room = config.resident * config.threads
    for ctas in (config.cluster // 2, config.cluster, 2 * config.cluster):
        if 1 <= ctas <= row.max_cluster:
            for k in per_thread:
                threads = threads_for(-(-row.touched_at_most // ctas), k)
                yield replace(
                    config, cluster=ctas, threads=threads, threads_per_row=threads, resident=max(1, room // threads)
                )


def vary_resident(config: C) -> Iterator[C]:
    """Other CTAs per SM, which bounds the registers of a thread."""
    now = config.resident
    for resident in dict.fromkeys((now - 1, now + 1, now + 2, 2 * now)) if now > 1 else (2, 3, 4):
        yield replace(config, resident=resident)


# What a config takes of an SM


def inputs_of(problem: Problem) -> list[str]:
    """The inputs of which kernels read whole rows."""
    names = ["x", "residual", "dout", "dresidual_out", "logits", "gate", "up"]
    # An op that reads `residual` writes `residual_out`; a backward reads that, or `out`.
    names += ["residual_out"] if "residual" not in problem.dtypes else []
    names += ["out"] if "dx" in problem.dtypes else []
    return [name for name in names if name in problem.dtypes]


def needs_of(problem: Problem, config: RowConfig, segments: int = 1) -> Needs:
    """A config's needs by its form: rows are held in shared memory, or are walked over, or are held in the registers of
    a cluster, or of so many CTAs that take a segment each.
    """
    if config.form == "smem":
        return needs_in_smem(problem, config)
    if not config.threads_per_row:
        return Needs(config.threads, LEAST_REGISTERS, resident=config.resident)
    per_thread = -(-row_of(problem).vectors // (config.threads_per_row * config.cluster * segments))
    held = VECTOR_BYTES // REGISTER_BYTES * per_thread * len(inputs_of(problem))
    return Needs(config.threads, LEAST_REGISTERS + held, resident=config.resident)


def needs_in_smem(problem: Problem, config: RowConfig, stages: int = 1, registers: int = 0) -> Needs:
    """A config's needs where rows are held in shared memory, in ``stages`` slots; ``registers``: for anything else."""
    row = row_of(problem)
    # Vectors of unaligned rows may be narrower than 16 bytes, and each row may start on one.
    vec = row.vector_elements if row.aligned else 1
    held = -(-row.n // (config.threads_per_row * config.cluster * vec)) * vec
    slot = config.threads * held * bytes_of(problem, inputs_of(problem))
    return Needs(config.threads, LEAST_REGISTERS + registers, stages * slot, config.resident)
