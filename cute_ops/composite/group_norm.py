"""Group norm and its gradient: composites for channels before positions, and after them.

With channels first a group is one row, which is read once. With channels last the sums over positions come first, and
the norm is a second pass over x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.norm import group_norm as steps

Arrays = Mapping[str, Any]
Call = Callable[..., Arrays]


def _parameters(xp: Any, inputs: Arrays, channels: Any) -> tuple[Any, Any]:
    """Weight and bias: ones and zeros where they are absent."""
    weight, bias = inputs.get("weight"), inputs.get("bias")
    ones: Any = xp.ones((channels,), inputs["x"]) if weight is None or bias is None else None
    return ones if weight is None else weight, 0 * ones if bias is None else bias


def _by_channel(xp: Any, groups: Any, channels: Any) -> Any:
    """A number of each group, for each of its channels."""
    each = channels // groups.shape[-1]
    return xp.broadcast_to(groups[..., None], (*groups.shape, each)).reshape((*groups.shape[:-1], channels))


def _grouped(channels: Any, groups: int) -> Any:
    """A number of each channel, by group."""
    return channels.reshape((*channels.shape[:-1], groups, channels.shape[-1] // groups))


def _weights_gradient(xp: Any, inputs: Arrays, product: Any, total: Any) -> dict[str, Any]:
    """From the sums of each example and channel."""
    found = {}
    for name, sums in (("weight", product), ("bias", total)):
        like = inputs[name]
        found[f"d{name}"] = None if like is None else xp.sums(sums.reshape((-1, sums.shape[-1])), (-2,), like)
    return found


# --- channels first --------------------------------------------------------------------------------------------------


def _first(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, groups = inputs["x"], attrs["groups"]
    *lead, channels, positions = x.shape
    rows = x.reshape((*lead, groups, channels // groups * positions))
    weight, bias = (_grouped(p, groups) for p in _parameters(xp, inputs, channels))
    found = call(steps.group_norm_rows, {"x": rows, "weight": weight, "bias": bias}, {"eps": attrs["eps"]})
    return {**found, "out": found["out"].reshape(x.shape)}


def _first_dx(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, groups = inputs["x"], attrs["groups"]
    *lead, channels, positions = x.shape
    rows = {
        name: a.reshape((*lead, groups, channels // groups * positions))
        for name, a in (("x", x), ("dy", inputs["dout"]))
    }
    weight, _ = _parameters(xp, {**inputs, "bias": inputs["mean"]}, channels)
    numbers = {name: inputs[name][..., None] for name in ("mean", "rstd")}
    found = call(steps.group_norm_rows_dx, {**rows, **numbers, "weight": _grouped(weight, groups)}, {})
    return {"dx": found["out"].reshape(x.shape)}


def _first_dweight(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x = inputs["x"]
    numbers = {name: _by_channel(xp, inputs[name], x.shape[-2])[..., None] for name in ("mean", "rstd")}
    found = call(steps.group_norm_channel_sums, {"x": x, "dy": inputs["dout"], **numbers}, {})
    return _weights_gradient(xp, inputs, found["product"], found["total"])


# --- channels last ---------------------------------------------------------------------------------------------------


def _last(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, groups = inputs["x"], attrs["groups"]
    positions, channels = x.shape[-2:]
    # Deviations from one of a channel's numbers: a mean that is large beside them costs no accuracy.
    pivot = x[..., 0, :]
    sums = call(steps.group_norm_moments, {"x": x, "pivot": pivot}, {})
    shift = sums["total"] / positions
    means = _grouped(xp.cast(pivot, shift) + shift, groups)
    squares = _grouped(sums["squares"] - sums["total"] * shift, groups)
    mean = means.mean(-1)
    apart = means - mean[..., None]
    variance = (squares.mean(-1) + positions * (apart * apart).mean(-1)) / positions
    rstd = (variance + attrs["eps"]) ** -0.5
    weight, bias = _parameters(xp, inputs, channels)
    scale = _by_channel(xp, rstd, channels) * xp.cast(weight, rstd)
    shared = {
        "mean": _by_channel(xp, mean, channels),
        "scale": scale,
        "shift": xp.broadcast_to(xp.cast(bias, rstd), scale.shape),
    }
    return {"out": call(steps.group_norm_affine, {"x": x, **shared}, {})["out"], "mean": mean, "rstd": rstd}


def _last_slopes(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x = inputs["x"]
    mean, rstd = (_by_channel(xp, inputs[name], x.shape[-1]) for name in ("mean", "rstd"))
    found = call(steps.group_norm_slopes, {"x": x, "dy": inputs["dout"], "mean": mean}, {})
    return {"product": found["product"] * rstd, "total": found["total"]}


def _last_dx(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, rstd, groups = inputs["x"], inputs["rstd"], attrs["groups"]
    positions, channels = x.shape[-2:]
    weight, _ = _parameters(xp, {**inputs, "bias": rstd}, channels)
    wide = xp.cast(weight, rstd)
    pull, push = (
        _grouped(inputs[name] * wide, groups).mean(-1) / positions for name in ("product", "total")
    )  # fmt: skip
    numbers = rstd, inputs["mean"], rstd * rstd * pull, rstd * push
    scale, mean, pull, push = (_by_channel(xp, a, channels) for a in numbers)
    shared = {"scale": scale * wide, "line": xp.joined((mean, pull), -1), "push": push}
    return {"dx": call(steps.group_norm_affine_dx, {"x": x, "dy": inputs["dout"], **shared}, {})["out"]}


def _last_dweight(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    return _weights_gradient(xp, inputs, inputs["product"], inputs["total"])


# --- declarations ----------------------------------------------------------------------------------------------------


def _check(binding: Binding) -> str | None:
    groups, channels, positions = binding.attrs["groups"], binding.dims["c"], binding.dims["s"]
    if not groups >= 1 or (isinstance(channels, int) and channels % groups):
        return f"attribute `groups` is {groups}, expected a divisor of the c={channels} channels."
    if isinstance(positions, int) and positions < 1:
        return "argument `x` has s=0, expected at least one position."
    return None


_WEIGHT, _BIAS = Tensor("c", "W", optional=True), Tensor("c", "B", optional=True)
_NUMBER = Tensor("*m g", "float32", hidden=True)
_NUMBERS = {"mean": _NUMBER._replace(hidden=False), "rstd": _NUMBER._replace(hidden=False)}
_SUMS = {"product": Tensor("*m c", "float32"), "total": Tensor("*m c", "float32")}
_GRADIENTS = {"dweight": Tensor("c", "W", given="weight"), "dbias": Tensor("c", "B", given="bias")}
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "B": FLOATS}, "attrs": {"groups": 32, "eps": 1e-5}, "static": (),
    "check": _check, "called": "group_norm",
}  # fmt: skip
_G: dict[str, Any] = {"derived": {"g": lambda dims, attrs: attrs["groups"]}}


def _norm(name: str, shape: str, run: Any, gradient: tuple[Op, ...], ops: tuple[Op, ...], case: Case) -> Op:
    return Op(
        name, inputs={"x": Tensor(shape, "T"), "weight": _WEIGHT, "bias": _BIAS},
        outputs={"out": Tensor(shape, "T"), "mean": _NUMBER, "rstd": _NUMBER},
        kernel=Program(run, ops, maps=True), grad=gradient, cases=(case,), doc="See :func:`group_norm`.",
        **_COMMON, **_G,
    )  # fmt: skip


def _step(name: str, run: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *ops: Op) -> Op:
    return Op(
        name, inputs=inputs, outputs=outputs, kernel=Program(run, ops, maps=True), doc="A gradient of group_norm.",
        **_COMMON,
    )  # fmt: skip


_FIRST, _LAST = Tensor("*m c s", "T"), Tensor("*m s c", "T")
group_norm_first = _norm(
    "group_norm_first", "*m c s", _first,
    (
        _step("group_norm_first_dx", _first_dx, {"x": _FIRST, **_NUMBERS, "dout": _FIRST, "weight": _WEIGHT},
              {"dx": _FIRST}, steps.group_norm_rows_dx),
        _step("group_norm_first_dweight", _first_dweight,
              {"x": _FIRST, **_NUMBERS, "dout": _FIRST, "weight": _WEIGHT, "bias": _BIAS}, _GRADIENTS,
              steps.group_norm_channel_sums),
    ),
    (steps.group_norm_rows,), Case("odd-small", {"m": (3,), "c": 6, "s": 5}, attrs={"groups": 3}),
)  # fmt: skip
group_norm_last = _norm(
    "group_norm_last", "*m s c", _last,
    (
        _step("group_norm_last_slopes", _last_slopes, {"x": _LAST, **_NUMBERS, "dout": _LAST}, _SUMS,
              steps.group_norm_slopes),
        _step("group_norm_last_dx", _last_dx,
              {"x": _LAST, **_NUMBERS, **_SUMS, "dout": _LAST, "weight": _WEIGHT}, {"dx": _LAST},
              steps.group_norm_affine_dx),
        _step("group_norm_last_dweight", _last_dweight,
              {"x": _LAST._replace(unread=True), **_SUMS, "weight": _WEIGHT, "bias": _BIAS}, _GRADIENTS),
    ),
    (steps.group_norm_moments, steps.group_norm_affine),
    Case("odd-small", {"m": (3,), "c": 6, "s": 5}, attrs={"groups": 3}),
)  # fmt: skip
