"""Gradient of an embedding's table: declaration, reference maths, cases.

A stage of :func:`embedding` in both adapters, which sort the tokens by class with the framework's own sort; see
:mod:`cute_ops.composite.embedding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Problem, Tuning
from cute_ops.op import Case, Op, Sharding, Tensor
from cute_ops.ops._tiles import VECTOR_BYTES, WARP
from cute_ops.shapes import FLOATS, ITEMSIZE, Array

CASES = (
    Case("llama3.2-1b", {"t": 512, "c": 128256, "n": 2048}),
    Case("gemma3-270m", {"t": 512, "c": 262144, "n": 640}),
    Case("stories15m", {"t": 1024, "c": 32000, "n": 288}),
    Case("odd", {"t": 300, "c": 33, "n": 257}),
    Case("odd-small", {"t": 15, "c": 7, "n": 7}),
)
THREADS, LANES = 256, 64
# Tokens of one class that are added up beforehand.
CHUNK = 64
# Classes of a group of threads where most have no token.
CLASSES = 8


def reference(xp: Any, ends: Any, classes: Any, order: Any, dout: Any) -> Any:
    (x,) = widen(xp, xp.take(dout, order, axis=0))
    # Sums of the last 1, 2, 4, ... tokens of each token's class: in the end its last token has all of them.
    step = 1
    while step < x.shape[0]:
        same = (classes[step:] == classes[:-step])[:, None]
        before = xp.where(same, x[:-step], xp.zeros_like(x[:-step]))
        x = xp.concat([x[:step], x[step:] + before])
        step *= 2
    counts = ends - xp.concat([xp.zeros_like(ends[:1]), ends[:-1]])
    # A row of zeros for classes without a token.
    x = xp.concat([x, xp.sum(x[:0], axis=0, keepdims=True)])
    last = xp.where(counts > 0, ends - 1, xp.zeros_like(ends) + dout.shape[0])
    return xp.astype(xp.take(x, last, axis=0), dout.dtype)


def tile(problem: Problem) -> dict[str, int]:
    """Threads of a row's part, at most a quarter of a CTA; classes of such a group: several where they are more than
    the tokens, and enough for all SMs.
    """
    lanes = LANES
    segments = 1
    if problem.n is not None:
        rows = ("dout", "dweight")
        vec = min(min(problem.aligns[name], VECTOR_BYTES) // ITEMSIZE[problem.dtypes[name]] for name in rows)
        vectors = max(-(-problem.n // vec), 1)
        segments = -(-vectors // LANES)
        lanes = -(-vectors // segments)
    tokens, classes = problem.dims["t"], problem.dims["c"]
    ctas = classes * segments // (THREADS // lanes * CLASSES)
    many = tokens <= classes and ctas >= 4 * problem.sm_count
    # As many CTAs on an SM as leave the compiler enough registers: left alone, it spills some to get one more. Groups
    # whose warps have threads of others take more of them.
    resident = 4 if lanes % WARP and WARP % lanes else 5
    return {
        "threads": THREADS, "lanes": lanes, "classes": CLASSES if many else 1, "chunk": CHUNK, "resident": resident,
    }  # fmt: skip


def workspace(problem: Problem, tile: Mapping[str, int]) -> Mapping[str, Array | None]:
    """The sums of chunks of one class."""
    return {"parts": Array((max(problem.dims["t"] // tile["chunk"], 1), problem.dims["n"]), "float32")}


sorted_embedding_bwd = Op(
    "sorted_embedding_bwd",
    inputs={
        "ends": Tensor("c", "int32", upper_bound="t"),
        "classes": Tensor("t", "int32", upper_bound="c"),
        "order": Tensor("t", "I", upper_bound="t"),
        "dout": Tensor("t n", "T"),
    },
    outputs={"dweight": Tensor("c n", "T")},
    dtypes={"T": FLOATS, "I": ("int64", "int32")},
    sharding=Sharding(parallel=("n",)),
    reference=reference,
    kernel="cute_ops.kernels.parts.embedding:EmbeddingBackward",
    tuning=Tuning(tile, workspace=workspace),
    cases=CASES,
    doc="""Gradient of an embedding's table from tokens that are sorted by class.

    ``dweight[c] = sum(dout[order[j]] for j in range(ends[c - 1], ends[c]))``, with ``ends[-1] = 0``

    Args:
        ends: int32 ``[c]``: how many of the sorted tokens belong to a class up to this one.
        classes: int32 ``[t]``: the classes of the tokens, ascending; ``ends`` must say the same. What lies behind the
            last end counts nowhere.
        order: ``I[t]``, int64 or int32: which token it is.
        dout: ``T[t n]``; float32, float16 or bfloat16; any row stride.

    Returns:
        ``T[c n]``, zeros for classes without a token. Accumulated in float32 in a fixed order, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
)
