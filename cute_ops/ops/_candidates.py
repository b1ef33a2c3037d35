"""What our kernels let vary, one :class:`Space` for each way they work.

Candidates keep the structure that the heuristic chose (rows in registers, in shared memory, walked) and vary how a row
spreads over threads and CTAs, and how many of these share an SM. In forwards nothing here looks at the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from cute_ops.config import Config, Needs, Problem, Space, vary
from cute_ops.ops._tiles import LINE, ROWS, VECTOR_BYTES, WARP, _clusters, _most_ctas, _threads, _unaligned, _vectors
from cute_ops.shapes import ITEMSIZE

# Registers of a thread beside the vectors that it holds.
LEAST_REGISTERS = 16


def _row_inputs(problem: Problem) -> list[str]:
    """The inputs that kernels read whole rows of: those that are there but of no output's name."""
    given = ("x", "residual", "residual_out", "dout", "dresidual_out", "logits", "gate", "up")
    # An op that has `residual` as input writes `residual_out`; a backward reads it.
    written = ("residual_out",) if "residual" in problem.dtypes else ()
    softmax = ("out",) if "dx" in problem.dtypes and "out" in problem.dtypes else ()
    return [n for n in (*given, *softmax) if n in problem.dtypes and n not in written]


def _held(problem: Problem) -> int:
    """Vectors of a row, of one that starts off a vector all that it touches."""
    return _vectors(problem) + (LINE if _unaligned(problem) else 0)


