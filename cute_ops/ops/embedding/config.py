"""The heuristic and the workspace of the kernel of an embedding's gradient."""

from __future__ import annotations

from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.embedding.config import LEAST_VECTORS, EmbeddingConfig

# Threads of a CTA, and the most that share a row.
THREADS, ROW_THREADS = 256, 64
# Tokens of one class whose sum is computed first; classes of a group of threads where most classes have no token.
CHUNK, CLASSES = 64, 8


def embedding_bwd(problem: Problem) -> EmbeddingConfig:
    """Up to 64 threads share a row or a segment of it. Such a group takes several classes where classes are no fewer
    than tokens and make at least four CTAs per SM.
    """
    share, segments, anywhere = ROW_THREADS, 1, False
    if problem.n is not None:
        rows = ("dout", "dweight")
        vec = min(min(problem.aligns[name], VECTOR_BYTES) // ITEMSIZE[problem.dtypes[name]] for name in rows)
        wide = VECTOR_BYTES // ITEMSIZE[problem.dtypes["dweight"]]
        anywhere = 2 * vec < wide and problem.n >= LEAST_VECTORS * wide
        vec = wide if anywhere else vec
        vectors = max(-(-problem.n // vec), 1) + (anywhere and problem.n % vec > 1)
        segments = -(-vectors // ROW_THREADS)
        share = -(-vectors // segments)
    tokens, classes = problem.dims["t"], problem.dims["c"]
    ctas = classes * segments // (THREADS // share * CLASSES)
    many = tokens <= classes and ctas >= 4 * problem.sm_count
    # Without this bound the compiler spills registers to fit one more CTA on an SM. Groups that share warps with other
    # groups take more registers, and pairs of vectors, of rows that start anywhere, take most.
    resident = 3 if anywhere else 4 if share % WARP and WARP % share else 5
    return EmbeddingConfig(THREADS, share, CLASSES if many else 1, CHUNK, resident)


def workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Sums of chunks of tokens of one class."""
    # Rounded up, which an exported program can say of a symbolic number; the last chunk, if it is short, is not used.
    chunks = -(-problem.dims["t"] // EmbeddingConfig.of(flat).chunk)
    return {"partials": Array((chunks, problem.dims["n"]), "float32")}
