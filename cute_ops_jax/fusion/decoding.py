"""A step of decoding that a program writes out, by ``decode_attention``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isinf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops.fusion.attention_arrays import Decoding
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


class Given(NamedTuple):
    """Arrays of a step.

    Attributes:
        q: ``[batch, 1, heads, columns]``.
        k, v: ``[batch, keys, heads, columns]``, or ``[batch, heads, keys, columns]``.
        end: how many keys there are up to the last one, ``[batch, 1]`` or ``[batch, heads of keys]``.
        begin: how many keys come before the first one; None for none.
        sinks: one more score of each head of queries; None for none.
    """

    q: Any
    k: Any
    v: Any
    end: Any
    begin: Any
    sinks: Any


def masks_of(step: Decoding, scale: float) -> Masks:
    """The scale, soft cap and masks that a step applies to scores; ``scale``: of its product of queries and keys."""
    lengths, begin = step.lengths, 0 if step.begin is None else step.begin.step
    scale *= lengths.scale
    return Masks(scale, lengths.softcap, lengths.fill, step.heads_first, step.queries, (step.end.step, begin))


def by_lengths(masks: Masks) -> Callable[[Given], Any]:
    """The function of :class:`Given` that computes a step.

    Caches have no gradient: where one is taken, the program's own formula runs.
    """
    run = jax.custom_jvp(partial(_decode, masks))
    run.defjvp(lambda primals, tangents: jax.jvp(partial(_formula, masks), primals, tangents))
    return run


def _decode(masks: Masks, given: Given) -> Any:
    """A step by ``decode_attention``.

    A query that attends to nothing gets what the program gives it: 0 beside a sink, NaN where the scores of hidden keys
    are -inf, else the mean of all values, which a query of zeros gets that attends to all keys.
    """
    whole, unknown = (*given.q.shape[:3], given.v.shape[3]), isinf(masks.fill)
    q, k, v, end, begin, sinks = _heads_as_examples(given) if masks.heads_first else given
    keys = k.shape[1]
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


def _heads_as_examples(given: Given) -> Given:
    """Each head of keys, of caches with heads before keys, as an example of its own."""
    q, k, v, end, begin, sinks = given
    b, groups, keys = k.shape[:3]

    def by_example(number: Any) -> Any:
        return jnp.reshape(jnp.broadcast_to(number, (b, groups)), (b * groups, 1))

    q = jnp.reshape(q, (b * groups, 1, q.shape[2] // groups, q.shape[3]))
    k, v = (jnp.reshape(x, (b * groups, keys, 1, x.shape[3])) for x in (k, v))
    return Given(q, k, v, by_example(end), None if begin is None else by_example(begin), sinks)


def _between(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, *captured: Any) -> Any:
    """A ``score_mod`` that hides keys outside ``low`` to ``end``, the captured numbers of each head."""
    low, end = captured
    seen = xp.logical_and(low[batch, head] <= k, k < end[batch, head])
    return xp.where(seen, score, -xp.inf)


def _formula(masks: Masks, given: Given) -> Any:
    """The definition, which the program computes."""
    q, k, v, end, begin, sinks = given
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