def _per_thread(problem: Problem, tile: Config) -> int:
    return -(-_vectors(problem) // (tile["threads_per_row"] * tile.get("cluster", 1) * tile.get("segments", 1)))


def _slot(problem: Problem, tile: Config) -> int:
    """Bytes of shared memory that a CTA's part of its rows takes, once."""
    names = _row_inputs(problem)
    elements = VECTOR_BYTES // max(ITEMSIZE[problem.dtypes[n]] for n in ROWS if n in problem.dtypes)
    held = -(-_held(problem) // (tile["threads_per_row"] * tile.get("cluster", 1)))
    return tile["threads"] * held * elements * sum(ITEMSIZE[problem.dtypes[n]] for n in names)


def rows_need(problem: Problem, tile: Config) -> Needs:
    """Vectors of every input in registers, or in shared memory; sums over rows in registers."""
    threads, resident = tile["threads"], tile.get("resident", 1)
    if "threads_per_row" not in tile or "few" in tile:
        return Needs(threads, LEAST_REGISTERS, resident=resident)
    per_thread = _per_thread(problem, tile)
    if "stages" in tile:
        sums = sum(n in problem.dtypes for n in ("dweight", "dbias"))
        elements = VECTOR_BYTES // max(ITEMSIZE[problem.dtypes[n]] for n in ROWS if n in problem.dtypes)
        registers = LEAST_REGISTERS + per_thread * elements * sums
        return Needs(threads, registers, tile["stages"] * _slot(problem, tile), resident)
    if tile.get("staged"):
        return Needs(threads, LEAST_REGISTERS, _slot(problem, tile), resident)
    return Needs(threads, LEAST_REGISTERS + 4 * per_thread * len(_row_inputs(problem)), resident=resident)


def _spread(problem: Problem, tile: Config, most: int = 8) -> Iterator[Config]:
    """A row over more or fewer threads of one CTA, rows over more or fewer CTAs."""
    vectors, whole = _held(problem), tile["threads"]
    counts = (1, 2, 3, 4, 6, 8) if vectors > WARP else (1, 2, 4)
    rows = dict.fromkeys(_threads(vectors, k) for k in counts if k <= most)
    for row in rows:
        for threads in dict.fromkeys(max(some // row, 1) * row for some in (whole, 128, 256)):
            yield {**tile, "threads": threads, "threads_per_row": row}


def _clustered(problem: Problem, tile: Config, per_thread: tuple[int, ...]) -> Iterator[Config]:
    """A long row over more or fewer CTAs and threads, as many of these CTAs on an SM as before in threads."""
    cluster, room = tile.get("cluster", 1), tile.get("resident", 1) * tile["threads"]
    for ctas in (cluster // 2, cluster, 2 * cluster):
        if 1 <= ctas <= _most_ctas(problem):
            for k in per_thread:
                row = _threads(-(-_held(problem) // ctas), k)
                made = {**tile, "cluster": ctas, "threads": row, "threads_per_row": row}
                yield made | {"resident": max(1, room // row)}


def _resident(tile: Config) -> Iterator[Config]:
    """More or fewer CTAs on an SM: a bound on registers."""
    now = tile.get("resident", 1)
    for resident in dict.fromkeys((now - 1, now + 1, now + 2, 2 * now)) if now > 1 else (2, 3, 4):
        yield {**tile, "resident": resident}


def _rows_forward(problem: Problem, tile: Config) -> Iterator[Config]:
    if "threads_per_row" not in tile or "parts" in tile:
        return
    if tile.get("staged"):
        yield from _clustered(problem, tile, (4, 6, 8))
        yield from _resident(tile)
    elif tile.get("packed"):
        yield from _clustered(problem, tile, (2, 4))
        yield from _resident(tile)
    else:
        yield from _spread(problem, tile)
        if "resident" in tile or tile["threads_per_row"] > WARP:
            yield from _resident(tile)
        for unroll in (1, 2, 4) if tile["threads_per_row"] <= WARP else ():
            yield {**tile, "unroll": unroll}
    yield {**tile, "late": 1 - tile.get("late", 0)}


def _rows_backward(problem: Problem, tile: Config) -> Iterator[Config]:
    """The number of persistent clusters follows from those that an SM holds."""
    if "stages" not in tile or "parts" not in tile:
        return
    one = tile["parts"] // tile["resident"]
    for stages in (2, 3, 4):
        for resident in range(max(tile["resident"] - 1, 1), tile["resident"] + 3):
            yield {**tile, "stages": stages, "resident": resident, "parts": one * resident}
    cluster, vectors = tile["cluster"], _held(problem)
    # Rows that are sorted by where they start want the cluster that they were sorted for.
    for ctas in (cluster // 2, cluster, 2 * cluster) if "sorted_by" not in tile else (cluster,):
        if not 1 <= ctas <= min(_most_ctas(problem), 16):
            continue
        for k in (1, 2, 4):
            row = _threads(-(-vectors // ctas), k)
            # Clusters take one row at a time.
            threads = max(256 // row, 1) * row if ctas == 1 else row
            resident = max(1, tile["resident"] * tile["threads"] // threads)
            yield {
                **tile, "threads": threads, "threads_per_row": row, "cluster": ctas, "resident": resident,
                "parts": _clusters(problem, ctas) * resident,
            }  # fmt: skip


def _rows_held(problem: Problem, tile: Config) -> Iterator[Config]:
    """Reductions with an output or without; of rows that are walked only how many CTAs share an SM, which leaves the
    bits as they are: there the heuristic looks at the number of rows.
    """
    if "threads_per_row" not in tile:
        if "resident" in tile:
            yield from _resident(tile)
    elif "segments" in tile:
        for threads in (128, 256, 512):
            for parts in dict.fromkeys((max(tile["segments"] // 2, 1), tile["segments"], 2 * tile["segments"])):
                yield {**tile, "threads": threads, "threads_per_row": threads, "segments": parts}
    elif tile.get("staged") or "cluster" in tile:
        yield from _clustered(problem, tile, (4, 6, 8) if tile.get("staged") else (2, 3, 4))
        yield from _resident(tile)
    else:
        yield from _spread(problem, tile)


def _rows_quantize(problem: Problem, tile: Config) -> Iterator[Config]:
    if "threads_per_row" not in tile:
        return
    row, whole = tile["threads_per_row"], tile["threads"]
    # The lanes of a block are neighbours in a warp, and the heuristic gives it no fewer.
    least = min(row, WARP) if problem.attrs["block"] else 1
    if tile.get("cluster", 1) == 1:
        for share in (row // 2, row, 2 * row):
            if share >= least and (share <= WARP or share % WARP == 0) and share <= 1024:
                for threads in dict.fromkeys((max(whole // share, 1) * share, share, max(256 // share, 1) * share)):
                    yield {**tile, "threads": threads, "threads_per_row": share}
    if "resident" in tile:
        yield from _resident(tile)
        yield {**tile, "late": 1 - tile["late"]}
    else:
        yield from ({**tile, "unroll": unroll} for unroll in (1, 2, 4))


FORWARD = Space(_rows_forward, rows_need)
BACKWARD = Space(_rows_backward, rows_need, by_rows=True)
HELD = Space(_rows_held, rows_need)
QUANTIZE = Space(_rows_quantize)
POINTWISE = vary(threads=(64, 128, 256, 512), unroll=(1, 2, 4))
ROTARY = vary(threads=(64, 128, 256), heads=(1, 2, 4))
# As many CTAs as are resident sum the weights' gradients.
ROTARY_BACKWARD = vary(threads=(128, 256, 512), heads=(1, 2), resident=(1, 2, 3, 4), by_rows=True)
