"""Reverse derivatives: from an expression, the expression of its operands' gradients.

The derivative's operands are what it reads: operands of the expression, the outputs' cotangents and, where asked for,
outputs that were saved. Forward values are recomputed. A gradient is a sum of addends of the cotangents'
shape. Each addend says over which dims it is still to be summed: a row vector's over the rows, a column vector's over
the columns, a scalar's over both.

Where a function has no derivative, the choice is that of ``torch.autograd``: 0 at 0 of ``relu``, ``abs`` and ``sign``;
half to each of two equal arguments of ``minimum`` and ``maximum``, which is JAX's choice too, and all to both beside a
NaN; equal shares to the equal largest or smallest elements of a row, as ``torch.amax`` and ``jax.numpy.max``, and NaN
to all of a row that holds one; one inside and on the bounds of ``clip``. ``astype`` hands its cotangent on unrounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cute_ops.expressions.graph import Expression, Node, Operand, copied, rebuilt
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.reference import CUBE, SLOPE
from cute_ops.expressions.symbols import Symbol, Tracing
from cute_ops.expressions.tracing import Namespace
from cute_ops.expressions.vanishing import Polynomials

MOST_ADDENDS = 32  # larger sums are not taken apart further
# A sum, a difference or a product that was rounded is that of operands of which one was rounded once more.
ROUNDED_AS_OPERANDS = ("add", "subtract", "multiply")
# What a small change of an argument changes by more than a little.
JUMPING = ("equal", "less", "less_equal", "sign", "floor", "round", "astype")


class Source(NamedTuple):
    """The source of a derivative's operand: the ``operand``, ``cotangent`` or ``output`` at this position."""

    role: str
    position: int


class Addend(NamedTuple):
    """One output of a derivative: an addend of an operand's gradient.

    Attributes:
        operand: the operand, by index.
        half: of a packed operand, the half that this is the gradient of: ``[:n]`` or ``[n:]``.
        rows, columns: it is to be summed over the rows, over the columns. Dims that the operand has and the output has
            not are broadcast.
    """

    operand: int
    half: str
    rows: bool
    columns: bool


class Derivative(NamedTuple):
    """Gradients of operands.

    Attributes:
        expression: reads ``sources``, computes ``addends``, in order.
        sources: what its operands are.
        addends: what its outputs are, or the first of them. Every wanted operand, or each of its halves, has at least
            one.
    """

    expression: Expression
    sources: tuple[Source, ...]
    addends: tuple[Addend, ...]


def differentiate(
    expression: Expression, wanted: Sequence[int] | None = None, saved: Sequence[int] = (), *,
    sum_columns: bool = False, again: bool = False,
) -> Derivative:  # fmt: skip
    """The gradients of operands.

    Args:
        expression: what is differentiated.
        wanted: operands, by index; all that are not of bools where it is not given.
        saved: outputs that may be read. They are read where less is then read or computed, as for ``tanh``.
        sum_columns: whether the expression sums over columns itself; then no addend is left to be summed over them.
        again: whether it computes the expression's outputs, too, after the addends.

    Raises:
        ValueError: an operand of bools is wanted, or the derivative is too large.
    """
    kinds = [operand.kind for operand in expression.operands]
    if wanted is None:
        wanted = [i for i, kind in enumerate(kinds) if kind.dtype != "bool"]
    if bools := [i for i in wanted if kinds[i].dtype == "bool"]:
        raise ValueError(f"operand {bools[0]} of an expression holds bools, which have no gradient")
    choices = (tuple(saved), ()) if saved else ((),)
    found = [_derivative(expression, tuple(wanted), given, sum_columns, again) for given in choices]
    return min(found, key=_price)


