"""The pass after autograd: products with what surrounds them, in forward and backward graphs, become ops of ours.

The pass before autograd replaces what has an op with a gradient. What is left of products is found here: gradients of
activations and gates behind a backward's product, sums of several gradients, casts. One kernel computes a product and
its region, several outputs included. On a GPU parts stay with Inductor unless ``max-autotune`` or ``CUTE_OPS_TUNE=1``
asks for both forms to be timed, and ours is faster; so do other regions everywhere.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from cute_ops.expressions.graph import Expression, copied
from cute_ops.expressions.graph import Graph as Nodes
from cute_ops.fusion.analyse import Found, is_linear
from cute_ops.fusion.choose import Choice
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.graph import Node as Value
from cute_ops.fusion.own import Meanings
from cute_ops.fusion.report import Entry, entry_of
from cute_ops.garbage import without_collections
from cute_ops_torch.inductor import fusion_choice
from cute_ops_torch.inductor.aten import AtenEmitter, AtenFront
from cute_ops_torch.inductor.choice import Chooser, target_of
from cute_ops_torch.inductor.dynamo import Holder
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.inductor.emit import Call, Emitter, Refused
from cute_ops_torch.inductor.joined import take_apart
from cute_ops_torch.inductor.rewrite import Part, Rewriting, chosen_in, operands_of

log = logging.getLogger("cute_ops")
_STAYS = "Inductor fuses it, too; mode='max-autotune' measures both forms"
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class ChooserAfter(Chooser):
    """The choice for a graph after autograd: products, and other regions where both forms are timed."""

    def choose(self, found: Found, products: list[int], device: str) -> Choice:
        one = products if len(products) < 2 else [max(products, key=lambda i: found.leaves[i].node.index)]
        chosen = super().choose(found, one, device)
        if chosen.kind in ("op", "fused") and not fusion_choice.asked_for(torch.device(device)):
            return Choice("", why=_STAYS)
        return chosen

    def choose_composite(self, found: Composite, device: str) -> Choice:
        return Choice("", why="parts of layers are found before autograd")

    def judge(self, call: Call) -> float | None:
        """Nothing where both forms are timed, or on a CPU, where ops are put in for tests alone.

        The model of products is not asked: of a block of GPT-2's kind it expected 54 us less of GELU with what its
        gradient needs, and the step took 310 us more (H200).

        Raises:
            Refused: the forms are not timed.
        """
        on = next(example(node).device for node in call.arrays if node is not None)
        own = any(each.op is call.op for each in self.own.ops)
        if not own and not fusion_choice.asked_for(on) and target_of(on) is not None:
            raise Refused(_STAYS)
        return None


class RewritingAfter(Rewriting):
    """Puts ops into a graph after autograd, where both forms of a part are timed if that is asked for."""

    emitter = AtenEmitter

    def settled(
        self, found: Found | Composite, choice: Choice, emits: Emitter, roots: list[list[Holder]], made: list[Node],
        gain: float | None,
    ) -> float | None:  # fmt: skip
        old = self._computing(found, choice, [holder.node for holders in roots for holder in holders])
        replaced = {holder.node for holders in roots for holder in holders}
        inside = {*old, *replaced}
        if _returns_its_product(found, choice) and _reads(emits.made, replaced):
            emits.undo()
            raise Refused("it reads what another part computes from its product")
        for node in old:
            product = getattr(node.target, "overloadpacket", None) in _PRODUCTS
            if product and node not in replaced and not inside.issuperset(node.users):
                emits.undo()
                raise Refused("its product is read elsewhere, in another shape")
        device = example(made[0]).device
        if not fusion_choice.asked_for(device):
            return gain
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        first = [holders[0].node for holders in roots]
        ours, theirs = fusion_choice.compared(
            fusion_choice.part_of(emits.made, made, order), fusion_choice.part_of(old, first, order)
        )
        log.info("torch.compile: %s: ours %.4f ms, Inductor's %.4f ms", found.text, ours, theirs)
        if not fusion_choice.fused_wins(theirs, ours):
            emits.undo()
            raise Refused(f"{1e3 * theirs:.3g} us were measured, {1e3 * ours:.3g} of our kernel")
        return 1e3 * (theirs - ours)

    def _computing(self, found: Found | Composite, choice: Choice, roots: list[Node]) -> list[Node]:
        """The nodes that compute roots from the operands of a part."""
        operands, values = set(operands_of(found, choice)), self.front.values
        members: dict[Node, None] = {}
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            value = values.get(node)
            # Nodes without a value stand for operands that were replaced before.
            outside = (
                node.op != "call_function" or node not in values or (isinstance(value, Value) and value in operands)
            )
            if node not in members and not outside:
                members[node] = None
                waiting += node.all_input_nodes
        return list(members)


def _returns_its_product(found: Found | Composite, choice: Choice) -> bool:
    return isinstance(found, Found) and choice.product >= 0 and found.leaves[choice.product].node in found.roots


def _reads(nodes: list[Node], others: set[Node]) -> bool:
    """Whether one of some nodes is computed from one of the others."""
    waiting, seen = [*nodes], set(nodes)
    while waiting:
        node = waiting.pop()
        if node in others:
            return True
        new = [each for each in node.all_input_nodes if each not in seen]
        seen.update(new)
        waiting += new
    return False


def with_product(found: Found, i: int) -> Found:
    """An expression that also returns its operand ``i``, a product that others read."""
    node = found.leaves[i].node
    made = copy(found)
    vars(made).pop("text", None)
    vars(made).pop("meaning", None)
    made.expression = _returning(found.expression, i)
    made.roots = (*found.roots, node)
    return made


def _returning(expression: Expression, i: int) -> Expression:
    graph = Nodes(expression.operands)
    nodes = copied(expression, graph)
    return graph.finish([*(nodes[k] for k in expression.outputs), graph.operand(i)])


def shared_products(found: Found) -> Iterator[int]:
    """The operands that are products which something else reads, too, and on which no other operand depends."""
    leaves = {leaf.node for leaf in found.leaves}
    for i, leaf in enumerate(found.leaves):
        if is_linear(leaf.node) and not leaf.packed and not _depends(leaves - {leaf.node}, leaf.node):
            yield i


def _depends(values: set[Value], on: Value) -> bool:
    """Whether one of these values is computed from another one."""
    waiting, seen = list(values), set(values)
    while waiting:
        value = waiting.pop()
        if value is on:
            return True
        more = [arg for arg in value.args if arg.index >= on.index and arg not in seen]
        seen.update(more)
        waiting += more
    return False


class ReplaceAfter(CustomGraphPass):
    """The pass. It first runs the ones that were set before it.

    Attributes:
        ops, devices, exact, own: as :class:`Replace <cute_ops_torch.inductor.graph_pass.Replace>` has them.
        previous: the pass, or passes, that were set before.
        key: what identifies it in Inductor's caches.
    """

    def __init__(
        self, ops: tuple[str, ...], devices: tuple[str, ...], exact: bool, previous: Any, *, entries: list[Entry],
        replaced: Counter[str], key: str, own: Meanings,
    ) -> None:  # fmt: skip
        self.own = own
        self.ops, self.devices, self.exact, self.previous, self.key = ops, devices, exact, previous, key
        self._entries, self._replaced = entries, replaced

    def __call__(self, graph: Graph) -> None:
        for earlier in passes(self.previous):
            earlier(graph)
        owner = graph.owning_module
        if owner is None or not self._concerns(graph):
            return
        where = "the backward" if any(node.name.startswith("tangents") for node in graph.nodes) else "the forward"
        try:
            if "qkv_rope" in self.ops:
                take_apart(graph)
            parts = rewrite_after(owner, ChooserAfter(self.ops, self.devices, self.exact, self.own), self.exact)
        except Exception as error:  # a model must compile, whatever it is written with
            log.warning("torch.compile: a graph stays as it is: %s: %s", type(error).__name__, error)
            self._entries.append(Entry("", "a graph", f"{type(error).__name__}: {error}", "", where, 1))
            return
        found = Counter(part.choice.name for part in parts if part.choice.kind)
        self._replaced.update(found)
        self._entries.extend(entry_of(part.found, part.choice, where)._replace(gain=part.gain) for part in parts)
        if found:
            graph.lint()
            log.info("torch.compile: in %s: %s", where, ", ".join(f"{n} x {name}" for name, n in found.items()))

    def _concerns(self, graph: Graph) -> bool:
        values = (example(node) for node in graph.nodes)
        return any(isinstance(value, torch.Tensor) and value.device.type in self.devices for value in values)

    def uuid(self) -> Any:
        before = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes(self.previous)]
        if not all(before):
            return None  # an earlier pass without a uuid: torch must not cache
        return hashlib.sha256(repr((self.key, fusion_choice.asked_by_environment(), before)).encode()).digest()


def passes(given: Any) -> tuple[Any, ...]:
    """The passes of one of Inductor's settings."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def rewrite_after(module: torch.fx.GraphModule, choosing: ChooserAfter, exact: bool) -> list[Part]:
    """Replace parts of a graph after autograd, which changes; returns what became of each."""
    with without_collections():
        front = AtenFront(module, exact)
    _, _, chosen, _ = chosen_in(front, choosing, exact)
    work, parts = RewritingAfter(module, front, choosing), []
    outputs, taken = set(front.graph.outputs), set[Value]()
    for found, choice in chosen:
        if choice.product >= 0 and (found.leaves[choice.product].node in outputs | taken):
            choice = choosing.choose(found, [], front.device_of(found.roots[0]))
        if choice.product < 0 and choice.kind != "own":
            found, choice = _sharing(found, choice, choosing, front, taken)
        part = work.part(found, choice)
        parts.append(part)
        if part.choice.product >= 0:
            taken.add(found.leaves[choice.product].node)
    work.finish()
    return parts


def _sharing(
    found: Found, choice: Choice, choosing: ChooserAfter, front: AtenFront, taken: set[Value]
) -> tuple[Found, Choice]:
    """The expression with a product that others read, too, as an output and as what it is the epilogue of."""
    device = front.device_of(found.roots[0])
    for i in shared_products(found):
        if found.leaves[i].node not in taken and found.leaves[i].node in front.holders:
            linear = choosing.choose(found, [i], device)
            if linear.kind == "linear":  # an op of the user's has no such output
                return with_product(found, i), linear
    return found, choice
