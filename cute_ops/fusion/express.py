"""A region as an expression: what it computes, of which operands, and how each operand lies among the rows.

The values of an expression are ``[*rows, n]``. Going from the roots to the operands, each dim of a node is labelled by
the dim of the values that it is: a number for a dim of rows, ``COLUMNS`` for the last one, ``LOW`` or ``HIGH`` if that
is a half of the node's, ``ONE`` where the node is broadcast. So squeezes, broadcasts and kept dims, which programs
write in many ways, leave no trace in the expression.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from cute_ops.expressions.graph import MOST_OPERANDS, Expression, Kind, Operand
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.simplify import SimplifyingGraph
from cute_ops.fusion.graph import FLOATS, NARROW, Node, Shape
from cute_ops.fusion.region import VIEWS, Facts, Region, without_ones

COLUMNS, ONE, LOW, HIGH = -1, -2, -3, -4
_HALVES = {LOW: "[:n]", HIGH: "[n:]"}
Labels = tuple[int, ...]
# Primitives that look at single bits: what they read keeps the dtype's rounding.
_SHARP = ("less", "less_equal", "equal", "floor", "round", "sign")
# Primitives whose result is their argument, or its opposite, and so needs no rounding.
_SELECTS = ("max", "min", "abs", "negative", "relu")


class Cut(Exception):
    """A node cannot be part of an expression; says why."""


class Leaf(NamedTuple):
    """An operand of an expression.

    Attributes:
        node: the array.
        rows: the leading dims that its labels number.
        labels: of each of its dims.
        packed: whether it is read by halves.
    """

    node: Node
    rows: Shape
    labels: Labels
    packed: bool = False

    @property
    def operand(self) -> Operand:
        rows = any(label >= 0 for label in self.labels)
        return Operand(Kind(rows, COLUMNS in self.labels), self.packed)


class Expressed(NamedTuple):
    """The expression that a region computes.

    Attributes:
        expression: not in its canonical form.
        leaves: its operands.
        roots: the nodes that are its outputs.
        rows: the leading dims of its values.
        n: their last dim; None if no value has columns.
    """

    expression: Expression
    leaves: tuple[Leaf, ...]
    roots: tuple[Node, ...]
    rows: Shape
    n: int | str | None


def express(
    region: Region, plain: Container[Node], facts: Facts, exact: bool = False
) -> tuple[list[Expressed], dict[Node, str]]:
    """The expressions of a region, one for each shape of rows, and for roots that none gives the reason.

    Args:
        region: what is to be computed.
        plain: views and casts that it looks through.
        facts: of the graph.
        exact: every narrow result is rounded as in the program; else only outputs are, and what comparisons read.
    """
    found: list[Expressed] = []
    failed: dict[Node, str] = {}
    waiting = sorted(region.roots, key=lambda root: (-len(without_ones(root.shape)), root.index))
    inside = set(region.nodes)
    while waiting:
        first = waiting[0]
        try:
            made = _Expressing(inside, plain, facts, first, exact)
            taken = [root for root in waiting if root is first or made.takes(root)]
            found.append(made.finish(sorted(taken, key=lambda root: root.index)))
        except (Cut, ValueError) as error:  # a ValueError: the expression would be too large
            failed[first] = str(error)
            taken = [first]
        waiting = [root for root in waiting if root not in taken]
    return found, failed


class _Expressing:
    """The expression of roots over the same rows as the first of them."""

    def __init__(self, inside: set[Node], plain: Container[Node], facts: Facts, first: Node, exact: bool) -> None:
        self.inside, self.plain, self.facts, self.exact = inside, plain, facts, exact
        rowlike = first in facts.rowlike
        self.rows = first.shape if rowlike else first.shape[:-1]
        self.n = None if rowlike or not first.shape or first.shape[-1] == 1 else first.shape[-1]
        self.graph = SimplifyingGraph([])
        self.leaves: dict[Leaf, int] = {}
        self.values: dict[tuple[Node, Shape, Labels], int] = {}
        self.root_values: dict[Node, int] = {first: self.value(first, self.rows, self._whole(first))}

    def _whole(self, root: Node) -> Labels:
        """The labels of a root, which has all rows."""
        lead = root.shape if root in self.facts.rowlike else root.shape[:-1]
        labels = tuple(i if size != 1 else ONE for i, size in enumerate(lead))
        if root in self.facts.rowlike or not root.shape:
            return labels
        return (*labels, COLUMNS if root.shape[-1] != 1 else ONE)

    def takes(self, root: Node) -> bool:
        """Whether another root is over the same rows; then it becomes an output."""
        lead = root.shape if root in self.facts.rowlike else root.shape[:-1]
        last = 1 if root in self.facts.rowlike else root.shape[-1] if root.shape else 1
        if lead != self.rows or last not in (1, self.n):
            return False
        try:
            self.root_values[root] = self.value(root, self.rows, self._whole(root))
        except Cut:
            return False
        return True

    def finish(self, roots: list[Node]) -> Expressed:
        if not any(leaf.operand.kind.rows for leaf in self.leaves):
            raise Cut("no operand has rows")
        outputs: dict[tuple[int, str], Node] = {}
        for root in roots:
            made = _as_number(self.graph, self.root_values[root])
            # What is an operand, or another root, the program has already.
            if self.graph.nodes[made].primitive not in ("operand", "constant"):
                outputs.setdefault((made, root.dtype), root)
        if not outputs:
            raise Cut("it computes nothing")
        expression = self.graph.finish([made for made, _ in outputs])
        roots = list(outputs.values())
        return Expressed(expression, tuple(self.leaves), tuple(roots), self.rows, self.n)

    def value(self, node: Node, rows: Shape, labels: Labels) -> int:
        """The expression's node of a value. An explicit stack: programs are deeper than Python's own."""
        stack = [(node, rows, labels)]
        while stack:
            key = stack[-1]
            if key in self.values:
                stack.pop()
                continue
            wanted = self._needs(*key)
            missing = [each for each in wanted if each not in self.values]
            if missing:
                stack += missing
                continue
            self.values[key] = self._make(*key, [self.values[each] for each in wanted])
            stack.pop()
        return self.values[node, rows, labels]

    def _is_leaf(self, node: Node) -> bool:
        return node not in self.inside and node not in self.plain

    def _needs(self, node: Node, rows: Shape, labels: Labels) -> list[tuple[Node, Shape, Labels]]:
        """The inputs of a value, with labels."""
        if node.op == "constant" or self._is_leaf(node):
            return []
        if node.op in ("primitive", "cast"):
            return [(arg, rows, _aligned(arg, node, labels)) for arg in node.args]
        x = node.args[0]
        if node.op == "reduce":
            return [self._reduced(node, rows, labels)]
        if node.op == "broadcast":
            sizes = zip(node.attr, x.shape, strict=True)
            return [(x, rows, tuple(labels[i] if size != 1 else ONE for i, size in sizes))]
        if node.op == "slice":
            if labels[-1] != COLUMNS:
                raise Cut("half of what has no columns")
            return [(x, rows, (*labels[:-1], LOW if node.attr[1] == 0 else HIGH))]
        if without_ones(x.shape) == without_ones(node.shape):
            remaining = iter([label for label, size in zip(labels, node.shape, strict=True) if size != 1])
            return [(x, rows, tuple(ONE if size == 1 else next(remaining) for size in x.shape))]
        return [self._other_rows(node, rows, labels)]

    def _reduced(self, node: Node, rows: Shape, labels: Labels) -> tuple[Node, Shape, Labels]:
        """The node that a reduction reads, with its rows and columns; a region reduces rows of one length."""
        x, (_, _, keepdims) = node.args[0], node.attr
        if any(label in (COLUMNS, LOW, HIGH) for label in labels):
            raise Cut("what was reduced becomes columns")
        if self.n is None:
            self.n = x.shape[-1]
        if x.shape[-1] != self.n:
            raise Cut("rows of two lengths")
        return x, rows, (*(labels[:-1] if keepdims else labels), COLUMNS)

    def _other_rows(self, node: Node, rows: Shape, labels: Labels) -> tuple[Node, Shape, Labels]:
        """A reshape that joins or splits the dims of rows: the same rows by other numbers."""
        x = node.args[0]
        columns = labels[-1] if labels and labels[-1] in (COLUMNS, LOW, HIGH) else None
        lead = labels[:-1] if columns is not None or (len(labels) == len(rows) + 1) else labels
        if lead != tuple(i if size != 1 else ONE for i, size in enumerate(rows)):
            raise Cut("reshape of what is broadcast")
        last = x.shape[-1] == node.shape[-1] and len(labels) > len(lead)
        inner = x.shape[:-1] if last else x.shape
        own = tuple(i if size != 1 else ONE for i, size in enumerate(inner))
        return x, inner, (*own, *((ONE if columns is None else columns,) if last else ()))

    def _make(self, node: Node, rows: Shape, labels: Labels, args: list[int]) -> int:
        graph = self.graph
        if node.op == "constant":
            return graph.constant(node.attr)
        if self._is_leaf(node):
            for label, half in _HALVES.items():
                if label in labels:
                    whole = tuple(COLUMNS if each == label else each for each in labels)
                    return self._leaf(Leaf(node, rows, whole, packed=True), half)
            return self._leaf(Leaf(node, rows, labels), "")
        if node.op == "primitive":
            return self._rounded(node, self._primitive(node, args))
        if node.op == "cast":
            made = _as_number(graph, args[0]) if node.dtype in FLOATS else args[0]
            return self._rounded(node, made)
        if node.op == "reduce":
            if not graph.kinds[args[0]].columns:
                raise Cut("reduction of what has no columns")
            return self._rounded(node, graph.add(node.attr[0], args[0]))
        return args[0]

    def _primitive(self, node: Node, args: list[int]) -> int:
        graph = self.graph
        name, value = (node.attr[0], str(node.attr[1])) if isinstance(node.attr, tuple) else (str(node.attr), "")
        if value and not graph.kinds[args[0]].columns:
            raise Cut(f"{name} of what has no columns")
        takes = PRIMITIVES[name].takes
        args = [_as_number(graph, i) if letter == "f" else i for i, letter in zip(args, takes, strict=True)]
        if name in _SHARP and not self.exact:
            args = [
                graph.add("astype", i, value=arg.dtype) if arg.dtype in NARROW and self._is_computed(arg, i) else i
                for arg, i in zip(node.args, args, strict=True)
            ]
        return graph.add(name, *args, value=value)

    def _is_computed(self, node: Node, made: int) -> bool:
        """Whether a value's dtype rounds it."""
        while not self._is_leaf(node) and _selects(node):
            node = node.args[0]
        return not self._is_leaf(node) and node.op != "constant" and self.graph.nodes[made].primitive != "constant"

    def _rounded(self, node: Node, made: int) -> int:
        if self.exact and node.dtype in NARROW and self._is_computed(node, made):
            return self.graph.add("astype", made, value=node.dtype)
        return made

    def _leaf(self, leaf: Leaf, half: str) -> int:
        """The node of an operand. One of bools is a tile of zeros and ones."""
        known = self.leaves.get(leaf)
        if known is None:
            if len(self.leaves) == MOST_OPERANDS:
                raise Cut(f"more than {MOST_OPERANDS} operands")
            known = self.leaves[leaf] = len(self.leaves)
            self.graph.operands += (leaf.operand,)
        made = self.graph.operand(known, half)
        if leaf.node.dtype != "bool":
            return made
        return self.graph.add("logical_not", self.graph.add("equal", made, self.graph.constant(0.0)))


def _aligned(arg: Node, node: Node, labels: Labels) -> Labels:
    """The labels of a primitive's argument, which broadcasts as in NumPy."""
    if arg.shape == node.shape and len(labels) == len(arg.shape):
        return labels
    more = len(labels) - len(arg.shape)
    sizes = zip(arg.shape, node.shape[more:], labels[more:], strict=True)
    return tuple([ONE if size == 1 and whole != 1 else label for size, whole, label in sizes])


def _selects(node: Node) -> bool:
    """Whether a node's values are some of its argument's, or their opposites."""
    name = node.attr[0] if node.op == "reduce" else node.attr
    return node.op in VIEWS or (node.op in ("reduce", "primitive") and name in _SELECTS)


def _as_number(graph: SimplifyingGraph, i: int) -> int:
    if graph.kinds[i].dtype != "bool":
        return i
    return graph.add("where", i, graph.constant(1.0), graph.constant(0.0))
