"""Tokens in the order of their experts, and back: programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import FINITE, within
from cute_ops.ops.routing.gathered import gathered_dots, gathered_sum, scattered_dots, scattered_rows
from cute_ops.ops.routing.places import MOST_CLASSES, class_places

Arrays = Mapping[str, Any]
Call = Callable[..., Any]
CASES = (
    Case("odd-small", {"r": 15, "n": 7, "k": 3}, {"I": "int32"}, attrs={"experts": 5}),
    Case("mixtral-8x7b", {"r": 67, "n": 64, "k": 2}, {"I": "int64"}, attrs={"experts": 8}),
)


def _permute(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, index = inputs["x"], inputs["index"]
    if attrs["experts"] <= MOST_CLASSES:
        found = call(class_places, {"index": index}, {"classes": attrs["experts"]})
        place, ends = found["place"], found["ends"]
    else:
        keys, order = xp.sort(xp.classes_of(index.reshape(-1), attrs["experts"]))
        places = xp.offsets(order[:1] * 0, order.shape[0]).reshape(-1)
        place = xp.whole(xp.with_rows(order, order, places)).reshape(index.shape)
        ends = xp.ends(keys, attrs["experts"])
    return {"out": _scattered(call, x, place, None), "place": place, "ends": ends}


def _permute_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    return {"dx": _gathered(call, inputs["dout"], inputs["place"], None)}


def _gathered(call: Call, y: Any, index: Any, weights: Any) -> Any:
    """The sums of each token's rows, in float32, rounded once."""
    return call(gathered_sum, {"y": y, "index": index, "weights": weights}, {})["out"]


def _scattered(call: Call, x: Any, place: Any, weights: Any) -> Any:
    """Each row once for each of its places: it is read once, where a gather would read it again for each."""
    return call(scattered_rows, {"x": x, "place": place, "weights": weights}, {})["out"]


def _unpermute(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    return {"out": _gathered(call, inputs["y"], inputs["place"], inputs["weights"])}


def _unpermute_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    y, place, weights, dout = (inputs[name] for name in ("y", "place", "weights", "dout"))
    if weights is not None and y.shape[0] == place.shape[0] * place.shape[1]:
        found = call(scattered_dots, {"y": y, "place": place, "dout": dout, "weights": weights}, {})
        return {"dy": found["dy"], "dweights": found["dots"]}
    dy = _spread(xp, call, dout, y, place, weights)
    if weights is None:
        return {"dy": dy, "dweights": None}
    dots = call(gathered_dots, {"y": y, "index": place, "dout": dout}, {})["dots"]
    return {"dy": dy, "dweights": xp.cast(dots, weights)}


def _spread(xp: Any, call: Call, dout: Any, y: Any, place: Any, weights: Any) -> Any:
    """Each token's cotangent at its places among the rows of y, zeros at rows that no token has."""
    count = place.shape[0] * place.shape[1]
    if y.shape[0] == count:
        return _scattered(call, dout, place, weights)
    in_order = xp.whole(xp.offsets(place[:1, :1].reshape(-1) * 0, count)).reshape(place.shape)
    rows = _scattered(call, dout, in_order, weights)
    zeros = xp.cast(xp.broadcast_to(xp.number(0.0, y), y.shape), y)
    return xp.with_rows(zeros, place.reshape(-1), rows)


TOKENS, INDEX = Tensor("r n", "T"), Tensor("r k", "I")
SORTED, PLACE = Tensor("t n", "T"), Tensor("r k", "int32", upper_bound="t")
WEIGHTS = Tensor("r k", "W", optional=True)
_T: dict[str, Any] = {"t": lambda dims, attrs: dims["r"] * dims["k"]}
_SORTING: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "I": ("int64", "int32")}, "attrs": {"experts": 1}, "static": (), "cases": CASES,
    "check": within(experts=(1.0, FINITE[1])),
}  # fmt: skip
_SUMMING: dict[str, Any] = {"dtypes": {"T": FLOATS, "W": FLOATS}, "static": ()}

permute_tokens_bwd = Op(
    "permute_tokens_bwd",
    inputs={"x": TOKENS._replace(unread=True), "place": PLACE, "dout": SORTED},
    outputs={"dx": TOKENS},
    kernel=Program(_permute_bwd, (gathered_sum,)),
    doc="""Gradient of :func:`permute_tokens`: the sums of each token's rows.""",
    **{**_SORTING, "dtypes": {"T": FLOATS}},
)

permute_tokens = Op(
    "permute_tokens",
    inputs={"x": TOKENS, "index": INDEX},
    outputs={"out": SORTED, "place": Tensor("r k", "int32"), "ends": Tensor("e", "int32")},
    derived={**_T, "e": lambda dims, attrs: attrs["experts"]},
    kernel=Program(_permute, (class_places, scattered_rows)),
    grad=permute_tokens_bwd,
    doc="""Tokens in the order of their experts, as grouped products want them.

    ``out[place[i, j]] = x[i]`` for the j-th expert of token i; rows of expert e end before row ``ends[e]``

    Args:
        x: ``T[r n]``: tokens; float32, float16 or bfloat16.
        index: ``I[r k]``, int64 or int32: the experts of each token, as :func:`route` chooses them.
        experts: their number.

    Returns:
        ``(out, place, ends)``: ``T[r*k n]``, int32 ``[r k]`` and int32 ``[experts]``. Rows of one expert are in the
        order of their tokens.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit.

    Source: Gale et al., MegaBlocks, 2022.
    """,
    **_SORTING,
)

unpermute_tokens_bwd = Op(
    "unpermute_tokens_bwd",
    inputs={"y": SORTED, "place": PLACE, "dout": TOKENS, "weights": WEIGHTS},
    outputs={"dy": SORTED, "dweights": WEIGHTS._replace(optional=False, given="weights")},
    kernel=Program(_unpermute_bwd, (scattered_dots, scattered_rows, gathered_dots)),
    doc="""Gradients of :func:`unpermute_tokens`: each token's cotangent times its weights, and their dot products.""",
    **_SUMMING,
)

unpermute_tokens = Op(
    "unpermute_tokens",
    inputs={"y": SORTED, "place": PLACE, "weights": WEIGHTS},
    outputs={"out": TOKENS},
    kernel=Program(_unpermute, (gathered_sum,)),
    grad=unpermute_tokens_bwd,
    cases=(Case("odd-small", {"r": 15, "n": 7, "k": 3, "t": 45}),),
    doc="""Sums of the rows that a token's experts made, each times its weight.

    ``out[i] = sum_j weights[i, j] * y[place[i, j]]``

    Args:
        y: ``T[t n]``: rows in the order of experts, also more than tokens have places; float32, float16 or bfloat16.
        place: int32 ``[r k]``, as :func:`permute_tokens` gives it.
        weights: ``W[r k]``, a float dtype of its own; ones where None.

    Returns:
        ``T[r n]``. Sums in float32, rounded once; rows and weights have gradients.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit.

    Source: Gale et al., MegaBlocks, 2022.
    """,
    **_SUMMING,
)
