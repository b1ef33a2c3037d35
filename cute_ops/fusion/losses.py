"""Cross entropies: where a graph picks one element of each row, the nodes up to the row's loss become one call.

What follows a loss, such as a mask or a mean, stays beside it. If nothing but the loss reads a product, the loss is
that of a linear head, which never holds its logits. It may give their log-sum-exp and the predicted classes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cute_ops.expressions.simplify import fold
from cute_ops.fusion.graph import FLOATS, Graph, Node, Shape
from cute_ops.fusion.loss_metrics import MOST_CLASSES, Beside, of_lse_beside, read_beside
from cute_ops.fusion.loss_terms import Target, is_lse, terms_of
from cute_ops.fusion.match import meaning_of, shortest
from cute_ops.fusion.named import Named, number_of, positive_number, uncast
from cute_ops.fusion.node import Size
from cute_ops.fusion.one_expression import MOST, between, expressed
from cute_ops.fusion.region import VIEWS, keeps_columns, live_nodes, without_ones

_SUMS = ("reduce", "contract")
_FOLLOW = ("subtract", "add", "negative", "multiply", "divide")


class _Picked(NamedTuple):
    """A value of which a row's loss may be computed.

    Attributes:
        node: the value, one number per row.
        x: the logits.
        labels: the row's target.
        target: what it is of the target's logit.
        attrs: what a target that is no class gives, as :meth:`Graph.pick` has it.
    """

    node: Node
    x: Node
    labels: Node
    target: Target
    attrs: Mapping[str, Any]


def find_losses(graph: Graph, is_linear: Callable[[Node], bool], exact: bool) -> None:
    """Turn the nodes that are losses into calls, in place."""
    for node in list(graph.nodes):
        for picked in _picked(graph, node, exact):
            roots = [*reversed(list(_following(node))), *[node] * (node.op in _SUMS)]
            for root in roots:
                if (loss := _loss(root, picked, exact)) is not None:
                    _become(graph, root, loss)
                    break
    for node, call in list(graph.named.items()):
        if call.op == "soft_loss" and (loss := _of_soft_rows(graph, call, exact)) is not None:
            _become(graph, node, loss)
    losses = [(node, call) for node, call in graph.named.items() if call.op == "cross_entropy"]
    if losses:
        live = set(live_nodes(graph))
        for node, call in losses:
            if node in live:
                _find_head(graph, node, call, is_linear, live, exact)


def _find_head(
    graph: Graph, node: Node, call: Named, is_linear: Callable[[Node], bool], live: set[Node], exact: bool
) -> None:
    """Make a loss that of a linear head, if it is one, with what the program reads of the logits beside it."""
    beside = read_beside(graph, node, call.nodes[0], live, exact)
    head = None if beside is None else _with_head(graph, node, call, is_linear, live)
    if head is not None and beside and _may_give(head, beside):
        _become_with(graph, node, head, beside)
    elif head is not None and not beside:
        _become(graph, *_with_sum(graph, node, head, live))
    elif (rest := of_lse_beside(graph, node, call.nodes[0], live)) and _may_give(call, rest):
        _become_with(graph, node, call, rest)


def _may_give(call: Named, beside: Sequence[Beside]) -> bool:
    """Whether a loss' call may give other values: if nothing that it reads is computed from them."""
    n = call.nodes[0].shape[-1] if call.op == "cross_entropy" else call.shapes[1][int(call.attrs["transposed"])]
    few = isinstance(n, int) and n <= MOST_CLASSES
    return few and not _depend(call.nodes, {each.node for each in beside})


def _depend(nodes: Sequence[Node], others: set[Node]) -> bool:
    """Whether one of some nodes is computed from one of the others, or is one."""
    first, waiting, seen = min(node.index for node in others), list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        if node in others:
            return True
        new = [arg for arg in node.args if arg.index >= first and arg not in seen]
        waiting += new
        seen.update(new)
    return False


def _become_with(graph: Graph, node: Node, call: Named, beside: Sequence[Beside]) -> None:
    """Make a node a loss' call that gives other values beside it."""
    attrs = {**call.attrs, "beside": tuple(each.what for each in beside)}
    nodes = tuple(each.node for each in beside)
    _become(graph, node, call._replace(op=f"{call.op}_metrics", attrs=attrs, beside=nodes))
    for each in nodes:
        _become(graph, each, Named("beside", nodes=call.nodes))
    if any(arg.index > each.index for arg in call.nodes for each in nodes):
        graph.sort()


