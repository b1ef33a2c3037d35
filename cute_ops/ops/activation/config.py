"""How the pointwise kernels are configured: heuristics and their search space."""

from __future__ import annotations

from cute_ops.config import Problem, vary
from cute_ops.kernels.rowwise.config import PointwiseConfig
from cute_ops.ops.rows import row_of

# Threads of a CTA, each with a vector. Five streams keep step with the pages of memory in small CTAs only.
THREADS, THREADS_OF_FIVE_STREAMS = 256, 128


def pointwise(problem: Problem) -> PointwiseConfig:
    """A vector to a thread; of four-byte elements a CTA takes as many with twice the threads."""
    five = "dout" in problem.dtypes and "x" not in problem.dtypes
    threads = THREADS_OF_FIVE_STREAMS if five else THREADS
    return PointwiseConfig(threads * (2 if row_of(problem).itemsize == 4 else 1), unroll=1)


def packed(problem: Problem) -> PointwiseConfig:
    """As :func:`pointwise` of two inputs, which packed halves are; small CTAs where they lie off a vector."""
    small = "dout" in problem.dtypes or not row_of(problem).aligned
    return PointwiseConfig(THREADS_OF_FIVE_STREAMS if small else THREADS, unroll=1)


SPACE = vary(threads=(64, 128, 256, 512), unroll=(1, 2, 4))
