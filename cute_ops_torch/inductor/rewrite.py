"""Replaces what was found in a graph of Dynamo by ops, where that is safe and the choice says so.

A part is computed where its last operand is known. Nothing may have been written to its operands or results by then or
later, all of it runs in one mode, and no random number or write in place changes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from cute_ops.fusion.analyse import Analysis, Found
from cute_ops.fusion.choose import Choice
from cute_ops.fusion.composite import Composite, rotations
from cute_ops.fusion.graph import Graph
from cute_ops.fusion.graph import Node as Value
from cute_ops.fusion.scores import Known
from cute_ops.fusion.settle import Expressions, Layers, settle
from cute_ops.garbage import without_collections
from cute_ops_torch.inductor.dynamo import DynamoFront, Holder, sweep
from cute_ops_torch.inductor.effects import example, storage_of, written_by
from cute_ops_torch.inductor.emit import Call, Emitter, Refused
from cute_ops_torch.inductor.fx import hint
from cute_ops_torch.inductor.masked_attention import has_dense_mask
from cute_ops_torch.inductor.strides import lie_alike, relaid, relay, same_sizes


class Choosing(Protocol):
    """Chooses ops for expressions: :class:`Chooser <cute_ops_torch.inductor.choice.Chooser>` in programs."""

    def choose(self, found: Found, products: list[int], device: str) -> Choice:
        """The choice for an expression on a device: its products that may take an epilogue are given."""

    def judge(self, call: Call) -> float | None:
        """The microseconds that a call saves; raises :class:`Refused`."""

    def choose_composite(self, found: Composite, device: str) -> Choice:
        """The choice for a part of a layer on a device."""

    def judge_composite(self, name: str, call: Call) -> float | None:
        """The microseconds that the call of a part of a layer saves; raises :class:`Refused`."""


class Reading(Protocol):
    """A graph that was read: what a front end knows of its nodes."""

    graph: Graph
    values: dict[Node, Any]
    barriers: list[int]
    written: dict[int, list[int]]

    @property
    def known(self) -> Known | None:
        """The function that gives the array of a value which follows from sizes alone; None if attention is not asked
        for.
        """

    @property
    def holders(self) -> Mapping[Value, list[Holder]]:
        """By value the nodes that hold it."""

    @property
    def mode(self) -> Mapping[Node, int]:
        """By node the mode in which it runs."""

    def stable(self, holder: Holder) -> bool:
        """Whether nothing writes to what a node holds, from then on."""

    def device_of(self, value: Value) -> str:
        """The type of the device that a value lies on; empty where no node holds it."""


class Part(NamedTuple):
    """An expression that was found, what became of it, and the microseconds that this is expected to save."""

    found: Found | Composite
    choice: Choice
    gain: float | None = None


class Rewritten(NamedTuple):
    """The result of the pass on a graph.

    Attributes:
        parts: the expressions that were found.
        analysis: what else was found.
        front: the graph as it was.
        stay: by the last product of an attention that no op computes the reason.
    """

    parts: list[Part]
    analysis: Analysis
    front: Reading
    stay: Mapping[Value, str]


class Unreadable(Exception):
    """A graph cannot be read, and has not changed; says why."""


def rewrite(module: GraphModule, choosing: Choosing, exact: bool = False) -> Rewritten:
    """Replace parts of a graph, which changes.

    Raises:
        Unreadable: it does what no front end expects.
    """
    try:
        with without_collections():
            front = DynamoFront(module, exact)
            analysis, layers, expressions, stay = chosen_in(front, choosing, exact)
            if whole := _left_whole(front, layers):
                front = DynamoFront(module, exact, whole)
                analysis, layers, expressions, stay = chosen_in(front, choosing, exact)
            layers = [(_of_torch(found, front), choice) for found, choice in layers]
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error
    work, parts = Rewriting(module, front, choosing), []
    covered: set[Found] = set()
    inside: set[Value] = set()
    for composite, choice in layers:
        part = work.part(composite, choice)
        parts.append(part)
        if part.choice.kind:
            covered.update(composite.found)
            inside.update(composite.nodes)
    for rotation in rotations(analysis):
        if rotation.roots[0] not in inside:
            parts.append(work.part(rotation, choosing.choose_composite(rotation, front.device_of(rotation.roots[0]))))
    for found, choice in expressions:
        if found not in covered:
            if choice.product >= 0 and found.leaves[choice.product].node in inside:
                choice = choosing.choose(found, [], front.device_of(found.roots[0]))
            parts.append(work.part(found, choice))
    work.finish()
    return Rewritten(parts, analysis, front, stay)


Chosen = tuple[Analysis, Layers[Choice], Expressions[Choice], dict[Value, str]]


def _left_whole(front: DynamoFront, layers: Layers[Choice]) -> list[Node]:
    """The calls of torch's attention that were read as what they compute, and that ours does not take the place of: it
    does not compute them, or has to read a mask of queries and keys, as torch's kernels do.
    """
    ours = (found for found, choice in layers if choice.kind and found.name == "attention")
    replaced = {found.roots[0] for found in ours if not has_dense_mask(found.attrs["reads"])}
    return [node for value, node in front.attentions.items() if value not in replaced]


def _of_torch(found: Composite, front: DynamoFront) -> Composite:
    """A call of torch's attention gives zeros to a query without keys, as ours does."""
    called = found.roots[0] in front.attentions
    return found._replace(attrs={**found.attrs, "unknown": False}) if called else found


