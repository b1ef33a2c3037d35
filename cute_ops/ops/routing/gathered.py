"""Sums of rows that are named by an index, and dot products with them: declarations, reference maths, cases. The
programs of tokens call them.
"""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.routing import config

CASES = (
    Case("odd-small", {"t": 9, "r": 5, "k": 3, "n": 7}),
    Case("mixtral-8x7b", {"t": 66, "r": 33, "k": 2, "n": 4096}),
    Case("qwen3-moe-again", {"t": 17, "r": 136, "k": 1, "n": 2048}, absent=("weights",)),
    Case("odd", {"t": 40, "r": 21, "k": 8, "n": 257}),
)


def rows_at(xp: Any, table: Any, index: Any) -> Any:
    """``table[index]``, where no number of the index is counted from the end."""
    at = xp.reshape(xp.where(index < 0, table.shape[0], index), (-1,))
    return xp.reshape(xp.take(table, at, axis=0), (*index.shape, table.shape[-1]))


def reference(xp: Any, y: Any, index: Any, weights: Any = None, strict: bool = False) -> Any:
    rows, wide = widen(xp, rows_at(xp, y, index), weights)
    return xp.astype(xp.sum(rows if wide is None else rows * wide[..., None], axis=-2), y.dtype)


def reference_dots(xp: Any, y: Any, index: Any, dout: Any) -> Any:
    rows, wide = widen(xp, xp.reshape(xp.take(y, xp.reshape(index, (-1,)), axis=0), (*index.shape, y.shape[-1])), dout)
    return xp.sum(rows * wide[..., None, :], axis=-1)


def reference_scattered(xp: Any, x: Any, place: Any, weights: Any = None) -> Any:
    rows, wide = widen(xp, x, weights)
    rows = rows[:, None, :] if wide is None else rows[:, None, :] * wide[..., None]
    rows = xp.reshape(xp.broadcast_to(rows, (*place.shape, x.shape[-1])), (-1, x.shape[-1]))
    return xp.astype(xp.take(rows, xp.argsort(xp.reshape(place, (-1,))), axis=0), x.dtype)


def reference_both(xp: Any, y: Any, place: Any, dout: Any, weights: Any) -> tuple[Any, Any]:
    dots = reference_dots(xp, y, place, dout)
    return reference_scattered(xp, dout, place, weights), xp.astype(dots, weights.dtype)


def _check_places(binding: Binding) -> str | None:
    rows, places = binding.dims["t"], binding.dims["r"] * binding.dims["k"]
    return None if rows == places else f"argument `y` has {rows} rows, expected one for each of {places} places."


def permuted(xp: Any, arrays: dict[str, Any]) -> None:
    """Places are those of a permutation."""
    place = arrays["place"]
    place[:] = xp.argsort(xp.argsort(place.reshape(-1), stable=True), stable=True).reshape(place.shape)


_INPUTS = {"y": Tensor("t n", "T"), "index": Tensor("r k", "I", upper_bound="t")}
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "I": ("int64", "int32"), "W": FLOATS}, "static": ("n", "k"),
    "inference_only": "the programs that call it have theirs",
}  # fmt: skip

