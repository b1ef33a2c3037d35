"""Find values that are 0 whatever the operands hold.

The gradient that reaches the maximum in ``exp(x - max(x)) / sum(exp(x - max(x)))`` is one: a softmax does not change
with what is subtracted. This shows once sums are taken term by term, ``sum(e * (d / s - t)) = sum(e * d) / s - t * s``
with ``s = sum(e)``. Nothing is computed in this form, in which large terms cancel.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from cute_ops.expressions.graph import Graph

# A product of powers of atoms, sorted: nodes by index, -1 for a row's length, and sums over columns of such products.
Product = tuple[tuple[Any, int], ...]
# A sum of products with their factors, none of which is 0.
Polynomial = dict[Product, Fraction]
LENGTH, ONE = -1, ()
TAKEN_APART = ("add", "subtract", "negative", "multiply", "square", "divide", "reciprocal", "sum", "mean")
# Larger sums are not taken apart, nor those with longer factors.
MOST_PRODUCTS, MOST_BITS = 32, 4096


class Polynomials:
    """Nodes of a graph as sums of products, made as they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._found: dict[int, Polynomial] = {}

    def vanishes(self, i: int) -> bool:
        """Whether a node is 0 where all values are finite."""
        return not self.of(i)

    def sum_vanishes(self, i: int) -> bool:
        """Whether a node has columns, and the sum over them is 0 where all values are finite."""
        return self._columns(i) and not self._summed(self.of(i))

    def of(self, i: int) -> Polynomial:
        """A node as a sum of products, an empty one if it is 0."""
        if i not in self._found:
            found = self._made(i)
            self._found[i] = {((i, 1),): Fraction(1)} if found is None or _large(found) else found
        return self._found[i]

    def _made(self, i: int) -> Polynomial | None:
        """None where a node is an atom."""
        node = self.graph.nodes[i]
        if node.primitive == "n":
            return {((LENGTH, 1),): Fraction(1)}
        if node.primitive == "constant" and node.value not in ("true", "false"):
            value = float(node.value)
            return _without_zeros({ONE: Fraction(value)}) if math.isfinite(value) else None
        if node.primitive not in TAKEN_APART:
            return None
        a, b = self.of(node.args[0]), self.of(node.args[-1])
        match node.primitive:
            case "add":
                return _added(a, b)
            case "subtract":
                return _added(a, _times(b, {ONE: Fraction(-1)}))
            case "negative":
                return _times(a, {ONE: Fraction(-1)})
            case "multiply" | "square":
                return _times(a, b)
            case "sum":
                return self._summed(a)
            case "mean":
                return _times(self._summed(a), {((LENGTH, -1),): Fraction(1)})
        inverse = _inverse(b)
        return None if inverse is None else _times(a if node.primitive == "divide" else {ONE: Fraction(1)}, inverse)

    def _summed(self, polynomial: Polynomial) -> Polynomial:
        """The sum over the columns, term by term."""
        found: Polynomial = {}
        for product, factor in polynomial.items():
            inner = tuple((atom, power) for atom, power in product if self._columns(atom))
            outer = tuple(each for each in product if each not in inner)
            total = (inner, 1) if inner else (LENGTH, 1)
            found = _added(found, {_multiplied(outer, (total,)): factor})
        return found

    def _columns(self, atom: Any) -> bool:
        return isinstance(atom, int) and atom != LENGTH and self.graph.kinds[atom].columns


def _large(polynomial: Polynomial) -> bool:
    bits = [max(factor.numerator.bit_length(), factor.denominator.bit_length()) for factor in polynomial.values()]
    return len(bits) > MOST_PRODUCTS or max(bits, default=0) > MOST_BITS


def _added(a: Polynomial, b: Polynomial) -> Polynomial:
    return _without_zeros({product: a.get(product, Fraction(0)) + b.get(product, Fraction(0)) for product in a | b})


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            product = _multiplied(left, right)
            found[product] = found.get(product, Fraction(0)) + x * y
    return _without_zeros(found)


def _inverse(polynomial: Polynomial) -> Polynomial | None:
    """The inverse of a single product, None of a sum of several."""
    if len(polynomial) != 1:
        return None
    ((product, factor),) = polynomial.items()
    return {tuple((atom, -power) for atom, power in product): 1 / factor}


def _multiplied(left: Product, right: Product) -> Product:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    return tuple(sorted(((atom, power) for atom, power in powers.items() if power), key=repr))


def _without_zeros(polynomial: Polynomial) -> Polynomial:
    return {product: factor for product, factor in polynomial.items() if factor}
