"""How the pointwise kernels are configured: heuristics and their search space."""

from __future__ import annotations

from cute_ops.config import Problem, vary
from cute_ops.kernels.rowwise.config import PointwiseConfig
from cute_ops.ops.rows import row_of

# Threads of a CTA. With five streams (three inputs, two outputs) CTAs are small: large ones drift apart over memory
# pages.
THREADS, THREADS_OF_FIVE_STREAMS = 256, 128


def pointwise(problem: Problem) -> PointwiseConfig:
    """One vector per thread. Vectors of 4-byte elements have half as many, so a CTA has twice the threads."""
    five = "dout" in problem.dtypes and "x" not in problem.dtypes
    threads = THREADS_OF_FIVE_STREAMS if five else THREADS
    return PointwiseConfig(threads * (2 if row_of(problem).itemsize == 4 else 1), unroll=1)


def packed(problem: Problem) -> PointwiseConfig:
    """The two halves of packed rows; small CTAs in a backward, and where halves do not start on a vector."""
    small = "dout" in problem.dtypes or not row_of(problem).aligned
    return PointwiseConfig(THREADS_OF_FIVE_STREAMS if small else THREADS, unroll=1)


SPACE = vary(threads=(64, 128, 256, 512), unroll=(1, 2, 4))
