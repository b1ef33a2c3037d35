"""How the kernels around attention are configured."""

from __future__ import annotations

import math

from cute_ops.declaration.config import Problem
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.config import AppendConfig
from cute_ops.ops.rows import threads_for

THREADS, UNROLL = 128, 4


def append_kv(problem: Problem) -> AppendConfig:
    """As few threads for a token as copy its keys, and its values, at once."""
    vectors = max(_vectors(problem, "k", "d"), _vectors(problem, "v", "e"))
    return AppendConfig(THREADS, threads_for(vectors, UNROLL, THREADS), UNROLL)


def _vectors(problem: Problem, name: str, dim: str) -> int:
    """Vectors of a token's heads, as wide as their alignment allows, here and in the cache."""
    size = problem.dims[dim]
    aligned = min(VECTOR_BYTES, problem.aligns[name], problem.aligns[f"{name}_cache"])
    return int(problem.dims["h"] * (size // math.gcd(size, aligned // ITEMSIZE[problem.dtypes[name]])))
