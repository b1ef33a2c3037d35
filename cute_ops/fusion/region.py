"""Regions: neighbouring nodes that one expression can compute, between products and whatever else is opaque.

A node's level is the number of nodes before it, on the longest way, that no expression computes. A node that only
later levels read sinks to the first of them, so that a cast or a bias is computed where it is used. Connected nodes of
one level are a region: a way that leaves it passes a level and cannot come back, so regions never wait for each other.
All steps visit each node a fixed number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.fusion.graph import FLOATS, Graph, Node

VIEWS = ("reshape", "broadcast", "slice")
VALUES = (*FLOATS, "bool")
_FOLLOWING = ("primitive", "cast", *VIEWS)
_PLAIN = ("cast", *VIEWS)
_ELEMENTWISE = ("primitive", "cast", "broadcast")
_OF_BOOLS = {name for name, primitive in PRIMITIVES.items() if "b" in primitive.takes}
_TURNED = "its rows become columns"
REDUCES = {name for name, primitive in PRIMITIVES.items() if primitive.reduces}


class Region(NamedTuple):
    """Nodes that are computed together.

    Attributes:
        nodes: all of them, arguments first.
        roots: those that are read outside of the region.
    """

    nodes: list[Node]
    roots: list[Node]


class Partition(NamedTuple):
    """A graph's regions, and why other nodes are in none.

    Attributes:
        regions: in an order in which each comes after those that it reads.
        plain: views and casts of what no region computes; each region that reads one looks through it.
        facts: what was noted of the graph's nodes.
        reasons: by node; products have none.
        live: the nodes that outputs need.
        visits: how often a node was looked at, which a test compares with the size of the graph.
    """

    regions: list[Region]
    plain: set[Node]
    facts: Facts
    reasons: dict[Node, str]
    live: set[Node]
    visits: int


def partition(graph: Graph, whole: Container[Node] = ()) -> Partition:
    """The regions of a graph. Nodes of ``whole`` are computed by the program itself."""
    live = live_nodes(graph)
    reasons: dict[Node, str] = {}
    facts = Facts(_as_columns(live))
    soft: set[Node] = set()
    plain: set[Node] = set()
    for node in live:
        why = "the program computes it by itself" if node in whole else obstacle(node, facts, soft)
        why = facts.note(node) or why
        if why:
            reasons[node] = why
        elif why is None and node.op in _PLAIN and node.args[0] not in soft:
            plain.add(node)
        elif why is None:
            soft.add(node)
            if node.op in _ELEMENTWISE and _is_elementwise(node, facts, soft):
                facts.elementwise.add(node)
    level = _levels(live, soft | plain, set(graph.outputs))
    leader = _connected(live, soft, level)
    if graph.flat:
        soft -= _last_views(live, soft, leader)
    groups = _groups(graph, live, soft, level, leader)
    regions = sorted(groups.values(), key=lambda each: (level[each.roots[0]], each.roots[0].index))
    return Partition(regions, plain, facts, reasons, set(live), 4 * len(live))


def _groups(
    graph: Graph, live: Sequence[Node], soft: set[Node], level: Mapping[Node, int], leader: Callable[[Node], Node]
) -> dict[Node, Region]:
    """The nodes of each region by its leader, and those that something outside of it reads."""
    outputs, groups = set(graph.outputs), dict[Node, Region]()
    first = {node: leader(node) for node in live if node in soft}
    for node, own in first.items():
        group = groups.get(own)
        if group is None:
            group = groups[own] = Region([], [])
        group.nodes.append(node)
        if node in outputs or any(first.get(user) is not own for user in node.users if user in level):
            group.roots.append(node)
    return groups


def _last_views(live: Sequence[Node], soft: set[Node], leader: Callable[[Node], Node]) -> set[Node]:
    """Views of what a region computes that nothing in it reads."""
    found: set[Node] = set()
    for node in reversed(live):
        if node in soft and node.op == "reshape" and node.args[0] in soft:
            inside = (user for user in node.users if user in soft and user not in found)
            if all(leader(user) is not leader(node) for user in inside):
                found.add(node)
    return found


class Facts:
    """Facts on a node that its own shape does not tell.

    Attributes:
        rowlike: values of a row without its last dim: of a reduction that does not keep it.
        as_columns: values whose last dim their readers read as columns though these have more dims, such as a mask of
            keys that is computed from each of them.
        elementwise: values that regions compute of single elements of operands; each half of their columns follows from
            a half of those.
        reduced: values that follow from a reduction of a row, or from one element of it.
    """

    def __init__(self, as_columns: Container[Node] = ()) -> None:
        self.rowlike: set[Node] = set()
        self.as_columns = as_columns
        self.reduced: set[Node] = set()
        self.elementwise: set[Node] = set()

    def note(self, node: Node) -> str:
        """Note a node. Returns why no expression computes it if its rows become columns; else nothing."""
        if node.op in _FOLLOWING:
            if not self.reduced.isdisjoint(node.args):
                self.reduced.add(node)
                self._note_rows(node)
        elif node.op == "reduce":
            if node.attr[1] == (len(node.args[0].shape) - 1,):
                self.reduced.add(node)
                if not node.attr[2]:
                    self.rowlike.add(node)
        elif node.op == "opaque" and node.attr == "pick":
            self.reduced.add(node)
        if node not in self.rowlike or node not in self.as_columns:
            return ""
        self.rowlike.remove(node)
        self.reduced.remove(node)
        return _TURNED

    def _note_rows(self, node: Node) -> None:
        if node.op in VIEWS:
            if self._is_without_columns(node):
                self.rowlike.add(node)
        elif any(arg in self.rowlike and len(arg.shape) == len(node.shape) for arg in node.args):
            self.rowlike.add(node)

    def _is_without_columns(self, view: Node) -> bool:
        x = view.args[0]
        if x in self.rowlike and _without_columns(view):
            return True
        return view.op == "reshape" and x in self.reduced and _is_squeezed(x, view)


def _is_squeezed(x: Node, view: Node) -> bool:
    """Whether a reshape drops columns of one element."""
    return x.shape[-1:] == (1,) != view.shape[-1:] and len(view.shape) < len(x.shape)


def _without_columns(view: Node) -> bool:
    """Whether a view of a rowlike value has no dim of columns either."""
    x = view.args[0]
    if view.op == "reshape":
        return not (len(view.shape) > len(x.shape) and view.shape[-1] == 1)
    dims = view.attr
    return view.op == "broadcast" and isinstance(dims, tuple) and dims[-1:] == (len(view.shape) - 1,)


def obstacle(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    """Why no expression computes a node; None if one does, empty for what needs no reason."""
    if node.op in ("input", "constant", "contract"):
        return ""
    if node.op == "opaque":
        return str(node.attr)
    if node.dtype not in VALUES:
        return f"{node.op} of {node.dtype}"
    for arg in node.args:
        if arg.dtype not in VALUES:
            return f"{node.op} of {arg.dtype}"
    return _OBSTACLES[node.op](node, facts, soft)


def _primitive(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    name = node.attr[0] if isinstance(node.attr, tuple) else str(node.attr)
    if name not in PRIMITIVES:
        return f"{name} is no primitive"
    if name in _OF_BOOLS:
        given = zip(PRIMITIVES[name].takes, node.args, strict=True)
        if any(letter == "b" and arg.dtype != "bool" for letter, arg in given):
            return f"{name} of floats"
    return None


def _cast(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    return "cast to bool" if node.dtype == "bool" and node.args[0].dtype != "bool" else None


def _reduce(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    primitive, axes, _ = node.attr
    x = node.args[0]
    if axes != (len(x.shape) - 1,):
        return f"{primitive} over other dims than the last"
    if primitive not in REDUCES:
        return f"{primitive} of a row"
    if x in facts.rowlike:
        return f"{primitive} of what was reduced before"
    return f"{primitive} of bools" if x.dtype == "bool" else None


def _reshape(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    x = node.args[0]
    if without_ones(x.shape) == without_ones(node.shape):
        is_column = x in facts.reduced and x not in facts.rowlike and x.shape[-1:] == (1,) != node.shape[-1:]
        return _TURNED if is_column and not _is_squeezed(x, node) else None
    if x in facts.rowlike:
        return None
    if x.shape and node.shape and x.shape[-1] == node.shape[-1]:
        return None
    return "reshape within rows"


def _broadcast(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    x, dims = node.args[0], node.attr
    if not isinstance(dims, tuple) or any(a >= b for a, b in pairwise(dims)):
        return "broadcast that exchanges dims"
    if x in soft and x in facts.reduced:
        # Computing a row again for each copy of it would cost a reduction.
        kept = {i for i, size in zip(dims, x.shape, strict=True) if size != 1}
        copied = [i for i, size in enumerate(node.shape[:-1]) if size != 1 and i not in kept]
        if copied and len(x.shape) > (x not in facts.rowlike):
            return "copies of rows that were reduced"
    return None


def _slice(node: Node, facts: Facts, soft: Container[Node]) -> str | None:
    x, (axis, start, stop, step) = node.args[0], node.attr
    n = x.shape[axis]
    if axis != len(x.shape) - 1 or step != 1 or not isinstance(n, int) or n % 2:
        return "slice"
    if (start, stop) not in ((0, n // 2), (n // 2, n)):
        return "slice of other columns than a half"
    if (x in soft and x not in facts.elementwise) or x.dtype == "bool":
        return "slice of a computed value"
    halves = {user.attr for user in x.users if user.op == "slice"}
    return None if halves == {(axis, 0, n // 2, 1), (axis, n // 2, n, 1)} else "slice of one half"


_OBSTACLES: dict[str, Callable[[Node, Facts, Container[Node]], str | None]] = {
    "primitive": _primitive, "cast": _cast, "reduce": _reduce, "reshape": _reshape, "broadcast": _broadcast,
    "slice": _slice, "transpose": lambda node, facts, soft: "transpose", "concat": lambda node, facts, soft: "concat",
}  # fmt: skip


def _is_elementwise(node: Node, facts: Facts, soft: Container[Node]) -> bool:
    """Whether each column follows from the same column of operands, or from their only one."""
    if node.op == "broadcast":
        if node.attr[-1:] != (len(node.shape) - 1,):
            return False
    elif isinstance(node.attr, tuple):
        return False
    last = node.shape[-1:]
    for arg in node.args:
        if arg.shape[-1:] not in (last, (), (1,)) or (arg in soft and arg not in facts.elementwise):
            return False
    return True


def keeps_columns(view: Node) -> bool:
    """Whether the columns of a view are those of the value that it shows, of rows in other numbers."""
    of_last = view.op != "broadcast" or view.attr[-1:] == (len(view.shape) - 1,)
    return of_last and view.shape[-1:] == view.args[0].shape[-1:]


def without_ones(shape: Iterable[object]) -> list[object]:
    return [size for size in shape if size != 1]


def _as_columns(live: Sequence[Node]) -> set[Node]:
    """Views that give a value more dims and whose last one is read as columns, and values that a primitive with more
    dims reads so: what a reduction or a product sums over.
    """
    found, columns = set[Node](), set[Node]()
    for node in reversed(live):
        if node.op == "reduce" and node.attr[1] == (len(node.args[0].shape) - 1,):
            columns.add(node.args[0])
        elif node.op == "contract":
            columns.update(x for x, over in zip(node.args, node.attr[:2], strict=True) if over == (len(x.shape) - 1,))
        elif node in columns and node.op in _FOLLOWING and (node.op not in VIEWS or keeps_columns(node)):
            kept = [x for x in node.args if x.shape[-1:] == node.shape[-1:]]
            fewer = [x for x in kept if len(x.shape) < len(node.shape)]
            columns.update(kept)
            if fewer:
                found.update([node] if node.op in VIEWS else fewer)
    return found


def live_nodes(graph: Graph) -> list[Node]:
    """The nodes that outputs need, arguments first."""
    needed = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.args)
    return [node for node in graph.nodes if node in needed]


def _levels(live: list[Node], soft: Container[Node], outputs: Container[Node]) -> dict[Node, int]:
    level: dict[Node, int] = {}
    for node in live:
        before = max([level[arg] for arg in node.args], default=0)
        level[node] = before + (node not in soft and node.op not in ("input", "constant"))
    for node in reversed(live):
        if node in soft and node not in outputs:
            readers = [level[user] - (user not in soft) for user in node.users if user in level]
            if readers:
                level[node] = max(level[node], min(readers))
    for node in live:  # sums of exponentials that something reads before stay with them
        if node.op == "reduce" and node in soft and node.args[0].attr == "exp" and node.args[0] in soft:
            level[node] = level[node.args[0]]
    return level


def _connected(live: list[Node], soft: Container[Node], level: dict[Node, int]) -> Callable[[Node], Node]:
    """The function of a node that returns one node for all that are connected with it on its level."""
    parent: dict[Node, Node] = {}

    def leader(node: Node) -> Node:
        while (above := parent[node]) is not node:
            parent[node] = parent[above]
            node = above
        return node

    for node in live:
        if node in soft:
            first = node
            for arg in node.args:
                if arg in soft and level[arg] == level[node]:
                    if first is node:  # the first of them, as most nodes have one alone
                        first = parent[node] = leader(arg)
                    else:
                        parent[leader(node)] = leader(arg)
            if first is node:
                parent[node] = node
    return leader
