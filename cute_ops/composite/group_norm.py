"""Group norm and its gradient: composites for channels before positions, and after them.

A group is read once, with channels last some neighbouring groups, if a cluster's shared memory holds what is read of
them. If it does not, sums come first, and the norm, or its gradient, is a second pass over x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.norm import group_norm as steps
from cute_ops.ops.norm.group_config import on_chip

Arrays = Mapping[str, Any]
Call = Callable[..., Arrays]
# Elements of a group, channels first, that a CTA or a few keep on the chip; longer ones are split by channels.
LONG = 1 << 18


def _parameters(xp: Any, inputs: Arrays, axis: int) -> tuple[Any, Any]:
    """Weight and bias: ones and zeros where they are absent. ``axis``: the dim of x that has the channels."""
    weight, bias, channels = inputs["weight"], inputs["bias"], inputs["x"].shape[axis]
    ones: Any = xp.ones((channels,), inputs["x"]) if weight is None or bias is None else None
    return ones if weight is None else weight, 0 * ones if bias is None else bias


def _grouped(channels: Any, groups: int) -> Any:
    """A number of each channel, by group."""
    return channels.reshape((*channels.shape[:-1], groups, channels.shape[-1] // groups))


def _by_channel(grouped: Any) -> Any:
    """A number of each group's channels, by channel."""
    return grouped.reshape((*grouped.shape[:-2], grouped.shape[-2] * grouped.shape[-1]))


def _silu(attrs: Arrays) -> dict[str, bool]:
    return {"silu": attrs["activation"] == "silu"}


def _statistics(call: Call, attrs: Arrays, sums: Arrays, count: Any) -> Arrays:
    """Mean and rstd by channel and by group, of the moments of channels."""
    moments = {name: _grouped(sums[name], attrs["groups"]) for name in ("total", "squares", "pivot")}
    found = call(steps.group_norm_statistics, {**moments, "count": count}, {"eps": attrs["eps"]})
    by_channel = {name: _by_channel(found[name]) for name in ("mean", "rstd")}
    return {**by_channel, "group_mean": found["group_mean"], "group_rstd": found["group_rstd"]}


def _pulls(call: Call, attrs: Arrays, slopes: Arrays, count: Any, weight: Any) -> dict[str, Any]:
    """By channel, what a group's gradient subtracts: ``pull`` times x normalised, and ``push``."""
    grouped = {name: _grouped(slopes[name], attrs["groups"]) for name in ("product", "total")}
    weight = _grouped(weight, attrs["groups"])
    found = call(steps.group_norm_pulls, {**grouped, "count": count, "weight": weight}, {})
    return {name: _by_channel(found[name]) for name in ("pull", "push")}


