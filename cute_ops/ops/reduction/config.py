"""How the kernels of softmax, sums and losses are configured: heuristics and their search space.

Lengths are in 16-byte vectors unless a name says otherwise. Rows are unaligned where they do not all start on a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cute_ops.declaration.config import Config, Needs, Problem, Space
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.reduction.config import ScaleConfig
from cute_ops.kernels.rowwise.config import MapConfig, ReduceConfig
from cute_ops.ops.rows import (
    CTA_VECTORS,
    RESERVED_BYTES,
    SHORTEST_ROW,
    SMEM_PER_THREAD,
    SMEM_SM_THREADS_FULL,
    SMEM_THREADS,
    SMEM_VECTORS,
    TWO_PASS_LONG_THREADS,
    TWO_PASS_THREADS,
    TWO_VECTORS_ROW,
    RowProblem,
    bytes_of,
    cluster_for,
    needs_of,
    reduced_row_threads,
    row_of,
    row_threads,
    spread_in_smem,
    threads_for,
    threads_of_pairs,
    vary_cluster,
    vary_resident,
    vary_threads,
)

# `reduced`, rows read twice: threads of a CTA, vectors of a segment of a row, and the most segments of a row.
SEGMENT_THREADS, SEGMENT_VECTORS, MOST_SEGMENTS = 256, 2048, 8
# `reduced`: up to this length, keeping a row in shared memory is faster than reading it twice; with aligned logits, or
# where the place of the largest number is found, and in general: sums of 800 x 146747 run at 1.04 of a copy's rate, by
# two passes at 0.86, the cross entropy of 583 x 201089 at 0.82, 0.52.
REDUCED_SMEM_ROW, LONG_REDUCED_ROW = 16_384, 32_768
# Many aligned rows of logits stay in shared memory up to this length, LOGITS_PER_THREAD vectors a thread: the cross
# entropy of 583 x 201088 runs at 0.96 of a copy's rate, by two passes at 0.70; of 151936 classes at 0.92, 0.80. Of
# 262144 two passes run at 0.92, 0.88 in shared memory.
LOGITS_SMEM_ROW, LOGITS_PER_THREAD = 25_600, 12
# CTAs per SM that read rows twice. FEW: where at most so many take all rows at once, as many as the busiest SM needs:
# with room for more, some SMs would take more than others.
TWO_PASS_CTAS, FEW_TWO_PASS_CTAS = 4, 5
# Rows in shared memory of which the place of the largest number is found, if they are longer than PLACED_FROM, by
# whether they are aligned: vectors of a thread, least threads of a CTA, most threads of an SM.
PLACED_FROM = {True: 64, False: 80}
PLACED_PER_THREAD, PLACED_THREADS, PLACED_SM_THREADS = 12, 2 * WARP, 1280
PLACED_SHORT_THREADS = 128
# Rows whose logits are added up, too, for smoothing: by whether they are aligned, the CTA's vectors that fewer threads
# take, more than and up to, and these threads: each takes part in an exchange of four numbers or six. Of 32000, 128256
# and 151936 classes they run at 1.00, 0.89 and 0.85 of a copy's rate, by twice as many at 0.91, 0.84 and 0.78; of
# 30522, 50257 and 65537 at 0.97, 0.89 and 0.87, by 416 to 544 at 0.90, 0.85 and 0.79.
SMOOTHED = {True: (1792, 2400, 128), False: (2304, 4224, 192)}
# Vectors of a thread in rows of up to a warp's vectors that start anywhere, or of which only numbers are stored: with a
# vector each, CTAs would begin and end faster than they load.
SHORT_PER_THREAD, ALIGNED_PER_THREAD = 4, 7
# Rows in shared memory, as many as find room. Up to SHORT_SMEM_ROW one CTA of SHORT_SMEM_THREADS holds rows;
# an SM has SHORT_SMEM_SM_THREADS, by whether rows are aligned. Of SHORT_SMEM_VECTORS few are past the row's end, and
# threads exchange less: the cross entropy of 576 classes runs at 0.97 of a copy's rate, with 4 vectors at 0.77.
SHORT_SMEM_ROW, SHORT_SMEM_THREADS, SHORT_SMEM_SM_THREADS = 256, 128, {True: 2048, False: 1024}
# Of longer aligned ones a thread has up to eight, in CTAs of LONGER_SMEM_THREADS: 239085 x 1360 runs at 1.00, by two
# warps at 0.86.
SHORT_SMEM_VECTORS, LONGER_SMEM_THREADS = 5, 256
# Longer rows take up to FULL_CLUSTER CTAs of FULL_SPAN, by whether rows are aligned. Unaligned rows need masks, which
# cost instructions: so their CTAs are fewer and have more threads. A CTA has at least SHORT_SMEM_THREADS: sums of 1175
# float32 columns run at 1.04 of a copy's rate, by CTAs of two warps at 0.89.
FULL_SPAN, FULL_CLUSTER = {True: 2048, False: SMEM_VECTORS}, 8
# Persistent CTAs per SM of `scale`: they keep 64 KB of loads in flight, which is enough for full bandwidth.
SCALE_CTAS = 4
# Bytes of shared memory that such a CTA needs beside its rows: for sums, and what the system reserves.
OWN_BYTES = 1100
# Aligned rows longer than SMALL_CTAS_FROM take CTAs of SMALL_CTA_VECTORS, which can begin sooner than full ones.
SMALL_CTAS_FROM, SMALL_CTA_VECTORS = 4096, 1024
# Aligned rows of 16 bits between FOUR_VECTORS_FROM and TWO_VECTORS_ROW that are normalised have FOUR_VECTORS_ROW
# threads: log_softmax of 2400 to 4040 columns runs at 0.94 - 0.97 of a copy's rate, by two vectors at 0.87 - 0.92.
FOUR_VECTORS_FROM, FOUR_VECTORS_ROW = 256, 128
# Shorter ones, longer than a warp's vectors, have as few threads as have the fewest vectors past the row's end:
# log_softmax of 264 to 640 columns runs at 0.91 - 0.98 of a copy's rate, by a warp at 0.66 - 0.94. Of more vectors than
# FEW_THREADS_ROW they have a warp: 1000 columns run at 0.97, by two warps at 0.93.
FEW_THREADS, FEW_THREADS_ROW = (16, 8), 80
# Rows that are overwritten with their output: longer rows than this are kept in shared memory. An SM then has fewer
# threads, because exponentials take registers.
IN_PLACE_SMEM_ROW, IN_PLACE_SMEM_ROW_UNALIGNED, IN_PLACE_SM_THREADS = 4 * WARP, 8 * WARP, 1024
# Rows of two inputs in registers: threads of an SM, more in clusters larger than LARGE_CLUSTER; threads of a CTA up to
# which each may hold four vectors of each input, instead of three.
PAIR_SM_THREADS, PAIR_SM_THREADS_CLUSTERED, LARGE_CLUSTER, FOUR_VECTORS_THREADS = 800, 1024, 8, 800
# A row in segments: threads of a CTA and vectors of a segment, by whether rows are aligned. Edges of unaligned segments
# need masks, so these are fewer and longer.
SEGMENT = {True: (512, 2048), False: (256, SMEM_VECTORS)}
# Sums of rows of 16 bits that start on half a vector, of which four CTAs have so many vectors each: by HALVES_THREADS
# those of 92588, 81444 and 95988 columns run at 1.02 - 1.03 of a copy's rate, by 288, 320, 384 or 512 threads at 0.87 -
# 0.90, however many CTAs share an SM; 76004 runs at 1.03, at 1.04 by 320.
HALVES_THREADS, HALVES_RESIDENT, HALVES_SPAN = 448, 3, (2100, 3584)
# Where rows are many, aligned rows up to this length are not cut: in general, and in a kernel that reads no rows.
WHOLE_ROW, WHOLE_FILLED_ROW = 8192, 2048
# In a kernel that reads no rows, aligned rows longer than this, up to TWO_VECTORS_ROW, share a CTA by two.
PAIRED_FILLED_ROW = 256


def reduced(problem: Problem, longest: int = LONG_REDUCED_ROW) -> ReduceConfig:
    """A reduction whose output is one number per row.

    Rows of up to a warp's vectors are held in registers, longer ones in shared memory. The longest are cut into
    segments and read twice: by a cluster, a segment per CTA, if rows are few, by one CTA if rows are many. The bits are
    the same.
    """
    if problem.n is None:
        return ReduceConfig("two_pass", TWO_PASS_THREADS)
    row = row_of(problem)
    if row.vectors <= WARP:
        each = ALIGNED_PER_THREAD if row.aligned else SHORT_PER_THREAD
        share = threads_for(row.touched, each) if row.aligned or _shifted(row) else row_threads(row)
        return ReduceConfig("one_pass", 256, share, align_vectors=row.align_vectors)
    if found := _kept(problem, row, longest):
        return _smoothed(problem, row, _of_halves(problem, row, found))
    # However few rows there are: with other sums a row would have other bits in other company.
    if "logits" in problem.dtypes and row.aligned and row.vectors <= LOGITS_SMEM_ROW and (found := _long_smem(row)):
        return _smoothed(problem, row, found)
    segments = cluster_for(row.vectors, SEGMENT_VECTORS, MOST_SEGMENTS)
    walk = ReduceConfig("two_pass", SEGMENT_THREADS, align_vectors=row.align_vectors)
    if problem.m < 2 * problem.sm_count and 1 < segments <= row.max_cluster:
        return replace(walk, cluster=segments)
    each = -(-problem.m // problem.sm_count)
    resident = each if each <= FEW_TWO_PASS_CTAS and row.aligned else TWO_PASS_CTAS
    return replace(walk, segments_per_cta=segments, resident=resident)


def reduced_with_place(problem: Problem) -> ReduceConfig:
    """A :func:`reduced` row whose largest number's place is found, which takes longer than to load the row. With more
    vectors per thread, threads exchange less, and fewer have nothing to do.
    """
    found, row = reduced(problem, REDUCED_SMEM_ROW), row_of(problem)
    if found.form == "one_pass" and _shifted(row):
        # Of 441505 x 246: 0.63 of a copy's rate, by twice as many threads 0.57.
        return replace(found, threads=max(PLACED_SHORT_THREADS, found.threads_per_row))
    if found.form != "smem" or row.vectors <= PLACED_FROM[row.aligned]:
        return found
    span = -(-row.touched // found.cluster)
    share = max(threads_for(span, PLACED_PER_THREAD), WARP // 2)
    threads = max(share, PLACED_THREADS)
    slot = threads * -(-span // share) * VECTOR_BYTES + OWN_BYTES
    resident = max(1, min((row.ring_bytes - RESERVED_BYTES) // slot, PLACED_SM_THREADS // threads))
    found = replace(found, threads=threads, threads_per_row=share, resident=resident)
    return _smoothed(problem, row, found) if row.aligned else found


def _of_halves(problem: Problem, row: RowProblem, found: ReduceConfig) -> ReduceConfig:
    """The config of a row that starts on half a vector, where four CTAs share it: see :data:`HALVES_THREADS`."""
    least, most = HALVES_SPAN
    half = found.cluster == 4 and problem.aligns.get("x") == VECTOR_BYTES // 2 and row.itemsize == 2
    if not half or not least <= -(-row.touched // found.cluster) <= most:
        return found
    return replace(found, threads=HALVES_THREADS, threads_per_row=HALVES_THREADS, resident=HALVES_RESIDENT)


def _smoothed(problem: Problem, row: RowProblem, found: ReduceConfig) -> ReduceConfig:
    """The config of a row whose logits are added up, too."""
    least, most, threads = SMOOTHED[row.aligned]
    span = -(-row.touched // found.cluster)
    smoothed = problem.attrs.get("label_smoothing") and row.itemsize == 2 and found.form == "smem"
    if not smoothed or not least < span <= most or found.threads <= threads:
        return found
    slot = threads * -(-span // threads) * VECTOR_BYTES + OWN_BYTES
    resident = max(1, min((row.ring_bytes - RESERVED_BYTES) // slot, found.resident))
    return replace(found, threads=threads, threads_per_row=threads, resident=resident)


def _shifted(row: RowProblem) -> bool:
    """Whether a row is read by vectors that begin before it."""
    return not row.aligned and row.vectors > SHORTEST_ROW


def _kept(problem: Problem, row: RowProblem, longest: int) -> ReduceConfig | None:
    """A row of up to so many vectors in shared memory; None for other rows."""
    most = REDUCED_SMEM_ROW if "logits" in problem.dtypes and row.aligned else longest
    return _full_smem(row) if row.vectors <= most else None


def _full_smem(row: RowProblem) -> ReduceConfig | None:
    """A row in the shared memory of at most eight CTAs; None where it is too long."""
    room = row.ring_bytes - RESERVED_BYTES
    if row.vectors <= SHORT_SMEM_ROW:
        share = threads_for(row.vectors, SHORT_SMEM_VECTORS)
        threads = SHORT_SMEM_THREADS
        if share > WARP and row.aligned:  # of up to eight vectors a warp's threads exchange nothing with others
            share, threads = WARP, LONGER_SMEM_THREADS
        slot = threads * -(-row.touched // share) * VECTOR_BYTES + OWN_BYTES
        resident = min(room // slot, SHORT_SMEM_SM_THREADS[row.aligned] // threads)
        return ReduceConfig("smem", threads, share, resident=max(1, resident), align_vectors=row.align_vectors)
    cluster = cluster_for(row.vectors, FULL_SPAN[row.aligned], min(row.max_cluster, FULL_CLUSTER))
    span = -(-row.touched // cluster)
    share = threads_for(span, SMEM_PER_THREAD, SMEM_THREADS)
    if span > SMEM_PER_THREAD * share:
        return None
    threads = share if cluster > 1 else max(SHORT_SMEM_THREADS // share, 1) * share
    slot = threads * SMEM_PER_THREAD * VECTOR_BYTES + OWN_BYTES
    resident = min(room // slot, SMEM_SM_THREADS_FULL // threads)
    return ReduceConfig("smem", threads, share, cluster, resident, row.align_vectors)


def _long_smem(row: RowProblem) -> ReduceConfig | None:
    """A row in the shared memory of eight CTAs of few threads; None where it is too long."""
    found = _full_smem(row)
    if found is None:
        return None
    span = -(-row.touched // found.cluster)
    threads = threads_for(span, LOGITS_PER_THREAD)
    slot = threads * -(-span // threads) * VECTOR_BYTES + OWN_BYTES
    resident = min((row.ring_bytes - RESERVED_BYTES) // slot, SMEM_SM_THREADS_FULL // threads)
    return replace(found, threads=threads, threads_per_row=threads, resident=max(resident, 1))


def normalised(problem: Problem) -> ReduceConfig:
    """A reduction with an output of the row's size. As in the norms' forward, long rows are kept in shared memory."""
    if problem.n is None:
        return ReduceConfig("two_pass", TWO_PASS_THREADS)
    row = row_of(problem)
    if row.vectors <= CTA_VECTORS:
        found = _one_pass(row)
        if row.aligned and SHORTEST_ROW < row.vectors <= WARP:  # 168 columns run at 0.96, by a vector each at 0.72
            return replace(found, threads=128, threads_per_row=threads_for(row.vectors, 3))
        if not row.aligned or row.itemsize == 4:
            return found
        if FOUR_VECTORS_FROM < row.vectors < TWO_VECTORS_ROW:
            return replace(found, threads=FOUR_VECTORS_ROW, threads_per_row=FOUR_VECTORS_ROW)
        return replace(found, threads_per_row=_few_threads(row)) if WARP < row.vectors <= 4 * WARP else found
    per_cta = SMALL_CTA_VECTORS if row.vectors > SMALL_CTAS_FROM and row.aligned else SMEM_VECTORS
    spread = spread_in_smem(row, row.touched, bytes_of(problem, ("x", "logits")), per_cta)
    if spread is None:
        return ReduceConfig("two_pass", TWO_PASS_LONG_THREADS)
    return ReduceConfig("smem", *spread, row.align_vectors)


def _few_threads(row: RowProblem) -> int:
    """Threads of an aligned row of one to four warps' vectors."""
    if row.vectors > FEW_THREADS_ROW:
        return WARP
    return min(FEW_THREADS, key=lambda threads: -(-row.vectors // threads) * threads)


def softmax(problem: Problem) -> ReduceConfig:
    """A :func:`normalised` row; short unaligned ones keep their exponentials, as expressions do."""
    found = normalised(problem)
    short = problem.n is not None and _shifted(row := row_of(problem)) and row.vectors <= WARP
    return replace(found, form="expression") if short else found


def _one_pass(row: RowProblem, *, pair: bool = False) -> ReduceConfig:
    share = reduced_row_threads(row, pair=pair)
    threads = max(128 if row.vectors > WARP else 256, share)
    return ReduceConfig("one_pass", threads, share, align_vectors=row.align_vectors)


def normalised_in_place(problem: Problem) -> ReduceConfig:
    """The config of a kernel that overwrites its rows with the output."""
    heuristic = normalised(problem)
    if problem.n is None:
        return heuristic
    row = row_of(problem)
    if row.vectors > CTA_VECTORS or (not row.aligned and row.vectors > IN_PLACE_SMEM_ROW_UNALIGNED):
        return _full_smem(row) or heuristic
    if row.vectors <= IN_PLACE_SMEM_ROW or not row.aligned:
        return _one_pass(row)
    share = max(threads_for(row.vectors, 8), 2 * WARP)
    slot = share * -(-row.vectors // share) * VECTOR_BYTES + OWN_BYTES
    resident = min(row.ring_bytes // slot, IN_PLACE_SM_THREADS // share)
    return ReduceConfig("smem", share, share, resident=resident, align_vectors=row.align_vectors)


def reduced_pairs(problem: Problem) -> ReduceConfig:
    """A reduction over rows of two inputs in registers; two passes where a cluster's registers do not hold a row."""
    if problem.n is None:
        return ReduceConfig("two_pass", TWO_PASS_THREADS)
    row = row_of(problem)
    if row.vectors <= CTA_VECTORS:
        if not row.aligned:
            return _one_pass(row, pair=True)
        return ReduceConfig("one_pass", *threads_of_pairs(row.vectors, CTA_VECTORS), align_vectors=row.align_vectors)
    cluster = cluster_for(row.vectors, CTA_VECTORS, row.max_cluster)
    span = -(-row.touched // cluster)
    threads = threads_for(span, 4)
    if span > threads * (4 if threads <= FOUR_VECTORS_THREADS else 3):
        return _pairs_in_smem(row) or ReduceConfig("two_pass", TWO_PASS_LONG_THREADS)
    sm_threads = PAIR_SM_THREADS_CLUSTERED if cluster > LARGE_CLUSTER else PAIR_SM_THREADS
    if 2 * threads > sm_threads and (found := _pairs_in_smem(row)):
        return found
    return ReduceConfig("one_pass", threads, threads, cluster, max(1, sm_threads // threads), row.align_vectors)


def _pairs_in_smem(row: RowProblem) -> ReduceConfig | None:
    """A row of two inputs in the shared memory of the largest cluster; None where it does not fit. An SM has room for
    two CTAs of rows of which registers hold one: gradients of 103 x 190000 run at 0.94 of a copy's rate, not at 0.73.
    """
    span = -(-row.touched // row.max_cluster)
    threads = threads_for(span, SMEM_PER_THREAD, SMEM_THREADS)
    slot, room = 2 * threads * SMEM_PER_THREAD * VECTOR_BYTES + OWN_BYTES, row.ring_bytes - RESERVED_BYTES
    if span > threads * SMEM_PER_THREAD or slot > room:
        return None
    return ReduceConfig("smem", threads, threads, row.max_cluster, room // slot, row.align_vectors)


def mapped(problem: Problem, whole: int = WHOLE_ROW) -> MapConfig:
    """Elementwise, no reduction. Aligned rows up to the length ``whole`` are not cut where rows are many."""
    if problem.n is None:
        return MapConfig("elements", TWO_PASS_THREADS)
    row = row_of(problem)
    if row.vectors <= CTA_VECTORS:
        # Three vectors per thread of a longer row: CTAs start sooner, which helps few rows and does not hurt many.
        longer = row.aligned and row.vectors > TWO_VECTORS_ROW
        share = threads_for(row.vectors, 3) if longer else _mapped_threads(row)
        return MapConfig("rows", max(128 if row.vectors > WARP else 256, share), share, align_vectors=row.align_vectors)
    threads, segment = SEGMENT[row.aligned]
    if problem.m * -(-row.vectors // segment) < 2 * problem.sm_count:
        segment //= 2  # few rows are cut into more segments, so that every SM has one
    elif row.vectors <= whole and row.aligned:
        segment = whole
    segments = -(-row.touched // segment)
    return MapConfig("segments", threads, threads, align_vectors=row.align_vectors, segments=segments)


def filled(problem: Problem) -> MapConfig:
    """The config of a kernel that reads no rows. A CTA that wrote little would end before the next starts."""
    if problem.n is None:
        return mapped(problem)
    row = row_of(problem)
    if row.vectors > CTA_VECTORS:
        return mapped(problem, WHOLE_FILLED_ROW)
    if PAIRED_FILLED_ROW < row.vectors <= TWO_VECTORS_ROW and row.aligned:
        share = threads_for(row.vectors, 6)
        return MapConfig("rows", 2 * share, share, align_vectors=row.align_vectors)
    share = _mapped_threads(row)
    return MapConfig("rows", max(256, share), share, align_vectors=row.align_vectors)


def _mapped_threads(row: RowProblem) -> int:
    """Threads of a row that one CTA holds. Those of short unaligned rows have several vectors: fewer have none."""
    short = not row.aligned and SHORTEST_ROW < row.vectors <= WARP
    return threads_for(row.vectors, SHORT_PER_THREAD) if short else row_threads(row)


def _reduce_space(problem: Problem, flat: Config) -> Iterator[ReduceConfig]:
    """Other CTAs and threads per row, and CTAs per SM. In two passes only the latter, which do not change bits: there
    the heuristic looks at the number of rows.
    """
    config, row = ReduceConfig.of(flat), row_of(problem)
    if config.form == "two_pass":
        if config.resident > 1:
            yield from vary_resident(config)
    elif config.form == "smem" or row.vectors > CTA_VECTORS:
        yield from vary_cluster(row, config, (4, 6, 8) if config.form == "smem" else (2, 3, 4))
        yield from vary_resident(config)
    else:
        yield from vary_threads(row, config)


def _map_space(problem: Problem, flat: Config) -> Iterator[MapConfig]:
    config = MapConfig.of(flat)
    if config.form == "rows":
        yield from vary_threads(row_of(problem), config)
    elif config.form == "segments":
        for threads in (128, 256, 512):
            for segments in dict.fromkeys((max(config.segments // 2, 1), config.segments, 2 * config.segments)):
                yield replace(config, threads=threads, threads_per_row=threads, segments=segments)


def _reduce_needs(problem: Problem, flat: Config) -> Needs:
    return needs_of(problem, ReduceConfig.of(flat))


def _map_needs(problem: Problem, flat: Config) -> Needs:
    config = MapConfig.of(flat)
    return needs_of(problem, config, config.segments)


REDUCE = Space(_reduce_space, _reduce_needs)
MAP = Space(_map_space, _map_needs)


def scale(problem: Problem) -> ScaleConfig:
    """Persistent CTAs, because starting a CTA takes longer than seeing that a block needs no scaling."""
    return ScaleConfig(threads=256, unroll=4, ctas=SCALE_CTAS * problem.sm_count)
