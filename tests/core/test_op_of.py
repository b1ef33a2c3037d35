"""The op of an expression is the op that a function with this expression has: by fused, and by linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.expressions.text import text_of
from cute_ops.expressions.tracing import trace
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.ops.expression import call
from cute_ops.ops.expression.by_call import ByCall
from cute_ops.ops.expression.call import SHAPES, fits_of, op_of
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Product, op_of_call

TARGET = parse("sm_90a:132")
SIZES = {"*m": (3, 4), "n": (64,), "2n": (128,), "k": (32,), "1": (1,)}


def gelu_residual(xp: Any, x: Any, bias: Any, residual: Any) -> Any:
    return xp.gelu(x + bias) + residual


def normed(xp: Any, x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    y = x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def gated(xp: Any, x: Any, limit: Any) -> Any:
    n = x.shape[-1] // 2
    return xp.minimum(xp.silu(x[..., :n]) * x[..., n:], limit)


# Functions, with the kinds of their operands and attributes.
FUNCTIONS: list[tuple[Callable[..., Any], str, dict[str, Any]]] = [
    (gelu_residual, "trt", {}), (gelu_residual, "tcs", {}), (gelu_residual, "tBrtF", {}), (gelu_residual, "tne", {}),
    (normed, "tr", {}), (normed, "t_", {"eps": 1e-5}), (gated, "2tn", {}), (gated, "2tt", {}),
]  # fmt: skip
# Epilogues, with the shapes of their operands, attributes and the product that they read.
EPILOGUES: list[tuple[Callable[..., Any], tuple[str | None, ...], dict[str, Any], Product]] = [
    (gelu_residual, ("n", "*m n"), {}, Product()), (gelu_residual, ("*m 1", ""), {}, Product("k n", save="none")),
    (gelu_residual, ("n", "*m n"), {}, Product(batched=True)), (normed, ("n",), {}, Product()),
    (normed, (None,), {"eps": 1e-5}, Product("k n")), (gated, ("",), {}, Product("2n k")),
    (gated, ("n",), {}, Product("2 n k", batched=True)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op is known from an earlier test."""
    monkeypatch.setattr(call, "_ops", {})
    # A cache of its own: ops of other tests are registered, and may not be made anew.
    monkeypatch.setattr(by_call, "op_of_traced", cache(by_call.op_of_traced.__wrapped__))


def graph_of(function: Callable[..., Any], shapes: Mapping[str, str | None], attrs: Mapping[str, Any]) -> Any:
    absent = {name: None for name, shape in shapes.items() if shape is None}
    given = {name: (shape or "").removeprefix("any ").removeprefix("float32 ").removeprefix("bfloat16 ") for name, shape
             in shapes.items() if shape is not None}  # fmt: skip
    given = {name: "" if shape == "number" else shape for name, shape in given.items()}
    return trace(lambda xp, *args, **more: function(xp, *args, **more), given, {**absent, **attrs})


def digest(op: Op) -> str:
    """Of the variant that a call runs on an H200."""
    dtypes = {"T": "bfloat16"}
    given = {}
    for name, tensor in op.inputs.items():
        shape = [size for dim in tensor.shape.split() for size in SIZES.get(dim, (2,))]
        dtype = tensor.dtype if tensor.dtype.startswith(("float", "bfloat")) else dtypes.get(tensor.dtype, "float32")
        given[name] = Array(tuple(shape), dtype)
    try:
        return plan(bind(op, given), {}, TARGET).variant.digest
    except ValueError as error:  # no kernel computes an epilogue whose tile depends on reductions
        return str(error)


def same(one: Op, other: Op) -> None:
    """Two declarations are the same: their names, their kernels, and their gradients."""
    assert one is not other
    assert one.name == other.name
    assert one.handed_on == other.handed_on and one.no_gradient == other.no_gradient
    assert [step.name for step in one.steps] == [step.name for step in other.steps]
    for own, like in zip((one, *one.steps), (other, *other.steps), strict=True):
        assert own.inputs == like.inputs and own.outputs == like.outputs
        if not (own.program or any("*b" in tensor.shape for tensor in own.inputs.values())):
            assert digest(own) == digest(like)


