"""How the norms' kernels are configured: heuristics, their search space and the workspace of a gradient.

Lengths are in 16-byte vectors unless a name says otherwise. Rows are unaligned where they do not all start on a vector.
The bounds were measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cute_ops.declaration.config import POWERS, Config, Needs, Problem, Space
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import ARCHES, VECTOR_BYTES, WARP, occupancy
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.ops.rows import (
    CTA_VECTORS,
    LEAST_REGISTERS,
    LINE_VECTORS,
    LONG_ROW,
    SHORTEST_ROW,
    SMEM_VECTORS,
    TENSORS,
    TWO_PASS_LONG_THREADS,
    TWO_PASS_THREADS,
    Ladder,
    RowProblem,
    are_contiguous,
    bytes_of,
    cluster_for,
    in_step,
    needs_in_smem,
    needs_of,
    next_power,
    of_scheduler,
    period_of,
    reduced_row_threads,
    resident_clusters,
    row_of,
    spread_in_smem,
    step,
    threads_for,
    threads_of_pairs,
    uneven_share,
    vary_cluster,
    vary_resident,
    vary_threads,
)

COLUMNS = ("weight", "bias")

# --- forward

# Layer norm keeps aligned rows of more than CENTRED_SMEM_VECTORS in shared memory. Of these, rows of up to 4 * 2048 are
# split into CTAs of 2048: when rows are few, a cluster of up to 4 puts more SMs to work. Longer rows fill CTAs.
CENTRED_SMEM_VECTORS = 512
CENTRED_SMEM_SPAN: Ladder[int] = ((4 * 2048, 2048), (math.inf, SMEM_VECTORS))
# Other norms keep longer rows than this in shared memory, by whether rows are aligned. With a residual, a CTA takes at
# most SMEM_SPAN_OF_SUM of an aligned row, and SMEM_SPAN_OF_WIDE_SUM of an unaligned one with a wide weight.
SMEM_FROM = {True: 8192, False: 4096}
SMEM_SPAN_OF_SUM, SMEM_SPAN_OF_WIDE_SUM = 1024, 1152
# A CTA takes four groups of rows as short as this: with one group it would end before the next CTA has started.
TINY_ROW = 8
# Unaligned rows of two inputs, x and residual, have one thread per vector up to this length.
UNALIGNED_PAIR_VECTORS = 768
# Long rows in registers: aligned rows of one input up to SMALL_CTAS_VECTORS are split into small CTAs. For other rows a
# CTA takes REGISTER_VECTORS, or up to MOST_REGISTER_VECTORS where clusters reach no further.
SMALL_CTAS_VECTORS, REGISTER_VECTORS, MOST_REGISTER_VECTORS = 2048, 2048, 4096
# Vectors of a small CTA: EVEN_SPAN fills the four schedulers of an SM evenly, with four warps of four vectors a thread.
EVEN_SPAN, UNEVEN_SPAN = 512, 1024
# Threads of an SM that hold long rows in registers; fewer where each needs registers for more than its vectors.
REGISTER_SM_THREADS, REGISTER_SM_THREADS_WIDE = 1536, 1024
# Vectors of a thread of a layer norm's unaligned row in a persistent CTA. Registers have room for fewer of rows of more
# than DEEPEST_ROW vectors, and beside weights of 32 bits: 8567 x 6854 took 0.51 of a copy's rate, not 0.88.
CENTRED_VECTORS, FEWER_CENTRED_VECTORS, DEEPEST_ROW = 6, 4, 640
# Threads of an unaligned row of up to a warp's vectors that a layer norm's persistent CTA takes: 412935 x 201 with
# float32 parameters takes 107 us in place of 274. Rows of up to SHORT_CENTRED_ROW vectors take longer so.
SHORT_CENTRED_THREADS, SHORT_CENTRED_ROW = 8, 12
# Form `blocks`: unaligned rows of more than SHORTEST_ROW vectors, of which a thread takes single columns. 416455 x 141
# runs at 0.94 (layer norm) and 0.97 (RMS norm) of a copy's rate, by vectors at 0.68 and 0.69; layer norms of 721
# columns at 0.89, by vectors at 0.79, but of 1001 at 0.80 and 0.85.
# Columns of a thread at most, and of layer norms whose parameters have 16 bits.
BLOCKS_COLUMNS, MOST_BLOCKS_COLUMNS = 18, 23
# Columns of a thread of an RMS norm: 67884 x 865 with a weight of 32 bits runs at 0.94 of a copy's rate, by vectors at
# 0.88, 65609 x 895 with one of 16 bits at 0.94, 0.90. Beyond BLOCKS_COLUMNS a CTA loads RMS_UNROLL groups of rows at
# once.
RMS_BLOCKS_COLUMNS, RMS_UNROLL = 28, 2
# Up to so many columns of a thread an SM has eight CTAs, then six. In float32 only layer norms take this form, up to
# these: 203 columns run at 0.95, by vectors at 0.83; RMS norms gain nothing.
FEW_BLOCKS_COLUMNS = 13
# Columns of a thread of an RMS norm's row, as far as a warp suffices. Layer norms, whose sums take most, have the
# fewest threads that hold a row.
BLOCKS_LEAST = 4
# Threads of a CTA, and groups of rows that it loads at once by the bytes of an element.
BLOCKS_THREADS, BLOCKS_UNROLL = 128, {2: 4, 4: 2}
# Vectors of a row whose weight and bias the registers of one persistent CTA hold.
PERSISTENT_VECTORS = 3200
# A layer norm's longer unaligned rows, which two persistent CTAs share: by the vectors that they touch, those of a
# thread, and slots of the ring. 6523 x 9001 runs at 0.86 of a copy's rate, in the registers of one CTA at 0.60;
# 3775 x 15555 at 0.86, at 0.40; 2113 x 27777 at 0.83, at 0.66. With a residual only rows that touch more vectors than
# PAIR_HALVED_FROM, or whose weight and bias have 32 bits: 1398 x 21001 runs at 0.86, in shared memory at 0.72.
# HALVED_SM_THREADS: threads of an SM without a residual and with 16 bits.
HALVED_CENTRED: Ladder[tuple[int, int]] = ((1664, (3, 2)), (4096, (4, 2)), (math.inf, (5, 3)))
PAIR_HALVED_FROM, HALVED_SM_THREADS = 2048, 576
# Still longer ones, aligned or not, are shared by four, with so many vectors of a thread: 615 x 95430 runs at 0.78 of a
# copy's rate, in shared memory at 0.74, 956 x 61387 at 0.74, 0.65, 703 x 83424 at 0.83, 0.76.
QUARTERED_VECTORS = 8
# Aligned rows of norms without a mean and with a weight of 32 bits that one CTA's shared memory holds, up to this
# length: 5303 x 11072 runs at 0.92 of a copy's rate, in the registers of two at 0.88; 2364 x 24832 at 0.89, 0.875.
WIDE_SMEM_VECTORS = PERSISTENT_VECTORS
# Longer rows whose weight and bias take more than 16 bytes beside a vector: a cluster reads these once, not from L2 for
# each row. By these bytes: from how many vectors on, and vectors of a thread. By whether rows are aligned: threads that
# registers have room for, and slots of the ring.
WIDE_COLUMNS: Ladder[tuple[int, int]] = ((2 * VECTOR_BYTES, (4 * PERSISTENT_VECTORS, 5)), (math.inf, (4096, 3)))
WIDE_THREADS, WIDE_STAGES = {True: 704, False: 512}, {True: 5, False: 3}
# Rows for which eight CTAs would be needed take sixteen, two to an SM, if these have at most so many threads. By
# whether rows are aligned: vectors of a thread. 440 x 133448 runs at 0.845 of a copy's rate, by eight CTAs at 0.77;
# 404 x 145298 at 0.84, from the start of a sector, at 0.79. With a narrow weight sixteen gain 2 to 8% or lose 3 to 5%
# beside eight with the row in shared memory, by length.
WIDE_SIXTEEN_THREADS, WIDE_SIXTEEN_VECTORS = 288, {True: 5, False: 4}
# Threads of an SM that persistent CTAs of a forward take, and bytes that a CTA needs beside its rows, for sums.
FORWARD_SM_THREADS, FORWARD_RESERVED = 512, 4096


def forward(problem: Problem, centred: bool = False) -> NormConfig:
    """The config of a forward. Where it is ``centred``, by subtracting the row's mean as in layer norm, that takes more
    instructions and registers.
    """
    if problem.n is None:
        return NormConfig("two_pass", TWO_PASS_THREADS)
    row = row_of(problem)
    if row.vectors > PERSISTENT_VECTORS and (found := _persistent_wide(problem, row, centred)):
        return found
    if centred and row.vectors > CENTRED_SMEM_VECTORS and row.aligned:
        # Threads exchange sums twice per row, for the mean and for the variance. Shared memory has room for other rows
        # that load meanwhile.
        found = _in_smem(problem, row, row.vectors, step(CENTRED_SMEM_SPAN, row.vectors), full=True)
        if found:
            return found
    if row.n <= WARP * RMS_BLOCKS_COLUMNS and _goes_in_blocks(problem, row, centred):
        return _blocks(row, centred)
    if row.vectors <= CTA_VECTORS:
        several = row.vectors > (WARP if row.aligned or "residual" in problem.dtypes else SHORT_CENTRED_ROW)
        if centred and several:
            return _centred_row(problem, row)
        return _uneven_row(problem, row, centred) or _row(problem, row, centred)
    return _long_row(problem, row, centred)


def _centred_row(problem: Problem, row: RowProblem) -> NormConfig:
    """A layer norm's row of more than a warp's vectors, in one CTA; an unaligned one of a few vectors, too."""
    found = None
    if not row.aligned and row.vectors <= WARP:
        per_thread = -(-(row.vectors + row.align_vectors) // SHORT_CENTRED_THREADS)
        found = _persistent(problem, row, cluster=1, per_thread=per_thread, threads=128)
        if found and _column_bytes(problem, row) <= 2 * VECTOR_BYTES:
            found = replace(found, stages=3)  # of 416455 x 141: 0.68 of a copy's rate, by two 0.63
    elif not row.aligned:
        touched, wide = row.vectors + row.align_vectors, _column_bytes(problem, row) > 2 * VECTOR_BYTES
        per_thread = FEWER_CENTRED_VECTORS if wide or touched > DEEPEST_ROW else CENTRED_VECTORS
        threads = max(threads_for(touched, per_thread), 128)
        found = _persistent(problem, row, cluster=1, per_thread=per_thread, threads=threads)
    if found:
        return found
    share = WARP if row.vectors <= 5 * WARP else threads_for(row.vectors, 4)
    return NormConfig("one_pass", max(128, share), share, align_vectors=row.align_vectors, delay_weight_load=True)


def _goes_in_blocks(problem: Problem, row: RowProblem, centred: bool) -> bool:
    """Whether a row is a short one that starts off a vector. Half vectors need no masks, which RMS norms do without.

    Rows that lie apart do not go through shared memory as one piece: in registers they have a config of their own.
    """
    if not are_contiguous(problem, TENSORS) or row.n % row.vector_elements == 0 or row.vectors <= SHORTEST_ROW:
        return False
    halves = row.n % (row.vector_elements // 2) == 0
    if row.itemsize == 4:
        return centred and not halves and row.n <= WARP * FEW_BLOCKS_COLUMNS
    column = bytes_of(problem, COLUMNS)
    most = MOST_BLOCKS_COLUMNS if centred and column <= 4 else BLOCKS_COLUMNS
    if not centred and "residual" not in problem.dtypes:
        most = RMS_BLOCKS_COLUMNS
    return (centred or not halves) and row.n <= WARP * most


def _blocks(row: RowProblem, centred: bool) -> NormConfig:
    """A short unaligned row, which goes through shared memory as whole vectors of all rows of a CTA."""
    columns = BLOCKS_COLUMNS if centred else BLOCKS_LEAST
    share = next((share for share in (8, 16) if row.n <= share * columns and row.itemsize == 2), WARP)
    resident = 8 if row.n <= share * FEW_BLOCKS_COLUMNS else 6 if row.n <= share * BLOCKS_COLUMNS else 5
    unroll = RMS_UNROLL if not centred and row.n > WARP * BLOCKS_COLUMNS else BLOCKS_UNROLL[row.itemsize]
    return NormConfig("blocks", BLOCKS_THREADS, share, resident=resident, unroll=unroll)


def _uneven_row(problem: Problem, row: RowProblem, centred: bool) -> NormConfig | None:
    """A short row of one input whose threads have several vectors: 305834 x 192 takes 0.97 of a copy's rate in a layer
    norm instead of 0.76, 367001 x 160 in an RMS norm 0.98 instead of 0.87. None for other rows.
    """
    if row.n >= WARP * VECTOR_BYTES or "residual" in problem.dtypes:  # a warp's vectors, whatever the dtype
        return None
    share = uneven_share(row)
    if share is None or bytes_of(problem, COLUMNS) > 8:
        return None
    return NormConfig("one_pass", 128, share, unroll=2 if centred else 1, delay_weight_load=not centred)


def _row(problem: Problem, row: RowProblem, centred: bool) -> NormConfig:
    """A row in one CTA."""
    pair = "residual" in problem.dtypes
    share = reduced_row_threads(row, WARP, pair=pair)
    if pair and row.aligned and row.vectors > WARP:
        threads, share = threads_of_pairs(row.vectors, 512)
        return NormConfig("one_pass", threads, share, align_vectors=row.align_vectors)
    if pair and not row.aligned and row.n >= LONG_ROW and row.vectors + row.align_vectors <= UNALIGNED_PAIR_VECTORS:
        share = threads_for(row.vectors + row.align_vectors, 1)
    tiny = row.vectors <= TINY_ROW and row.aligned
    return NormConfig(
        "one_pass", max(128 if tiny or row.vectors > WARP else 256, share), share, align_vectors=row.align_vectors,
        unroll=4 if tiny else 1,
        delay_weight_load=TINY_ROW < row.vectors <= WARP and row.aligned and not (pair or centred),
    )  # fmt: skip


def _long_row(problem: Problem, row: RowProblem, centred: bool) -> NormConfig:
    """A row that one CTA's registers do not hold in float32."""
    pair, touched = "residual" in problem.dtypes, row.vectors + row.align_vectors
    if centred and not row.aligned and (found := _centred_off_a_vector(problem, row, pair, touched)):
        return found
    full = not (row.aligned or centred or pair)
    span = SMEM_SPAN_OF_SUM if pair and row.aligned else SMEM_VECTORS
    wide = pair and not row.aligned and _column_bytes(problem, row) > VECTOR_BYTES
    if wide:
        span = SMEM_SPAN_OF_WIDE_SUM
    if row.vectors > SMEM_FROM[row.aligned] and (
        found := _in_smem(problem, row, row.touched, span, full=full, shallow=wide)
    ):
        return found
    return _clustered(problem, row, centred, pair)


