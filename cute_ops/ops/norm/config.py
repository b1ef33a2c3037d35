"""How the norms' kernels are configured: heuristics, their search space and the workspace of a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from cute_ops.config import Config, Needs, Problem, Space
from cute_ops.hardware import WARP
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.ops.rows import (
    CTA_VECTORS,
    LEAST_REGISTERS,
    LINE_VECTORS,
    LONG_ROW,
    SMEM_VECTORS,
    VECTOR_BYTES,
    WIDEST_VECTOR,
    Ladder,
    Row,
    bytes_of,
    cluster_for,
    needs_in_registers,
    needs_in_smem,
    next_power,
    resident_clusters,
    row_of,
    row_threads,
    spread_in_smem,
    step,
    threads_for,
    threads_of_pairs,
    vary_cluster,
    vary_resident,
    vary_threads,
)  # fmt: skip
from cute_ops.shapes import ITEMSIZE, Array

# Threads of a CTA that reads a row twice: of unknown length, and of one that is too long for all else.
TWO_PASS_THREADS, TWO_PASS_LONG_THREADS = 512, 1024
COLUMNS = ("weight", "bias")

# --- forward

# Aligned rows of a layer norm wait in shared memory from so many vectors on; up to these bounds a CTA takes so many of
# them: four to a thread as far as clusters of 4 reach, since of few rows more SMs share the work.
CENTRED_SMEM_VECTORS = 512
CENTRED_SMEM_SPAN: Ladder[int] = ((4 * 2048, 2048), (math.inf, SMEM_VECTORS))
# Other rows wait in shared memory where they have more vectors than this, by whether they are aligned; with a residual
# a CTA takes fewer of them.
SMEM_FROM = {True: 8192, False: 4096}
SMEM_SPAN_OF_SUM = 1024
# Vectors of a row of which a CTA has four rows to a thread: it would be over before the next one has started.
TINY_ROW = 8
# Vectors of a row off a vector, of two inputs, up to which each has a thread of its own.
SHIFTED_PAIRS = 768
# Vectors of a row, up to which two CTAs share it in registers, and those of a CTA beyond them.
PAIR_VECTORS, REGISTER_VECTORS, MOST_REGISTER_VECTORS = 2048, 2048, 4096
# Threads of an SM whose registers hold long rows, and where a thread holds more than a row of one input's dtype.
REGISTER_SM_THREADS, REGISTER_SM_THREADS_WIDE = 1536, 1024
# Vectors of a row that a persistent CTA holds the weight and the bias of.
PERSISTENT_VECTORS = 3200


def forward(problem: Problem, centred: bool = False) -> NormConfig:
    """The config of a forward.

    Args:
        problem: the problem.
        centred: the row's mean is subtracted, which takes more instructions per thread and more registers.
    """
    if problem.n is None:
        return NormConfig("two_pass", TWO_PASS_THREADS)
    row = row_of(problem)
    if centred and row.vectors > CENTRED_SMEM_VECTORS and row.aligned:
        # Twice its threads meet before a row is written: in shared memory, of which more rows find room meanwhile.
        found = _in_smem(problem, row, row.vectors, step(CENTRED_SMEM_SPAN, row.vectors), full=True, shallow=True)
        if found:
            return found
    if row.vectors <= CTA_VECTORS:
        return _centred_row(problem, row) if centred and row.vectors > WARP else _row(problem, row, centred)
    return _long_row(problem, row, centred)


def _centred_row(problem: Problem, row: Row) -> NormConfig:
    """A layer norm's row in one CTA, longer than a warp's."""
    if not row.aligned:
        return _persistent(problem, row, cluster=1, per_thread=6, threads=128)
    share = WARP if row.vectors <= 5 * WARP else threads_for(row.vectors, 4)
    return NormConfig(
        "one_pass", max(128, share), share, align_vectors=row.align_vectors, delay_weight_load=True
    )  # fmt: skip


def _row(problem: Problem, row: Row, centred: bool) -> NormConfig:
    """A row in one CTA."""
    pair, share = "residual" in problem.dtypes, row_threads(row)
    if pair and row.aligned and row.vectors > WARP:
        threads, share = threads_of_pairs(row.vectors, 512)
        return NormConfig("one_pass", threads, share, align_vectors=row.align_vectors)
    if pair and not row.aligned and row.n >= LONG_ROW and row.vectors + row.align_vectors <= SHIFTED_PAIRS:
        share = threads_for(row.vectors + row.align_vectors, 1)
    tiny = row.vectors <= TINY_ROW and row.aligned
    return NormConfig(
        "one_pass", max(128 if tiny or row.vectors > WARP else 256, share), share, align_vectors=row.align_vectors,
        unroll=4 if tiny else 1,
        delay_weight_load=TINY_ROW < row.vectors <= WARP and row.aligned and not (pair or centred),
    )  # fmt: skip


def _long_row(problem: Problem, row: Row, centred: bool) -> NormConfig:
    """A row that one CTA's registers do not hold in float32."""
    pair, touched = "residual" in problem.dtypes, row.vectors + row.align_vectors
    weights_fit = SMEM_FROM[False] < touched <= 2 * PERSISTENT_VECTORS
    if centred and not row.aligned and weights_fit and row.max_cluster > 1:
        return _persistent(problem, row, cluster=2, per_thread=5, threads=640)
    if row.vectors > SMEM_FROM[row.aligned]:
        full = not (row.aligned or centred or pair)
        span = SMEM_SPAN_OF_SUM if pair and row.aligned else SMEM_VECTORS
        found = _in_smem(problem, row, row.touched, span, full=full, shallow=full)
        if found:
            return found
    # Few rows want four CTAs; many mind, unless a warp for each of an SM's four schedulers holds its part to the full.
    halves = row.vectors <= PAIR_VECTORS and row.aligned and not (centred or pair)
    span = REGISTER_VECTORS if not halves else 1024 if row.vectors % (4 * 512) else 512
    cluster = cluster_for(row.vectors, span, row.max_cluster)
    part = -(-row.vectors // cluster)
    if part > MOST_REGISTER_VECTORS:
        return NormConfig("two_pass", TWO_PASS_LONG_THREADS)
    return _in_registers(problem, row, cluster, threads_for(part, 4), centred, halves)


def _in_registers(
    problem: Problem, row: Row, cluster: int, threads: int, centred: bool, halves: bool
) -> NormConfig:  # fmt: skip
    """A long row in registers, in its own dtype."""
    # Two inputs of 16 bits each, widened to add them, need more registers than three CTAs leave.
    both = [ITEMSIZE[problem.dtypes[name]] for name in ("x", "residual") if name in problem.dtypes]
    narrow_sum = len(both) == 2 and max(both) == 2
    sm_threads = REGISTER_SM_THREADS_WIDE if narrow_sum or centred or halves else REGISTER_SM_THREADS
    resident = 1 if row.max_cluster == 1 else 2 if cluster == 1 else max(1, sm_threads // threads)
    # A weight of no more bytes than a vector has room beside one input and, where as many threads have no more
    # registers anyway, beside two of 16 bits; unless masks take it, as of float16, which is widened in pairs.
    whole = row.vectors == 4 * threads * cluster and row.aligned
    room = (halves and (whole or problem.dtypes["x"] != "float16")) or (
        narrow_sum and whole and resident * threads == sm_threads
    )
    return NormConfig(
        "one_pass", threads, threads, cluster, resident, row.align_vectors, keep_dtype=True,
        delay_weight_load=not room or _column_bytes(problem, row) > VECTOR_BYTES,
    )  # fmt: skip


def _in_smem(problem: Problem, row: Row, vectors: int, span: int, *, full: bool, shallow: bool) -> NormConfig | None:
    spread = spread_in_smem(row, vectors, bytes_of(problem, ("x", "residual")), span, full=full, shallow=shallow)
    if spread is None:
        return None
    # Registers for all of a thread's weight at once, while the row loads.
    room = spread.resident * spread.threads <= 1024 + 2 * WARP and _column_bytes(problem, row) <= VECTOR_BYTES
    return NormConfig("smem", *spread, row.align_vectors, delay_weight_load=not room)


def _persistent(problem: Problem, row: Row, cluster: int, per_thread: int, threads: int) -> NormConfig:
    """Rows off a vector whose weights stay in registers from row to row."""
    share = threads_for(-(-(row.vectors + row.align_vectors) // cluster), per_thread, threads)
    rows = max(threads // share, 1)
    slot = rows * share * per_thread * VECTOR_BYTES
    stages = 2 if cluster == 1 or 3 * slot + 4096 > row.ring_bytes else 3
    resident = max(1, min(512 // threads, 160_000 // (stages * slot)))
    # A CTA alone meets rows that start at one place of a line only; a cluster's are sorted by it.
    period = WIDEST_VECTOR * row.align_vectors
    clusters = resident_clusters(problem, cluster) * resident
    return NormConfig(
        "persistent", rows * share, share, cluster, resident, row.align_vectors, stages=stages,
        clusters=max(clusters // period, 1) * period, sort_period=period if cluster > 1 else 0,
    )  # fmt: skip


def _column_bytes(problem: Problem, row: Row) -> int:
    """Bytes of the weight and the bias beside a vector of a row."""
    return bytes_of(problem, COLUMNS) * row.vector_elements


# --- backward

INPUTS = ("x", "residual_out", "dout", "dresidual_out")
# Bytes of rows that each CTA of a cluster takes alone; from there on more CTAs and a second kernel are faster.
FEW_BYTES = 36_864
# Shared memory that `few_rows` needs beside the rows, for the column sums and the rows' terms; what `overlapped` and
# persistent CTAs need.
FEW_RESERVED, OVERLAPPED_RESERVED, PERSISTENT_RESERVED = 48 * 1024, 8 * 1024, 2048
# Rows side by side, and rows of a thread, in the second kernel; bytes of rows up to which reading them twice has been
# seen to pay.
OVERLAPPED_ROWS, OVERLAPPED_DEPTH, OVERLAPPED_BYTES = 64, 8, 5 << 20
# Vectors of a row up to which the start of rows off a vector is rounded down to a line's, whatever their number.
LINES_FOR_FEW = 2048
# Vectors of a CTA of a large cluster: where two columns are summed, and otherwise by whether rows are aligned.
SPAN_OF_TWO_SUMS, SPAN = 1600, {True: 1024, False: 2048}
# A thread's vectors, and the threads of an SM that have registers for their column sums, by the vectors of a CTA: of
# rows off a vector in one CTA or two, of two CTAs' rows that one could hold, and of all others.
SHIFTED: Ladder[tuple[int, int]] = ((512, (1, 1152)), (1024, (2, 640)))
HALVES: Ladder[tuple[int, int]] = ((256, (1, 768)), (512, (2, 576)))
NARROW_CTA: Ladder[tuple[int, int]] = ((384, (1, 1024)), (768, (2, 800)), (math.inf, (4, 512)))
WIDE_CTA: Ladder[tuple[int, int]] = ((384, (1, 1024)), (768, (2, 800)), (math.inf, (2, 512)))
CLUSTERED: Ladder[tuple[int, int]] = ((384, (1, 1024)), (1024, (2, 800)), (math.inf, (4, 800)))
# The same threads where two columns are summed: of many columns a thread, of rows off a vector, of others.
MANY_COLUMNS_THREADS, SHIFTED_SUMS_THREADS, SUMS_THREADS = 768, 576, 384
# Warps that have registers for five vectors' two column sums each.
BALANCED_VECTORS, BALANCED_WARPS = 5, 12
SCHEDULERS = 4  # of an SM


def backward(problem: Problem, centred: bool = False) -> NormConfig:
    """The config of a backward; arguments as those of :func:`forward`."""
    two_pass = NormConfig("two_pass", TWO_PASS_THREADS, clusters=2 * problem.sm_count)
    if problem.n is None:
        return two_pass
    row, row_bytes = row_of(problem), problem.n * bytes_of(problem, INPUTS)
    few = _few_rows(problem, row, row_bytes) or _overlapped(problem, row, row_bytes)
    return few or _persistent_backward(problem, row, row_bytes, centred) or two_pass


def _persistent_backward(problem: Problem, row: Row, row_bytes: int, centred: bool) -> NormConfig | None:
    """Persistent clusters with column sums in registers; None for rows that are too long."""
    # Registers for the column sums of so many vectors leave room for so many threads on an SM.
    sums = max(sum(name in problem.dtypes for name in ("dweight", "dbias")), 1)
    lines = row.vectors <= LINES_FOR_FEW or problem.m >= LONG_ROW
    align = row.align_vectors if lines else 1
    cluster = _backward_cluster(row, row.vectors + (0 if row.aligned else align), sums)
    part = -(-(row.vectors + (0 if row.aligned else align)) // cluster)
    per_thread, sm_threads = _vectors_of_a_thread(row, part, cluster, sums, centred)
    share = threads_for(part, per_thread, 512 if per_thread > 1 else 1024)
    balanced = cluster > 2 and sums == 2 and not row.aligned
    if balanced:
        # Every other place where rows may start, and half as many sums to begin and store.
        share, align = _balanced_threads(part), min(align, LINE_VECTORS // 2)
    threads = share if cluster > 1 else max(256, share) if sums == 1 else max(256 // share, 1) * share
    sm_threads = sm_threads * 2 // (1 + sums)
    slot = -(-row_bytes // cluster) * (threads // share) + 64 * VECTOR_BYTES
    if balanced:
        slot = share * -(-(part + WARP - 1) // share) * -(-row_bytes // row.vectors)
    if part > max(4, per_thread) * share or 2 * slot > row.ring_bytes:
        return None
    deeper = cluster > 1 and (row.vectors > CTA_VECTORS or (cluster == 2 and part <= 256))
    if "dresidual_out" in problem.dtypes and not row.aligned and cluster == 1 and 512 < part <= CTA_VECTORS:
        deeper, sm_threads = True, threads  # one CTA, whose rows of three inputs are on their way longer
    stages = 3 if deeper and 3 * slot <= row.ring_bytes else 2
    resident = max(1, min(row.ring_bytes // (stages * slot + PERSISTENT_RESERVED), sm_threads // threads))
    # So few clusters that no multiple of the places where rows may start fills the chip. Few rows have few places.
    sort_period = WIDEST_VECTOR * align if not row.aligned and cluster > 2 else 0
    return NormConfig(
        "persistent", threads, share, cluster, resident, align, stages=stages,
        clusters=resident_clusters(problem, cluster) * resident, sort_period=sort_period, balanced=balanced,
    )  # fmt: skip


def _backward_cluster(row: Row, touched: int, sums: int) -> int:
    """CTAs of a row: two vectors per thread as far as clusters of 4 reach, then four."""
    if row.vectors > CTA_VECTORS:
        span = SPAN_OF_TWO_SUMS if sums == 2 else SPAN[row.aligned]
        small = min(4, cluster_for(touched, CTA_VECTORS, row.max_cluster))
        return max(small, cluster_for(touched, span, row.max_cluster))
    # Two small CTAs in place of a large one: as many bytes are on their way in fewer rows.
    pair = row.vectors >= 512 and sums == 1 and row.itemsize < 4 and row.aligned
    return min(2, row.max_cluster) if pair else 1


def _vectors_of_a_thread(row: Row, part: int, cluster: int, sums: int, centred: bool) -> tuple[int, int]:
    """Vectors of a thread, and threads of an SM whose registers hold one column's sums."""
    if row.vectors > WARP and (sums == 2 or (centred and not row.aligned)):
        # Many columns per thread: what two column sums cost in threads, fewer partial sums of a row give back.
        short = row.vectors <= 5 * WARP
        per_thread = -(-row.vectors // WARP) if short else 3 if not row.aligned and cluster == 1 else 4
        many = not short if row.itemsize == 4 else row.n <= 12 * WARP
        threads = MANY_COLUMNS_THREADS if many else SUMS_THREADS if row.aligned else SHIFTED_SUMS_THREADS
    elif not row.aligned and part <= 1024 and cluster <= 2:
        per_thread, threads = step(SHIFTED, part)
    elif row.vectors <= CTA_VECTORS and cluster == 2:
        per_thread, threads = step(HALVES, part)
    else:
        per_thread, threads = step(CLUSTERED if cluster > 1 else WIDE_CTA if row.itemsize == 4 else NARROW_CTA, part)
    if per_thread == 4:
        # The fewest vectors for the busiest of an SM's schedulers.
        per_thread = min((4, 5), key=lambda k: -(-threads_for(part, k, 512) // (SCHEDULERS * WARP)) * k)
    return per_thread, threads


def _balanced_threads(part: int) -> int:
    """Threads of a CTA that holds so many vectors, up to five to a thread, whose registers for two column sums of them
    leave room for twelve warps: those of which the busiest of an SM's schedulers has the fewest vectors.
    """
    together = -(-part // WARP)

    def busiest(warps: int) -> int:
        return sum(together // warps + (w < together % warps) for w in range(0, warps, SCHEDULERS))

    least = min(-(-together // BALANCED_VECTORS), BALANCED_WARPS)
    return WARP * min(range(BALANCED_WARPS, least - 1, -1), key=busiest)


def _few_rows(problem: Problem, row: Row, row_bytes: int) -> NormConfig | None:
    """So few rows that every cluster takes them all; None where they are more, or start off a vector.

    It looks at the number of rows in powers of two.
    """
    cluster = cluster_for(row.vectors, WARP, row.max_cluster)
    if problem.m * row_bytes > cluster * FEW_BYTES or not row.aligned:
        return None
    share = threads_for(-(-row.vectors // cluster), 1)
    rows = min(1024 // share, next_power(problem.m))
    stages = next_power(-(-problem.m // rows))
    part = share * -(-row.vectors // (cluster * share))
    if stages * rows * (part * -(-row_bytes // row.vectors) + 8) > row.ring_bytes - FEW_RESERVED:
        return None
    # As many clusters of the largest size as surely find room.
    replicas = min(4 * row.max_cluster // cluster, 16, share)
    return NormConfig("few_rows", rows * share, share, cluster, stages=stages, replicas=replicas)


def _overlapped(problem: Problem, row: Row, row_bytes: int) -> NormConfig | None:
    """Rows that a second kernel's threads hold in registers; None where they are more or off a vector.

    It looks at the number of rows in powers of two.
    """
    count = next_power(problem.m)
    column_threads = min(count, OVERLAPPED_ROWS)
    depth = count // column_threads
    if depth > OVERLAPPED_DEPTH or problem.m * row_bytes > OVERLAPPED_BYTES or not row.aligned:
        return None
    cluster = cluster_for(row.vectors, 512, min(row.max_cluster, 8))
    share = threads_for(-(-row.vectors // cluster), 1)
    rows = max(128 // share, 1)
    part = share * -(-row.vectors // (cluster * share))
    if 2 * rows * part * -(-row_bytes // row.vectors) > row.ring_bytes - OVERLAPPED_RESERVED:
        return None
    return NormConfig(
        "overlapped", rows * share, share, cluster, stages=2, column_threads=column_threads, rows_per_thread=depth
    )


def workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Partial weight gradients, one row per persistent CTA, or each row's mean and rstd: for the second kernel."""
    config = NormConfig.of(flat)
    summed = config.form in ("persistent", "two_pass")
    shape = (_partial_sums(problem, config) if summed else 0, problem.dims["n"])
    present = {d: d in problem.dtypes and summed for d in ("dweight", "dbias")}
    parts = {f"{d}_parts": Array(shape, "float32") if here else None for d, here in present.items()}
    terms = config.form == "overlapped" and "dweight" in problem.dtypes
    return parts | {"terms": Array((problem.m, 2), "float32") if terms else None}


def _partial_sums(problem: Problem, config: NormConfig) -> int:
    """Persistent clusters, as many as fit the chip at once or have rows to work on."""
    rows = config.threads // config.threads_per_row if config.threads_per_row else 1
    groups = -(-problem.m // rows)
    # Four steps each before there are more of them than SMs, and no more of them than that many steps need.
    clusters = min(config.clusters, max(-(-groups // 4), min(groups, problem.sm_count)))
    clusters = -(-groups // -(-groups // clusters))
    if config.sort_period:
        # A walk for every cluster and one more wherever a cluster goes on to the next remainder.
        return clusters + config.sort_period - 1
    if not row_of(problem).aligned:
        # A cluster meets rows that start at one place of a line only.
        period = WIDEST_VECTOR * config.align_vectors
        clusters = period * max(min(-(-clusters // period), config.clusters // period), 1)
    return clusters


# --- search space


def _forward_space(problem: Problem, flat: Config) -> Iterator[NormConfig]:
    """The heuristic's form, its row spread otherwise over threads and CTAs, more or fewer of these on an SM."""
    config, row = NormConfig.of(flat), row_of(problem)
    if config.form in ("two_pass", "persistent"):
        return
    if config.form == "smem" or config.keep_dtype:
        yield from vary_cluster(row, config, (4, 6, 8) if config.form == "smem" else (2, 4))
        yield from vary_resident(config)
    else:
        yield from vary_threads(row, config)
        if config.threads_per_row > WARP:
            yield from vary_resident(config)
        for unroll in (1, 2, 4) if config.threads_per_row <= WARP else ():
            yield replace(config, unroll=unroll)
    yield replace(config, delay_weight_load=not config.delay_weight_load)


def _backward_space(problem: Problem, flat: Config) -> Iterator[NormConfig]:
    """Of persistent clusters, whose number follows from those that an SM holds."""
    config, row = NormConfig.of(flat), row_of(problem)
    if config.form != "persistent":
        return
    one = config.clusters // config.resident
    for stages in (2, 3, 4):
        for resident in range(max(config.resident - 1, 1), config.resident + 3):
            yield replace(config, stages=stages, resident=resident, clusters=one * resident)
    # Rows that are sorted by where they start want the cluster that they were sorted for.
    for ctas in (
        (config.cluster // 2, config.cluster, 2 * config.cluster) if not config.sort_period else (config.cluster,)
    ):
        if not 1 <= ctas <= row.max_cluster:
            continue
        for k in (1, 2, 4):
            share = threads_for(-(-row.touched_at_most // ctas), k)
            # Clusters take one row at a time.
            threads = max(256 // share, 1) * share if ctas == 1 else share
            resident = max(1, config.resident * config.threads // threads)
            yield replace(
                config, threads=threads, threads_per_row=share, cluster=ctas, resident=resident,
                clusters=resident_clusters(problem, ctas) * resident,
            )  # fmt: skip


def needs(problem: Problem, flat: Config) -> Needs:
    """What a config surely takes of an SM."""
    config = NormConfig.of(flat)
    if config.form in ("two_pass", "few_rows"):
        return Needs(config.threads, LEAST_REGISTERS, resident=config.resident)
    if config.form == "one_pass":
        return needs_in_registers(problem, config, config.cluster)
    if config.form == "smem":
        return needs_in_smem(problem, config)
    row, sums = row_of(problem), sum(name in problem.dtypes for name in ("dweight", "dbias"))
    per_thread = -(-row.vectors // (config.threads_per_row * config.cluster))
    return needs_in_smem(problem, config, config.stages, per_thread * row.vector_elements * sums)


FORWARD = Space(_forward_space, needs)
BACKWARD = Space(_backward_space, needs, by_rows=True)
