"""Cross entropies: where a graph picks one element of each row, the nodes up to the row's loss become one call.

What follows a loss, such as a mask or a mean, stays beside it. If nothing but the loss reads a product, the loss is
that of a linear head, which never holds its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cute_ops.expressions.graph import Expression
from cute_ops.fusion.canonical import canonical
from cute_ops.fusion.express import express
from cute_ops.fusion.graph import FLOATS, Graph, Node
from cute_ops.fusion.loss_terms import terms_of
from cute_ops.fusion.match import meaning_of
from cute_ops.fusion.named import Named, positive_number, uncast
from cute_ops.fusion.region import VIEWS, Facts, Region, keeps_columns, live_nodes, obstacle, without_ones

_MOST = 40  # nodes of a loss
_SUMS = ("reduce", "contract")
_FOLLOW = ("subtract", "add", "negative", "multiply", "divide")


def find_losses(graph: Graph, is_linear: Callable[[Node], bool], exact: bool) -> None:
    """Turn the nodes that are losses into calls, in place."""
    for node in list(graph.nodes):
        if node.op in _SUMS and (loss := _of_one_hot(graph, node, exact)) is not None:
            _become(graph, node, loss)
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
    x, rows = uncast(logits), logits.shape[:-1]
    nodes = _between(root, {pick, x})
    if nodes is None or root.dtype not in FLOATS or without_ones(root.shape) != without_ones(rows):
        return None
    found = _expressed(nodes, root, exact)
    if found is None or any(leaf is not pick and uncast(leaf) is not x for leaf in found[1]):
        return None
    expression, leaves = found
    terms = terms_of(expression, tuple(leaf is pick for leaf in leaves), x.shape[-1])
    return None if terms is None else Named("cross_entropy", ("logits", "target"), (x, index), (x.shape, rows), {
        "sign": terms.factor, "label_smoothing": terms.smoothing, "z_loss": terms.z_loss, **call.attrs,
    })  # fmt: skip


def _of_one_hot(graph: Graph, node: Node, exact: bool) -> Named | None:
    """The call of minus the loss that a node is: the sum of a row's logarithms of probabilities times a one-hot row.

    The one-hot row of a target that is no class has only zeros, so the row's loss is 0.
    """
    for one_hot, factor in _products_of_rows(node):
        if (index := _index_of(graph, one_hot)) is None:
            continue
        negated = (factor.op, factor.attr) == ("primitive", "negative")
        x = _logits_of(uncast(factor.args[0] if negated else factor), exact)
        if x is not None:
            rows = x.shape[:-1]
            attrs = {"sign": 1.0 if negated else -1.0, "label_smoothing": 0.0, "z_loss": 0.0, "outside": "zero"}
            return Named("cross_entropy", ("logits", "target"), (x, index), (x.shape, rows), attrs)
    return None


def _products_of_rows(node: Node) -> Iterator[tuple[Node, Node]]:
    """The two factors of a product that a node sums up over the last dim, in both orders."""
    factors: tuple[Node, ...] = ()
    if node.op == "reduce" and node.attr[:2] == ("sum", (len(node.args[0].shape) - 1,)):
        product = node.args[0]
        if (product.op, product.attr) == ("primitive", "multiply"):
            factors = product.args
    elif node.op == "contract":
        (left, right, batch), rank = node.attr, len(node.args[0].shape)
        if left == right == (rank - 1,) and batch == (tuple(range(rank - 1)),) * 2:
            factors = node.args
    if len(factors) == 2:
        yield factors[0], factors[1]
        yield factors[1], factors[0]


def _index_of(graph: Graph, one_hot: Node) -> Node | None:
    """The integers whose one-hot rows a node is; None if it is none."""
    node = uncast(one_hot)
    if (node.op, node.attr) != ("primitive", "equal"):
        return None
    for index, place in (node.args, node.args[::-1]):
        while place.op in ("broadcast", "reshape", "cast") and keeps_columns(place):
            place = place.args[0]
        call = graph.named.get(place)
        counts = call is not None and call.op == "iota" and call.attrs["axis"] == len(place.shape) - 1
        if counts and place.shape[-1] == node.shape[-1] and "int" in index.dtype:
            while index.op == "broadcast" and index.args[0].shape == (*node.shape[:-1], 1):
                index = index.args[0]
            if index.shape == (*node.shape[:-1], 1):
                return index
    return None


def _logits_of(node: Node, exact: bool) -> Node | None:
    """The value whose ``log_softmax`` a node is; None if it is none."""
    if (node.op, node.attr) != ("primitive", "subtract"):
        return None
    first = node.args[0]
    for x in (first, *first.args[:1]):
        nodes = _between(node, {x})
        found = None if nodes is None or x.shape != node.shape else _expressed(nodes, node, exact)
        if found is not None and all(leaf is x for leaf in found[1]):
            meaning = meaning_of(found[0])
            if meaning is not None and meaning.op == "log_softmax":
                return uncast(x)
    return None


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


def _expressed(nodes: list[Node], root: Node, exact: bool) -> tuple[Expression, list[Node]] | None:
    """The canonical expression of a node, and its leaves; None of a node that is none, as where one in between is of
    other rows.
    """
    facts, inside = Facts(), set(nodes)
    for node in sorted({*nodes, *(arg for node in nodes for arg in node.args)}, key=lambda node: node.index):
        if node in inside and obstacle(node, facts, inside) is not None:
            return None
        facts.note(node)
    made, _ = express(Region(nodes, [root]), (), facts, exact)
    if len(made) != 1:
        return None
    text = canonical(made[0].expression, made[0].n)
    return text.flat, [made[0].leaves[i].node for i in text.operands]


def _with_head(
    graph: Graph, node: Node, call: Named, is_linear: Callable[[Node], bool], live: set[Node]
) -> Named | None:
    """The call of a linear head's loss, where a product makes the logits; None elsewhere.

    Between the product and the loss, logits may get a bias, a scale, a soft cap and other rows.
    """
    product, target = call.nodes
    reader, sliced, scale, cap, bias = node, tuple[tuple[int, int, int, int], ...](), 1.0, 0.0, None
    while _reader(graph, product, live) is reader:
        reader = product
        if is_linear(product):
            break
        if (capped := _capped(graph, product, live)) is not None and scale == 1 and not cap and bias is None:
            product, reader, cap, scale = capped
        elif (scaled := _scaled(product)) is not None and bias is None:
            product, scale = scaled[0], scale * scaled[1]
        elif (biased := _biased(product)) is not None and bias is None:
            product, bias = biased
        elif product.op == "slice" and product.attr[0] < len(product.shape) - 1 and not sliced:
            sliced, product = (product.attr,), product.args[0]
        elif _is_view(product) and all(_keeps_dims(product, axis + 1) for axis, *_ in sliced):
            product = product.args[0]
        else:
            return None
    if not is_linear(product) or reader is not product or product.dtype != product.args[0].dtype:
        return None
    x, weight = product.args
    rows = x.shape[:-1]
    if sliced:
        (axis, start, stop, step), left = sliced[0], list(rows)
        if axis >= len(rows) or not all(isinstance(each, int) for each in (start, stop, step)):
            return None
        left[axis] = -((start - stop) // step)
        rows = tuple(left)
    attrs = {**call.attrs, "transposed": product.attr[1] == (0,), "total": False}
    attrs |= {"softcap": cap, "logit_scale": scale, "sliced": sliced}
    nodes, shapes = (x, weight, target), (x.shape, weight.shape, rows)
    if bias is None:
        return Named("linear_cross_entropy", ("hidden", "weight", "target"), nodes, shapes, attrs)
    names = ("hidden", "weight", "target", "bias")
    return Named("linear_cross_entropy", names, (*nodes, bias), (*shapes, product.shape[-1:]), attrs)


def _is_view(node: Node) -> bool:
    """Whether a node is a value with other rows, or in float32."""
    if node.op == "reshape":
        return node.shape[-1:] == node.args[0].shape[-1:]
    return node.op == "cast" and node.dtype == "float32"


def _keeps_dims(view: Node, count: int) -> bool:
    """Whether the first dims of a view are those of the value that it shows, so that a slice of the last of them is one
    of the value.
    """
    return view.shape[:count] == view.args[0].shape[:count]


def _scaled(node: Node) -> tuple[Node, float] | None:
    """The value that a node multiplies by a positive number, and the number."""
    if node.op != "primitive" or node.attr not in ("multiply", "divide"):
        return None
    pairs = (node.args, node.args[::-1])[: 1 + (node.attr == "multiply")]
    for x, other in pairs:
        if (number := positive_number(other)) is not None and x.shape == node.shape:
            return x, number if node.attr == "multiply" else 1 / number
    return None


def _capped(graph: Graph, node: Node, live: set[Node]) -> tuple[Node, Node, float, float] | None:
    """For a node ``cap * tanh(x * number)``: x, the node that reads it, the cap and ``number * cap``."""
    outer = _scaled(node)
    if outer is None:
        return None
    tanh, cap = uncast(outer[0]), outer[1]
    if (tanh.op, tanh.attr) != ("primitive", "tanh") or (scaled := _scaled(tanh.args[0])) is None:
        return None
    inner, (x, number) = tanh.args[0], scaled
    alone = all(_reader(graph, each, live) is not None for each in (outer[0], tanh, inner))
    return (x, inner, cap, number * cap) if alone else None


def _biased(node: Node) -> tuple[Node, Node] | None:
    """The value to which a node adds a bias of its columns, and the bias; both in the node's dtype."""
    if (node.op, node.attr) != ("primitive", "add"):
        return None
    for x, bias in (node.args, node.args[::-1]):
        while bias.op == "broadcast" and without_ones(bias.shape) != [node.shape[-1]]:
            bias = bias.args[0] if bias.attr and bias.attr[-1] == len(bias.shape) - 1 else x
        of_columns = bias.shape[-1:] == node.shape[-1:] and without_ones(bias.shape) == [node.shape[-1]]
        if of_columns and x.shape == node.shape and x.dtype == bias.dtype == node.dtype:
            return x, bias
    return None


