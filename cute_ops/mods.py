"""Masks and changes of scores, for ``attention(score_mod=..., mask_mod=...)``.

A mask is ``mask_mod(xp, batch, head, q, k, *captured)`` and says whether a query attends to a key; a change of scores
is ``score_mod(xp, score, batch, head, q, k, *captured)`` and returns what takes the place of a score. Both are plain
functions in array-API style: write your own, and call these in them. They run as they are on NumPy's arrays, too.

``batch``, ``head``, ``q`` and ``k`` are numbers: of the example, of the query's head, of the query and of the key. The
last query stands beside the last key: ``q`` counts from ``k.size - q.size`` on, which is 0 where there are as many
queries as keys; ``head.size``, ``q.size`` and ``k.size`` say how many there are. Captured arrays are read by one index
for each dim: ``document[batch, q]``. Where a call gives them by name, each function gets those that its parameters
name. An index outside of an array is the nearest inside, and one between two whole numbers is the lower one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Mod = Callable[..., Any]


def causal(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    """A query attends to keys up to its own."""
    return k <= q


def window(left: int, right: int = 0) -> Mod:
    """The mask of keys at most ``left`` before a query's own and at most ``right`` after it."""

    def window_mask(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return xp.logical_and(q - left <= k, k <= q + right)

    return window_mask


def prefix(xp: Any, batch: Any, head: Any, q: Any, k: Any, prefix: Any) -> Any:
    """A query attends to keys up to its own, and to the first ``prefix[batch]`` ones."""
    return xp.logical_or(k <= q, k < prefix[batch])


def documents(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
    """A query attends to keys of its own document: those with the same number in ``document[batch, place]``."""
    return document[batch, q] == document[batch, k]


def softcap(cap: float) -> Mod:
    """The change of scores that keeps them between ``-cap`` and ``cap``: ``cap * tanh(score / cap)``."""

    def softcap_mod(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return cap * xp.tanh(score * (1 / cap))

    return softcap_mod


def alibi(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any) -> Any:
    """Scores that fall with the distance, by ``slopes[head]`` a place: Press et al., Train Short, Test Long, 2021."""
    return score - slopes[head] * xp.abs(q - k)


def relative_bias(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, table: Any) -> Any:
    """Adds a number for each head and distance: ``table`` has ``2 n + 1`` columns, from ``q - k = -n`` to ``n``. Larger
    distances count as n.
    """
    return score + table[head, q - k + table.shape[1] // 2]


def bias(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, bias: Any) -> Any:
    """Adds ``bias``, (batch, heads, queries, keys)."""
    return score + bias[batch, head, q - (k.size - q.size), k]
