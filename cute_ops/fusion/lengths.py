"""Keys that each query attends to, where masks compare their places with whole numbers: the lengths of sequences in a
cache, the place of a step of decoding, a window before it.

A mask is a conjunction of comparisons, and each comparison says that a linear form of the key's place, of the query's
and of one array is not negative. So ``arange(n) < lengths[:, None]``, ``pos >= arange(n)`` and ``~(pos < arange(n))``
are one meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from cute_ops.expressions.graph import Expression
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.express import COLUMNS, ONE
from cute_ops.fusion.graph import Graph, Node
from cute_ops.fusion.named import number_of
from cute_ops.fusion.scores import Known, Scores, hides, scaled

WHOLE = ("int32", "int64")
EXACT = 1 << 24  # whole numbers up to this one are constants of a graph, which float32 holds
_ABSORBS = -1e30  # what is added to scores below this is rounded to it
_LOWEST = {"float16": -65519.0, "bfloat16": -3.396e38}  # what is rounded to a finite number
_FLIPPED = {"less": "less_equal", "less_equal": "less"}


class Bound(NamedTuple):
    """A number of keys for each query: that of an array, a constant, and ``step`` more for each query.

    Attributes:
        array: it and which row of the scores each of its dims is; None where the constant is all.
        constant: what is added to the array's number.
        step: 0 or 1.
    """

    array: tuple[Node, tuple[int, ...]] | None
    constant: int
    step: int


class Lengths(NamedTuple):
    """What is done to scores, where masks hide the keys of each query but those from ``begin`` on, up to ``end``.

    Attributes:
        end: how many keys there are up to the last one.
        begin: how many keys come before the first one; None for none.
        scale, softcap: as attributes of ``attention``.
        fill: the scores of keys that are hidden.
    """

    end: Bound
    begin: Bound | None
    scale: float
    softcap: float
    fill: float


class _Form(NamedTuple):
    """A linear form of places: ``key * of_key + query * of_query + sum of arrays, each times a factor + constant``."""

    of_key: int = 0
    of_query: int = 0
    arrays: tuple[tuple[Node, tuple[int, ...], int], ...] = ()
    constant: int = 0

    def plus(self, other: _Form, sign: int = 1) -> _Form:
        factors = {(node, labels): factor for node, labels, factor in self.arrays}
        for node, labels, factor in other.arrays:
            factors[node, labels] = factors.get((node, labels), 0) + sign * factor
        arrays = tuple((*key, factor) for key, factor in factors.items() if factor)
        keys, queries = self.of_key + sign * other.of_key, self.of_query + sign * other.of_query
        return _Form(keys, queries, arrays, self.constant + sign * other.constant)


class _Other(Exception):
    """A mask says something else."""


class _Added(NamedTuple):
    """An array that a program adds to scores: 0 where these are seen.

    Attributes:
        condition: where it has which of the two numbers.
        labels: of the condition's dims, the dims of the scores.
        holds: the condition's value where scores are seen.
        fill: the other number.
    """

    condition: Node
    labels: tuple[int, ...]
    holds: bool
    fill: float


def lengths_of(found: Found, scores: Scores, of_query: int | None, graph: Graph, known: Known) -> Lengths | None:
    """The keys that masks leave each query; None where something else is done to scores.

    Args:
        found: the softmax.
        scores: the steps from the scores to it.
        of_query: which of its rows counts queries.
        graph: the program, for its counts of places.
        known: the values of arrays.
    """
    expression = scores.expression
    if expression is None or (scores.left, scores.right) != (-1, -1):
        return None
    try:
        reading = _Reading(found, of_query, graph, known)
        conditions, fill, z = _conditions(expression, scores.output, reading)
        plain = scaled(expression, z, scores.acc)
        if not conditions or plain is None:
            return None
        forms = [form for each in conditions for form in reading.of_expression(expression, *each)]
        return Lengths(*_ends(forms), *plain, fill)
    except _Other:
        return None


def _conditions(expression: Expression, z: int, reading: _Reading) -> tuple[list[tuple[int, bool]], float, int]:
    """The conditions of masks, each with whether it holds where scores are seen, the scores of what they hide, and the
    scores before.
    """
    found, fills, last = list[tuple[int, bool]](), set[float](), False
    while (mask := _mask(expression, z, reading)) is not None:
        condition, fill, z, is_added = mask
        found.append(condition)
        fills.add(fill)
        if last or len(fills) > 1:  # what is added to a hidden score, too, makes it lower than others
            raise _Other
        last = is_added and math.isfinite(fill)
    return found, min(fills, default=0.0), z


def _mask(expression: Expression, z: int, reading: _Reading) -> tuple[tuple[int, bool], float, int, bool] | None:
    """A mask's condition with whether it holds where scores are seen, the score of what it hides, the scores before and
    whether it is added to these; None where there is no mask.
    """
    mask, inner = _added_mask(expression, z, reading)
    node = expression.nodes[mask]
    if inner is not None and node.primitive == "operand":
        added = reading.added(node.operand)
        return None if added is None else ((mask, added.holds), added.fill, inner, True)
    hidden = [hides(expression, each) for each in node.args[1:]] if node.primitive == "where" else []
    if inner is not None and hidden == [False, False]:
        raise _Other
    if hidden.count(True) != 1:
        return None
    at = hidden.index(True)
    fill = float(expression.nodes[node.args[1 + at]].number or 0.0)
    if inner is not None and fill > _ABSORBS:
        raise _Other
    return (node.args[0], at == 1), fill, node.args[2 - at] if inner is None else inner, inner is not None


def _added_mask(expression: Expression, z: int, reading: _Reading) -> tuple[int, int | None]:
    """The mask of zeros that a node adds to scores, and these; the node itself and None where it adds none."""
    node = expression.nodes[z]
    if node.primitive == "add":
        for inner, other in (node.args, node.args[::-1]):
            mask = expression.nodes[other]
            if mask.primitive == "operand" and reading.added(mask.operand) is not None:
                return other, inner
            if mask.primitive == "where" and any(expression.nodes[i].number == 0 for i in mask.args[1:]):
                return other, inner
    return z, None


class _Reading:
    """Masks of a softmax as linear forms that are not negative."""

    def __init__(self, found: Found, of_query: int | None, graph: Graph, known: Known) -> None:
        self.found, self.of_query, self.graph, self.known = found, of_query, graph, known

    def added(self, operand: int) -> _Added | None:
        """The mask that an operand is, of zeros and of a number that scores are rounded to; None of any other."""
        if operand < 0 or (leaf := self.found.leaves[operand]).rows != self.found.rows or leaf.packed:
            return None
        dtypes = {leaf.node.dtype}
        node, labels = self._below(leaf.node, leaf.labels)
        while node.op == "cast":
            node, labels = self._below(node.args[0], labels)
            dtypes.add(node.dtype)
        if (node.op, node.attr) != ("primitive", "where"):
            return None
        first, second = (number_of(each) for each in node.args[1:])
        if first is None or second is None or 0 not in (first, second) or min(first, second) > _ABSORBS:
            return None
        fill, condition = min(first, second), node.args[0]
        fill = -math.inf if any(fill < low for dtype, low in _LOWEST.items() if dtype in dtypes) else fill
        return _Added(condition, _of_argument(condition, labels), first == 0, fill)

    def _below(self, node: Node, labels: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
        """The array that a value is a view of, as what it is computed from outside of a body."""
        node, labels = below_views(node, labels)
        return below_views(self.graph.meant[node], labels) if node in self.graph.meant else (node, labels)

    def of_expression(self, expression: Expression, i: int, holds: bool) -> Iterator[_Form]:
        """The forms of a condition of the expression, or of its opposite."""
        node = expression.nodes[i]
        is_zero = node.primitive == "equal" and expression.nodes[node.args[1]].number == 0
        if node.primitive == "logical_not" or is_zero:
            yield from self.of_expression(expression, node.args[0], not holds)
        elif node.primitive == ("logical_and" if holds else "logical_or"):
            for arg in node.args:
                yield from self.of_expression(expression, arg, holds)
        elif node.primitive == "operand":
            leaf = self.found.leaves[node.operand]
            if (added := self.added(node.operand)) is not None:
                yield from self._of_node(added.condition, added.labels, holds)
                return
            if leaf.rows != self.found.rows or leaf.packed or leaf.node.dtype != "bool":
                raise _Other
            yield from self._of_node(leaf.node, leaf.labels, holds)
        else:
            raise _Other

    def _of_node(self, node: Node, labels: tuple[int, ...], holds: bool) -> Iterator[_Form]:
        """The forms of a mask of the program."""
        if (value := self.known(node)) is not None and bool((value == holds).all()):
            return
        node, labels = self._below(node, labels)
        what = node.attr if node.op == "primitive" else ""
        if what == "logical_not":
            yield from self._of_node(node.args[0], labels, not holds)
        elif what == ("logical_and" if holds else "logical_or"):
            for arg in node.args:
                yield from self._of_node(arg, _of_argument(arg, labels), holds)
        elif what in _FLIPPED:
            a, b = node.args if holds else node.args[::-1]
            less = (what if holds else _FLIPPED[what]) == "less"
            if any(each.dtype not in WHOLE and each.op != "constant" for each in (a, b)):
                raise _Other
            left, right = (self._linear(each, _of_argument(each, labels)) for each in (a, b))
            yield right.plus(left, -1).plus(_Form(constant=1), -int(less))
        else:
            raise _Other

    def _linear(self, node: Node, labels: tuple[int, ...]) -> _Form:
        """The form of a number of the program: sums and differences of constants, counts of places and arrays."""
        node, labels = self._below(node, labels)
        if node.op == "constant" and abs(float(node.attr)) <= EXACT and float(node.attr).is_integer():
            return _Form(constant=int(node.attr))
        if (count := self._count(node, labels)) is not None:
            return count
        if node.op == "primitive" and node.attr in ("add", "subtract"):
            left, right = (self._linear(each, _of_argument(each, labels)) for each in node.args)
            return left.plus(right, 1 if node.attr == "add" else -1)
        if node.dtype not in WHOLE or not {COLUMNS, self.of_query}.isdisjoint(labels):
            raise _Other
        return _Form(arrays=((node, labels, 1),))

    def _count(self, node: Node, labels: tuple[int, ...]) -> _Form | None:
        """The form of a count of the places of keys or of queries; None of anything else."""
        call = self.graph.named.get(node)
        if call is None or call.op != "iota":
            return None
        axis = call.attrs["axis"]
        if node.shape[axis] == 1:
            return _Form()
        if labels[axis] == COLUMNS:
            return _Form(of_key=1)
        return _Form(of_query=1) if labels[axis] == self.of_query else None


def masks_outside(source: Graph, inputs: Mapping[Node, Node], target: Graph) -> dict[Node, Node]:
    """By input of a body's graph that is a mask what it is computed from outside, in nodes of the body's graph.

    Args:
        source: the program's graph.
        inputs: by value of it the body's input, which is the same at each run.
        target: the body's graph.
    """
    numbers = {node: inside for node, inside in inputs.items() if node.dtype in WHOLE}
    made: dict[Node, Node | None] = {}

    def copied(node: Node) -> Node | None:
        node = source.meant.get(node, node)
        if node not in made:
            made[node] = numbers.get(node) or copy(node)
        return made[node]

    def copy(node: Node) -> Node | None:
        if node.op == "constant":
            return target.constant(node.attr)
        if (call := source.named.get(node)) is not None:
            return target.iota(call.attrs["axis"], node.shape, node.dtype) if call.op == "iota" else None
        floats = node.dtype not in ("bool", *WHOLE)
        if node.op not in _OF_MASKS or (node.op == "primitive" and node.attr not in (("where",) if floats else _SAYS)):
            return None
        args = [copied(arg) for arg in node.args]
        given = [arg for arg in args if arg is not None]
        return target.make(node.op, given, node.attr, node.shape, node.dtype) if len(given) == len(args) else None

    masks = {inside: copied(node) for node, inside in inputs.items() if node not in numbers}
    return {inside: mask for inside, mask in masks.items() if mask is not None}


_OF_MASKS = ("primitive", "cast", "broadcast", "reshape", "transpose")
_SAYS = ("less", "less_equal", "logical_and", "logical_or", "logical_not", "add", "subtract")


def _ends(forms: Sequence[_Form]) -> tuple[Bound, Bound | None]:
    """What forms that are not negative say of the number of keys, and of the number of those before the first one."""
    ends, begins = list[Bound](), list[Bound]()
    for form in forms:
        if abs(form.of_key) != 1 or len(form.arrays) > 1:
            raise _Other
        sign = -form.of_key  # key <= rest, else key >= -rest
        array, constant = None, sign * form.constant + (sign > 0)
        for node, labels, factor in form.arrays:
            if factor != sign:
                raise _Other
            array = node, labels
        if form.of_query * sign not in (0, 1):
            raise _Other
        (ends if sign > 0 else begins).append(Bound(array, constant, form.of_query * sign))
    if len(ends) != 1 or len(begins) > 1:
        raise _Other
    return ends[0], begins[0] if begins else None


def below_views(node: Node, labels: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
    """The array that a value is a view of, and a label for each of its dims: the dim of the scores that it is, ``ONE``
    where it has one element.
    """
    while (below := _labels_below(node, labels)) is not None:
        node, labels = node.args[0], below
    return node, tuple(label if size != 1 else ONE for label, size in zip(labels, node.shape, strict=True))


def _labels_below(node: Node, labels: tuple[int, ...]) -> tuple[int, ...] | None:
    """The labels of what a node is a view of; None where it is no view, or one that joins or splits dims."""
    if node.op == "transpose":
        place = dict(zip(node.attr, labels, strict=True))
        return tuple(place[axis] for axis in range(len(labels)))
    if node.op == "broadcast":
        sizes = zip(node.attr, node.args[0].shape, strict=True)
        return tuple(labels[i] if size != 1 else ONE for i, size in sizes)
    if node.op == "reshape":
        dims = kept_dims(node)
        return None if dims is None else tuple(labels[dims[i]] if i in dims else ONE for i in _axes(node.args[0]))
    return labels if node.op == "cast" and {node.dtype, node.args[0].dtype} <= {*WHOLE} else None


def kept_dims(reshape: Node) -> dict[int, int] | None:
    """By dim of more than one element before a reshape the one behind it; None where it joins or splits dims."""
    x = reshape.args[0]
    before, after = ([i for i in _axes(each) if each.shape[i] != 1] for each in (x, reshape))
    same = [x.shape[i] for i in before] == [reshape.shape[i] for i in after]
    return dict(zip(before, after, strict=True)) if same else None


def _axes(node: Node) -> range:
    return range(len(node.shape))


def _of_argument(node: Node, labels: tuple[int, ...]) -> tuple[int, ...]:
    """The labels of an argument of an elementwise operation, which may be a number or lack leading dims."""
    return labels[len(labels) - len(node.shape) :]