def _with_sum(graph: Graph, node: Node, call: Named, live: set[Node]) -> tuple[Node, Named]:
    """The sum over all rows if nothing else reads them, of which a mask may leave out some, and its call: then the
    forward computes gradients, and the backward no second product.
    """
    sign, each = call.attrs["sign"], node
    masks: tuple[Node, ...] = ()
    while (user := _reader(graph, each, live)) is not None and user.op != "reduce":
        if (user.op, user.attr) == ("primitive", "negative"):
            sign = -sign
        elif not masks and (mask := _mask(user, each)) is not None:
            masks = (mask,)
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
        call.op, (*call.operands, *["mask"] * len(masks)), (*call.nodes, *masks),
        (*call.shapes, *(call.shapes[2] for _ in masks)), {**call.attrs, "sign": sign, "total": True},
    )  # fmt: skip
    return user, named


def _mask(user: Node, each: Node) -> Node | None:
    """The mask by which a node makes rows 0; None if it has none. Like XLA, takes ``x * mask`` for
    ``where(mask, x, 0)``.
    """
    if user.shape != each.shape:
        return None
    if (user.op, user.attr) == ("primitive", "where") and user.args[1] is each and _is_zero(user.args[2]):
        return user.args[0]
    if (user.op, user.attr) == ("primitive", "multiply"):
        other = user.args[user.args[0] is each]
        if other.op == "cast" and other.args[0].dtype == "bool" and other.shape == user.shape:
            return other.args[0]
    return None


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
