"""Cross entropies: where a graph picks one element of each row, the nodes up to the row's loss become one call.

What follows a loss, such as a mask or a mean, stays beside it. If nothing but the loss reads a product, the loss is
that of a linear head, which never holds its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cute_ops.fusion.canonical import canonical
from cute_ops.fusion.express import express
from cute_ops.fusion.graph import FLOATS, Graph, Node
from cute_ops.fusion.match import Meaning, meaning_of
from cute_ops.fusion.named import Named, uncast
from cute_ops.fusion.region import VIEWS, Facts, Region, live_nodes, without_ones

_MOST = 40  # nodes of a loss
_FOLLOW = ("subtract", "add", "negative")


def find_losses(graph: Graph, is_linear: Callable[[Node], bool], exact: bool) -> None:
    """Turn the nodes that are losses into calls, in place."""
    for pick, call in list(graph.named.items()):
        if call.op == "pick":
            for root in reversed(list(_following(pick))):
                if (loss := _loss(root, pick, call, exact)) is not None:
                    _become(graph, root, loss)
                    break
    losses = [(node, call) for node, call in graph.named.items() if call.op == "cross_entropy"]
    if losses:
        live = set(live_nodes(graph))
        for node, call in losses:
            if node in live and (head := _with_head(graph, node, call, is_linear, live)) is not None:
                _become(graph, *_with_sum(graph, node, head, live))


def _following(pick: Node) -> Iterator[Node]:
    """What is computed from a picked element, nearest first."""
    waiting, seen = [pick], {pick}
    for node in waiting:
        if len(seen) > _MOST:
            return
        for user in node.users:
            if user not in seen and (user.op in ("cast", *VIEWS) or (user.op, user.attr) in _STEPS):
                seen.add(user)
                waiting.append(user)
                yield user


_STEPS = tuple(("primitive", name) for name in _FOLLOW)


def _loss(root: Node, pick: Node, call: Named, exact: bool) -> Named | None:
    """The call of a loss of the rows from which an element is picked."""
    logits, index = call.nodes
    nodes = _between(root, {pick, uncast(logits)})
    rows = logits.shape[:-1]
    if nodes is None or root.dtype not in FLOATS or without_ones(root.shape) != without_ones(rows):
        return None
    found = _meaning(nodes, root, exact)
    if found is None:
        return None
    meaning, leaves = found
    given = dict(zip(meaning.operands, leaves, strict=True))
    if given["at_target"] is not pick or uncast(given["logits"]) is not uncast(logits):
        return None
    x = uncast(logits)
    return Named("cross_entropy", ("logits", "target"), (x, index), (x.shape, rows), {**meaning.attrs, **call.attrs})


def _between(root: Node, leaves: set[Node]) -> list[Node] | None:
    """The nodes that compute a value from these leaves and constants, arguments first; None if it reads more."""
    found: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in found or node in leaves or node.op == "constant":
            continue
        if node.op not in ("primitive", "reduce", "cast", *VIEWS) or len(found) == _MOST:
            return None
        found.add(node)
        waiting += node.args
    return sorted(found, key=lambda node: node.index)


def _meaning(nodes: list[Node], root: Node, exact: bool) -> tuple[Meaning, Sequence[Node]] | None:
    facts = Facts()
    for node in sorted({*nodes, *(arg for node in nodes for arg in node.args)}, key=lambda node: node.index):
        facts.note(node)
    made, _ = express(Region(nodes, [root]), (), facts, exact)
    if len(made) != 1:
        return None
    text = canonical(made[0].expression, made[0].n)
    meaning = meaning_of(text.flat)
    if meaning is None or meaning.op != "cross_entropy":
        return None
    return meaning, [made[0].leaves[i].node for i in text.operands]


def _with_head(
    graph: Graph, node: Node, call: Named, is_linear: Callable[[Node], bool], live: set[Node]
) -> Named | None:
    """The call with the product that makes the logits, whose rows may have been joined."""
    product, target = call.nodes
    reader = node
    if product.op == "reshape" and product.shape[-1:] == product.args[0].shape[-1:]:
        if _reader(graph, product, live) is not node:
            return None
        reader, product = product, product.args[0]
    if not is_linear(product) or product.dtype != product.args[0].dtype or _reader(graph, product, live) is not reader:
        return None
    x, weight = product.args
    attrs = {**call.attrs, "transposed": product.attr[1] == (0,), "total": False}
    shapes = (x.shape, weight.shape, x.shape[:-1])
    return Named("linear_cross_entropy", ("hidden", "weight", "target"), (x, weight, target), shapes, attrs)


def _with_sum(graph: Graph, node: Node, call: Named, live: set[Node]) -> tuple[Node, Named]:
    """The sum over all rows if nothing else reads them, of which a mask may leave out some, and its call: then the
    forward computes gradients, and the backward no second product.
    """
    sign, each = call.attrs["sign"], node
    masks: tuple[Node, ...] = ()
    while (user := _reader(graph, each, live)) is not None and user.op != "reduce":
        if (user.op, user.attr) == ("primitive", "negative"):
            sign = -sign
        elif (user.op, user.attr) == ("primitive", "where") and not masks:
            if user.args[1] is not each or not _is_zero(user.args[2]):
                return node, call
            masks = (user.args[0],)
        elif user.op not in ("cast", "reshape") or user.dtype not in FLOATS:
            return node, call
        each = user
    if user is None:
        return node, call
    primitive, axes, _ = user.attr
    masked = all(without_ones(mask.shape) == without_ones(call.shapes[2]) for mask in masks)
    if primitive != "sum" or len(axes) != len(each.shape) or not masked:
        return node, call
    named = Named(
        call.op, (*call.operands, "mask")[: 3 + len(masks)], (*call.nodes, *masks),
        (*call.shapes, *(call.shapes[2] for _ in masks)), {**call.attrs, "sign": sign, "total": True},
    )  # fmt: skip
    return user, named


def _reader(graph: Graph, node: Node, live: set[Node]) -> Node | None:
    """The only node that reads a value; None of what several read, or the program returns."""
    users = [user for user in node.users if user in live]
    return users[0] if len(users) == 1 and node not in graph.outputs else None


def _is_zero(node: Node) -> bool:
    while node.op == "broadcast":
        node = node.args[0]
    return node.op == "constant" and node.attr == 0


def _become(graph: Graph, node: Node, call: Named) -> None:
    """Make a node an op's call."""
    for arg in dict.fromkeys(node.args):
        arg.users.remove(node)
    node.op, node.attr, node.args = "opaque", call.op, call.nodes
    for arg in dict.fromkeys(node.args):
        arg.users.append(node)
    graph.named[node] = call