@pytest.mark.parametrize(("function", "kinds", "attrs"), FUNCTIONS, ids=lambda each: getattr(each, "__name__", None))
def test_an_expression_has_the_op_that_fused_has(
    function: Callable[..., Any], kinds: str, attrs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = ByCall(function)
    named = dict(zip(fused.operands, [SHAPES[kind] for kind in _split(kinds)], strict=True))
    op = fused.op(kinds, fused.bind([np.ones(1)] * len(fused.operands), attrs)[1])
    monkeypatch.setattr(call, "_ops", {})
    graph = graph_of(function, named, attrs)
    found = op_of(graph, named, name=function.__name__)
    same(op, found)
    assert op_of(text_of(graph), named, name=function.__name__) is found


def _split(kinds: str) -> list[str]:
    found = []
    while kinds:
        kind = max((kind for kind in SHAPES if kinds.startswith(kind)), key=len)
        found.append(kind)
        kinds = kinds[len(kind) :]
    return found


@pytest.mark.parametrize(("function", "shapes", "attrs", "product"), EPILOGUES)
def test_an_expression_has_the_op_that_linear_has(
    function: Callable[..., Any], shapes: tuple[str | None, ...], attrs: dict[str, Any], product: Product
) -> None:
    op = op_of_call(function, shapes, product.batched, product.layout, product.save, tuple(attrs.items()))
    by_call.op_of_traced.cache_clear()
    acc, *names = list(ByCall(function).operands)[: 1 + len(shapes)]
    named = dict(zip(names, shapes, strict=True))
    graph = graph_of(function, {acc: "*m 2n" if "2" in product.layout else "*m n", **named}, attrs)
    found = op_of(graph, named, product, name=function.__name__)
    same(op, found)
    assert op_of(text_of(graph), named, product, name=function.__name__).name == found.name


def test_arrays_are_fitted_as_a_call_fits_them() -> None:
    graph = trace(gelu_residual, {"x": "*m n", "bias": "n", "residual": "*m n"})
    bias, residual = Array((8,), "float32"), Array((1, 4, 8), "float16")
    arrays = {"x": Array((3, 4, 8), "bfloat16"), "bias": bias, "residual": residual}
    given = [np.zeros(a.shape, np.float32) for a in arrays.values()]
    _, fits = ByCall(gelu_residual).choose(given, (), np.ndarray)
    assert tuple(fits_of(graph, arrays).values()) == fits
    op = op_of(graph, arrays, name="gelu_residual")
    assert op.name == ByCall(gelu_residual).op("tre").name
    x, weight = Array((3, 4, 16), "bfloat16"), Array((8, 16), "bfloat16")
    rest = {"bias": bias, "residual": residual}
    behind = op_of(graph, rest, Product.of(x, weight), name="gelu_residual")
    assert behind is op_of_call(gelu_residual, ("n", "*m n"))
    fits_behind = fits_of(graph, rest, Product.of(x, weight))
    assert [fit and fit.sizes for fit in fits_behind.values()] == [(8,), (3, 4, 8)]


WRONG: dict[str, Callable[[], Any]] = {
    "'e2(t) -> 0' is no expression": lambda: op_of("e2(t) -> 0", {"x": "*m n"}),
    "cute.expression: 1 operands were given for the 2 of the expression": (
        lambda: op_of("e1(t,r) add 0 1 -> 2", {"x": Array((2, 4), "float32")})
    ),
    "cute.shift: argument `bias` has shape [3], which does not broadcast": (
        lambda: op_of(
            "e1(t,r) add 0 1 -> 2", {"x": Array((2, 4), "float32"), "bias": Array((3,), "float32")}, name="shift"
        )
    ),
    "cute.linear: argument `bias` has shape [3], which does not broadcast to [2, 4].": (
        lambda: op_of(
            "e1(t,r) add 0 1 -> 2", {"bias": Array((3,), "float32")},
            Product.of(Array((2, 8), "float32"), Array((4, 8), "float32")),
        )
    ),
    "cute.linear: argument `weight` has 1 dims, expected 2 or more.": (
        lambda: Product.of(Array((2, 8), "float32"), Array((8,), "float32"))
    ),
    "operands are arrays, which meet the product of a call: use Product.of": (
        lambda: op_of("e1(t,r) add 0 1 -> 2", {"bias": Array((3,), "float32")}, Product())
    ),
    "cute.expression: the expression takes (t,r), and the operands are (t,t).": (
        lambda: op_of("e1(t,r) add 0 1 -> 2", {"x": "*m n", "y": "*m n"})
    ),
    "cute.expression: operand `y` has the shape '*m k', which none has.": (
        lambda: op_of("e1(t) exp 0 -> 1", {"y": "*m k"})
    ),
    "its text takes (t,r), and its operands are (t,t)": (
        lambda: op_of("e1(t,r) add 0 1 -> 2", {"y": "*m n"}, Product())
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_an_expression_cannot_have_says_why(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        WRONG[text]()
    assert text in str(caught.value)
