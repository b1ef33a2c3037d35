"""How the vectors of a row spread over threads, CTAs and clusters: what the heuristics of all families share.

Forward configs do not depend on the number of rows, so that a row's bits do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from cute_ops.config import Needs, Problem
from cute_ops.hardware import ARCHES, WARP
from cute_ops.kernels.lib.row_config import RowConfig
from cute_ops.shapes import ITEMSIZE

VECTOR_BYTES = 16
# The names that row tensors have in the declarations.
TENSORS = (
    "x", "residual", "out", "residual_out", "dout", "dresidual_out", "dx", "dresidual", "logits", "dlogits",
)  # fmt: skip
# Rows that start off a vector are read from the start of a cache line, which has so many vectors, unless they have
# fewer elements: these would mind the idle threads.
LINE_VECTORS, LONG_ROW = 8, 1024
# Elements of the widest vector: rows of any length start at the same place of a line again after at most
# LINE_VECTORS times as many rows.
WIDEST_VECTOR = 8
# Bytes that rows may fill of an SM's shared memory, by how much it has.
RING_BYTES = ((102_400, 96_000), (167_936, 160_000), (math.inf, 220_000))
# Shared memory of a CTA that waits in it beside its rows: sums, and what the system keeps.
RESERVED_BYTES = 2048
# Vectors of a row that one CTA holds.
CTA_VECTORS = 1024
# Vectors that a thread of a row in shared memory holds, and the threads of its CTA.
SMEM_PER_THREAD, SMEM_THREADS = 8, 512 + WARP
# Vectors of a row that one CTA holds in shared memory: all that its threads could, but for one each.
SMEM_VECTORS = 4096 + LINE_VECTORS
# What CTAs with rows in shared memory keep of an SM: the bytes that are on their way, and threads. More get in each
# other's way. While rows off a vector are computed, which takes longer, others may load: as many as find room.
SMEM_BYTES_IN_FLIGHT, SMEM_SM_THREADS, SMEM_SM_THREADS_FULL = 165_000, 1536, 1664
# Clusters of so many CTAs that the groups of SMs, which no cluster straddles, leave no room for.
CLUSTERS_LOST = {1: 0, 2: 2, 4: 3, 8: 2, 16: 1}
# Registers of a thread beside the vectors that it holds, and bytes of one.
LEAST_REGISTERS, REGISTER_BYTES = 16, 4
# Vectors of a thread, as the search space varies them.
FEW_VECTORS, MORE_VECTORS = (1, 2, 4), (1, 2, 3, 4, 6, 8)

T = TypeVar("T")
C = TypeVar("C", bound=RowConfig)
Ladder = Sequence[tuple[float, T]]


def step(ladder: Ladder[T], value: float) -> T:
    """The value of the first step ``(upper bound, value)`` of a ladder that is as high as this."""
    return next(found for bound, found in ladder if value <= bound)


class Row(NamedTuple):
    """A row of a problem, as all its tensors have it.

    Attributes:
        n: elements.
        itemsize: bytes of an element in the widest dtype.
        aligned: whether rows start on a vector in every tensor.
        max_cluster: CTAs of the largest cluster.
        ring_bytes: bytes that rows may fill of an SM's shared memory.
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
        """Vectors that the start of a row off a vector is rounded down to a multiple of."""
        return LINE_VECTORS if self.n >= LONG_ROW else 1

    @property
    def touched(self) -> int:
        """Vectors that a row touches: one that starts off a vector has more of them."""
        return self.vectors + (0 if self.aligned else self.align_vectors)

    @property
    def touched_at_most(self) -> int:
        """The same whatever the row's length, as the search space counts."""
        return self.vectors + (0 if self.aligned else LINE_VECTORS)


def row_of(problem: Problem, names: Iterable[str] = TENSORS) -> Row:
    """The rows of those tensors of these names that are there; their length is known."""
    present = [name for name in names if name in problem.dtypes]
    return Row(
        n=problem.dims["n"], itemsize=max(ITEMSIZE[problem.dtypes[name]] for name in present),
        aligned=min(problem.aligns[name] for name in present) >= VECTOR_BYTES, max_cluster=ARCHES[problem.arch].cluster,
        ring_bytes=ring_bytes(problem),
    )  # fmt: skip


def ring_bytes(problem: Problem) -> int:
    """Bytes that rows may fill of an SM's shared memory."""
    return step(RING_BYTES, ARCHES[problem.arch].shared)


def bytes_of(problem: Problem, names: Iterable[str]) -> int:
    """Bytes of an element of each of these tensors that are there, together."""
    return sum(ITEMSIZE[problem.dtypes[name]] for name in names if name in problem.dtypes)


def next_power(count: int) -> int:
    """The power of two that is as large as this number."""
    return 1 << max(count - 1, 0).bit_length()


