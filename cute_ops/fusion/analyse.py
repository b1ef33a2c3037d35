"""A graph's regions with their canonical expressions and meanings."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from typing import NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.text import text_of
from cute_ops.fusion.canonical import Canonical
from cute_ops.fusion.express import Expressed, Leaf
from cute_ops.fusion.graph import FLOATS, Graph, Node, Shape
from cute_ops.fusion.losses import find_losses
from cute_ops.fusion.match import Meaning, meaning_of
from cute_ops.fusion.named import Named, uncast
from cute_ops.fusion.region import Region, partition
from cute_ops.fusion.repeated import Expressing

_CALLS = (
    "rope", "cross_entropy", "linear_cross_entropy", "cross_entropy_metrics", "linear_cross_entropy_metrics",
)  # fmt: skip


class Found:
    """Some roots of a region, computed by one expression.

    Attributes:
        expression: what is computed, in its canonical form.
        flat: that with sums in the canonical order, too, by which meanings are compared.
        leaves: its operands, in order.
        roots: the nodes that its outputs are, in order.
        rows: the leading dims of its values.
        n: their last dim; None if no value has columns.
        region: all nodes that it belongs to.
        meaning: the op of ours that it is; None if it is none.
    """

    def __init__(self, expressed: Expressed, made: Canonical, region: Region) -> None:
        self.expression: Expression = made.expression
        self.flat: Expression = made.flat
        self.leaves: tuple[Leaf, ...] = tuple(expressed.leaves[i] for i in made.operands)
        self.roots: tuple[Node, ...] = tuple(expressed.roots[k] for k in made.outputs)
        self.rows: Shape = expressed.rows
        self.n = expressed.n
        self.region = region
        self.meaning: Meaning | None = meaning_of(self.flat) or self._rotation_of_pairs()

    @cached_property
    def text(self) -> str:
        return text_of(self.expression)

    @cached_property
    def reduces(self) -> bool:
        """Whether it reduces rows."""
        words = [node.primitive for node in self.expression.nodes if node.primitive in PRIMITIVES]
        return any(PRIMITIVES[word].reduces for word in words)

    def _rotation_of_pairs(self) -> Meaning | None:
        """``rope`` of neighbouring pairs, which no primitive turns: ``x * cos + rotate_pairs(x) * sin``."""
        if len(self.leaves) != 4 or text_of(self.flat) != "e1(t,t,t,t) multiply 0 1; multiply 2 3; add 4 5 -> 6":
            return None
        nodes = [leaf.node for leaf in self.leaves]
        for k, turned in enumerate(nodes):
            if turned.op == "primitive" and turned.attr[0] == "rotate_pairs":
                other = (2, 3, 0, 1)[k], (3, 2, 1, 0)[k]
                x = next((i for i in other if nodes[i] is uncast(turned.args[0])), None)
                if x is not None:
                    names = {k: "rotated", k ^ 1: "sin", x: "x", x ^ 1: "cos"}
                    return Meaning("rope", tuple(names[i] for i in range(4)), ("out",), {"interleaved": True})
        return None


class Call:
    """A node that an op computes which is no expression, perhaps with others.

    Attributes:
        named: the op's call.
        roots: the node, and those that the call gives beside it.
        rows: its leading dims.
        n: its last dim.
    """

    meaning = None

    def __init__(self, call: Named, root: Node) -> None:
        self.named, self.roots = call, (root, *call.beside)
        self.rows: Shape = root.shape[:-1]
        self.n = root.shape[-1] if root.shape else None

    @property
    def text(self) -> str:
        return ", ".join(self.named.operands)


class Analysis(NamedTuple):
    """The regions found in a graph.

    Attributes:
        found: what expressions compute, each after those that it reads.
        calls: rotations and losses.
        reasons: of nodes that no expression computes, why not; products have no reason.
        plain: views and casts of what no region computes.
        live: the nodes that outputs need.
        visits: how often a node was looked at.
    """

    found: list[Found]
    calls: list[Call]
    reasons: dict[Node, str]
    plain: set[Node]
    live: set[Node]
    visits: int

    def products(self, found: Found) -> list[int]:
        """The leaves that are a product of rows and one matrix which nothing else reads: they may take an epilogue."""
        inside = set(found.region.nodes)
        alone = set(found.roots) == set(found.region.roots)
        linear = (i for i, leaf in enumerate(found.leaves) if alone and is_linear(leaf.node))
        return [i for i in linear if self.readers(found.leaves[i].node) <= inside]

    def readers(self, node: Node) -> set[Node]:
        """The readers of a value, through views of it; itself where the program returns it."""
        readers: set[Node] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            for user in each.users:
                if user in self.plain:
                    waiting.append(user)
                elif user in self.live:
                    readers.add(user)
        return readers


def is_linear(node: Node) -> bool:
    """Whether a node is ``x @ weight`` for rows x and one matrix, in dtypes that our products take."""
    if node.op != "contract":
        return False
    (left, right, batch), (x, weight) = node.attr, node.args
    of_rows = len(x.shape) > 1 and left == (len(x.shape) - 1,)
    of_matrix = len(weight.shape) == 2 and len(right) == 1 and batch == ((), ())
    return of_rows and of_matrix and x.dtype == weight.dtype and x.dtype in FLOATS


def analyse(graph: Graph, *, exact: bool = False, whole: Container[Node] = ()) -> Analysis:
    """Find what expressions compute in a graph.

    Args:
        graph: the program.
        exact: expressions round every result as the program does; else outputs alone are rounded.
        whole: nodes that are left to the program.
    """
    find_losses(graph, is_linear, exact)
    parts = partition(graph, whole)
    reasons = dict(parts.reasons)
    found: list[Found] = []
    expressing = Expressing(parts.plain, parts.facts, exact)
    for region in parts.regions:
        made, failed = expressing.of(region)
        reasons.update(failed)
        for each in made:
            one = Found(*each, region)
            if any(node.primitive not in ("operand", "constant") for node in one.expression.nodes):
                found.append(one)
    calls = [Call(call, node) for node, call in graph.named.items() if call.op in _CALLS and node in reasons]
    return Analysis(found, calls, reasons, parts.plain, parts.live, parts.visits)