gathered_sum = Op(
    "gathered_sum",
    inputs={**_INPUTS, "weights": Tensor("r k", "W", optional=True)},
    outputs={"out": Tensor("r n", "T")},
    attrs={"strict": False},
    sharding=Sharding(parallel=("r", "n")),
    reference=reference,
    kernel="cute_ops.kernels.routing.gathered:GatheredSum",
    tuning=Tuning(config.gathered_sum),
    cases=CASES,
    doc="""Sums of rows that are named by an index, each times its weight: a step of :func:`unpermute_tokens`.

    ``out[i] = sum_j weights[i, j] * y[index[i, j]]``

    Args:
        y: ``T[t n]``; float32, float16 or bfloat16; any row stride.
        index: ``I[r k]``, int64 or int32: rows of y.
        weights: ``W[r k]``, a float dtype of its own; ones where None.
        strict: whether an index that is no row ends the kernel with an error, instead of a row of NaN.

    Returns:
        ``T[r n]``. Summed in float32 in the order of j, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
    **_COMMON,
)

gathered_dots = Op(
    "gathered_dots",
    inputs={**_INPUTS, "dout": Tensor("r n", "T")},
    outputs={"dots": Tensor("r k", "float32")},
    sharding=Sharding(parallel=("r",)),
    reference=reference_dots,
    kernel="cute_ops.kernels.routing.gathered:GatheredDots",
    tuning=Tuning(config.gathered_dots),
    cases=tuple(case._replace(absent=()) for case in CASES),
    doc="""Dot products with rows that an index names: the gradient of :func:`unpermute_tokens` to its weights.

    ``dots[i, j] = sum(y[index[i, j]] * dout[i])``

    Args:
        y: ``T[t n]``; float32, float16 or bfloat16; any row stride.
        index: ``I[r k]``, int64 or int32: rows of y; NaN for a row with one that is none.
        dout: ``T[r n]``; any row stride.

    Returns:
        float32 ``[r k]``. Deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
    **{**_COMMON, "dtypes": {"T": FLOATS, "I": ("int64", "int32")}},
)

scattered_rows = Op(
    "scattered_rows",
    inputs={
        "x": Tensor("r n", "T"), "place": Tensor("r k", "int32"),
        "weights": Tensor("r k", "W", optional=True),
    },
    outputs={"out": Tensor("t n", "T")},
    derived={"t": lambda dims, attrs: dims["r"] * dims["k"]},
    sharding=Sharding(parallel=("n",)),
    reference=reference_scattered,
    kernel="cute_ops.kernels.routing.gathered:ScatteredRows",
    tuning=Tuning(config.scattered_rows),
    cases=tuple(case._replace(dims={d: size for d, size in case.dims.items() if d != "t"}) for case in CASES),
    arrange=permuted,
    doc="""Rows at the places of a permutation, each times its weights: a step of :func:`permute_tokens`.

    ``out[place[i, j]] = weights[i, j] * x[i]``

    Args:
        x: ``T[r n]``; float32, float16 or bfloat16; any row stride.
        place: int32 ``[r k]``: each number below ``r*k`` once.
        weights: ``W[r k]``, a float dtype of its own; ones where None.

    Returns:
        ``T[r*k n]``. Multiplied in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
    **{**_COMMON, "dtypes": {"T": FLOATS, "W": FLOATS}},
)  # fmt: skip

scattered_dots = Op(
    "scattered_dots",
    inputs={
        "y": Tensor("t n", "T"), "place": Tensor("r k", "int32", upper_bound="t"), "dout": Tensor("r n", "T"),
        "weights": Tensor("r k", "W"),
    },
    outputs={"dy": Tensor("t n", "T"), "dots": Tensor("r k", "W")},
    check=_check_places,
    reference=reference_both,
    kernel="cute_ops.kernels.routing.gathered:ScatteredDots",
    tuning=Tuning(config.scattered_dots),
    cases=tuple(case._replace(dims={**case.dims, "t": case.dims["r"] * case.dims["k"]}, absent=()) for case in CASES),
    arrange=permuted,
    doc="""Gradients of :func:`unpermute_tokens` whose rows are those of a permutation: each row of dout is read once.

    ``dy[place[i, j]] = weights[i, j] * dout[i]``; ``dots[i, j] = sum(y[place[i, j]] * dout[i])``

    Args:
        y: ``T[r*k n]``; float32, float16 or bfloat16; any row stride.
        place: int32 ``[r k]``: each row of y once.
        dout: ``T[r n]``; any row stride.
        weights: ``W[r k]``, a float dtype of its own.

    Returns:
        ``(dy, dots)``: ``T[r*k n]`` and ``W[r k]``. In float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
    **{**_COMMON, "dtypes": {"T": FLOATS, "W": FLOATS}},
)  # fmt: skip
