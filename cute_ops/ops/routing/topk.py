"""The largest numbers of rows and where they are: declarations, reference maths, cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.kernels.routing.config import SEGMENT
from cute_ops.ops import docs
from cute_ops.ops.routing import config

MOST, LONGEST = 128, 262_144
CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs={"k": 3}),
    Case("mixtral-8x7b", {"m": (67,), "n": 8}, attrs={"k": 2}),
    Case("qwen3-moe", {"m": (2, 33), "n": 128}, attrs={"k": 8}),
    Case("deepseek-v3", {"m": (17,), "n": 256}, attrs={"k": 8}),
    Case("two-passes", {"m": (3,), "n": 5000}, attrs={"k": 50}),
    Case("sampling", {"m": (2,), "n": 128256}, attrs={"k": 128}),
)
STEPS = (
    *(case._replace(absent=("index",)) for case in CASES[:5]),
    Case("segments", {"m": (5,), "n": 8194}, attrs={"k": 4}),
)


def _order(xp: Any, x: Any) -> Any:
    """Places from the largest number to the least: NaN first, of equal ones the lower one."""
    missing = xp.isnan(x)
    order = xp.argsort(xp.where(missing, xp.zeros_like(x) - xp.inf, -x), axis=-1, stable=True)
    later = xp.astype(~xp.take_along_axis(missing, order, axis=-1), xp.int32)
    return xp.take_along_axis(order, xp.argsort(later, axis=-1, stable=True), axis=-1)


def reference_step(xp: Any, x: Any, index: Any = None, *, k: int) -> tuple[Any, Any]:
    lead, n = x.shape[:-1], x.shape[-1]
    parts, found = [], []
    for start in range(0, n, SEGMENT):
        part = x[..., start : start + SEGMENT]
        order = _order(xp, part)[..., :k]
        values = xp.take_along_axis(part, order, axis=-1)
        place = order + start
        if index is not None:
            place = xp.take_along_axis(index, place, axis=-1)
        place = xp.astype(place, xp.int32)
        if short := k - order.shape[-1]:
            fill = xp.zeros_like(x[..., :1])
            values = xp.concat([values, xp.broadcast_to(fill - xp.inf, (*lead, short))], axis=-1)
            place = xp.concat([place, xp.broadcast_to(xp.astype(fill, xp.int32) - 1, (*lead, short))], axis=-1)
        parts.append(values)
        found.append(place)
    return (parts[0], found[0]) if len(parts) == 1 else (xp.concat(parts, axis=-1), xp.concat(found, axis=-1))


def check(binding: Binding) -> str | None:
    n, k = binding.dims["n"], binding.attrs["k"]
    if not 1 <= k <= MOST:
        return f"attribute `k` is {k}, expected a number from 1 to {MOST}."
    if isinstance(n, int) and k > n:
        return f"attribute `k` is {k}, but rows of `{next(iter(binding.inputs))}` have n={n}."
    if isinstance(n, int) and n > LONGEST:
        return f"argument `{next(iter(binding.inputs))}` has n={n}, expected at most {LONGEST}."
    return None


def _segments(dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    return -(-dims["n"] // SEGMENT) * attrs["k"]


def _run(xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    x, index = inputs["x"], None
    while True:
        made = call(topk_step, {"x": x, "index": index}, attrs)
        if x.shape[-1] <= SEGMENT:
            return {"values": made["values"], "index": made["found"]}
        x, index = made["values"], made["found"]


def _run_bwd(xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {"dx": xp.scattered(inputs["dvalues"], inputs["index"], inputs["x"])}


ROWS = Tensor("*m n", "T")
topk_step = Op(
    "topk_step",
    inputs={"x": ROWS, "index": Tensor("*m n", "int32", optional=True, upper_bound="n")},
    outputs={"values": Tensor("*m c", "T"), "found": Tensor("*m c", "int32")},
    dtypes={"T": FLOATS},
    attrs={"k": 1},
    derived={"c": _segments},
    static=("n",),
    reference=reference_step,
    kernel="cute_ops.kernels.routing.topk:TopK",
    tuning=Tuning(config.topk),
    check=check,
    cases=STEPS,
    inference_only="topk has one",
    doc=f"""The k largest numbers of every {SEGMENT} columns, and where they are: a step of :func:`topk`.

    Args:
        x: {docs.ROWS}.
        index: int32 ``[*m n]``: what columns are called; their numbers where None.
        k: how many, at most {MOST}; a compile-time constant.

    Returns:
        ``(values, found)``: ``T[*m c]`` and int32 ``[*m c]``, k of each segment in its order; -inf where a segment has
        fewer columns.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous.
    """,
)
_COMMON: dict[str, Any] = {"dtypes": {"T": FLOATS}, "attrs": {"k": 1}, "static": ("n",), "cases": CASES, "check": check}
_K = {"t": lambda dims, attrs: attrs["k"]}

topk_bwd = Op(
    "topk_bwd",
    inputs={"x": ROWS._replace(unread=True), "index": Tensor("*m t", "int32", upper_bound="n"),
            "dvalues": Tensor("*m t", "T")},
    outputs={"dx": ROWS},
    kernel=Program(_run_bwd),
    doc="""Gradient of :func:`topk`: that of each value where it came from, zero elsewhere.""",
    **_COMMON,
)  # fmt: skip

topk = Op(
    "topk",
    inputs={"x": ROWS},
    outputs={"values": Tensor("*m t", "T"), "index": Tensor("*m t", "int32")},
    derived=_K,
    kernel=Program(_run, (topk_step,)),
    grad=topk_bwd,
    doc=f"""The k largest numbers of each row, in order, and where they are.

    ``values = sort(x)[..., :k]``, from the largest on; ``values = x[index]``

    Args:
        x: {docs.ROWS}, n up to {LONGEST}.
        k: how many, at most {MOST} and n; a compile-time constant.

    Returns:
        ``(values, index)``: ``T[*m k]`` and int32 ``[*m k]``. NaN comes first; of equal numbers the one of the lower
        column. The values have a gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: an attribute out of its range, rows that are too long, a last dim that is not contiguous.

    Source: routing to experts: Shazeer et al., Outrageously Large Neural Networks, 2017.
    """,
    **_COMMON,
)
