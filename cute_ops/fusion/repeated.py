"""Regions that are alike, as those of a model's layers are: one is expressed, and the others take its expressions.

What was expressed is kept for the process: graphs that are compiled again, and layers of other widths, find it, too.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import NamedTuple

from cute_ops.fusion.canonical import Canonical, canonical
from cute_ops.fusion.express import Expressed, Labels, Leaf, express
from cute_ops.fusion.graph import Node, Shape
from cute_ops.fusion.node import Size
from cute_ops.fusion.region import Facts, Region

MOST = 4096  # regions that are kept


class _Form(NamedTuple):
    """An expression with places instead of nodes and of sizes."""

    expressed: Expressed
    canonical: Canonical
    leaves: tuple[tuple[int, Shape, Labels, bool], ...]
    roots: tuple[int, ...]


class _Known(NamedTuple):
    sizes: Sequence[Size]
    forms: list[_Form]
    failed: list[tuple[int, str]]


_kept: dict[Hashable, _Known] = {}


class Expressing:
    """Expressions of a graph's regions.

    Args:
        plain: views and casts that regions look through.
        facts: of the graph.
        exact: as :func:`express` takes it.
    """

    def __init__(self, plain: Container[Node], facts: Facts, exact: bool) -> None:
        self.plain, self.facts, self.exact = plain, facts, exact

    def of(self, region: Region) -> tuple[list[tuple[Expressed, Canonical]], dict[Node, str]]:
        """The results of :func:`express`, each with its canonical form."""
        key, nodes, sizes = self._described(region)
        known = _kept.get(key)
        if known is None:
            made, failed = express(region, self.plain, self.facts, self.exact)
            place = {node: i for i, node in enumerate(nodes)}
            forms = [_form(each, place, self.exact) for each in made]
            if len(_kept) >= MOST:
                _kept.clear()
            _kept[key] = _Known(sizes, forms, [(place[node], why) for node, why in failed.items()])
            return [(each, form.canonical) for each, form in zip(made, forms, strict=True)], failed
        here = dict(zip(known.sizes, sizes, strict=True))
        found = [(_moved(form, nodes, here), form.canonical) for form in known.forms]
        return found, {nodes[i]: why for i, why in known.failed}

    def _described(self, region: Region) -> tuple[Hashable, list[Node], Sequence[Size]]:
        """All that :func:`express` looks at, the nodes in the order in which it is said, and the sizes.

        Sizes are said by their number among the region's sizes, unless their values count.
        """
        place: dict[Node, int] = {}
        number: dict[Size, int] = {1: 0}
        said: list[Hashable] = [self.exact]
        counts = any(map(_counts, region.nodes))
        rowlike, plain = self.facts.rowlike, self.plain
        for node in region.nodes:
            stack = [node]
            while stack:
                each = stack[-1]
                if each in place:
                    stack.pop()
                    continue
                inside = each is node or each in plain
                missing = [arg for arg in each.args if arg not in place] if inside else None
                if missing:
                    stack += missing
                    continue
                stack.pop()
                shape: Sequence[Size] = each.shape
                if not counts:
                    shape = tuple([number.setdefault(size, len(number)) for size in shape])
                if inside:
                    args = tuple([place[arg] for arg in each.args])
                    attr = each.attr[1] == 0 if each.op == "slice" else each.attr  # of halves: the first or the second
                    said.append((each.op, attr, shape, each.dtype, each in rowlike, args))
                elif each.op == "constant":
                    said.append((str(each.attr), each.dtype))
                else:
                    said.append((shape, each.dtype, each in rowlike))
                place[each] = len(place)
        said.append(tuple([place[root] for root in region.roots]))
        return tuple(said), list(place), () if counts else tuple(number)


def _counts(node: Node) -> bool:
    """Whether an expression of a node depends on the values of sizes: of groups, or of sums that may be means."""
    if node.op == "primitive":
        return isinstance(node.attr, tuple)
    return node.op == "reduce" and node.attr[0] == "sum"


def _form(made: Expressed, place: dict[Node, int], exact: bool) -> _Form:
    leaves = tuple((place[leaf.node], leaf.rows, leaf.labels, leaf.packed) for leaf in made.leaves)
    blank = made._replace(leaves=(), roots=())
    return _Form(blank, canonical(made.expression, made.n, exact), leaves, tuple(place[root] for root in made.roots))


def _moved(form: _Form, nodes: Sequence[Node], size: dict[Size, Size]) -> Expressed:
    """An expression of alike nodes, whose sizes are others."""

    def sizes(shape: Shape) -> Shape:
        return tuple([size.get(each, each) for each in shape])

    expression, _, _, rows, n = form.expressed
    leaves = tuple([Leaf(nodes[i], sizes(rows), labels, packed) for i, rows, labels, packed in form.leaves])
    roots = tuple([nodes[i] for i in form.roots])
    return Expressed(expression, leaves, roots, sizes(rows), None if n is None else size.get(n, n))
