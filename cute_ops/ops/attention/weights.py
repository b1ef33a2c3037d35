"""Weights of attention and gradients of its scores, written out: what references of its ops share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.expressions.captured import operands_on
from cute_ops.expressions.reference import evaluate
from cute_ops.ops.attention import mods
from cute_ops.ops.attention.sequences import Where
from cute_ops.ops.attention.softmax import softmax


def weights_of(
    xp: Any, given: tuple[Any, Any, Any], attrs: Mapping[str, Any], own: mods.Own, captured: Sequence[Any],
    sequences: Where | None,
) -> tuple[Any, Any, list[Any]]:  # fmt: skip
    """The weights (batch, kv heads, heads of one, s, t), the log-sum-exp of each row, and the operands of a change of
    scores.
    """
    q, k, sinks = given
    (h, d), (t, g) = q.shape[-2:], k.shape[-3:-1]
    wide_q, wide_k, sink = widen(xp, q, k, sinks)
    scores = grouped(xp, wide_q, g) @ xp.matrix_transpose(grouped(xp, wide_k)) * (attrs["scale"] or d**-0.5)
    arrays = mods.by_batch(xp, own, captured, scores.shape[0])
    at, operands = coordinates(xp, scores, t), [scores]
    if sequences is not None:
        at = sequences.coordinates(at[mods.HEAD], at[len(mods.COORDINATES) + mods.HEAD])
    if (change := mods.score_of(attrs["softcap"], own.score)) is not None:
        operands = operands_on(change, xp, [scores, *at], arrays)
        (changed,) = evaluate(change.expression, xp, operands)
        scores = xp.broadcast_to(changed, scores.shape)
    if (mask := mods.mask_of_call(attrs, own.mask)) is not None:
        (seen,) = evaluate(mask.expression, xp, operands_on(mask, xp, at, arrays))
        scores = xp.where(seen, scores, xp.asarray(-math.inf, dtype=scores.dtype, **beside(xp, q)))
    if sequences is not None:
        scores = xp.where(sequences.seen(), scores, xp.asarray(-math.inf, dtype=scores.dtype, **beside(xp, q)))
    weights, lse = softmax(xp, scores, None if sink is None else xp.reshape(sink, (1, g, h // g, 1, 1)))
    return weights, lse, operands


def dscores_of(xp: Any, weights: Any, given: tuple[Any, Any, Any], dlse: Any) -> tuple[Any, Any]:
    """Gradients of changed scores, and the sum ``out * dout - dlse`` of each row. ``given``: v, ``out`` and ``dout`` in
    float32, :func:`grouped`.
    """
    v, out, dout = given
    delta = xp.sum(out * dout, axis=-1)
    if dlse is not None:
        delta = delta - xp.reshape(*widen(xp, dlse), delta.shape)
    return weights * (dout @ xp.matrix_transpose(v) - delta[..., None]), delta


def coordinates(xp: Any, scores: Any, keys: Any) -> list[Any]:
    """Batch, head, q and k of scores (batch, kv heads, heads of one, s, t), and their sizes."""
    (b, g, r, s, _), dtype = scores.shape, scores.dtype

    def count(size: Any, shape: tuple[Any, ...]) -> Any:
        return xp.reshape(xp.astype(xp.arange(size, **beside(xp, scores)), dtype), shape)

    shapes = (b, (b, 1, 1, 1, 1)), (g * r, (1, g, r, 1, 1)), (s, (s, 1)), (keys, (keys,))
    batch, head, q, k = (count(*each) for each in shapes)
    sizes = [xp.asarray(size, dtype=dtype, **beside(xp, scores)) for size, _ in shapes]
    return [batch, head, q + (sizes[3] - sizes[2]), k, *sizes]


def grouped(xp: Any, x: Any, groups: int | None = None) -> Any:
    """(*lead, seqlen, heads, d) as (batch, groups, heads of one, seqlen, d)."""
    *lead, s, h, d = x.shape
    groups = groups or h
    return xp.permute_dims(xp.reshape(x, (math.prod(lead), s, groups, h // groups, d)), (0, 2, 3, 1, 4))


def ungrouped(xp: Any, x: Any, q: Any) -> Any:
    return xp.reshape(xp.permute_dims(x, (0, 3, 1, 2, 4)), (*q.shape[:-1], x.shape[-1]))
