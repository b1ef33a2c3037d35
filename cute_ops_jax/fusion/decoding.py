"""A step of decoding that a program writes out, by ``decode_attention``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isinf
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.fusion.attention import Decoding, Ends
from cute_ops_jax.composite.attention import decode_attention


def by_lengths(step: Decoding, scale: float) -> Callable[..., Any]:
    """The function of queries, keys, values and of the numbers of keys ``end`` and ``begin``, ``[batch, 1]`` or
    ``[batch, heads of keys]``, None where no keys come before the first one.

    Caches have no gradient: where one is taken, the program's own formula runs.
    """
    run = jax.custom_jvp(partial(_decode, step, scale))
    run.defjvp(lambda given, tangents: jax.jvp(partial(_formula, step, scale), given, tangents))
    return run


def _decode(step: Decoding, scale: float, q: Any, k: Any, v: Any, end: Any, begin: Any) -> Any:
    """A query that attends to nothing gets what the program gives it: NaN where the scores of hidden keys are -inf,
    else the mean of all values, as a query of zeros does that attends to all keys.
    """
    unknown, keys = isinf(step.lengths.fill), k.shape[2 if step.heads_first else 1]
    if step.heads_first:  # each head of keys is an example
        b, groups = k.shape[:2]
        q = jnp.reshape(q, (b * groups, 1, q.shape[2] // groups, q.shape[3]))
        k, v = (jnp.reshape(x, (b * groups, keys, 1, x.shape[3])) for x in (k, v))
        end, begin = (
            x if x is None else jnp.reshape(jnp.broadcast_to(x, (b, groups)), (b * groups, 1)) for x in (end, begin)
        )
    by_query = begin is not None or step.end.step
    shape = (q.shape[0], q.shape[2] if by_query else 1)
    end = jnp.broadcast_to(jnp.minimum(_of_queries(step, step.end, end, q.shape[2]), keys), shape)
    low = jnp.zeros_like(end)
    if step.begin is not None:
        low = jnp.broadcast_to(jnp.maximum(_of_queries(step, step.begin, begin, q.shape[2]), 0), shape)
    unseen = low >= end
    q = jnp.where(unseen[:, None, :, None], jnp.asarray(jnp.nan if unknown else 0, q.dtype), q)
    low, end = jnp.where(unseen, 0, low), jnp.where(unseen, 1 if unknown else keys, end)
    options = {"scale": scale, "softcap": step.lengths.softcap}
    if by_query:
        out, _ = decode_attention(q, k, v, jnp.max(end, 1), score_mod=_between, captured=(low, end), **options)
    else:
        out, _ = decode_attention(q, k, v, end[:, 0], **options)
    return out


def _of_queries(step: Decoding, bound: Ends, x: Any, heads: int) -> Any:
    """A number of keys of each query, ``[batch, heads]``, or ``[batch, 1]`` where it is that of all."""
    return x + jnp.arange(heads, dtype=x.dtype) % step.queries if bound.step else x


def _between(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, low: Any, end: Any) -> Any:
    seen = xp.logical_and(low[batch, head] <= k, k < end[batch, head])
    return xp.where(seen, score, -xp.inf)


def _formula(step: Decoding, scale: float, q: Any, k: Any, v: Any, end: Any, begin: Any) -> Any:
    """The definition, as the program computes it."""
    if not step.heads_first:
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    (b, _, heads, d), (groups, keys) = q.shape, k.shape[1:3]
    by_head = jnp.reshape(q, (b, groups, heads // groups, d))
    scores = jnp.einsum("bgrd,bgnd->bgrn", by_head, k, preferred_element_type="float32")
    scores = scores * scale
    if cap := step.lengths.softcap:
        scores = jnp.tanh(scores / cap) * cap
    seen = jnp.ones((), bool)
    for x, each, sign in ((end, step.end, 1), (begin, step.begin, -1)):
        if x is not None:
            of_query = jnp.arange(heads // groups, dtype=x.dtype)[:, None] % step.queries * each.step
            ahead = (x[:, :, None, None] + of_query - jnp.arange(keys, dtype=x.dtype)) * sign
            seen = seen & (ahead > 0 if sign > 0 else ahead >= 0)
    p = jax.nn.softmax(jnp.where(seen, scores, step.lengths.fill), -1).astype(v.dtype)
    out = jnp.einsum("bgrn,bgnd->bgrd", p, v)
    return jnp.reshape(out, (b, 1, heads, v.shape[3]))
