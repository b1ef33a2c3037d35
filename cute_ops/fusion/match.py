"""The op of ours that an expression's text equals, and which operand is which of its arguments.

Each meaning is a Python function in array-API style, as a user would write it. Its canonical text with holes is the
key of a table, so that finding a meaning takes one look-up however many there are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.tracing import trace
from cute_ops.fusion.canonical import canonical, with_holes

EPS, SIZE = 0.0123456789, 6  # stand for any epsilon, and for any size of a group
_CLOSE = 2**-20


class Meaning(NamedTuple):
    """An expression that an op of ours computes.

    Attributes:
        op: its name.
        operands: the argument that each operand of the canonical expression is.
        outputs: the output that each output is.
        attrs: the op's attributes.
    """

    op: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]


@lru_cache(4096)
def meaning_of(expression: Expression) -> Meaning | None:
    """The meaning of an expression in its canonical form; None of one that is no op of ours."""
    text, numbers = with_holes(expression)
    for pattern in _table().get(text, ()):
        attrs = pattern.attrs_of(numbers)
        if attrs is not None:
            return Meaning(pattern.op, pattern.operands, pattern.outputs, attrs)
    return None


class _Pattern(NamedTuple):
    op: str
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    numbers: tuple[float, ...]

    def attrs_of(self, numbers: tuple[float, ...]) -> dict[str, Any] | None:
        """The attributes where these numbers fill the holes; None where the pattern has other numbers."""
        found = dict(self.attrs)
        for own, given in zip(self.numbers, numbers, strict=True):
            if math.isclose(own, EPS, rel_tol=_CLOSE):
                if found.setdefault("eps", shortest(given)) != shortest(given) or not 0 <= given < math.inf:
                    return None
            elif own == SIZE:
                found["size"] = int(given)
            elif not math.isclose(own, given, rel_tol=_CLOSE):
                return None
        return found


def shortest(number: float) -> float:
    """The number with the fewest digits that is this one in float32: 1e-6 for what 1e-6 is rounded to."""
    packed = struct.pack("f", number)
    return next(each for digits in range(1, 18) if struct.pack("f", each := float(f"{number:.{digits}g}")) == packed)


@cache
def _table() -> Mapping[str, tuple[_Pattern, ...]]:
    found: dict[str, tuple[_Pattern, ...]] = {}
    for op, function, operands, outputs, attrs in _meanings():
        expression = trace(function, operands)
        made = canonical(expression)
        text, numbers = with_holes(made.flat)
        names = list(operands)
        in_order = tuple(names[i] for i in made.operands), tuple(outputs[k] for k in made.outputs)
        pattern = _Pattern(op, *in_order, attrs, numbers)
        found[text] = (*found.get(text, ()), pattern)
    return found


_Row = tuple[str, Callable[..., Any], Mapping[str, str], tuple[str, ...], Mapping[str, Any]]
_T, _R = "*m n", "n"


def _meanings() -> Iterator[_Row]:
    """Rows of the table: op, function, operands, outputs, attributes."""
    yield from _norms()
    for activation in ("silu", "gelu", "gelu_tanh"):
        attrs = {} if activation == "silu" else {"approximate": "tanh" if "tanh" in activation else "none"}
        primitive = _primitive(activation)
        base = activation.removesuffix("_tanh")
        yield base, primitive, {"x": _T}, ("out",), attrs
        yield f"{base}_mul", _gate(activation), {"gate": _T, "up": _T}, ("out",), attrs
        yield "swiglu" if base == "silu" else "geglu", _packed(activation), {"x": "*m 2n"}, ("out",), attrs
    yield "relu2", lambda xp, x: xp.square(xp.relu(x)), {"x": _T}, ("out",), {}
    yield "softmax", _softmax, {"x": _T}, ("out",), {}
    yield "log_softmax", _log_softmax, {"x": _T}, ("out",), {}
    yield "log_softmax", lambda xp, x: x - _logsumexp(xp, x), {"x": _T}, ("out",), {}
    yield "logsumexp", _logsumexp, {"x": _T}, ("out",), {}
    yield "rope", _rope, {"x": _T, "cos": _T, "sin": _T}, ("out",), {}


def _norms() -> Iterator[_Row]:
    offset = {"weight_offset": 1.0}
    scales: tuple[tuple[Callable[..., Any], dict[str, str], dict[str, Any]], ...] = (
        (_plain, {}, {}), (_weight, {"weight": _R}, {}), (_one_more, {"weight": _R}, offset),
        (_weight_and_bias, {"weight": _R, "bias": _R}, {}), (_one_more_and_bias, {"weight": _R, "bias": _R}, offset),
    )  # fmt: skip
    for scale, operands, attrs in scales:
        yield "rmsnorm", _after(_rms, scale), {"x": _T, **operands}, ("out",), attrs
        yield "add_rmsnorm", _added(_rms, scale), {"x": _T, "residual": _T, **operands}, ("out", "residual_out"), attrs
        yield "add_rmsnorm", _added(_rms, scale, 1), {"x": _T, "residual": _T, **operands}, ("out",), attrs
        if scale is not _one_more and scale is not _one_more_and_bias:
            yield "layernorm", _after(_centred, scale), {"x": _T, **operands}, ("out",), attrs


def _rms(xp: Any, x: Any) -> Any:
    return x * xp.rsqrt(xp.mean(xp.square(x), axis=-1, keepdims=True) + EPS)


def _centred(xp: Any, x: Any) -> Any:
    return _rms(xp, x - xp.mean(x, axis=-1, keepdims=True))


def _plain(y: Any) -> Any:
    return y


def _weight(y: Any, weight: Any) -> Any:
    return y * weight


def _one_more(y: Any, weight: Any) -> Any:
    return y * (1.0 + weight)


def _weight_and_bias(y: Any, weight: Any, bias: Any) -> Any:
    return y * weight + bias


def _one_more_and_bias(y: Any, weight: Any, bias: Any) -> Any:
    return y * (1.0 + weight) + bias


def _after(norm: Callable[..., Any], scale: Callable[..., Any]) -> Callable[..., Any]:
    return lambda xp, x, **rest: scale(norm(xp, x), **rest)


def _added(norm: Callable[..., Any], scale: Callable[..., Any], outputs: int = 2) -> Callable[..., Any]:
    def function(xp: Any, x: Any, residual: Any, **rest: Any) -> Any:
        total = x + residual
        return (scale(norm(xp, total), **rest), total)[:outputs]

    return function


def _primitive(activation: str) -> Callable[..., Any]:
    return lambda xp, x: getattr(xp, activation)(x)


def _gate(activation: str) -> Callable[..., Any]:
    return lambda xp, gate, up: getattr(xp, activation)(gate) * up


def _packed(activation: str) -> Callable[..., Any]:
    def function(xp: Any, x: Any) -> Any:
        n = x.shape[-1] // 2
        return getattr(xp, activation)(x[..., :n]) * x[..., n:]

    return function


def _softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def _log_softmax(xp: Any, x: Any) -> Any:
    y = x - xp.max(x, axis=-1, keepdims=True)
    return y - xp.log(xp.sum(xp.exp(y), axis=-1, keepdims=True))


def _logsumexp(xp: Any, x: Any) -> Any:
    most = xp.max(x, axis=-1, keepdims=True)
    return xp.log(xp.sum(xp.exp(x - most), axis=-1, keepdims=True)) + most


def _rope(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + xp.rotate_half(x, SIZE) * sin
