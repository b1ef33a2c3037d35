"""Calls of attention, drawn, and what they compute in float64."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class Call(NamedTuple):
    """Sizes and attributes of a call.

    Attributes:
        packed: q, k and v are slices of one array.
    """

    batch: int
    s: int
    t: int
    h: int
    g: int
    d: int
    e: int
    dtype: str
    attrs: dict[str, Any]
    sinks: bool
    packed: bool

    @property
    def name(self) -> str:
        attrs = ",".join(f"{name}={value}" for name, value in self.attrs.items())
        sizes = f"{self.batch}x{self.s}x{self.t}-{self.h}:{self.g}-{self.d}:{self.e}"
        return f"{sizes}-{self.dtype}-{attrs}{'-sinks' * self.sinks}{'-packed' * self.packed}"


def drawn(seed: int, longest: int = 700) -> Call:
    """A call: lengths around the tiles' and any others, heads, masks and a change of scores."""
    draw = random.Random(seed)

    def length() -> int:
        near = draw.choice([1, 16, 64, 80, 96, 128, 192, 256, 384, 512]) + draw.randint(-2, 2)
        return max(1, min(longest, draw.choice([near, draw.randint(1, longest)])))

    g = draw.randint(1, 3)
    d = draw.choice([16, 32, 48, 64, 80, 96, 112, 128, 128, 160, 192, 256])
    e = d if draw.random() < 0.8 else draw.choice([16, 64, 128, 256])
    attrs: dict[str, Any] = {}
    if draw.random() < 0.5:
        attrs["causal"] = True
    elif draw.random() < 0.4:
        attrs["right"] = draw.choice([0, 1, 63, 200])
    if draw.random() < 0.4:
        attrs["left"] = draw.choice([0, 1, 64, 127, 300])
    if draw.random() < 0.3:
        attrs["softcap"] = draw.choice([5.0, 30.0])
    if draw.random() < 0.3:
        attrs["scale"] = draw.choice([0.05, 0.3])
    s = length()
    t = s if draw.random() < 0.4 else length()
    packed = s == t and d == e and draw.random() < 0.5
    dtype = draw.choice(["bfloat16", "float16"])
    return Call(draw.randint(1, 3), s, t, g * draw.randint(1, 4), g, d, e, dtype, attrs, draw.random() < 0.3, packed)


class Expected(NamedTuple):
    """Results in float64, and by how much an output may differ from them."""

    out: np.ndarray
    lse: np.ndarray
    out_error: np.ndarray
    lse_error: float


def expected(call: Call, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None) -> Expected:
    """The results, head by head, by loops over the definition's terms.

    An output is rounded once, and its weights were rounded before they multiplied values: twice the sum of both errors
    is allowed, beside what float32 loses in scores.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    attrs = {"scale": 0.0, "causal": False, "left": -1, "right": -1, "softcap": 0.0, **call.attrs}
    k, v = (np.repeat(x, call.h // call.g, axis=2) for x in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) * (attrs["scale"] or call.d**-0.5)
    size = np.abs(scores).max(initial=1.0)
    if attrs["softcap"]:
        scores = attrs["softcap"] * np.tanh(scores / attrs["softcap"])
    place, key = np.arange(call.s)[:, None] + (call.t - call.s), np.arange(call.t)
    right = 0 if attrs["causal"] else attrs["right"]
    seen = np.ones((call.s, call.t), bool)
    if right >= 0:
        seen &= key <= place + right
    if attrs["left"] >= 0:
        seen &= key >= place - attrs["left"]
    scores[..., ~seen] = -np.inf
    last = np.full((call.batch, call.h, call.s, 1), -np.inf)
    if sinks is not None:
        last[:] = sinks.astype(np.float64)[:, None, None]
    scores = np.concatenate([scores, last], axis=-1)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(highest), highest, 0))[..., 0]
    shares = (weights / np.where(total > 0, total, 1))[..., :-1]
    out = np.einsum("bhst,bthe->bshe", shares, v)
    terms = np.einsum("bhst,bthe->bshe", shares, np.abs(v))
    in_float32 = 2.0**-22 * size * np.sqrt(call.d)
    return Expected(out, lse, 2 * UNITS[call.dtype] * (terms + np.abs(out)) + in_float32 * terms + 1e-6, 4 * in_float32)


def arrays(call: Call, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Q, k, v and sinks, of normal numbers in float32; the caller rounds them."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((call.batch, call.s, call.h, call.d), np.float32)
    k = rng.standard_normal((call.batch, call.t, call.g, call.d), np.float32)
    v = rng.standard_normal((call.batch, call.t, call.g, call.e), np.float32)
    return q, k, v, rng.standard_normal(call.h, np.float32) if call.sinks else None
