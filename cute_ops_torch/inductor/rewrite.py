"""Replaces what was found in a graph of Dynamo by ops, where that is safe and the choice says so.

A part is computed where its last operand is known. Nothing may have been written to its operands or results by then or
later, all of it runs in one mode, and no random number or write in place changes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule, Node

from cute_ops.fusion.analyse import Analysis, Found, analyse
from cute_ops.fusion.choose import Choice
from cute_ops.fusion.graph import Node as Value
from cute_ops_torch.inductor.dynamo import DynamoFront, Holder, example, sweep
from cute_ops_torch.inductor.emit import Call, Emitter, Refused
from cute_ops_torch.inductor.fx import hint


class Choosing(Protocol):
    """What becomes of expressions: :class:`Chooser <cute_ops_torch.inductor.choice.Chooser>` in programs."""

    def choose(self, found: Found, products: list[int], device: str) -> Choice:
        """What becomes of an expression on a device: its products that may take an epilogue are given."""

    def judge(self, call: Call) -> float | None:
        """The microseconds that a call saves; raises :class:`Refused`."""


class Part(NamedTuple):
    """An expression that was found, what became of it, and the microseconds that this is expected to save."""

    found: Found
    choice: Choice
    gain: float | None = None


class Rewritten(NamedTuple):
    """What became of a graph.

    Attributes:
        parts: the expressions that were found.
        analysis: what else was found.
        front: the graph as it was.
    """

    parts: list[Part]
    analysis: Analysis
    front: DynamoFront


class Unreadable(Exception):
    """A graph cannot be read, and has not changed; says why."""


def rewrite(module: GraphModule, choosing: Choosing, exact: bool = False) -> Rewritten:
    """Replace parts of a graph, which changes.

    Raises:
        Unreadable: it does what no front end expects.
    """
    try:
        front = DynamoFront(module, exact)
        analysis, chosen = _chosen(front, choosing, exact)
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    work, parts = _Rewriting(module, front, choosing), []
    for found, choice in chosen:
        gain = None
        if choice.kind:
            try:
                gain = work.replace(found, choice)
            except Refused as error:
                choice = Choice("", why=str(error))
        parts.append(Part(found, choice, gain))
    work.finish()
    return Rewritten(parts, analysis, front)


def _chosen(front: DynamoFront, choosing: Choosing, exact: bool) -> tuple[Analysis, list[tuple[Found, Choice]]]:
    """What is found in a graph, and what each expression becomes."""
    whole: set[Value] = set()
    while True:
        analysis = analyse(front.graph, exact=exact, whole=whole)
        chosen = [
            (found, choosing.choose(found, analysis.products(found), front.device_of(found.roots[0])))
            for found in analysis.found
        ]
        apart = {node for found, choice in chosen if not choice.kind for node in _splitting(found)} - whole
        if not apart:
            return analysis, chosen
        whole |= apart


def _splitting(found: Found) -> set[Value]:
    """The rotations in a region that stays because of them: without them the rest may be an expression."""
    alone = len(found.region.nodes) == 1
    return {
        node for node in found.region.nodes if node.op == "primitive" and isinstance(node.attr, tuple) and not alone
    }


class _Rewriting:
    def __init__(self, module: GraphModule, front: DynamoFront, choosing: Choosing) -> None:
        self.graph, self.front, self.choosing = module.graph, front, choosing
        self.nodes = list(module.graph.nodes)
        self.instead: dict[Node, Node] = {}
        self.moved = False

    def replace(self, found: Found, choice: Choice) -> float | None:
        """Put an op in the place of an expression; returns the microseconds that it is expected to save.

        Raises:
            Refused: that would not be safe.
        """
        roots = [self._holders(root) for root in found.roots]
        place = self._place(found, choice, min(holder.since for each in roots for holder in each))
        order = _order(found, [example(holders[0].node) for holders in roots]) if choice.kind != "linear" else ()
        emitter = Emitter(self.graph, self.nodes[place], lambda value: self._held(value, place), order)
        made, gain = emitter.emit(found, choice, self.choosing.judge)
        for root, holders, new in zip(found.roots, roots, made, strict=True):
            if wrong := _differs(new, holders[0].node, root):
                emitter.undo()
                raise Refused(wrong)
        for holders, new in zip(roots, made, strict=True):
            for holder in holders:
                self.instead[holder.node] = new
                holder.node.replace_all_uses_with(new)
        return gain

    def finish(self) -> None:
        """Sort the graph again where that is needed, and remove what nothing reads any more."""
        if self.moved:
            from torch._inductor.pattern_matcher import stable_topological_sort  # Inductor's neighbours, imported late

            stable_topological_sort(self.graph)
        sweep(self.graph)

    def _holders(self, root: Value) -> list[Holder]:
        """The nodes whose results an op will compute.

        Raises:
            Refused: there is none, or it is written to.
        """
        holders = self.front.holders.get(root, [])
        if not holders:
            raise Refused("the program has no tensor of its result")
        if not all(map(self.front.stable, holders)):
            raise Refused("its result is written to in place")
        # Others that only pass the first one on read the new one through it.
        first = holders[0].node
        return [each for each in holders if each.node is first or first not in each.node.all_input_nodes]

    def _held(self, value: Value, place: int) -> Node | None:
        """The node that holds a value at a place.

        Raises:
            Refused: it is written to later.
        """
        holders = [each for each in self.front.holders.get(value, ()) if each.since < place]
        if not holders:
            return None
        for holder in holders:
            if self.front.stable(holder):
                return self.instead.get(holder.node, holder.node)
        raise Refused("an operand is written to in place")

    def _place(self, found: Found, choice: Choice, first: int) -> int:
        """Where an expression is computed: before the first node of it that comes after all operands."""
        last = max((self._known(value) for value in _operands(found, choice)), default=-1)
        inside = [holder for node in found.region.nodes for holder in self.front.holders.get(node, ())]
        modes = {self.front.mode[holder.node] for holder in inside}
        if len(modes) > 1:
            raise Refused("it is computed in several modes")
        later = [holder.since for holder in inside if holder.since > last]
        if not later:
            raise Refused("its results are known before its operands")
        place = min(later)
        if first < place:
            if any(first <= barrier < place for barrier in self.front.barriers):
                raise Refused("a random number or a write in place stands between its results")
            self.moved = True
        return place

    def _known(self, value: Value) -> int:
        """The place at which a value is known."""
        holders = self.front.holders.get(value)
        if holders:
            return min(holder.since for holder in holders)
        return max((self._known(arg) for arg in value.args), default=-1)


def _operands(found: Found, choice: Choice) -> Iterable[Value]:
    """What an expression reads; of a product that it computes, the product's operands."""
    for i, leaf in enumerate(found.leaves):
        if choice.kind == "linear" and i == choice.product:
            yield from leaf.node.args
        else:
            yield leaf.node


