"""An embedding, whose gradient is written in one pass: two composites.

The gradient's program sorts the tokens by class and finds where each class's tokens end; the kernel of
:mod:`cute_ops.ops.embedding.sorted_embedding_bwd` then writes each row of the table's gradient once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import index
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import shown
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd
from cute_ops.ops.routing.gathered import gathered_sum

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


def padding(padding_idx: int | None, shape: tuple[int, ...]) -> int:
    """The class without a gradient, counted from the start, for a weight of this shape; -1 if there is none.

    Raises:
        TypeError: not an integer.
        ValueError: no such class.
    """
    if padding_idx is None:
        return -1
    try:
        if isinstance(padding_idx, bool):
            raise TypeError
        padding_idx = index(padding_idx)
    except TypeError:
        problem = f"option `padding_idx` is {shown(padding_idx)}, expected an int or None."
        raise TypeError(f"cute.embedding: {problem}") from None
    classes = shape[0] if shape else 0
    if not -classes <= padding_idx < classes:
        raise ValueError(f"cute.embedding: option `padding_idx` is {padding_idx}, which is none of {classes} classes.")
    return padding_idx if padding_idx >= 0 else padding_idx + classes


def _check(binding: Binding) -> str | None:
    # Tokens are counted, and sorted by class, in 32 bits; one more value marks tokens without a class.
    for name, size in (("classes", binding.dims["c"]), ("tokens", binding.rows)):
        if isinstance(size, int) and size > _MAX_SIZE:
            return f"{size} {name} are given, at most {_MAX_SIZE} are allowed."
    return None


def _look_up(xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    weight, index = inputs["weight"], inputs["index"]
    count, n = weight.shape
    # The frameworks' kernels copy rows that are no whole vectors at a third of the speed.
    if not (isinstance(n, int) and n * weight.dtype.itemsize % VECTOR_BYTES):
        return {"out": xp.rows_of(weight, index)}
    named, strict = xp.named_rows(index, count)
    given = {"y": weight, "index": named.reshape(-1, 1), "weights": None}
    return {"out": call(gathered_sum, given, {"strict": strict})["out"].reshape(*index.shape, n)}


def _add_up(xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    (classes, n), padding_idx = inputs["weight"].shape, attrs["padding_idx"]
    key = xp.classes_of(inputs["index"].reshape(-1), classes)
    if padding_idx >= 0:
        key = xp.where(key == padding_idx, classes, key)
    # Tokens without a class are sorted to the end, which the kernel does not read.
    key, order = xp.sort(key)
    rows = inputs["dout"].reshape(key.shape[0], n)
    return call(sorted_embedding_bwd, {"ends": xp.ends(key, classes), "classes": key, "order": order, "dout": rows}, {})


_INDEX, _WEIGHT, _ROWS = Tensor("*m", "I", upper_bound="c"), Tensor("c n", "T"), Tensor("*m n", "T")
_COMMON: dict[str, Any] = {
    "dtypes": sorted_embedding_bwd.dtypes, "attrs": {"padding_idx": -1}, "check": _check,
    "sharding": Sharding(
        parallel=("n",), whole={"c": "is sharded along its classes; torch.nn.functional.embedding takes it so"}
    ),
}  # fmt: skip

embedding_bwd = Op(
    "embedding_bwd",
    inputs={"index": _INDEX, "weight": _WEIGHT._replace(unread=True), "dout": _ROWS},
    outputs={"dweight": _WEIGHT},
    kernel=Program(_add_up, (sorted_embedding_bwd,)),
    **_COMMON,
)
embedding = Op(
    "embedding",
    inputs={"index": _INDEX, "weight": _WEIGHT},
    outputs={"out": _ROWS},
    kernel=Program(_look_up, (gathered_sum,)),
    grad=embedding_bwd,
    **_COMMON,
)
