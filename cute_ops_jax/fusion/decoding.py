"""A step of decoding that a program writes out, by ``decode_attention``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isinf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops.fusion.attention import Decoding
from cute_ops_jax.composite.attention import decode_attention


class Masks(NamedTuple):
    """What is done to scores.

    Attributes:
        scale, softcap: as attributes of ``decode_attention``.
        fill: the scores of keys that are hidden.
        heads_first: whether caches are ``[batch, heads, keys, columns]``.
        queries: how many neighbouring heads are queries of one head.
        steps: how many more keys each query attends to than the one before, and how many more come before these.
    """

    scale: float
    softcap: float
    fill: float
    heads_first: bool
    queries: int
    steps: tuple[int, int]


def masks_of(step: Decoding, scale: float) -> Masks:
    """``scale``: of the product before masks."""
    lengths, begin = step.lengths, 0 if step.begin is None else step.begin.step
    scale *= lengths.scale
    return Masks(scale, lengths.softcap, lengths.fill, step.heads_first, step.queries, (step.end.step, begin))


def by_lengths(masks: Masks) -> Callable[..., Any]:
    """The function of queries, keys, values, of the numbers of keys ``end`` and ``begin``, ``[batch, 1]`` or ``[batch,
    heads of keys]``, None where no keys come before the first one, and of sinks or None.

    Caches have no gradient: where one is taken, the program's own formula runs.
    """
    run = jax.custom_jvp(partial(_decode, masks))
    run.defjvp(lambda given, tangents: jax.jvp(partial(_formula, masks), given, tangents))
    return run


def _decode(masks: Masks, q: Any, k: Any, v: Any, end: Any, begin: Any, sinks: Any) -> Any:
    """A query that attends to nothing gets what the program gives it: 0 beside a sink, NaN where the scores of hidden
    keys are -inf, else the mean of all values, as a query of zeros does that attends to all keys.
    """
    whole, unknown, keys = (*q.shape[:3], v.shape[3]), isinf(masks.fill), k.shape[2 if masks.heads_first else 1]
    if masks.heads_first:  # each head of keys is an example
        b, groups = k.shape[:2]
        q = jnp.reshape(q, (b * groups, 1, q.shape[2] // groups, q.shape[3]))
        k, v = (jnp.reshape(x, (b * groups, keys, 1, x.shape[3])) for x in (k, v))
        end, begin = (
            x if x is None else jnp.reshape(jnp.broadcast_to(x, (b, groups)), (b * groups, 1)) for x in (end, begin)
        )
    by_query = begin is not None or masks.steps[0]
    shape = (q.shape[0], q.shape[2] if by_query else 1)
    own = jnp.arange(q.shape[2], dtype="int32")[None] % masks.queries  # which query a head is
    low = 0 if begin is None else jnp.maximum(begin + own * masks.steps[1], 0)
    end = jnp.clip(end + own if masks.steps[0] else end, 0, keys)
    low, end = jnp.broadcast_to(jnp.asarray(low, "int32"), shape), jnp.broadcast_to(end, shape)
    if sinks is None:
        unseen = low >= end
        q = jnp.where(unseen[:, None, :, None], jnp.asarray(jnp.nan if unknown else 0, q.dtype), q)
        low, end = jnp.where(unseen, 0, low), jnp.where(unseen, 1 if unknown else keys, end)
    options = {"sinks": sinks, "scale": masks.scale, "softcap": masks.softcap}
    if by_query:
        out, _ = decode_attention(q, k, v, jnp.max(end, 1), score_mod=_between, captured=(low, end), **options)
    else:
        out, _ = decode_attention(q, k, v, end[:, 0], **options)
    return jnp.reshape(out, whole)


def _between(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, low: Any, end: Any) -> Any:
    seen = xp.logical_and(low[batch, head] <= k, k < end[batch, head])
    return xp.where(seen, score, -xp.inf)


def _formula(masks: Masks, q: Any, k: Any, v: Any, end: Any, begin: Any, sinks: Any) -> Any:
    """The definition, as the program computes it."""
    if not masks.heads_first:
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    (b, _, heads, d), (groups, keys) = q.shape, k.shape[1:3]
    by_head = jnp.reshape(q, (b, groups, heads // groups, d))
    scores = jnp.einsum("bgrd,bgnd->bgrn", by_head, k, preferred_element_type="float32") * masks.scale
    if masks.softcap:
        scores = jnp.tanh(scores / masks.softcap) * masks.softcap
    key = jnp.reshape(jnp.arange(keys, dtype="int32"), (1, 1, 1, keys))
    own = jnp.reshape(jnp.arange(heads // groups, dtype="int32"), (1, 1, heads // groups, 1)) % masks.queries
    seen = key < end[:, :, None, None] + own * masks.steps[0]
    if begin is not None:
        seen = seen & (key >= begin[:, :, None, None] + own * masks.steps[1])
    scores = jnp.where(seen, scores, masks.fill)
    if sinks is not None:
        column = jnp.reshape(sinks.astype("float32"), (1, groups, heads // groups, 1))
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:3], 1))], -1)
    p = jax.nn.softmax(scores, -1)[..., :keys].astype(v.dtype)
    return jnp.reshape(jnp.einsum("bgrn,bgnd->bgrd", p, v), (b, 1, heads, v.shape[3]))