def _of_soft_rows(graph: Graph, call: Named, exact: bool) -> Named | None:
    """The loss of rows of probabilities, which one number for the class and another one for all others are."""
    (x, row), n = call.nodes, call.nodes[0].shape[-1]
    soft = _soft_row(graph, row, exact)
    if soft is None or soft.labels is None or not (isinstance(n, int) or not soft.off):
        return None
    share = soft.off * n if isinstance(n, int) else 0.0
    if abs(soft.on - soft.off + share - 1) > 1e-6 or not 0 <= share < 1:
        return None
    attrs = {"sign": 1.0, "label_smoothing": shortest(share), "z_loss": call.attrs["z_loss"]}
    attrs |= {"outside": "zero", "of": call.attrs["of"]}
    return Named("cross_entropy", ("logits", "target"), (uncast(x), soft.labels), (x.shape, x.shape[:-1]), attrs)


def _picked(graph: Graph, node: Node, exact: bool) -> Iterator[_Picked]:
    """A node as an element of each row, or as the sum of a row times a one-hot row."""
    call = graph.named.get(node)
    if call is not None and call.op == "pick":
        logits, labels = call.nodes
        yield _Picked(node, uncast(logits), labels, Target(), call.attrs)
    if node.op in _SUMS:
        for row, factor in _products_of_rows(node):
            soft = _soft_row(graph, row, exact)
            if soft is not None and soft.labels is not None:
                yield from _of_one_hot(graph, node, soft, soft.labels, uncast(factor), exact)


def _of_one_hot(graph: Graph, node: Node, soft: _SoftRow, labels: Node, y: Node, exact: bool) -> Iterator[_Picked]:
    """The sum of y times a row. The row of a target that is no class has nothing at a class."""
    n, sign = y.shape[-1], 1.0
    if (y.op, y.attr) == ("primitive", "negative"):
        y, sign = uncast(y.args[0]), -1.0
    if isinstance(n, int) or not soft.off:
        x = _logits_of(y, exact)
        if x is None and (y.op, y.attr) == ("primitive", "subtract"):  # a log-sum-exp less logits
            x, sign = _logits_of(graph.primitive("subtract", y.args[::-1], y.shape, y.dtype), exact), -sign
            sign = -sign if x is None else sign
        share = soft.off * n if isinstance(n, int) else 0.0
        attrs = {"outside": "zero", "of": "logit" if x is None else "log_prob"}
        target = Target(sign * (soft.on - soft.off), sign * share, x is not None)
        yield _Picked(node, y if x is None else x, labels, target, attrs)


def _following(pick: Node) -> Iterator[Node]:
    """The values computed from a picked element, nearest first."""
    waiting, seen = [pick], {pick}
    for node in waiting:
        if len(seen) > MOST:
            return
        for user in node.users:
            if user not in seen and (user.op in ("cast", *VIEWS) or (user.op, user.attr) in _STEPS):
                seen.add(user)
                waiting.append(user)
                yield user


_STEPS = tuple(("primitive", name) for name in _FOLLOW)


def _loss(root: Node, picked: _Picked, exact: bool) -> Named | None:
    """The call of a loss of the rows from which an element is picked."""
    x, rows = picked.x, picked.x.shape[:-1]
    if root.dtype not in FLOATS or without_ones(root.shape) != without_ones(rows):
        return None
    if root is picked.node:
        terms = terms_of(None, (), x.shape[-1], picked.target)
    else:
        nodes = between(root, {picked.node, x})
        found = None if nodes is None else expressed(nodes, root, exact)
        if found is None or any(leaf is not picked.node and uncast(leaf) is not x for leaf in found[1]):
            return None
        expression, leaves = found
        terms = terms_of(expression, tuple(leaf is picked.node for leaf in leaves), x.shape[-1], picked.target)
    if terms is None:
        return None
    attrs = {"sign": terms.factor, "label_smoothing": terms.smoothing, "z_loss": terms.z_loss, **picked.attrs}
    return Named("cross_entropy", ("logits", "target"), (x, picked.labels), (x.shape, rows), attrs)


