"""Calls of attention on packed sequences, drawn, and what is right of each sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cute_ops import mods
from tests.ops.attention_calls import Call, Functions, arrays, assert_holds_with_functions, drawn, expected

REST = 5  # tokens behind the last sequence, at most
SIDES = {"out": 0, "dq": 0, "dk": 1, "dv": 1}


def _biased(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any, keys: Any) -> Any:
    return mods.alibi(xp, score, batch, head, q, k, slopes) + keys[batch, k]


def _documents(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
    return mods.documents(xp, batch, head, q, k, document)


class Packed(NamedTuple):
    """A call; its s and t are all tokens.

    Attributes:
        offsets: where sequences begin, and where the last one ends, of queries and of keys.
        functions: captured arrays have the sequences as their batch.
    """

    call: Call
    offsets: tuple[np.ndarray, np.ndarray]
    functions: Functions

    @property
    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        for i in range(len(self.offsets[0]) - 1):
            q, k = (slice(int(each[i]), int(each[i + 1])) for each in self.offsets)
            yield i, q, k

    def assert_right(self, given: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], what: str) -> None:
        """Results and gradients are those of each sequence alone.

        Args:
            given: q, k, v, sinks if there are any, dout and dlse.
            found: results and gradients.
            what: for messages.
        """
        sums: dict[str, list[Any]] = {}
        for i, q, k in self.sequences:
            call = self.call._replace(batch=1, s=q.stop - q.start, t=k.stop - k.start)
            one = [given["q"][None, q], given["k"][None, k], given["v"][None, k], given.get("sinks")]
            shared = {n: x if n == "slopes" else x[i : i + 1] for n, x in self.functions.captured.items()}
            right = expected(call, one, (given["dout"][None, q], given["dlse"][None, :, q]),
                             self.functions._replace(captured=shared))  # fmt: skip
            parts = {n: found[n][(q, k)[side]][None] for n, side in SIDES.items()} | {"lse": found["lse"][None, :, q]}
            plain = self.functions._replace(score=None)
            assert_holds_with_functions(plain, parts, right, f"{what}: sequence {i} of {call.name}")
            for name in {"dsinks"} & right.keys():
                sums.setdefault(name, []).append(right[name])
        rest = given["dlse"][:, self.offsets[0][-1] :].sum(axis=1)  # of rows whose log-sum-exp is the sink
        for name, each in sums.items():
            assert (abs(found[name] - rest - sum(x.value for x in each)) <= sum(x.error for x in each)).all(), (
                f"{what}: {name}"
            )
        for name, side in SIDES.items():
            assert (found[name][self.offsets[side][-1] :] == 0).all(), f"{what}: {name} behind the last sequence"


def drawn_sequences(seed: int, longest: int = 300) -> tuple[Packed, list[np.ndarray | None]]:
    """A call, and q, k, v and sinks of normal numbers."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    call = drawn(2000 + seed, longest)
    packed = call.packed or draw.random() < 0.4
    lengths = []
    for _ in range(draw.randint(1, 7)):
        s = draw.choice([0, 1, 64, 80, 127, 128, 129, 192, draw.randint(0, longest)])
        t = s if packed else draw.choice([0, 1, 96, 128, draw.randint(0, longest)])
        # Queries before all keys would read by a negative index.
        lengths.append((min(s, longest), min(max(s, t) if seed % 3 == 2 else t, longest)))
    offsets = tuple(np.cumsum([0, *each]).astype(np.int32) for each in zip(*lengths, strict=True))
    rest = draw.randint(0, REST)
    s, t = (int(each[-1]) + rest for each in offsets)
    call = call._replace(batch=1, s=s, t=t, packed=packed and call.d == call.e)
    functions = Functions()
    if seed % 3:
        n, most = len(lengths), max(map(max, lengths)) + 1
        captured = {
            "slopes": rng.random(call.h).astype(np.float32), "keys": rng.standard_normal((n, most)).astype(np.float32),
            "document": np.cumsum(rng.random((n, most)) < 0.05, axis=1).astype(np.int32),
        }  # fmt: skip
        score, mask = (_biased, None) if seed % 3 == 1 else (None, _documents)
        names = ("slopes", "keys") if score else ("document",)
        functions = Functions(score, mask, {name: captured[name] for name in names})
    q, k, v, sinks = arrays(call, seed)
    return Packed(call, (offsets[0], offsets[1]), functions), [q[0], k[0], v[0], sinks]