def worth_saving(expression: Expression, wanted: Sequence[int], *, sum_columns: bool = False) -> tuple[int, ...]:
    """The outputs with which a derivative reads fewer tiles, by index: of ``(norm(x + y), x + y)`` the second, which
    takes the place of x and y. None can be left out of them.

    An output was rounded to its dtype, and the derivative is the one at what it was rounded to. So only sums,
    differences and products are taken, and none from which the derivative computes something that jumps, such as
    whether it exceeds a bound.
    """

    def made(saved: Sequence[int]) -> Derivative:
        return _derivative(expression, tuple(wanted), tuple(saved), sum_columns, False)

    def tiles(saved: Sequence[int]) -> int:
        return _price(made(saved))[0]

    primitives = [expression.nodes[i].primitive for i in expression.outputs]
    kept = [i for i, primitive in enumerate(primitives) if primitive in ROUNDED_AS_OPERANDS and not _jumps(made((i,)))]
    for i in tuple(kept):
        others = [j for j in kept if j != i]
        if tiles(others) <= tiles(kept):
            kept = others
    return tuple(kept) if kept and tiles(kept) < tiles(()) else ()


def _jumps(derivative: Derivative) -> bool:
    """Whether a primitive that jumps has an argument that follows from an output."""
    following: set[int] = set()
    for i, node in enumerate(derivative.expression.nodes):
        is_output = node.primitive == "operand" and derivative.sources[node.operand].role == "output"
        if is_output or following.intersection(node.args):
            following.add(i)
            if node.primitive in JUMPING:
                return True
    return False


def _price(derivative: Derivative) -> tuple[int, ...]:
    """The cost of a derivative, by which two are compared: tiles that it reads, then instructions per element."""
    operands = derivative.expression.operands
    return sum(1 + o.packed for o in operands if o.kind.rows and o.kind.columns), *derivative.expression.cost


# Kept: of a declaration what is worth saving, handed on and computed is asked one after the other.
@lru_cache(maxsize=64)
def _derivative(
    expression: Expression, wanted: tuple[int, ...], saved: tuple[int, ...], sum_columns: bool, again: bool
) -> Derivative:
    count, kinds = len(expression.operands), expression.output_kinds
    sources = [Source("operand", i) for i in range(count)]
    sources += [Source(role, i) for role in ("cotangent", "output") for i in range(len(kinds))]
    operands = expression.operands + tuple(Operand(kind) for kind in (*kinds, *kinds))
    names = [f"{source.role} {source.position}" for source in sources]
    graph = Tracing("a derivative", dict(zip(names, operands, strict=True)))
    outputs = {expression.outputs[i]: graph.operand(count + len(kinds) + i) for i in saved}
    forward = copied(expression, graph, instead=outputs)
    backward = _Backward(expression, graph, forward)
    for i, (output, kind) in enumerate(zip(expression.outputs, kinds, strict=True)):
        if kind.dtype != "bool":
            backward.hand(output, _Excess(False, False), Symbol(graph, graph.operand(count + i)))
    backward.run()
    addends, results = [], []
    for i in wanted:
        for half in expression.operands[i].halves:
            for excess, gradient in backward.of_operand(i, half, sum_columns):
                addends.append(Addend(i, half, *excess))
                results.append(gradient)
    if again:
        results += [forward[i] for i in expression.outputs]
    return _without_unread(graph.finish(results), sources, tuple(addends))


def _without_unread(expression: Expression, sources: Sequence[Source], addends: tuple[Addend, ...]) -> Derivative:
    """Drop operands that are not read; if the length of a row is read, one with columns is kept."""
    read = {node.operand for node in expression.nodes if node.primitive == "operand"}
    if any(node.primitive in ("n", "column") for node in expression.nodes) and not any(
        expression.operands[i].kind.columns for i in read
    ):
        read.add(next(i for i, operand in enumerate(expression.operands) if operand.kind.columns))
    kept = sorted(read)
    return Derivative(rebuilt(expression, kept=kept), tuple(sources[i] for i in kept), addends)


class _Excess(NamedTuple):
    """Dims over which a value's cotangent is still to be summed, because the value was broadcast along them."""

    rows: bool
    columns: bool


