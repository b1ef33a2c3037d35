"""How the search of the largest numbers is configured."""

from __future__ import annotations

from cute_ops.declaration.config import Problem
from cute_ops.hardware import WARP
from cute_ops.kernels.routing.config import SEGMENT, TopkConfig

# Columns of a thread. Of rows that are sorted the most columns, and the most numbers that are asked for.
THREAD_COLUMNS, SORTED_ROW, SORTED_MOST = 32, 1024, 16
# Threads of a CTA that sorts; the most of one that selects, and how many such threads an SM has.
SORT_THREADS, SELECT_THREADS, SELECT_SM_THREADS = 128, 256, 1024


def topk(problem: Problem) -> TopkConfig:
    """Short rows are sorted, several by a warp; in longer ones a bound is found first that few numbers reach."""
    n, k = min(problem.n or SEGMENT, SEGMENT), problem.attrs["k"]
    threads = _power(-(-n // THREAD_COLUMNS))
    if n <= SORTED_ROW and k <= SORTED_MOST:
        return TopkConfig("sort", SORT_THREADS, threads_per_row=min(threads, WARP))
    threads = max(threads, WARP)
    return TopkConfig("select", threads, resident=SELECT_SM_THREADS // threads, groups=max(_power(2 * k), threads))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
