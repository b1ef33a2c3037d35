"""How the kernels that quantise rows are configured: the heuristic and its search space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from cute_ops.declaration.config import Config, Problem, Space
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import ARCHES, VECTOR_BYTES, WARP
from cute_ops.kernels.quantize.config import QuantizeConfig
from cute_ops.ops.rows import (
    LINE_VECTORS,
    RESERVED_BYTES,
    SHORTEST_ROW,
    SMEM_BYTES_IN_FLIGHT,
    SMEM_PER_THREAD,
    SMEM_SM_THREADS,
    SMEM_THREADS,
    SMEM_VECTORS,
    TENSORS,
    TWO_PASS_LONG_THREADS,
    TWO_PASS_THREADS,
    UNEVEN_THREADS,
    are_contiguous,
    bytes_of,
    cluster_for,
    ring_bytes,
    threads_for,
    vary_resident,
)

# Tensors with rows, beside a residual.
ROWS = "x", "gate", "up", "residual", "out"
# Columns that share a scale.
BLOCK = 128
# Elements of a row that a CTA holds in float32; fewer with a weight.
HELD, HELD_BESIDE_WEIGHT = 16384, 10240
# Vectors of a thread: of aligned rows, of unaligned rows of one input, and of two. Each vector of an unaligned row is
# loaded as two aligned ones, which takes registers.
PER_THREAD, UNALIGNED_PER_THREAD, UNALIGNED_PAIRS_PER_THREAD = 4, 5, 3
# Half vectors of a thread, of the shortest rows.
HALVES = 4
# Threads of an SM with rows in registers, which bounds the registers of a thread: fewer with an activation (gated),
# with a norm's bias or a shorter unaligned float32 weight, or with two inputs.
SM_THREADS, SM_THREADS_GATED, SM_THREADS_BIAS = 1120, 896, 768
# Clusters of LARGE_CLUSTER have SM_THREADS with an activation, too: 274 x 171000 takes 0.97 of a copy's rate, not 0.81.
LARGE_CLUSTER = 8
UNALIGNED_SM_THREADS, UNALIGNED_SM_THREADS_GATED, UNALIGNED_SM_THREADS_PAIRS = 1024, 960, 768
# Unaligned rows with an activation of which each CTA of LARGE_CLUSTER takes up to DEEPER_SPAN vectors have one more
# vector a thread, and an SM as many threads: 997 x 47110 takes 0.88 of a copy's rate, not 0.79.
DEEPER_SPAN = 896
# With a float32 weight, of which a thread loads three vectors before it needs them, where a CTA takes so many.
UNALIGNED_SM_THREADS_WIDE, WIDE_WEIGHT_VECTORS = 1152, 1024
# Without a weight, a row of at least this many vectors has at least as many threads: when rows are few, their last
# vectors arrive sooner.
WIDE_ROW_VECTORS = 256
# In shared memory, vectors of a thread where a CTA takes more than DEEP_SPAN vectors of a row with a weight and a scale
# of its own.
DEEP_SPAN, DEEP_PER_THREAD = 2048, 16
# Threads of an SM with rows in shared memory, where they are not SMEM_SM_THREADS. A weight takes registers. First
# unaligned rows without a weight, then aligned rows with a weight of 16 bits.
SMEM_SM_THREADS_UNALIGNED, SMEM_SM_THREADS_WEIGHT = 1632, 1024
# Aligned rows with a float32 weight, by whether a thread has DEEP_PER_THREAD vectors.
SMEM_SM_THREADS_WIDE_WEIGHT = {False: 512, True: 384}
# Unaligned rows with a weight and a scale for each row, then with a scale for each block.
SMEM_SM_THREADS_WEIGHT_BY_ROW, SMEM_SM_THREADS_WEIGHT_BY_BLOCK = 896, 1248

# Short rows that start anywhere, in blocks: columns of a thread and bytes of a CTA up to which a row has 4, 8 or 16
# threads, and the most columns of any; CTAs of an SM at most, and bytes that each takes beside. Of 1113180 x 69 an RMS
# norm runs at 0.97 of a copy's rate, by vectors at 0.41, of 235587 x 331 at 0.91 and 0.73.
BLOCKS_THREADS, BLOCKS_UNROLL, BLOCKS_COLUMNS, MOST_BLOCKS_COLUMNS = 128, 4, 21, 17
BLOCKS_BYTES, BLOCKS_CTAS, CTA_BYTES = 32_000, 10, 1024


class _Quantized(NamedTuple):
    """A row, counted in the vectors that its kernel loads, of 16 bytes or fewer.

    Attributes:
        vectors: vectors of the row.
        elements: elements of a vector.
        aligned: whether all rows start on a vector.
        pair: whether there are two inputs.
        weight: whether there is a weight.
        by_row: whether a whole row shares a scale, instead of a block.
        widest: elements of 16 bytes.
    """

    vectors: int
    elements: int
    aligned: bool
    pair: bool
    weight: bool
    by_row: bool
    widest: int


def _quantized(problem: Problem) -> _Quantized:
    rows = [name for name in (*TENSORS, "gate", "up") if name in problem.dtypes]
    elements = VECTOR_BYTES // max(ITEMSIZE[problem.dtypes[name]] for name in rows)
    start = min(problem.aligns[name] // ITEMSIZE[problem.dtypes[name]] for name in rows)
    # If rows start on half vectors, loading these beats moving whole ones into place, as long as a warp holds a block.
    widest = elements
    elements = start if 2 * start == elements and start * WARP >= BLOCK else elements
    return _Quantized(
        -(-problem.dims["n"] // elements), elements, start >= elements,
        "up" in problem.dtypes or "residual" in problem.dtypes, "weight" in problem.dtypes, not problem.attrs["block"],
        widest,
    )  # fmt: skip


def config(problem: Problem) -> QuantizeConfig:
    """Rows are held in float32 registers, longer ones in shared memory in their own dtype, the longest read twice."""
    if problem.n is None:
        return QuantizeConfig("two_pass", TWO_PASS_THREADS)
    row = _quantized(problem)
    if _goes_in_blocks(problem, row):
        return _blocks(problem)
    if row.vectors <= WARP:
        return QuantizeConfig("one_pass", 256, _threads_of_short_row(problem, row), unroll=4 if row.aligned else 1)
    held = HELD_BESIDE_WEIGHT if row.weight and not row.pair else HELD
    # Two inputs are widened and combined once in registers, and each time that they are read in shared memory.
    pair = row.pair and (row.aligned or "up" in problem.dtypes)
    if row.vectors > held // row.elements and not (pair and row.vectors <= _most_in_registers(problem, row)):
        found = _in_smem(problem, row)
        if found:
            return found
    return _in_registers(problem, row)


def _goes_in_blocks(problem: Problem, row: _Quantized) -> bool:
    """Whether a row with a scale of its own is a short one that starts off a vector, and follows on the one before."""
    n = problem.dims["n"]
    contiguous = are_contiguous(problem, ROWS)
    fits = row.vectors > SHORTEST_ROW and n <= (WARP * MOST_BLOCKS_COLUMNS if row.by_row else BLOCK)
    return contiguous and fits and not row.aligned


def _blocks(problem: Problem) -> QuantizeConfig:
    n, each = problem.dims["n"], bytes_of(problem, ROWS)
    block = BLOCKS_THREADS * BLOCKS_UNROLL * n * each
    fitting = (share for share in (4, 8, 16) if n <= share * BLOCKS_COLUMNS and block <= share * BLOCKS_BYTES)
    share = next(fitting, WARP)
    resident = min(BLOCKS_CTAS, (ring_bytes(problem) - RESERVED_BYTES) // (block // share + CTA_BYTES))
    return QuantizeConfig("blocks", BLOCKS_THREADS, share, resident=max(resident, 1), unroll=BLOCKS_UNROLL)


def _threads_of_short_row(problem: Problem, row: _Quantized) -> int:
    """Threads of a row of up to a warp's vectors."""
    if not row.aligned and row.vectors <= SHORTEST_ROW:
        return threads_for(problem.dims["n"], 4)
    # With a vector each, or half vectors, threads mostly exchange the row's largest element.
    by = HALVES if row.by_row and row.elements < row.widest else 1
    share = threads_for(row.vectors, by)
    return share if row.aligned or not row.by_row else min(share, UNEVEN_THREADS)


