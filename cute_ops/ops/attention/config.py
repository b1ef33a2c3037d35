"""How the kernels around attention are configured."""

from __future__ import annotations

import math

from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.config import AppendConfig, AttentionBackwardConfig, AttentionConfig
from cute_ops.ops.attention import mods
from cute_ops.ops.rows import threads_for

THREADS, UNROLL = 128, 4
# Keys of a tile by the most elements of a head.
KEYS = {128: 128, 192: 96, 256: 80}
# Likewise keys and slots of the gradient of queries, and queries and slots of that of keys and values.
BACKWARD = {64: (128, 2, 96, 2), 128: (96, 2, 48, 2), 192: (64, 2, 32, 2), 256: (64, 1, 32, 1)}


def append_kv(problem: Problem) -> AppendConfig:
    """A token has the fewest threads that copy its keys, and its values, at once."""
    vectors = max(_vectors(problem, "k", "d"), _vectors(problem, "v", "e"))
    return AppendConfig(THREADS, threads_for(vectors, UNROLL, THREADS), UNROLL)


def attention(problem: Problem) -> AttentionConfig:
    """A tile of as many keys as registers and shared memory hold."""
    size, attrs = _headdim(problem), problem.attrs
    tile_n = next(keys for longest, keys in KEYS.items() if size <= longest)
    return AttentionConfig(tile_n, problem.sm_count, *_mask(problem), mods.score_of(attrs["softcap"]))


def attention_bwd(problem: Problem) -> AttentionBackwardConfig:
    """Tiles of as many keys and queries as registers and shared memory hold."""
    size, cap = _headdim(problem), problem.attrs["softcap"]
    tiles = next(tiles for longest, tiles in BACKWARD.items() if size <= longest)
    return AttentionBackwardConfig(*tiles, *_mask(problem), mods.score_of(cap), mods.score_gradient_of(cap))


def workspace(problem: Problem, _: Config) -> dict[str, Array | None]:
    """A number for each row of each head: the sum of its output times its cotangent."""
    dims = problem.dims
    return {"delta": Array((problem.m, dims["g"] * dims["r"], dims["s"]), "float32")}


def _headdim(problem: Problem) -> int:
    """The longer of both head dims.

    Raises:
        NotImplementedError: the target is no Hopper GPU.
    """
    if not problem.arch.startswith("sm_90"):
        what = f"its kernels are for SM 9.0 (H100, H200), the target is {problem.arch}"
        raise NotImplementedError(f"cute.attention: {what}.")
    return int(max(problem.dims["d"], problem.dims["e"]))


def _mask(problem: Problem) -> tuple[str, str]:
    attrs = problem.attrs
    return mods.mask_of(attrs["left"], 0 if attrs["causal"] else attrs["right"])


def _vectors(problem: Problem, name: str, dim: str) -> int:
    """Vectors of a token's heads, as wide as their alignment allows, here and in the cache."""
    size = problem.dims[dim]
    aligned = min(VECTOR_BYTES, problem.aligns[name], problem.aligns[f"{name}_cache"])
    return int(problem.dims["h"] * (size // math.gcd(size, aligned // ITEMSIZE[problem.dtypes[name]])))
