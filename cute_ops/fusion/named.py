"""Ops that look beyond elements and rows: rotations of heads, and losses of a row's target class.

No expression takes an element of another column, so programs build these of slices and gathers. Where a graph is made,
a rotation becomes one node, and a value's gather is pushed down to what the value is computed from, so that
``log_softmax(x)[target]`` and ``x[target] - logsumexp(x)`` become equal. A rotation's node is opaque to regions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cute_ops.fusion.node import Node, Shape

MODE = "a value of another mode"  # an opaque node that is its argument, made with gradients off, for one
_DEEP = 12  # nodes between a table of angles and what repeats them
_LINEAR = ("add", "subtract", "negative")


class Named(NamedTuple):
    """An op's call.

    Attributes:
        op: its name; ``pick``, ``iota``, ``argmax``, ``soft_loss``, ``of_lse`` and ``beside`` are no ops, but known to
            the rules of fusion.
        operands: the arguments that the nodes are.
        nodes: what it reads.
        shapes: the shape that each of them has for the op, of as many elements.
        attrs: the op's attributes.
        beside: other nodes that it gives beside its own.
    """

    op: str
    operands: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    shapes: tuple[Shape, ...] = ()
    attrs: Mapping[str, Any] = {}
    beside: tuple[Node, ...] = ()


class Turn(NamedTuple):
    """A rotation of pairs: of a value's columns up to ``size`` by tables of angles, both of half as many columns.

    ``repeated``: of as many columns, of which both halves are equal.
    """

    x: Node
    cos: Node
    sin: Node
    size: int
    interleaved: bool
    repeated: bool = False


def uncast(node: Node) -> Node:
    while node.op == "cast":
        node = node.args[0]
    return node


def number_of(node: Node) -> float | None:
    """The number that a node is everywhere, in any shape and dtype; None if it is none."""
    while node.op in ("broadcast", "cast", "reshape"):
        node = node.args[0]
    return float(node.attr) if node.op == "constant" and not isinstance(node.attr, bool) else None


def positive_number(node: Node) -> float | None:
    number = number_of(node)
    return number if number is not None and number > 0 else None


def of_parts(parts: Sequence[Node], axis: int) -> Turn | None:
    """The rotation whose result's columns these are, one part after the other: ``x1 cos - x2 sin``,
    ``x2 cos + x1 sin`` and perhaps columns of x that are kept.
    """
    if axis != len(parts[0].shape) - 1 or len(parts) not in (2, 3):
        return None
    turn = _turned(parts[0], parts[1])
    if turn is None or turn.interleaved:
        return None
    return turn if len(parts) == 2 else _with_kept(turn, parts[2])


def of_pairs(x: Node, shape: Shape) -> Turn | None:
    """The rotation of neighbouring columns, whose results are stacked and then joined to this shape."""
    last = len(x.shape) - 1
    if len(x.args) != 2 or x.attr != last or shape[:-1] != x.shape[:-2]:
        return None
    first, second = map(_unstacked, x.args)
    turn = None if first is None or second is None else _turned(first, second)
    return turn if turn is not None and turn.interleaved and turn.size == shape[-1] else None


def kept_beside(parts: Sequence[Node], axis: int, named: Mapping[Node, Named]) -> Turn | None:
    """A rotation of a value's first columns with the others behind them."""
    if len(parts) != 2 or axis != len(parts[0].shape) - 1:
        return None
    found = named.get(uncast(parts[0]))
    if found is None or found.op != "rope":
        return None
    (x, cos, sin), size = found.nodes, parts[0].shape[-1]
    turn = Turn(uncast(x), cos, sin, size, found.attrs["interleaved"]) if isinstance(size, int) else None
    return None if turn is None else _with_kept(turn, parts[1])


def of_sum(args: Sequence[Node]) -> Turn | None:
    """``x cos + rotate_half(x) sin``, where the tables' halves are equal."""
    one, other = map(_factors, args)
    if one is None or other is None:
        return None
    for first, second in ((one, other), (other, one)):
        for turned, sin in (second, second[::-1]):
            if turned.op != "primitive" or turned.attr not in ((word, *turned.shape[-1:]) for word in _REPEATS):
                continue
            x, repeats = uncast(turned.args[0]), _REPEATS[turned.attr[0]]
            cos = next((b for a, b in (first, first[::-1]) if a is x), None)
            if cos is not None and isinstance(x.shape[-1], int) and all(_repeats(t, repeats) for t in (cos, sin)):
                return Turn(x, cos, sin, x.shape[-1], turned.attr[0] == "rotate_pairs", repeated=True)
    return None


def turned_pairs(x: Node, shape: Shape) -> Node | None:
    """``x`` of ``stack([-x[..., 1::2], x[..., ::2]], axis=-1)`` with the pairs joined to this shape."""
    if len(x.args) != 2 or x.attr != len(x.shape) - 1:
        return None
    odd, part, n = _unstacked(x.args[0]), uncast(x.args[1]), shape[-1]
    if odd is None or (odd.op, odd.attr) != ("primitive", "negative"):
        return None
    even = _unstacked(part)
    one, other = _columns(uncast(odd.args[0])), _neighbours(part) if even is None else _columns(uncast(even))
    if one is None or other is None or one[0] is not other[0] or one[0].shape != shape:
        return None
    return one[0] if (one[1:], other[1:]) == ((1, n, 2), (0, n, 2)) else None


