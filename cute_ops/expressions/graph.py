"""Expressions: hash-consed graphs of primitives over operands.

A value is a float32 or a bool, and has rows, columns, both or neither: operands are tiles ``(*m, n)``, row vectors
``(n,)``, column vectors ``(*m, 1)`` and scalars, and a primitive broadcasts its arguments as NumPy does.
Equal values are one node, and an :class:`Expression` is a tuple, equal to any other that does the same with the same
operands. Kernels import this module, so that it imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from cute_ops.expressions.primitives import LIKE, PRIMITIVES, ROUNDS_TO, STORED_AS

# Bounds of what is read from files. The derivative of a written-out GELU has 40 nodes and is 20 deep.
MOST_NODES, MOST_DEPTH, MOST_OPERANDS, MOST_OUTPUTS = 1000, 200, 32, 32
NOTHING: Mapping[int, int] = {}
_FIRST = {"operand": 0, "constant": 2}  # of arguments that may come in any order
LEAVES = ("operand", "constant", "n", "column")
HALVES = ("[:n]", "[n:]")


class Kind(NamedTuple):
    """The kind of a value: its dims and its dtype."""

    rows: bool
    columns: bool
    dtype: str = "float32"

    def __str__(self) -> str:
        """``t`` tile, ``r`` row vector, ``c`` column vector, ``s`` scalar; ``t?`` of bools."""
        return "scrt"[2 * self.columns + self.rows] + "?" * (self.dtype == "bool")


SCALAR = Kind(False, False)


class Operand(NamedTuple):
    """An operand. If ``packed``, each of its rows holds two of the expression's, ``[gate | up]``, read one by one."""

    kind: Kind
    packed: bool = False

    def __str__(self) -> str:
        return "2" * self.packed + str(self.kind)

    @property
    def halves(self) -> tuple[str, ...]:
        """The halves that are read: :data:`HALVES` if it is packed; else an empty text, for the whole."""
        return HALVES if self.packed else ("",)


SHAPES = {
    "*m n": Operand(Kind(True, True)),
    "n": Operand(Kind(False, True)),
    "*m 1": Operand(Kind(True, False)),
    "": Operand(SCALAR),
    "*m 2n": Operand(Kind(True, True), packed=True),
    "2n": Operand(Kind(False, True), packed=True),
}
SHAPES |= {f"bool {s}".strip(): o._replace(kind=o.kind._replace(dtype="bool")) for s, o in SHAPES.items()}
OPERANDS = {str(operand): operand for operand in SHAPES.values()}


class Node(NamedTuple):
    """A primitive of earlier nodes, or a leaf.

    Attributes:
        primitive: a primitive, or one of :data:`LEAVES`: an operand, a constant, the length of a row or an element's
            place in it.
        args: nodes, by index.
        value: of an operand ``0``, ``0[:n]`` or ``0[n:]``; of a constant its number; of ``astype`` the dtype, for an
            output also ``dtype0``, that of an operand; of a grouped primitive the columns of a group.
    """

    primitive: str
    args: tuple[int, ...] = ()
    value: str = ""

    @property
    def operand(self) -> int:
        """Of an operand: its index."""
        return int(self.value.partition("[")[0])

    @property
    def half(self) -> str:
        """Of a half of a packed operand: ``[:n]`` or ``[n:]``; else empty."""
        return self.value[len(self.value.partition("[")[0]) :]

    @property
    def stored_as(self) -> str:
        """Of an output that says its dtype: the dtype, or ``dtype0``; else empty."""
        said = self.primitive == "astype" and (self.value in STORED_AS or self.value.startswith(LIKE))
        return self.value if said else ""

    @property
    def number(self) -> float | bool | None:
        """Of a constant: its value; None of other nodes."""
        if self.primitive != "constant":
            return None
        return self.value == "true" if self.value in ("true", "false") else float(self.value)