def _dweight(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    """From the sums of each example and channel."""
    found = {}
    for name, sums in (("weight", inputs["product"]), ("bias", inputs["total"])):
        like = inputs[name]
        found[f"d{name}"] = None if like is None else xp.sums(sums.reshape((-1, sums.shape[-1])), (-2,), like)
    return found


# --- channels first --------------------------------------------------------------------------------------------------


def is_long(shape: Sequence[Any], groups: Any) -> bool:
    """Whether groups, channels first, are longer than a row that is read once; not of sizes that are symbols."""
    channels, positions = shape[-2:]
    known = all(isinstance(each, int) for each in (channels, positions, groups)) and groups > 0
    return known and channels // groups * positions > LONG


def _rows(x: Any, groups: int) -> Any:
    """Groups as rows."""
    *lead, channels, positions = x.shape
    return x.reshape((*lead, groups, channels // groups * positions))


def _first(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, groups = inputs["x"], attrs["groups"]
    weight, bias = _parameters(xp, inputs, -2)
    parameters = {"weight": _grouped(weight, groups), "bias": _grouped(bias, groups)}
    found = call(steps.group_norm_rows, {"x": _rows(x, groups), **parameters}, {"eps": attrs["eps"], **_silu(attrs)})
    return {**found, "out": found["out"].reshape(x.shape)}


def _first_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, groups = inputs["x"], attrs["groups"]
    given = {name: inputs[name] for name in ("weight", "bias")}
    operands = {name: None if each is None else _grouped(each, groups) for name, each in given.items()}
    *lead, channels, positions = x.shape
    shape = (*lead, groups, channels // groups, positions)
    operands |= {"x": x.reshape(shape), "dy": inputs["dout"].reshape(shape)}
    operands |= {name: inputs[name] for name in ("mean", "rstd")}
    found = call(steps.group_norm_groups_bwd, operands, _silu(attrs))
    sums = {name: found[name].reshape((*lead, channels)) for name in ("product", "total")}
    return {"dx": found["dx"].reshape(x.shape), **_dweight(xp, call, {**inputs, **sums}, attrs)}


# --- channels first, each of which is a row: groups that are long ----------------------------------------------------


def _of_channels(xp: Any, x: Any, attrs: Arrays, numbers: Arrays, parameters: Arrays) -> dict[str, Any]:
    """A number of each channel, ``[*m c 1]``: those of its group, and its own where the activation reads them. Compact:
    to find a row's number by strides takes longer than the row.
    """
    shape = (*x.shape[:-2], attrs["groups"], x.shape[-2] // attrs["groups"])
    found = {name: xp.broadcast_to(a[..., None], shape) for name, a in numbers.items()}
    for name, own in parameters.items():
        found[name] = xp.broadcast_to(_grouped(own, attrs["groups"]), shape)
    return {name: a.reshape((*x.shape[:-1], 1)) for name, a in found.items()}


def _row_slopes(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    weight, bias = _parameters(xp, inputs, -2)
    numbers = {name: inputs[name] for name in ("mean", "rstd")}
    silu = _silu(attrs)
    own = {"weight": weight, "bias": bias} if silu["silu"] else {}
    operands = _of_channels(xp, inputs["x"], attrs, numbers, own)
    unread = {name: operands["mean"] for name in ("weight", "bias") if not silu["silu"]}
    return call(steps.group_norm_row_slopes, {"x": inputs["x"], "dy": inputs["dout"], **operands, **unread}, silu)


def _long(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x = inputs["x"]
    weight, bias = _parameters(xp, inputs, -2)
    sums = call(steps.group_norm_row_moments, {"x": x, "pivot": x[..., :1]}, {})
    found = _statistics(call, attrs, {**sums, "pivot": sums["first"]}, xp.number(x.shape[-1], x))
    numbers = {"mean": found["group_mean"], "rstd": found["group_rstd"]}
    operands = _of_channels(xp, x, attrs, numbers, {"weight": weight, "bias": bias})
    return {**call(steps.group_norm_of_rows, {"x": x, **operands}, _silu(attrs)), **numbers}


def _long_slopes(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    found, (weight, _) = _row_slopes(xp, call, inputs, attrs), _parameters(xp, inputs, -2)
    return {**found, **_pulls(call, attrs, found, xp.number(inputs["x"].shape[-1], inputs["x"]), weight)}


def _long_dx(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, (weight, bias) = inputs["x"], _parameters(xp, inputs, -2)
    numbers = {name: inputs[name] for name in ("mean", "rstd")}
    operands = _of_channels(xp, x, attrs, numbers, {"weight": weight, "bias": bias})
    operands |= {name: inputs[name][..., None] for name in ("pull", "push")}
    return {"dx": call(steps.group_norm_of_rows_dx, {"x": x, "dy": inputs["dout"], **operands}, _silu(attrs))["out"]}


# --- channels last ---------------------------------------------------------------------------------------------------


def _fits(x: Any, groups: Any, inputs: int) -> bool:
    """Whether the groups of some channels, of so many arrays like x, are read once; not of sizes that are symbols."""
    sizes = (*x.shape[-2:], groups)
    if not all(isinstance(each, int) for each in sizes) or groups < 1:
        return False
    itemsize = ITEMSIZE[str(x.dtype).rpartition(".")[2]]
    return on_chip(x.shape[-2:], groups, itemsize, inputs)


def _spread(xp: Any, x: Any, groups: int, numbers: Arrays) -> dict[str, Any]:
    """Numbers of groups by channel."""
    shape = (*x.shape[:-2], groups, x.shape[-1] // groups)
    return {name: _by_channel(xp.broadcast_to(numbers[name][..., None], shape)) for name in ("mean", "rstd")}


def _last(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x = inputs["x"]
    given = {name: inputs[name] for name in ("x", "weight", "bias")}
    if _fits(x, attrs["groups"], 1):
        options = {name: attrs[name] for name in ("groups", "eps")}
        return call(steps.group_norm_examples, given, {**options, **_silu(attrs)})
    # Deviations from one of a channel's numbers: a mean that is large beside them costs no accuracy.
    pivot = x[..., 0, :]
    sums = call(steps.group_norm_moments, {"x": x, "pivot": pivot}, {})
    found = _statistics(call, attrs, {**sums, "pivot": pivot}, xp.number(x.shape[-2], x))
    weight, bias = _parameters(xp, inputs, -1)
    operands = {"x": x, "mean": found["mean"], "rstd": found["rstd"], "weight": weight, "bias": bias}
    out = call(steps.group_norm_of_examples, operands, _silu(attrs))["out"]
    return {"out": out, "mean": found["group_mean"], "rstd": found["group_rstd"]}


def _last_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, groups = inputs["x"], attrs["groups"]
    if _fits(x, groups, 2):
        operands = {name: inputs[name] for name in ("x", "mean", "rstd", "weight", "bias")}
        given = {**operands, "dy": inputs["dout"]}
        found = call(steps.group_norm_examples_bwd, given, _silu(attrs))
        return {"dx": found["dx"], **_dweight(xp, call, {**inputs, **found}, attrs)}
    weight, bias = _parameters(xp, inputs, -1)
    operands = {"x": x, "dy": inputs["dout"], **_spread(xp, x, groups, inputs), "weight": weight, "bias": bias}
    slopes = call(steps.group_norm_slopes, operands, _silu(attrs))
    pulls = _pulls(call, attrs, slopes, xp.number(x.shape[-2], x), weight)
    dx = call(steps.group_norm_of_examples_dx, {**operands, **pulls}, _silu(attrs))["out"]
    return {"dx": dx, **_dweight(xp, call, {**inputs, **slopes}, attrs)}


# --- declarations ----------------------------------------------------------------------------------------------------


_check_eps = within(eps=NOT_NEGATIVE)


def _check(binding: Binding) -> str | None:
    groups, channels, positions = binding.attrs["groups"], binding.dims["c"], binding.dims["s"]
    if not groups >= 1 or (isinstance(channels, int) and channels % groups):
        return f"attribute `groups` is {groups}, expected a divisor of the c={channels} channels."
    for name, size, what in (("c", channels, "channel"), ("s", positions, "position")):
        if isinstance(size, int) and size < 1:
            return f"argument `x` has {name}=0, expected at least one {what}."
    return _check_eps(binding)


_PARAMETERS = {"weight": Tensor("c", "W", optional=True), "bias": Tensor("c", "B", optional=True)}
_SUMS = {name: Tensor("*m c", "float32") for name in ("product", "total")}
_PULLS = {name: Tensor("*m c", "float32") for name in ("pull", "push")}
_GRADIENTS = {"dweight": Tensor("c", "W", given="weight"), "dbias": Tensor("c", "B", given="bias")}
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "B": FLOATS}, "static": (), "check": _check, "called": "group_norm",
    "attrs": {"groups": 32, "eps": 1e-5, "activation": OneOf("none", "silu")},
}  # fmt: skip
_G: dict[str, Any] = {"derived": {"g": lambda dims, attrs: attrs["groups"]}}


def _numbers(shape: str, hidden: bool) -> dict[str, Tensor]:
    return {name: Tensor(shape, "float32", hidden=hidden) for name in ("mean", "rstd")}


def _norm(
    name: str, shape: str, numbers: str, run: Any, gradient: tuple[Op, ...], ops: tuple[Op, ...], **more: Any
) -> Op:  # fmt: skip
    return Op(
        name, inputs={"x": Tensor(shape, "T"), **_PARAMETERS},
        outputs={"out": Tensor(shape, "T"), **_numbers(numbers, True)},
        kernel=Program(run, ops, maps=True), grad=gradient,
        cases=(Case("odd-small", {"m": (3,), "c": 6, "s": 5}, attrs={"groups": 3}),),
        doc="See :func:`group_norm`.", **_COMMON, **more,
    )  # fmt: skip


def _step(name: str, run: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *ops: Op) -> Op:
    return Op(
        name, inputs=inputs, outputs=outputs, kernel=Program(run, ops, maps=True), doc="A gradient of group_norm.",
        **_COMMON,
    )  # fmt: skip


def _steps_of_sums(
    name: str, slopes: Any, dx: Any, inputs: Mapping[str, Tensor], sums: Op, of_x: Op
) -> tuple[Op, ...]:  # fmt: skip
    """A gradient whose sums are computed first, once for x and for the parameters."""
    x = inputs["x"]
    return (
        _step(f"{name}_slopes", slopes, inputs, {**_SUMS, **_PULLS}, sums, steps.group_norm_pulls),
        _step(f"{name}_dx", dx, {**_PULLS, **inputs}, {"dx": x}, of_x),
        _step(f"{name}_dweight", _dweight, {"x": x._replace(unread=True), **_SUMS, **_PARAMETERS}, _GRADIENTS),
    )


_FIRST, _LAST = Tensor("*m c s", "T"), Tensor("*m s c", "T")
_OF_FIRST = {"x": _FIRST, **_numbers("*m g", False), "dout": _FIRST, **_PARAMETERS}
_OF_LAST = {"x": _LAST, **_numbers("*m g", False), "dout": _LAST, **_PARAMETERS}
group_norm_first = _norm(
    "group_norm_first", "*m c s", "*m g", _first,
    (_step("group_norm_first_bwd", _first_bwd, _OF_FIRST, {"dx": _FIRST, **_GRADIENTS}, steps.group_norm_groups_bwd),),
    (steps.group_norm_rows,), **_G,
)  # fmt: skip
group_norm_long = _norm(
    "group_norm_long", "*m c s", "*m g", _long,
    _steps_of_sums("group_norm_long", _long_slopes, _long_dx, _OF_FIRST, steps.group_norm_row_slopes,
                   steps.group_norm_of_rows_dx),
    (steps.group_norm_row_moments, steps.group_norm_statistics, steps.group_norm_of_rows), **_G,
)  # fmt: skip
group_norm_last = _norm(
    "group_norm_last", "*m s c", "*m g", _last,
    (
        _step(
            "group_norm_last_bwd", _last_bwd, _OF_LAST, {"dx": _LAST, **_GRADIENTS}, steps.group_norm_examples_bwd,
            steps.group_norm_slopes, steps.group_norm_pulls, steps.group_norm_of_examples_dx,
        ),
    ),
    (steps.group_norm_examples, steps.group_norm_moments, steps.group_norm_statistics, steps.group_norm_of_examples),
    **_G,
)  # fmt: skip
