"""The softmax of the references of attention."""

from __future__ import annotations

import math
from typing import Any

from cute_ops.declaration.array_api import beside


def softmax(xp: Any, scores: Any, sink: Any = None) -> tuple[Any, Any]:
    """The weights of scores over their last dim, and the log-sum-exp of each row, (..., 1): 0 and -inf in a row of
    nothing but -inf.

    Args:
        sink: one more score of each row, without a weight, which broadcasts to ``(..., 1)``; or None.
    """
    last = xp.full((*scores.shape[:-1], 1), -math.inf, dtype=scores.dtype, **beside(xp, scores))
    if sink is not None:
        last = xp.broadcast_to(xp.astype(sink, scores.dtype), last.shape)
    scores = xp.concat([scores, last], axis=-1)
    highest = xp.max(scores, axis=-1, keepdims=True)
    highest = xp.where(highest > -math.inf, highest, xp.zeros_like(highest))
    weights = xp.exp(scores - highest)
    total = xp.sum(weights, axis=-1, keepdims=True)
    some = xp.where(total > 0, total, xp.ones_like(total))
    lse = xp.where(total > 0, xp.log(some) + highest, xp.full_like(total, -math.inf))
    return (weights / some)[..., :-1], lse
