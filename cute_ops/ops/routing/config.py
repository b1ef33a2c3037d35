"""How the search of the largest numbers, and sums of rows that are named by an index, are configured."""

from __future__ import annotations

import math

from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import ARCHES, VECTOR_BYTES, WARP
from cute_ops.kernels.routing.config import MOVED_FROM, QUAD, SEGMENT, GatherConfig, PlacesConfig, TopkConfig
from cute_ops.ops.rows import threads_for

# Columns of a thread that sorts, and of one that selects; the longest rows that are sorted, and the most numbers of
# them.
SORT_COLUMNS, SELECT_COLUMNS, SORTED_ROW, SORTED_MOST = 64, 32, 1024, 16
# Threads of a CTA that sorts; of an SM those that select, by whether rows consist of whole vectors: else each number
# takes a register.
SORT_THREADS, SELECT_SM_THREADS = 128, {True: 1280, False: 1024}
# Threads of a CTA that finds places, and classes up to which it has twice as many: counts of all its warps take 66 KB.
PLACES_THREADS, FEW_CLASSES = 512, 512
# Vectors of a thread that adds up rows.
GATHERED_VECTORS = 4


def topk(problem: Problem) -> TopkConfig:
    """Short rows are sorted, several by a warp; in longer ones a bound is found first that few numbers reach."""
    n, k = min(problem.n or SEGMENT, SEGMENT), problem.attrs["k"]
    if n <= SORTED_ROW and k <= SORTED_MOST:
        return TopkConfig("sort", SORT_THREADS, threads_per_row=_power(-(-n // SORT_COLUMNS)))
    threads = max(_power(-(-n // SELECT_COLUMNS)), WARP)
    whole = (problem.n or 1) * ITEMSIZE[problem.dtypes["x"]] % VECTOR_BYTES == 0
    resident = SELECT_SM_THREADS[whole] // threads
    return TopkConfig(
        "select", threads, resident=min(resident, ARCHES[problem.arch].ctas), groups=max(_power(2 * k), threads)
    )


def gathered_sum(problem: Problem) -> GatherConfig:
    """Threads of a row that have :data:`GATHERED_VECTORS` in flight, of all rows that they add up."""
    return _gathered(problem, 2 * SORT_THREADS, problem.dims["k"])


def gathered_dots(problem: Problem) -> GatherConfig:
    """At most a warp for each row, which exchanges sums by shuffles."""
    return _gathered(problem, WARP, problem.dims["k"])


def scattered_rows(problem: Problem) -> GatherConfig:
    """Threads of a row that have :data:`GATHERED_VECTORS` of it in flight."""
    return _gathered(problem, 2 * SORT_THREADS, each=1)


def places(problem: Problem) -> PlacesConfig:
    """A CTA for each SM; each of its warps counts classes apart."""
    few = problem.attrs["classes"] <= FEW_CLASSES
    return PlacesConfig(2 * PLACES_THREADS if few else PLACES_THREADS, problem.sm_count)


def counts(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """How many numbers of each class, and of none, each CTA has, in whole vectors."""
    bins = -(-(problem.attrs["classes"] + 1) // QUAD) * QUAD
    return {"counts": Array((PlacesConfig(**flat).ctas, bins), "int32")}


def _gathered(problem: Problem, most: int, each: int) -> GatherConfig:
    """``each``: rows of a thread at a time."""
    rows = [name for name in ("x", "y", "out", "dout") if name in problem.aligns]
    itemsize, n = ITEMSIZE[problem.dtypes[rows[0]]], problem.dims["n"]
    vec = math.gcd(n, max(min(min(problem.aligns[name], VECTOR_BYTES) for name in rows) // itemsize, 1))
    if n >= MOVED_FROM * VECTOR_BYTES // itemsize and 2 * vec * itemsize < VECTOR_BYTES:
        vec, each = VECTOR_BYTES // itemsize, problem.dims["k"]  # a row is moved once for each
    vectors = -(-n // vec)
    unroll = max(GATHERED_VECTORS // each, 1)
    share = threads_for(vectors, unroll, most)
    return GatherConfig(max(SORT_THREADS // share, 1) * share, share, unroll)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
