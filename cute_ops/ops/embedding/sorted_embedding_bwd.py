"""Gradient of an embedding's table: declaration, reference maths, cases.

The gradient of :func:`embedding` calls it in both adapters, on tokens that the framework has sorted by class; see
:mod:`cute_ops.composite.embedding`.
"""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import doubling, numbers, widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.embedding import config

CASES = (
    Case("llama3.2-1b-slice", {"t": 512, "c": 16032, "n": 2048}),
    Case("gemma3-270m-slice", {"t": 512, "c": 32768, "n": 640}),
    Case("stories15m", {"t": 1024, "c": 32000, "n": 288}),
    Case("odd", {"t": 300, "c": 33, "n": 257}),
    Case("odd-small", {"t": 15, "c": 7, "n": 7}),
)


def reference(xp: Any, ends: Any, classes: Any, order: Any, dout: Any) -> Any:
    (x,) = widen(xp, xp.take(dout, order, axis=0))
    places = numbers(xp, x.shape[0], classes)

    def add(step: Any, x: Any) -> Any:
        inside = places >= step
        before = xp.where(inside, places - step, xp.zeros_like(places))
        same = inside & (xp.take(classes, before, axis=0) == classes)
        return x + xp.where(same[:, None], xp.take(x, before, axis=0), xp.zeros_like(x))

    # Sums of the last 1, 2, 4, ... tokens of each token's class: in the end its last token has all of them.
    x = doubling(xp, x.shape[0], add, x)
    counts = ends - xp.concat([xp.zeros_like(ends[:1]), ends[:-1]])
    # A row of zeros for classes without a token.
    x = xp.concat([x, xp.sum(x[:0], axis=0, keepdims=True)])
    last = xp.where(counts > 0, ends - 1, xp.zeros_like(ends) + dout.shape[0])
    return xp.astype(xp.take(x, last, axis=0), dout.dtype)


def sort_tokens(xp: Any, arrays: dict[str, Any]) -> None:
    """Sort drawn tokens by class, as the gradient of an embedding reads them."""
    classes = arrays["classes"]
    classes.sort()
    arrays["ends"][:] = xp.searchsorted(classes, xp.arange(arrays["ends"].size), "right")


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
    kernel="cute_ops.kernels.embedding.sorted_embedding_bwd:EmbeddingBackward",
    tuning=Tuning(config.embedding_bwd, workspace=config.workspace),
    cases=CASES,
    arrange=sort_tokens,
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