def columns_of(x: Node, shape: Shape) -> list[Node] | None:
    """The parts of columns one after the other that each have a last dim of one element, without it; None of others."""
    if x.op != "concat" or x.shape != (*shape, 1) or x.attr != len(shape) - 1:
        return None
    parts = [*map(_unstacked, x.args)]
    return [part for part in parts if part is not None] if None not in parts else None


def call_of(turn: Turn) -> Named | None:
    """The call of ``rope``; None where the tables do not lie as it takes them."""
    x, r = turn.x, turn.size // 2
    if not isinstance(x.shape[-1], int) or len(x.shape) < 2:
        return None
    one, other = (_sizes(table, len(x.shape)) for table in (turn.cos, turn.sin))
    if one is None or one != other or one[-1] != r:
        return None
    lead, sizes = x.shape[:-1], one[:-1]
    if any(size not in (1, whole) for size, whole in zip(sizes, lead, strict=True)):
        return None
    heads = sizes[-1] == 1  # one angle for all heads
    shape = x.shape if heads else (*lead, 1, x.shape[-1])
    table = (*(sizes[:-1] if heads else sizes), r)
    nodes = (x, *(_unbroadcast(table) for table in (turn.cos, turn.sin)))
    return Named("rope", ("x", "cos", "sin"), nodes, (shape, table, table), {"interleaved": turn.interleaved})


def of_one(x: Node) -> Node | None:
    """The value of which an element of a sum is an element, where the other terms are numbers per row."""
    if x.op != "primitive" or x.attr not in _LINEAR:
        return None
    whole = [arg for arg in x.args if arg.shape == x.shape]
    rows = [arg for arg in x.args if not arg.shape or arg.shape[-1] == 1]
    return whole[0] if len(whole) == 1 and len(rows) == len(x.args) - 1 else None


def is_shift(node: Node) -> bool:
    """Whether a number per row is a constant or the row's maximum, which programs subtract without a gradient."""
    while node.op in ("cast", "reshape", "broadcast"):
        node = node.args[0]
    if (node.op, node.attr) == ("primitive", "where"):  # or 0 where it is infinite
        return is_shift(node.args[1])
    return node.op == "constant" or (node.op == "reduce" and node.attr[0] == "max")


def table_of(node: Node) -> Node:
    """A table before it was cast and copied to more rows."""
    node = uncast(node)
    while node.op == "broadcast":
        x = node.args[0]
        if tuple(node.attr) != tuple(range(len(node.shape) - len(x.shape), len(node.shape))) or x.shape[-1] == 1:
            break
        node = uncast(x)
    return node


def _factors(node: Node) -> tuple[Node, Node] | None:
    node = uncast(node)
    if node.op != "primitive" or node.attr != "multiply":
        return None
    first, second = node.args
    return uncast(first), uncast(second)


def _turned(first: Node, second: Node) -> Turn | None:
    first, second = uncast(first), uncast(second)
    signs = (first.attr, second.attr)
    if (first.op, second.op) != ("primitive", "primitive") or signs not in (("subtract", "add"), ("add", "add")):
        return None
    a, b, c, d = (_factors(arg) for arg in (*first.args, *second.args))
    if a is None or b is None or c is None or d is None:
        return None
    for x1, cos in (a, a[::-1]):
        for x2, sin in (b, b[::-1]):
            halves = _halves(x1, x2) if x1.shape == first.shape else None
            if first.attr == "add":  # by the negative angles
                opposite = next((each for each in (*c, *d) if _is_negative(each, sin)), None)
                if opposite is None:
                    continue
                sin = opposite
            if halves is not None and {frozenset(c), frozenset(d)} == {frozenset((x2, cos)), frozenset((x1, sin))}:
                return Turn(halves[0], cos, sin, *halves[1:])
    return None


def _is_negative(node: Node, of: Node) -> bool:
    return (node.op, node.attr) == ("primitive", "negative") and uncast(node.args[0]) is of


def _halves(first: Node, second: Node) -> tuple[Node, int, bool] | None:
    """The value whose columns are split in two, how many are, and whether neighbours are pairs."""
    a, b = _columns(first), _columns(second)
    if a is None or b is None or a[0] is not b[0]:
        return None
    x, (one, other), r = a[0], (a[1:], b[1:]), first.shape[-1]
    if not isinstance(r, int):
        return None
    if (one, other) == ((0, r, 1), (r, 2 * r, 1)):
        return x, 2 * r, False
    n = x.shape[-1]
    return (x, 2 * r, True) if n == 2 * r and (one, other) == ((0, n, 2), (1, n, 2)) else None


