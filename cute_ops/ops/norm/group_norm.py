"""Group norm in steps, whose rows are groups of channels, channels or, with channels last, positions: expressions,
cases.

:mod:`cute_ops.composite.group_norm` makes the norm and its gradient of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.array_api import sigmoid, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.tracing import trace
from cute_ops.hardware import MAX_THREADS, VECTOR_BYTES
from cute_ops.kernels.norm.group_config import groups_of
from cute_ops.ops.expression.formula import ByAttrs, Formula, declare
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.norm import group_config

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
GROUPS = (
    Case("odd-small", {"m": (3,), "h": 3, "d": 5, "n": 35}, {"T_weight": "float32"}),
    Case("unet", {"m": (2,), "h": 32, "d": 10, "n": 10240}),
    Case("vae", {"m": (1,), "h": 3, "d": 16, "n": 262144}),
)
CHANNELS = (Case("odd-small", {"m": (3, 5), "n": 77}), Case("unet", {"m": (5, 32), "n": 4096}))
POSITIONS = (Case("odd-small", {"b": (3,), "m": 7, "n": 15}), Case("unet", {"b": (2,), "m": 1024, "n": 320}))
NUMBERS = (Case("odd-small", {"m": (3,), "h": 2, "n": 5}), Case("unet", {"m": (4,), "h": 32, "n": 40}))
SILU = {"silu": False}


def _normed_and_slope(
    xp: Any, x: Any, dy: Any, *, mean: Any, rstd: Any, weight: Any, bias: Any, silu: bool
) -> tuple[Any, Any]:  # fmt: skip
    """Normalise x, and take the gradient to what is then scaled and shifted, before the activation."""
    normed = (x - mean) * rstd
    if not silu:
        return normed, dy
    y = normed * weight + bias
    gate = xp.sigmoid(y)
    return normed, dy * gate * (1.0 + y * (1.0 - gate))


# --- channels first: a row is a group -------------------------------------------------------------------------------


def _group(xp: Any, x: Any, weight: Any, bias: Any, *, eps: float, silu: bool) -> Any:
    mean = xp.mean(x, **ROW)
    centred = x - mean
    rstd = xp.rsqrt(xp.mean(centred * centred, **ROW) + eps)
    y = centred * rstd * weight + bias
    return xp.silu(y) if silu else y, mean, rstd


group_norm_rows = fused(
    _group, name="group_norm_rows", operands={"x": "*m n", "weight": "h d", "bias": "h d"},
    attrs={"eps": 1e-5, **SILU}, outputs=("out", "mean", "rstd"), no_gradient=("weight", "bias"), squeezed=True,
    cases=GROUPS,
    doc="The group norm of rows ``h``, each of which has d channels one after the other; its mean and rstd.",
)  # fmt: skip


def _rows_bwd(xp: Any, x: Any, dy: Any, mean: Any, rstd: Any, *given: Any, silu: bool) -> tuple[Any, Any, Any]:
    weight, bias = given
    wide, slope, mean, rstd, w, b = widen(xp, x, dy, mean, rstd, weight, bias)
    mean, rstd = (a[..., None, None] for a in (mean, rstd))
    normed = (wide - mean) * rstd
    w, b = (None if a is None else a[..., None] for a in (w, b))
    if silu:
        y = normed if w is None else normed * w
        y = y if b is None else y + b
        gate = sigmoid(xp, y)
        slope = slope * gate * (1 + y * (1 - gate))
    scaled = slope if w is None else slope * w
    pull, push = (xp.mean(a, axis=(-2, -1), keepdims=True) for a in (scaled * normed, scaled))
    dx = xp.astype(rstd * (scaled - push - normed * pull), x.dtype)
    return dx, *(xp.astype(xp.sum(a, axis=-1), xp.float32) for a in (slope * normed, slope))


_GROUPED, _NUMBERS, _OF_GROUPS = Tensor("*m h d n", "T"), Tensor("*m h", "float32"), Tensor("h d", "W", optional=True)
group_norm_groups_bwd = Op(
    "group_norm_groups_bwd",
    inputs={"x": _GROUPED, "dy": _GROUPED, "mean": _NUMBERS, "rstd": _NUMBERS, "weight": _OF_GROUPS,
            "bias": _OF_GROUPS._replace(dtype="B")},
    outputs={"dx": _GROUPED, **{name: Tensor("*m h d", "float32") for name in ("product", "total")}},
    dtypes={"T": FLOATS, "W": FLOATS, "B": FLOATS}, attrs=SILU, static=("h", "d", "n"), reference=_rows_bwd,
    kernel="cute_ops.kernels.norm.group_rows:GroupRowsBackward",
    tuning=Tuning(group_config.rows_bwd),
    cases=(
        Case("odd-small", {"m": (3,), "h": 3, "d": 5, "n": 7}, {"W": "float32"}),
        Case("unet", {"m": (2,), "h": 32, "d": 10, "n": 1024}), Case("vae", {"m": (1,), "h": 3, "d": 16, "n": 16384}),
    ),
    inference_only="group_norm has one",
    doc="""Gradient of :func:`group_norm_rows`, whose rows are here ``h`` groups of d channels, of mean and rstd.

    ``product`` and ``total`` are sums over positions: of the gradient of what is scaled and shifted times x normalised,
    and of that gradient; over examples they sum up to those of weight and bias.
    """,
)  # fmt: skip


# --- sums over the positions of a channel, and what follows from those of a group's channels ------------------------


def _moments(xp: Any, x: Any, pivot: Any) -> Any:
    deviation = x - pivot
    return deviation, deviation * deviation


def _slopes(xp: Any, x: Any, dy: Any, **numbers: Any) -> Any:
    normed, slope = _normed_and_slope(xp, x, dy, **numbers)
    return slope * normed, slope


def _statistics(xp: Any, total: Any, squares: Any, count: Any, pivot: Any, *, eps: float) -> Any:
    shift = total / count
    means = pivot + shift
    mean = xp.mean(means, **ROW)
    apart = means - mean
    variance = xp.mean((squares - total * shift) / count + apart * apart, **ROW)
    rstd = xp.rsqrt(variance + eps)
    return mean + 0.0 * means, rstd + 0.0 * means, mean, rstd


def _pulls(xp: Any, product: Any, total: Any, count: Any, weight: Any) -> Any:
    pull, push = (xp.mean(sums * weight / count, **ROW) for sums in (product, total))
    return pull + 0.0 * total, push + 0.0 * total


def _norm(xp: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, *, silu: bool) -> Any:
    y = (x - mean) * rstd * weight + bias
    return xp.silu(y) if silu else y


def _norm_dx(xp: Any, x: Any, dy: Any, *, pull: Any, push: Any, **numbers: Any) -> Any:
    normed, slope = _normed_and_slope(xp, x, dy, **numbers)
    return numbers["rstd"] * (slope * numbers["weight"] - push - normed * pull)


group_norm_statistics = fused(
    _statistics, name="group_norm_statistics", cases=NUMBERS, attrs={"eps": 1e-5}, squeezed=True,
    no_gradient=("squares", "count", "pivot"), outputs=("mean", "rstd", "group_mean", "group_rstd"),
    operands={"total": "*m n", "squares": "*m n", "count": "", "pivot": "any *m n"},
    doc="Mean and rstd of a group for each of its channels, and for the group, from the moments of these.",
)  # fmt: skip
group_norm_pulls = fused(
    _pulls, name="group_norm_pulls", cases=NUMBERS, no_gradient=("count", "weight"), outputs=("pull", "push"),
    operands={"product": "*m n", "total": "*m n", "count": "", "weight": "h n"},
    doc="What a group's gradient subtracts, by channel: ``pull`` times x normalised, and ``push``.",
)  # fmt: skip


# --- channels first: a row is a channel, which has numbers -----------------------------------------------------------


def _row_moments(xp: Any, x: Any, pivot: Any) -> Any:
    deviation, squares = _moments(xp, x, pivot)
    return xp.sum(deviation, **ROW), xp.sum(squares, **ROW), 1.0 * pivot


def _row_slopes(xp: Any, x: Any, dy: Any, **numbers: Any) -> Any:
    product, total = _slopes(xp, x, dy, **numbers)
    return xp.sum(product, **ROW), xp.sum(total, **ROW)


_OF_ROWS = dict.fromkeys(("mean", "rstd", "weight", "bias"), "*m 1")
_PULLS = {"pull": "*m 1", "push": "*m 1"}
group_norm_row_moments = fused(
    _row_moments, name="group_norm_row_moments", cases=CHANNELS, no_gradient=("pivot",), squeezed=True,
    operands={"x": "*m n", "pivot": "*m 1"}, outputs=("total", "squares", "first"),
    doc="Sums over a channel's positions, of the deviations from one of them and of their squares; that one.",
)  # fmt: skip
group_norm_row_slopes = fused(
    _row_slopes, name="group_norm_row_slopes", cases=CHANNELS, no_gradient=(*_OF_ROWS,), squeezed=True, attrs=SILU,
    operands={"x": "*m n", "dy": "*m n", **_OF_ROWS}, outputs=("product", "total"),
    doc="Sums over a channel's positions, of the slope times x normalised and of the slope.",
)  # fmt: skip
group_norm_of_rows = fused(
    _norm, name="group_norm_of_rows", cases=CHANNELS, no_gradient=(*_OF_ROWS,), attrs=SILU,
    operands={"x": "*m n", **_OF_ROWS}, doc="``(x - mean) * rstd * weight + bias`` of the numbers of rows.",
)  # fmt: skip
group_norm_of_rows_dx = fused(
    _norm_dx, name="group_norm_of_rows_dx", cases=CHANNELS, no_gradient=("mean", "rstd", *_PULLS, "weight", "bias"),
    attrs=SILU,
    operands={"x": "*m n", "dy": "*m n", "mean": "*m 1", "rstd": "*m 1", **_PULLS, "weight": "*m 1", "bias": "*m 1"},
    doc="Gradient of :func:`group_norm_of_rows` to x, which mean and rstd follow from.",
)  # fmt: skip


# --- channels last: a row is a position ------------------------------------------------------------------------------


def _position_sums(
    name: str, function: Any, operands: Mapping[str, tuple[str, ...]], outputs: tuple[str, ...],
    attrs: Mapping[str, Any],
) -> Op:  # fmt: skip
    """The op of sums over the positions of each example, for each channel."""
    tiles, shared, vectors = operands["*b m n"], operands["*b n"], operands["n"]
    shapes = {**dict.fromkeys((*tiles, *shared), "*m n"), **dict.fromkeys(vectors, "n")}

    def of(attrs: Mapping[str, Any]) -> Formula:
        expression = trace(function, shapes, attrs)
        return Formula(expression, False, tuple(shapes), outputs, "r" * len(outputs), tiles[0], (*shared, *outputs))

    inputs = {
        **{tile: Tensor("*b m n", "T") for tile in tiles},
        **{key: Tensor("*b n", "P") for key in shared},
        **{key: Tensor("n", f"T_{key}") for key in vectors},
    }
    return declare(
        name, ByAttrs(of), inputs, {out: Tensor("*b n", "float32") for out in outputs}, attrs,
        module=__name__, cases=POSITIONS,
        doc="Sums over the positions of each example, for each channel, in float32.",
    )  # fmt: skip


_SHARED, _VECTORS = {"mean": "*b n", "rstd": "*b n"}, {"weight": "n", "bias": "n"}
group_norm_moments = _position_sums(
    "group_norm_moments", _moments, {"*b m n": ("x",), "*b n": ("pivot",), "n": ()}, ("total", "squares"), {}
)
group_norm_slopes = _position_sums(
    "group_norm_slopes", _slopes, {"*b m n": ("x", "dy"), "*b n": (*_SHARED,), "n": (*_VECTORS,)},
    ("product", "total"), SILU,
)  # fmt: skip
group_norm_of_examples = fused(
    _norm, name="group_norm_of_examples", cases=POSITIONS, no_gradient=(*_SHARED, *_VECTORS), attrs=SILU,
    operands={"x": "*m n", **_SHARED, **_VECTORS},
    doc="``(x - mean) * rstd * weight + bias``, of numbers that an example's positions share.",
)  # fmt: skip
group_norm_of_examples_dx = fused(
    _norm_dx, name="group_norm_of_examples_dx", cases=POSITIONS, attrs=SILU,
    no_gradient=(*_SHARED, *_PULLS, *_VECTORS),
    operands={"x": "*m n", "dy": "*m n", **_SHARED, "pull": "*b n", "push": "*b n", **_VECTORS},
    doc="Gradient of :func:`group_norm_of_examples` to x, which mean and rstd follow from.",
)  # fmt: skip


def _examples(xp: Any, x: Any, *given: Any, groups: int, eps: float, silu: bool) -> tuple[Any, Any, Any]:
    wide, w, b = widen(xp, x, *given)
    shape = (*x.shape[:-1], groups, x.shape[-1] // groups)
    apart = wide.reshape(shape)
    mean = xp.mean(apart, axis=(-3, -1), keepdims=True)
    centred = apart - mean
    rstd = 1 / xp.sqrt(xp.mean(centred * centred, axis=(-3, -1), keepdims=True) + eps)
    y = (centred * rstd).reshape(x.shape)
    y = y if w is None else y * w
    y = y if b is None else y + b
    y = y * sigmoid(xp, y) if silu else y
    return xp.astype(y, x.dtype), *(xp.astype(a[..., 0, :, 0], xp.float32) for a in (mean, rstd))


def _examples_bwd(xp: Any, x: Any, dy: Any, mean: Any, rstd: Any, *given: Any, silu: bool) -> tuple[Any, Any, Any]:
    """By the gradient of groups as rows."""
    groups = mean.shape[-1]

    def grouped(a: Any) -> Any:
        return xp.moveaxis(a.reshape((*a.shape[:-1], groups, a.shape[-1] // groups)), -3, -1)

    parameters = (None if a is None else a.reshape((groups, a.shape[-1] // groups)) for a in given)
    dx, *sums = _rows_bwd(xp, grouped(x), grouped(dy), mean, rstd, *parameters, silu=silu)
    lead, n = x.shape[:-2], x.shape[-1]
    return xp.moveaxis(dx, -1, -3).reshape(x.shape), *(a.reshape((*lead, n)) for a in sums)


def _check_groups(binding: Binding) -> str | None:
    groups, channels = groups_of(binding.attrs, binding.dims), binding.dims["n"]
    return f"{groups} groups do not divide n={channels}." if groups < 1 or channels % groups else None


def _check_examples(binding: Binding) -> str | None:
    if problem := _check_groups(binding):
        return problem
    group = binding.dims["n"] // groups_of(binding.attrs, binding.dims)
    if not isinstance(group, int):
        return None
    threads = group // math.gcd(group, VECTOR_BYTES // ITEMSIZE[binding.dtypes["T"]])
    return (
        f"A group has {group} channels, which takes {threads} threads of a CTA; at most {MAX_THREADS} are possible. "
        "`group_norm_last` takes groups of any size."
        if threads > MAX_THREADS else None
    )  # fmt: skip


_TILE, _OF_EACH = Tensor("*b m n", "T"), Tensor("*b g", "float32")
_OF_CHANNELS = {"weight": Tensor("n", "W", optional=True), "bias": Tensor("n", "B", optional=True)}
_OF_EXAMPLES: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "B": FLOATS}, "check": _check_examples,
}  # fmt: skip
group_norm_examples = Op(
    "group_norm_examples", inputs={"x": _TILE, **_OF_CHANNELS},
    outputs={"out": _TILE, "mean": _OF_EACH, "rstd": _OF_EACH},
    attrs={"groups": 1, "eps": 1e-5, **SILU}, static=("m", "n"),
    derived={"g": lambda dims, attrs: attrs["groups"]}, reference=_examples,
    kernel="cute_ops.kernels.norm.group_examples_held:group_examples", tuning=Tuning(group_config.examples),
    inference_only="group_norm has one",
    cases=(
        Case("odd-small", {"b": (3,), "m": 7, "n": 15}, {"W": "float32"}, attrs={"groups": 3}),
        Case("unet", {"b": (2,), "m": 1024, "n": 320}, attrs={"groups": 32}),
    ),
    doc="The group norm of examples whose channels come after positions; mean and rstd of each group.",
    **_OF_EXAMPLES,
)  # fmt: skip
group_norm_examples_bwd = Op(
    "group_norm_examples_bwd",
    inputs={"x": _TILE, "dy": _TILE, "mean": _OF_EACH, "rstd": _OF_EACH, **_OF_CHANNELS},
    outputs={"dx": _TILE, **{name: Tensor("*b n", "float32") for name in ("product", "total")}},
    attrs=SILU, static=("m", "n", "g"), reference=_examples_bwd,
    kernel="cute_ops.kernels.norm.group_examples:GroupExamplesBackward",
    tuning=Tuning(group_config.examples),
    inference_only="group_norm has one",
    cases=(
        Case("odd-small", {"b": (3,), "m": 7, "n": 15, "g": 3}, {"W": "float32"}),
        Case("unet", {"b": (2,), "m": 1024, "n": 320, "g": 32}),
    ),
    doc="Gradient of :func:`group_norm_examples`, of mean and rstd; sums as those of :func:`group_norm_groups_bwd`.",
    **_OF_EXAMPLES,
)  # fmt: skip
PARTS = (
    group_norm_rows, group_norm_groups_bwd, group_norm_statistics, group_norm_pulls, group_norm_row_moments,
    group_norm_row_slopes, group_norm_of_rows, group_norm_of_rows_dx, group_norm_moments, group_norm_slopes,
    group_norm_of_examples, group_norm_of_examples_dx, group_norm_examples, group_norm_examples_bwd,
)  # fmt: skip
