"""Whether what a program computes depends on a value that it subtracts, as a softmax does not on its rows' largest one.

Of each number that is computed from the value ``s`` we know that it is ``f + k s`` or ``f exp(k s)`` with an f that
does not depend on it. Where k is 0 the dependence ends; what neither says depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from cute_ops.fusion.graph import Node, Shape
from cute_ops.fusion.named import number_of


class _Shift(NamedTuple):
    """How a value depends on ``s``.

    Attributes:
        power: whether it is ``f exp(k s)``, else it is ``f + k s``.
        k: the number.
        varies: of each of its dims the number of the dim of ``s``, from 1 on, that varies along it; 0 if none does.
    """

    power: bool
    k: float
    varies: tuple[int, ...]


_Given = Sequence[_Shift | None]


def is_without_effect(value: Node, live: Collection[Node], outputs: Collection[Node]) -> bool:
    """Whether no output of a graph depends on a value.

    Args:
        value: the value.
        live: the nodes that outputs need.
        outputs: of the graph.
    """
    found: dict[Node, _Shift | None] = {value: _Shift(False, 1.0, _varies(value.shape))}
    waiting: list[tuple[int, Node]] = []
    node = value
    while True:
        if node in outputs:
            return False
        for user in node.users:
            if user in live and user not in found:
                found[user] = None
                heappush(waiting, (user.index, user))
        while waiting:
            _, node = heappop(waiting)  # after all that it is computed from
            shift = _of(node, [found.get(arg) for arg in node.args])
            if shift is None:
                return False
            if shift.k:
                found[node] = shift
                break
        else:
            return True


def _varies(shape: Shape) -> tuple[int, ...]:
    return tuple(i if size != 1 else 0 for i, size in enumerate(shape, 1))


def _of(node: Node, given: _Given) -> _Shift | None:
    """How a node depends on the value, of what its arguments do; None if that cannot be said."""
    if node.op == "primitive":
        return None if isinstance(node.attr, tuple) else _of_primitive(node, given)
    if node.op == "contract":
        return _of_contract(node, given)
    (x,), rule = [each for each in given if each is not None][:1], _OF_ONE.get(node.op)
    alone = given[0] is x and sum(each is not None for each in given) == 1
    return rule(node, x) if alone and rule is not None else None


def _of_cast(node: Node, x: _Shift) -> _Shift | None:
    return x


def _of_transpose(node: Node, x: _Shift) -> _Shift | None:
    return x._replace(varies=tuple(x.varies[i] for i in node.attr))


def _of_broadcast(node: Node, x: _Shift) -> _Shift | None:
    places = dict(zip(node.attr, x.varies, strict=True))
    return x._replace(varies=tuple(places.get(i, 0) for i in range(len(node.shape))))


def _of_opaque(node: Node, x: _Shift) -> _Shift | None:
    """Of one element of each row."""
    return x if node.attr == "pick" and not x.varies[-1] else None


def _of_reshape(node: Node, x: _Shift) -> _Shift | None:
    before = [(size, varies) for size, varies in zip(node.args[0].shape, x.varies, strict=True) if size != 1]
    if [size for size, _ in before] != [size for size in node.shape if size != 1]:
        return x._replace(varies=(0,) * len(node.shape)) if not any(x.varies) else None
    kept = iter([varies for _, varies in before])
    return x._replace(varies=tuple(next(kept) if size != 1 else 0 for size in node.shape))


def _of_reduce(node: Node, x: _Shift) -> _Shift | None:
    primitive, axes, keepdims = node.attr
    if any(x.varies[axis] for axis in axes) or primitive not in ("sum", "mean", "max", "min"):
        return None
    if primitive == "sum" and not x.power:
        sizes = [node.args[0].shape[axis] for axis in axes]
        if not all(isinstance(size, int) for size in sizes):
            return None
        x = x._replace(k=x.k * math.prod(size for size in sizes if isinstance(size, int)))
    kept = [0 if i in axes else varies for i, varies in enumerate(x.varies) if keepdims or i not in axes]
    return x._replace(varies=tuple(kept))


_OF_ONE: dict[str, Callable[[Node, _Shift], _Shift | None]] = {
    "cast": _of_cast, "transpose": _of_transpose, "broadcast": _of_broadcast, "reshape": _of_reshape,
    "reduce": _of_reduce, "opaque": _of_opaque,
}  # fmt: skip


def _of_contract(node: Node, given: _Given) -> _Shift | None:
    """Of ``f exp(k s)`` with an s that does not vary along what is summed over, times what does not depend on it."""
    side = 0 if given[1] is None else 1
    x, (over, of_batch) = given[side], (node.attr[side], node.attr[2][side])
    if x is None or given[1 - side] is not None or not x.power or any(x.varies[i] for i in over):
        return None
    free = [i for i in range(len(x.varies)) if i not in (*over, *of_batch)]
    own, batch = [x.varies[i] for i in free], [x.varies[i] for i in of_batch]
    others = [0] * (len(node.shape) - len(own) - len(batch))
    return x._replace(varies=(*batch, *own, *others) if side == 0 else (*batch, *others, *own))


def _of_primitive(node: Node, given: _Given) -> _Shift | None:
    rank = len(node.shape)
    aligned = [None if x is None else x._replace(varies=(*[0] * (rank - len(x.varies)), *x.varies)) for x in given]
    varies = {x.varies for x in aligned if x is not None}
    rule = _RULES.get(str(node.attr))
    # Of two places of s, one row's and another one's, the difference is not 0.
    made = None if rule is None or len(varies) > 1 else rule(node.args, aligned)
    return None if made is None else _Shift(made[0], made[1], varies.pop())


# Rules of primitives: whether the result is a power, and its k.
_Made = tuple[bool, float] | None


def _exp(args: Sequence[Node], given: _Given) -> _Made:
    (x,) = given
    return None if x is None or x.power else (True, x.k)


def _log(args: Sequence[Node], given: _Given) -> _Made:
    (x,) = given
    return (False, x.k) if x is not None and x.power else None


def _negative(args: Sequence[Node], given: _Given) -> _Made:
    (x,) = given
    return None if x is None else (x.power, x.k if x.power else -x.k)


def _sum(sign: float, args: Sequence[Node], given: _Given) -> _Made:
    first, second = given
    if (first is None or not first.power) and (second is None or not second.power):
        return False, (first.k if first else 0.0) + sign * (second.k if second else 0.0)
    return _same(args, given)


def _same(args: Sequence[Node], given: _Given) -> _Made:
    """Of two powers with one k, or of one and zero; of two sums with one k, or of one and an infinity."""
    shifts = [x for x in given if x is not None]
    if len({(x.power, x.k) for x in shifts}) != 1:
        return None
    power, k = shifts[0].power, shifts[0].k
    others = [number_of(arg) for arg, x in zip(args, given, strict=True) if x is None]
    fits = all(number is not None and (number == 0 if power else math.isinf(number)) for number in others)
    return (power, k) if fits else None


def _where(args: Sequence[Node], given: _Given) -> _Made:
    return None if given[0] is not None else _same(args[1:], given[1:])


def _product(sign: float, args: Sequence[Node], given: _Given) -> _Made:
    first, second = given
    if (first is None or first.power) and (second is None or second.power):
        return True, (first.k if first else 0.0) + sign * (second.k if second else 0.0)
    for x, other in ((first, args[1]), *(((second, args[0]),) if sign > 0 else ())):
        number = number_of(other)
        if x is not None and not x.power and number:
            return False, x.k * number**sign
    return None


def _reciprocal(args: Sequence[Node], given: _Given) -> _Made:
    (x,) = given
    return (True, -x.k) if x is not None and x.power else None


def _size(args: Sequence[Node], given: _Given) -> _Made:
    (x,) = given
    return (True, x.k) if x is not None and x.power else None


def _sign(args: Sequence[Node], given: _Given) -> _Made:
    (x,) = given
    return (True, 0.0) if x is not None and x.power else None


_Rule = Callable[[Sequence[Node], _Given], _Made]
_RULES: dict[str, _Rule] = {
    "abs": _size, "sign": _sign, "exp": _exp, "log": _log, "negative": _negative, "where": _where,
    "reciprocal": _reciprocal,
    "add": lambda args, given: _sum(1.0, args, given), "subtract": lambda args, given: _sum(-1.0, args, given),
    "multiply": lambda args, given: _product(1.0, args, given),
    "divide": lambda args, given: _product(-1.0, args, given),
}  # fmt: skip
