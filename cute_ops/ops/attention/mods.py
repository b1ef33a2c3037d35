"""Masks and changes of scores, as functions of a score and its coordinates, and their expressions for kernels.

A score has the coordinates ``batch``, ``head``, ``q`` and ``k``, numbers of the call's dims; ``shift`` is what is added
to ``q`` to compare it with ``k``: the last query stands beside the last key. A mask gives whether a query attends to a
key. The functions take arrays that broadcast, too, so that they are their own references.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cute_ops.expressions.derivative import differentiate
from cute_ops.expressions.graph import OPERANDS, Graph, copied
from cute_ops.expressions.intervals import Range, bounds
from cute_ops.expressions.text import text_of
from cute_ops.expressions.tracing import trace

COORDINATES = {"batch": "", "head": "", "q": "*m 1", "k": "n", "shift": ""}
# What is known of the coordinates of a tile of scores.
_RANGES = (Range.POINT, Range.POINT, Range.INTERVAL, Range.INTERVAL, Range.POINT)
Mod = Callable[..., Any]


def band(left: int, right: int) -> Mod | None:
    """The mask of keys at most ``left`` before the query and at most ``right`` after it; -1 is any number. None where
    it leaves out nothing.
    """
    if left < 0 and right < 0:
        return None

    def mask(xp: Any, batch: Any, head: Any, q: Any, k: Any, shift: Any) -> Any:
        place = q + shift
        after = k <= place + right if right >= 0 else None
        before = place - left <= k if left >= 0 else None
        if after is None or before is None:
            return before if after is None else after
        return xp.logical_and(before, after)

    return mask


def soft_cap(cap: float) -> Mod | None:
    """The change of scores that keeps them between ``-cap`` and ``cap``; None for 0."""
    if cap == 0:
        return None
    return lambda xp, score, batch, head, q, k, shift: cap * xp.tanh(score * (1 / cap))


@cache
def mask_of(left: int, right: int) -> tuple[str, str]:
    """The expression of a :func:`band` and that of its bounds over a tile; empty without a mask."""
    mod = band(left, right)
    if mod is None:
        return "", ""
    mask = trace(mod, COORDINATES)
    return text_of(mask), text_of(bounds(mask, _RANGES).expression)


@cache
def score_of(cap: float) -> str:
    """The expression of a :func:`soft_cap`; empty without one."""
    mod = soft_cap(cap)
    return "" if mod is None else text_of(trace(mod, {"score": "*m n", **COORDINATES}))


@cache
def score_gradient_of(cap: float) -> str:
    """The expression of a :func:`soft_cap`'s gradient: of the cotangent, the score and its coordinates; empty without
    one.
    """
    mod = soft_cap(cap)
    if mod is None:
        return ""
    forward = trace(mod, {"score": "*m n", **COORDINATES})
    found = differentiate(forward, wanted=[0])
    graph = Graph([OPERANDS["t"], *forward.operands])
    given = {("cotangent", 0): 0, **{("operand", i): i + 1 for i in range(len(forward.operands))}}
    sources = [given[source.role, source.position] for source in found.sources]
    nodes = copied(found.expression, graph, lambda node: graph.operand(sources[node.operand]))
    total = nodes[found.expression.outputs[0]]
    for i in found.expression.outputs[1:]:
        total = graph.add("add", total, nodes[i])
    return text_of(graph.finish([total]))
