"""The arrays of an attention: queries, keys and values, sinks, numbers of keys, and what is read for each score.

Each is an array of the program and how its dims become those that our op takes. Views, casts, multiplications and
repetitions before it are looked through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cute_ops.fusion.express import ONE, Leaf
from cute_ops.fusion.graph import Node, Shape
from cute_ops.fusion.lengths import Lengths
from cute_ops.fusion.named import positive_number

HALVES = ("bfloat16", "float16")  # other dtypes have no kernel


class Part(NamedTuple):
    """One of the three arrays, and how it becomes ``[batch, sequence, heads, columns]``.

    Attributes:
        node: the array.
        order: its dims, in the order of the batch, the sequence and the heads.
        shape: the result's.
    """

    node: Node
    order: tuple[int, ...]
    shape: tuple[int, ...]


class Sinks(NamedTuple):
    """One more score of each head: those of an array, or a number.

    Attributes:
        node: the array; None of a number.
        order: its dims, in the order of heads of keys and heads that share them.
        shape: the result's, 1 where it has none.
        sizes: to which these are expanded.
        number: the number.
    """

    node: Node | None
    order: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    number: float


class Ends(NamedTuple):
    """A number of keys for each sequence, each head of keys and each query: that of an array and a constant.

    Attributes:
        array: None where the constant is all.
        order: its dims, in the order of the batch and the heads.
        shape: the result's, ``[*batch, heads]``, 1 where it has none.
        sizes: to which these are expanded.
        constant: what is added.
        step: how much more each query attends to than the one before, 0 or 1.
    """

    array: Node | None
    order: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    constant: int
    step: int


class Decoding(NamedTuple):
    """A step of decoding: few queries, of which all attend to the keys of a sequence up to some number.

    All queries of a head of keys become heads of one query each.

    Attributes:
        parts: ``q`` as ``[batch, 1, heads, columns]``, ``k`` and ``v`` as ``[batch, keys, heads, columns]``, or
            as ``[batch, heads, keys, columns]``.
        heads_first: whether these have heads before keys.
        lengths: what masks say.
        queries: how many neighbouring heads are queries of one head.
        end, begin: how many keys there are up to the last one, and before the first one of them.
        out: the sizes and the order of dims that bring ``[batch, 1, heads, columns]`` to the product.
    """

    parts: Mapping[str, Part]
    heads_first: bool
    lengths: Lengths
    queries: int
    end: Ends
    begin: Ends | None
    out: tuple[tuple[int, ...], tuple[int, ...]]


class Read(NamedTuple):
    """An array that is read for each score, and how it becomes one of some of batch, head, query and key.

    Attributes:
        operand: its number among those of the scores' expression.
        node: the array.
        kind: of its elements.
        shape: of it with all rows' dims and its columns, 1 where it has none.
        sizes: to which these are expanded.
        order: the dims in the order of batch, head, query and key.
        merged: the result's shape.
        dims: which of the four it has.
    """

    operand: int
    node: Node
    kind: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]
    dims: tuple[int, ...]


def at_end(order: Sequence[int], rank: int) -> tuple[int, ...]:
    """All dims of an array, these at the end."""
    return (*(i for i in range(rank) if i not in order), *order)


def held(part: Part) -> tuple[Node, tuple[int, ...]]:
    """An array before it was transposed, and the order of its dims."""
    node, order = part.node, part.order
    while node.op == "transpose":
        node, order = node.args[0], tuple(node.attr[i] for i in order)
    return node, order


def cache_of(part: Part, rank: int, by_place: Sequence[int], heads_first: bool) -> Part | None:
    """Keys or values as they lie, with heads before keys or behind; None where they lie otherwise.

    Args:
        part: with leading dims, keys, perhaps heads, and columns at the end of its order.
        rank: how many these are.
        by_place: the order of the leading dims.
    """
    node, order = held(part)
    lead, (key, *heads, over) = (
        order[-rank : len(order) - rank + len(by_place)],
        order[len(order) - rank + len(by_place) :],
    )
    moved = [*(lead[i] for i in by_place), *([*heads, key] if heads_first else [key, *heads]), over]
    long = [i for i in moved if node.shape[i] != 1]
    if long != sorted(long):
        return None
    b, n, g, d = part.shape
    return Part(node, (*order[: len(order) - rank], *moved), (b, g, n, d) if heads_first else (b, n, g, d))


def renumbered(leaf: Leaf, rows: Shape) -> Leaf:
    """A leaf with its labels among other rows, of which some are joined in its own, as heads are for a mask without
    them; the leaf itself where it has a joined dim. An array that is repeated is read before.
    """
    while leaf.node.op == "broadcast" and not leaf.packed:
        x = leaf.node.args[0]
        sizes = zip(leaf.node.attr, x.shape, strict=True)
        leaf = leaf._replace(node=x, labels=tuple(leaf.labels[i] if size != 1 else ONE for i, size in sizes))
    dims = [] if leaf.rows == rows else joined(leaf.rows, rows)
    sizes = zip(leaf.labels, leaf.node.shape, strict=True)
    if not dims or any(label >= 0 and size != 1 and len(dims[label]) != 1 for label, size in sizes):
        return leaf
    place = [each[0] if each else ONE for each in dims]
    labels = tuple(place[label] if label >= 0 else label for label in leaf.labels)
    return leaf._replace(rows=rows, labels=labels)


def joined(whole: Shape, rows: Shape) -> list[list[int]]:
    """Which of some rows, neighbours without those of one element, make each of these; none where they do not."""
    dims, end = list[list[int]](), 0
    for size in whole:
        begin, product = end, 1
        while product != size and end < len(rows):
            product, end = product * int(rows[end]) if isinstance(rows[end], int) else 0, end + 1
        if product != size:
            return []
        dims.append([i for i in range(begin, end) if rows[i] != 1])
    return dims


def before(node: Node) -> tuple[Node, tuple[int, ...], float, list[Node]]:
    """A value before it was transposed, cast and multiplied by a positive number: that, which of its dims each dim is,
    the number, and the nodes in between with it at the end.
    """
    dims, number, between = tuple(range(len(node.shape))), 1.0, list[Node]()
    while True:
        if node.op == "transpose":
            node, dims = node.args[0], tuple(node.attr[i] for i in dims)
        elif node.op == "cast" and node.dtype == "float32":
            node = node.args[0]
        elif (found := multiplied(node)) is not None:
            node, number = found[0], number * found[1]
        else:
            return node, dims, number, between
        between.append(node)


def narrow(node: Node) -> tuple[Node, float]:
    """The 16-bit value that was cast to float32 and multiplied by a positive number, and the number; for any other node
    the node itself and 1.
    """
    x, number = node, 1.0
    while node.dtype == "float32" and (found := multiplied(x)) is not None:
        x, number = found[0], number * found[1]
    cast = x.op == "cast" and x.dtype == "float32" and x.args[0].dtype in HALVES
    return (x.args[0], number) if cast else (node, 1.0)


def multiplied(node: Node) -> tuple[Node, float] | None:
    """The tensor that a node multiplies or divides by a positive number, and the factor; None if it does neither."""
    if node.op == "primitive" and node.attr in ("multiply", "divide"):
        divides = node.attr == "divide"
        for x, other in (node.args,) if divides else (node.args, node.args[::-1]):
            number = positive_number(other)
            if number is not None and (x.shape, x.dtype) == (node.shape, node.dtype):
                return x, 1 / number if divides else number
    return None


def unrepeated(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Keys and values before each head was repeated for neighbouring heads of queries."""
    k, v = (_before_repeat(parts[name]) for name in "kv")
    if k is None or v is None or k[1] != v[1]:
        return dict(parts)
    return {"q": parts["q"], "k": k[0], "v": v[0]}


