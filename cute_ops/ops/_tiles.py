"""Tile heuristics: what a kernel is told about its shape, as plain integers.

A heuristic sees the problem (rows, row length, dtypes, alignments, SM target) and imports nothing heavy. Forward
tiles do not depend on the number of rows, so that a row's bits do not either.
"""

from __future__ import annotations

from cute_ops.config import Problem
from cute_ops.shapes import ITEMSIZE

WARP = 32
VECTOR_BYTES = 16
ROWS = (
    "x", "residual", "out", "residual_out", "dout", "dresidual_out", "dx", "dresidual", "logits", "dlogits",
)  # fmt: skip
BACKWARD_INPUTS = ("x", "residual_out", "dout", "dresidual_out")
# Shared memory of an SM that rings may fill, by architecture; more than a CTA gets nowhere.
SHARED_BYTES = {80: 160_000, 90: 220_000, 100: 220_000, 103: 220_000, 120: 96_000}
# Rows that start off a vector are read from a multiple of a ``unit`` of so many vectors, a cache line. Rows of fewer
# elements than these would mind the idle threads.
LINE, SHORT = 8, 1024
# Elements of the widest vector: shifted rows repeat their place after at most ``unit`` times as many rows.
VECTOR_ELEMENTS = 8
# Elements of a row that a CTA holds in fp32.
HELD = 16384
# Columns that share a scale.
BLOCK = 128
# Bytes of rows that each CTA of a cluster takes alone; from there on more CTAs and a second kernel are faster.
FEW_BYTES = 36_864
# Rows side by side, and rows of a thread, in that second kernel.
SPLIT_HEIGHT, SPLIT_DEEP = 64, 8
# Bytes of rows up to which reading them twice has been seen to pay.
SPLIT_BYTES = 5 << 20
# Vectors of a row that a persistent CTA of the forward holds the weight and the bias of.
WALKED = 3200
# Bytes of rows that staging CTAs keep on their way to an SM, and their threads; more get in each other's way. While
# rows off a vector are computed, which takes longer, others may load: as many as find room.
STAGED_BYTES, STAGED_THREADS, MOST_THREADS = 165_000, 1536, 1664
# Shared memory of a CTA beside its rows: sums, and what the system keeps.
OWN_BYTES = 1100