def threads_for(vectors: int, per_thread: int, most: int = 1024) -> int:
    """Threads that hold so many vectors: a power of two within a warp, whole warps beyond."""
    threads = -(-vectors // per_thread)
    return next_power(threads) if threads <= WARP else min(-(-threads // WARP) * WARP, most)


def cluster_for(vectors: int, per_cta: int, most: int) -> int:
    """CTAs, a power of two up to ``most``, that hold at most ``per_cta`` vectors each where possible."""
    ctas = 1
    while ctas < most and vectors > ctas * per_cta:
        ctas *= 2
    return ctas


def row_threads(row: Row) -> int:
    """Threads of a row that one CTA holds in registers."""
    if row.vectors <= WARP:
        # Rows of a few elements off a vector are read one by one, about four to a thread.
        return threads_for(row.n, 4) if not row.aligned and row.vectors <= 8 else threads_for(row.vectors, 1)
    if not row.aligned:
        return threads_for(row.vectors, 3)
    if WARP * 2 < row.vectors <= WARP * 3:
        return WARP
    return threads_for(row.vectors, 2 if row.vectors <= 512 or row.itemsize == 4 else 4)


def threads_of_pairs(vectors: int, most: int) -> tuple[int, int]:
    """Threads of a CTA and of a row, of aligned rows of two inputs that one CTA holds.

    A vector of each to a thread, up to ``most`` threads, and at least 256 threads: of few rows the last bytes arrive
    sooner. Two vectors where CTAs of that size leave an eighth or more of an SM's threads out, and many rows would have
    fewer bytes on their way.
    """
    row = threads_for(vectors, 1)
    if vectors > most or 2048 // row * row <= 2048 * 7 // 8:
        row = threads_for(vectors, 2)
        return row, row
    return -(-256 // row) * row, row


def resident_clusters(problem: Problem, cluster: int) -> int:
    """Clusters that are on the chip at once, one CTA to an SM.

    SMs come in groups that no cluster straddles, and every group may leave a rest. Asking for one cluster too many
    doubles the time: it runs when all others are done.
    """
    return max(problem.sm_count // cluster - CLUSTERS_LOST[cluster], 1)


class Spread(NamedTuple):
    """A row's threads, CTAs, and CTAs of an SM; the fields of a :class:`RowConfig`."""

    threads: int
    threads_per_row: int
    cluster: int
    resident: int


def spread_in_smem(
    row: Row, vectors: int, row_bytes: int, per_cta: int = SMEM_VECTORS, *, full: bool = False, shallow: bool = False
) -> Spread | None:
    """A long row in the shared memory of a cluster; None where it does not fit.

    Args:
        row: the row.
        vectors: those that are to be held.
        row_bytes: bytes of an element in all inputs.
        per_cta: vectors of a CTA, as far as clusters reach.
        full: as many CTAs on an SM as find room.
        shallow: four vectors to a thread instead of eight, where 800 threads hold the row then.
    """
    cluster = cluster_for(vectors, per_cta, row.max_cluster)
    part = -(-vectors // cluster)
    shallow = shallow and part <= 4 * 800
    per_thread = 4 if shallow else SMEM_PER_THREAD
    threads = threads_for(part, per_thread, 1024 if shallow else SMEM_THREADS)
    slot = threads * per_thread * row.vector_elements * row_bytes
    if part > per_thread * threads or slot > row.ring_bytes - RESERVED_BYTES:
        return None
    room = row.ring_bytes if full else min(SMEM_BYTES_IN_FLIGHT, row.ring_bytes)
    resident = min(room // slot, (SMEM_SM_THREADS_FULL if full else SMEM_SM_THREADS) // threads)
    return Spread(threads, threads, cluster, max(1, resident))


# What search spaces vary


def vary_threads(row: Row, config: C) -> Iterator[C]:
    """A row over more or fewer threads of one CTA, rows over more or fewer CTAs."""
    counts = MORE_VECTORS if row.touched_at_most > WARP else FEW_VECTORS
    for share in dict.fromkeys(threads_for(row.touched_at_most, k) for k in counts):
        for threads in dict.fromkeys(max(some // share, 1) * share for some in (config.threads, 128, 256)):
            yield replace(config, threads=threads, threads_per_row=share)


def vary_cluster(row: Row, config: C, per_thread: Sequence[int]) -> Iterator[C]:
    """A long row over more or fewer CTAs and threads, as many of these CTAs on an SM as before in threads."""
    room = config.resident * config.threads
    for ctas in (config.cluster // 2, config.cluster, 2 * config.cluster):
        if 1 <= ctas <= row.max_cluster:
            for k in per_thread:
                threads = threads_for(-(-row.touched_at_most // ctas), k)
                yield replace(
                    config, cluster=ctas, threads=threads, threads_per_row=threads, resident=max(1, room // threads)
                )


def vary_resident(config: C) -> Iterator[C]:
    """More or fewer CTAs on an SM: a bound on registers."""
    now = config.resident
    for resident in dict.fromkeys((now - 1, now + 1, now + 2, 2 * now)) if now > 1 else (2, 3, 4):
        yield replace(config, resident=resident)


# What a config takes of an SM


def inputs_of(problem: Problem) -> list[str]:
    """The inputs that kernels read whole rows of."""
    names = ["x", "residual", "dout", "dresidual_out", "logits", "gate", "up"]
    # An op that has `residual` as input writes `residual_out`; a backward reads it, as the one from `out` does that.
    names += ["residual_out"] if "residual" not in problem.dtypes else []
    names += ["out"] if "dx" in problem.dtypes else []
    return [name for name in names if name in problem.dtypes]


def needs_in_registers(problem: Problem, config: RowConfig, ctas: int) -> Needs:
    """A config's needs where a row's vectors of every input wait in registers, spread over so many CTAs."""
    per_thread = -(-row_of(problem).vectors // (config.threads_per_row * ctas))
    held = VECTOR_BYTES // REGISTER_BYTES * per_thread * len(inputs_of(problem))
    return Needs(config.threads, LEAST_REGISTERS + held, resident=config.resident)


def needs_in_smem(problem: Problem, config: RowConfig, stages: int = 1, registers: int = 0) -> Needs:
    """A config's needs where rows wait in shared memory, in so many slots, beside registers for something else."""
    row = row_of(problem)
    # A row that starts off a vector touches more of them; search spaces count a line's, however long it is.
    held = -(-row.touched_at_most // (config.threads_per_row * config.cluster))
    slot = config.threads * held * row.vector_elements * bytes_of(problem, inputs_of(problem))
    return Needs(config.threads, LEAST_REGISTERS + registers, stages * slot, config.resident)
