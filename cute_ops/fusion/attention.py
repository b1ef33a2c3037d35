"""Attention as programs write it: a product of queries and keys, what is done to scores, a softmax, and a product with
values.

Dims are followed from the scores back to the three arrays, so any order of them, any nesting of ``vmap`` and grouped or
repeated heads are one meaning. Masks that are known when a program is traced become ``causal`` or a window; all else
that is done to a score becomes an expression of it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from cute_ops.expressions.graph import Expression, operands_of
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.reads import BOOL, FLOAT
from cute_ops.fusion.analyse import Analysis, Found
from cute_ops.fusion.attention_arrays import (
    HALVES,
    Decoding,
    Ends,
    Part,
    Read,
    Sinks,
    at_end,
    before,
    cache_of,
    held,
    joined,
    multiplied,
    narrow,
    renumbered,
    unrepeated,
)
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.express import COLUMNS, ONE, Leaf
from cute_ops.fusion.graph import Graph as Program
from cute_ops.fusion.graph import Node, Shape
from cute_ops.fusion.lengths import Bound, lengths_of
from cute_ops.fusion.scores import (
    Known,
    Masks,
    Scores,
    hides_all,
    may_have_gradient,
    places_of,
    softmax_of,
    weights_of,
    without_weight,
)
from cute_ops.fusion.sinks import Column, Sink, softmax_with_sink, with_column
from cute_ops.fusion.softmaxes import READ_WEIGHTS, Quotient, division_of, may_be_scores, why_no_softmax

HEAD_SIZES = range(16, 257, 16)
MOST_ROWS = 64  # queries of a head of keys, of a step of decoding
# With the gradient of a bias of heads a step takes our op 0.67 of XLA's time at 8 x 512 with 16 heads of 64, 0.71 at
# 2 x 2048 with 16 of 128 (an H200); 0.97 at 64 x 144 with 8 heads, 1.08 at 1 x 1024 with 16, 1.26 at 256 x 64 with 8.
LEAST_LEARNED, LEAST_LEARNED_KEYS = 1 << 25, 128
_LEARNED = (
    "an array that its scores are computed from may have a gradient, which costs more than attention saves up to 2^25 "
    "scores: stop it where none is needed"
)
_OTHER_DTYPES = "its arrays or its result are not all of one 16-bit dtype"
_MOVES = ("transpose", "reshape", "cast")
_SHIFTS = (*_MOVES, "reduce", "broadcast")
_PRODUCTS = (*HALVES, "float32")  # float32: of operands cast from 16 bits, whose result is cast back


def attentions(
    graph: Program, analysis: Analysis, known: Known, stay: dict[Node, str] | None = None
) -> Iterator[Composite]:
    """The attentions of a program. Their operands are ``q``, ``k`` and ``v``, and what scores are computed from.
    ``stay`` gets, by the last product of each attention that no op computes, the reason.

    Attributes of each: ``parts``, a :class:`Part` for each of the three; ``scores``; ``reads``, a :class:`Read` for
    each other operand; ``out``, the sizes and the order of dims that bring ``[batch, sequence, heads, columns]`` to the
    product; ``views``, what brings that to the root; ``unknown``, whether a query without keys gets NaN.
    """
    readers = _Readers(graph, analysis)
    of_root = {root: found for found in analysis.found for root in found.roots if len(found.roots) < 3}
    quotients = {each.product: each for found in analysis.found if (each := division_of(found)) is not None}
    for node in graph.nodes:
        if node in readers.live and node.op == "contract" and node.dtype in _PRODUCTS:
            for side in (0, 1):
                root = node.args[side]
                column = None if root in of_root else with_column(root, of_root)
                if root in of_root or column is not None:
                    try:
                        if column is not None:
                            weights = _of_column(column, readers, node)
                        else:
                            weights = _weights(of_root[root], root, quotients.get(node))
                        yield _Attention(readers, weights, node, side, known).found()
                    except _No as error:
                        if stay is not None and str(error):
                            stay[node] = str(error)


class Weights(NamedTuple):
    """The weights of values.

    Attributes:
        found: the expression that computes them.
        z: the node of it whose softmax they are.
        quotient: what divides the product with the values by their sums; None of weights that were divided before.
        sink: one more score of each row; None for none.
        parts: the expressions that compute them.
    """

    found: Found
    z: int
    quotient: Quotient | None
    sink: Sink | None
    parts: tuple[Found, ...]


def _weights(found: Found, root: Node, quotient: Quotient | None) -> Weights:
    """The weights that a root is.

    Raises:
        _No: it is none.
    """
    expression, quotient, sink = found.expression, (quotient if len(found.roots) == 2 else None), None
    if len(found.roots) == 1:
        z = softmax_of(expression, expression.outputs[0])
        if z is None and (both := softmax_with_sink(expression, expression.outputs[0])) is not None:
            z, sink = both
    else:
        at = found.roots.index(root)
        z = None if quotient is None else weights_of(expression, expression.outputs[at], expression.outputs[1 - at])
    if z is None:
        raise _No(why_no_softmax(found))
    return Weights(found, z, quotient, sink, (found,))


def _of_column(column: Column, readers: _Readers, product: Node) -> Weights:
    """The weights of a softmax whose last column is dropped.

    Raises:
        _No: something else reads what the column is added to, or the softmax.
    """
    alone = readers.are(column.root, {product}, ("slice", "cast")) and readers.are(column.scores, {column.joined})
    inside = set(column.parts[1].region.nodes)
    _require(alone and readers.are(column.joined, inside, _SHIFTS), READ_WEIGHTS)
    return Weights(column.found, column.found.expression.outputs[0], None, column.sink, column.parts)


class _Readers:
    """The readers of a value of a program, through views of it.

    Attributes:
        live: the nodes that the outputs need.
        scores: the changes of scores that were found so far.
        graph: the program.
    """

    def __init__(self, graph: Program, analysis: Analysis) -> None:
        self.scores: dict[Hashable, Scores] = {}
        self.graph = graph
        self.live, self._plain, self._outputs = analysis.live, analysis.plain, set(graph.outputs)

    def are(self, node: Node, allowed: Collection[Node], through: Collection[str] = ()) -> bool:
        """Whether nothing else than these nodes reads a value, also by way of views and operations ``through``."""
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each in self._outputs:
                return False
            for user in each.users:
                if user in allowed or user not in self.live:
                    continue
                if user not in self._plain and user.op not in through:
                    return False
                waiting.append(user)
        return True

    def only(self, node: Node, why: str) -> Node:
        """The only node that reads a value as it is.

        Raises:
            _No: there are others, or the program returns the value.
        """
        users = [user for user in node.users if user in self.live]
        _require(len(users) == 1 and node not in self._outputs, why)
        return users[0]


class _No(Exception):
    """Our op does not compute this. The message says why if it is an attention; else it is empty."""


class _Attention:
    """One softmax, and the product that reads it.

    Rows of the scores are the dims of the softmax's rows. ``batch`` are those of the batch, ``of_query`` the one of
    queries, ``of_group`` and ``of_head`` those of heads that share keys, and of these groups; each may be absent.
    """

    def __init__(self, readers: _Readers, weights: Weights, product: Node, side: int, known: Known) -> None:
        found, z, self.quotient, self.sink, self.founds = weights
        self.readers, self.whole, self.product, self.side = readers, found, product, side
        self.known, self.rows, self.scores = known, found.rows, copy(found)
        changed = without_weight(found.expression, found.expression.outputs[0], z)
        self.scores.expression, self.z, self.has_zeros = changed
        self.scores.leaves = tuple(renumbered(leaf, found.rows) for leaf in found.leaves)

    def found(self) -> Composite:
        """The attention.

        Raises:
            _No: it is none that our op computes.
        """
        root, value = self.product.args[self.side], self.product.args[1 - self.side]
        behind = self._behind(root)
        _require(all(isinstance(size, int) for node in (root, value, self.product) for size in node.shape))
        _require(root.shape == (*self.rows, self.scores.n))
        acc, leaf = self._acc()
        contract, dims, factor, between = before(leaf.node)
        _require(contract.dtype in _PRODUCTS)
        chain = self._alone(leaf.node, between)
        self._follow(contract, dims, leaf)
        self._name_rows(acc)
        (queries, of_q), (keys, of_k) = (narrow(contract.args[i]) for i in (self.of_q, 1 - self.of_q))
        (value, of_v), views = narrow(value), self._views()
        result = (self.product, *views)[-1]
        values, rows = self._values(value)
        parts = {"q": self._queries(queries, contract), "k": self._keys(keys, contract), "v": values}
        if self.of_group is None and self.of_head is not None:
            parts = unrepeated(parts)
        _require({node.dtype for node in (queries, keys, value)} == {result.dtype} and of_v == 1, _OTHER_DTYPES)
        sizes = [parts[name].shape[3] for name in "qv"]
        _require(all(size in HEAD_SIZES for size in sizes), f"heads of {sizes[0]} columns have no kernel")
        scores = self._what_is_done(acc, (parts["q"].shape[1], parts["k"].shape[1]))
        scores = scores._replace(scale=scores.scale * factor * of_q * of_k)
        reads = [] if scores.expression is None else self._reads(scores)
        parts["q"], scores = _unscaled(parts["q"], scores, contract, self.readers)
        sinks = self._sinks()
        attrs: dict[str, Any] = {"parts": parts, "scores": scores, "reads": reads, "out": rows, "views": views}
        # Zeros in place of weights are those of a query without keys, too.
        unknown = sinks is None and not self.has_zeros and hides_all(scores, self.scores.leaves, self.known)
        attrs |= {"said": _said(scores, sinks), "sinks": sinks, "unknown": unknown}
        attrs["decoding"] = self._decoding(parts, scores, contract)
        nodes = (*chain, *self.scores.region.nodes, self.product, *views, *(x for f in behind for x in f.region.nodes))
        operands = _operands(parts, reads, sinks)
        return Composite("attention", operands, attrs, (result,), nodes, (*self.founds, *behind))

    def _behind(self, root: Node) -> tuple[Found, ...]:
        """The division behind the product, if there is one. Nothing else may read the weights."""
        readers = {self.product, *(() if self.quotient is None else self.whole.region.nodes)}
        alone = set(self.scores.region.roots) == set(self.whole.roots) and self.readers.are(root, readers)
        _require(alone, READ_WEIGHTS)
        if self.quotient is None:
            return ()
        self._require_quotient(self.quotient, root)
        return (self.quotient.found,)

    def _alone(self, node: Node, between: list[Node]) -> list[Node]:
        """The scores and what they are computed from. Nothing may read these but the softmax, which may subtract the
        maximum of scores in another order of dims.
        """
        chain, softmax = [node, *between], self.scores.region.nodes
        alone = self.readers.are(node, softmax, _SHIFTS)
        alone = alone and all(self.readers.are(x, {after, *softmax}, _SHIFTS) for after, x in pairwise(chain))
        _require(alone, "something else reads its scores")
        return chain

    def _require_quotient(self, quotient: Quotient, root: Node) -> None:
        """Require that the product is only read by a division of each row by the sum of its weights."""
        (sums,) = (each for each in self.whole.roots if each is not root)
        of_p, behind = self.product.attr[2][self.side], quotient.found.region.nodes
        (over,), of_v = self.product.attr[1 - self.side], self.product.attr[2][1 - self.side]
        rows = [i for i in range(len(self.rows)) if i not in of_p]
        columns = [COLUMNS for i, _ in enumerate(self.product.args[1 - self.side].shape) if i not in (over, *of_v)]
        ids = [*of_p, *(rows + columns if self.side == 0 else columns + rows)]
        alone = all(self.readers.are(node, behind, _MOVES) for node in (self.product, sums))
        _require(alone and set(quotient.found.region.roots) == set(quotient.found.roots))
        _require(sums.shape in (self.rows, (*self.rows, 1)) and quotient.divides(ids, sums))

    def _views(self) -> tuple[Node, ...]:
        """The division of the product, the cast of a float32 result to 16 bits, and the views before these, which
        nothing else reads.
        """
        divided = () if self.quotient is None else (*self.quotient.views, *self.quotient.found.roots)
        views = list[Node](divided)
        node = (self.product, *views)[-1]
        while node.dtype == "float32":
            node = self.readers.only(node, _OTHER_DTYPES)
            known = node.op in ("transpose", "reshape") or (node.op == "cast" and node.dtype in HALVES)
            _require(known, _OTHER_DTYPES)
            views.append(node)
        return tuple(views)

    # Whose dims the scores' are

    def _acc(self) -> tuple[int, Leaf]:
        """The operand that is the product of queries and keys."""
        used = sorted(operands_of(self.scores.expression, self.z))
        found = [(i, leaf) for i in used if may_be_scores(leaf := self.scores.leaves[i], self.rows)]
        _require(len(found) == 1)
        return found[0]

    def _follow(self, contract: Node, dims: tuple[int, ...], leaf: Leaf) -> None:
        """The place of each row of the scores in the product of queries and keys."""
        (left, right, batch), (a, b) = contract.attr, contract.args
        _require(len(left) == 1)
        free = [[i for i in range(len(x.shape)) if i not in (*over, *of_batch)]
                for x, over, of_batch in zip((a, b), (left, right), batch, strict=True)]  # fmt: skip
        sources = [("batch", i) for i in range(len(batch[0]))]
        sources += [("left", i) for i in free[0]] + [("right", i) for i in free[1]]
        at = {}
        for place, label in enumerate(leaf.labels):
            if label >= 0 or label == COLUMNS:
                at[label] = sources[dims[place]]
            else:
                _require(leaf.node.shape[place] == 1)
        _require(at[COLUMNS][0] != "batch")
        keys = at.pop(COLUMNS)
        self.key_axis = keys[1]
        self.of_q = 0 if keys[0] == "right" else 1
        _require(all(contract.args[1 - self.of_q].shape[i] == 1 for i in free[1 - self.of_q] if i != self.key_axis))
        p_batch = self.product.attr[2][self.side]
        over = self.product.attr[self.side]
        _require(over == (len(self.rows),))
        self.at: dict[int, int] = {}  # of each row: the place among the batch, or the dim of queries
        self.batch: list[int] = []
        self.queries: list[int] = []
        for i, size in enumerate(self.rows):
            if size == 1:
                continue
            _require(i in at)
            _require((i in p_batch) == (at[i][0] == "batch"))
            self.at[i] = at[i][1]
            (self.batch if i in p_batch else self.queries).append(i)
        _require(len(self.queries) <= 2)

    def _name_rows(self, acc: int) -> None:
        """Which row counts queries, which one heads that share keys, and which one of the batch groups of heads."""
        of_sink = self._rows_of_sink()
        counts = self._queries_among(acc, of_sink)
        groups = [i for i in self.queries if i != counts]
        self.of_query: int | None = counts
        self.of_group: int | None = groups[0] if groups else None
        last = self.batch[-1] if self.batch else None
        is_head = len(self.batch) > 1 or self.of_group is None or last in of_sink
        self.of_head = last if is_head else None
        self.lead = [i for i in self.batch if i != self.of_head]

    def _rows_of_sink(self) -> tuple[int, ...]:
        """The rows of the scores that an array of sinks has; these are heads."""
        if self.sink is None or self.sink.operand < 0:
            return ()
        leaf = self.scores.leaves[self.sink.operand]
        return leaf.labels if leaf.rows == self.rows else ()

    def _queries_among(self, acc: int, of_sink: tuple[int, ...]) -> int | None:
        """The row that counts queries; None where there is but one query.

        Of two rows outside the batch it is the one that masks depend on, else the one that the sink does not depend on,
        else the longer one.
        """
        if len(self.queries) < 2:
            return next((i for i in self.queries if i not in of_sink), None)
        others = (acc, -1 if self.sink is None else self.sink.operand)
        of_masks = {label for i, leaf in enumerate(self.scores.leaves) if i not in others for label in leaf.labels}
        outside = [i for i in self.queries if i not in of_sink]
        masked = [i for i in outside if i in of_masks]
        found = masked or (outside if of_sink else [])
        return found[0] if len(found) == 1 else max(self.queries, key=lambda i: self.rows[i])

    def _size(self, *rows: int | None) -> int:
        return prod(int(self.rows[i]) for i in rows if i is not None)

    # The arrays

    def _queries(self, node: Node, contract: Node) -> Part:
        rows = (*self.lead, self.of_query, self.of_head, self.of_group)
        heads = self._size(self.of_head, self.of_group)
        return self._rows_of_queries(node, contract, rows, (self._size(self.of_query), heads))

    def _rows_of_queries(self, node: Node, contract: Node, rows: Sequence[int | None], sizes: tuple[int, int]) -> Part:
        """Queries in an order of rows, so many and of so many heads."""
        (over,), batch = contract.attr[self.of_q], contract.attr[2][self.of_q]
        at = {i: batch[self.at[i]] if i in self.batch else self.at[i] for i in (*self.batch, *self.queries)}
        order = [at[i] for i in rows if i is not None]
        return self._part(node, [*order, over], (*sizes, node.shape[over]))

    def _keys(self, node: Node, contract: Node) -> Part:
        (over,), batch = contract.attr[1 - self.of_q], contract.attr[2][1 - self.of_q]
        order = [batch[self.at[i]] for i in self.lead] + [self.key_axis]
        order += [] if self.of_head is None else [batch[self.at[self.of_head]]]
        return self._part(node, [*order, over], (node.shape[self.key_axis], self._size(self.of_head), node.shape[over]))

    def _values(self, node: Node) -> tuple[Part, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The values, and the sizes and the order of dims that bring a result to the product's."""
        (over,), of_v = self.product.attr[1 - self.side], self.product.attr[2][1 - self.side]
        of_p = self.product.attr[2][self.side]
        free = [i for i in range(len(node.shape)) if i not in (over, *of_v)]
        _require(len(free) > 0)
        columns = max(free, key=lambda i: node.shape[i])
        _require(all(node.shape[i] == 1 for i in free if i != columns))
        order = [of_v[of_p.index(i)] for i in self.lead] + [over]
        order += [] if self.of_head is None else [of_v[of_p.index(self.of_head)]]
        heads = self._size(self.of_head)
        part = self._part(node, [*order, columns], (node.shape[over], heads, node.shape[columns]))
        rows = (*self.lead, self.of_query, self.of_head, self.of_group)
        return part, self._result(rows, int(node.shape[columns]))

    def _result(self, rows: Sequence[int | None], columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes and the order of dims that bring these rows of so many columns to the product."""
        # The product's dims without those of one element: batch, then free ones of both, in the order of its operands.
        queries = [i for i in range(len(self.rows)) if i in self.queries]
        after: list[Any] = [*queries, "columns"] if self.side == 0 else ["columns", *queries]
        result = [i for i in self.product.attr[2][self.side] if i in self.batch] + after
        ours: list[Any] = [i for i in rows if i is not None]
        sizes = (*(self._size(i) for i in ours), columns)
        ours.append("columns")
        return sizes, tuple(ours.index(each) for each in result)

    def _part(self, node: Node, order: list[int], shape: tuple[Any, ...]) -> Part:
        ones = [i for i in range(len(node.shape)) if i not in order]
        _require(all(node.shape[i] == 1 for i in ones))
        return Part(node, (*ones, *order), (self._size(*self.lead), *map(int, shape)))

    # A step of decoding

    def _decoding(self, parts: Mapping[str, Part], scores: Scores, contract: Node) -> Decoding | None:
        """The step of decoding that an attention is; None if it is none, or if its caches would have to be copied."""
        lengths = lengths_of(self.scores, scores, self.of_query, self.readers.graph, self.known)
        if lengths is None or prod(parts["q"].shape[1:3]) > MOST_ROWS * parts["k"].shape[2]:
            return None
        heads = [] if self.of_head is None else [self.of_head]
        rank = len(self.lead) + len(heads) + 2
        at = held(parts["k"])[1][-rank:]
        by_place = sorted(range(len(self.lead)), key=at.__getitem__)
        lead = [self.lead[i] for i in by_place]
        own = parts["k"].shape[2] == self._size(self.of_head)
        ends = [each and self._ends(each, lead, own) for each in (lengths.end, lengths.begin)]
        if ends[0] is None or (ends[1] is None) is not (lengths.begin is None):
            return None
        for heads_first in self._layouts(ends):
            caches = [cache_of(parts[name], rank, by_place, heads_first) for name in "kv"]
            if caches[0] is not None and caches[1] is not None:
                rows = (*lead, self.of_head, self.of_group, self.of_query)
                q = self._rows_of_queries(parts["q"].node, contract, rows, (1, prod(parts["q"].shape[1:3])))
                made = {"q": q, "k": caches[0], "v": caches[1]}
                out = self._result(rows, parts["v"].shape[3])
                return Decoding(made, heads_first, lengths, self._size(self.of_query), ends[0], ends[1], out)
        return None

    def _layouts(self, ends: Sequence[Ends | None]) -> list[bool]:
        """In which layouts the op takes the caches: with heads behind keys (False), with heads before them (True).

        Heads behind keys share their numbers of keys. Heads before keys become examples, which share their sinks.
        """
        by_head = any(end is not None and end.sizes[-1] != 1 for end in ends)
        behind, before = not by_head, self.of_head is not None and self.sink is None
        return [layout for layout, fits in ((False, behind), (True, before)) if fits]

    def _ends(self, bound: Bound, lead: Sequence[int], own: bool) -> Ends | None:
        """A number of keys by batch and head of keys; None if it depends on something else. ``own``: whether each head
        of the scores has its own keys.
        """
        if bound.array is None:
            return Ends(None, (), (), (*map(self._size, lead), 1), bound.constant, bound.step)
        node, labels = bound.array
        at = {label: i for i, label in enumerate(labels) if label != ONE}
        rows = [*lead, *([self.of_head] if own and self.of_head is not None else [])]
        if not at.keys() <= set(rows):
            return None
        order = [at[row] for row in rows if row in at]
        shape = [self._size(row) if row in at else 1 for row in (*lead, self.of_head)]
        sizes = (*map(self._size, lead), shape[-1])
        return Ends(node, at_end(order, len(node.shape)), tuple(shape), sizes, *bound[1:])

    # The scores

    def _what_is_done(self, acc: int, sizes: tuple[int, int]) -> Scores:
        """The changes of scores, which are looked up: layers that share a mask have the same."""
        masks = ((leaf.node, leaf.labels) for i, leaf in enumerate(self.scores.leaves) if i != acc)
        key = (self.scores.expression, self.z, acc, self.rows, self.of_query, sizes, *masks)
        if key not in self.readers.scores:
            self.readers.scores[key] = Masks(self.scores, self.of_query, self.known).scores(self.z, acc, sizes)
        return self.readers.scores[key]

    def _sinks(self) -> Sinks | None:
        """The sinks of heads; None if there are none."""
        if self.sink is None:
            return None
        heads = [i for i in (self.of_head, self.of_group) if i is not None]
        sizes = tuple(map(self._size, heads))
        if self.sink.operand < 0:
            return Sinks(None, (), (), sizes, self.sink.number)
        leaf = self.scores.leaves[self.sink.operand]
        rank = len(leaf.node.shape)
        at = {label: i for i, (label, size) in enumerate(zip(leaf.labels, leaf.node.shape, strict=True)) if size != 1}
        if leaf.rows != self.rows and self._joins(leaf.rows, [*at], heads):
            return Sinks(leaf.node, at_end([*at.values()], rank), sizes, sizes, 0.0)
        _require(leaf.rows == self.rows and not leaf.packed and at.keys() <= set(heads), "its sinks are not of heads")
        shape = tuple(self._size(i) if i in at else 1 for i in heads)
        return Sinks(leaf.node, at_end([at[i] for i in heads if i in at], rank), shape, sizes, 0.0)

    def _joins(self, rows: Shape, labels: list[int], heads: list[int]) -> bool:
        """Whether an array's only dim among other rows has all heads, of which the scores have two dims."""
        dims = joined(rows, self.rows) if len(labels) == 1 and labels[0] >= 0 else []
        return bool(dims) and dims[labels[0]] == heads

    def _reads(self, scores: Scores) -> list[Read]:
        """The arrays that scores are computed from."""
        assert scores.expression is not None
        nodes = scores.expression.nodes
        waiting, seen = [scores.output], set[int]()
        while waiting:
            i = waiting.pop()
            primitive = PRIMITIVES.get(nodes[i].primitive)
            _require(
                not (primitive and (primitive.reduces or primitive.grouped))
                and nodes[i].primitive not in ("n", "column")
            )
            waiting += [arg for arg in nodes[i].args if arg not in seen]
            seen.update(nodes[i].args)
        used, smooth = operands_of(scores.expression, scores.output), _smooth(scores.expression, scores.output)
        return [self._read(i, i in smooth) for i in sorted(used) if i != scores.acc]

    def _rows_of_read(self, leaf: Leaf) -> tuple[tuple[int, ...], ...]:
        """Which dims of an array's rows and columns are those of batch, head, query and key.

        A program may split heads from the batch for a mask alone.
        """
        own = [[i] for i, _ in enumerate(self.rows)] if leaf.rows == self.rows else joined(self.rows, leaf.rows)
        _require(len(own) == len(self.rows))
        of_rows = (self.lead, (self.of_head, self.of_group), (self.of_query,))
        return (*(tuple(axis for i in each if i is not None for axis in own[i]) for each in of_rows), (len(leaf.rows),))

    def _read(self, operand: int, smooth: bool) -> Read:
        """An array that scores are computed from, by batch, head, query and key. ``smooth``: it may have a gradient."""
        leaf = self.scores.leaves[operand]
        groups = self._rows_of_read(leaf)
        _require(not leaf.packed)
        learned = smooth and may_have_gradient(leaf.node, self.known, self.readers.graph.fixed)
        _require(not learned or self._has_many_scores(), _LEARNED)
        rank = len(leaf.rows)
        shape = places_of(leaf, rank)
        whole: tuple[Any, ...] = (*leaf.rows, self.scores.n)
        alone = all(size == 1 for size in shape)  # a number, which becomes one of each example
        sizes, dims, order, merged = list(shape), list[int](), list[int](), list[int]()
        for dim, axes in enumerate(groups):
            if any(shape[i] != 1 for i in axes) or (alone and dim == 0):
                dims.append(dim)
                order += axes
                merged.append(prod(int(whole[i]) for i in axes))
                for i in axes:
                    sizes[i] = whole[i]
        others = [i for i in range(rank + 1) if i not in order]
        _require(all(shape[i] == 1 for i in others))
        kind = BOOL if leaf.node.dtype == "bool" else FLOAT
        return Read(operand, leaf.node, kind, shape, tuple(sizes), (*others, *order), tuple(merged), tuple(dims))

    def _has_many_scores(self) -> bool:
        """Whether attention saves more than the gradient of what scores are computed from costs."""
        keys = self.scores.n
        return (
            isinstance(keys, int) and keys >= LEAST_LEARNED_KEYS and prod(map(int, self.rows)) * keys >= LEAST_LEARNED
        )


def _smooth(expression: Expression, i: int) -> set[int]:
    """The operands that a node is computed from other than by comparisons, which have no gradient."""
    found, waiting, seen = set[int](), [i], {i}
    while waiting:
        k = waiting.pop()
        node = expression.nodes[k]
        if expression.kinds[k].dtype == "bool":
            continue
        if node.primitive == "operand":
            found.add(node.operand)
        waiting += [arg for arg in node.args if arg not in seen]
        seen.update(node.args)
    return found


def _operands(parts: Mapping[str, Part], reads: Sequence[Read], sinks: Sinks | None) -> dict[str, Node]:
    """The arrays of an attention by name."""
    operands = {name: part.node for name, part in parts.items()}
    operands |= {f"captured{i}": read.node for i, read in enumerate(reads)}
    return operands if sinks is None or sinks.node is None else {**operands, "sinks": sinks.node}


def _said(scores: Scores, sinks: Sinks | None) -> str:
    """The report's text on the scores, with the sinks' value where it is a constant."""
    number = "" if sinks is None or sinks.node is not None else f"sinks={sinks.number:.6g}"
    return ", ".join(filter(None, [scores.said, number]))


def _require(fits: bool, why: str = "") -> None:
    if not fits:
        raise _No(why)


def _unscaled(q: Part, scores: Scores, product: Node, readers: _Readers) -> tuple[Part, Scores]:
    """Queries before they were multiplied by a number that only these scores read, and the scores with that."""
    found = multiplied(q.node) if scores.expression is None and readers.are(q.node, {product}) else None
    return (q, scores) if found is None else (q._replace(node=found[0]), scores._replace(scale=scores.scale * found[1]))