def _sm(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def _vectors(problem: Problem) -> int:
    """16-byte vectors of a row in the widest dtype of the row tensors."""
    widest = max(ITEMSIZE[problem.dtypes[name]] for name in ROWS if name in problem.dtypes)
    return -(-problem.dims["n"] * widest // VECTOR_BYTES)


def _wide(problem: Problem) -> bool:
    """Whether a vector has the fewest elements."""
    return max(ITEMSIZE[problem.dtypes[name]] for name in ROWS if name in problem.dtypes) == 4


def _unaligned(problem: Problem) -> bool:
    return min(problem.aligns[name] for name in ROWS if name in problem.dtypes) < VECTOR_BYTES


def _column_bytes(problem: Problem) -> int:
    """Bytes of the weight and the bias beside a vector of a row."""
    widest = max(ITEMSIZE[problem.dtypes[name]] for name in ROWS if name in problem.dtypes)
    columns = sum(ITEMSIZE[problem.dtypes[name]] for name in ("weight", "bias") if name in problem.dtypes)
    return columns * VECTOR_BYTES // widest


def _threads(vectors: int, per_thread: int, most: int = 1024) -> int:
    """Threads of a row: a power of two within a warp, whole warps beyond."""
    wanted = -(-vectors // per_thread)
    if wanted <= WARP:
        return 1 << max(wanted - 1, 0).bit_length()
    return min(-(-wanted // WARP) * WARP, most)


def _most_ctas(problem: Problem) -> int:
    """CTAs that a cluster may have: 16 where the chip has groups of SMs that large."""
    sm = _sm(problem.arch)
    return 1 if sm < 90 else 16 if sm < 120 else 8


def _doubled(vectors: int, span: int, most: int) -> int:
    """CTAs, a power of two up to ``most``, that hold at most ``span`` vectors each where possible."""
    ctas = 1
    while ctas < most and vectors > ctas * span:
        ctas *= 2
    return ctas


def rows_forward(problem: Problem, centred: bool = False) -> dict[str, int]:
    """Threads, those of a row, CTAs of a cluster.

    ``centred``: the row's mean is subtracted, which takes more instructions per thread and more registers.
    ``unroll``: row groups of a CTA. ``unit``: vectors that a shifted row's start is rounded down to.
    Long rows: CTAs resident on an SM (a cap on registers), rows ``packed`` in their own dtype between their sum and
    their output or ``staged`` in shared memory, the weight loaded ``late``; ``long`` where a row fits neither.
    """
    if problem.n is None:
        return {"threads": 512}
    vectors, most = _vectors(problem), _most_ctas(problem)
    unit = LINE if problem.n >= SHORT else 1
    if centred and vectors > 512 and not _unaligned(problem):
        # Twice its threads meet before a row is written: in shared memory, of which more rows find room meanwhile.
        # Four vectors to a thread as far as clusters of 4 reach: of few rows, more SMs share the work.
        span = 2048 if vectors <= 4 * 2048 else 4096 + LINE
        staged = _staged(problem, vectors, most, full=True, span=span, centred=True)
        if staged:
            return {**staged, "unit": unit}
    if vectors <= 1024:
        if centred and vectors > WARP:
            if _unaligned(problem):
                return _walk(problem, vectors + unit, 1, 6, 128, unit)
            row = WARP if vectors <= 5 * WARP else _threads(vectors, 4)
            return {"threads": max(128, row), "threads_per_row": row, "late": 1, "unit": unit}
        row, off, two = _forward_row(problem, vectors), _unaligned(problem), "residual" in problem.dtypes
        if two and not off and vectors > WARP:
            return {**_pairs(vectors, 512), "unroll": 1, "unit": unit}
        if off and two and problem.n >= SHORT and vectors + unit <= 768:
            row = _threads(vectors + unit, 1)
        # Four rows to a thread where a CTA would be over before the next one has started.
        tiny = vectors <= 8 and not off
        threads = 128 if tiny or vectors > WARP else 256
        tile = {"threads": max(threads, row), "threads_per_row": row, "unroll": 4 if tiny else 1, "unit": unit}
        return tile | {"late": 1} if 8 < vectors <= WARP and not (off or two or centred) else tile
    held = vectors + unit
    if centred and _unaligned(problem) and 4096 < held <= 2 * WALKED and most > 1:
        return _walk(problem, held, 2, 5, 640, unit)
    if vectors > (4096 if _unaligned(problem) else 8192):
        full = _unaligned(problem) and not centred and "residual" not in problem.dtypes
        span = 1024 if "residual" in problem.dtypes and not _unaligned(problem) else 4096 + LINE
        staged = _staged(problem, vectors + unit * _unaligned(problem), most, full, span)
        if staged:
            return {**staged, "unit": unit}
    pair = vectors <= 2048 and not (centred or _unaligned(problem) or "residual" in problem.dtypes)
    # Few rows want four CTAs; many mind, unless a warp for each of an SM's four schedulers holds its part to the full.
    cluster = _doubled(vectors, 2048 if not pair else 1024 if vectors % (4 * 512) else 512, most)
    part = -(-vectors // cluster)
    if part > 4096:
        return {"threads": 1024, "long": 1}
    row = _threads(part, 4)
    # Two halves of 16 bits each, widened to add them, need more registers than three CTAs leave.
    halves = "residual" in problem.dtypes and max(ITEMSIZE[problem.dtypes[name]] for name in ("x", "residual")) == 2
    threads = 1024 if halves or centred or pair else 1536
    resident = 1 if most == 1 else 2 if cluster == 1 else max(1, threads // row)
    # A weight of no more bytes than a vector has room beside one input and, where as many threads have no more
    # registers anyway, beside two halves; unless masks take it, as of float16, which is widened in pairs.
    whole = vectors == 4 * row * cluster and not _unaligned(problem)
    early = (pair and (whole or problem.dtypes["x"] != "float16")) or (halves and whole and resident * row == threads)
    early &= _column_bytes(problem) <= VECTOR_BYTES
    return {
        "threads": row, "threads_per_row": row, "cluster": cluster, "packed": 1, "late": int(not early), "unit": unit,
        "resident": resident,
    }  # fmt: skip


def _walk(problem: Problem, held: int, cluster: int, per_thread: int, threads: int, unit: int) -> dict[str, int]:
    """Tile of rows off a vector whose weights stay in registers from row to row: persistent clusters, and ring slots.

    ``sorted_by`` as in the backward; a CTA alone meets rows of one shift only.
    """
    row = _threads(-(-held // cluster), per_thread, threads)
    slot = max(threads // row, 1) * row * per_thread * VECTOR_BYTES
    stages = 2 if cluster == 1 else 3
    if stages * slot + 4096 > SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values())):
        stages = 2
    resident = max(1, min(512 // threads, 160_000 // (stages * slot)))
    period = VECTOR_ELEMENTS * unit
    parts = _clusters(problem, cluster) * resident
    tile = {
        "threads": max(threads // row, 1) * row, "threads_per_row": row, "cluster": cluster, "stages": stages,
        "resident": resident, "parts": max(parts // period, 1) * period, "unit": unit,
    }  # fmt: skip
    return tile if cluster == 1 else tile | {"sorted_by": period}


def _staged(
    problem: Problem, vectors: int, most: int, full: bool = False, span: int = 4096 + LINE, centred: bool = False
) -> dict[str, int]:  # fmt: skip
    """Tile of a row that waits in the shared memory of a cluster; nothing where it does not fit.

    ``full``: with as many CTAs on an SM as find room, and off a vector, or where a row's mean is subtracted, with four
    vectors to a thread where these are no more than 800 threads. ``span``: vectors that a CTA holds.
    """
    cluster = _doubled(vectors, span, most)
    part = -(-vectors // cluster)
    deep = 4 if full and (_unaligned(problem) or centred) and part <= 4 * 800 else 8
    row = _threads(part, deep, 512 + WARP if deep == 8 else 1024)
    inputs = [ITEMSIZE[problem.dtypes[name]] for name in ("x", "residual", "logits") if name in problem.dtypes]
    widest = max(ITEMSIZE[problem.dtypes[name]] for name in ROWS if name in problem.dtypes)
    slot = row * deep * (VECTOR_BYTES // widest) * sum(inputs)
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values()))
    if part > deep * row or slot > shared - 2048:
        return {}
    resident = shared // slot if full else min(STAGED_BYTES, shared) // slot
    resident = max(1, min(resident, (MOST_THREADS if full else STAGED_THREADS) // row))
    # Registers for all of a thread's weight at once, while the row loads.
    late = int(resident * row > 1024 + 2 * WARP or _column_bytes(problem) > VECTOR_BYTES)
    return {"threads": row, "threads_per_row": row, "cluster": cluster, "staged": 1, "late": late, "resident": resident}


def _forward_row(problem: Problem, vectors: int) -> int:
    """Threads of a row that one CTA holds."""
    if vectors <= WARP:
        # Rows of a few elements off a vector are read one by one, about four to a thread.
        return _threads(problem.dims["n"], 4) if _unaligned(problem) and vectors <= 8 else _threads(vectors, 1)
    if _unaligned(problem):
        return _threads(vectors, 3)
    if WARP * 2 < vectors <= WARP * 3:
        return WARP
    return _threads(vectors, 2 if vectors <= 512 or _wide(problem) else 4)


def _pairs(vectors: int, most: int) -> dict[str, int]:
    """Tile of aligned rows of two inputs that one CTA holds.

    A vector of each to a thread, up to ``most`` threads, and at least 256 threads: of few rows the last bytes arrive
    sooner. Two vectors where CTAs of that size leave an eighth or more of an SM's threads out, and many rows would have
    fewer bytes on their way.
    """
    row = _threads(vectors, 1)
    if vectors > most or 2048 // row * row <= 1792:
        row = _threads(vectors, 2)
        return {"threads": row, "threads_per_row": row}
    return {"threads": -(-256 // row) * row, "threads_per_row": row}


def rows_backward(problem: Problem, centred: bool = False) -> dict[str, int]:
    """As the forward, and: ring slots, CTAs resident on an SM, clusters altogether.

    ``few``: each of ``replicas`` clusters takes all rows. ``split``: columns go to a second kernel, where ``height``
    threads share a vector of them and take ``deep`` rows each. ``sorted_by``: rows that start at the same place of a
    vector are neighbours.
    """
    long = {"threads": 512, "parts": 2 * problem.sm_count}
    if problem.n is None:
        return long
    vectors, most = _vectors(problem), _most_ctas(problem)
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values()))
    slot = problem.n * sum(ITEMSIZE[problem.dtypes[name]] for name in BACKWARD_INPUTS if name in problem.dtypes)
    few = _few(problem, vectors, slot, most) or _split(problem, vectors, slot, most)
    if few:
        return few
    # Registers for the column sums of so many vectors leave room for so many threads on an SM.
    sums = max(sum(name in problem.dtypes for name in ("dweight", "dbias")), 1)
    # Two vectors per thread as far as clusters of 4 reach, then four.
    unit = LINE if problem.n >= SHORT and (vectors <= 2048 or problem.m >= SHORT) else 1
    held = vectors + (unit if _unaligned(problem) else 0)
    if vectors > 1024:
        span = 1600 if sums == 2 else 2048 if _unaligned(problem) else 1024
        cluster = max(min(4, _doubled(held, 1024, most)), _doubled(held, span, most))
    else:
        # Two small CTAs in place of a large one: as many bytes are on their way in fewer rows.
        pair = vectors >= 512 and sums == 1 and not (_wide(problem) or _unaligned(problem))
        cluster = min(2, most) if pair else 1
    part = -(-held // cluster)
    if vectors > WARP and (sums == 2 or (centred and _unaligned(problem))):
        # Many columns per thread: what two column sums cost in threads, fewer partial sums of a row give back.
        per_thread = -(-vectors // WARP) if vectors <= 5 * WARP else 3 if _unaligned(problem) and cluster == 1 else 4
        many = vectors > 5 * WARP if _wide(problem) else problem.n <= 12 * WARP
        room = 768 if many else 576 if _unaligned(problem) else 384
    elif _unaligned(problem) and part <= 1024 and cluster <= 2:
        per_thread, room = (1, 1152) if part <= 512 else (2, 640)
    elif vectors <= 1024 and cluster == 2:
        per_thread, room = (1, 768) if part <= 256 else (2, 576)
    elif part <= 384:
        per_thread, room = 1, 1024
    elif cluster > 1 or part <= 768:
        per_thread, room = 2 if part <= 1024 else 4, 800
    else:
        per_thread, room = 2 if _wide(problem) else 4, 512
    if per_thread == 4:
        # The fewest vectors for the busiest of an SM's four schedulers.
        per_thread = min((4, 5), key=lambda k: -(-_threads(part, k, 512) // (4 * WARP)) * k)
    row = _threads(part, per_thread, 512 if per_thread > 1 else 1024)
    balanced = {}
    if cluster > 2 and sums == 2 and _unaligned(problem):
        row, balanced = _balanced(part), {"balanced": 1}
        unit = min(unit, LINE // 2)  # every other place where rows may start, and half as many sums to begin and store
    threads, room = max(256, row) if sums == 1 else max(256 // row, 1) * row, room * 2 // (1 + sums)
    if cluster > 1:
        threads = row
    slot_bytes = -(-slot // cluster) * (threads // row) + 64 * VECTOR_BYTES
    if balanced:
        slot_bytes = row * -(-(part + WARP - 1) // row) * -(-slot // vectors)
    if part > max(4, per_thread) * row or 2 * slot_bytes > shared:
        return {**long, "long": 1}
    deeper = cluster > 1 and (vectors > 1024 or (cluster == 2 and part <= 256))
    if "dresidual_out" in problem.dtypes and _unaligned(problem) and cluster == 1 and 512 < part <= 1024:
        deeper, room = True, threads  # one CTA, whose rows of three inputs are on their way longer
    stages = 3 if deeper and 3 * slot_bytes <= shared else 2
    resident = max(1, min(shared // (stages * slot_bytes + 2048), room // threads))
    tile = {
        "threads": threads, "threads_per_row": row, "cluster": cluster, "stages": stages, "resident": resident,
        "parts": _clusters(problem, cluster) * resident, "unit": unit, **balanced,
    }  # fmt: skip
    # So few clusters that no multiple of the places where rows may start fills the chip. Few rows have few places.
    return {**tile, "sorted_by": VECTOR_ELEMENTS * unit} if _unaligned(problem) and cluster > 2 else tile


def _balanced(part: int) -> int:
    """Threads of a CTA that holds so many vectors, up to five to a thread, whose registers for two column sums of them
    leave room for twelve warps: those of which the busiest of an SM's four schedulers has the fewest vectors.
    """
    together = -(-part // WARP)

    def busiest(warps: int) -> int:
        return sum(together // warps + (w < together % warps) for w in range(0, warps, 4))

    least = min(-(-together // 5), 12)
    return WARP * min(range(12, least - 1, -1), key=busiest)


def _few(problem: Problem, vectors: int, slot: int, most: int) -> dict[str, int]:
    """Tile of so few rows that every cluster takes them all; nothing where they are more, or start off a vector.

    It looks at the number of rows in powers of two.
    """
    cluster = _doubled(vectors, WARP, most)
    if problem.m * slot > cluster * FEW_BYTES or _unaligned(problem):
        return {}
    row = _threads(-(-vectors // cluster), 1)
    rows = min(1024 // row, _power(problem.m))
    stages = _power(-(-problem.m // rows))
    part = row * -(-vectors // (cluster * row))
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values()))
    if stages * rows * (part * -(-slot // vectors) + 8) > shared - 48 * 1024:
        return {}
    # As many clusters of the largest size as surely find room.
    replicas = min(4 * most // cluster, 16, row)
    return {
        "threads": rows * row, "threads_per_row": row, "cluster": cluster, "stages": stages, "few": 1,
        "replicas": replicas,
    }  # fmt: skip


def _split(problem: Problem, vectors: int, slot: int, most: int) -> dict[str, int]:
    """Tile of rows that a second kernel's threads hold in registers; nothing where they are more or off a vector.

    It looks at the number of rows in powers of two.
    """
    count = _power(problem.m)
    height = min(count, SPLIT_HEIGHT)
    deep = count // height
    if deep > SPLIT_DEEP or problem.m * slot > SPLIT_BYTES or _unaligned(problem):
        return {}
    cluster = _doubled(vectors, 512, min(most, 8))
    row = _threads(-(-vectors // cluster), 1)
    rows = max(128 // row, 1)
    part = row * -(-vectors // (cluster * row))
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values()))
    if 2 * rows * part * -(-slot // vectors) > shared - 8 * 1024:
        return {}
    return {
        "threads": rows * row, "threads_per_row": row, "cluster": cluster, "stages": 2, "resident": 1, "split": 1,
        "height": height, "deep": deep,
    }  # fmt: skip


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def _clusters(problem: Problem, cluster: int) -> int:
    """Clusters that are on the chip at once, one CTA to an SM.

    SMs come in groups that no cluster straddles, and every group may leave a rest. Asking for one cluster too many
    doubles the time: it runs when all others are done.
    """
    rest = {1: 0, 2: 2, 4: 3, 8: 2, 16: 1}[cluster]
    return max(problem.sm_count // cluster - rest, 1)


def pointwise(problem: Problem) -> dict[str, int]:
    """A vector to a thread. Five streams keep step with the pages of memory in small CTAs only; of four-byte elements a
    CTA takes as many with twice the threads.
    """
    threads = 128 if "dout" in problem.dtypes and "x" not in problem.dtypes else 256
    return {"threads": 2 * threads if _wide(problem) else threads, "unroll": 1}


def pointwise_halves(problem: Problem) -> dict[str, int]:
    """As :func:`pointwise` of two inputs, which packed halves are; small CTAs where they lie off a vector."""
    return {"threads": 128 if "dout" in problem.dtypes or _unaligned(problem) else 256, "unroll": 1}


def backward_parts(problem: Problem, tile: dict[str, int]) -> int:
    """Rows of the workspace: persistent clusters, as many as fit the chip at once or have rows to work on."""
    if "few" in tile or "split" in tile:
        return 0
    rows = tile["threads"] // tile["threads_per_row"] if "threads_per_row" in tile else 1
    groups = -(-problem.m // rows)
    # Four steps each before there are more of them than SMs, and no more of them than that many steps need.
    parts = min(tile["parts"], max(-(-groups // 4), min(groups, problem.sm_count)))
    parts = -(-groups // -(-groups // parts))
    if "sorted_by" in tile:
        # A walk for every cluster and one more wherever a cluster goes on to the next remainder.
        return parts + tile["sorted_by"] - 1
    if _unaligned(problem):
        # A cluster meets rows of one shift only.
        period = VECTOR_ELEMENTS * tile.get("unit", 1)
        parts = period * max(min(-(-parts // period), tile["parts"] // period), 1)
    return parts


def rows_quantize(problem: Problem) -> dict[str, int]:
    """As the forward, for rows held in fp32; ``staged`` where they outgrow the registers of a CTA and ``long`` where
    they outgrow a cluster; ``late`` as in :func:`rows_forward`.

    Four vectors to a thread, and registers capped so that about 1100 threads of an SM have theirs on the way. Two or
    one where nothing is summed and a row has 256 of them: the last vectors of few rows arrive sooner.
    """
    if problem.n is None:
        return {"threads": 512}
    rows = [name for name in (*ROWS, "gate", "up") if name in problem.dtypes]
    vec = VECTOR_BYTES // max(ITEMSIZE[problem.dtypes[name]] for name in rows)
    start = min(problem.aligns[name] // ITEMSIZE[problem.dtypes[name]] for name in rows)
    # Half vectors, but no narrower ones, and none that would not fit a block to a warp, beat pairs of whole ones.
    vec = start if 2 * start == vec and start * WARP >= BLOCK else vec
    vectors, unaligned = -(-problem.n // vec), start < vec
    if vectors <= WARP:
        row = _threads(problem.n, 4) if unaligned and vectors <= 8 else _threads(vectors, 1)
        return {"threads": max(256, row), "threads_per_row": row, "unroll": 1 if unaligned else 4}
    most = _most_ctas(problem)
    two = "up" in problem.dtypes or "residual" in problem.dtypes
    # Beside so many elements of a row, a weight is too much.
    held = HELD * 5 // 8 if "weight" in problem.dtypes and not two else HELD
    if vectors > held // vec and (unaligned or not two):
        staged = _staged_quantized(problem, vectors, unaligned, most)
        if staged:
            return staged
    cluster = _doubled(vectors, HELD // vec, most)
    if cluster > 1:  # small CTAs as far as clusters of 4 reach
        cluster = max(cluster, _doubled(vectors, HELD // 2 // vec, min(most, 4)))
    part = -(-vectors // cluster)
    if part > HELD // vec:
        return {"threads": 1024, "long": 1}
    # Rows that start anywhere arrive in pairs of vectors, which takes registers, and cost more besides, which wants few
    # threads.
    row = _threads(part, 4 if not unaligned else 5 if not two else 3)
    if problem.attrs["block"] and problem.n > BLOCK:
        row = max(row, BLOCK // vec)  # lanes that find the largest of a block together
    threads = max(row, 128)
    room = 768 if "bias" in problem.dtypes else 896 if "up" in problem.dtypes else 1120
    if unaligned:
        room = 960 if "up" in problem.dtypes else 768 if two else min(room, 1024)
    columns = sum(ITEMSIZE[problem.dtypes[name]] for name in ("weight", "bias") if name in problem.dtypes)
    resident = max(1, room // threads)
    if cluster == 1 and part >= 256 and not (columns or unaligned):
        row = threads = max(_threads(part, 2), 256)
        resident = min(resident, max((1536 if two else 2048) // threads, 2))
    return {
        "threads": threads,
        "threads_per_row": row,
        "cluster": cluster,
        "resident": resident,
        "late": int(columns > 2),
    }


def _staged_quantized(problem: Problem, vectors: int, unaligned: bool, most: int) -> dict[str, int]:
    """As :func:`_staged`, for rows that are looked at two or three times: threads keep the weight meanwhile."""
    widths = [ITEMSIZE[problem.dtypes[name]] for name in ("x", "residual", "gate", "up") if name in problem.dtypes]
    held = vectors + LINE * unaligned
    cluster = _doubled(held * len(widths), 4096 + LINE, most)
    part = -(-held // cluster)
    # A scale of the whole row is known late: fewer threads wait for it.
    deep = 16 if "weight" in problem.dtypes and not (unaligned or problem.attrs["block"]) and part > 2048 else 8
    row = _threads(part, deep, 512 + WARP)
    slot = row * deep * (VECTOR_BYTES // max(widths)) * sum(widths)
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values()))
    if part > deep * row or slot > shared - 2048:
        return {}
    # The weight takes registers; rows that start anywhere without one take more time than memory.
    room, bytes_ = (1632, shared) if unaligned else (1536, min(STAGED_BYTES, shared))
    if "weight" in problem.dtypes:
        by_row = not problem.attrs["block"]
        room, bytes_ = 1024 if not unaligned else 896 if by_row else 1248, min(STAGED_BYTES, shared)
    resident = max(1, min(bytes_ // slot, room // row))
    tile = {"threads": row, "threads_per_row": row, "cluster": cluster, "staged": 1, "late": 0, "resident": resident}
    return {**tile, "unit": LINE} if unaligned else tile


def rows_walked(problem: Problem) -> dict[str, int]:
    """A reduction that leaves nothing of a row but a number.

    The shortest rows wait in registers, others in shared memory (``staged``). The longest are cut into parts and
    walked: by a cluster's CTAs where rows are few, by one CTA where they are many, which gives the same bits.
    """
    if problem.n is None:
        return {"threads": 512}
    vectors, unit = _vectors(problem), LINE if problem.dims["n"] >= SHORT else 1
    if vectors <= WARP:
        row = _forward_row(problem, vectors)
        return {"threads": max(256, row), "threads_per_row": row, "unit": unit}
    # Sixteen thousand vectors and more are as fast walked.
    staged = _staged_full(problem, vectors, unit) if vectors <= 8 * 2048 else {}
    if staged:
        return staged
    parts = _doubled(vectors, 2048, 8)
    tile = {"threads": 256, "unit": unit, "long": 1}
    if problem.m < 2 * problem.sm_count and 1 < parts <= _most_ctas(problem):
        return {**tile, "cluster": parts}
    # Of CTAs with few registers more are resident, and more loads on their way.
    return {**tile, "parts": parts, "resident": 4 if _unaligned(problem) else 7}


def _staged_full(problem: Problem, vectors: int, unit: int) -> dict[str, int]:
    """Tile of a row in the shared memory of at most eight CTAs, as many bytes on their way as fit; nothing where the
    row is too long.
    """
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values())) - 2048
    off = _unaligned(problem)
    held = vectors + unit * off
    if vectors <= 256:
        row, least = _threads(vectors, 4), 128
        slot = max(row, least) * -(-held // row) * VECTOR_BYTES + OWN_BYTES
        resident = min(shared // slot, (1024 if off else 2048) // least)
        return {
            "threads": max(row, least), "threads_per_row": row, "unit": unit, "staged": 1, "resident": max(1, resident),
        }  # fmt: skip
    # Masks cost instructions: rows off a vector get more threads to a CTA, and fewer CTAs.
    cluster = _doubled(vectors, 4096 + LINE if off else 2048, min(_most_ctas(problem), 8))
    row = _threads(-(-held // cluster), 8, 512 + WARP)
    slot = row * 8 * VECTOR_BYTES + OWN_BYTES
    if -(-held // cluster) > 8 * row or slot > shared:
        return {}
    tile = {"threads": row, "threads_per_row": row, "unit": unit, "staged": 1}
    tile["resident"] = max(1, min(shared // slot, 1664 // row))
    return {**tile, "cluster": cluster} if cluster > 1 else tile


def rows_mapped_once(problem: Problem) -> dict[str, int]:
    """As :func:`rows_mapped`, for a kernel that writes where it has read."""
    tile = rows_mapped(problem)
    vectors = _vectors(problem)
    if problem.n is None or vectors <= 4 * WARP:
        return tile
    unit = LINE if problem.dims["n"] >= SHORT else 1
    if vectors > 1024 or (_unaligned(problem) and vectors > 8 * WARP):
        return _staged_full(problem, vectors, unit) or tile
    if _unaligned(problem):
        return tile
    row = max(_threads(vectors, 8), 2 * WARP)
    shared = SHARED_BYTES.get(_sm(problem.arch), min(SHARED_BYTES.values()))
    # Exponentials take registers, which more threads would not have.
    resident = min(shared // (row * -(-vectors // row) * VECTOR_BYTES + OWN_BYTES), 1024 // row)
    return {"threads": row, "threads_per_row": row, "unit": unit, "staged": 1, "resident": resident}


def rows_mapped(problem: Problem) -> dict[str, int]:
    """A reduction and an output of the row's size: as the norms' forward, rows beyond 1024 vectors in shared memory."""
    if problem.n is None:
        return {"threads": 512}
    vectors, unit = _vectors(problem), LINE if problem.dims["n"] >= SHORT else 1
    if vectors > 1024:
        # Where one CTA does not hold a row, small ones begin sooner.
        span = 1024 if vectors > 4096 and not _unaligned(problem) else 4096 + LINE
        staged = _staged(problem, vectors + unit * _unaligned(problem), _most_ctas(problem), span=span)
        return {**staged, "unit": unit} if staged else {"threads": 1024, "long": 1}
    row = _forward_row(problem, vectors)
    return {"threads": max(128 if vectors > WARP else 256, row), "threads_per_row": row, "unit": unit}


def pairs_reduced(problem: Problem) -> dict[str, int]:
    """A reduction over rows of two inputs held in registers; ``long`` where a row fits no cluster's."""
    if problem.n is None:
        return {"threads": 512}
    vectors, most = _vectors(problem), _most_ctas(problem)
    unit = LINE if problem.dims["n"] >= SHORT else 1
    if vectors <= 1024 and _unaligned(problem):
        row = _forward_row(problem, vectors)
        return {"threads": max(128 if vectors > WARP else 256, row), "threads_per_row": row, "unit": unit}
    if vectors <= 1024:
        return {**_pairs(vectors, 1024), "unit": unit}
    # Four vectors of 16 bytes of each input have room in a thread.
    cluster = _doubled(vectors, 1024, most)
    part = -(-(vectors + unit * _unaligned(problem)) // cluster)
    row = _threads(part, 4)
    if part > row * (4 if row <= 800 else 3):
        return {"threads": 1024, "long": 1}
    resident = max(1, (1024 if cluster > 8 else 800) // row)
    return {"threads": row, "threads_per_row": row, "cluster": cluster, "unit": unit, "resident": resident}


def rows_apart(problem: Problem, whole: int = 8192) -> dict[str, int]:
    """No reduction: threads, those of a row, parts of a row that go to different CTAs.

    ``whole``: vectors of a row that is not parted where rows are many.
    """
    if problem.n is None:
        return {"threads": 512}
    vectors, off = _vectors(problem), _unaligned(problem)
    unit = LINE if problem.n >= SHORT else 1
    if vectors <= 1024:
        # Three vectors to a thread of long ones: CTAs of few rows start sooner, and many rows do not mind.
        row = _forward_row(problem, vectors) if off or vectors <= 512 else _threads(vectors, 3)
        return {"threads": max(128 if vectors > WARP else 256, row), "threads_per_row": row, "unit": unit}
    # Rows off a vector have edges to mask: fewer and longer parts.
    threads, part = (256, 4096 + LINE) if off else (512, 2048)
    if problem.m * -(-vectors // part) < 2 * problem.sm_count:
        part //= 2  # few rows are cut into more parts, so that every SM has one
    elif vectors <= whole:
        part = part if off else whole
    segments = -(-(vectors + unit * off) // part)
    return {"threads": threads, "threads_per_row": threads, "segments": segments, "unit": unit}


def rows_filled(problem: Problem) -> dict[str, int]:
    """As :func:`rows_apart`, for a kernel that reads no rows: CTAs that write little are over before others start."""
    if problem.n is None or _vectors(problem) > 1024:
        return rows_apart(problem, 2048)
    vectors, unit = _vectors(problem), LINE if problem.n >= SHORT else 1
    if 256 < vectors <= 512 and not _unaligned(problem):
        row = _threads(vectors, 6)
        return {"threads": 2 * row, "threads_per_row": row, "unit": unit}
    row = _forward_row(problem, vectors)
    return {"threads": max(256, row), "threads_per_row": row, "unit": unit}
