"""Sinks of attention as programs write them: a number that the sum of a softmax has beside the weights of keys, or a
column of scores that is dropped behind the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.express import COLUMNS, ONE, Leaf
from cute_ops.fusion.graph import FLOATS, Node
from cute_ops.fusion.lengths import below_views
from cute_ops.fusion.region import Region
from cute_ops.fusion.scores import quotient_of, softmax_of, unshifted


class Sink(NamedTuple):
    """One more score of each row, which has no value.

    Attributes:
        operand: its number among the leaves of scores; -1 where it is a number.
        number: the number.
    """

    operand: int
    number: float = 0.0


class Column(NamedTuple):
    """A softmax of scores and of one more column, which is dropped behind it.

    Attributes:
        found: the scores before, with the nodes of both expressions, and the sink as its last leaf.
        sink: the column.
        parts: both expressions.
        root: the softmax.
        scores: the value that the column is added to.
        joined: both.
    """

    found: Found
    sink: Sink
    parts: tuple[Found, ...]
    root: Node
    scores: Node
    joined: Node


def softmax_with_sink(expression: Expression, output: int) -> tuple[int, Sink] | None:
    """The node of whose softmax with a sink an output is the weights, and the sink: ``exp(z) / (1 + sum(exp(z)))``,
    also with a number that both subtract; None of any other output.
    """
    nodes = expression.nodes
    both = quotient_of(expression, nodes[output])
    if both is None or nodes[both[0]].primitive != "exp" or nodes[both[1]].primitive != "add":
        return None
    (z,) = nodes[both[0]].args
    shift = None if unshifted(expression, z) == z else nodes[z].args[1]
    for total, extra in (nodes[both[1]].args, nodes[both[1]].args[::-1]):
        if (nodes[total].primitive, nodes[total].args) == ("sum", (both[0],)):
            sink = _sink(expression, extra, shift)
            return None if sink is None else (unshifted(expression, z), sink)
    return None


def _sink(expression: Expression, i: int, shift: int | None) -> Sink | None:
    """The sink whose exponential a node is, less what scores subtract; None if it is none."""
    node = expression.nodes[i]
    if node.number is not None and not isinstance(node.number, bool) and shift is None and node.number > 0:
        return Sink(-1, math.log(node.number))
    if node.primitive != "exp":
        return None
    node = expression.nodes[node.args[0]]
    if shift is not None:
        if (node.primitive, node.args) == ("negative", (shift,)):
            return Sink(-1)
        if node.primitive != "subtract" or node.args[1] != shift:
            return None
        node = expression.nodes[node.args[0]]
    if node.number is not None and not isinstance(node.number, bool):
        return Sink(-1, float(node.number))
    columns = node.primitive == "operand" and expression.operands[node.operand].kind.columns
    return Sink(node.operand) if node.primitive == "operand" and not columns else None


def with_column(view: Node, of_root: Mapping[Node, Found]) -> Column | None:
    """The softmax of which a value is all columns but the last one, which is a sink; None of any other value."""
    between = _until_softmax(view, of_root)
    root = between[0].args[0] if between else view
    outer = of_root.get(root)
    leaf = None if outer is None or root.shape[-1] == view.shape[-1] else _softmax_alone(outer)
    if outer is None or leaf is None or not _adds_column(leaf):
        return None
    joined = leaf.node
    scores, column = joined.args
    inner = of_root.get(scores)
    if inner is None or len(inner.roots) != 1 or inner.rows != outer.rows:
        return None
    node, labels = below_views(column, (*leaf.labels[:-1], ONE))
    while node.op == "cast" and node.args[0].dtype in FLOATS:  # a row of sinks may be widened or rounded when repeated
        node, labels = below_views(node.args[0], labels)
    found = copy(inner)
    found.leaves = (*inner.leaves, Leaf(node, inner.rows, labels))
    found.region = Region([*inner.region.nodes, joined, *outer.region.nodes, *between], outer.region.roots)
    found.roots = outer.roots
    return Column(found, Sink(len(inner.leaves)), (inner, outer), root, scores, joined)


def _until_softmax(view: Node, of_root: Mapping[Node, Found]) -> list[Node]:
    """The casts and slices of first columns that lead from an expression's root to a value, in the program's order."""
    found = list[Node]()
    while view not in of_root and (view.op == "cast" or _has_first_columns(view)):
        found.insert(0, view)
        view = view.args[0]
    return found


def _has_first_columns(view: Node) -> bool:
    return view.op == "slice" and view.attr == (len(view.shape) - 1, 0, view.shape[-1], 1)


def _softmax_alone(found: Found) -> Leaf | None:
    """The array whose softmax an expression is and nothing else; None of any other expression."""
    if len(found.roots) != 1 or len(found.leaves) != 1:
        return None
    expression = found.expression
    z = softmax_of(expression, expression.outputs[0])
    while z is not None and unshifted(expression, z) != z:
        z = unshifted(expression, z)
    return found.leaves[0] if z is not None and expression.nodes[z].primitive == "operand" else None


def _adds_column(leaf: Leaf) -> bool:
    """Whether an array adds a last column to another one, and has its rows in the order of the scores."""
    node = leaf.node
    if node.op != "concat" or len(node.args) != 2 or node.attr != len(node.shape) - 1 or node.args[1].shape[-1] != 1:
        return False
    return leaf.labels[-1] == COLUMNS and all(label in (i, ONE) for i, label in enumerate(leaf.labels[:-1]))