def _quartered(problem: Problem, row: RowProblem) -> NormConfig | None:
    """A layer norm's row of one input that four persistent CTAs share; None for other rows."""
    threads = threads_for(-(-row.touched // 4), QUARTERED_VECTORS)
    fits = 2 * PERSISTENT_VECTORS < row.touched <= 4 * PERSISTENT_VECTORS and row.max_cluster > 2 and threads <= 512
    narrow = row.itemsize == 2 and _column_bytes(problem, row) <= 2 * VECTOR_BYTES
    slot = threads * QUARTERED_VECTORS * VECTOR_BYTES
    if not fits or not narrow or "residual" in problem.dtypes or 2 * slot + FORWARD_RESERVED > row.ring_bytes:
        return None
    config = NormConfig("persistent", threads, threads, 4, align_vectors=LINE_VECTORS, stages=2)
    return _sorted(row, replace(config, clusters=resident_clusters(problem, 4)))


def _centred_off_a_vector(problem: Problem, row: RowProblem, pair: bool, touched: int) -> NormConfig | None:
    """A layer norm's long unaligned row; None where other forms serve it."""
    wide = _column_bytes(problem, row) > 2 * VECTOR_BYTES
    if pair and touched <= PAIR_HALVED_FROM and not wide:  # 2600 x 12245 at 0.85 of a copy's rate, in registers 0.66
        return _in_smem(problem, row, row.touched, SMEM_VECTORS, full=False, shallow=True)
    if touched > 2 * PERSISTENT_VECTORS or row.max_cluster == 1:
        return None
    per_thread, stages = step(HALVED_CENTRED, touched)
    stages = 3 if wide and per_thread > 3 else stages
    threads = threads_for(-(-touched // 2), per_thread, 640)
    found = _persistent(problem, row, cluster=2, per_thread=per_thread, threads=threads, stages=stages)
    resident = max((FORWARD_SM_THREADS if wide or pair else HALVED_SM_THREADS) // threads, 1)
    clusters = in_step(resident_clusters(problem, 2) * resident, row, row.align_vectors)
    return found and _sorted(row, replace(found, resident=resident, clusters=clusters))


def _clustered(problem: Problem, row: RowProblem, centred: bool, pair: bool) -> NormConfig:
    """A long row in the registers of a cluster; read twice if even the largest cluster has too few."""
    if row.vectors <= WIDE_SMEM_VECTORS and row.aligned and not (centred or pair):
        wide = _column_bytes(problem, row) > VECTOR_BYTES
        if wide and (found := _in_smem(problem, row, row.vectors, SMEM_VECTORS, full=True)):
            return found
    # Clusters of four help when rows are few and hurt when they are many, unless each CTA fills its SM's schedulers.
    small_ctas = row.vectors <= SMALL_CTAS_VECTORS and row.aligned and not (centred or pair)
    span = REGISTER_VECTORS if not small_ctas else UNEVEN_SPAN if row.vectors % (4 * EVEN_SPAN) else EVEN_SPAN
    cluster = cluster_for(row.vectors, span, row.max_cluster)
    span = -(-row.vectors // cluster)
    if span > MOST_REGISTER_VECTORS:
        return NormConfig("two_pass", TWO_PASS_LONG_THREADS)
    found = _in_registers(problem, row, cluster, threads_for(span, 4), centred, small_ctas)
    return found if pair else _by_lines(row, found)


def _by_lines(row: RowProblem, found: NormConfig) -> NormConfig:
    """A row of one input in registers, read from the start of a line: 2822 x 20808 runs at 0.945 of a copy's rate in
    place of 0.915; 3914 x 15000, whose weight loads at once, at 0.94 in place of 0.95, and 2445 x 12004 in float32 as
    before. Not where threads would hold one vector more.
    """
    touched = -(-(row.vectors + LINE_VECTORS) // found.cluster)
    gains = row.itemsize < 4 and found.delay_weight_load and touched <= 4 * found.threads
    return replace(found, lines=gains and _starts_in_lines(row))


def _in_registers(
    problem: Problem, row: RowProblem, cluster: int, threads: int, centred: bool, small_ctas: bool
) -> NormConfig:  # fmt: skip
    """A long row in registers, in its own dtype."""
    # Two inputs of 16 bits are widened to be added, which takes more registers than 1536 threads per SM leave.
    both = [ITEMSIZE[problem.dtypes[name]] for name in ("x", "residual") if name in problem.dtypes]
    narrow_sum = len(both) == 2 and max(both) == 2
    wide = narrow_sum or centred or small_ctas or (len(both) == 2 and not row.aligned)
    sm_threads = REGISTER_SM_THREADS_WIDE if wide else REGISTER_SM_THREADS
    resident = 1 if row.max_cluster == 1 else 2 if cluster == 1 else sm_threads // threads
    # The weight loads before the row's sum is known where registers have room for it: at most 16 bytes beside each
    # vector of one input, or of two 16-bit inputs if CTAs fill an SM to sm_threads. Masks take that room from two
    # inputs, and from float16, which is widened in pairs.
    unmasked = row.vectors == 4 * threads * cluster and row.aligned
    room = (small_ctas and (unmasked or problem.dtypes["x"] != "float16")) or (
        narrow_sum and unmasked and resident * threads == sm_threads
    )
    return NormConfig(
        "one_pass", threads, threads, cluster, resident, row.align_vectors, keep_dtype=True,
        delay_weight_load=not room or _column_bytes(problem, row) > VECTOR_BYTES,
    )  # fmt: skip


def _in_smem(
    problem: Problem, row: RowProblem, vectors: int, span: int, *, full: bool, shallow: bool = False
) -> NormConfig | None:
    row_bytes = bytes_of(problem, ("x", "residual"))
    lines = _starts_in_lines(row)
    vectors += LINE_VECTORS if lines else 0
    spread = spread_in_smem(row, vectors, row_bytes, span, full=full, shallow=full or shallow)
    if spread is None:
        return None
    # With at most 1088 threads per SM, registers have room for the weight (16 bytes per vector) while the row loads.
    room = spread.resident * spread.threads <= 1024 + 2 * WARP and _column_bytes(problem, row) <= VECTOR_BYTES
    return NormConfig("smem", *spread, row.align_vectors, lines=lines, delay_weight_load=not room)


def _persistent(
    problem: Problem, row: RowProblem, cluster: int, per_thread: int, threads: int, stages: int = 3
) -> NormConfig | None:
    """Unaligned rows, whose weight and bias stay in registers from row to row; None without room for two of them.

    ``stages``: slots of a cluster's ring, if there is room.
    """
    share = threads_for(-(-(row.vectors + row.align_vectors) // cluster), per_thread, threads)
    rows = threads // share
    slot = rows * share * per_thread * row.vector_elements * bytes_of(problem, ("x", "residual"))
    stages = 2 if cluster == 1 or 3 * slot + FORWARD_RESERVED > row.ring_bytes else stages
    if stages * slot + FORWARD_RESERVED > row.ring_bytes:
        return None
    resident = max(1, FORWARD_SM_THREADS // threads)
    # A thread keeps its columns as long as rows start at the same offset in a cache line: so do all of a cluster's.
    clusters = in_step(resident_clusters(problem, cluster) * resident, row, row.align_vectors)
    return NormConfig(
        "persistent", rows * share, share, cluster, resident, row.align_vectors, stages=stages, clusters=clusters
    )


def _persistent_wide(problem: Problem, row: RowProblem, centred: bool) -> NormConfig | None:
    """Long rows with wide weights, which stay in registers from row to row; None for other rows, or without room."""
    if centred and (found := _quartered(problem, row)):
        return found
    columns, most = _column_bytes(problem, row), WIDE_THREADS[row.aligned]
    least, per_thread = step(WIDE_COLUMNS, columns)
    if columns <= VECTOR_BYTES or row.vectors <= (least if row.aligned else max(least, 2 * PERSISTENT_VECTORS)):
        return None
    cluster = cluster_for(row.vectors + 1, per_thread * most, row.max_cluster)
    if cluster == 8 and row.max_cluster > cluster and (found := _persistent_sixteen(problem, row)):
        return found
    span = -(-(row.vectors + 1) // cluster)
    threads = threads_for(span, per_thread, most)
    slot = threads * per_thread * row.vector_elements * bytes_of(problem, ("x", "residual"))
    stages = min(WIDE_STAGES[row.aligned], (row.ring_bytes - FORWARD_RESERVED) // slot)
    if span > per_thread * threads or stages < 2:
        return None
    # Rows begin on vectors, not on lines: they then start at few places, whose rows follow each other.
    config = NormConfig("persistent", threads, threads, cluster, stages=stages)
    return _sorted(row, replace(config, clusters=resident_clusters(problem, cluster)))


def _persistent_sixteen(problem: Problem, row: RowProblem) -> NormConfig | None:
    """Long rows with a wide weight by sixteen CTAs, two to an SM; None for rows that are too long for that."""
    threads = threads_for(-(-(row.vectors + SECTOR_VECTORS) // 16), WIDE_SIXTEEN_VECTORS[row.aligned])
    if threads > WIDE_SIXTEEN_THREADS or row.itemsize == 4 or {"residual", "bias"} & problem.dtypes.keys():
        return None
    config = NormConfig("persistent", threads, threads, 16, 2, align_vectors=SECTOR_VECTORS, stages=2)
    return _sorted(row, replace(config, clusters=2 * resident_clusters(problem, 16)))


def _column_bytes(problem: Problem, row: RowProblem) -> int:
    """Bytes of weight and bias that belong to one vector of a row."""
    return bytes_of(problem, COLUMNS) * row.vector_elements


# --- backward

INPUTS = ("x", "residual_out", "dout", "dresidual_out")
# `few_rows`: bytes of all rows per CTA of a cluster. Beyond this, more CTAs and a second kernel are faster.
FEW_BYTES = 36_864
# Bytes of shared memory that a CTA needs beside its rows; in `few_rows` column sums and each row's mean and rstd.
FEW_RESERVED, OVERLAPPED_RESERVED, PERSISTENT_RESERVED = 48 * 1024, 8 * 1024, 2048
# `overlapped`, second kernel: threads that share a vector of columns, and rows that each holds, at most. Rows are read
# twice, which was faster up to OVERLAPPED_BYTES of rows.
OVERLAPPED_ROWS, OVERLAPPED_DEPTH, OVERLAPPED_BYTES = 64, 8, 5 << 20
# Unaligned rows are read from the start of a cache line if they have at most so many vectors, or if there are at least
# so many of them; of fewer longer ones, from the start of a sector, of SECTOR_VECTORS, if there are SECTORS_FROM_ROWS.
LINES_UP_TO, LINES_FROM_ROWS = 2048, 4096
SECTOR_VECTORS, SECTORS_FROM_ROWS = 2, 1024
# Vectors of a CTA where a row takes more than four CTAs: with gradients of weight and bias; else by whether rows are
# aligned.
SPAN_OF_TWO_SUMS, SPAN = 1600, {True: 1024, False: 2048}
# Aligned rows of 32 bits and one column sum that four CTAs of CTA_VECTORS would share are shared by two up to this:
# clusters of four leave some SMs idle. 4810 x 16384 takes 234 us in place of 249, 2844 x 12288 108 in place of 112;
# of three inputs, 2560 x 10240, 102 in place of 108, but 1600 x 16384 in two slots 104 in place of 103.
WIDE_PAIR_VECTORS = 4 * CTA_VECTORS
# By the vectors of a CTA: vectors of a thread, and threads of an SM that have registers for the sums of their columns.
# Unaligned rows in one or two CTAs.
UNALIGNED: Ladder[tuple[int, int]] = ((512, (1, 1152)), (1024, (2, 640)))
# Rows in two CTAs that one could hold.
HALVES: Ladder[tuple[int, int]] = ((256, (1, 768)), (512, (2, 576)))
# Other rows in one CTA, of 16 and of 32 bits.
NARROW_CTA: Ladder[tuple[int, int]] = ((384, (1, 1024)), (768, (2, 800)), (math.inf, (4, 512)))
WIDE_CTA: Ladder[tuple[int, int]] = ((384, (1, 1024)), (768, (2, 800)), (math.inf, (2, 512)))
# Other rows in several CTAs, of 16 and of 32 bits.
CLUSTERED: Ladder[tuple[int, int]] = ((384, (1, 1024)), (1024, (2, 800)), (math.inf, (4, 800)))
WIDE_CLUSTERED: Ladder[tuple[int, int]] = ((384, (1, 1024)), (1024, (2, 1152)), (math.inf, (4, 800)))
# Short unaligned rows: threads of a row by its vectors, and of an SM; threads of a CTA. With a vector each they would
# mostly mask it and exchange sums.
SHORT_UNALIGNED: Sequence[tuple[int, tuple[int, int]]] = ((24, (8, 384)), (32, (16, 512)), (48, (16, 384)))
SHORT_THREADS = 128
# The same number of threads with gradients of weight and bias: where a thread has many columns, for unaligned rows, and
# for others.
MANY_COLUMNS_THREADS, UNALIGNED_SUMS_THREADS, SUMS_THREADS = 768, 576, 384
# Rows off a vector that four CTAs of CTA_VECTORS would share are shared by two, of up to HALF_VECTORS, three to a
# thread: 2482 x 22678 with a residual runs at 0.89 of a copy's rate instead of 0.76, 1701 x 23001 without at 0.78
# instead of 0.69.
HALF_VECTORS, HALF_PER_THREAD = 1536, 3
# Aligned rows of two column sums, shared by two CTAs, with three vectors of a thread: with a residual up to
# HALVED_VECTORS, without from the first to the second of HALVED_ALONE. 2867 x 10240 with one runs at 0.88 of a copy's
# rate, by five vectors at 0.84; 3616 x 10824 without at 0.75, by four at 0.69.
HALVED_VECTORS, HALVED_ALONE = 1280, (1280, 1792)
# Vectors of a CTA's share of a row up to which one row at a time gets a slot more for the rows that arrive.
DEEPER_VECTORS = 896
# Balanced CTAs: as many threads as have registers for two sums of each of their columns. No other number of warps would
# give the busiest of an SM's schedulers fewer vectors.
BALANCED_THREADS = 12 * WARP


def backward(problem: Problem, centred: bool = False) -> NormConfig:
    """The config of a backward; arguments as those of :func:`forward`."""
    two_pass = NormConfig("two_pass", TWO_PASS_THREADS, clusters=2 * problem.sm_count)
    if problem.n is None:
        return _in_step(problem, two_pass)
    row, row_bytes = row_of(problem), problem.n * bytes_of(problem, INPUTS)
    few = _few_rows(problem, row, row_bytes) or _overlapped(problem, row, row_bytes)
    few = few or (None if centred else _halves_off_a_line(problem, row, row_bytes))
    return few or _in_step(problem, _persistent_backward(problem, row, row_bytes, centred) or two_pass)


def _in_step(problem: Problem, config: NormConfig) -> NormConfig:
    """With so many clusters that all unaligned rows of one start at the same place of a vector.

    Where there are column sums, the number of rows of their workspace sees to that.
    """
    if config.sort_period or {"dweight", "dbias"} & problem.dtypes.keys():
        return config
    return replace(config, clusters=in_step(config.clusters, _walked_row(problem, config), config.align_vectors))


def _walked_row(problem: Problem, config: NormConfig) -> RowProblem:
    """The row, aligned if its kernel never shifts it; where kernels do not know its length, one of length 1, whose rows
    start at every offset in a vector.
    """
    row = row_of(problem)
    row = row._replace(aligned=False) if config.lines else row
    return row._replace(n=1) if problem.n is None else row


def _sorted(row: RowProblem, config: NormConfig) -> NormConfig:
    """With rows sorted by where they start, unless all rows of a cluster start at the same place anyway: sorted,
    2249 x 17399 has a row of sums for each of 127 walks, not 64 clusters, and its gradient 0.80 of a copy's rate, not
    0.87.
    """
    period = period_of(row, config.align_vectors)
    return replace(config, sort_period=period if config.clusters % period else 0)


def _starts_in_lines(row: RowProblem) -> bool:
    """Whether rows start on a vector, but not all of them on a line: warps' accesses then lie across sectors."""
    return row.aligned and row.n >= LONG_ROW and row.n % (row.vector_elements * LINE_VECTORS) > 0


def _persistent_backward(problem: Problem, row: RowProblem, row_bytes: int, centred: bool) -> NormConfig | None:
    """Persistent clusters with column sums in registers; None for rows that are too long."""
    sums = max(_column_sums(problem), 1)
    cluster, align, lines, touched = _cut(problem, row, sums)
    span = -(-touched // cluster)
    per_thread, sm_threads = _vectors_of_a_thread(problem, row, span, cluster, sums, centred)
    share = threads_for(span, per_thread, 512)
    balanced = cluster > 2 and sums == 2 and not row.aligned
    if balanced:
        # Rows start on half a line: with half as many offsets, column sums are begun and stored half as often.
        threads = share = BALANCED_THREADS
        align = min(align, LINE_VECTORS // 2)
        slot = share * -(-(span + WARP - 1) // share) * -(-row_bytes // row.vectors)
    else:
        threads = share if cluster > 1 else _threads_of_cta(row, span, share, sums)
        slot = -(-row_bytes // cluster) * (threads // share) + 64 * VECTOR_BYTES
    sm_threads = sm_threads * 2 // (1 + sums)
    # Rows of three inputs take longer to arrive.
    alone = "dresidual_out" in problem.dtypes and cluster == 1 and _is_long(row, span)
    alone_of_four = row.aligned and _disturb_each_other(problem, row, cluster, sums)
    alone_of_four = alone_of_four and sm_threads // threads > 1
    # A CTA of one row at a time waits for it: 6393 x 6144 with two sums takes 0.88 of a copy's rate by three slots,
    # 0.81 by two. Of several rows at a time two are faster, and of longer ones: 4778 x 8192 takes 0.84, by three 0.79.
    short = span <= DEEPER_VECTORS or row.itemsize == 4
    single = cluster == 1 and sums == 2 and row.aligned and threads == share and short
    stages = _stages(row, slot, deeper=alone or single or (cluster > 1 and _exchange_is_long(row, span)))
    # A thread's last vector may lie past the row: its memory is not in `slot`, by which stages and CTAs were measured.
    held = threads * -(-span // share) * row.vector_elements * (row_bytes // row.n)
    room = ARCHES[problem.arch].shared_per_cta - _bytes_of_sums(share, cluster, centred)
    stages = min(stages, room // held)
    if span > max(4, per_thread) * share or stages < 2:
        return None
    if alone_of_four and 4 * slot <= row.ring_bytes:
        stages = min(4, room // held)
    most = 1 if alone or alone_of_four else sm_threads // threads
    resident = max(1, min(row.ring_bytes // (stages * slot + PERSISTENT_RESERVED), most))
    if not balanced:
        # Clusters that do not fit start when others have ended: 16425 columns took 218 us in place of 159.
        elements = threads * _elements_of_a_thread(problem, row, share * cluster, align, lines=lines)
        fit = occupancy(problem.arch, threads, LEAST_REGISTERS, stages * elements * (row_bytes // row.n))
        resident = max(1, min(resident, fit))
    config = NormConfig(
        "persistent", threads, share, cluster, resident, align, stages=stages, balanced=balanced, lines=lines
    )
    return _in_order(problem, row, replace(config, clusters=resident_clusters(problem, cluster) * resident), sums)


def _cut(problem: Problem, row: RowProblem, sums: int) -> tuple[int, int, bool, int]:
    """CTAs of a row, vectors that its start is rounded down to, whether that is so though it is on a vector, and
    vectors that are read.
    """
    align = _alignment(problem, row)
    touched = row.vectors + (0 if row.aligned else align)
    cluster = 2 if _wide_pair(problem, row, sums) else _backward_cluster(row, touched, sums)
    if cluster == 2 and _starts_in_lines(row) and row.vectors + LINE_VECTORS <= 2 * CTA_VECTORS:
        return cluster, LINE_VECTORS, True, row.vectors + LINE_VECTORS
    return cluster, align, False, touched


def _in_order(problem: Problem, row: RowProblem, config: NormConfig, sums: int) -> NormConfig:
    """With the order of rows and the CTAs of an SM that suit where rows start."""
    if config.lines and sums == 1 and config.resident > 1:
        # Two CTAs have enough rows in flight: 3665 x 10680 runs at 0.88 of a copy's rate, by three slots at 0.84.
        return replace(config, stages=2)
    if row.aligned or config.cluster <= 2:
        return config
    if config.resident > 1 and _disturb_each_other(problem, row, config.cluster, sums):
        config = replace(config, resident=1, align_vectors=1, clusters=resident_clusters(problem, config.cluster))
    # Large clusters are few: no multiple of the offsets of unaligned rows fills the GPU. So rows are sorted by offset.
    return _sorted(row, config)


def _halves_off_a_line(problem: Problem, row: RowProblem, row_bytes: int) -> NormConfig | None:
    """A long row of 16 bits off a line, in two CTAs that have an SM each; None for other rows."""
    touched = row.vectors + row.align_vectors
    if (
        _column_sums(problem) > 1
        or (row.aligned and not _starts_in_lines(row))
        or row.itemsize > 2
        or not 2 * CTA_VECTORS < touched <= 2 * HALF_VECTORS
        or row.max_cluster < 2
    ):
        return None
    threads = threads_for(-(-touched // 2), HALF_PER_THREAD)
    slot = threads * HALF_PER_THREAD * row.vector_elements * (row_bytes // row.n)
    if 2 * slot > row.ring_bytes - PERSISTENT_RESERVED:
        return None
    config = NormConfig("persistent", threads, threads, 2, align_vectors=row.align_vectors, stages=2, lines=True)
    clusters, walked = resident_clusters(problem, 2), row._replace(aligned=False)
    if row.aligned:
        # Not sorted: slots keep whole vectors behind a row's end, which were those of a row that starts elsewhere.
        clusters = in_step(clusters, walked, config.align_vectors)
    return _sorted(walked, replace(config, clusters=clusters))


def _disturb_each_other(problem: Problem, row: RowProblem, cluster: int, sums: int) -> bool:
    """Whether two CTAs of clusters of four would disturb each other: one has an SM, and more stages if rows start on a
    vector. 1186 x 33001 runs at 0.74 of a copy's rate, by two CTAs at 0.62, 1186 x 33004 at 0.89, at 0.50.
    """
    return cluster == 4 and sums == 1 and row.itemsize < 4 and "dresidual_out" not in problem.dtypes


def _elements_of_a_thread(problem: Problem, row: RowProblem, threads: int, align: int, *, lines: bool) -> int:
    """Elements of a row that each of so many threads holds, in whole vectors, as the kernels' ``RowTile`` has them."""
    present = [name for name in TENSORS if name in problem.dtypes]
    narrow = min(min(problem.aligns[name], VECTOR_BYTES) // ITEMSIZE[problem.dtypes[name]] for name in present)
    shifted = lines or 2 * narrow < row.vector_elements
    vec = row.vector_elements if shifted else min(narrow, row.vector_elements)
    touched = -(-(row.n + (align * vec - 1 if shifted else 0)) // vec)
    return -(-touched // threads) * vec


def _alignment(problem: Problem, row: RowProblem) -> int:
    """Vectors that the start of an unaligned row is rounded down to: a line's, of long rows only if rows are many."""
    if row.vectors <= LINES_UP_TO or problem.m >= LINES_FROM_ROWS:
        return row.align_vectors
    return min(row.align_vectors, SECTOR_VECTORS) if problem.m >= SECTORS_FROM_ROWS else 1


def _column_sums(problem: Problem) -> int:
    return sum(name in problem.dtypes for name in ("dweight", "dbias"))


def _exchange_is_long(row: RowProblem, span: int) -> bool:
    """Whether exchanging a cluster's sums takes long beside loading its rows."""
    return row.vectors > CTA_VECTORS or span <= 256


def _is_short(row: RowProblem, span: int) -> bool:
    """Whether :data:`SHORT_UNALIGNED` has such rows."""
    return not row.aligned and row.vectors > SHORTEST_ROW and span <= SHORT_UNALIGNED[-1][0]


def _threads_of_cta(row: RowProblem, span: int, share: int, sums: int) -> int:
    """Threads of a CTA that takes several rows at a time, ``share`` threads each, at least 256 with one column sum."""
    if _is_short(row, span):
        return SHORT_THREADS
    return max(256, share) if sums == 1 else max(256 // share, 1) * share


def _is_long(row: RowProblem, span: int) -> bool:
    """Whether an unaligned row fills more than half of a CTA."""
    return not row.aligned and CTA_VECTORS // 2 < span <= CTA_VECTORS


def _stages(row: RowProblem, slot: int, *, deeper: bool) -> int:
    """Slots of the ring, ``slot`` bytes each: three if ``deeper`` and there is room, none without room for two."""
    if 2 * slot > row.ring_bytes:
        return 0
    return 3 if deeper and 3 * slot <= row.ring_bytes else 2


def _bytes_of_sums(threads: int, cluster: int, centred: bool) -> int:
    """Shared memory of the sums of four rows, from each warp of a cluster, and of their barriers."""
    return 4 * (4 * (6 if centred else 2) * cluster * -(-threads // WARP) + 8)


def _wide_pair(problem: Problem, row: RowProblem, sums: int) -> bool:
    """Whether two CTAs share a row of 32 bits, of more than :data:`CTA_VECTORS` each, in three slots."""
    slot = row.n * bytes_of(problem, INPUTS) // 2 + 64 * VECTOR_BYTES
    long = 2 * CTA_VECTORS < row.vectors <= WIDE_PAIR_VECTORS
    plain = row.itemsize == 4 and row.aligned and sums == 1 and "mean" not in problem.dtypes
    return plain and long and row.max_cluster > 1 and 3 * slot <= row.ring_bytes


def _backward_cluster(row: RowProblem, touched: int, sums: int) -> int:
    """CTAs of a row. Of a long row each takes up to CTA_VECTORS as far as four CTAs reach, then up to its span."""
    if row.vectors > CTA_VECTORS:
        span = SPAN_OF_TWO_SUMS if sums == 2 else SPAN[row.aligned]
        small = min(4, cluster_for(touched, CTA_VECTORS, row.max_cluster))
        return max(small, cluster_for(touched, span, row.max_cluster))
    # Two small CTAs instead of a large one keep as many bytes in flight with fewer rows.
    pair = row.vectors >= 512 and sums == 1 and row.itemsize < 4 and row.aligned
    return min(2, row.max_cluster) if pair else 1


def _vectors_of_a_thread(
    problem: Problem, row: RowProblem, span: int, cluster: int, sums: int, centred: bool
) -> tuple[int, int]:  # fmt: skip
    """Vectors of a thread, and threads of an SM that have registers for one sum of each of their columns."""
    if _is_short(row, span):
        share, threads = step(SHORT_UNALIGNED, span)
        return -(-span // share), threads * (1 + sums) // 2
    if row.vectors > WARP and (sums == 2 or (centred and not row.aligned)):
        per_thread, threads = _many_columns(problem, row, cluster)
    elif not row.aligned and span <= CTA_VECTORS and cluster <= 2:
        per_thread, threads = step(UNALIGNED, span)
    elif row.vectors <= CTA_VECTORS and cluster == 2:
        per_thread, threads = step(HALVES, span)
    else:
        ladders = (WIDE_CTA, WIDE_CLUSTERED) if row.itemsize == 4 else (NARROW_CTA, CLUSTERED)
        per_thread, threads = step(ladders[cluster > 1], span)
    if per_thread == 4:
        # Four or five, whichever gives the busiest of an SM's schedulers fewer vectors.
        per_thread = min((4, 5), key=lambda k: of_scheduler(span, k, 512))
    return per_thread, threads


def _many_columns(problem: Problem, row: RowProblem, cluster: int) -> tuple[int, int]:
    """(vectors, threads) as above, where a thread takes many columns. Two sums of each leave registers for fewer
    threads, but then a row's sum has fewer partial sums to exchange.
    """
    short = row.vectors <= 5 * WARP
    least, most = (CTA_VECTORS, HALVED_VECTORS) if "dresidual_out" in problem.dtypes else HALVED_ALONE
    few = row.itemsize == 2 and least < row.vectors <= most if row.aligned else cluster == 1
    per_thread = -(-row.vectors // WARP) if short else 3 if few else 4
    many = not short if row.itemsize == 4 else row.n <= 12 * WARP
    return per_thread, MANY_COLUMNS_THREADS if many else SUMS_THREADS if row.aligned else UNALIGNED_SUMS_THREADS


def _few_rows(problem: Problem, row: RowProblem, row_bytes: int) -> NormConfig | None:
    """Each of a few clusters takes all rows; None where rows are too many or unaligned.

    The config counts rows in powers of two, so that few kernels serve all.
    """
    cluster = cluster_for(row.vectors, WARP, row.max_cluster)
    if problem.m * row_bytes > cluster * FEW_BYTES or not row.aligned:
        return None
    share = threads_for(-(-row.vectors // cluster), 1)
    rows = min(1024 // share, next_power(problem.m))
    stages = next_power(-(-problem.m // rows))
    span = share * -(-row.vectors // (cluster * share))
    vector_bytes = row.vector_elements * (row_bytes // row.n)
    if stages * rows * (span * vector_bytes + 8) > row.ring_bytes - FEW_RESERVED:
        return None
    # As many CTAs as four of the largest clusters have: these surely run at once.
    replicas = min(4 * row.max_cluster // cluster, 16, share)
    return NormConfig("few_rows", rows * share, share, cluster, stages=stages, replicas=replicas)


def _overlapped(problem: Problem, row: RowProblem, row_bytes: int) -> NormConfig | None:
    """A second kernel holds all rows in registers; None where rows are too many or unaligned.

    The config counts rows in powers of two, so that few kernels serve all.
    """
    count = next_power(problem.m)
    column_threads = min(count, OVERLAPPED_ROWS)
    depth = count // column_threads
    if depth > OVERLAPPED_DEPTH or problem.m * row_bytes > OVERLAPPED_BYTES or not row.aligned:
        return None
    cluster = cluster_for(row.vectors, 512, min(row.max_cluster, 8))
    share = threads_for(-(-row.vectors // cluster), 1)
    rows = max(128 // share, 1)
    span = share * -(-row.vectors // (cluster * share))
    if 2 * rows * span * row.vector_elements * (row_bytes // row.n) > row.ring_bytes - OVERLAPPED_RESERVED:
        return None
    return NormConfig(
        "overlapped", rows * share, share, cluster, stages=2, column_threads=column_threads, rows_per_thread=depth
    )


def workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Arrays from the first kernel to the second: a row of column sums per cluster, or each row's mean and rstd."""
    config = NormConfig.of(flat)
    summed = config.form in ("persistent", "two_pass")
    shape = (_partial_sums(problem, config) if summed else 0, problem.dims["n"])
    present = {d: d in problem.dtypes and summed for d in ("dweight", "dbias")}
    partials = {f"{d}_partials": Array(shape, "float32") if here else None for d, here in present.items()}
    terms = config.form == "overlapped" and "dweight" in problem.dtypes
    return partials | {"terms": Array((problem.m, 2), "float32") if terms else None}


def _partial_sums(problem: Problem, config: NormConfig) -> int:
    """Rows of the workspace: one for each persistent cluster, of which as many run as fit the GPU and have work."""
    rows = config.threads // config.threads_per_row if config.threads_per_row else 1
    groups = -(-problem.m // rows)
    # More clusters than SMs only if each gets four steps, and as few as finish in the same number of steps.
    clusters = min(config.clusters, max(-(-groups // 4), min(groups, problem.sm_count)))
    clusters = -(-groups // -(-groups // clusters))
    if config.sort_period:
        # Columns shift where a cluster goes on to rows of the next offset: its sums so far get a row of their own.
        return clusters + config.sort_period - 1
    if not (row := _walked_row(problem, config)).aligned:
        # Every cluster takes rows of one offset only, so the number of clusters is a multiple of the offsets.
        period = period_of(row, config.align_vectors)
        clusters = period * max(min(-(-clusters // period), config.clusters // period), 1)
    return clusters


# --- search space


def _forward_space(problem: Problem, flat: Config) -> Iterator[NormConfig]:
    """The heuristic's form with other numbers of threads per row, CTAs per row and CTAs per SM."""
    config, row = NormConfig.of(flat), row_of(problem)
    if config.form in ("two_pass", "persistent"):
        return
    if config.form == "blocks":
        for share in (8, 16, WARP):
            for unroll in (2, 4, 8):
                yield replace(config, threads_per_row=share, unroll=unroll)
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
    """Other stages, CTAs per SM and cluster sizes of the persistent form; other forms have no alternatives."""
    config = NormConfig.of(flat)
    if config.form == "persistent":
        yield from (_in_step(problem, other) for other in _other_walks(problem, config))


def _other_walks(problem: Problem, config: NormConfig) -> Iterator[NormConfig]:
    row, one = row_of(problem), config.clusters // config.resident
    for stages in (2, 3, 4):
        for resident in range(max(config.resident - 1, 1), config.resident + 3):
            yield replace(config, stages=stages, resident=resident, clusters=one * resident)
    # Sorted rows keep their cluster size: only large clusters take rows sorted.
    for ctas in (
        (config.cluster // 2, config.cluster, 2 * config.cluster) if not config.sort_period else (config.cluster,)
    ):
        if not 1 <= ctas <= row.max_cluster:
            continue
        for k in (1, 2, 4):
            share = threads_for(-(-row.touched_at_most // ctas), k)
            # A cluster takes one row at a time, a CTA alone as many as fill 256 threads.
            threads = max(256 // share, 1) * share if ctas == 1 else share
            resident = max(1, config.resident * config.threads // threads)
            yield replace(
                config, threads=threads, threads_per_row=share, cluster=ctas, resident=resident,
                clusters=resident_clusters(problem, ctas) * resident,
            )  # fmt: skip


def needs(problem: Problem, flat: Config) -> Needs:
    """The least resources of an SM that one CTA of this config takes."""
    config = NormConfig.of(flat)
    if config.form in ("one_pass", "smem", "two_pass", "blocks"):
        return needs_of(problem, config)
    if config.form == "few_rows":
        return Needs(config.threads, LEAST_REGISTERS, resident=config.resident)
    row = row_of(problem)
    per_thread = -(-row.vectors // (config.threads_per_row * config.cluster))
    return needs_in_smem(problem, config, config.stages, per_thread * row.vector_elements * _column_sums(problem))


FORWARD = Space(_forward_space, needs)
BACKWARD = Space(_backward_space, needs, {"m": POWERS})
