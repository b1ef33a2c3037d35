"""Tile heuristics: what a kernel is told about its shape, as plain integers.

A heuristic sees the problem (rows, row length, dtypes, alignments, SM target) and imports nothing heavy. Forward
tiles depend on the row length alone, so that a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Any

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
WARP = 32
ROW_OUTPUTS = ("out", "residual_out", "dx", "dresidual")
BACKWARD_INPUTS = ("x", "residual_out", "dout", "dresidual_out")
# Shared memory of an SM that CTAs may fill, and registers per SM, both less than there is: (bytes, registers).
SHARED_BYTES = {80: 160_000, 90: 220_000, 100: 220_000, 103: 220_000, 120: 96_000}


def sm(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def _power_above(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


def _row_names(problem: Any) -> list[str]:
    names = ("x", "residual", "out", "residual_out", "dout", "dresidual_out", "dx", "dresidual")
    return [name for name in names if name in problem.dtypes]


def _vectors(problem: Any) -> int:
    """16-byte vectors of a row, in the narrowest dtype among the row tensors."""
    itemsize = min(ITEMSIZE[problem.dtypes[name]] for name in _row_names(problem))
    return -(-problem.n * itemsize // 16)


def _spread(vectors: int, per_thread: int, most: int) -> int:
    """Threads of a row: a power of two within a warp, warps beyond, about ``per_thread`` vectors each."""
    wanted = -(-vectors // per_thread)
    if wanted <= WARP:
        return _power_above(wanted)
    return min(-(-wanted // WARP) * WARP, most)


def rows_forward(problem: Any) -> dict[str, int]:
    """Threads, threads of a row, CTAs of a cluster; ``long`` where a row does not fit registers."""
    if problem.n is None:
        return {"threads": 512}
    vectors = _vectors(problem)
    cluster = 1
    most = 1024 * 4
    if sm(problem.arch) >= 90:
        while cluster < 8 and vectors > cluster * 2048:
            cluster *= 2
    if vectors > cluster * most:
        return {"threads": 1024, "long": 1}
    row = _spread(-(-vectors // cluster), 4, 1024)
    return {"threads": max(128, row), "threads_per_row": row, "cluster": cluster}


def rows_backward(problem: Any) -> dict[str, int]:
    """As the forward, and: ring slots, resident CTAs per SM, and CTAs altogether where no workspace says so."""
    if problem.n is None:
        return {"threads": 512, "resident": 2, "parts": 2 * problem.sm_count}
    vectors = _vectors(problem)
    shared = SHARED_BYTES.get(sm(problem.arch), 96_000)
    slot = problem.n * sum(ITEMSIZE[problem.dtypes[name]] for name in BACKWARD_INPUTS if name in problem.dtypes)
    cluster = 1
    if sm(problem.arch) >= 90:
        while cluster < 8 and vectors > cluster * 1024:
            cluster *= 2
    if vectors > cluster * 2048 or 2 * slot > cluster * shared:
        return {"threads": 512, "long": 1, "resident": 2, "parts": 2 * problem.sm_count}
    part = -(-vectors // cluster)
    row = _spread(part, 1 if part <= WARP else 2 if part <= 1024 else 4, 512)
    threads = max(256, row)
    rows = threads // row
    slot_bytes = -(-slot // cluster) * rows
    stages = 3 if 3 * slot_bytes <= shared else 2
    resident = max(1, min(shared // (stages * slot_bytes + 2048), 1024 // threads))
    return {
        "threads": threads, "threads_per_row": row, "cluster": cluster, "stages": stages, "resident": resident,
        "parts": max(1, resident * problem.sm_count // cluster),
    }  # fmt: skip


def pointwise(problem: Any) -> dict[str, int]:
    return {"threads": 256, "unroll": 2}


def backward_parts(problem: Any, tile: dict[str, int]) -> int:
    """Rows of the workspace: persistent clusters, no more than fit the chip at once or have rows to work on.

    Rows that do not start on a vector need a multiple of 8 of them: a cluster then meets the same shift each time.
    """
    rows = tile["threads"] // tile["threads_per_row"] if "threads_per_row" in tile else 1
    groups = -(-problem.m // rows)
    parts = min(tile["parts"], groups)
    # No fewer steps with more clusters: take the fewest clusters of that many steps.
    parts = -(-groups // -(-groups // parts))
    if min(problem.aligns[name] for name in _row_names(problem)) < 16:
        parts = max(parts // 8, 1) * 8 if parts + 7 > tile["parts"] else -(-parts // 8) * 8
    return parts