def chosen_in(front: Reading, choosing: Choosing, exact: bool) -> Chosen:
    """The regions found in a graph, and their replacements."""

    def layer(found: Composite) -> Choice:
        return choosing.choose_composite(found, front.device_of(found.roots[0]))

    def expressions(analysis: Analysis, run: Sequence[Composite]) -> list[tuple[Found, Choice]]:
        return [
            (found, choosing.choose(found, analysis.products(found), front.device_of(found.roots[0])))
            for found in analysis.found
        ]

    with without_collections():
        return settle(front.graph, front.known, exact, layer, expressions)


class Rewriting:
    """Puts ops into a graph.

    Attributes:
        emitter: what makes nodes of such a graph.
    """

    emitter: type[Emitter] = Emitter

    def __init__(self, module: GraphModule, front: Reading, choosing: Choosing) -> None:
        self.graph, self.front, self.choosing = module.graph, front, choosing
        self.nodes = list(module.graph.nodes)
        self.instead: dict[Node, Node] = {}
        self.moved = False
        self._trained = reached_by_gradients(module.graph)

    def part(self, found: Found | Composite, choice: Choice) -> Part:
        """Replace a part of the graph if that is chosen and safe; returns the part with its choice, or with why not."""
        if not choice.kind:
            return Part(found, choice)
        try:
            return Part(found, choice, self.replace(found, choice))
        except Refused as error:
            return Part(found, Choice("", why=str(error)))

    def replace(self, found: Found | Composite, choice: Choice) -> float | None:
        """Put an op in the place of a part; returns the microseconds that it is expected to save.

        Raises:
            Refused: that would not be safe.
        """
        roots = [self._holders(root) for root in found.roots]
        if self._gives_zeros(found, choice, roots):
            raise Refused("an operand would get a gradient of zeros, as only a detached result reads it")
        place = self._place(found, choice, min(holder.since for each in roots for holder in each))

        def emitter(order: tuple[int, ...] = ()) -> Emitter:
            return self.emitter(self.graph, self.nodes[place], lambda value: self._held(value, place), order)

        if isinstance(found, Composite):
            emits = emitter()
            made, gain = emits.emit_composite(found, self.choosing.judge_composite)
        else:
            order = _order(found, [example(holders[0].node) for holders in roots]) if choice.product < 0 else ()
            emits = emitter(order)
            made, gain = emits.emit(found, choice, self.choosing.judge)
        made = [emits.as_held(new, holders[0].node) for holders, new in zip(roots, made, strict=True)]
        olds = [holders[0].node for holders in roots]
        wrong = next(filter(None, map(_differs, made, olds)), "")
        others = None if wrong else self._relaid(roots, made)
        if others is None:
            emits.undo()
            raise Refused(wrong or "its result is not laid out row by row")
        gain = self.settled(found, choice, emits, roots, made, gain)
        self._relay(others)
        for holders, new in zip(roots, made, strict=True):
            for holder in holders:
                self.instead[holder.node] = here = emits.as_held(new, holder.node)
                holder.node.replace_all_uses_with(here)
        return gain

    def _gives_zeros(self, found: Found | Composite, choice: Choice, roots: list[list[Holder]]) -> bool:
        """Whether an operand that is trained would get a gradient where the program has none: an op gives all its
        operands one if any of its results has one.
        """
        results = {holder.node for each in roots for holder in each if _requires_grad(holder.node)}
        live = [node for node in results if node in self._trained]
        if len(live) in (0, len(results)):
            return False
        operands = [self.front.holders.get(value, ()) for value in operands_of(found, choice)]
        ends, seen = {holder.node for each in operands for holder in each}, set[Node]()
        while live:
            if (node := live.pop()) not in seen:
                seen.add(node)
                live += () if node in ends else node.all_input_nodes
        wanted = [nodes for each in operands if (nodes := [h.node for h in each if _requires_grad(h.node)])]
        return any(seen.isdisjoint(nodes) for nodes in wanted)

    def _relaid(self, roots: list[list[Holder]], made: list[Node]) -> dict[Node, Any] | None:
        """The values of nodes that lie otherwise once new tensors stand for the results; None where that may not be."""
        instead = {
            holder.node: example(new)
            for holders, new in zip(roots, made, strict=True) if not lie_alike(example(new), example(holders[0].node))
            for holder in holders
        }  # fmt: skip
        return relaid(self.graph, instead) if instead else {}

    def _relay(self, values: Mapping[Node, Any]) -> None:
        written = self.front.written
        for node, value in values.items() if written else ():
            if places := written.get(storage_of(example(node))):
                written[storage_of(value)] = places
        relay(values)

    def settled(
        self, found: Found | Composite, choice: Choice, emits: Emitter, roots: list[list[Holder]], made: list[Node],
        gain: float | None,
    ) -> float | None:  # fmt: skip
        """The time that a part is expected to save, now that its nodes exist beside those that they replace.

        Raises:
            Refused: the part is to stay as it is.
        """
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

    def _place(self, found: Found | Composite, choice: Choice, first: int) -> int:
        """The node before which an expression is computed: the first node of it that comes after all operands."""
        last = max((self._known(value) for value in operands_of(found, choice)), default=-1)
        nodes = found.nodes if isinstance(found, Composite) else found.region.nodes
        inside = [holder for node in nodes for holder in self.front.holders.get(node, ())]
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


