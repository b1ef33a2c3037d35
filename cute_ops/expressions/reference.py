"""The reference of each primitive, an array-API function, and the evaluation of expressions by these.

With float64 operands nothing is rounded, not even by ``astype``. Others are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cute_ops.declaration.array_api import beside, cast, erf, erfc, sigmoid, widen
from cute_ops.expressions.graph import Expression, Node
from cute_ops.expressions.primitives import ROUNDS_TO

# tanh approximation of GELU: 0.5 * x * (1 + tanh(SLOPE * (x + CUBE * x^3))).
SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715
# Larger numbers, infinities included, become this one, as kernels' conversions do it.
FP8_LARGEST = 448.0


def evaluate(
    expression: Expression, xp: Any, operands: Sequence[Any], dtypes: Sequence[str | None] | None = None
) -> tuple[Any, ...]:
    """The outputs of an expression on arrays. Of a traced function it is the expression that the function wrote, which
    kernels, whose primitives may be others, are checked against.

    Args:
        expression: what is computed.
        xp: the arrays' namespace: ``numpy``, ``array_api_compat.torch``, ``jax.numpy``.
        operands: arrays that broadcast as the operands were declared, of any float dtype or bool.
        dtypes: what outputs are rounded to, once; None leaves one in float32, or bool.
    """
    expression = getattr(expression, "written", expression)
    arrays = [a if a.dtype == xp.bool else widen(xp, a)[0] for a in operands]
    accumulator = xp.float64 if any(a.dtype == xp.float64 for a in arrays) else xp.float32
    values: list[Any] = []
    for node in expression.nodes:
        if node.primitive == "operand":
            array = arrays[node.operand]
            values.append(_half(array, node.half) if node.half else array)
        elif node.primitive in ("column", "constant", "n"):
            values.append(_leaf(expression, node, xp, arrays, accumulator))
        else:
            args = [values[i] for i in node.args]
            values.append(REFERENCE[node.primitive](xp, *args, *([node.value] if node.value else [])))
    outputs = [values[i] for i in expression.outputs]
    return tuple(
        cast(xp, out, dtype, out) if dtype else out
        for out, dtype in zip(outputs, dtypes or [None] * len(outputs), strict=True)
    )


def _leaf(expression: Expression, node: Node, xp: Any, arrays: Sequence[Any], accumulator: Any) -> Any:
    """A number, the length of a row, or the elements' places in it, where the arrays are."""
    place = beside(xp, arrays[0]) if arrays else {}
    if node.primitive == "column":
        return xp.arange(_row_length(expression, arrays), dtype=accumulator, **place)
    number = _row_length(expression, arrays) if node.primitive == "n" else node.number
    return xp.asarray(number, dtype=xp.bool if isinstance(number, bool) else accumulator, **place)


def _half(array: Any, half: str) -> Any:
    n = array.shape[-1] // 2
    return array[..., :n] if half == "[:n]" else array[..., n:]


def _row_length(expression: Expression, arrays: Sequence[Any]) -> int:
    """Elements of a row of a value with columns."""
    return next(
        int(array.shape[-1]) // (1 + operand.packed)
        for array, operand in zip(arrays, expression.operands, strict=True) if operand.kind.columns
    )  # fmt: skip


def _rounded(xp: Any, x: Any, dtype: str) -> Any:
    if dtype not in ROUNDS_TO:  # of an output, which is rounded when it is stored
        return x
    if dtype == "float8_e4m3fn" and x.dtype != xp.float64:
        x = xp.where(xp.abs(x) > FP8_LARGEST, xp.sign(x) * FP8_LARGEST, x)  # frameworks differ beyond it
    return xp.astype(cast(xp, x, dtype, x), x.dtype)


def _normal_cdf(xp: Any, x: Any) -> Any:
    return erfc(xp, -x / math.sqrt(2)) / 2  # 1 + erf would cancel in the far negative


def _extreme(xp: Any, reduce: Callable[..., Any], x: Any, of_none: float) -> Any:
    """The largest or least element of each row; of rows without elements, which frameworks refuse, ``of_none``."""
    if x.shape[-1] != 0:
        return reduce(x, axis=-1, keepdims=True)
    return xp.sum(x, axis=-1, keepdims=True) + of_none


def rotate_half(xp: Any, x: Any, size: int | str) -> Any:
    """In each group of ``size`` columns, minus the second half followed by the first half."""
    half = int(size) // 2
    heads = xp.reshape(x, (*x.shape[:-1], x.shape[-1] // (2 * half), 2, half))
    return xp.reshape(xp.stack([-heads[..., 1, :], heads[..., 0, :]], axis=-2), x.shape)


def _grouped(xp: Any, reduce: Callable[..., Any], x: Any, size: int | str) -> Any:
    """Each group of ``size`` columns reduced to one value, which all of its columns get."""
    groups = xp.reshape(x, (*x.shape[:-1], x.shape[-1] // int(size), int(size)))
    return xp.reshape(xp.broadcast_to(reduce(groups, axis=-1, keepdims=True), groups.shape), x.shape)


def _own(primitive: str, xp: Any, *args: Any) -> Any:
    return getattr(xp, primitive)(*args)


# Primitives that are functions of the namespace.
_OWN = (
    "sqrt", "abs", "sign", "floor", "round", "sin", "cos", "exp", "exp2", "log", "log1p", "log2", "tanh", "minimum",
    "maximum", "where", "logical_and", "logical_or", "logical_not",
)  # fmt: skip
# Functions of a namespace and of float32 or float64 arrays. astype also takes the name of a dtype, a primitive of
# groups the columns of a group.
REFERENCE: Mapping[str, Callable[..., Any]] = {
    **{primitive: partial(_own, primitive) for primitive in _OWN},
    "add": lambda xp, x, y: x + y,
    "subtract": lambda xp, x, y: x - y,
    "multiply": lambda xp, x, y: x * y,
    "divide": lambda xp, x, y: x / y,
    "negative": lambda xp, x: -x,
    "reciprocal": lambda xp, x: 1 / x,
    "square": lambda xp, x: x * x,
    "rsqrt": lambda xp, x: 1 / xp.sqrt(x),
    "sigmoid": sigmoid,
    "softplus": lambda xp, x: xp.where(x < 0, 0.0, x) + xp.log1p(xp.exp(-xp.abs(x))),
    "erf": erf,
    "ndtr": _normal_cdf,
    "relu": lambda xp, x: xp.where(x < 0, 0.0, x),  # NaN stays
    "silu": lambda xp, x: x * sigmoid(xp, x),
    "gelu": lambda xp, x: x * _normal_cdf(xp, x),
    "gelu_tanh": lambda xp, x: x * sigmoid(xp, 2 * SLOPE * (x + CUBE * x * x * x)),
    "clip": lambda xp, x, low, high: xp.minimum(xp.maximum(x, low), high),
    "astype": _rounded,
    "stop_gradient": lambda xp, x: x,
    "equal": lambda xp, x, y: x == y,
    "less": lambda xp, x, y: x < y,
    "less_equal": lambda xp, x, y: x <= y,
    "rotate_half": rotate_half,
    "group_sum": lambda xp, x, size: _grouped(xp, xp.sum, x, size),
    "group_max": lambda xp, x, size: _grouped(xp, xp.max, x, size),
    "sum": lambda xp, x: xp.sum(x, axis=-1, keepdims=True),
    "mean": lambda xp, x: xp.mean(x, axis=-1, keepdims=True),
    "max": lambda xp, x: _extreme(xp, xp.max, x, -math.inf),
    "min": lambda xp, x: _extreme(xp, xp.min, x, math.inf),
}
