"""Expressions: what is traced, how it is written, what is recognised, and what is refused in which words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cute_ops.expressions
from cute_ops import fused
from cute_ops.declaration.case import Case
from cute_ops.expressions import TraceError, differentiate, digest, evaluate, gelu, parse, text_of, trace
from cute_ops.expressions.derivative import DERIVATIVE
from cute_ops.expressions.graph import MOST_DEPTH, MOST_NODES
from cute_ops.expressions.primitives import FUNCTIONS, PRIMITIVES
from cute_ops.expressions.reference import REFERENCE
from cute_ops.expressions.stages import split, stages
from cute_ops.tools import gradient

TILES = {"x": "*m n", "y": "*m n"}
ROW = {"axis": -1, "keepdims": True}


def written(function: Callable[..., Any], operands: dict[str, Any] | None = None) -> str:
    return text_of(trace(function, operands or {"x": "*m n"}))


def gelu_add(xp: Any, x: Any, bias: Any, residual: Any) -> Any:
    return gelu(x + bias) + residual


def halves(xp: Any, x: Any) -> Any:
    n = x.shape[-1] // 2
    return xp.silu(x[..., :n]) * x[..., n:]


@pytest.mark.parametrize(
    ("function", "operands", "expected"),
    [
        (gelu_add, {"x": "*m n", "bias": "n", "residual": "*m n"}, "e1(t,r,t) add 0 1; gelu 3; add 2 4 -> 5"),
        (halves, {"x": "*m 2n"}, "e1(2t) silu 0[:n]; multiply 0[n:] 1 -> 2"),
        (halves, {"x": "2n"}, "e1(2r) silu 0[:n]; multiply 0[n:] 1 -> 2"),
        (lambda xp, x, y: (y, x), TILES, "e1(t,t) -> 1 0"),
        (lambda xp, x, s: x * s, {"x": "*m 1", "s": ""}, "e1(c,s) multiply 0 1 -> 2"),
        (lambda xp, x, m: xp.where(m, x, 0), {"x": "n", "m": "bool *m n"}, "e1(r,t?) where 1 0 0.0 -> 2"),
        (lambda xp, x, bias: x if bias is None else x + bias, {"x": "n", "bias": None}, "e1(r) -> 0"),
        (lambda xp, x: (x > 0) * x, None, "e1(t) less 0.0 0; where 1 1.0 0.0; multiply 0 2 -> 3"),
        (lambda xp, x: xp.astype(x, xp.bfloat16) + 1, None, "e1(t) astype 0 bfloat16; add 1 1.0 -> 2"),
        (lambda xp, x: xp.astype(xp.astype(x, "float16"), np.float16), None, "e1(t) astype 0 float16 -> 1"),
        (lambda xp, x: xp.astype(xp.astype(x, xp.float32), xp.bool), None, "e1(t) equal 0 0.0; logical_not 1 -> 2"),
        (lambda xp, x: xp.sum(x, **ROW) / x.shape[-1], None, "e1(t) mean 0 -> 1"),
        (lambda xp, x: xp.sum(x, **ROW) / (x.shape[-1] - 1), None, "e1(t) sum 0; subtract n 1.0; divide 1 2 -> 3"),
        (lambda xp, x: xp.sum(xp.max(x, **ROW), **ROW), None, "e1(t) max 0 -> 1"),
        (lambda xp, x: 1 / (x - xp.max(-x, **ROW)), None, "e1(t) negative 0; max 1; subtract 0 2; reciprocal 3 -> 4"),
        (lambda xp, x: np.float32(0.5) * (xp.sqrt(2.0) * x), None,
         "e1(t) multiply 0 1.4142135623730951; multiply 1 0.5 -> 2"),
        (lambda xp, x: np.float32(2) - x, None, "e1(t) subtract 2.0 0 -> 1"),
        (lambda xp, x: np.float64(2) < x, None, "e1(t) less 2.0 0 -> 1"),
        (lambda xp, x: x**5 + x**-2 + x**0.5 + 2**x, None,
         "e1(t) square 0; square 1; multiply 0 2; reciprocal 0; square 4; add 3 5; sqrt 0; add 6 7; exp2 0; add 8 9 "
         "-> 10"),
        (lambda xp, x: xp.clip(xp.clip(x, min=-1), -2, 2), None, "e1(t) maximum 0 -1.0; clip 1 -2.0 2.0 -> 2"),
    ],
)  # fmt: skip
def test_what_is_traced(function: Callable[..., Any], operands: Any, expected: str) -> None:
    assert written(function, operands) == expected
    assert text_of(parse(expected)) == expected


def test_the_text_is_the_same_however_it_is_written() -> None:
    def first(xp: Any, x: Any, y: Any) -> Any:
        a = xp.exp(x)
        unused = xp.tanh(y)  # noqa: F841
        b = xp.sigmoid(y)
        return a * b + 2 * (x + y)

    def second(xp: Any, x: Any, y: Any) -> Any:
        t = (y + x) * 2
        t += xp.sigmoid(y) * xp.exp(x)
        return t

    one, two = trace(first, TILES), trace(second, TILES)
    assert one == two and hash(one) == hash(two) and digest(one) == digest(two) == digest(parse(text_of(one)))
    assert digest(trace(first, {"x": "*m n", "y": "n"})) != digest(one)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda xp, x: x + 0, "0"), (lambda xp, x: x * 1, "0"), (lambda xp, x: x / 1, "0"), (lambda xp, x: x - 0, "0"),
        (lambda xp, x: +x, "0"), (lambda xp, x: xp.where(True, x, x + 1), "0"),
        (lambda xp, x: xp.where(x > 0, x, x), "0"), (lambda xp, x: 0 - x, "negative 0"), (lambda xp, x: 0 - (-x), "0"),
        (lambda xp, x: x * x, "square 0"), (lambda xp, x: x / 4, "multiply 0 0.25"),
        (lambda xp, x: x / 3, "divide 0 3.0"),
        (lambda xp, x: 3 * -x, "multiply 0 -3.0"), (lambda xp, x: 2 + -x, "subtract 2.0 0"),
        (lambda xp, x: x - -2 * xp.exp(1.0) * x, "multiply 0 -5.43656365691809; subtract 0 1"),
        (lambda xp, x: ~~(x < 1) & True, "less 0 1.0"), (lambda xp, x: (x < 1) | (x < 1), "less 0 1.0"),
        (lambda xp, x: xp.where(x != 1, x, 2), "equal 0 1.0; where 1 2.0 0"),
        (lambda xp, x: x * 0, "multiply 0 0.0"), (lambda xp, x: x - x, "subtract 0 0"),
    ],
)  # fmt: skip
def test_what_is_simplified(function: Callable[..., Any], expected: str) -> None:
    text = written(function)
    assert text == ("e1(t) -> 0" if expected == "0" else f"e1(t) {expected} -> {1 + expected.count(';')}")


def test_a_simplification_does_not_take_a_dim_away() -> None:
    operands = {"x": "*m n", "y": "*m 1"}
    text = written(lambda xp, x, y: xp.sum(xp.where(x > 0, y, y), **ROW), operands)
    assert text == "e1(t,c) less 0.0 0; where 2 1 1; sum 3 -> 4"


SLOPE = math.sqrt(2 / math.pi)


@pytest.mark.parametrize(
    ("primitive", "function"),
    [
        ("silu", lambda xp, x: x * xp.sigmoid(x)), ("silu", lambda xp, x: x / (1 + xp.exp(-x))),
        ("silu", lambda xp, x: x * (1 / (1 + xp.exp(-x)))), ("sigmoid", lambda xp, x: 1 / (1 + xp.exp(-x))),
        ("sigmoid", lambda xp, x: (xp.exp(-1 * x) + 1) ** -1),
        ("gelu_tanh", lambda xp, x: 0.5 * x * (1 + xp.tanh(SLOPE * (x + 0.044715 * x**3)))),
        ("gelu_tanh", lambda xp, x: x * (0.5 * (1.0 + xp.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))))),
        ("gelu_tanh", lambda xp, x: 0.5 * (x * (xp.tanh(np.float32(SLOPE) * (x + 0.044715 * (x * x * x))) + 1))),
        ("gelu_tanh", lambda xp, x: x * xp.sigmoid(1.5957691216 * (x + 0.044715 * xp.pow(x, 3)))),
        ("gelu", lambda xp, x: 0.5 * x * (1 + xp.erf(x / math.sqrt(2)))),
        ("gelu", lambda xp, x: x * 0.5 * (1 + xp.erf(x * 0.70710678))), ("gelu", lambda xp, x: x * xp.ndtr(x)),
        ("relu", lambda xp, x: xp.maximum(x, 0)), ("relu", lambda xp, x: xp.maximum(0.0, x)),
        ("softplus", lambda xp, x: xp.log(1 + xp.exp(x))), ("softplus", lambda xp, x: xp.log1p(xp.exp(x))),
        ("rsqrt", lambda xp, x: 1 / xp.sqrt(x)), ("rsqrt", lambda xp, x: xp.reciprocal(x**0.5)),
    ],
)  # fmt: skip
def test_what_is_recognised(primitive: str, function: Callable[..., Any]) -> None:
    assert written(function) == f"e1(t) {primitive} 0 -> 1"


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x: 0.5 * x * (1 + xp.tanh(SLOPE * (x + 0.05 * x**3))), lambda xp, x: x * xp.sigmoid(1.702 * x),
        lambda xp, x: 0.5 * x * (1 + xp.erf(x)), lambda xp, x: x * (1 + xp.erf(x / math.sqrt(2))),
        lambda xp, x: 0.5 * x * (1 + xp.erf(0.7121 * x)), lambda xp, x: 0.5 * x * (1 + xp.erf(0.70703125 * x)),
        lambda xp, x: x * xp.sigmoid(1.6 * x + 0.0716 * x**3), lambda xp, x: 0.5 * x * (1 + xp.erf(0.70711 * x)),
        lambda xp, x: 0.5 * (x * (xp.tanh(0.796875 * (x + 0.044677734375 * (x * x * x))) + 1)),
        lambda xp, x: x * (1 + xp.tanh(SLOPE * (x + 0.044715 * x**3))), lambda xp, x: xp.log(2 + xp.exp(x)),
        lambda xp, x: x / (1 - xp.exp(-x)), lambda xp, x: xp.maximum(x, 1),
        lambda xp, x: 0.5 * x * (1 + xp.tanh(SLOPE * (xp.exp(x) + 0.044715 * x**3))),
    ],
)  # fmt: skip
def test_what_only_looks_alike_is_not(function: Callable[..., Any]) -> None:
    x = np.linspace(0.1, 2, 7)
    text = written(function)
    assert not re.search("gelu|silu|relu|softplus", text)
    assert evaluate(parse(text), np, [x])[0] == pytest.approx(function(_Numbers, x), rel=1e-12)


def test_looking_for_a_primitive_takes_no_time() -> None:
    def function(xp: Any, x: Any) -> Any:
        shared, product = x, x + 1
        for _ in range(30):
            shared, product = shared + 0.5 * shared, product * product
        return 0.5 * x * (1 + xp.tanh(shared)) + 0.5 * x * (1 + xp.erf(product))

    assert written(function).count("tanh") == 1


class _Numbers:
    """Just enough of a namespace to run a function on NumPy arrays."""

    exp, log, tanh, maximum = np.exp, np.log, np.tanh, np.maximum

    @staticmethod
    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    @staticmethod
    def erf(x: Any) -> Any:
        return np.vectorize(math.erf)(x)


def test_every_primitive_is_in_every_table() -> None:
    device = (Path(cute_ops.expressions.__file__).parents[1] / "kernels" / "emit" / "primitives.py").read_text()
    named = set(re.findall(r'^    "(\w+)": ', device.partition("\nDEVICE = ")[2], re.MULTILINE))
    others = {name for name, primitive in PRIMITIVES.items() if primitive.reduces or primitive.grouped}
    assert REFERENCE.keys() == DERIVATIVE.keys() == PRIMITIVES.keys() == named | others
    with pytest.raises(AttributeError, match="no attribute 'cumsum'"):
        _ = cute_ops.expressions.cumsum


@pytest.mark.parametrize("primitive", FUNCTIONS)
def test_a_primitive_is_a_function_of_symbols_arrays_and_numbers(primitive: str) -> None:
    function = getattr(cute_ops.expressions, primitive)
    assert written(lambda xp, x: function(x)) == f"e1(t) {primitive} 0 -> 1"
    x = np.asarray([0.25, 2.0])
    assert function(x) == pytest.approx([function(0.25), function(2.0)])
    assert function(x) == pytest.approx(evaluate(parse(f"e1(r) {primitive} 0 -> 1"), np, [x])[0])


def test_outputs_are_rounded_once_and_values_are_float32() -> None:
    import ml_dtypes

    x = np.asarray([1.0, 3.0], ml_dtypes.bfloat16)
    expression = trace(lambda xp, x: (x / 3, xp.astype(x / 3, xp.bfloat16) * 3, x > 2), {"x": "n"})
    wide, rounded, over = evaluate(expression, np, [x])
    assert (str(wide.dtype), str(rounded.dtype), str(over.dtype)) == ("float32", "float32", "bool")
    assert wide[0] == np.float32(1) / np.float32(3) and rounded[0] == 3 * np.float32(ml_dtypes.bfloat16(1 / 3))
    narrow, _, _ = evaluate(expression, np, [x], ["bfloat16", None, None])
    assert str(narrow.dtype) == "bfloat16"
    exact = evaluate(expression, np, [x.astype(np.float64)], ["bfloat16", None, None])
    assert str(exact[0].dtype) == "float64" and exact[1][0] == 1.0


def test_float8_saturates() -> None:
    expression = trace(lambda xp, x: xp.astype(x, xp.float8_e4m3fn), {"x": "n"})
    x = np.asarray([1e9, -np.inf, 500, 17.0, np.nan], np.float32)
    assert evaluate(expression, np, [x])[0] == pytest.approx([448, -448, 448, 16, np.nan], nan_ok=True)


def test_the_cost_is_the_sum_of_the_primitives() -> None:
    assert trace(gelu_add, {"x": "*m n", "bias": "n", "residual": "*m n"}).cost == (2, 18)


# Texts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not of the form"), ("e1(t) add 0 1.0", "it is not of the form"),
        ("e2(t) -> 0", "its format is 'e2'"),
        ("e1(q) -> 0", "'q' is no operand"), ("e1(t) -> 1", "'1' stands for nothing"), ("e1(2t) -> 0", "is packed"),
        ("e1(t) -> 0[:n]", "is not packed"), ("e1(t) add 0 2; exp 0 -> 1", "'2' stands for nothing"),
        ("e1(t) system 0 -> 1", "'system' is no primitive"),
        ("e1(t) add 0 -> 1", r"add takes \(float32, float32\), got \(float32\)"),
        ("e1(t) logical_not 0 -> 1", r"takes \(bool\), got \(float32\)"),
        ("e1(t) astype 0 float64 -> 1", "belong to astype"),
        ("e1(t) astype 0 -> 1", "astype takes"), ("e1(t)  -> 0", "it is not of the form"),
        ("e1(t) exp  0 -> 1", "is no expression"),
        ("e1(c) sum 0 -> 1", "sum of a value without columns"), ("e1(t) add 0 nan -> 1", "NaN is no constant"),
        ("e1(t) add 0 1_0.0 -> 1", "is not how the expression is written, but 'e1.t. add 0 10.0 -> 1'"),
        ("e1(t) add 1.0 0 -> 1", "is not how"), ("e1(t) exp 0; tanh 0 -> 2", "is not how"),
        ("e1(t) exp 00 -> 1", "is not how"),
        ("e1(t) exp 0; exp 0; add 1 2 -> 3", "is not how"), ("e1(t) add 0 infinity -> 1", "is not how"),
        ("e1(t) exp ٠ -> 1", "is not how"), ("e1(t) -> 0\n", "is not how"),
        ("e1(t) exp 0;exp 1 -> 2", "is no expression"),
        ("e1() -> 0", "stands for nothing"), ("e1(" + ",".join("t" * 33) + ") -> 0", "at most 32 operands"),
        ("e1(t) -> " + " ".join("0" * 33), "1 to 32 outputs"), ("e1(t) -> " + "0" * 40000, "at most 32768 characters"),
        ("e1(t) " + "; ".join(f"exp {i}" for i in range(MOST_DEPTH)) + f" -> {MOST_DEPTH}", "deep"),
        ("e1(t) " + "; ".join(f"add 0 {i}.0" for i in range(MOST_NODES)) + f" -> {MOST_NODES}", "at most 1000 nodes"),
    ],
)  # fmt: skip
def test_a_text_that_is_none_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)


# What cannot be traced


def loop(xp: Any, x: Any) -> Any:
    total = 0.0
    for part in x:
        total = total + part
    return total


def write(xp: Any, x: Any) -> Any:
    x[..., 0] = 0.0
    return x


def branch(xp: Any, x: Any) -> Any:
    if x > 0:
        return x
    return -x


def itself(xp: Any, x: Any) -> Any:
    return itself(xp, x)


def deep(xp: Any, x: Any) -> Any:
    for _ in range(MOST_DEPTH):
        x = xp.tanh(x)
    return x


def wide(xp: Any, x: Any) -> Any:
    every = [xp.tanh(x * i) for i in range(2, MOST_NODES // 2)]
    return xp.exp(every[0])


ARRAY = np.ones(4, np.float32)
CONTROL = "write xp.where(condition, a, b); for max(a, b)"
REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    (branch, "Python's control flow on a value", CONTROL),
    (lambda xp, x: bool(x), "Python's control flow on a value", CONTROL),
    (lambda xp, x: max(x, 0), "Python's control flow on a value", "xp.maximum"),
    (lambda xp, x: 0 < x < 1, "Python's control flow on a value", "xp.logical_and"),
    (lambda xp, x: x > 0 and x, "Python's control flow on a value", "xp.logical_and"),
    (lambda xp, x: float(x), "float() of a value", "write the function of xp"),
    (lambda xp, x: math.exp(x), "float() of a value", "as xp.exp for math.exp"),
    (lambda xp, x: math.floor(x), "rounding a value", "write xp.floor(x)"),
    (lambda xp, x: int(x), "int() of a value", "write xp.floor(x)"),
    (lambda xp, x: [1, 2][x], "int() of a value", "write xp.floor(x)"),
    (loop, "a value as a sequence", "rows have any length"),
    (lambda xp, x: len(x), "a value as a sequence", "rows have any length"),
    (write, "writing into a value", "write x = xp.where(mask, new, x)"),
    (lambda xp, x: x[x > 0], "a mask as an index: the shape would depend on values", "write xp.where(mask, x, 0.0)"),
    (lambda xp, x: x[..., 0], "an index of a value", "declare an operand as `*m 2n`"),
    (lambda xp, x: x[..., : x.shape[-1] // 2], "a slice of a row", "declare an operand as `*m 2n`"),
    (lambda xp, x: x.shape[0], "a shape", "write shape[-1]"),
    (lambda xp, x: x * len(x.shape), "a shape", "write shape[-1]"),
    (lambda xp, x: x if x.shape[-1] > 4 else -x, "a decision on the length of a row", "one expression serves"),
    (lambda xp, x: range(x.shape[-1]), "a decision on the length of a row", "one expression serves"),
    (lambda xp, x: xp.cumsum(x), "xp.cumsum is no primitive (did you mean sum?)", "primitives are functions of"),
    (lambda xp, x: xp.sigmiod(x), "xp.sigmiod is no primitive (did you mean sigmoid?)", "primitives are functions"),
    (lambda xp, x: xp.linalg.norm(x), "xp.linalg is no primitive", " silu sin softplus sqrt square stop_gradient "),
    (lambda xp, x: xp.argmin(x, **ROW), "xp.argmin is no primitive", "of rows, logsumexp max mean min softmax"),
    (lambda xp, x: x.detach(), ".detach of a value", "write xp.stop_gradient"),
    (lambda xp, x: xp.isnan(x), "xp.isnan is no primitive", "write x != x"),
    (lambda xp, x: xp.nonzero(x), "xp.nonzero is no primitive", "shapes may not depend on values"),
    (lambda xp, x: x + xp.zeros_like(x), "xp.zeros_like is no primitive", "write the number itself"),
    (lambda xp, x: xp.sum(x), "xp.sum of anything but whole rows", "write xp.sum(x, axis=-1, keepdims=True)"),
    (lambda xp, x: xp.max(x, 0), "xp.max of anything but whole rows", "or xp.maximum(x, y)"),
    (lambda xp, x: xp.min(x, -1), "xp.min of anything but whole rows", "or xp.minimum(x, y)"),
    (lambda xp, x: xp.exp(x, x), "xp.exp of 2 arguments", "write xp.exp(x)"),
    (lambda xp, x: xp.where(x, x), "xp.where of 2 arguments", "write xp.where(x, y, z)"),
    (lambda xp, x: xp.exp(x, out=x), "xp.exp with out=", "write xp.exp without"),
    (lambda xp, x: xp.where(x, x, x), "where of a value that is no bool", "write a comparison, such as x != 0"),
    (lambda xp, x: x & x, "logical_and of a value that is no bool", "write a comparison"),
    (lambda xp, x: (x > 0) + (x < 1), "add of bools", "write xp.logical_and"),
    (lambda xp, x: xp.exp(x > 0), "exp of bools", "xp.where(condition, 1.0, 0.0)"),
    (lambda xp, x: xp.log(-1.0) * x, "log(-1.0,) is no number", "write a number"),
    (lambda xp, x: x * math.nan, "multiply of NaN", "write a number"),
    (lambda xp, x: x * None, "multiply of None", "test an operand that may be left out"),
    (lambda xp, x: x + "1", "add of a str", "write an operand, a value or a number"),
    (lambda xp, x: x**x, "a power other than 1 to 8", "write xp.exp(y * xp.log(x))"),
    (lambda xp, x: 3**x, "a power of another number than 2 and e", "write xp.exp(x * math.log(base))"),
    (lambda xp, x: x // 2, "// of a value", "write xp.floor(x / y)"),
    (lambda xp, x: x @ x, "a product of matrices", "write what happens to its result"),
    (lambda xp, x: xp.astype(x, xp.int32), "xp.int32 is no primitive", "primitives are functions"),
    (lambda xp, x: xp.astype(x, np.float64), "astype to float64", "values are computed in float32"),
    (lambda xp, x: x.sum(), ".sum of a value", "write xp.sum(x, axis=-1, keepdims=True)"),
    (lambda xp, x: x.softmax(-1), ".softmax of a value", "write xp.softmax(x, axis=-1)"),
    (lambda xp, x: x.T, ".T of a value", "write the function of xp that does it"),
    (lambda xp, x: x + ARRAY, "add of a numpy array of shape (4,), which is no operand", "make it a parameter"),
    (lambda xp, x: ARRAY * x, "multiply of a numpy array of shape (4,), which is no operand", "make it a parameter"),
    (lambda xp, x: np.exp(x), "numpy.exp of a value", "write xp.exp"),
    (lambda xp, x: np.sum(x, -1), "numpy.sum of a value", "write xp.sum(x, axis=-1, keepdims=True)"),
    (lambda xp, x: ARRAY[x], "numpy.asarray of a value, or an index of", "an array that it indexes must be"),
    (lambda xp, x: np.where(x > 0, x, 0), "numpy.where of a value", "write xp.where"),
    (lambda xp, x: np.sort(x), "numpy.sort of a value", "write the function of xp that does it"),
    (lambda xp, x: np.asarray(x), "numpy.asarray of a value", "write the function of xp that does it"),
    (lambda xp, x: 1.0, "it returns a value that depends on no operand", "return a value or a tuple of values"),
    (lambda xp, x: 1 / x.shape[-1], "it returns a value that depends on no operand", "return a value"),
    (lambda xp, x: None, "it returns a NoneType", "return a value or a tuple of values"),
    (lambda xp, x: {"out": x}, "it returns a dict", "return a value or a tuple of values"),
    (lambda xp, x: ARRAY, "it returns a ndarray", "return a value or a tuple of values"),
    (lambda xp, x: (), "it returns 0 values", "return 1 to 32 values"),
    (lambda xp, x: (x,) * 33, "it returns 33 values", "return 1 to 32 values"),
    (lambda xp, x: x * 10**400, "multiply of a number beyond float64", "write a smaller one, or xp.inf"),
    (lambda xp, x: x < -(10**400), "less of a number beyond float64", "write a smaller one, or xp.inf"),
    (lambda xp, x: x ** 10**400, "a power other than 1 to 8", "write xp.exp(y * xp.log(x))"),
    (itself, "it calls itself without an end", "write a loop of a fixed number of steps"),
    (deep, "an expression has at most 1000 nodes and is at most 200 deep", "compute it by two functions"),
    (wide, "an expression has at most 1000 nodes and is at most 200 deep", "compute it by two functions"),
    (lambda xp, x: xp.group_sum(x), "xp.group_sum of groups of None columns", "write xp.group_sum(x, 64)"),
    (lambda xp, x: xp.group_mean(x, 0), "xp.group_sum of groups of 0 columns", "write xp.group_sum(x, 64)"),
    (lambda xp, x: xp.rotate_half(x, "a"), "xp.rotate_half of groups of 'a' columns", "write xp.rotate_half(x, 64)"),
    (lambda xp, x: xp.clip(), "TypeError: xp.clip() missing 1 required positional argument: 'x'", "as xp.exp(x)"),
    (lambda xp, x: xp(x), "TypeError: 'xp' object is not callable", "write functions as xp.exp(x)"),
    (lambda xp, x: xp.sum(), "xp.sum of anything but whole rows", "write xp.sum(x, axis=-1, keepdims=True)"),
    (lambda xp, x: x * x.shape[-1] ** 2, "the length of a row in TypeError: unsupported", "use +, -, * and / on it"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "what", "instead"), REFUSED)
def test_what_cannot_be_traced_says_so(function: Callable[..., Any], what: str, instead: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(function, {"x": "*m n"})
    headline, line, advice = str(caught.value).split("\n")
    assert headline.startswith(f"cute_ops: {function.__qualname__} cannot be traced: {what}")
    assert re.match(rf"  {re.escape(__file__)}:\d+: .", line)
    assert advice.startswith("  ") and instead in advice


def swallows_a_condition(xp: Any, x: Any) -> Any:
    try:
        if x > 0:
            return x * 2
    except Exception:
        return x * 3
    return x


def swallows_everything(xp: Any, x: Any) -> Any:
    try:
        scale = float(x)
    except:  # noqa: E722
        scale = 2.0
    return x * scale


def swallows_a_primitive(xp: Any, x: Any) -> Any:
    try:
        return xp.fft(x)
    except TypeError:
        return x + 1


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (swallows_a_condition, "Python's control flow on a value"), (swallows_everything, "float() of a value"),
        (swallows_a_primitive, "xp.fft is no primitive"),
    ],
)  # fmt: skip
def test_what_a_function_catches_is_refused_all_the_same(function: Callable[..., Any], what: str) -> None:
    """Of arrays it would go on by their values, or in the other branch."""
    refusal = rf"^cute_ops: {function.__name__} cannot be traced: {re.escape(what)}\n.*test_expressions\.py:\d+: "
    with pytest.raises(TraceError, match=refusal):
        trace(function, {"x": "*m n"})


def test_the_line_is_the_function_s_own() -> None:
    with pytest.raises(TraceError, match=r"test_expressions\.py:\d+: if x > 0:\n"):
        trace(branch, {"x": "*m n"})
    with pytest.raises(TraceError, match=r"test_expressions\.py:\d+: x\[..., 0\] = 0\.0\n"):
        trace(write, {"x": "*m n"})


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda xp, x: x + 1, "add of x, which is packed"), (lambda xp, x: x.T, "T of x, which is packed"),
        (lambda xp, x: x[..., :4], "an index of x that is neither of its halves"),
        (lambda xp, x: x, "it returns x, which"),
        (lambda xp, x: x[: x.shape[-1] // 2], "an index of x that is neither"),
        (lambda xp, x: np.exp(x), "numpy.exp of a"),
        (lambda xp, x: x[..., x.shape[-1] // 4 :], "a slice of a row"),
    ],
)  # fmt: skip
def test_a_packed_operand_is_read_by_halves(function: Callable[..., Any], what: str) -> None:
    with pytest.raises(TraceError, match=re.escape(what)):
        trace(function, {"x": "*m 2n"})


def test_a_framework_s_functions_and_arrays_are_refused() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    given: list[tuple[Callable[..., Any], str]] = [
        (lambda xp, x: torch.exp(x), "torch.exp of a value\n.*\n  write xp.exp"),
        (lambda xp, x: torch.nn.functional.silu(x), "torch.silu of a value\n.*\n  write xp.silu"),
        (lambda xp, x: torch.where(x > 0, x, 0.0), "torch.where of a value\n.*\n  write xp.where"),
        (lambda xp, x: x * torch.ones(3), "multiply of a torch array of shape (3,), which is no operand"),
        (lambda xp, x: torch.ones(3) * x, "mul of a torch array of shape (3,), which is no operand"),
        (lambda xp, x: jax.numpy.exp(x), "a library's function of a value: TypeError: "),
        (lambda xp, x: jax.nn.gelu(x), "a library's function of a value: TypeError: gelu requires ndarray"),
        (lambda xp, x: x * jax.numpy.ones(3), "array of shape (3,), which is no operand"),
        (lambda xp, x: jax.numpy.ones(3) * x, "array of shape (3,), which is no operand"),
    ]
    for function, what in given:
        with pytest.raises(TraceError, match=re.escape(what).replace(r"\.\*", ".*").replace("\\\n", "\n")) as caught:
            trace(function, {"x": "*m n"})
        assert f"  {__file__}:" in str(caught.value)


def test_a_value_of_another_trace_is_refused() -> None:
    kept: list[Any] = []
    trace(lambda xp, x: kept.append(x) or x, {"x": "n"})
    with pytest.raises(TraceError, match="multiply of a value of another trace"):
        trace(lambda xp, x: x * kept[0], {"x": "n"})


def test_a_wrong_shape_and_too_many_operands() -> None:
    with pytest.raises(ValueError, match=r"operand `x` has shape '\*m k'; shapes are '\*m n', 'n', "):
        trace(lambda xp, x: x, {"x": "*m k"})
    many = eval(f"lambda xp, {', '.join(f'x{i}' for i in range(33))}: x0")
    with pytest.raises(TraceError, match=r"<lambda> cannot be traced: an expression has at most 32 operands, got 33\n"):
        trace(many, {f"x{i}": "*m n" for i in range(33)})


# Derivatives


def test_a_derivative_reads_only_what_it_needs() -> None:
    found = differentiate(trace(gelu_add, {"x": "*m n", "bias": "n", "residual": "*m n"}))
    assert [tuple(s) for s in found.sources] == [("operand", 0), ("operand", 1), ("cotangent", 0)]
    assert [tuple(p) for p in found.addends] == [(0, "", False, False), (1, "", True, False), (2, "", False, False)]
    assert found.expression.outputs[0] == found.expression.outputs[1]


@pytest.mark.parametrize("primitive", ["tanh", "exp", "sigmoid", "sqrt", "rsqrt", "reciprocal", "relu"])
def test_a_saved_output_is_read_instead(primitive: str) -> None:
    expression = trace(lambda xp, x, y: getattr(xp, primitive)(x + y), TILES)
    assert [s.role for s in differentiate(expression, saved=[0]).sources] == ["cotangent", "output"]
    assert [s.role for s in differentiate(expression).sources] == ["operand", "operand", "cotangent"]


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x, y: (x, x * y),
        lambda xp, x, y: (xp.exp(x), xp.exp(x) * x + y),
        lambda xp, x, y: (x * y, xp.square(x)),
    ],
)
def test_a_saved_output_that_does_not_help_is_not_read(function: Callable[..., Any]) -> None:
    assert {s.role for s in differentiate(trace(function, TILES), saved=[0, 1]).sources} == {"operand", "cotangent"}


def test_a_derivative_may_compute_the_outputs_again() -> None:
    found = differentiate(trace(lambda xp, x, y: (x * y, x + y), TILES), again=True)
    assert text_of(found.expression) == (
        "e1(t,t,t,t) multiply 1 2; add 3 4; multiply 0 2; add 3 6; multiply 0 1; add 0 1 -> 5 7 8 9"
    )
    assert [part.operand for part in found.addends] == [0, 1]


def test_an_operand_without_influence_has_a_gradient_of_zero() -> None:
    found = differentiate(trace(lambda xp, x, y: xp.floor(x) + 2 * y, TILES))
    assert text_of(found.expression) == "e1(t) multiply 0 2.0 -> 0.0 1"
    only = differentiate(trace(lambda xp, x, y: x * y, TILES), [1])
    assert text_of(only.expression) == "e1(t,t) multiply 0 1 -> 2" and [s.position for s in only.sources] == [0, 0]


def test_bools_have_no_gradient() -> None:
    expression = trace(lambda xp, x, m: (xp.where(m, x, 0), x > 1), {"x": "*m n", "m": "bool *m n"})
    found = differentiate(expression)
    assert [p.operand for p in found.addends] == [0]
    assert [tuple(s) for s in found.sources] == [("operand", 1), ("cotangent", 0)]
    with pytest.raises(ValueError, match="operand 1 of an expression holds bools"):
        differentiate(expression, [1])


def layer_norm(xp: Any, x: Any) -> Any:
    x = x - xp.mean(x, **ROW)
    return x * xp.rsqrt(xp.mean(x * x, **ROW) + 1e-6)


WORDS: list[tuple[Callable[..., Any], Callable[[np.ndarray], np.ndarray]]] = [
    (lambda xp, x: xp.softmax(x, axis=-1), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    (lambda xp, x: x + xp.logsumexp(x, **ROW), lambda x: x + np.log(np.exp(x).sum(-1, keepdims=True))),
    (lambda xp, x: x + xp.var(x, **ROW), lambda x: x + x.var(-1, keepdims=True)),
    (lambda xp, x: x + xp.var(x, correction=1, **ROW), lambda x: x + x.var(-1, keepdims=True, ddof=1)),
    (lambda xp, x: x + xp.std(x, correction=1, **ROW), lambda x: x + x.std(-1, keepdims=True, ddof=1)),
    (lambda xp, x: xp.sin(x) + xp.cos(3 * x), lambda x: np.sin(x) + np.cos(3 * x)),
    (lambda xp, x: xp.round(x * 2) + x, lambda x: np.rint(x * 2) + x),
]


@pytest.mark.parametrize(("ours", "theirs"), WORDS)
def test_words_are_numpy_s(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Values, and gradients by differences; rounds half to even, and leaves large numbers as they are."""
    expression = trace(ours, {"x": "*m n"})
    rng, step = np.random.default_rng(4), 1e-6
    x = np.concatenate([rng.standard_normal((6, 5)), [[0.25, 0.75, -0.25, 1.25, 8388609.0 / 2**22]]])
    np.testing.assert_allclose(evaluate(expression, np, [x])[0], theirs(x), rtol=1e-12)
    x = x[:6]
    derivative = differentiate(expression)
    cotangent = rng.standard_normal(x.shape)
    known = {("operand", 0): x, ("cotangent", 0): cotangent}
    made = sum(evaluate(derivative.expression, np, [known[source] for source in derivative.sources]))
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        slope = ((theirs(x + moved) - theirs(x - moved)) * cotangent).sum() / (2 * step)
        assert made[place] == pytest.approx(slope, abs=1e-6)


