"""The heuristic and the search space of AdamW's kernel."""

from __future__ import annotations

from cute_ops.declaration.config import Problem, vary
from cute_ops.kernels.rowwise.config import MapConfig
from cute_ops.ops.rows import CTA_VECTORS, row_of, threads_for

ROWS = ("param", "grad", "exp_avg", "exp_avg_sq")


def adamw(problem: Problem) -> MapConfig:
    """One vector of every tensor per thread; a row is cut into as few CTAs as hold it."""
    if problem.n is None:
        return MapConfig("elements", 256)
    row = row_of(problem, ROWS)
    segments = -(-row.touched // CTA_VECTORS)
    share = threads_for(-(-row.touched // segments), 1)
    return MapConfig("segments", max(128, share), share, align_vectors=row.align_vectors, segments=segments)


SPACE = vary(threads=(64, 128, 256, 512))
