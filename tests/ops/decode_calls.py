"""Calls of attention to caches, drawn, and what they compute in float64, one query after another."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np

from cute_ops import mods, testing
from tests.ops.attention_calls import NO_FUNCTIONS, UNITS, Bounded, Functions

DEFAULTS = {"scale": 0.0, "window": 0, "softcap": 0.0}


class Decoding(NamedTuple):
    """Sizes and attributes of a call; ``size``: of a page, 0 of contiguous caches of so many ``keys``."""

    lengths: tuple[int, ...]
    s: int
    g: int
    r: int
    d: int
    e: int
    size: int
    keys: int
    dtype: str = "bfloat16"
    attrs: dict[str, Any] = {}  # noqa: RUF012 (a tuple's default, which nobody changes)
    sinks: bool = False
    heads_first: bool = False
    holes: bool = False
    float8: bool = False

    @property
    def name(self) -> str:
        attrs = ",".join(f"{name}={value}" for name, value in self.attrs.items())
        sizes = (
            f"{'+'.join(map(str, self.lengths))}-{self.s}-{self.g}x{self.r}-{self.d}:{self.e}-{self.size}:{self.keys}"
        )
        flags = (
            "-float8" * self.float8 + "-sinks" * self.sinks + "-heads_first" * self.heads_first + "-holes" * self.holes
        )
        return f"{sizes}-{self.dtype}-{attrs}{flags}"


def drawn(seed: int, longest: int = 300, batch: int = 3) -> Decoding:
    """A call: lengths from 0 on and around tiles, pages of any size, heads, a window, a change of scores."""
    draw = random.Random(seed)

    def length() -> int:
        near = draw.choice([0, 1, 16, 64, 128, 256]) + draw.randint(-2, 2)
        return max(0, min(longest, draw.choice([near, draw.randint(0, longest)])))

    d = draw.choice([16, 64, 80, 96, 128, 128, 192, 256])
    e = d if draw.random() < 0.8 else draw.choice([16, 64, 128, 256])
    attrs: dict[str, Any] = {}
    if draw.random() < 0.3:
        attrs["window"] = draw.choice([1, 5, 16, 64, 127, 200])
    if draw.random() < 0.3:
        attrs["softcap"] = draw.choice([5.0, 30.0])
    if draw.random() < 0.3:
        attrs["scale"] = draw.choice([0.05, 0.3])
    if draw.random() < 0.3:
        attrs["batch_invariant"] = True
    size = draw.choice([0, 0, 1, 3, 8, 16, 16, 24, 64, 128])
    lengths = tuple(length() for _ in range(draw.randint(1, batch)))
    room = max(*lengths, 1) + draw.randint(0, 40)
    s, r = draw.choice([1, 1, 1, 2, 4, 5, 16]), draw.choice([1, 2, 3, 4, 4, 8, 17])
    return Decoding(
        lengths, s, draw.randint(1, 3), r, d, e, size, -(-room // size) * size if size else room,
        draw.choice(["bfloat16", "float16"]), attrs, draw.random() < 0.3, draw.random() < 0.3,
        bool(size) and draw.random() < 0.3, d % 32 == e % 32 == 0 and draw.random() < 0.3,
    )  # fmt: skip


def arrays(call: Decoding, seed: int) -> dict[str, np.ndarray]:
    """The op's inputs. NaN stands in caches wherever no key of a sequence does, and so in all pages that none has."""
    rng, b, half = np.random.default_rng(seed), len(call.lengths), testing.numpy_dtype(call.dtype)
    given = {"q": rng.standard_normal((b, call.s, call.g * call.r, call.d), np.float32).astype(half)}
    pages, size = (b, call.keys) if not call.size else (b * call.keys // call.size + 3, call.size)
    each = -(-call.keys // size)
    table = rng.permutation(pages)[: b * each].reshape(b, each).astype(np.int32) if call.size else None
    if table is not None and seed % 2:  # sequences share pages, and have some more than once
        again = np.random.default_rng(seed).random(table.shape) < 0.3
        table[again] = rng.permutation(table.reshape(-1))[: int(again.sum())]
    if table is not None and call.holes:
        outside = rng.random(table.shape) < 0.2
        table[outside] = rng.choice([-1, -(2**31), pages, 2**31 - 1], int(outside.sum()))
    for name, width in (("k_cache", call.d), ("v_cache", call.e)):
        cache = np.full((pages, size, call.g, width), np.nan, np.float32)
        for i, length in enumerate(call.lengths):
            for key in range(min(length, call.keys)):
                page = i if table is None else int(table[i, key // size])
                if 0 <= page < pages:
                    cache[page, key % size] = rng.standard_normal((call.g, width), np.float32)
        given[name] = cache.astype(testing.numpy_dtype("float8_e4m3fn") if call.float8 else half)
        if call.heads_first:
            given[name] = np.ascontiguousarray(given[name].swapaxes(1, 2)).swapaxes(1, 2)
    given["lengths"] = np.asarray(call.lengths, np.int32)
    if table is not None:
        given["page_table"] = table
    if call.sinks:
        given["sinks"] = rng.standard_normal(call.g * call.r).astype(np.float32)
    if call.float8:
        given["k_scale"] = rng.uniform(0.1, 2.0, call.g).astype(np.float32)
        given["v_scale"] = np.broadcast_to(rng.uniform(0.1, 2.0, 1).astype(np.float32), call.g)
    return given


def biased(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any, keys: Any) -> Any:
    """ALiBi and a number of each key; odd heads do not see every fifth key."""
    changed = mods.alibi(xp, score, batch, head, q, k, slopes) + keys[batch, k]
    return xp.where((head % 2 == 1) & (k % 5 == 3), -math.inf, changed)


def functions_of(call: Decoding, seed: int) -> Functions:
    """A change of scores for each other call, and what it reads."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((len(call.lengths), max(call.keys, 1))).astype(np.float32)
    return Functions(biased, None, {"slopes": rng.random(call.g * call.r).astype(np.float32), "keys": keys})


def expected(
    call: Decoding, given: dict[str, np.ndarray], functions: Functions = NO_FUNCTIONS
) -> dict[str, Bounded]:  # fmt: skip
    """Both results, query by query."""
    attrs, unit = {**DEFAULTS, **call.attrs}, UNITS[call.dtype]
    scale, cap, window = attrs["scale"] or call.d**-0.5, attrs["softcap"], attrs["window"]
    q, k_cache, v_cache = (given[name].astype(np.float64) for name in ("q", "k_cache", "v_cache"))
    if call.float8:
        k_cache, v_cache = k_cache * given["k_scale"][:, None], v_cache * given["v_scale"][:, None]
    table, (pages, size) = given.get("page_table"), k_cache.shape[:2]
    b, h = len(call.lengths), call.g * call.r
    found = {"out": np.zeros((2, b, call.s, h, call.e)), "lse": np.zeros((2, b, h, call.s))}
    for i, j in np.ndindex(b, call.s):
        length = min(call.lengths[i], call.keys)
        last = length - call.s + j
        keys = [key for key in range(last + 1) if not window or key > last - window]
        places = [(i if table is None else int(table[i, key // size]), key % size) for key in keys]
        keys = [key for key, (page, _) in zip(keys, places, strict=True) if 0 <= page < pages]
        places = [(page, slot) for page, slot in places if 0 <= page < pages]
        for head in range(h):
            k = np.array([k_cache[page, slot, head // call.r] for page, slot in places]).reshape(-1, call.d)
            v = np.array([v_cache[page, slot, head // call.r] for page, slot in places]).reshape(-1, call.e)
            scores = k @ q[i, j, head] * scale
            in_float32 = 2.0**-22 * max(np.abs(scores).max(initial=1.0), 1.0) * math.sqrt(call.d)
            scores = cap * np.tanh(scores / cap) if cap else scores
            if functions.score:
                scores = np.asarray(functions.of(functions.score, scores, i, head, last, np.asarray(keys, int)))
                in_float32 += 2.0**-21 * max(np.abs(scores[np.isfinite(scores)]).max(initial=1.0), 1.0)
            sink = float(given["sinks"][head]) if call.sinks else -math.inf
            highest = max(scores.max(initial=-math.inf), sink)
            weights = np.zeros_like(scores) if highest == -math.inf else np.exp(scores - highest)
            total = weights.sum() + (math.exp(sink - highest) if call.sinks else 0.0)
            weights = weights / total if total else weights
            value, terms = weights @ v, weights @ np.abs(v)
            error = 2 * unit * (terms + np.abs(value)) + 4 * in_float32 * terms + 1e-6
            found["out"][:, i, j, head] = value, error
            found["lse"][:, i, head, j] = math.log(total) + highest if total else -math.inf, 4 * in_float32
    return {name: Bounded(*both) for name, both in found.items()}


def latent(call: Decoding, seed: int) -> dict[str, np.ndarray]:
    """The inputs of latent attention of ``r`` heads: a cache of one head, whose first ``e`` elements are values."""
    given = arrays(call._replace(g=1, e=call.d, sinks=False, float8=False), seed)
    cache = np.ascontiguousarray(given["k_cache"])[:, :, 0]
    others = {name: a for name, a in given.items() if name in ("lengths", "page_table")}
    return {"q": given["q"], "latent_cache": cache, **others}


def of_latent(call: Decoding, given: dict[str, np.ndarray]) -> dict[str, Bounded]:
    """Results of latent attention."""
    cache = given["latent_cache"][:, :, None]
    return expected(call._replace(g=1), {**given, "k_cache": cache, "v_cache": cache[..., : call.e]})


def drawn_latent(seed: int, longest: int = 300) -> Decoding:
    """A call of latent attention."""
    draw, call = random.Random(seed), drawn(seed, longest)
    d, e = draw.choice([(64, 64), (80, 64), (144, 128), (192, 128), (320, 256), (576, 512)])
    attrs = {"scale": draw.choice([0.05, 0.1]), "rank": e} | {
        name: value for name, value in call.attrs.items() if name == "batch_invariant"
    }
    return call._replace(
        g=1, r=draw.choice([1, 3, 8, 16, 20, 33]), d=d, e=e, attrs=attrs, sinks=False, heads_first=False, float8=False
    )
