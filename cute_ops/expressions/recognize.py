"""Recognize primitives that a function writes out: ``x / (1 + exp(-x))`` is ``silu(x)``.

A primitive's device function takes fewer instructions than the primitives that it stands for, and does not overflow
where they do. Constants must agree to float32's precision, in which values are computed: ``0.7071 * x`` is not
``x / sqrt(2)``, and neither is a constant that was rounded to 16 bits. What a function means must not depend on the
dtype in which its result is stored. ``maximum(x, 0)`` becomes ``relu(x)``, whose derivative at 0 is 0, where that of
``maximum`` is a half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from cute_ops.expressions.graph import Node
from cute_ops.expressions.reference import CUBE, SLOPE

TOLERANCE = 2**-22  # of a product of two constants that were rounded to float32
_GELU_TANH = {1: SLOPE, 3: SLOPE * CUBE}
_GELU_SIGMOID = {power: 2 * c for power, c in _GELU_TANH.items()}
_GELU_ERF = {1: math.sqrt(0.5)}
_TRIES = 40  # nodes that one polynomial may consist of


class _Graph(Protocol):
    """A :class:`cute_ops.expressions.simplify.SimplifyingGraph`, which uses this module."""

    nodes: list[Node]

    def add(self, primitive: str, *args: int, value: str = "") -> int: ...

    def arg(self, i: int, primitive: str) -> int | None: ...


def recognize(g: _Graph, primitive: str, args: tuple[int, ...]) -> int | None:
    """The node that the written-out primitive stands for, None where it stands for itself."""
    if primitive == "multiply":
        gated = next((x for x, gate in (args, args[::-1]) if g.arg(gate, "sigmoid") == x), None)
        return _gated(g, args) if gated is None else g.add("silu", gated)
    if primitive == "maximum":
        return next((g.add("relu", i) for i, j in (args, args[::-1]) if g.nodes[j].value == "0.0"), None)
    if primitive == "divide":
        summed = g.arg(args[0], "sum")
        if summed is not None and g.nodes[args[1]].primitive == "n":
            return g.add("mean", summed)
        exponent = _one_plus_exp(g, args[1])
        return None if exponent is None else g.add("multiply", args[0], _sigmoid(g, exponent))
    if primitive == "reciprocal":
        root, exponent = g.arg(args[0], "sqrt"), _one_plus_exp(g, args[0])
        return _sigmoid(g, exponent) if exponent is not None else None if root is None else g.add("rsqrt", root)
    if primitive in ("log", "log1p"):
        exponent = _one_plus_exp(g, args[0]) if primitive == "log" else g.arg(args[0], "exp")
        return None if exponent is None else g.add("softplus", exponent)
    return None


def _sigmoid(g: _Graph, exponent: int) -> int:
    """``1 / (1 + exp(exponent))``."""
    return g.add("sigmoid", g.add("negative", exponent))


def _plus_one(g: _Graph, i: int) -> int | None:
    """``x`` of ``1 + x``."""
    if g.nodes[i].primitive != "add":
        return None
    return next((x for x, one in (g.nodes[i].args, g.nodes[i].args[::-1]) if g.nodes[one].number == 1), None)


def _one_plus_exp(g: _Graph, i: int) -> int | None:
    """``x`` of ``1 + exp(x)``."""
    power = _plus_one(g, i)
    return None if power is None else g.arg(power, "exp")


def _gated(g: _Graph, args: tuple[int, ...]) -> int | None:
    """``x`` times a function of ``x`` that goes from 0 to 1: silu and both forms of gelu."""
    scale, factors = _scale_and_factors(g, args)
    if len(factors) != 2 or scale not in (0.5, 1):
        return None
    for x, gate in (factors, factors[::-1]):
        if scale == 1 and g.nodes[gate] == Node("ndtr", (x,)):
            return g.add("gelu", x)
        argument = g.arg(gate, "sigmoid")
        if scale == 1 and argument is not None:
            if argument == x:
                return g.add("silu", x)
            if _close(g, argument, x, _GELU_SIGMOID):
                return g.add("gelu_tanh", x)
        bent = _plus_one(g, gate) if scale == 0.5 else None
        if bent is not None:
            for primitive, inside, meant in (("tanh", _GELU_TANH, "gelu_tanh"), ("erf", _GELU_ERF, "gelu")):
                argument = g.arg(bent, primitive)
                if argument is not None and _close(g, argument, x, inside):
                    return g.add(meant, x)
    return None


def _scale_and_factors(g: _Graph, args: tuple[int, ...]) -> tuple[float, list[int]]:
    """The product of the numbers among the factors of a product, one product inside it included, and the others."""
    scale, factors = 1.0, list(args)
    for i in args:
        if g.nodes[i].primitive == "multiply":
            factors.remove(i)
            factors += g.nodes[i].args
    for i in list(factors):
        number = g.nodes[i].number
        if number is not None:
            scale *= number
            factors.remove(i)
    return scale, factors


def _close(g: _Graph, i: int, x: int, wanted: Mapping[int, float]) -> bool:
    """Whether a node is this polynomial of ``x``, up to the rounding of constants."""
    found = _polynomial(g, i, x, [_TRIES])
    return found is not None and found.keys() == wanted.keys() and all(
        math.isclose(found[power], wanted[power], rel_tol=TOLERANCE) for power in wanted
    )  # fmt: skip


def _polynomial(g: _Graph, i: int, x: int, left: list[int]) -> dict[int, float] | None:
    """The coefficients of a node as a polynomial of ``x`` by power, None if it is none; ``left`` bounds the search."""
    left[0] -= 1
    node = g.nodes[i]
    if i == x:
        return {1: 1.0}
    if node.number is not None:
        return {0: float(node.number)}
    if left[0] < 0 or node.primitive not in ("add", "subtract", "multiply", "divide", "square", "negative"):
        return None
    found = [_polynomial(g, arg, x, left) for arg in node.args]
    first, second = found[0], found[-1]
    if first is None or second is None or len(first) * len(second) > 16:
        return None
    return _combined(node.primitive, first, second)


def _combined(primitive: str, first: dict[int, float], second: dict[int, float]) -> dict[int, float] | None:
    """A primitive of two polynomials, the same one if it has one argument; None where that is no polynomial."""
    if primitive in ("add", "subtract"):
        sign = 1 if primitive == "add" else -1
        return {p: first.get(p, 0.0) + sign * second.get(p, 0.0) for p in first.keys() | second.keys()}
    if primitive == "negative":
        return {p: -c for p, c in first.items()}
    if primitive == "divide":
        return {p: c / second[0] for p, c in first.items()} if second.keys() == {0} and second[0] else None
    product: dict[int, float] = {}
    for p, c in first.items():
        for q, d in second.items():
            product[p + q] = product.get(p + q, 0.0) + c * d
    return product
