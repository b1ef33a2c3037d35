"""Heuristics, a search space and a workspace of the kernels of parts, which only our own functions call."""

from __future__ import annotations

from cute_ops.config import Config, Problem, vary
from cute_ops.hardware import WARP
from cute_ops.kernels.parts.config import EmbeddingConfig, ScaleConfig
from cute_ops.kernels.rowwise.config import MapConfig
from cute_ops.ops.rows import CTA_VECTORS, VECTOR_BYTES, row_of, threads_for
from cute_ops.shapes import ITEMSIZE, Array

ADAMW_ROWS = ("param", "grad", "exp_avg", "exp_avg_sq")
# Threads of a CTA, and the most that share a row.
EMBEDDING_THREADS, EMBEDDING_ROW_THREADS = 256, 64
# Tokens of one class whose sum is computed first; classes of a group of threads where most classes have no token.
EMBEDDING_CHUNK, EMBEDDING_CLASSES = 64, 8
# Persistent CTAs per SM: they keep 64 KB of loads in flight, which is enough for full bandwidth. They are persistent
# because starting a CTA takes longer than seeing that a block needs no scaling.
SCALE_CTAS = 4


def adamw(problem: Problem) -> MapConfig:
    """One vector of every tensor per thread; a row is cut into as few CTAs as hold it."""
    if problem.n is None:
        return MapConfig("elements", 256)
    row = row_of(problem, ADAMW_ROWS)
    segments = -(-row.touched // CTA_VECTORS)
    share = threads_for(-(-row.touched // segments), 1)
    return MapConfig("segments", max(128, share), share, align_vectors=row.align_vectors, segments=segments)


ADAMW = vary(threads=(64, 128, 256, 512))


def embedding_bwd(problem: Problem) -> EmbeddingConfig:
    """Up to 64 threads share a row or a segment of it. Such a group takes several classes where classes are no fewer
    than tokens and make at least four CTAs per SM.
    """
    share, segments = EMBEDDING_ROW_THREADS, 1
    if problem.n is not None:
        rows = ("dout", "dweight")
        vec = min(min(problem.aligns[name], VECTOR_BYTES) // ITEMSIZE[problem.dtypes[name]] for name in rows)
        vectors = max(-(-problem.n // vec), 1)
        segments = -(-vectors // EMBEDDING_ROW_THREADS)
        share = -(-vectors // segments)
    tokens, classes = problem.dims["t"], problem.dims["c"]
    ctas = classes * segments // (EMBEDDING_THREADS // share * EMBEDDING_CLASSES)
    many = tokens <= classes and ctas >= 4 * problem.sm_count
    # Without this bound the compiler spills registers to fit one more CTA on an SM. Groups that share warps with other
    # groups take more registers.
    resident = 4 if share % WARP and WARP % share else 5
    return EmbeddingConfig(EMBEDDING_THREADS, share, EMBEDDING_CLASSES if many else 1, EMBEDDING_CHUNK, resident)


def embedding_bwd_workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Sums of chunks of tokens of one class."""
    # Rounded up, which an exported program can say of a symbolic number; the last chunk, if it is short, is not used.
    chunks = -(-problem.dims["t"] // EmbeddingConfig.of(flat).chunk)
    return {"partials": Array((chunks, problem.dims["n"]), "float32")}


def scale(problem: Problem) -> ScaleConfig:
    return ScaleConfig(threads=256, unroll=4, ctas=SCALE_CTAS * problem.sm_count)
