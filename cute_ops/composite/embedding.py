"""What :func:`embedding` and its gradient take, in both frameworks.

Both are compositions, whose only kernel is that of :mod:`cute_ops.ops.parts.embedding`.
"""

from __future__ import annotations

from operator import index
from typing import Any

from cute_ops.binding import Binding
from cute_ops.op import Op, Sharding, Tensor
from cute_ops.ops.parts.embedding import sorted_embedding_bwd

_MAX_SIZE = 2**31 - 2
DOC = """Args:
    index: int64 or int32 ``[*m]``: the class of each token.
    weight: ``T[c n]``; float32, float16 or bfloat16.
    padding_idx: a class that gets no gradient; a negative one counts from the end.

Returns:
    ``T[*m n]``. The weight's gradient is dense and written in one pass: each row is the sum over the tokens of its
    class in float32, in a fixed order, rounded once; zeros where there are none.

Raises:
    TypeError: a dtype that is not listed, a ``padding_idx`` that is no integer.
    ValueError: shapes that do not fit, a ``padding_idx`` that is no class.
"""


def _check(binding: Binding) -> str | None:
    # Tokens are counted, and sorted by class, in 32 bits; one value more marks tokens without a class.
    for name, size in (("classes", binding.dims["c"]), ("tokens", binding.rows)):
        if isinstance(size, int) and size > _MAX_SIZE:
            return f"{size} {name} are more than {_MAX_SIZE}."
    return None


def _no_reference(*_: object, **__: object) -> Any:
    raise NotImplementedError("a composition has no reference")


_INDEX, _WEIGHT, _ROWS = Tensor("*m", "I", upper_bound="c"), Tensor("c n", "T"), Tensor("*m n", "T")
_COMMON: dict[str, Any] = {
    "dtypes": sorted_embedding_bwd.dtypes, "sharding": Sharding(parallel=("n",)),
    "reference": _no_reference, "kernel": sorted_embedding_bwd.kernel, "check": _check,
}  # fmt: skip

embedding_bwd = Op(
    "embedding_bwd",
    inputs={"index": _INDEX, "weight": _WEIGHT._replace(unread=True), "dout": _ROWS},
    outputs={"dweight": _WEIGHT},
    attrs={"padding_idx": -1},
    **_COMMON,
)
embedding = Op("embedding", inputs={"index": _INDEX, "weight": _WEIGHT}, outputs={"out": _ROWS}, **_COMMON)


def padding(padding_idx: int | None, classes: int) -> int:
    """The class without a gradient, counted from the start; -1 where there is none.

    Raises:
        TypeError: not an integer.
        ValueError: no such class.
    """
    if padding_idx is None:
        return -1
    try:
        padding_idx = index(padding_idx)
    except TypeError:
        problem = f"option `padding_idx` is {padding_idx!r}, expected an int or None."
        raise TypeError(f"cute.embedding: {problem}") from None
    if not -classes <= padding_idx < classes:
        raise ValueError(f"cute.embedding: option `padding_idx` is {padding_idx}, which is none of {classes} classes.")
    return padding_idx % classes
