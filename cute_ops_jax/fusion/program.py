"""A jaxpr of which parts run on our ops: what is found, what is replaced, and in which order all of it runs.

Values are computed on demand, so what only a replaced part read is not computed. Each equation that is not replaced
runs as it stands, with its own derivative, sharding and effects.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops.expressions.reference import REFERENCE
from cute_ops.fusion.analyse import Analysis, Found
from cute_ops.fusion.analyse import Call as Named
from cute_ops.fusion.choose import Choice, choose
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.graph import Node
from cute_ops.fusion.own import Meanings
from cute_ops.fusion.region import live_nodes
from cute_ops.fusion.settle import settle
from cute_ops.fusion.shifts import is_without_effect
from cute_ops_jax import _compat
from cute_ops_jax._compat import ClosedJaxpr
from cute_ops_jax.distributed.explicit import as_typed
from cute_ops_jax.fusion.bodies import Bodies, bodies_of
from cute_ops_jax.fusion.calls import Call, call_of, call_of_named
from cute_ops_jax.fusion.front import Front, Outside, Step, Value
from cute_ops_jax.fusion.known import Input, KnownArrays
from cute_ops_jax.fusion.layers import call_of_layer, decoding_of
from cute_ops_jax.fusion.lookups import Lookup, lookup_of
from cute_ops_jax.fusion.losses import picked
from cute_ops_jax.fusion.policies import NAME, Policy, answers_of, with_answers
from cute_ops_jax.primitive.vjp import labelled

NOTHING: Mapping[int, Input] = {}
NONE = Meanings(())


class Part(NamedTuple):
    """An expression that was found, another op or a part of a layer, and what became of it."""

    found: Found | Named | Composite
    choice: Choice
    call: Call | None

    @property
    def kind(self) -> str:
        return self.choice.kind


class _Waits(Exception):
    """A part waits for itself."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.part = part