def reached_by_gradients(graph: FxGraph) -> set[Node]:
    """The nodes of Dynamo's graph that gradients of its outputs reach, or whose values are written to others."""
    reached = set[Node]()
    for node in reversed(graph.nodes):
        differentiable = not isinstance(example(node), torch.Tensor) or _requires_grad(node)
        if node.op == "output" or written_by(node) or (differentiable and not reached.isdisjoint(node.users)):
            reached.add(node)
    return reached


def _requires_grad(node: Node) -> bool:
    value = example(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def operands_of(found: Found | Composite, choice: Choice) -> Iterable[Value]:
    """The inputs of a part; for a product that it computes, the product's operands."""
    if isinstance(found, Composite):
        yield from found.operands.values()
        return
    for i, leaf in enumerate(found.leaves):
        if i == choice.product:
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


def _differs(new: Node, old: Node) -> str:
    """In what a new tensor differs from the one that the program has, besides strides; empty if in nothing."""
    made, was = example(new), example(old)
    if not isinstance(was, torch.Tensor):
        return "the program has no tensor of its result"
    for what in ("dtype", "device"):
        if getattr(made, what) != getattr(was, what):
            return f"its result has the {what} {getattr(was, what)}, not {getattr(made, what)}"
    if not same_sizes(made.shape, was.shape):
        return f"its result has the shape {tuple(was.shape)}, not {tuple(made.shape)}"
    return ""