class Expression(NamedTuple):
    """Outputs computed from operands.

    Attributes:
        operands: what is given.
        nodes: leaves and primitives in the order in which outputs need them, arguments first.
        kinds: the kind of each node.
        outputs: nodes, by index.
    """

    operands: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    kinds: tuple[Kind, ...]
    outputs: tuple[int, ...]

    @property
    def output_kinds(self) -> tuple[Kind, ...]:
        return tuple(self.kinds[i] for i in self.outputs)

    @property
    def cost(self) -> tuple[int, int]:
        """``(MUFU, other)`` instructions per element."""
        primitives = [PRIMITIVES[node.primitive] for node in self.nodes if node.primitive not in LEAVES]
        return sum(primitive.mufu for primitive in primitives), sum(primitive.fma for primitive in primitives)


class TooLargeError(ValueError):
    """An expression has more nodes, operands or outputs than expressions may have, or is deeper."""


class Graph:
    """Nodes as they are made, each once. A node is its index, and arguments come before it."""

    def __init__(self, operands: Iterable[Operand]) -> None:
        self.operands = tuple(operands)
        self.nodes: list[Node] = []
        self.kinds: list[Kind] = []
        self._index: dict[Node, int] = {}
        # What nodes are sorted by: nothing that depends on when they were made.
        self._order: list[tuple[object, ...]] = []
        self._depth: list[int] = []
        if len(self.operands) > MOST_OPERANDS:
            raise TooLargeError(f"an expression has at most {MOST_OPERANDS} operands, got {len(self.operands)}")

    def operand(self, index: int, half: str = "") -> int:
        operand = self.operands[index]
        if half not in operand.halves:
            raise ValueError(f"operand {index} is {'packed' if operand.packed else 'not packed'}, read as {half!r}")
        return self._make(Node("operand", (), f"{index}{half}"), operand.kind)

    def constant(self, value: float | bool) -> int:
        """A number or a bool."""
        if isinstance(value, bool):
            return self._make(Node("constant", (), str(value).lower()), Kind(False, False, "bool"))
        value = float(value)
        if math.isnan(value):
            raise ValueError("NaN is no constant of an expression")
        return self._make(Node("constant", (), repr(value)), SCALAR)

    def leaf(self, primitive: str) -> int:
        """The number of elements of a row, ``n``, or an element's place in it as a number, ``column``."""
        return self._make(Node(primitive), Kind(False, primitive == "column"))

    def add(self, primitive: str, *args: int, value: str = "") -> int:
        """A primitive of nodes.

        Raises:
            ValueError: there is no such primitive, it takes other arguments, or the graph becomes too large.
        """
        declared = PRIMITIVES.get(primitive)
        if declared is None:
            raise ValueError(f"{primitive!r} is no primitive of expressions")
        rows = columns = False
        got = ""
        for i in args:
            has_rows, has_columns, dtype = self.kinds[i]
            got += dtype[0]
            rows, columns = rows or has_rows, columns or has_columns
        if got != declared.takes:
            raise ValueError(f"{primitive} takes {_dtypes(declared.takes)}, got {_dtypes(got)}")
        if value or declared.grouped or primitive == "astype":
            self._check_value(primitive, value, declared.grouped)
        if (declared.reduces or declared.grouped) and not columns:
            raise ValueError(f"{primitive} of a value without columns")
        if declared.commutes and self._order[args[1]] < self._order[args[0]]:
            args = args[::-1]
        dtype = "bool" if declared.gives == "b" else "float32"
        return self._make(Node(primitive, args, value), Kind(rows, columns and not declared.reduces, dtype))

    def _check_value(self, primitive: str, value: str, grouped: bool) -> None:
        """Raise ValueError unless a primitive has just the dtype or the columns of a group that it needs."""
        if self._is_dtype(value) != (primitive == "astype") or (value and primitive != "astype" and not grouped):
            raise ValueError(f"{primitive} {value!r}: {', '.join((*STORED_AS, ROUNDS_TO[-1]))} belong to astype")
        if grouped != value.isdigit():
            raise ValueError(f"{primitive} {value!r}: the columns of a group belong to primitives of groups")

    def _is_dtype(self, value: str) -> bool:
        number = value.removeprefix(LIKE)
        like = value.startswith(LIKE) and number.isdecimal() and str(int(number)) == number
        return value in (*STORED_AS, *ROUNDS_TO) or (like and int(number) < len(self.operands))

    def finish(self, outputs: Sequence[int]) -> Expression:
        """The expression with these outputs: the nodes that they need, in the order in which they need them."""
        if not 0 < len(outputs) <= MOST_OUTPUTS:
            raise TooLargeError(f"an expression has 1 to {MOST_OUTPUTS} outputs, got {len(outputs)}")
        number: dict[int, int] = {}

        def visit(i: int) -> None:
            for arg in self.nodes[i].args:
                if arg not in number:
                    visit(arg)
            number[i] = len(number)

        for i in outputs:
            if i not in number:
                visit(i)
        nodes = []
        for i in number:
            primitive, args, value = self.nodes[i]
            nodes.append(Node(primitive, tuple([number[arg] for arg in args]), value))
        kinds = tuple([self.kinds[i] for i in number])
        return Expression(self.operands, tuple(nodes), kinds, tuple([number[i] for i in outputs]))

    def too_large(self, what: str) -> NoReturn:
        """Raise :class:`TooLargeError`."""
        raise TooLargeError(what)

    def _make(self, node: Node, kind: Kind) -> int:
        index = self._index.get(node)
        if index is not None:
            return index
        depth = 1 + max([self._depth[arg] for arg in node.args], default=0)
        if len(self.nodes) >= MOST_NODES or depth > MOST_DEPTH:
            self.too_large(f"an expression has at most {MOST_NODES} nodes and is at most {MOST_DEPTH} deep")
        index = self._index[node] = len(self.nodes)
        self.nodes.append(node)
        self.kinds.append(kind)
        self._depth.append(depth)
        first = _FIRST.get(node.primitive, 1)
        self._order.append((first, node.primitive, node.value, *[self._order[arg] for arg in node.args]))
        return index