class _Backward:
    """Cotangents of an expression's nodes.

    A node has a cotangent for each set of dims that one is still to be summed over: sums over rows are not taken here,
    and sums over columns only where they must be. Rules are linear, so each cotangent is handed on by itself.
    """

    def __init__(self, expression: Expression, graph: Tracing, forward: Sequence[int]) -> None:
        self.expression, self.graph, self.forward = expression, graph, forward
        self.cotangents: list[dict[_Excess, Symbol]] = [{} for _ in expression.nodes]
        self.polynomials = Polynomials(graph)

    def hand(self, i: int, excess: _Excess, cotangent: Symbol) -> None:
        before = self.cotangents[i].get(excess)
        self.cotangents[i][excess] = cotangent if before is None else before + cotangent

    def run(self) -> None:
        """From the outputs to the operands."""
        for i in reversed(range(len(self.expression.nodes))):
            node = self.expression.nodes[i]
            if node.primitive in PRIMITIVES:
                if PRIMITIVES[node.primitive].reduces:
                    self._row(i, node)
                else:
                    for excess, cotangent in self.cotangents[i].items():
                        self._primitive(i, node, excess, cotangent)

    def of_operand(self, index: int, half: str, sum_columns: bool) -> Iterable[tuple[_Excess, int]]:
        """Addends of an operand's gradient."""
        nodes = self.expression.nodes
        found = next((i for i, node in enumerate(nodes) if node == Node("operand", (), f"{index}{half}")), None)
        if found is None or not self.cotangents[found]:
            return [(_Excess(False, False), self.graph.constant(0.0))]
        addends: dict[_Excess, Symbol] = {}
        for excess, cotangent in self.cotangents[found].items():
            if excess.columns and (sum_columns or not self._columns(cotangent._id)):
                excess, cotangent = _Excess(excess.rows, False), self._summed(cotangent)
            addends[excess] = addends[excess] + cotangent if excess in addends else cotangent
        return [(excess, addends[excess]._id) for excess in sorted(addends)]

    def _primitive(self, i: int, node: Node, excess: _Excess, cotangent: Symbol) -> None:
        y, *args = (Symbol(self.graph, self.forward[j]) for j in (i, *node.args))
        kinds = self.expression.kinds
        sizes = [int(node.value)] if PRIMITIVES[node.primitive].grouped else []
        gradients = DERIVATIVE[node.primitive](Namespace(self.graph), cotangent, y, *args, *sizes)
        for j, gradient in zip(node.args, gradients, strict=True):
            if gradient is not None:
                rows = (kinds[i].rows or excess.rows) and not kinds[j].rows
                columns = (kinds[i].columns or excess.columns) and not kinds[j].columns
                self.hand(j, _Excess(rows, columns), gradient)

    def _row(self, i: int, node: Node) -> None:
        """Hand on the cotangents of a reduction. They are summed over columns first, since its result has none. One
        that is 0 whatever the operands hold is dropped.
        """
        found: dict[bool, Symbol] = {}
        for excess, cotangent in self.cotangents[i].items():
            total = self._summed(cotangent) if excess.columns else cotangent
            found[excess.rows] = found[excess.rows] + total if excess.rows in found else total
        y, x = Symbol(self.graph, self.forward[i]), Symbol(self.graph, self.forward[node.args[0]])
        for rows, cotangent in found.items():
            if not self.polynomials.vanishes(cotangent._id):
                (gradient,) = DERIVATIVE[node.primitive](Namespace(self.graph), cotangent, y, x)
                self.hand(node.args[0], _Excess(rows, False), gradient)

    def _summed(self, cotangent: Symbol) -> Symbol:
        """The sum over the columns. Factors without columns are multiplied afterwards, so that no sum waits for
        another: ``sum(dout * e / s) = sum(dout * e) / s``. Addends whose sum is 0 whatever the operands hold are
        dropped, as that of ``x - mean(x)``.
        """
        cotangent = self._without_vanishing(cotangent)
        if not self._columns(cotangent._id):
            return cotangent * Symbol(self.graph, self.graph.leaf("n"))
        inner, factors = self._apart(cotangent._id)
        total = self.graph.add("sum", inner)
        for primitive, *factor in factors:
            total = self.graph.add(primitive, total, *factor)
        return Symbol(self.graph, total)

    def _without_vanishing(self, cotangent: Symbol) -> Symbol:
        """The addends whose sum over the columns is not known to be 0; all addends if none is left."""
        kept = dropped = None
        for negative, i in self._addends(cotangent._id):
            addend = Symbol(self.graph, i)
            if self.polynomials.sum_vanishes(i):
                dropped = addend
            elif kept is None:
                kept = -addend if negative else addend
            else:
                kept = kept - addend if negative else kept + addend
        return cotangent if dropped is None or kept is None else kept

    def _addends(self, i: int) -> list[tuple[bool, int]]:
        """The addends of a value, each with whether it is subtracted."""
        found: list[tuple[bool, int]] = []
        waiting = [(False, i)]
        while waiting:
            negative, j = waiting.pop()
            node = self.graph.nodes[j]
            if node.primitive not in ("add", "subtract", "negative") or len(found) + len(waiting) >= MOST_ADDENDS:
                found.append((negative, j))
                continue
            waiting.append((negative ^ (node.primitive != "add"), node.args[-1]))
            waiting += [(negative, arg) for arg in node.args[:-1]]
        return found

    def _apart(self, i: int) -> tuple[int, list[tuple[Any, ...]]]:
        """A value with columns, taken apart: the product of its factors with columns, and what its sum is multiplied
        with or divided by: primitives and their second arguments, which have no columns.
        """
        node = self.graph.nodes[i]
        if node.primitive == "negative":
            inner, factors = self._apart(node.args[0])
            return inner, [*factors, ("negative",)]
        if node.primitive not in ("multiply", "divide"):
            return i, []
        a, b = node.args
        if node.primitive == "multiply" and not self._columns(a):
            a, b = b, a
        inner, factors = self._apart(a) if self._columns(a) else (a, [])
        if not self._columns(b):
            return inner, [*factors, (node.primitive, b)]
        if node.primitive == "divide":
            return self.graph.add("divide", inner, b), factors
        other, more = self._apart(b)
        return self.graph.add("multiply", inner, other), factors + more

    def _columns(self, i: int) -> bool:
        return self.graph.kinds[i].columns


