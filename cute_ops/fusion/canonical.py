"""One text for each meaning: operands in an order that no name decides, products and sums of several factors as one.

Programs write ``(x * r) * w`` or ``x * (r * w)``, divide by a length or multiply by its reciprocal, and name operands
as they like. The canonical form flattens products and sums, sorts their terms and the operands by kind and by what is
done with them, and joins constants. Differences of rounding are those of float32.

A sum whose terms cancel loses digits in another order. So what is computed is the form with sums in the program's own
order; meanings are compared by the flat one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from cute_ops.expressions.graph import LEAVES, Expression, Graph, Node
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.recognize import TOLERANCE
from cute_ops.expressions.simplify import SimplifyingGraph
from cute_ops.expressions.text import text_of

_KINDS = ("t", "t?", "2t", "2t?", "r", "r?", "2r", "2r?", "c", "c?", "2c", "s", "s?")
_ROUNDS = 3  # in which operands tell each other apart by what their neighbours are
_HOLE = "#"
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_COMMUTE = frozenset(name for name, primitive in PRIMITIVES.items() if primitive.commutes)


class Canonical(NamedTuple):
    """An expression in its canonical form.

    Attributes:
        expression: with operands and outputs in the canonical order, and sums in their own.
        flat: with sums in the canonical order, too.
        operands: the number that each operand had.
        outputs: the number that each output had.
    """

    expression: Expression
    flat: Expression
    operands: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def text(self) -> str:
        return text_of(self.flat)


@lru_cache(4096)
def canonical(expression: Expression, n: int | str | None = None, exact: bool = False) -> Canonical:
    """The canonical form of an expression.

    Layers of a model repeat the same few expressions, so it is computed once for each.

    Args:
        expression: as a program has it.
        n: the length of its rows, which shows which sums are means.
        exact: products and quotients keep their order and their roundings, too.
    """
    flat = expression if exact else _rewritten(expression, n)
    colours = _Colours(flat)
    used = sorted({node.operand for node in flat.nodes if node.primitive == "operand"})
    operands = tuple(sorted(used, key=lambda i: (_KINDS.index(str(flat.operands[i])), colours.operands[i], i)))
    outputs = tuple(sorted(range(len(flat.outputs)), key=lambda k: (colours.up[flat.outputs[k]], k)))
    place = {number: i for i, number in enumerate(operands)}

    def copied(kept: tuple[str, ...]) -> Expression:
        graph = (Graph if exact else SimplifyingGraph)([flat.operands[i] for i in operands])
        sorting = _Sorting(flat, graph, colours, kept)
        nodes = sorting.copied(lambda node: graph.operand(place[node.operand], node.half))
        return graph.finish([nodes[flat.outputs[k]] for k in outputs])

    own = copied(("add", "multiply") if exact else ("add",))
    sums = (terms for i, terms in colours.terms.items() if flat.nodes[i].primitive == "add")
    return Canonical(own, own if exact or all(len(terms) == 2 for terms in sums) else copied(()), operands, outputs)


def with_holes(expression: Expression) -> tuple[str, tuple[float, ...]]:
    """The text with a hole for each float constant and each size of a group, and what fills the holes.

    Constants of equal value are one node of an expression, so each use is a hole of its own.
    """
    numbers: list[float] = []
    tokens: list[str] = []
    lines: list[str] = []

    def token(i: int) -> str:
        number = expression.nodes[i].number
        if number is None or isinstance(number, bool):
            return tokens[i]
        numbers.append(number)
        return _HOLE

    for node in expression.nodes:
        if node.primitive in LEAVES:
            tokens.append(node.value or node.primitive)
            continue
        # What commutes is sorted by the constant's value no more: it comes last.
        args = list(node.args)
        if PRIMITIVES[node.primitive].commutes:
            args.sort(key=lambda i: expression.nodes[i].primitive == "constant")
        value = [node.value] if node.value and not PRIMITIVES[node.primitive].grouped else []
        numbers_of_group = [float(node.value)] if PRIMITIVES[node.primitive].grouped else []
        lines.append(" ".join([node.primitive, *map(token, args), *value, *[_HOLE] * len(numbers_of_group)]))
        numbers += numbers_of_group
        tokens.append(str(len(expression.operands) + len(lines) - 1))
    operands = ",".join(map(str, expression.operands))
    text = f"({operands}) {'; '.join(lines)} -> {' '.join(token(i) for i in expression.outputs)}"
    return text, tuple(numbers)


def _uses(expression: Expression) -> list[int]:
    uses = [0] * len(expression.nodes)
    for node in expression.nodes:
        for arg in node.args:
            uses[arg] += 1
    for i in expression.outputs:
        uses[i] += 2
    return uses


def _terms(expression: Expression, uses: Sequence[int], i: int) -> Iterator[int]:
    """The factors of a product, or the terms of a sum: through nodes of its primitive that nothing else reads."""
    primitive = expression.nodes[i].primitive
    waiting = list(expression.nodes[i].args)
    while waiting:
        arg = waiting.pop(0)
        if expression.nodes[arg].primitive == primitive and uses[arg] == 1:
            waiting[:0] = expression.nodes[arg].args
        else:
            yield arg


def _rewritten(expression: Expression, n: int | str | None) -> Expression:
    """With flat products, and quotients by constants and by roots as products."""
    graph = SimplifyingGraph(expression.operands)
    uses = _uses(expression)
    made: dict[int, int] = {}

    def quotient(a: int, b: int) -> int:
        number, root = graph.nodes[b].number, graph.arg(b, "sqrt")
        if root is not None:
            return product([a, graph.add("rsqrt", root)])
        if number and math.isfinite(1 / number):
            return product([a, graph.constant(1 / number)])
        return graph.add("divide", a, b)

    def product(factors: list[int]) -> int:
        numbers = [float(graph.nodes[i].number or 0) for i in factors if graph.nodes[i].primitive == "constant"]
        rest = [i for i in factors if graph.nodes[i].primitive != "constant"]
        number = math.prod(numbers)
        if numbers and not (1e-30 < abs(number) < 1e30):
            return _folded(graph, "multiply", factors)
        row = next((i for i in rest if graph.nodes[i].primitive == "sum"), None)
        if row is not None and isinstance(n, int) and math.isclose(number, 1 / n, rel_tol=1e-6):
            rest[rest.index(row)], number = graph.add("mean", graph.nodes[row].args[0]), 1.0
        if math.isclose(number, 1, rel_tol=TOLERANCE):
            number = 1.0
        rest, number = _gated(graph, rest, number)
        whole = _folded(graph, "multiply", rest) if rest else graph.constant(1.0)
        return graph.add("multiply", whole, graph.constant(number)) if number != 1 else whole

    for i, node in enumerate(expression.nodes):
        if node.primitive == "operand":
            made[i] = graph.operand(node.operand, node.half)
        elif node.primitive in ("n", "column"):
            made[i] = graph.leaf(node.primitive)
        elif node.number is not None:
            made[i] = graph.constant(node.number)
        elif node.primitive == "multiply":
            made[i] = product([made[arg] for arg in _terms(expression, uses, i)])
        elif node.primitive == "divide":
            made[i] = quotient(made[node.args[0]], made[node.args[1]])
        elif node.primitive == "relu" and _is_positive(graph, made[node.args[0]]):
            made[i] = made[node.args[0]]
        else:
            made[i] = graph.add(node.primitive, *(made[arg] for arg in node.args), value=node.value)
    return graph.finish([made[i] for i in expression.outputs])


def _is_positive(graph: SimplifyingGraph, i: int) -> bool:
    """Whether a value is never below zero: a variance, as some programs make sure of."""
    node = graph.nodes[i]
    if node.primitive in ("mean", "sum", "max", "min"):
        return _is_positive(graph, node.args[0])
    return node.primitive in ("square", "abs", "exp", "sigmoid", "relu")


def _gated(graph: SimplifyingGraph, factors: list[int], number: float) -> tuple[list[int], float]:
    """Factors of which two are written as an activation, ``x * sigmoid(x)``, with the constant that is left."""
    for gate in factors:
        half = graph.nodes[gate].primitive == "add"
        if graph.nodes[gate].primitive not in ("add", "ndtr", "sigmoid"):
            continue
        for x in factors:
            made = graph.add("multiply", x, gate) if x != gate else x
            if half and x != gate:
                made = graph.add("multiply", made, graph.constant(0.5))
            if graph.nodes[made].primitive in _ACTIVATIONS:
                rest = list(factors)
                rest.remove(gate)
                rest[rest.index(x)] = made
                return rest, number * 2 if half else number
    return factors, number


def _folded(graph: Graph, primitive: str, terms: Sequence[int]) -> int:
    whole = terms[0]
    for term in terms[1:]:
        whole = graph.add(primitive, whole, term)
    return whole


class _Colours:
    """Hashes that tell nodes and operands apart in any order of operands: of what they are computed from and for.

    Constants and sizes do not enter. Attributes: ``up`` of each node, ``operands`` of each operand.
    """

    def __init__(self, expression: Expression) -> None:
        self.uses = _uses(expression)
        nodes = expression.nodes
        kinds = [_hash_of(str(operand)) for operand in expression.operands]
        self.operands = kinds
        self._words = [_hash_of(node.primitive + node.value * (node.primitive == "astype")) for node in nodes]
        self._commutes = [node.primitive in _COMMUTE for node in nodes]
        # By node that reads an operand: the operand's number, and the hash of the half that is read.
        self._read = {
            i: (node.operand, _hash_of(node.half)) for i, node in enumerate(nodes) if node.primitive == "operand"
        }
        flat = (i for i, node in enumerate(nodes) if node.primitive in ("multiply", "add"))
        self.terms = {i: tuple(_terms(expression, self.uses, i)) for i in flat}
        inner = {
            arg
            for i in self.terms
            for arg in nodes[i].args
            if nodes[arg].primitive == nodes[i].primitive and self.uses[arg] == 1
        }
        distinct = len(set(kinds))
        for _ in range(_ROUNDS):
            if distinct == len(kinds):
                break
            self.up = self._upwards(nodes)
            down = self._downwards(expression, inner)
            seen: list[list[int]] = [[] for _ in kinds]
            for i, (operand, half) in self._read.items():
                seen[operand].append(hash((half, *sorted(down[i]))))
            self.operands = [hash((kind, *sorted(uses))) for kind, uses in zip(self.operands, seen, strict=True)]
            if distinct == (distinct := len(set(self.operands))):
                break
        self.up = self._upwards(nodes)

    def _upwards(self, nodes: Sequence[Node]) -> list[int]:
        up: list[int] = []
        for i, node in enumerate(nodes):
            if i in self._read:
                operand, half = self._read[i]
                up.append(hash((self.operands[operand], half)))
            else:
                args = [up[arg] for arg in self.terms.get(i, node.args)]
                if self._commutes[i]:
                    args.sort()
                up.append(hash((self._words[i], *args)))
        return up

    def _downwards(self, expression: Expression, inner: set[int]) -> list[list[int]]:
        nodes, up = expression.nodes, self.up
        down: list[list[int]] = [[] for _ in nodes]
        for i in expression.outputs:
            down[i].append(_OUTPUT)
        for i in reversed(range(len(nodes))):
            if i in inner or not nodes[i].args:
                continue
            below = hash((self._words[i], up[i], *sorted(down[i])))
            for place, arg in enumerate(self.terms.get(i, nodes[i].args)):
                down[arg].append(hash((below, 0 if self._commutes[i] else place)))
        return down


class _Sorting:
    """Copies an expression with the terms of its products and sums in the canonical order.

    Args:
        expression: what is copied.
        graph: gets the copy.
        colours: the order.
        kept: primitives whose terms keep the order in which they are joined; of two terms either may come first.
    """

    def __init__(self, expression: Expression, graph: Graph, colours: _Colours, kept: Container[str]) -> None:
        self.expression, self.graph, self.colours, self.kept = expression, graph, colours, kept

    def copied(self, operand: Callable[[Node], int]) -> dict[int, int]:
        expression, graph = self.expression, self.graph
        made: dict[int, int] = {}
        for i, node in enumerate(expression.nodes):
            if node.primitive == "operand":
                made[i] = operand(node)
            elif node.primitive in ("n", "column"):
                made[i] = graph.leaf(node.primitive)
            elif node.number is not None:
                made[i] = graph.constant(node.number)
            elif i in self.colours.terms:
                terms = sorted(node.args if node.primitive in self.kept else self.colours.terms[i], key=self._place)
                made[i] = _folded(graph, node.primitive, [made[arg] for arg in terms])
            else:
                made[i] = graph.add(node.primitive, *(made[arg] for arg in node.args), value=node.value)
        return made

    def _place(self, i: int) -> tuple[int, int, int]:
        """Tiles and numbers per row first, then row vectors, which are read last; constants at the end."""
        node, kind = self.expression.nodes[i], self.expression.kinds[i]
        rank = 2 if node.primitive == "constant" else 1 if kind.columns and not kind.rows else 0
        return rank, not kind.columns, self.colours.up[i]


@cache
def _hash_of(word: str) -> int:
    """A number for a word. It is the same in every process, as Python's hashes of tuples of numbers are, too."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest(), "big")


_OUTPUT = _hash_of("output")
