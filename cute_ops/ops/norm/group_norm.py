"""Group norm in steps, whose rows are groups of channels or, with channels last, positions: expressions, cases.

:mod:`cute_ops.composite.group_norm` makes the norm and its gradient of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.tracing import trace
from cute_ops.ops.expression.formula import Formula, declare
from cute_ops.ops.expression.fused import fused

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
GROUPS = (
    Case("odd-small", {"m": (3,), "h": 3, "d": 5, "n": 35}, {"T_weight": "float32"}),
    Case("unet", {"m": (2,), "h": 32, "d": 10, "n": 10240}),
    Case("vae", {"m": (1,), "h": 3, "d": 16, "n": 262144}),
)
CHANNELS = (Case("odd-small", {"m": (3, 5), "n": 77}), Case("unet", {"m": (5, 32), "n": 4096}))
POSITIONS = (Case("odd-small", {"b": (3,), "m": 7, "n": 15}), Case("unet", {"b": (2,), "m": 1024, "n": 320}))


# --- channels first: a row is a group -------------------------------------------------------------------------------


def _group(xp: Any, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    mean = xp.mean(x, **ROW)
    centred = x - mean
    rstd = xp.rsqrt(xp.mean(centred * centred, **ROW) + eps)
    return centred * rstd * weight + bias, mean, rstd


def _group_dx(xp: Any, x: Any, dy: Any, mean: Any, rstd: Any, weight: Any) -> Any:
    normed, slope = (x - mean) * rstd, dy * weight
    return rstd * (slope - xp.mean(slope, **ROW) - normed * xp.mean(slope * normed, **ROW))


def _channel_sums(xp: Any, x: Any, dy: Any, mean: Any, rstd: Any) -> Any:
    return xp.sum(dy * ((x - mean) * rstd), **ROW), xp.sum(dy, **ROW)


group_norm_rows = fused(
    _group, name="group_norm_rows", operands={"x": "*m n", "weight": "h d", "bias": "h d"}, attrs={"eps": 1e-5},
    outputs=("out", "mean", "rstd"), no_gradient=("weight", "bias"), squeezed=True, cases=GROUPS,
    doc="The group norm of rows ``h``, each of which has d channels one after the other; its mean and rstd.",
)  # fmt: skip
group_norm_rows_dx = fused(
    _group_dx, name="group_norm_rows_dx", cases=GROUPS, no_gradient=("mean", "rstd", "weight"),
    operands={"x": "*m n", "dy": "*m n", "mean": "*m 1", "rstd": "*m 1", "weight": "h d"},
    doc="Gradient of :func:`group_norm_rows` to x.",
)  # fmt: skip
group_norm_channel_sums = fused(
    _channel_sums, name="group_norm_channel_sums", cases=CHANNELS, no_gradient=("mean", "rstd"), squeezed=True,
    operands={"x": "*m n", "dy": "*m n", "mean": "*m 1", "rstd": "*m 1"}, outputs=("product", "total"),
    doc="Sums over a channel's positions: of dy times x normalised, and of dy.",
)  # fmt: skip


# --- channels last: a row is a position ------------------------------------------------------------------------------


def _affine(xp: Any, x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    return (x - mean) * scale + shift


def _affine_dx(xp: Any, x: Any, dy: Any, scale: Any, line: Any, push: Any) -> Any:
    n = x.shape[-1]
    return dy * scale - (x - line[..., :n]) * line[..., n:] - push


def _moments(xp: Any, x: Any, pivot: Any) -> Any:
    deviation = x - pivot
    return deviation, deviation * deviation


def _slopes(xp: Any, x: Any, dy: Any, mean: Any) -> Any:
    return dy * (x - mean), dy


def _position_sums(name: str, function: Any, tiles: tuple[str, ...], shared: str, outputs: tuple[str, ...]) -> Op:
    """The op of sums over the positions of each example, for each channel."""
    shapes = {**dict.fromkeys(tiles, "*m n"), shared: "*m n"}
    found = Formula(
        trace(function, shapes), True, tuple(shapes), outputs, "r" * len(outputs), tiles[0], (shared, *outputs)
    )
    inputs = {**{tile: Tensor("*b m n", "T") for tile in tiles}, shared: Tensor("*b n", "P")}
    return declare(
        name, lambda attrs: found, inputs, {out: Tensor("*b n", "float32") for out in outputs}, {},
        module=__name__, cases=POSITIONS,
        doc="Sums over the positions of each example, for each channel, in float32.",
    )  # fmt: skip


group_norm_moments = _position_sums("group_norm_moments", _moments, ("x",), "pivot", ("total", "squares"))
group_norm_slopes = _position_sums("group_norm_slopes", _slopes, ("x", "dy"), "mean", ("product", "total"))
group_norm_affine = fused(
    _affine, name="group_norm_affine", cases=POSITIONS, no_gradient=("mean", "scale", "shift"),
    operands={"x": "*m n", "mean": "*b n", "scale": "*b n", "shift": "*b n"},
    doc="``(x - mean) * scale + shift``, of numbers that an example's positions share.",
)  # fmt: skip
group_norm_affine_dx = fused(
    _affine_dx, name="group_norm_affine_dx", cases=POSITIONS, no_gradient=("scale", "line", "push"),
    operands={"x": "*m n", "dy": "*m n", "scale": "*b n", "line": "*b 2n", "push": "*b n"},
    doc="``dy * scale - (x - mean) * pull - push``, ``line``: [mean | pull], which positions share.",
)  # fmt: skip
PARTS = (
    group_norm_rows, group_norm_rows_dx, group_norm_channel_sums, group_norm_moments, group_norm_slopes,
    group_norm_affine, group_norm_affine_dx,
)  # fmt: skip
