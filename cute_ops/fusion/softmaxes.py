"""Softmaxes as programs write them: whether a region has one of scores, and where its division by sums is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import NamedTuple

from cute_ops.expressions.graph import Expression, operands_of
from cute_ops.fusion.analyse import Analysis, Found
from cute_ops.fusion.attention_arrays import before
from cute_ops.fusion.express import COLUMNS, Leaf
from cute_ops.fusion.graph import Node, Shape
from cute_ops.fusion.scores import quotient_of, softmax_of, weights_of

READ_WEIGHTS = "something else reads its weights"


class Quotient(NamedTuple):
    """A product with values that is divided by the sums of its weights.

    Attributes:
        product: the product.
        views: the transposes of it that are divided.
        total: by what they are divided.
        found: the division.
    """

    product: Node
    views: tuple[Node, ...]
    total: Leaf
    found: Found

    def divides(self, ids: Sequence[Hashable], sums: Node) -> bool:
        """Whether each row of a product is divided by its own sum.

        Args:
            ids: of the product's dims the number of the row's dim, or ``COLUMNS``.
            sums: an element for each row, whose dims are those of the rows, in order.
        """
        for view in self.views:
            ids = [ids[i] for i in view.attr]
        node, dims = self.total.node, tuple(range(len(self.total.node.shape)))
        while node.op == "transpose" and node is not sums:
            node, dims = node.args[0], tuple(node.attr[i] for i in dims)
        (x,) = (leaf for leaf in self.found.leaves if leaf is not self.total)
        which, of_total = _named(x, ids), _named(self.total, dims)
        in_order = [label for label in x.labels if label in which]
        fits = node is sums and x.rows == self.total.rows and in_order == [*sorted(in_order[:-1]), COLUMNS]
        return fits and which == {**of_total, COLUMNS: COLUMNS}


def division_of(found: Found) -> Quotient | None:
    """The quotient that an expression is, and nothing else."""
    expression = found.expression
    if len(expression.outputs) != 1 or len(found.leaves) != 2 or any(leaf.packed for leaf in found.leaves):
        return None
    both = quotient_of(expression, expression.nodes[expression.outputs[0]])
    if both is None or any(expression.nodes[i].primitive != "operand" for i in both):
        return None
    x, total = (found.leaves[expression.nodes[i].operand] for i in both)
    node, views = x.node, list[Node]()
    while node.op == "transpose":
        views.insert(0, node)
        node = node.args[0]
    fits = node.op == "contract" and COLUMNS in x.labels and COLUMNS not in total.labels
    return Quotient(node, tuple(views), total, found) if fits else None


def _named(leaf: Leaf, names: Sequence[Hashable]) -> dict[int, Hashable]:
    """By label the names of a leaf's dims of more than one element."""
    labels = zip(leaf.labels, leaf.node.shape, names, strict=True)
    return {label: name for label, size, name in labels if size != 1}


def why_no_softmax(found: Found) -> str:
    """Why no root of an expression is the weights of values; empty if it contains no softmax of scores."""
    within = any(softmax_of(found.expression, i) is not None for i in range(len(found.expression.nodes)))
    of_scores = within and any(before(leaf.node)[0].op == "contract" for leaf in found.leaves)
    if not of_scores:
        return ""
    alone = len(found.roots) == 1
    return "its weights change before they meet the values, as by dropout" if alone else READ_WEIGHTS


def beside_softmaxes(analysis: Analysis) -> set[Node]:
    """Outputs that a region with a softmax has besides it and that do not depend on its scores, such as a mask that all
    layers read. An attention is only found where its softmax is the region's only output, so the program computes these
    by itself.
    """
    apart = set[Node]()
    regions: dict[int, list[Found]] = defaultdict(list)
    for found in analysis.found:
        regions[id(found.region)].append(found)
    for region in regions.values():
        outputs = [
            (found, *each) for found in region for each in zip(found.roots, found.expression.outputs, strict=True)
        ]
        others = set(region[0].region.roots).difference(root for _, root, _ in outputs)
        if len(outputs) + len(others) < 2:
            continue
        scores = set[Node]()
        for found in region:
            for z in _softmaxes(found.expression):
                scores |= {leaf.node for leaf in _read_by(found, z) if may_be_scores(leaf, found.rows)}
        if scores:
            apart |= {
                root for found, root, output in outputs
                if scores.isdisjoint(leaf.node for leaf in _read_by(found, output))
            }  # fmt: skip
            inside = {*region[0].region.nodes, *analysis.plain}
            apart |= {root for root in others if scores.isdisjoint(_computed_from(root, inside))}
    return apart


def _softmaxes(expression: Expression) -> Iterator[int]:
    """The nodes whose softmax an output is, or whose weights and their sum two outputs are."""
    for output in expression.outputs:
        found = [softmax_of(expression, output)]
        found += [weights_of(expression, output, total) for total in expression.outputs if total != output]
        yield from (z for z in found if z is not None)


def _computed_from(node: Node, inside: Container[Node]) -> set[Node]:
    """The values that a node is computed from by nodes ``inside``."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each in inside:
            waiting += [arg for arg in each.args if arg not in seen]
            seen.update(each.args)
    return seen


def _read_by(found: Found, i: int) -> list[Leaf]:
    """The operands that a node of an expression is computed from."""
    return [found.leaves[operand] for operand in operands_of(found.expression, i)]


def may_be_scores(leaf: Leaf, rows: Shape) -> bool:
    """Whether an operand is a product with all rows and the columns, as scores are."""
    whole = all(size == 1 or i in leaf.labels for i, size in enumerate(rows)) and COLUMNS in leaf.labels
    return whole and leaf.rows == rows and not leaf.packed and before(leaf.node)[0].op == "contract"
