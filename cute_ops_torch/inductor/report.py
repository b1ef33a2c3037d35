"""The report of a graph: what was found in it, what became of it, and why the rest stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

from torch.fx import Graph
from torch.fx import Node as FxNode

from cute_ops.fusion.analyse import is_linear
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.graph import FLOATS, NARROW
from cute_ops.fusion.graph import Node as Value
from cute_ops.fusion.named import MODE, uncast
from cute_ops.fusion.report import Entry, entry_of, text_of_shape
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.inductor.rewrite import Part, Rewritten

# What computes nothing, or is named where it matters.
_SILENT = (MODE, "what is written in place", "getitem", "rope")
_WHY = {
    "scaled_dot_product_attention": "ours takes 16 bits, no dropout, no mask that is an array of all scores, on a GPU",
    "cross_entropy": "it has weights or labels of its own kind, or its logits are written to later",
    "embedding": "its table is not trained, or has options that ours lacks",
    "multi_head_attention_forward": "its weights are read or dropped, it adds keys of its own, or it is not in 16 bits",
    "_transformer_encoder_layer_fwd": "its mask is data, or it is not in 16 bits",
    **dict.fromkeys(("dropout", "native_dropout"), "it draws random numbers, in the order of the program"),
}
_VIEWS = ("transpose", "reshape", "broadcast", "slice", "concat")


def entries_of(made: Rewritten, graph: Graph) -> Iterator[Entry]:
    """An entry for each expression, and for each product and opaque function that is still in the graph."""
    alive, holders = set(graph.nodes), made.front.holders
    taken: dict[Value, str] = {}
    for part in made.parts:
        module = module_of(each.node for value in _inside(part) for each in holders.get(value, ()))
        yield entry_of(part.found, part.choice)._replace(gain=part.gain, module=module)
        taken |= _products_beside(part)
    # The first holder is the call; later ones are views of its result, which read what has replaced it.
    stays = [node for node in made.front.graph.nodes if any(each.node in alive for each in holders.get(node, ())[:1])]
    for node in stays:
        if node.op == "contract" and (why := made.stay.get(node) or taken.get(node) or _why_alone(node)):
            module = module_of(each.node for each in holders[node])
            yield Entry("", "product", why, text_of_shape(node.shape), "", 1, module=module)
    whole = set(stays)
    for node, why in made.analysis.reasons.items():
        if node in whole and node.dtype in FLOATS:
            yield from _left(node, why, module_of(each.node for each in holders[node]))


def _inside(part: Part) -> Iterable[Value]:
    return part.found.nodes if isinstance(part.found, Composite) else part.found.region.nodes


def _products_beside(part: Part) -> dict[Value, str]:
    """The products that an expression reads, each with why the op of the expression does not compute it; an empty text
    for the one that it computes.
    """
    if isinstance(part.found, Composite):
        return {}
    why = part.choice.why or f"{part.choice.name} follows it"
    products = {leaf.node: i for i, leaf in enumerate(part.found.leaves) if leaf.node.op == "contract"}
    return {node: "" if i == part.choice.product else why for node, i in products.items()}


def _left(node: Value, why: str, module: str) -> Iterator[Entry]:
    """The entry of a node that nothing computes, unless it computes nothing itself."""
    said = str(node.attr) if node.op in ("opaque", "primitive") else node.op
    if node.op == "primitive" and isinstance(node.attr, tuple):
        said, why = node.attr[0], "only epilogues of products rotate"
    if said not in (*_SILENT, *_VIEWS):
        said, why = (why, "") if why.startswith(said) else (said, why)
        yield Entry("", said, why or _WHY.get(said, ""), text_of_shape(node.shape), "", 1, module=module)


def entry_of_node(name: str, what: str, node: Any) -> Entry:
    """The entry of what a call was replaced by."""
    value = example(node)
    shape = "" if value is None else text_of_shape(value.shape)
    return Entry(name, what, "", shape, "", 1, module=module_of([node]))


def module_of(nodes: Iterable[FxNode]) -> str:
    """The innermost module of a model in which all of these nodes are called, with ``*`` for numbers of layers."""
    stacks = ([path for path, _ in node.meta.get("nn_module_stack", {}).values()] for node in nodes)
    paths = [re.sub(r"^[LG]\['\w+'\]\.?", "", stack[-1]).split(".") if stack else [] for stack in stacks]
    levels = (set(level) for level in zip(*paths, strict=False))
    common = [each for (each,) in takewhile(lambda level: len(level) == 1, levels)]
    return ".".join("*" if each.isdecimal() else each for each in common)


def _why_alone(product: Value) -> str:
    if not is_linear(product):
        return "it is no product of rows and one matrix"
    if product.dtype == "float32" and all(uncast(arg).dtype in NARROW for arg in product.args):
        return "its operands have 16 bits, to which ours would round its gradient, too"
    readers = {user.attr if user.op == "opaque" else user.op for user in product.users}
    return f"{', '.join(sorted(map(str, readers)))} follows it" if readers else "nothing follows it"
