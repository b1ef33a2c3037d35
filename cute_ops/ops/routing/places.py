"""Places of numbers in the order of their classes: declaration, reference maths, cases. Programs of tokens call it."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.routing import config

# Counts of more classes than this do not fit the shared memory of a CTA.
MOST_CLASSES, MOST_NUMBERS = 1024, 2**31 - 2**20
CASES = (
    Case("odd-small", {"r": 15, "k": 3}, attrs={"classes": 5}),
    Case("mixtral-8x7b", {"r": 67, "k": 2}, attrs={"classes": 8}),
    Case("deepseek-v3", {"r": 1037, "k": 8}, attrs={"classes": 256}),
)


def reference(xp: Any, index: Any, classes: int) -> tuple[Any, Any]:
    flat = xp.reshape(index, (-1,))
    flat = xp.where((flat >= 0) & (flat < classes), flat, xp.zeros_like(flat) + classes)
    place = xp.argsort(xp.argsort(flat, stable=True), stable=True)
    every = xp.arange(classes, dtype=flat.dtype)
    ends = xp.sum(xp.astype(flat[None, :] <= every[:, None], xp.int32), axis=-1)
    return xp.reshape(xp.astype(place, xp.int32), index.shape), xp.astype(ends, xp.int32)


def _check(binding: Binding) -> str | None:
    classes, count = binding.attrs["classes"], binding.dims["r"] * binding.dims["k"]
    if not 1 <= classes <= MOST_CLASSES:
        return f"attribute `classes` is {classes}, expected a number from 1 to {MOST_CLASSES}."
    if isinstance(count, int) and count > MOST_NUMBERS:
        return f"argument `index` has {count} numbers, expected at most {MOST_NUMBERS}."
    return None


class_places = Op(
    "class_places",
    inputs={"index": Tensor("r k", "I")},
    outputs={"place": Tensor("r k", "int32"), "ends": Tensor("e", "int32")},
    dtypes={"I": ("int64", "int32")},
    attrs={"classes": 1},
    derived={"e": lambda dims, attrs: attrs["classes"]},
    static=("k",),
    reference=reference,
    kernel="cute_ops.kernels.routing.places:ClassPlaces",
    tuning=Tuning(config.places, workspace=config.counts),
    check=_check,
    inference_only="numbers of classes have no gradient",
    cases=CASES,
    doc=f"""Places of numbers in a stable sort by class, and where each class ends: a step of :func:`permute_tokens`.

    Args:
        index: ``I[r k]``, int64 or int32: classes; numbers of none are sorted to the end.
        classes: their number, at most {MOST_CLASSES}.

    Returns:
        ``(place, ends)``: int32 ``[r k]`` and int32 ``[classes]``: ``sorted[place[i, j]] = index[i, j]``, and numbers
        of class c end before ``ends[c]``. Deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, too many classes.
    """,
)