def test_a_stopped_gradient_is_none() -> None:
    found = differentiate(trace(lambda xp, x, y: xp.stop_gradient(xp.exp(x) * y) * x, TILES))
    assert text_of(found.expression) == "e1(t,t,t) exp 0; multiply 1 3; stop_gradient 4; multiply 2 5 -> 6 0.0"


def test_the_logsumexp_of_nothing_is_minus_infinity() -> None:
    x = np.array([[-np.inf, -np.inf], [-np.inf, 2.0], [np.inf, 1.0]])
    found = evaluate(trace(lambda xp, x: xp.logsumexp(x, **ROW), {"x": "*m n"}), np, [x])[0]
    assert found.tolist() == [[-np.inf], [2.0], [np.inf]]


def softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - xp.max(x, **ROW))
    return e / xp.sum(e, **ROW)


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (lambda xp, x: xp.exp(x), [], []),
        (lambda xp, x: x * xp.rsqrt(xp.mean(x * x, **ROW) + 1e-6), [["mean"]], [["mean", "sum"]]),
        (lambda xp, x: x - xp.mean(x, **ROW) + xp.max(x, **ROW), [["max", "mean"]], [["max", "sum"], ["sum"]]),
        (softmax, [["max"], ["sum"]], [["max"], ["sum", "sum"]]),
        # What reaches the mean waits for no third stage: the sum of what is multiplied with x - mean(x) is 0.
        (layer_norm, [["mean"], ["mean"]], [["mean", "sum"], ["mean", "sum"]]),
    ],
)
def test_reductions_that_do_not_wait_are_taken_together(function: Any, forward: Any, backward: Any) -> None:
    expression = trace(function, {"x": "*m n"})
    for each, wanted in ((expression, forward), (differentiate(expression, sum_columns=True).expression, backward)):
        assert [sorted(each.nodes[i].primitive for i in stage) for stage in stages(each)] == wanted