def identity(operand: Operand) -> Expression:
    """The expression that returns its operand."""
    graph = Graph([operand])
    return graph.finish([graph.operand(0)])


def copied(
    expression: Expression, graph: Graph, operand: Callable[[Node], int] | None = None,
    instead: Mapping[int, int] = NOTHING,
) -> list[int]:  # fmt: skip
    """Copy an expression's nodes to another graph.

    Args:
        operand: makes the other graph's node for an operand; by default the operand with the same index.
        instead: nodes of the other graph that replace nodes of the expression, by index.
    """
    operand = operand or (lambda node: graph.operand(node.operand, node.half))
    nodes: list[int] = []
    for i, node in enumerate(expression.nodes):
        if i in instead and node.primitive != "operand":
            nodes.append(instead[i])
        elif node.primitive == "operand":
            nodes.append(operand(node))
        elif node.primitive in ("n", "column"):
            nodes.append(graph.leaf(node.primitive))
        elif node.number is not None:
            nodes.append(graph.constant(node.number))
        else:
            nodes.append(graph.add(node.primitive, *(nodes[arg] for arg in node.args), value=node.value))
    return nodes


def operands_of(expression: Expression, i: int) -> set[int]:
    """The operands that a node is computed from, by index."""
    found: set[int] = set()
    waiting, seen = [i], {i}
    while waiting:
        node = expression.nodes[waiting.pop()]
        if node.primitive == "operand":
            found.add(node.operand)
        waiting += [arg for arg in node.args if arg not in seen]
        seen.update(node.args)
    return found


def rebuilt(
    expression: Expression, *, outputs: Sequence[int] | None = None, kept: Sequence[int] | None = None,
    operands: Iterable[Operand] | None = None,
) -> Expression:  # fmt: skip
    """An expression with other outputs or operands.

    Args:
        outputs: the nodes that it returns.
        kept: its operands, by index; its nodes are no others.
        operands: the kinds of its operands.
    """
    places = range(len(expression.operands)) if kept is None else kept
    graph = Graph([expression.operands[i] for i in places] if operands is None else operands)
    nodes = copied(expression, graph, lambda node: graph.operand(places.index(node.operand), node.half))
    return graph.finish([nodes[i] for i in (expression.outputs if outputs is None else outputs)])


def _dtypes(letters: str) -> str:
    return f"({', '.join({'f': 'float32', 'b': 'bool'}[letter] for letter in letters)})"
