"""Values that are computed in one order of dims and read in another one, as ``vmap`` over a dim in the middle and
libraries of named dims leave them. They are computed in the order in which they are read, so that no region ends at a
transposition between two of its values, and reductions are those of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping

from cute_ops.expressions.reference import REFERENCE
from cute_ops.fusion.graph import Graph, Node
from cute_ops.fusion.region import VALUES, live_nodes

Order = tuple[int, ...]
_VIEWS = ("cast", "reshape", "broadcast", "transpose", "slice", "constant")


def reorder(graph: Graph) -> dict[Node, Node]:
    """Compute values in the order in which they are read, where this leaves fewer transpositions and reductions over
    other dims than the last.

    Returns:
        By transposition and reduction that nothing reads any more the equal node that takes its place.
    """
    live = live_nodes(graph)
    if all(node.op != "transpose" and (node.op != "reduce" or _order_of(node) is None) for node in live):
        return {}
    orders, inside, made = _orders(graph, live), set(live), dict[Node, Node]()
    for members in _groups(orders):
        found = _moved(graph, members, orders[members[0]], inside)
        for node, other in found.items():
            node.become(other)
        made |= found
    graph.follow(made)
    return made


def _orders(graph: Graph, live: list[Node]) -> dict[Node, Order]:
    """By value the one order of dims in which all that reads it reads it, if that is another one than its own."""
    inside, orders = set(live), dict[Node, Order]()
    for node in reversed(live):
        read = {_read_in(user, node, orders) for user in node.users if user in inside}
        if len(read) == 1 and _may_move(node) and node not in graph.outputs:
            (order,) = read
            if order is not None:
                orders[node] = order
    return orders


def _order_of(node: Node) -> Order | None:
    """The order of dims in which a transposition or a reduction over another dim than the last reads its argument."""
    if node.op == "transpose":
        return tuple(node.attr)
    if node.op != "reduce" or node.attr[2] or len(node.attr[1]) != 1:
        return None
    (axis,), last = node.attr[1], len(node.args[0].shape) - 1
    return None if axis == last else (*(i for i in range(last + 1) if i != axis), axis)


def _read_in(user: Node, node: Node, orders: Mapping[Node, Order]) -> Order | None:
    """The order in which a node is read by one of its users."""
    if user in orders:
        return orders[user] if len(user.shape) == len(node.shape) else None
    return _order_of(user)


def _may_move(node: Node) -> bool:
    """Whether a value of elements may be computed in another order of dims."""
    known = node.op in ("cast", "concat") or (node.op == "primitive" and isinstance(node.attr, str))
    return known and node.dtype in VALUES and all(len(arg.shape) in (0, len(node.shape)) for arg in node.args)


def _groups(orders: dict[Node, Order]) -> Iterator[list[Node]]:
    """Neighbours that are read in one order, arguments first, each group after those that it reads."""
    seen = set[Node]()
    for first in reversed(orders):
        if first not in seen:
            group, waiting = [first], [first]
            seen.add(first)
            while waiting:
                node = waiting.pop()
                for other in (*node.args, *node.users):
                    if orders.get(other) == orders[first] and other not in seen:
                        seen.add(other)
                        group.append(other)
                        waiting.append(other)
            yield sorted(group, key=lambda node: node.index)


def _moved(graph: Graph, members: list[Node], order: Order, live: Collection[Node]) -> dict[Node, Node]:
    """What takes the place of the transpositions and reductions of a group; nothing where that saves none."""
    inside, count = set(members), len(graph.nodes)
    roots = list(dict.fromkeys(user for node in members for user in node.users if user in live and user not in inside))
    outside = dict.fromkeys(arg for node in members for arg in node.args if arg not in inside)
    new = {arg: graph.transpose(arg, order) if arg.shape else arg for arg in outside}
    if len(roots) + _only_read_in(outside, inside, live) <= _transposed_anew(new.values(), count):
        return {}
    for node in members:
        new[node] = _in_order(graph, node, [new[arg] for arg in node.args], order)
    made = {root: _of_rows(graph, root, new[root.args[0]]) for root in roots}
    return made if all(_is_known(node, count) for node in made.values()) else {}


def _only_read_in(values: Iterable[Node], inside: set[Node], live: Container[Node]) -> int:
    """How many of these values are transpositions that only nodes of ``inside`` read."""
    return sum(x.op == "transpose" and inside.issuperset(user for user in x.users if user in live) for x in values)


def _transposed_anew(values: Iterable[Node], count: int) -> int:
    """How many of these values are transpositions, or copies of some, that a graph of ``count`` nodes did not have."""
    inner = (x.args[0] if x.op == "broadcast" else x for x in values)
    return sum(x.op == "transpose" and x.index >= count for x in inner)


def _of_rows(graph: Graph, root: Node, x: Node) -> Node:
    """The transposition or the reduction of a value that is in the order in which it is read."""
    return x if root.op == "transpose" else graph.reduce(root.attr[0], x, [len(x.shape) - 1], False, root.dtype)


def _in_order(graph: Graph, node: Node, args: list[Node], order: Order) -> Node:
    """A value in another order of dims, of arguments that are in it."""
    shape = tuple(node.shape[axis] for axis in order)
    if node.op == "cast":
        return graph.cast(args[0], node.dtype)
    if node.op == "concat":
        return graph.concat(args, order.index(node.attr), shape)
    return graph.primitive(node.attr, args, shape, node.dtype)


def _is_known(root: Node, count: int) -> bool:
    """Whether a front end can compute what a new node is made of from the nodes that were there before."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        if node.index >= count:
            computed = node.op in _VIEWS or (node.op == "primitive" and node.attr in REFERENCE)
            if not computed and node is not root:
                return False
            waiting += [arg for arg in node.args if arg not in seen]
            seen.update(node.args)
    return True