def log_sum_exp(xp: Any, x: Any) -> Any:
    top = xp.max(x, **ROW)
    return top + xp.log(xp.sum(xp.exp(x - top), **ROW))


@pytest.mark.parametrize(
    ("function", "cancels"),
    [
        (softmax, True),
        (lambda xp, x: x - log_sum_exp(xp, x), True),
        (lambda xp, x: x * log_sum_exp(xp, 30 * xp.tanh(x / 30)), True),
        (lambda xp, x: x - xp.max(x, **ROW), False),
        (lambda xp, x: softmax(xp, x) * xp.max(x, **ROW), False),
        (lambda xp, x: softmax(xp, x) / xp.sum(xp.exp(x - xp.max(x, **ROW)), **ROW), False),
    ],
)
def test_a_maximum_whose_gradient_cancels_has_none(function: Any, cancels: bool) -> None:
    op = fused(function, operands={"x": "*m n"}, name="function")
    gradient.check(op, Case("", {"m": (3,), "n": 5}))
    primitives = {
        node.primitive for node in differentiate(trace(function, {"x": "*m n"}), sum_columns=True).expression.nodes
    }
    assert ("equal" not in primitives) == cancels


def test_what_is_too_large_is_not_taken_apart() -> None:
    """Else factors of 2**50 bits would be multiplied, and 2**60 addends listed."""

    def function(xp: Any, x: Any) -> Any:
        large = x * 3
        for _ in range(50):
            large = large * large
        return large * xp.mean(x, **ROW)

    def doubled(xp: Any, x: Any) -> Any:
        y = x + xp.mean(x, **ROW)
        for _ in range(60):
            y = y + y
        return y

    for each in (function, doubled):
        differentiate(trace(each, {"x": "*m n"}), sum_columns=True)