class _SoftRow(NamedTuple):
    """One-hot rows, of which each of the two numbers may be another one.

    Attributes:
        labels: integers, the rows' classes; None of rows that are the same number everywhere.
        on, off: what a row has at its class, and elsewhere.
    """

    labels: Node | None
    on: float
    off: float


def _soft_row(graph: Graph, row: Node, exact: bool, depth: int = 6) -> _SoftRow | None:
    node = uncast(row)
    if (number := number_of(node)) is not None:
        return _SoftRow(None, number, number)
    if (labels := _index_of(graph, node)) is not None:
        return _SoftRow(labels, 1.0, 0.0)
    rounds = exact and node.dtype in ("bfloat16", "float16")
    if not depth or node.op != "primitive" or node.attr not in _OF_NUMBERS or rounds:
        return None
    found: list[_SoftRow] = []
    for arg in node.args:
        if (each := _soft_row(graph, arg, exact, depth - 1)) is None:
            return None
        found.append(each)
    of_rows = {each.labels for each in found if each.labels is not None}
    if len(of_rows) != 1:
        return None
    on, off = fold(node.attr, *(each.on for each in found)), fold(node.attr, *(each.off for each in found))
    return None if on is None or off is None else _SoftRow(of_rows.pop(), float(on), float(off))


_OF_NUMBERS = ("add", "subtract", "multiply", "divide", "negative", "where")


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


def _index_of(graph: Graph, node: Node) -> Node | None:
    """The integers whose one-hot rows a node is; None if it is none."""
    if (node.op, node.attr) != ("primitive", "equal"):
        return None
    for index, place in (node.args, node.args[::-1]):
        dtypes = {place.dtype}
        while place.op in ("broadcast", "reshape", "cast") and keeps_columns(place):
            place = place.args[0]
            dtypes.add(place.dtype)
        call = graph.named.get(place)
        counts = call is not None and call.op == "iota" and call.attrs["axis"] == len(place.shape) - 1
        if counts and place.shape[-1] == node.shape[-1] and all(_counts_to(dtype, place.shape[-1]) for dtype in dtypes):
            while index.op == "broadcast" and index.args[0].shape == (*node.shape[:-1], 1):
                index = index.args[0]
            if index.shape == (*node.shape[:-1], 1):
                return index
    return None


def _counts_to(dtype: str, n: Size) -> bool:
    """Whether an integer dtype holds the numbers of so many columns, so that no two of them are equal."""
    bits, signed = dtype.removeprefix("u").removeprefix("int"), not dtype.startswith("u")
    if not bits.isdigit():
        return False
    return n <= 2 ** (int(bits) - signed) if isinstance(n, int) else int(bits) >= 32


def _logits_of(node: Node, exact: bool) -> Node | None:
    """The value whose ``log_softmax`` a node is; None if it is none."""
    if (node.op, node.attr) != ("primitive", "subtract"):
        return None
    first = node.args[0]
    inner = first.args[:1]
    by_text = [(x, True) for x in (first, *inner)]
    for x, is_text in (*by_text, *((x, False) for x in (*inner, first))):  # texts first: they cost no evaluation
        nodes = between(node, {x})
        found = None if nodes is None or x.shape != node.shape else expressed(nodes, node, exact)
        if found is not None and all(leaf is x for leaf in found[1]):
            meaning = meaning_of(found[0]) if is_text else None
            if (meaning is not None and meaning.op == "log_softmax") or (not is_text and is_lse(found[0], less=True)):
                return uncast(x)
    return None


class _Logits(NamedTuple):
    """The input that logits are computed from.

    Attributes:
        value: that.
        reader: what reads it.
        scale, cap, bias, sliced: what it gets until it is the logits, the attributes of the head's loss.
    """

    value: Node
    reader: Node
    scale: float = 1.0
    cap: float = 0.0
    bias: Node | None = None
    sliced: tuple[tuple[int, int, int, int], ...] = ()