def _clip(xp: Any, d: Any, y: Any, x: Any, low: Any, high: Any) -> tuple[Any, ...]:
    inside, under, over = (low <= x) & (x <= high), (x < low) & (low < high), (x > high) | (high < low)
    return xp.where(inside, d, 0.0), xp.where(under, d, 0.0), xp.where(over, d, 0.0)


def _extreme(xp: Any, d: Any, equal: Any, not_first: Any, not_second: Any) -> tuple[Any, ...]:
    """The rule of minimum and maximum: an argument that is surely not the result gets 0, equal ones half each, both all
    of the cotangent beside a NaN.
    """
    half = 0.5 * d
    return xp.where(equal, half, xp.where(not_first, 0.0, d)), xp.where(equal, half, xp.where(not_second, 0.0, d))


def _shared(xp: Any, equal: Any, share: Any) -> Any:
    """``share`` for elements that equal the extreme one; 0 for others, or NaN where a NaN makes none equal to it."""
    return xp.where(equal, share, share * 0.0)


def _gelu_tanh(xp: Any, d: Any, y: Any, x: Any) -> tuple[Any, ...]:
    square = x**2
    # Written like the sigmoid in the primitive's kernel, so that both are computed once.
    s = xp.sigmoid(x * (square * (2 * SLOPE * CUBE) + 2 * SLOPE))
    # For larger squares s is 0 or 1, and what it multiplies must not overflow.
    slope = xp.minimum(square, 256.0) * (6 * SLOPE * CUBE) + 2 * SLOPE
    return (d * (s + s * (1 - s) * x * slope),)


def _silu(xp: Any, d: Any, y: Any, x: Any) -> tuple[Any, ...]:
    s = xp.sigmoid(x)
    return (d * s * (1 + x * (1 - s)),)


def _group_max(xp: Any, d: Any, y: Any, x: Any, size: int) -> tuple[Any, ...]:
    ties = xp.group_sum(xp.where(x == y, 1.0, 0.0), size)
    return (_shared(xp, x == y, xp.group_sum(_in_columns(xp, d, x), size) / ties),)