def test_what_follows_from_reductions_is_split_from_what_is_computed_of_each_element() -> None:
    def function(xp: Any, x: Any, scale: Any) -> Any:
        y = x * x
        return xp.rsqrt(xp.mean(y, **ROW) * scale), xp.exp(x), xp.sum(y, **ROW), xp.max(y, **ROW)

    elements, reductions, rows = split(trace(function, {"x": "*m n", "scale": "*m 1"}))
    assert rows
    assert (text_of(elements), reductions, text_of(rows)) == (
        "e1(t,c) exp 0; square 0 -> 2 3 3",
        ("sum", "max"),
        "e1(c,c,t,c) divide 0 n; multiply 3 4; rsqrt 5 -> 6 0 1",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x, y: (xp.where(xp.arange(x.shape[-1]) < 8, xp.rotate_half(x, 4) * y, x), xp.rotate_half(x, 2)),
        lambda xp, x, y: (x * xp.rsqrt(xp.group_mean(x * x, 4) + 0.1) * y, y),
        lambda xp, x, y: (xp.group_max(x, 4) + y, xp.group_sum(x * y, 2)),
    ],
)
def test_derivatives_of_groups_are_those_of_differences(function: Any) -> None:
    def summed(xp: Any, x: Any, y: Any) -> Any:
        first, second = function(xp, x, y)
        return first, xp.sum(second, **ROW)

    expression, rng = trace(summed, TILES), np.random.default_rng(0)
    assert parse(text_of(expression)) == expression
    arrays = [rng.standard_normal((3, 12)) for _ in range(2)]
    found, cotangents = differentiate(expression), (rng.standard_normal((3, 12)), rng.standard_normal((3, 1)))
    given = [(arrays if source.role == "operand" else cotangents)[source.position] for source in found.sources]
    gradients = [np.zeros((3, 12)) for _ in arrays]
    for part, value in zip(found.addends, evaluate(found.expression, np, given), strict=True):
        gradients[part.operand] += value
    for i, found_gradient in enumerate(gradients):
        step = 1e-6 * rng.standard_normal((3, 12))
        ends = [evaluate(expression, np, [*arrays[:i], arrays[i] + s * step, *arrays[i + 1 :]]) for s in (1, -1)]
        slope = sum((d * (a - b)).sum() / 2 for d, a, b in zip(cotangents, *ends, strict=True))
        np.testing.assert_allclose((found_gradient * step).sum(), slope, rtol=1e-4)


def test_groups_of_columns() -> None:
    x = np.arange(12.0).reshape(2, 6)
    expression = trace(
        lambda xp, x: (xp.rotate_half(x, 2), xp.group_sum(x, 3), xp.group_mean(x, 2), xp.group_max(x, 6)), {"x": "*m n"}
    )
    half, total, mean, largest = evaluate(expression, np, [x])
    np.testing.assert_array_equal(half[0], [-1, 0, -3, 2, -5, 4])
    np.testing.assert_array_equal(total, [[3, 3, 3, 12, 12, 12], [21, 21, 21, 30, 30, 30]])
    np.testing.assert_array_equal(mean[1], [6.5, 6.5, 8.5, 8.5, 10.5, 10.5])
    np.testing.assert_array_equal(largest, [[5] * 6, [11] * 6])