def _most_in_registers(problem: Problem, row: _Quantized) -> int:
    """Vectors of the longest row of two inputs in registers. Unaligned ones beyond eight CTAs load faster to shared
    memory.
    """
    cluster = ARCHES[problem.arch].cluster
    return cluster * (HELD // row.elements) if row.aligned else min(cluster, 8) * (HELD // 2 // row.elements)


def _in_registers(problem: Problem, row: _Quantized) -> QuantizeConfig:
    cluster = cluster_for(row.vectors, HELD // row.elements, ARCHES[problem.arch].cluster)
    if cluster > 1:  # CTAs of half the size: of aligned rows as long as four of them hold the row
        most = 4 if row.aligned else ARCHES[problem.arch].cluster
        cluster = max(cluster, cluster_for(row.vectors, HELD // 2 // row.elements, most))
    span = -(-row.vectors // cluster)
    if span > HELD // row.elements:
        return QuantizeConfig("two_pass", TWO_PASS_LONG_THREADS)
    wide = _wide_weight(problem) and not (row.aligned or row.pair) and span >= WIDE_WEIGHT_VECTORS
    per_thread = PER_THREAD if row.aligned else UNALIGNED_PAIRS_PER_THREAD if row.pair or wide else UNALIGNED_PER_THREAD
    deeper = cluster == LARGE_CLUSTER and "up" in problem.dtypes and not row.aligned and span <= DEEPER_SPAN
    share = threads_for(span, per_thread + deeper)
    if 4 * WARP < span <= 4.5 * WARP and row.aligned:
        share = WARP  # two warps would leave a quarter of their vectors empty
    if not row.by_row:
        share = max(share, BLOCK // row.elements)  # as many lanes as hold a block: they find its largest element
    threads = max(share, 128)
    column_bytes = bytes_of(problem, ("weight", "bias"))
    resident = max(1, (DEEPER_SPAN if deeper else _sm_threads(problem, row, cluster)) // threads)
    if cluster == 1 and span >= WIDE_ROW_VECTORS and row.aligned and not column_bytes:
        share = threads = max(threads_for(span, 2), WIDE_ROW_VECTORS)
        resident = min(resident, max((1536 if row.pair else 2048) // threads, 2))
    delay = column_bytes > 2 and not wide
    return QuantizeConfig("one_pass", threads, share, cluster, resident, delay_weight_load=delay)


def _sm_threads(problem: Problem, row: _Quantized, cluster: int) -> int:
    gated, bias = "up" in problem.dtypes, "bias" in problem.dtypes
    if row.aligned:
        return SM_THREADS_BIAS if bias else SM_THREADS_GATED if gated and cluster < LARGE_CLUSTER else SM_THREADS
    if row.pair:
        return UNALIGNED_SM_THREADS_GATED if gated else UNALIGNED_SM_THREADS_PAIRS
    if bias:
        return SM_THREADS_BIAS
    if not _wide_weight(problem):
        return UNALIGNED_SM_THREADS
    return UNALIGNED_SM_THREADS_WIDE if row.vectors >= WIDE_WEIGHT_VECTORS else SM_THREADS_BIAS


def _wide_weight(problem: Problem) -> bool:
    return "weight" in problem.dtypes and ITEMSIZE[problem.dtypes["weight"]] > 2


def _in_smem(problem: Problem, row: _Quantized) -> QuantizeConfig | None:
    """A row in shared memory, which is read there two or three times; None where it does not fit."""
    ring = ring_bytes(problem)
    widths = [ITEMSIZE[problem.dtypes[name]] for name in ("x", "residual", "gate", "up") if name in problem.dtypes]
    held = row.vectors + (0 if row.aligned else LINE_VECTORS)
    cluster = cluster_for(held * len(widths), SMEM_VECTORS, ARCHES[problem.arch].cluster)
    span = -(-held // cluster)
    # A row's scale is known late: with more vectors per thread, fewer threads wait for it.
    deep = row.weight and row.aligned and row.by_row and span > DEEP_SPAN
    per_thread = DEEP_PER_THREAD if deep else SMEM_PER_THREAD
    threads = threads_for(span, per_thread, SMEM_THREADS)
    slot = threads * per_thread * (VECTOR_BYTES // max(widths)) * sum(widths)
    if span > per_thread * threads or slot > ring - RESERVED_BYTES:
        return None
    sm_threads = SMEM_SM_THREADS if row.aligned else SMEM_SM_THREADS_UNALIGNED
    if row.weight:
        by_scale = SMEM_SM_THREADS_WEIGHT_BY_ROW if row.by_row else SMEM_SM_THREADS_WEIGHT_BY_BLOCK
        by_weight = SMEM_SM_THREADS_WIDE_WEIGHT[deep] if _wide_weight(problem) else SMEM_SM_THREADS_WEIGHT
        sm_threads = by_weight if row.aligned else by_scale
    # Unaligned rows without a weight take longer to compute than to load: as many load at once as find room.
    full = not (row.aligned or row.weight)
    room = ring if full else min(SMEM_BYTES_IN_FLIGHT, ring)
    resident = max(1, min(room // slot, sm_threads // threads))
    if full and row.pair:
        resident = max(resident, UNALIGNED_SM_THREADS_GATED // threads)  # the number bounds a thread's registers
    return QuantizeConfig("smem", threads, threads, cluster, resident, 1 if row.aligned else LINE_VECTORS)


def _space(problem: Problem, flat: Config) -> Iterator[QuantizeConfig]:
    heuristic = QuantizeConfig.of(flat)
    if heuristic.form == "two_pass":
        return
    if heuristic.form == "blocks":
        yield from (replace(heuristic, threads_per_row=share) for share in (8, 16, WARP))
        return
    share, threads = heuristic.threads_per_row, heuristic.threads
    # Neighbouring lanes of a warp hold a block: the heuristic gives a row as many threads as that takes, or a warp.
    least = 1 if not problem.attrs["block"] else min(share, WARP)
    if heuristic.cluster == 1:
        for one in (share // 2, share, 2 * share):
            if one >= least and (one <= WARP or one % WARP == 0) and one <= 1024:
                for some in dict.fromkeys((max(threads // one, 1) * one, one, max(256 // one, 1) * one)):
                    yield replace(heuristic, threads=some, threads_per_row=one)
    if _quantized(problem).vectors > WARP:
        yield from vary_resident(heuristic)
        yield replace(heuristic, delay_weight_load=not heuristic.delay_weight_load)
    else:
        yield from (replace(heuristic, unroll=unroll) for unroll in (1, 2, 4))


SPACE = Space(_space)
