"""Calls of attention to caches by any number of queries, drawn, and what is right of each sequence."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from cute_ops import mods, testing
from tests.ops import attention_calls, decode_calls
from tests.ops.attention_calls import NO_FUNCTIONS, Bounded, Call, Functions
from tests.ops.decode_calls import Decoding

REST = 5  # queries behind the last sequence, at most


def biased(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any, keys: Any) -> Any:
    return xp.where(q - k < 40, mods.alibi(xp, score, batch, head, q, k, slopes), xp.tanh(score)) + keys[batch, k]


def documents(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
    return mods.documents(xp, batch, head, q, k, document)


class Cached(NamedTuple):
    """A call.

    Attributes:
        caches: keys of each sequence, heads, and how they lie in memory; its queries and attributes count for nothing.
        queries: of each sequence.
        packed: whether these lie one sequence's after another's, with ``rest`` more behind them.
        attrs: of the call.
        functions: of the call; captured arrays have the sequences as their batch.
    """

    caches: Decoding
    queries: tuple[int, ...]
    packed: bool
    attrs: dict[str, Any]
    functions: Functions = NO_FUNCTIONS
    rest: int = 0

    @property
    def name(self) -> str:
        attrs = ",".join(f"{name}={value}" for name, value in self.attrs.items())
        functions = "+".join(f.__name__ for f in self.functions.options.values())
        queries = "+".join(map(str, self.queries)) + ("-packed" if self.packed else "")
        return f"{queries}-{self.caches._replace(attrs={}).name}-{attrs}-{functions}"

    @property
    def call(self) -> Call:
        c = self.caches
        return Call(1, 0, 0, c.g * c.r, c.g, c.d, c.e, c.dtype, self.attrs, c.sinks, False)

    def arrays(self, seed: int) -> dict[str, np.ndarray]:
        """Inputs by name, in the order of the op, captured arrays among them. NaN stands wherever no key does."""
        given = decode_calls.arrays(self.caches._replace(s=1), seed)
        rng, h = np.random.default_rng(seed), self.caches.g * self.caches.r
        shape = (sum(self.queries) + self.rest,) if self.packed else (len(self.queries), self.queries[0])
        q = rng.standard_normal((*shape, h, self.caches.d), np.float32).astype(testing.numpy_dtype(self.caches.dtype))
        found = {"q": q, "k": given["k_cache"], "v": given["v_cache"]}
        if self.packed:
            found["cu_seqlens_q"] = np.cumsum([0, *self.queries]).astype(np.int32)
        found |= {"lengths": given["lengths"], **self.functions.captured}
        optional = ("page_table", "sinks", "k_scale", "v_scale")
        return found | {name: given[name] for name in optional if name in given}

    def assert_right(self, given: dict[str, np.ndarray], found: dict[str, np.ndarray], what: str) -> None:
        """Results are those of each sequence alone, with the keys of its pages."""
        start = 0
        for i, s in enumerate(self.queries):
            part = slice(start, start + s)
            q = given["q"][part][None] if self.packed else given["q"][i : i + 1]
            right = self._expected(i, q, given)
            out = found["out"][part][None] if self.packed else found["out"][i : i + 1]
            lse = found["lse"][:, part][None] if self.packed else found["lse"][i : i + 1]
            for name, array in (("out", out), ("lse", lse)):
                right[name].assert_holds(array.astype(np.float64), f"{what}: {name} of sequence {i} of {self.name}")
            start += s
        if self.packed:
            assert (found["out"][start:] == 0).all(), f"{what}: behind the last sequence"

    def _expected(self, i: int, q: np.ndarray, given: dict[str, np.ndarray]) -> dict[str, Bounded]:
        c, table = self.caches, given.get("page_table")
        pages, size = given["k"].shape[:2]
        length = max(min(c.lengths[i], c.keys), 0)
        places = [(i if table is None else int(table[i, key // size]), key % size) for key in range(length)]
        there = np.array([0 <= page < pages for page, _ in places], bool)
        none = {name: np.zeros((c.g, given[name].shape[-1])) for name in "kv"}
        scales = {n: given[f"{n}_scale"][:, None] if c.float8 else np.ones((c.g, 1)) for n in "kv"}
        k, v = (
            np.array([given[n][at].astype(np.float64) * scales[n] if ok else none[n]
                      for at, ok in zip(places, there, strict=True)])
            .reshape(1, length, c.g, -1) if length else np.zeros((1, 0, c.g, given[n].shape[-1])) for n in "kv"
        )  # fmt: skip
        own = self.functions
        shared = {name: x if name == "slopes" else x[i : i + 1] for name, x in own.captured.items()}
        own = own._replace(captured=shared)

        def seen(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
            return (
                there[k] if self.functions.mask is None else there[k] & own.of(self.functions.mask, batch, head, q, k)
            )

        call = self.call._replace(s=q.shape[1], t=length)
        return attention_calls.expected(call, [q, k, v, given.get("sinks")], None, own._replace(mask=seen))


def drawn(seed: int, longest: int = 300) -> Cached:
    """A call: caches as decoding has them, queries of any number, masks, changes of scores."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    caches = decode_calls.drawn(seed, longest)
    attrs = attention_calls.drawn(3000 + seed).attrs
    attrs.pop("deterministic", None)
    most, documented = max(caches.lengths), seed % 3 == 2
    # Queries before all keys would read documents by a negative index.
    count = lambda length: draw.choice([1, draw.randint(0, longest), draw.randint(0, max(length, 1))])  # noqa: E731
    packed = draw.random() < 0.5
    queries = tuple(min(count(n), n) if documented else count(n) for n in caches.lengths)
    if not packed:
        queries = (max(min(min(caches.lengths), queries[0]) if documented else queries[0], 1),) * len(queries)
        if documented and min(caches.lengths) < queries[0]:
            packed, queries = True, caches.lengths
    captured = {
        "slopes": rng.random(caches.g * caches.r).astype(np.float32),
        "keys": rng.standard_normal((len(queries), most + 1)).astype(np.float32),
        "document": np.cumsum(rng.random((len(queries), most + 1)) < 0.05, axis=1).astype(np.int32),
    }
    functions = (
        Functions(),
        Functions(biased, None, {name: captured[name] for name in ("slopes", "keys")}),
        Functions(None, documents, {"document": captured["document"]}),
    )[seed % 3]
    return Cached(caches, queries, packed, attrs, functions, draw.randint(0, REST) if packed else 0)
