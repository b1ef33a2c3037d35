"""Attention in the forms that JAX programs write becomes our op, whatever the order of dims, masks and heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops.fusion import attention
from cute_ops.testing import compare_one, limits_of
from tests.jax.drawn_graphs import QUICK

B, T, H, KV, D = 2, 6, 4, 2, 16
RNG = np.random.default_rng(5)
Array = jax.Array


def draw(*shape: int, rng: np.random.Generator = RNG) -> Array:
    return jnp.asarray(rng.standard_normal(shape).astype(jnp.bfloat16))


Q, K, V, FEW_K, FEW_V = draw(B, T, H, D), draw(B, T, H, D), draw(B, T, H, D), draw(B, T, KV, D), draw(B, T, KV, D)
SINKS = draw(H)
# The second example attends to nothing: all its keys have one weight, as of finite scores that are equal.
SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])[:, None, None]
LEFT = jnp.asarray([[0, 0, 1, 1, 1, 1], [0] * T], bool)  # padding before the keys
PADDING = jnp.asarray([[1, 1, 1, 1, 0, 0], [0] * T], bool)


def wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def softmax(scores: Array, like: Array) -> Array:
    return jax.nn.softmax(wide(scores), -1).astype(like.dtype)


def lower(queries: int = T, keys: int = T) -> Array:
    return jnp.asarray(np.tril(np.ones((queries, keys), bool)))


def dots(q: Array, k: Array) -> Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.25


def mixed(scores: Array, v: Array) -> Array:
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores, v), v)


def masked(mask: Array | None, fill: float = -1e9) -> Callable[..., Array]:
    return lambda q, k, v: mixed(dots(q, k) if mask is None else jnp.where(mask, dots(q, k), fill), v)


def causal(q: Array, k: Array, v: Array) -> Array:
    return mixed(jnp.where(lower(), dots(q, k), -1e9), v)


def windowed(q: Array, k: Array, v: Array) -> Array:
    ahead = jnp.arange(T)[:, None] - jnp.arange(T)
    return mixed(jnp.where((ahead >= 0) & (ahead < 3), dots(q, k), -jnp.inf), v)


def grouped(q: Array, k: Array, v: Array) -> Array:
    by_group = q.reshape(B, T, KV, H // KV, D)
    scores = jnp.einsum("btkgd,bskd->bkgts", by_group, k) * 0.25
    p = softmax(jnp.where(lower(), scores, -1e30), v)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, H, D)


def joined(q: Array, k: Array, v: Array, m: Array) -> Array:
    """As Gemma's: heads are joined while their scores are masked, which come before their keys."""
    scores = jnp.einsum("btkgd,bskd->btkgs", q.reshape(B, T, KV, H // KV, D) * 0.25, k).reshape(B, T, H, T)
    p = softmax(jnp.where((m[:, None] & lower())[:, :, None], scores, -1e30), v).reshape(B, T, KV, H // KV, T)
    return jnp.einsum("btkgs,bskd->btkgd", p, v).reshape(B, T, H, D)


def heads_first(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = jnp.where(lower(), q @ k.transpose(0, 1, 3, 2) / 4, -1e9)
    return (softmax(scores, v) @ v).transpose(0, 2, 1, 3).reshape(B, T, H * D)


def capped(q: Array, k: Array, v: Array) -> Array:
    return mixed(jnp.where(lower(), jnp.tanh(wide(dots(q, k)) / 50) * 50, -1e9), v)


def vmapped(q: Array, k: Array, v: Array) -> Array:
    def head(q: Array, k: Array, v: Array) -> Array:
        return softmax(jnp.where(lower(), q @ k.T / 4, -1e9), v) @ v

    return jax.vmap(jax.vmap(head, 1, 1))(q, k, v)


def alibi(q: Array, k: Array, v: Array) -> Array:
    slopes = (2.0 ** -jnp.arange(1, H + 1)).astype(wide(q).dtype)[:, None, None]
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    return mixed(jnp.where(lower(), wide(dots(q, k)) - slopes * distance, -1e9), v)


def upcast(q: Array, k: Array, v: Array) -> Array:
    """All in float32, of queries that are cast and then divided."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", wide(q) / 4.0, wide(k))
    p = jax.nn.softmax(jnp.where(lower(), scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, wide(v)).astype(q.dtype)


def masked_in_another_order(q: Array, k: Array, v: Array) -> Array:
    """As penzai's: queries and keys come first while scores are masked, and their maximum is one over these keys."""
    scores = wide(dots(q, k)).transpose(2, 3, 0, 1)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[..., None, None], scores, -1e9)
    e = jnp.exp(scores.transpose(0, 2, 3, 1) - scores.max(1)[..., None])
    return jnp.einsum("qbhk,bkhd->bqhd", (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)


def additive(q: Array, k: Array, v: Array) -> Array:
    return mixed(wide(dots(q, k)) + jnp.where(lower(), 0.0, -1e9).astype(wide(q).dtype), v)


def one_head_of_keys(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * 0.25
    return jnp.einsum("bhqk,bkd->bqhd", softmax(jnp.where(lower(), scores, -1e9), v), v[:, :, 0])


def in_a_scan(q: Array, k: Array, v: Array) -> Array:
    """With a mask that is computed before it."""
    mask = lower()
    return jax.lax.scan(lambda x, _: (mixed(jnp.where(mask, dots(x, k), -1e9), v), None), q, None, length=2)[0]


def added_in_a_scan(q: Array, k: Array, v: Array, m: Array) -> Array:
    """With numbers that are added, which are computed before it and have no gradient."""
    added = jnp.where((m[:, None] & lower())[:, None], 0.0, -1e30).astype(wide(q).dtype)
    return jax.lax.scan(lambda x, _: (mixed(wide(dots(x, k)) + added, v), None), q, None, length=2)[0]


def repeated(q: Array, k: Array, v: Array) -> Array:
    k, v = (jnp.repeat(x, H // KV, axis=2) for x in (k, v))
    return causal(q, k, v)


def chosen_by_head(q: Array, k: Array, v: Array) -> Array:
    """With a mask of each head, which no band says."""
    seen = jnp.arange(T)[:, None] * jnp.arange(T) < 9 * (1 + jnp.arange(H)[:, None, None])
    return mixed(jnp.where(seen, dots(q, k), -1e9), v)


def wide_to_the_end(q: Array, k: Array, v: Array) -> Array:
    """In float32 with values that were 16 bits before, and are afterwards."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", wide(q) * 0.25, wide(k))
    p = jax.nn.softmax(jnp.where(lower(), scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, wide(v)).astype(q.dtype)


def zero_where_hidden(q: Array, k: Array, v: Array, m: Array) -> Array:
    """With no weights at all where a query sees no key."""
    p = jax.nn.softmax(wide(dots(q, k)), -1, where=m[:, None, None])
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v)


def zeros_after(q: Array, k: Array, v: Array, m: Array) -> Array:
    """With no weights where a query sees no key, although its scores are finite."""
    seen = m[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, wide(dots(q, k)), -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(seen, p, 0).astype(v.dtype), v)


def two_masks(q: Array, k: Array, v: Array, m: Array) -> Array:
    """A query that sees padding alone has a weight for each key, those after it included."""
    return mixed(jnp.where(lower(), jnp.where(m[:, None, None], wide(dots(q, k)), -1e9), -1e9), v)


def added_masks(q: Array, k: Array, v: Array, m: Array) -> Array:
    of_keys = jnp.where(m, 0.0, -1e30).astype(wide(q).dtype)[:, None, None]
    return mixed(jnp.where(lower(), wide(dots(q, k)) + of_keys, -1e30), v)


def times_mask(fill: float) -> Callable[..., Array]:
    def function(q: Array, k: Array, v: Array, m: Array) -> Array:
        seen = m[:, None, None]
        p = jax.nn.softmax(jnp.where(seen, wide(dots(q, k)), fill), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", (p * seen).astype(v.dtype), v)

    return function


def before_the_sum(hidden: bool, zeros: bool) -> Callable[..., Array]:
    """A softmax by hand, whose exponentials a mask makes zeros before they are summed up."""

    def function(q: Array, k: Array, v: Array, m: Array) -> Array:
        scores, seen = wide(dots(q, k)), m[:, None, None]
        scores = jnp.where(seen, scores, -1e9) if hidden else scores
        p = jnp.exp(scores - scores.max(-1, keepdims=True))
        p = jnp.where(seen, p, 0) if zeros else p * seen
        return jnp.einsum("bhqk,bkhd->bqhd", (p / p.sum(-1, keepdims=True)).astype(v.dtype), v)

    return function


def column(q: Array, k: Array, v: Array, sinks: Array, m: Array | None = None) -> Array:
    """As GPT-OSS's: sinks are one more column of scores, which is dropped behind the softmax."""
    scores = jnp.where(lower() if m is None else m[:, None, None] & lower(), wide(dots(q, k)), -jnp.inf)
    of_rows = jnp.broadcast_to(wide(sinks)[None, :, None, None], (*scores.shape[:3], 1))
    joined = jnp.concatenate([scores, of_rows], -1)
    joined = joined - joined.max(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(joined, -1)[..., :-1].astype(v.dtype), v)


def grouped_column(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, KV, H // KV, D), k) * 0.25
    of_rows = jnp.broadcast_to(wide(sinks).reshape(1, KV, H // KV, 1, 1), (B, KV, H // KV, T, 1))
    joined = jnp.concatenate([jnp.where(lower(), wide(scores), -1e30), of_rows], -1)
    p = jax.nn.softmax(joined, -1)[..., :-1].astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, H, D)


def in_the_sum(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    scores, of_heads = jnp.where(lower(), wide(dots(q, k)), -jnp.inf), wide(sinks)[:, None, None]
    most = jnp.maximum(scores.max(-1, keepdims=True), of_heads)
    p = jnp.exp(scores - most)
    p = p / (p.sum(-1, keepdims=True) + jnp.exp(of_heads - most))
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v)


def joined_in_the_sum(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    """Of heads that are joined while a mask and sinks are applied."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, KV, H // KV, D), k).reshape(B, H, T, T) * 0.25
    scores, of_heads = jnp.where(lower(), wide(scores), -1e30), wide(sinks)[:, None, None]
    most = jnp.maximum(scores.max(-1, keepdims=True), of_heads)
    p = jnp.exp(scores - most)
    p = (p / (p.sum(-1, keepdims=True) + jnp.exp(of_heads - most))).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", p.reshape(B, KV, H // KV, T, T), v).reshape(B, T, H, D)


def one_in_the_sum(most: bool) -> Callable[..., Array]:
    """Softmax of scores and of a zero."""

    def weights(scores: Array) -> Array:
        shift = jnp.maximum(scores.max(-1, keepdims=True), 0) if most else 0
        p = jnp.exp(scores - shift)
        return p / ((jnp.exp(-shift) if most else 1) + p.sum(-1, keepdims=True))

    return by(weights)


def stopped(q: Array, k: Array, v: Array, bias: Array) -> Array:
    return mixed(wide(dots(q, k)) + jax.lax.stop_gradient(wide(bias)), v)


def with_slopes(q: Array, k: Array, v: Array) -> Array:
    """ALiBi of an array that the function closes over, of which no gradient is taken."""
    return mixed(jnp.where(lower(), wide(dots(q, k)) + jnp.asarray(SLOPES) * jnp.arange(T), -1e9), v)


def divided_behind(q: Array, k: Array, v: Array) -> Array:
    """As MaxText's: a product with weights of heads in groups, divided by their sums."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, KV, H // KV, D), k) * 0.25
    scores = wide(scores) + jnp.where(lower(), 0.0, -1e9).astype(wide(q).dtype)
    p = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("bkgts,bskd->btkgd", p.astype(v.dtype), v).reshape(B, T, H, D)
    return out / jnp.moveaxis(p.sum(-1, keepdims=True), -2, 1).reshape(B, T, H, 1).astype(v.dtype)


def divided_seen(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """As MaxText's, with a mask of numbers that is compared with one of them."""
    scores = wide(jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, KV, H // KV, D), k) * 0.25)
    scores = jnp.where(seen >= -1e38, scores, -2e38)
    p = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("bkgts,bskd->btkgd", p.astype(v.dtype), v).reshape(B, T, H, D)
    return out / jnp.moveaxis(p.sum(-1, keepdims=True), -2, 1).reshape(B, T, H, 1).astype(v.dtype)


def divided_wide(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.where(lower(), wide(dots(q, k)), -1e9)
    p = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.einsum("bhqk,bkhd->bqhd", p, wide(v))
    return (out / p.sum(-1).transpose(0, 2, 1)[..., None]).astype(q.dtype)


def by(weights: Callable[[Array], Array]) -> Callable[..., Array]:
    return lambda q, k, v: jnp.einsum(
        "bhqk,bkhd->bqhd", weights(jnp.where(lower(), wide(dots(q, k)), -1e9)).astype(v.dtype), v
    )


FORMS: dict[str, tuple[Callable[..., Array], tuple[Array, ...], str]] = {
    "no mask": (masked(None), (Q, K, V), ""),
    "causal": (causal, (Q, K, V), "causal"),
    "window": (windowed, (Q, K, V), "left=2, right=0"),
    "jax.nn": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (Q, K, V), "causal"),
    "jax.nn, grouped": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (Q, FEW_K, FEW_V), "causal"
    ),
    "jax.nn, grouped, no mask": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v), (Q, FEW_K, FEW_V), ""),
    "repeated heads": (repeated, (Q, FEW_K, FEW_V), "causal"),
    "grouped": (grouped, (Q, FEW_K, FEW_V), "causal"),
    "joined heads": (joined, (Q, FEW_K, FEW_V, PADDING), "scores changed"),
    "joined heads of two layers": (
        lambda q, k, v, m: joined(joined(q, k, v, m), k, v, m), (Q, FEW_K, FEW_V, PADDING), "scores changed"
    ),
    "heads first": (heads_first, (Q, K, V), "causal"),
    "softcap": (capped, (Q, K, V), "causal, softcap=50"),
    "vmap of heads": (vmapped, (Q, K, V), "causal"),
    "ALiBi": (alibi, (Q, K, V), "causal, scores changed"),
    "added mask": (additive, (Q, K, V), "causal"),
    "scaled queries": (lambda q, k, v: mixed(jnp.where(lower(), dots(q / 4, k), -1e9), v), (Q, K, V), "causal"),
    "one head of keys": (one_head_of_keys, (Q, FEW_K, FEW_V), "causal"),
    "scan": (in_a_scan, (Q, K, V), "causal"),
    "scan, added padding": (added_in_a_scan, (Q, K, V, PADDING), "scores changed"),
    "fewer queries": (lambda q, k, v: masked(None)(q[:, :3], k, v), (Q, K, V), ""),
    "padding": (lambda q, k, v, m: masked(m[:, None, None])(q, k, v), (Q, K, V, PADDING), "scores changed"),
    "padding and causal": (
        lambda q, k, v, m: masked(m[:, None, None] & lower())(q, k, v), (Q, K, V, PADDING), "scores changed"
    ),
    "mask of all examples": (masked(lower()[None, None].repeat(B, 0)), (Q, K, V), "causal"),
    "float32": (wide_to_the_end, (Q, K, V), "causal"),
    "softmax's where": (zero_where_hidden, (Q, K, V, PADDING), "scores changed"),
    "zeros after the softmax": (zeros_after, (Q, K, V, PADDING), "scores changed"),
    "masks of finite scores": (two_masks, (Q, K, V, LEFT), "scores changed"),
    "masks of finite scores, added": (added_masks, (Q, K, V, LEFT), "scores changed"),
    "a mask of finite scores within one of none": (
        lambda q, k, v, m: mixed(
            jnp.where(lower(), jnp.where(m[:, None, None], wide(dots(q, k)), -1e9), -jnp.inf), v
        ),
        (Q, K, V, LEFT), "causal, scores changed",
    ),
    "weights times the mask": (times_mask(-1e9), (Q, K, V, PADDING), "scores changed"),
    "exponentials times the mask": (before_the_sum(False, False), (Q, K, V, LEFT.at[1, 0].set(True)), "scores changed"),
    "zeros among exponentials": (before_the_sum(True, True), (Q, K, V, LEFT.at[1, 0].set(True)), "scores changed"),
    "bias without a gradient": (stopped, (Q, K, V, draw(H, T, T)), "scores changed"),
    "learned bias": (lambda q, k, v, b: mixed(dots(q, k) + b, v), (Q, K, V, draw(H, T, T)), "scores changed"),
    "learned bias of examples": (
        lambda q, k, v, b, c: mixed(jnp.where(lower(), wide(dots(q, k)) + wide(b) * c, -1e9), v),
        (Q, K, V, draw(B, 1, T, T), draw(H, 1, T)), "causal, scores changed",
    ),
    "known slopes": (with_slopes, (Q, K, V), "causal, scores changed"),
    "by the reciprocal": (by(lambda x: jnp.exp(x) * (1 / jnp.exp(x).sum(-1, keepdims=True))), (Q, K, V), "causal"),
    "divided behind": (divided_behind, (Q, FEW_K, FEW_V), "causal"),
    "divided behind, in float32": (divided_wide, (Q, K, V), "causal"),
    "divided behind, in float32, of one example": (divided_wide, (Q[:1], K[:1], V[:1]), "causal"),
    "without a maximum": (by(lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)), (Q, K, V), "causal"),
    "by the logarithm": (by(lambda x: jnp.exp(jax.nn.log_softmax(x))), (Q, K, V), "causal"),
    "by the log-sum": (by(lambda x: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))), (Q, K, V), "causal"),
    "upcast": (upcast, (Q, K, V), "causal"),
    "masked in another order of dims": (masked_in_another_order, (Q, K, V), "causal"),
    "sinks as a column": (column, (Q, K, V, SINKS), "causal"),
    "sinks as a column, of one example": (column, (Q[:1], K[:1], V[:1], SINKS), "causal"),
    "sinks as a column, padding": (column, (Q, K, V, SINKS, LEFT), "scores changed"),
    "sinks as a column, grouped": (grouped_column, (Q, FEW_K, FEW_V, SINKS), "causal"),
    "sinks in the sum": (in_the_sum, (Q, K, V, SINKS), "causal"),
    "sinks in the sum, joined heads": (joined_in_the_sum, (Q, FEW_K, FEW_V, SINKS), "causal"),
    "one in the sum": (one_in_the_sum(False), (Q, K, V), "causal, sinks=0"),
    "one in the sum, with a maximum": (one_in_the_sum(True), (Q, K, V), "causal, sinks=0"),
    "mask of each head": (chosen_by_head, (Q, K, V), "scores changed"),
}  # fmt: skip


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args, said = FORMS[name]
    if name.startswith("learned"):  # however few scores there are
        monkeypatch.setattr(attention, "LEAST_LEARNED", 0)
        monkeypatch.setattr(attention, "LEAST_LEARNED_KEYS", 0)
    (entry,) = cute_ops_jax.fuse.report(function, *args).replaced
    given = ", ".join(
        [*(f"captured{i}" for i in range(entry.what.count("captured"))), *["sinks"] * ("sinks," in entry.what)]
    )
    assert (entry.becomes, entry.what) == ("attention", ", ".join(filter(None, ["q, k, v", given, said])))
    places = tuple(i for i, a in enumerate(args) if a.dtype != bool)

    def results(function: Callable[..., Array], args: Any) -> Any:
        def loss(*args: Array) -> Any:
            out = function(*args)
            return jnp.sum(jnp.sin(wide(out))), out

        return jax.grad(loss, places, has_aux=True)(*args)

    # The loss of 16 bits is measured on several inputs, of which the first are compared.
    rng = np.random.default_rng([5, *name.encode()])
    many = tuple(a if a.dtype == bool else jnp.concatenate([a[None], draw(7, *a.shape, rng=rng)]) for a in args)
    axes = tuple(None if a.dtype == bool else 0 for a in args)
    all_low = _arrays(compiled(jax.vmap(partial(results, function), (axes,)))(many))
    with jax.enable_x64(True):
        exact = tuple(a if a.dtype == bool else a.astype("float64") for a in many)
        all_exact = _arrays(compiled(jax.vmap(partial(results, function), (axes,)))(exact))
    given = {str(i): np.asarray(a) for i, a in enumerate(args) if a.dtype != bool}
    each = [(given, tuple(a[k] for a in all_low), tuple(a[k] for a in all_exact)) for k in range(8)]
    got = _arrays(compiled(partial(results, cute_ops_jax.fuse(function)))(args))
    for i, (a, b, tolerance) in enumerate(zip(got, each[0][2], limits_of(*each[0], each[1:]), strict=True)):
        compare_one(f"{name}, result {i}", a, b, tolerance)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=QUICK)


def _arrays(tree: Any) -> tuple[np.ndarray[Any, Any], ...]:
    return tuple(map(np.asarray, jax.tree.leaves(tree)))


def became(function: Callable[..., Any], *args: Any) -> list[str]:
    return [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args).replaced]


def test_what_casts_of_queries_and_keys_are_computed_from_is_one_expression() -> None:
    def function(q: Array, k: Array, v: Array) -> Array:
        return upcast(jnp.tanh(q) * q, jnp.tanh(k) + k, v)

    assert sorted(became(function, Q, K, V)) == ["attention", "fused", "fused"]
    got, want = (compiled(each)(Q, K, V) for each in (cute_ops_jax.fuse(function), function))
    np.testing.assert_allclose(wide(got), wide(want), atol=0.02)


STAYS: dict[str, tuple[Callable[..., Any], tuple[Array, ...], str]] = {
    "bias with a gradient": (
        lambda q, k, v, b: mixed(dots(q, k) + b, v), (Q, K, V, draw(H, T, T)),
        "an array that its scores are computed from may have a gradient, which costs more than attention saves up to "
        "2^25 scores: stop it where none is needed",
    ),
    "weights": (
        lambda q, k, v: (mixed(dots(q, k), v), softmax(dots(q, k), v).max()), (Q, K, V),
        "something else reads its weights",
    ),
    "weights in two dtypes": (
        lambda q, k, v: (mixed(dots(q, k), v), softmax(dots(q, k), v).mean(1)), (Q, K, V),
        "something else reads its weights",
    ),
    "scores": (
        lambda q, k, v: (lambda s: (mixed(s * 0.25, v), s))(jnp.einsum("bqhd,bkhd->bhqk", q, k)), (Q, K, V),
        "something else reads its scores",
    ),
    "float32": (
        causal, tuple(x.astype("float32") for x in (Q, K, V)),
        "its arrays or its result are not all of one 16-bit dtype",
    ),
    "12 columns": (causal, tuple(x[..., :12] for x in (Q, K, V)), "heads of 12 columns have no kernel"),
    "NaN of queries without keys": (
        times_mask(-jnp.inf), (Q, K, V, PADDING), "its weights change before they meet the values, as by dropout"
    ),
    "dropout": (
        lambda q, k, v: jnp.einsum(
            "bhqk,bkhd->bqhd",
            softmax(dots(q, k), v) * jax.random.bernoulli(jax.random.key(1), 0.9, (B, H, T, T)), v,
        ),
        (Q, K, V), "its weights change before they meet the values, as by dropout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_and_why(name: str) -> None:
    function, args, why = STAYS[name]
    report = cute_ops_jax.fuse.report(function, *args)
    assert "attention" not in [entry.becomes for entry in report.replaced]
    assert [entry.why for entry in report.left if entry.what == "attention"] == [why]


@pytest.mark.parametrize("sums", [lambda p: p.sum(-1), lambda p: p.sum(-2), lambda p: (2 * p).sum(-1)])
def test_a_division_by_other_sums_stays(sums: Callable[[Array], Array]) -> None:
    """Sums of another head, of other weights, or over queries: all sizes are equal here."""
    q, k, v = (draw(B, H, H, D) for _ in range(3))

    def function(q: Array, k: Array, v: Array) -> Array:
        scores = wide(dots(q, k))
        p = jnp.exp(scores - scores.max(-1, keepdims=True))
        return (jnp.einsum("bhqk,bkhd->bqhd", p, wide(v)) / sums(p)[..., None]).astype(q.dtype)

    assert "attention" not in became(function, q, k, v)


@pytest.mark.parametrize(
    ("batch", "queries", "found"), [(31, 1, False), (32, 1, True), (32, 4, False), (8, 16, True), (1, 17, True)]
)
def test_few_queries_of_few_heads_stay_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, batch: int, queries: int, found: bool
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, k, v = (jax.ShapeDtypeStruct((batch, n, h, D), jnp.bfloat16) for n, h in ((queries, 8), (32, 2), (32, 2)))
    report = cute_ops_jax.fuse.report(jax.nn.dot_product_attention, q, k, v)
    assert ("attention" in [entry.becomes for entry in report.replaced]) is found


def test_a_query_that_attends_to_nothing() -> None:
    """A mask of more queries than keys is no band, but one of data."""
    longer = jnp.concatenate([Q, Q], 1)
    assert became(lambda q, k, v: mixed(jnp.where(lower(2 * T, T), dots(q, k), -1e9), v), longer, K, V) == ["attention"]
    assert became(lambda q, k, v: mixed(jnp.where(lower(2 * T, T)[::-1], dots(q, k), -1e9), v), longer, K, V) == [
        "attention"
    ]


@pytest.mark.parametrize("known", [True, False])
def test_a_mask_that_several_layers_read(known: bool) -> None:
    """The mask is computed once, beside the attention of the first layer."""

    def function(q: Array, k: Array, v: Array, m: Array) -> Array:
        seen = (lower() if known else m[:, None, None] & lower()).astype(jnp.float32)
        for _ in range(3):
            q = mixed(jnp.where(seen != 0, dots(q, k), -1e9), v)
        return q

    assert became(function, Q, K, V, PADDING) == ["attention"]
    (entry,) = (e for e in cute_ops_jax.fuse.report(function, Q, K, V, PADDING).replaced if e.becomes == "attention")
    assert (entry.times, entry.what.endswith("causal")) == (3, known)
    got, want = (jax.jit(f)(Q, K, V, PADDING) for f in (cute_ops_jax.fuse(function), function))
    np.testing.assert_allclose(wide(got), wide(want), rtol=0.03, atol=0.03)


def test_layers_that_divide_behind_share_a_mask() -> None:
    def function(q: Array, k: Array, v: Array, m: Array) -> Array:
        seen = jnp.where(m[:, None, None, None] & lower(), 0.0, -2e38).astype(jnp.float32)
        return divided_seen(divided_seen(q, k, v, seen), k, v, seen)

    given = (Q, FEW_K, FEW_V, PADDING)
    entries = cute_ops_jax.fuse.report(function, *given).replaced
    assert sum(entry.times for entry in entries if entry.becomes == "attention") == 2
    got, want = (jax.jit(f)(*given) for f in (cute_ops_jax.fuse(function), function))
    np.testing.assert_allclose(wide(got), wide(want), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    "form",
    ["where", "added", "beside causal", "divided behind", "an argument", "a logarithm", "of two layers", "by zeros"],
)
def test_queries_without_keys(form: str) -> None:
    """The softmax of scores that are all -inf is NaN."""
    mask = jnp.asarray(RNG.random((B, 1, T, T)) < 0.3)
    mask = mask.at[0, 0, 1].set(False).at[1, 0, T - 1, T - 1].set(True)

    def function(q: Array, k: Array, v: Array, mask: Array) -> Array:
        scores = wide(dots(q, k))
        if form == "added":
            return mixed(scores + jnp.where(mask, 0.0, -jnp.inf), v)
        if form == "by zeros":
            e = jnp.exp(scores - scores.max(-1, keepdims=True)) * mask
            return jnp.einsum("bhqk,bkhd->bqhd", (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)
        if form == "an argument":
            return mixed(scores + jax.lax.stop_gradient(mask), v)
        if form == "a logarithm":
            return mixed(scores + jnp.log(mask.astype(scores.dtype)), v)
        if form == "of two layers":
            added = jnp.where(mask, 0.0, -jnp.inf)
            return mixed(wide(dots(jnp.where(jnp.isnan(first := mixed(scores + added, v)), 0, first), k)) + added, v)
        scores = jnp.where(mask & lower() if form == "beside causal" else mask, scores, -jnp.inf)
        if form != "divided behind":
            return mixed(scores, v)
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        out = jnp.einsum("bhqk,bkhd->bqhd", e.astype(v.dtype), v)
        return out / e.sum(-1).swapaxes(1, 2)[..., None].astype(v.dtype)

    mask = jnp.where(mask, 0.0, -jnp.inf) if form == "an argument" else mask
    assert "attention" in became(function, Q, K, V, mask)
    got, want = (np.asarray(jax.jit(f)(Q, K, V, mask), "float32") for f in (cute_ops_jax.fuse(function), function))
    assert np.isnan(want).any() and not np.isnan(want).all()
    np.testing.assert_allclose(got, want, rtol=0.03, atol=0.03)


OF_KEYS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: wide(x).sum(-1) > 0,
    "largest": lambda x: jnp.abs(x).max(-1) != 0,
    "kept": lambda x: (wide(x).mean(-1, keepdims=True) <= 0.1)[..., 0],
    "norm": lambda x: jnp.linalg.norm(wide(x), axis=-1) > 3,
    "product": lambda x: x @ jnp.ones(x.shape[-1], x.dtype) > 0,
}
BY_KEY: dict[str, Callable[[Array], Array]] = {
    "indexed": lambda m: m[:, None, None],
    "exchanged": lambda m: jnp.swapaxes(m[..., None], 1, 2)[:, None],
    "vmapped": lambda m: jax.vmap(lambda row: jnp.broadcast_to(row, (1, row.size, row.size)))(m),
    "queries, too": lambda m: m[:, None, None] & m[:, None, :, None],
}
HIDING: dict[str, Callable[[Array, Array], Array]] = {
    "where": lambda s, m: jnp.where(m, s, -1e9),
    "added": lambda s, m: s + jnp.where(m, 0.0, -1e9).astype(s.dtype),
    "one minus": lambda s, m: s + (1 - m.astype(s.dtype)) * -1e9,
    "diagonal": lambda s, m: jnp.where(m | jnp.eye(s.shape[-1], dtype=bool), s, -jnp.inf),
}


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("seed", range(12))
def test_masks_that_are_computed_from_the_rows(seed: int) -> None:
    """Padding that is known by its values, of which the program may make more use."""
    rng = np.random.default_rng([7, seed])
    of_keys, by_key, hiding = (list(forms.values())[rng.integers(len(forms))] for forms in (OF_KEYS, BY_KEY, HIDING))
    batch, heads, more = int(rng.integers(1, 3)), int(rng.choice([1, 2, 4])), rng.integers(3)

    def function(x: Array, w: Array) -> Any:
        m = of_keys(jax.lax.stop_gradient(x))
        q, k, v = ((x @ each).reshape(batch, T, heads, D) for each in w)
        out = mixed(hiding(wide(dots(q, k)), by_key(m)), v).reshape(batch, T, -1)
        if more == 1:
            out = out * m[..., None].astype(out.dtype)
        return (out, jnp.where(m, jax.nn.logsumexp(wide(x), -1), 0).sum()) if more == 2 else out

    def loss(function: Any, *args: Array) -> Any:
        return sum(jnp.sin(wide(out)).sum() for out in jax.tree.leaves(function(*args)))

    args = draw(batch, T, 24, rng=rng).at[:, -2:].multiply(0), draw(3, 24, heads * D, rng=rng) / 5
    assert "attention" in became(function, *args)
    run = [compiled(jax.value_and_grad(partial(loss, f), (0, 1))) for f in (cute_ops_jax.fuse(function), function)]
    for got, want in zip(*(_arrays(jax.tree.map(wide, each(*args))) for each in run), strict=True):
        np.testing.assert_allclose(got, want, rtol=0.03, atol=0.03 * np.abs(want).max())
