"""How the search of the largest numbers, and sums of rows that are named by an index, are configured."""

from __future__ import annotations

import math
from dataclasses import replace

from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import ARCHES, VECTOR_BYTES, WARP
from cute_ops.kernels.routing.config import (
    MOVED_FROM,
    QUAD,
    SEGMENT,
    GatherConfig,
    PlacesConfig,
    RouteConfig,
    TopkConfig,
)
from cute_ops.ops.rows import Ladder, step, threads_for

# Columns of a thread that sorts, and of one that selects; the longest rows that are sorted, and the most numbers of
# them.
SORT_COLUMNS, SELECT_COLUMNS, SORTED_ROW, SORTED_MOST = 64, 32, 1024, 16
# Threads of a CTA that sorts; of an SM those that select, by whether rows consist of whole vectors: else each number
# takes a register.
SORT_THREADS, SELECT_SM_THREADS = 128, {True: 1280, False: 1024}
# Threads of a CTA and of an SM that select among numbers of 16 bits, where so many groups suffice: 690 x 151936 and
# k = 20 runs at 0.72 of a copy's rate, by 256 threads at 0.52; 3276 x 32000 and k = 1 at 0.88, at 0.79.
SELECT_FEWER, SELECT_FEWER_SM_THREADS = 128, {True: 1024, False: 768}
# Columns of a thread that routes, which keeps sums of them, by bytes of a logit. (Threads of a CTA, CTAs of an SM): of
# rows of up to FEW_EXPERTS, of longer ones, and where more than MANY_CHOSEN are sorted, which takes registers. CTAs are
# large and few, since a last one adds up what each of them has.
ROUTED_COLUMNS, FEW_EXPERTS, MANY_CHOSEN = {2: 48, 4: 32}, 32, 8
FEW_ROUTED: Ladder[tuple[int, int]] = ((8, (256, 6)), (16, (256, 4)), (FEW_EXPERTS, (128, 6)))
ROUTED, MANY_ROUTED = (256, 2), {2: (128, 4), 4: (128, 3)}
# Of rows of a vector, of which two are chosen, a thread has two at a time: 14680064 x 8 runs at 0.80 of a copy's rate,
# by one at 0.75; of 16 and 32 experts at 0.76 and 0.59, by one at 0.79 and 0.60.
# (Threads of a CTA, CTAs of an SM) by columns of a thread that sorts but a few of its vectors, in rows of at least
# SELECTED_ROW logits of 16 bits: 511845 x 256 and k = 8 runs at 0.48 of a copy's rate by 64 columns, at 0.39 by 32;
# 514690 x 384 and k = 6 at 0.50 by 96, at 0.46 by 48.
SELECTED: Ladder[tuple[int, int]] = ((48, (256, 2)), (64, (128, 3)), (96, (256, 1)))
SELECTED_ROW = 128
# Experts of a token up to which vectors with the largest logits are found first, by bytes of a logit.
MOST_BY_VECTORS = {2: 8, 4: 4}
# Threads of a CTA that finds places, and classes up to which it has twice as many: counts of all its warps take 66 KB.
# Numbers up to which every other SM has one: of 14773 x 4 they take 4.3 us, on all SMs 5.9, of 65536 x 8 16 and 11.5.
PLACES_THREADS, FEW_CLASSES, FEW_PLACES = 512, 512, 1 << 17
# Vectors of a thread that adds up rows.
GATHERED_VECTORS = 4
# Vectors of a thread that computes the gradients of a token's rows and of their weights, of all these rows at a time.
DOTS_VECTORS = 16