class Program:
    """A function of a jaxpr's inputs that returns its outputs.

    Attributes:
        parts: the expressions that were found.
        analysis: what else was found.
        bodies: the programs of equations with jaxprs of their own, such as scans.
        stay: the last products of attentions that stay, and why.
        lookups: what runs in place of gathers of a table's rows.
        known: arrays that are known when the program is traced.
    """

    def __init__(
        self, closed: ClosedJaxpr, exact: bool = False, known: Mapping[int, Input] = NOTHING, *, own: Meanings = NONE,
        outside: Outside | None = None,
    ) -> None:  # fmt: skip
        self.closed, self.exact, self._inputs, self._own = closed, exact, known, own
        self._labels: dict[int, str] = {}  # by id of the parts of which a policy saves something
        whole: set[int] = set()
        first = Front(closed, exact=exact, outside=outside)
        passed = self._let_through(first) if first.stops else set[int]()
        self.parts: list[Part] = []
        while True:
            self.front = Front(closed, whole, passed, exact, outside=outside) if whole else first
            self._find()
            self._order = self._in_order()
            # A call with a derivative of its own is kept whole unless expressions compute all of it.
            kept = {id(unit.call) for unit in self._order if isinstance(unit, Step) and unit.call is not None}
            if not kept:
                break
            whole |= kept
        self._open = self._opened(passed)
        needed = set(map(id, self._order))
        self.parts = [part for part in self.parts if part.call is None or id(part) in needed]
        self.bodies: dict[int, Bodies] = {}
        self.lookups: dict[int, Lookup] = {}
        for unit in self._order:
            if not isinstance(unit, Step) or self.front.is_apart(unit.equation):
                continue
            if (made := bodies_of(unit.equation, partial(self._inner, unit.inputs))) is not None:
                self.bodies[id(unit)] = made
            elif (lookup := lookup_of(unit.equation)) is not None:
                self.lookups[id(unit)] = lookup

    def _inner(self, given: Sequence[Any], closed: ClosedJaxpr, inputs: Mapping[int, int]) -> Program:
        """The program of a body; ``inputs``: of its inputs those that are inputs of the equation, by number."""
        known = {i: partial(self.known.of_value, given[k]) for i, k in inputs.items()}
        values = {i: given[k].node for i, k in inputs.items() if isinstance(given[k], Value)}
        numbers = {i: given[k] for i, k in inputs.items() if not isinstance(given[k], Value)}
        outside = Outside(self.front.graph, values, self.known, numbers)
        return Program(closed, self.exact, known, own=self._own, outside=outside)

    @property
    def changed(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._replaced or self.lookups) or any(body.changed for body in self.bodies.values())

    def __call__(self, *args: Any) -> list[Any]:
        made: dict[Any, Any] = {}

        def read(value: Any) -> Any:
            if not isinstance(value, Value):
                return value
            if value.node in self._replaced or self._is_view(value.node):
                return made[value.node]
            if value.step is not None:
                return made[id(value.step), value.index]
            return args[value.index] if value.array is None else value.array

        def of_node(node: Node) -> Any:
            value = self.front.value_of(node)
            return made[node] if value is None else read(value)

        for unit in self._order:
            if isinstance(unit, Step):
                inputs = [read(value) for value in unit.inputs]
                body, lookup = self.bodies.get(id(unit)), self.lookups.get(id(unit))
                if lookup is not None:
                    outputs = lookup(inputs)
                elif id(unit) in self._open:
                    outputs = inputs
                else:
                    outputs = body.bind(inputs) if body and body.changed else _compat.bind(unit.equation, inputs)
                made.update({(id(unit), i): out for i, out in enumerate(outputs)})
            elif isinstance(unit, Part):
                assert unit.call is not None
                given: list[Any] = [
                    tuple(map(of_node, nodes)) if is_product else of_node(nodes[0])
                    for is_product, nodes in _reads(unit)
                ]
                with labelled(self._labels.get(id(unit), "")):
                    outs = unit.call(given)
                made.update((root, self._placed(root, out)) for root, out in zip(unit.found.roots, outs, strict=True))
            else:
                made[unit] = self._of_primitives(unit, [of_node(arg) for arg in self._args(unit)])
        return [read(value) for value in self.front.outputs]

    def policy(self, policy: Policy) -> Policy:
        """The policy of a checkpoint whose body this is. What it saves of a part gets the name that the part's op gives
        it, with a label that other parts do not have, and no other.
        """
        parts = {node: part for part in self.parts if part.call for node in _computes(part)}
        running, replaced = set(map(id, self._order)), dict[int, tuple[Part, list[Step]]]()
        values = [(node, value.step) for node, value in self.front.values.items() if id(value.step) not in running]
        steps = map(partial(self._of_columns, parts), values)
        for node, step in [*steps, *((_below_views(node, parts), step) for node, step in self.front.names)]:
            if step is not None and (part := parts.get(node)) is not None:
                replaced.setdefault(id(part), (part, []))[1].append(step)
        answers: dict[str, Any] = {}
        for part, found in replaced.values():
            assert part.call is not None
            given = [nodes if is_product else nodes[0] for is_product, nodes in _reads(part)]
            label, said = answers_of(policy, [step.equation for step in found], part.call, given, part.found.roots)
            if said:
                answers |= said
                self._labels[id(part)] = label
                self._open |= {id(step) for step in found if step.equation.primitive.name == NAME}
        policy = with_answers(policy, answers)
        for body in self.bodies.values():
            for program in body.programs:
                policy = program.policy(policy)
        return policy

    def _placed(self, root: Node, out: Any) -> Any:
        """A part's result, on explicit meshes with the sharding that it has in the program's types."""
        value = self.front.values.get(root)
        if value is None or value.step is None:
            return out
        return as_typed(out, value.step.equation.outvars[value.index].aval)

    def _is_view(self, node: Node) -> bool:
        """Whether a node views a value that a part computes with other dims than the program, which has it in views."""
        below = _below_views(node, self._replaced)
        return below is not node and below in self._replaced and below in self.front.graph.heads

    def _of_columns(self, parts: Container[Node], made: tuple[Node, Step | None]) -> tuple[Node, Step | None]:
        """The value whose columns are dims of a node of the program, if a part computes it, with the node's step."""
        below = _below_views(made[0], parts)
        return (below if below in self.front.graph.heads else made[0]), made[1]

    def _args(self, node: Node) -> Sequence[Node]:
        """What a node that no equation makes is computed from: the program's value of it with other dims, if any."""
        heads = self.front.graph.heads.get(node)
        return node.args if heads is None or heads not in self.front.values else (heads,)

    def _of_primitives(self, node: Node, args: Sequence[Any]) -> Any:
        """The value of a node that no equation makes."""
        if node in self.front.graph.heads and self._args(node) is not node.args:
            return jnp.reshape(args[0], node.shape)
        if (call := self.front.graph.named.get(node)) is None:
            return _of_primitives(node, args)
        x, index = args  # an element of each row
        return picked(x, jnp.reshape(index, node.shape), call.attrs["outside"])

    def _find(self) -> None:
        """Find the parts of layers, and what expressions and other ops compute of the rest."""
        self.known = KnownArrays(self.front, self._inputs)
        inside = set[Node]()

        def layer(found: Composite) -> Part:
            if any(self._own.of(each, range(len(each.leaves))) for each in found.found):
                return Part(found, Choice("", why="an op of yours computes a part of it"), None)
            if (step := decoding_of(found)) is not None:
                made = _made(step, Choice("composite", step.name), partial(call_of_layer, step))
                if made.call is not None:
                    return made
            return _made(found, Choice("composite", found.name), partial(call_of_layer, found))

        def expressions(analysis: Analysis, run: Sequence[Composite]) -> list[tuple[Found, Part]]:
            nonlocal inside
            inside, covered = {node for each in run for node in each.nodes}, {one for each in run for one in each.found}
            others = (each for each in analysis.found if each not in covered and not inside.issuperset(each.roots))
            return [(each, self._part(each, analysis, inside)) for each in others]

        found = settle(self.front.graph, self.known, self.exact, layer, expressions)
        self.analysis, layers, others, self.stay = found
        calls = (call for call in self.analysis.calls if inside.isdisjoint(call.roots))
        parts = [part for _, part in (*layers, *others)]
        parts += [Part(call, Choice("op", call.named.op), call_of_named(call)) for call in calls]
        self.parts = sorted(parts, key=lambda part: part.found.roots[0].index)

    def _part(self, found: Found, analysis: Analysis, inside: Container[Node]) -> Part:
        """An expression. Products of ``inside`` are computed with a part of a layer."""
        products = [i for i in analysis.products(found) if found.leaves[i].node not in inside]
        if (own := self._own.of(found, products)) is not None:
            choice = Choice("own", own[0].own.op.name, product=own[1], own=own[0])
        else:
            choice = choose(found, products, exact=self.exact)
        return _made(found, choice, partial(call_of, found, choice))

    def _let_through(self, first: Front) -> set[int]:
        """Let the program see through each ``stop_gradient`` that changes no derivative, and return their equations'
        ids: what is computed with the number that they stop does not depend on it, as a softmax does not on the number
        that it subtracts.
        """
        live, outputs = set(live_nodes(first.graph)), set(first.graph.outputs)
        passed: set[int] = set()
        kept: set[int] = set()
        for stop, equation in first.stops.items():
            (passed if is_without_effect(stop, live, outputs) else kept).add(id(equation))
        passed -= kept
        for stop, equation in first.stops.items():
            if id(equation) in passed:
                stop.become(stop.args[0])
        return passed

    def _opened(self, passed: Container[int]) -> set[int]:
        """The steps of ``stop_gradient`` that the program must not take itself, since a part computes with the number
        that they stop: the terms of its gradient cancel only where all of them are there.
        """
        read = set[Node]()
        for unit in self._order:
            if isinstance(unit, Part):
                read.update(node for _, nodes in _reads(unit) for node in nodes)
                if isinstance(unit.found, (Found, Composite)):
                    read.update(unit.found.region.nodes if isinstance(unit.found, Found) else unit.found.nodes)
        stops = (unit for unit in self._order if isinstance(unit, Step) and id(unit.equation) in passed)
        return {id(step) for step in stops if step.inputs[0].node in read}

    def _in_order(self) -> list[Any]:
        """What runs, in order. A part that would wait for itself is left to the program: an equation that it reads may
        read one of its roots where the graph knows another way to compute that.
        """
        while True:
            self._replaced = {root: part for part in self.parts if part.call for root in part.found.roots}
            try:
                return list(self._ordered())
            except _Waits as error:
                why = Choice("", why="it reads what the program computes from its results")
                stays = Part(error.part.found, why, None)
                self.parts = [stays if part is error.part else part for part in self.parts]

    def _ordered(self) -> Iterator[Any]:
        """Equations, parts and nodes that the outputs need, and equations with effects, each after what it reads.

        Raises:
            _Waits: a part waits for itself.
        """
        done: set[int] = set()
        begun: dict[int, Any] = {}  # by id what waits for those after it
        steps = [step for step in self.front.steps if step.equation.effects]
        roots = [*steps, *(unit for value in self.front.outputs if (unit := self._unit(value)) is not None)]
        stack: list[Any] = roots[::-1]
        while stack:
            unit = stack[-1]
            if id(unit) in done:
                stack.pop()
                continue
            missing = [each for each in self._needs(unit) if id(each) not in done]
            if missing:
                begun[id(unit)] = unit
                if any(id(each) in begun for each in missing):
                    raise _Waits(next(each for each in reversed(begun.values()) if isinstance(each, Part)))
                stack += missing[::-1]
                continue
            done.add(id(unit))
            begun.pop(id(unit), None)
            stack.pop()
            yield unit

    def _unit(self, value: Any) -> Any:
        """The equation that makes a value; None for inputs, constants and numbers."""
        if not isinstance(value, Value):
            return None
        return value.node if self._is_view(value.node) else self._replaced.get(value.node, value.step)

    def _needs(self, unit: Any) -> list[Any]:
        if isinstance(unit, Step):
            made = [self._unit(value) for value in unit.inputs]
        elif isinstance(unit, Part):
            made = [self._of_node(node) for _, nodes in _reads(unit) for node in nodes]
        else:
            made = [self._of_node(node) for node in self._args(unit)]
        return [each for each in made if each is not None]

    def _of_node(self, node: Node) -> Any:
        """The unit that makes a node: a primitive that the program does not have by itself is its own unit."""
        if node in self._replaced:
            return self._replaced[node]
        value = self.front.value_of(node)
        return node if value is None else self._unit(value)


