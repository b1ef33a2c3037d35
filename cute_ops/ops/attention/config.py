"""How the kernels around attention are configured."""

from __future__ import annotations

import math

from cute_ops.declaration.config import Problem
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.config import AppendConfig, AttentionConfig
from cute_ops.ops.attention import mods
from cute_ops.ops.rows import threads_for

THREADS, UNROLL = 128, 4
# Keys of a tile by the most elements of a head.
KEYS = {128: 128, 192: 96, 256: 80}


def append_kv(problem: Problem) -> AppendConfig:
    """A token has the fewest threads that copy its keys, and its values, at once."""
    vectors = max(_vectors(problem, "k", "d"), _vectors(problem, "v", "e"))
    return AppendConfig(THREADS, threads_for(vectors, UNROLL, THREADS), UNROLL)


def attention(problem: Problem) -> AttentionConfig:
    """A tile of as many keys as registers and shared memory hold."""
    if not problem.arch.startswith("sm_90"):
        raise NotImplementedError(
            f"cute.attention: its kernel is for SM 9.0 (H100, H200), the target is {problem.arch}."
        )
    d, attrs = max(problem.dims["d"], problem.dims["e"]), problem.attrs
    mask, bounds = mods.mask_of(attrs["left"], 0 if attrs["causal"] else attrs["right"])
    tile_n = next(keys for size, keys in KEYS.items() if d <= size)
    return AttentionConfig(tile_n, problem.sm_count, mask, bounds, mods.score_of(attrs["softcap"]))


def _vectors(problem: Problem, name: str, dim: str) -> int:
    """Vectors of a token's heads, as wide as their alignment allows, here and in the cache."""
    size = problem.dims[dim]
    aligned = min(VECTOR_BYTES, problem.aligns[name], problem.aligns[f"{name}_cache"])
    return int(problem.dims["h"] * (size // math.gcd(size, aligned // ITEMSIZE[problem.dtypes[name]])))