def _columns(node: Node) -> tuple[Any, ...] | None:
    """The value that a node has columns of, and which: ``(x, start, stop, step)``."""
    if node.op == "slice" and node.attr[0] == len(node.shape) - 1:
        return (uncast(node.args[0]), *node.attr[1:])
    return _neighbours(node.args[0]) if node.op == "reshape" and node.args[0].shape == (*node.shape, 1) else None


def _neighbours(part: Node) -> tuple[Any, ...] | None:
    """The value whose columns were split to pairs of which a node has one each, and which, as :func:`_columns`."""
    if part.op != "slice" or part.attr[0] != len(part.shape) - 1 or part.shape[-1] != 1:
        return None
    pairs = uncast(part.args[0])
    if pairs.op != "reshape" or pairs.shape[-1] != 2:
        return None
    x, rows, r = pairs.args[0], part.shape[:-2], part.shape[-2]
    return (uncast(x), part.attr[1], x.shape[-1], 2) if x.shape == (*rows, 2 * r) else None


def _unstacked(part: Node) -> Node | None:
    """The value that was given a last dim of one element."""
    part = uncast(part)
    of_one = part.op in ("reshape", "broadcast") and part.shape == (*part.args[0].shape, 1)
    if part.op == "broadcast" and of_one and part.attr != tuple(range(len(part.shape) - 1)):
        return None
    return part.args[0] if of_one else None


def _with_kept(turn: Turn, rest: Node) -> Turn | None:
    """The rotation of a value whose columns from the rotation's size on are kept."""
    rest, x = uncast(rest), turn.x
    if rest.op != "slice":
        return None
    whole = uncast(rest.args[0])
    last, n = len(whole.shape) - 1, whole.shape[-1]
    if rest.attr != (last, turn.size, n, 1):
        return None
    if x is whole:
        return turn
    first = x.op == "slice" and uncast(x.args[0]) is whole and x.attr == (last, 0, turn.size, 1)
    return turn._replace(x=whole) if first else None


def _repeats(node: Node, repeats: Callable[[Node, int], bool | None], depth: int = _DEEP) -> bool:
    """Whether columns of a value are equal: both halves, or neighbours, where ``repeats`` says so of what made them."""
    if not depth or not node.shape or node.shape[-1] == 1:
        return bool(depth)
    if (said := repeats(node, depth)) is not None:
        return said
    if node.op == "broadcast":
        return node.attr[-1:] == (len(node.shape) - 1,) and _repeats(node.args[0], repeats, depth - 1)
    if node.op == "reshape":
        return node.args[0].shape[-1:] == node.shape[-1:] and _repeats(node.args[0], repeats, depth - 1)
    known = _is_elementwise(node)
    return known and all(arg.op == "constant" or _repeats(arg, repeats, depth - 1) for arg in node.args)


def _half_is_repeated(node: Node, depth: int) -> bool | None:
    """Of columns one after the other, whether they are one value twice; None of other values."""
    if node.op != "concat":
        return None
    last = node.attr == len(node.shape) - 1
    return len(node.args) == 2 and last and uncast(node.args[0]) is uncast(node.args[1])


def _each_is_repeated(node: Node, depth: int) -> bool | None:
    """Of columns that were joined to pairs, whether those of a pair are one value; None of other values."""
    last = len(node.shape) - 1
    if node.op == "concat" and node.attr == last:
        return all(_repeats(arg, _each_is_repeated, depth - 1) for arg in node.args)
    if node.op != "reshape" or node.args[0].shape[-1:] == node.shape[-1:]:
        return None
    pairs = uncast(node.args[0])
    if pairs.shape[-1:] != (2,) or pairs.shape[:-2] != node.shape[:-1]:
        return False
    if pairs.op == "broadcast":  # a dim of one element, or none, becomes the last one
        return len(pairs.shape) - 1 not in pairs.attr or pairs.args[0].shape[-1] == 1
    stacked = pairs.op == "concat" and pairs.attr == len(pairs.shape) - 1 and len(pairs.args) == 2
    return stacked and uncast(pairs.args[0]) is uncast(pairs.args[1])


_REPEATS: Mapping[str, Callable[[Node, int], bool | None]] = {
    "rotate_half": _half_is_repeated, "rotate_pairs": _each_is_repeated,
}  # fmt: skip


def _is_elementwise(node: Node) -> bool:
    known = node.op in ("primitive", "cast") or (node.op == "opaque" and node.attr in ("cos", "sin", MODE))
    return known and not isinstance(node.attr, tuple)


def _unbroadcast(table: Node) -> Node:
    table = uncast(table)
    return uncast(table.args[0]) if table.op == "broadcast" else table


def _sizes(table: Node, rank: int) -> tuple[Any, ...] | None:
    """A table's sizes among so many dims, 1 where it was copied."""
    table = uncast(table)
    if len(table.shape) > rank:
        return None
    sizes = list(table.shape)
    if table.op == "broadcast":
        sizes = [1] * len(table.shape)
        for dim, size in zip(table.attr, table.args[0].shape, strict=True):
            sizes[dim] = size
    return (*(1,) * (rank - len(sizes)), *sizes)