def _order(found: Found, results: list[Any]) -> tuple[int, ...]:
    """The order of the leading dims in which results lie row by row; empty for the usual one, or none that all have."""
    rank, orders = len(found.rows), set()
    for result in results:
        if not isinstance(result, torch.Tensor) or result.ndim != rank + 1 or result.stride(-1) != 1:
            return ()
        descending = [-hint(stride) for stride in result.stride()]
        orders.add(tuple(sorted(range(rank), key=descending.__getitem__)))
    order = orders.pop() if len(orders) == 1 else ()
    return () if order == tuple(range(rank)) else order


def _differs(new: Node, old: Node, root: Value) -> str:
    """In what a new tensor differs from the one that the program has; empty if in nothing."""
    made, was = example(new), example(old)
    if not isinstance(was, torch.Tensor):
        return "the program has no tensor of its result"
    for what in ("dtype", "device"):
        if getattr(made, what) != getattr(was, what):
            return f"its result has the {what} {getattr(was, what)}, not {getattr(made, what)}"
    if not _same(made.shape, was.shape):
        return f"its result has the shape {tuple(was.shape)}, not {tuple(made.shape)}"
    strides = zip(made.stride(), was.stride(), was.shape, strict=True)
    if any(not _same([a], [b]) for a, b, size in strides if not (isinstance(size, int) and size == 1)):
        return "its result is not laid out row by row"
    return ""


def _same(a: Any, b: Any) -> bool:
    """Whether sizes are the same numbers or the same symbols; nothing is guarded."""
    return [_text(each) for each in a] == [_text(each) for each in b]


def _text(size: Any) -> str:
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)