def _with_head(
    graph: Graph, node: Node, call: Named, is_linear: Callable[[Node], bool], live: set[Node]
) -> Named | None:
    """The call of a linear head's loss, where a product makes the logits, which nothing else reads; None elsewhere.

    Between the product and the loss, logits may get a bias, a scale, a soft cap and other rows.
    """
    value, target = call.nodes
    logits: _Logits | None = _Logits(value, node)
    while logits is not None and not is_linear(logits.value):
        logits = _step_back(graph, logits, live)
        if logits is not None and _reader(graph, logits.value, live) is not logits.reader:
            return None
    if logits is None:
        return None
    product = logits.value
    x, weight = product.args
    rows = _rows_left(x.shape[:-1], logits.sliced)
    wide = product.dtype != x.dtype
    if rows is None or (wide and not (graph.metrics and product.dtype == "float32")):
        return None
    attrs = {**call.attrs, "transposed": product.attr[1] == (0,), "total": False, **({"wide": True} if wide else {})}
    attrs |= {"softcap": logits.cap, "logit_scale": logits.scale, "sliced": logits.sliced}
    nodes, shapes = (x, weight, target), (x.shape, weight.shape, rows)
    if logits.bias is None:
        return Named("linear_cross_entropy", ("hidden", "weight", "target"), nodes, shapes, attrs)
    names = ("hidden", "weight", "target", "bias")
    return Named("linear_cross_entropy", names, (*nodes, logits.bias), (*shapes, product.shape[-1:]), attrs)


def _step_back(graph: Graph, logits: _Logits, live: set[Node]) -> _Logits | None:
    """The input of a value's step; None if no head's loss has that step."""
    value, before = logits.value, logits._replace(reader=logits.value)
    if logits.bias is None:
        capped = None if logits.cap or logits.scale != 1 else _capped(graph, value, live)
        if capped is not None:
            return logits._replace(value=capped[0], reader=capped[1], cap=capped[2], scale=capped[3])
        if (scaled := _scaled(value)) is not None:
            return before._replace(value=scaled[0], scale=logits.scale * scaled[1])
        if (biased := _biased(value)) is not None:
            return before._replace(value=biased[0], bias=biased[1])
    if value.op == "slice" and value.attr[0] < len(value.shape) - 1 and not logits.sliced:
        return before._replace(value=value.args[0], sliced=(value.attr,))
    if _is_view(value) and all(_keeps_dims(value, axis + 1) for axis, *_ in logits.sliced):
        return before._replace(value=value.args[0])
    return None


def _rows_left(rows: Shape, sliced: tuple[tuple[int, int, int, int], ...]) -> Shape | None:
    """The rows of a head's input after a slice of them; None if their number is not known."""
    left = list(rows)
    for axis, *bounds in sliced:
        if axis >= len(rows) or not all(isinstance(each, int) for each in bounds):
            return None
        start, stop, step = bounds
        left[axis] = -((start - stop) // step)
    return tuple(left)


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
    forward computes gradients, and the backward no second product. It may be the sum of sums or of means over some of
    the rows' dims.
    """
    sign, each, of_rows = call.attrs["sign"], node, True
    masks: tuple[Node, ...] = ()
    while (user := _reader(graph, each, live)) is not None:
        if user.op == "reduce":
            primitive, axes, _ = user.attr
            if primitive != "sum":
                return node, call
            if len(axes) == len(each.shape):
                break
            of_rows = False
        elif of_rows and not masks and (mask := _mask(user, each)) is not None:
            masks = (mask,)
        elif (factor := _factor(user, each)) is not None:
            sign *= factor
        elif user.op not in ("cast", "reshape") or user.dtype not in FLOATS:
            return node, call
        each = user
    if user is None or any(without_ones(mask.shape) != without_ones(call.shapes[2]) for mask in masks):
        return node, call
    named = Named(
        call.op, (*call.operands, *["mask"] * len(masks)), (*call.nodes, *masks),
        (*call.shapes, *(call.shapes[2] for _ in masks)), {**call.attrs, "sign": sign, "total": True},
    )  # fmt: skip
    return user, named


def _factor(user: Node, each: Node) -> float | None:
    """The factor by which a node multiplies another; None if it does something else."""
    if (user.op, user.attr) == ("primitive", "negative"):
        return -1
    scaled = _scaled(user)
    return scaled[1] if scaled is not None and scaled[0] is each else None


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