def _in_columns(xp: Any, d: Any, x: Any) -> Any:
    """A cotangent, broadcast to the columns of x."""
    return xp.where(xp.arange(x.shape[-1]) >= 0, d, 0.0) if isinstance(d.shape[-1], int) else d


def _density(xp: Any, x: Any) -> Any:
    """The density of the normal distribution. Its exponential is the one in the kernel of ``ndtr``, computed once."""
    return xp.exp2(x**2 * (-0.5 * math.log2(math.e))) * (1 / math.sqrt(2 * math.pi))


def _extreme_of_row(xp: Any, d: Any, y: Any, x: Any) -> tuple[Any, ...]:
    ties = xp.sum(xp.where(x == y, 1.0, 0.0), axis=-1, keepdims=True)
    return (_shared(xp, x == y, d / ties),)


# Primitives whose derivative is 0.
_FLAT = (
    "sign", "floor", "round", "stop_gradient", "equal", "less", "less_equal", "logical_and", "logical_or",
    "logical_not",
)  # fmt: skip
# From a namespace, the cotangent, the primitive's result and its arguments to the arguments' cotangents, not yet summed
# over what was broadcast; None where there is none. A reduction's cotangent has no columns.
DERIVATIVE: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(_FLAT, lambda xp, d, y, *args: (None,) * len(args)),
    "add": lambda xp, d, y, a, b: (d, d),
    "subtract": lambda xp, d, y, a, b: (d, -d),
    "multiply": lambda xp, d, y, a, b: (d * b, d * a),
    "divide": lambda xp, d, y, a, b: (d / b, -(d / b * y)),
    "negative": lambda xp, d, y, x: (-d,),
    "reciprocal": lambda xp, d, y, x: (-d * y**2,),
    "square": lambda xp, d, y, x: (2 * d * x,),
    "sqrt": lambda xp, d, y, x: (0.5 * d / y,),
    "rsqrt": lambda xp, d, y, x: (-0.5 * d * y**3,),
    "abs": lambda xp, d, y, x: (d * xp.sign(x),),
    "sin": lambda xp, d, y, x: (d * xp.cos(x),),
    "cos": lambda xp, d, y, x: (-d * xp.sin(x),),
    "exp": lambda xp, d, y, x: (d * y,),
    "exp2": lambda xp, d, y, x: (d * y * math.log(2),),
    "log": lambda xp, d, y, x: (d / x,),
    "log1p": lambda xp, d, y, x: (d / (1 + x),),
    "log2": lambda xp, d, y, x: (d / x * (1 / math.log(2)),),
    "tanh": lambda xp, d, y, x: (d * (1 - y**2),),
    "sigmoid": lambda xp, d, y, x: (d * y * (1 - y),),
    "softplus": lambda xp, d, y, x: (d * xp.sigmoid(x),),
    "erf": lambda xp, d, y, x: (d * (2 / math.sqrt(math.pi)) * xp.exp(-(x**2)),),
    "ndtr": lambda xp, d, y, x: (d * _density(xp, x),),
    "relu": lambda xp, d, y, x: (xp.where(y <= 0, 0.0, d),),
    "silu": _silu,
    "gelu": lambda xp, d, y, x: (d * (xp.ndtr(x) + x * _density(xp, x)),),
    "gelu_tanh": _gelu_tanh,
    "minimum": lambda xp, d, y, a, b: _extreme(xp, d, a == b, b < a, a < b),
    "maximum": lambda xp, d, y, a, b: _extreme(xp, d, a == b, a < b, b < a),
    "clip": _clip,
    "where": lambda xp, d, y, c, a, b: (None, xp.where(c, d, 0.0), xp.where(c, 0.0, d)),
    "astype": lambda xp, d, y, x: (d,),
    "rotate_half": lambda xp, d, y, x, size: (-xp.rotate_half(_in_columns(xp, d, x), size),),
    "group_sum": lambda xp, d, y, x, size: (xp.group_sum(_in_columns(xp, d, x), size),),
    "group_max": _group_max,
    "sum": lambda xp, d, y, x: (d,),
    "mean": lambda xp, d, y, x: (d / x.shape[-1],),
    "max": _extreme_of_row,
    "min": _extreme_of_row,
}