def _before_repeat(part: Part) -> tuple[Part, int] | None:
    """Keys or values before each head was repeated, and how often it was; None where it was not."""
    node, order = held(part)
    axis = order[-2]
    times = _times(node, axis)
    if not times:
        return None
    wide = node.args[0]
    x, kept = wide.args[0], [i for i in range(len(wide.shape)) if i != axis + 1]
    batch, sequence, heads, columns = part.shape
    shape = (batch, sequence, heads // times, columns)
    if x.shape == tuple(wide.shape[i] for i in kept) and tuple(wide.attr) == tuple(kept):
        return Part(x, order, shape), times
    one = (*wide.shape[: axis + 1], 1, *wide.shape[axis + 2 :])
    if x.shape == one and tuple(wide.attr) == tuple(range(len(one))):
        return Part(x, (axis + 1, *(i + (i > axis) for i in order)), shape), times
    return None


def _times(node: Node, axis: int) -> int:
    """How often each element along an axis is repeated there, by a broadcast to a dim behind it; 0 if it is not."""
    wide = node.args[0] if node.op == "reshape" and node.args[0].op == "broadcast" else node
    if len(wide.shape) != len(node.shape) + 1:
        return 0
    groups, times = wide.shape[axis : axis + 2]
    joined = wide.shape[:axis] == node.shape[:axis] and wide.shape[axis + 2 :] == node.shape[axis + 1 :]
    whole = isinstance(groups, int) and isinstance(times, int) and groups * times == node.shape[axis]
    return times if joined and whole and isinstance(times, int) else 0