def topk(problem: Problem) -> TopkConfig:
    """Short rows are sorted, several by a warp; in longer ones a bound is found first that few numbers reach."""
    n, k = min(problem.n or SEGMENT, SEGMENT), problem.attrs["k"]
    if n <= SORTED_ROW and k <= SORTED_MOST:
        alone = n * ITEMSIZE[problem.dtypes["x"]] <= VECTOR_BYTES
        share = _power(-(-n // SORT_COLUMNS))
        return TopkConfig("sort", SORT_THREADS, threads_per_row=share, unroll=2 if alone else 1)
    threads = max(_power(-(-n // SELECT_COLUMNS)), WARP)
    whole = (problem.n or 1) * ITEMSIZE[problem.dtypes["x"]] % VECTOR_BYTES == 0
    most = SELECT_SM_THREADS[whole]
    if ITEMSIZE[problem.dtypes["x"]] == 2 and 2 * k <= SELECT_FEWER:
        threads, most = min(threads, SELECT_FEWER), SELECT_FEWER_SM_THREADS[whole]
    resident = most // threads
    return TopkConfig(
        "select", threads, resident=min(resident, ARCHES[problem.arch].ctas), groups=max(_power(2 * k), threads)
    )


def routed(problem: Problem) -> RouteConfig:
    """Rows that are sorted, by as many CTAs as fit the GPU."""
    n, many, itemsize = problem.dims["n"], problem.attrs["k"] > MANY_CHOSEN, ITEMSIZE[problem.dtypes["logits"]]
    share = _power(-(-n // SELECTED[-1][0]))
    if itemsize == 2 and n >= SELECTED_ROW and _few_vectors(problem, share):
        form, (threads, resident) = "vectors", step(SELECTED, -(-n // share))
    else:
        share = _power(-(-n // ROUTED_COLUMNS[4 if many else itemsize]))
        form = "vectors" if _few_vectors(problem, share) else "route"
        few = step(FEW_ROUTED, n if itemsize == 2 else FEW_EXPERTS) if n <= FEW_EXPERTS else ROUTED
        threads, resident = MANY_ROUTED[itemsize] if many else few
        # More than two that are sorted take more registers than six large CTAs leave.
        resident = min(resident, 5) if threads == 256 and problem.attrs["k"] > 2 else resident
    ctas, ahead = resident * problem.sm_count, int(n > FEW_EXPERTS)
    unroll = 2 if n * itemsize <= VECTOR_BYTES and problem.attrs["k"] <= 2 else 1
    return RouteConfig(form, threads, share, resident=resident, ctas=ctas, ahead=ahead, unroll=unroll)


def _few_vectors(problem: Problem, share: int) -> bool:
    """Whether those of a row's vectors that have its largest numbers are so few that finding them saves instructions:
    a fifth of them of 256 bfloat16 logits and k = 4. Keys of 64 bits take three times as many for a comparison.
    """
    itemsize, n, size = ITEMSIZE[problem.dtypes["logits"]], problem.dims["n"], _power(problem.attrs["k"])
    vec = VECTOR_BYTES // itemsize
    whole = problem.aligns["logits"] >= VECTOR_BYTES and n % vec == 0
    return whole and size <= MOST_BY_VECTORS[itemsize] and n // vec >= 2 * max(size, share) and share <= size * vec


def expert_sums(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Each CTA's sums of probabilities, and how often it has chosen each expert."""
    shape = (RouteConfig.of(flat).ctas, problem.dims["n"])
    return {"totals": Array(shape, "float32"), "counts": Array(shape, "int32")}


def gathered_sum(problem: Problem) -> GatherConfig:
    """Threads of a row that have :data:`GATHERED_VECTORS` in flight, of all rows that they add up."""
    return _gathered(problem, 2 * SORT_THREADS, problem.dims["k"])


def gathered_dots(problem: Problem) -> GatherConfig:
    """At most a warp for each row, which exchanges sums by shuffles."""
    return _gathered(problem, WARP, problem.dims["k"])


def scattered_dots(problem: Problem) -> GatherConfig:
    """At most a warp for each row, with several vectors of a thread in flight: rows are stored, too."""
    found = gathered_dots(problem)
    vec = math.gcd(problem.dims["n"], VECTOR_BYTES // ITEMSIZE[problem.dtypes["y"]])
    unroll = max(min(problem.dims["n"] // (vec * WARP), DOTS_VECTORS // problem.dims["k"]), 1)
    return replace(found, unroll=unroll) if found.threads_per_row == WARP else found


def scattered_rows(problem: Problem) -> GatherConfig:
    """Threads of a row that have :data:`GATHERED_VECTORS` of it in flight."""
    return _gathered(problem, 2 * SORT_THREADS, each=1)


def places(problem: Problem) -> PlacesConfig:
    """A CTA for each SM, or for every other one; each of its warps counts classes apart."""
    few = problem.attrs["classes"] <= FEW_CLASSES
    ctas = -(-problem.sm_count // 2) if problem.size("r") * problem.dims["k"] <= FEW_PLACES else problem.sm_count
    return PlacesConfig(2 * PLACES_THREADS if few else PLACES_THREADS, ctas)


def counts(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """How many numbers of each class, and of none, each CTA has, in whole vectors."""
    bins = -(-(problem.attrs["classes"] + 1) // QUAD) * QUAD
    return {"counts": Array((PlacesConfig(**flat).ctas, bins), "int32")}


def _gathered(problem: Problem, most: int, each: int) -> GatherConfig:
    """``each``: rows of a thread at a time."""
    rows = [name for name in ("x", "y", "out", "dout", "dy") if name in problem.aligns]
    itemsize, n = ITEMSIZE[problem.dtypes[rows[0]]], problem.dims["n"]
    vec = math.gcd(n, max(min(min(problem.aligns[name], VECTOR_BYTES) for name in rows) // itemsize, 1))
    if n >= MOVED_FROM * VECTOR_BYTES // itemsize and 2 * vec * itemsize < VECTOR_BYTES:
        vec, each = VECTOR_BYTES // itemsize, problem.dims["k"]  # a row is moved once for each
    vectors = -(-n // vec)
    unroll = max(GATHERED_VECTORS // each, 1)
    share = threads_for(vectors, unroll, most)
    steps = -(-vectors // (share * unroll))
    if share == most > WARP and vectors % (steps * unroll * WARP) == 0:
        share = vectors // (steps * unroll)  # 2560 columns run at 0.98 of a copy's rate by 160, by 256 at 0.82
    return GatherConfig(max(SORT_THREADS // share, 1) * share, share, unroll)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