def _made(found: Found | Composite, choice: Choice, make: Callable[[], Call]) -> Part:
    """A part with what runs in its place, unless that is refused."""
    try:
        return Part(found, choice, make() if choice.kind else None)
    except (TypeError, ValueError, NotImplementedError) as error:
        return Part(found, Choice("", why=str(error).splitlines()[0]), None)


def _reads(part: Part) -> Iterator[tuple[bool, tuple[Node, ...]]]:
    """For each leaf whether it is the product that the part computes itself, and the nodes that it reads of it."""
    if isinstance(part.found, Named):
        yield from ((False, (node,)) for node in part.found.named.nodes)
        return
    if isinstance(part.found, Composite):
        yield from ((False, (node,)) for node in part.found.operands.values())
        return
    for i, leaf in enumerate(part.found.leaves):
        yield i == part.choice.product, leaf.node.args if i == part.choice.product else (leaf.node,)


def _computes(part: Part) -> Iterator[Node]:
    """The nodes that a part of a layer or an expression computes."""
    if isinstance(part.found, Composite):
        yield from part.found.nodes
    elif isinstance(part.found, Found):
        yield from part.found.region.nodes
        yield from (part.found.leaves[i].node for i in [part.choice.product] if i >= 0)


def _below_views(node: Node, stop: Container[Node]) -> Node:
    """The node that reshapes and transposes lead back to from a node; a node in ``stop`` ends the way."""
    while node not in stop and node.op in ("reshape", "transpose"):
        node = node.args[0]
    return node


def _of_primitives(node: Node, args: Sequence[Any]) -> Any:
    """The value of a node that no equation makes."""
    if node.op == "constant":
        return jnp.asarray(node.attr, node.dtype)
    if (node.op, node.attr) == ("opaque", "NaN"):  # a number that no expression has
        return jnp.asarray(jnp.nan, node.dtype)
    if node.op == "primitive":
        return jnp.broadcast_to(REFERENCE[str(node.attr)](jnp, *args), node.shape).astype(node.dtype)
    if node.op == "transpose":
        return jnp.transpose(args[0], node.attr)
    if node.op == "slice":
        axis, start, stop, step = node.attr
        return jax.lax.slice_in_dim(args[0], start, stop, step, axis)
    if node.op == "contract":
        left, right, batch = node.attr
        return jax.lax.dot_general(args[0], args[1], ((left, right), batch), preferred_element_type=node.dtype)
    if node.op == "reduce":
        primitive, axes, keepdims = node.attr
        return getattr(jnp, primitive)(args[0], axis=axes, keepdims=keepdims)
    if node.op == "broadcast":
        return jax.lax.broadcast_in_dim(args[0], node.shape, node.attr)
    return jnp.reshape(args[0], node.shape).astype(node.dtype)
