"""Steps of decoding as programs write them, drawn by a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
FILLS = (-np.inf, -1e30, -1e9, -3e38)


class Step(NamedTuple):
    """A function of queries, keys, values and lengths, and its arguments."""

    said: str
    function: Callable[..., Array]
    args: tuple[Array, ...]


def drawn(number: int) -> Step:
    """One of the ways to write a step of decoding."""
    rng = np.random.default_rng([41, number])
    b, kv, group, d = (int(rng.choice(x)) for x in ((1, 2, 5), (1, 2, 3), (1, 2, 5), (16, 32)))
    n, queries = int(rng.choice((7, 33, 64))), int(rng.choice((1, 1, 1, 3)))
    layout, heads = str(rng.choice(("bnhd", "bhnd"))), str(rng.choice(("grouped", "repeated", "vmap")))
    mask = str(
        rng.choice(("less", "greater", "place", "not", "scalar", "window", "two wheres", "causal", "both", "by head"))
    )
    fill, added, cap = float(rng.choice(FILLS)), bool(rng.random() < 0.2), bool(rng.random() < 0.2)
    dtype, wide = str(rng.choice(("bfloat16", "float16"))), bool(rng.random() < 0.7)
    if mask == "by head":
        layout, heads = "bhnd", "grouped"
    group = max(group, 2) if kv == 1 else group
    if added:  # what is lower takes the place of a score, whatever that is
        wide, fill = True, min(fill, -1e30)
    if not wide:
        fill = max(fill, -1e30 if dtype == "bfloat16" else -6e4) if np.isfinite(fill) else fill
    lengths = rng.integers(0, n + 1, (b, kv) if mask == "by head" else () if mask == "scalar" else (b,)).astype("int32")
    flat = lengths.reshape(-1)
    for place, special in enumerate((0, 1, n, n + 3, -1)):
        if place < flat.size and rng.random() < 0.5:
            flat[rng.integers(flat.size)] = special
    layers = str(np.random.default_rng([42, number]).choice(("one", "one", "two", "scan")))
    window, sink = int(rng.integers(1, 9)), bool(layout == "bnhd" and heads != "vmap" and rng.random() < 0.25)
    if heads == "repeated" and sink:
        heads = "grouped"

    def seen(lengths: Array) -> Array:
        """``[batch, heads of keys, queries, keys]``, of which some are 1."""
        key, ends = jnp.arange(n), lengths[:, None] if mask not in ("by head", "scalar") else lengths
        if mask == "scalar":
            return (key <= ends)[None, None, None]
        if mask == "by head":
            return (key < ends[..., None])[:, :, None]
        if mask in ("causal", "both"):
            place = ends[..., None] + jnp.arange(queries)[:, None]
            return ((key <= place) & (key > place - window) if mask == "both" else key <= place)[:, None]
        made = {
            "less": key < ends,
            "greater": ends > key,
            "place": key <= ends - 2,
            "not": ~(key >= ends),
            "window": (key < ends) & (key >= ends - window),
            "two wheres": key < ends,
        }[mask]
        return made[:, None, None]

    def mask_of(lengths: Array, like: Array) -> Array:
        """The mask, or the numbers that are added to scores, which several layers may share."""
        mask = seen(lengths)[:, :, None]
        return jnp.where(mask, 0.0, fill).astype(jnp.promote_types(like.dtype, "float32")) if added else mask

    def hidden(scores: Array, lengths: Array, mask_of_all: Array) -> Array:
        scores = scores.astype(jnp.promote_types(scores.dtype, "float32")) if wide else scores
        scores = jnp.tanh(scores / 5) * 5 if cap else scores
        if added:
            scores = scores + mask_of_all
        else:
            scores = jnp.where(mask_of_all, scores, jnp.asarray(fill, scores.dtype))
        if mask == "two wheres":
            scores = jnp.where(
                (jnp.arange(n) > lengths[:, None] - window)[:, None, None, None],
                scores,
                jnp.asarray(fill, scores.dtype),
            )
        return scores

    def function(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        mask_of_all = mask_of(lengths, q)
        if layers == "scan":  # whose body reads the lengths, too, as where a cache is written

            def body(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
                q, total = carry
                return (layer(q, k, v, lengths, mask_of_all), total + lengths.sum()), None

            return jax.lax.scan(body, (q, lengths.sum()), None, length=2)[0][0]
        for _ in range(1 + (layers == "two")):
            q = layer(q, k, v, lengths, mask_of_all)
        return q

    def layer(q: Array, k: Array, v: Array, lengths: Array, mask_of_all: Array) -> Array:
        if heads == "repeated":
            k, v = (jnp.repeat(x, group, 2 if layout == "bnhd" else 1) for x in (k, v))
        g = 1 if heads == "repeated" else group
        by_group = q.reshape(b, queries, q.shape[2] // g, g, d)
        own = layout.replace("h", "g")
        if heads == "vmap":
            scores = jax.vmap(lambda q, k: jnp.einsum(f"sgrd,{own[1:]}->grsn", q, k))(by_group, k)
        else:
            scores = jnp.einsum(f"bsgrd,{own}->bgrsn", by_group, k)
        scores = hidden(scores * 0.25, lengths, mask_of_all)
        if sink:
            column = jnp.broadcast_to((jnp.arange(kv * g) / 2 - 1).reshape(kv, g, 1, 1), (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, column.astype(scores.dtype)], -1)
        p = jax.nn.softmax(scores, -1)[..., :n].astype(q.dtype)
        if heads == "vmap":
            return jax.vmap(lambda p, v: jnp.einsum(f"grsn,{own[1:]}->sgrd", p, v))(p, v).reshape(q.shape)
        return jnp.einsum(f"bgrsn,{own}->bsgrd", p, v).reshape(q.shape)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))

    cache = tuple({"b": b, "n": n, "h": kv, "d": d}[letter] for letter in layout)
    args = draw(b, queries, kv * group, d), draw(*cache), draw(*cache), jnp.asarray(lengths)
    said = f"{b=} {kv=} {group=} {d=} {n=} {queries=} {layout} {heads} {mask} {fill=} {added=} {cap=} {dtype} {wide=}"
    said += f" {layers}" + " sink" * sink
    return Step(said, function, args)
