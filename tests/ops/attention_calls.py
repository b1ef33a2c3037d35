"""Calls of attention, drawn, and what they compute in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cute_ops import mods

UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class Functions(NamedTuple):
    """A call's own functions, which are called with NumPy's arrays as they are, and what they read, by name."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captured: Mapping[str, np.ndarray] = MappingProxyType({})

    def of(self, function: Callable[..., Any], *given: Any) -> Any:
        """What a function returns: it gets the arrays that its parameters name."""
        names = [*signature(function).parameters][1 + len(given) :]
        return function(np, *given, *(self.captured[name] for name in names))

    @property
    def differentiable(self) -> list[str]:
        """The arrays whose gradient a call has: floats that scores are computed from."""
        names = [*signature(self.score).parameters][6:] if self.score else []
        return [name for name in names if self.captured[name].dtype == np.float32]

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call, without those that it does not have."""
        found = {"score_mod": self.score, "mask_mod": self.mask}
        return {name: function for name, function in found.items() if function is not None}


def _near(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any, prefix: Any) -> Any:
    same = mods.documents(xp, batch, head, q, k, document)
    return xp.logical_or(xp.logical_and(same, k <= q), mods.prefix(xp, batch, head, q, k, prefix) & (k % 3 != 1))


def _blocks(xp: Any, batch: Any, head: Any, q: Any, k: Any, keep: Any, far: Any) -> Any:
    return xp.logical_and(keep[q // 7, k // 7] != 0, (q - k < far[head]) | (head // 2 == 0))


def _distance(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, table: Any, slopes: Any) -> Any:
    return mods.alibi(xp, mods.relative_bias(xp, score, batch, head, q, k, table), batch, head, q, k, slopes)


def _scaled(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, gain: Any, on: Any, bias: Any) -> Any:
    warm = xp.where(on[batch, k], xp.tanh(score * gain[head % 2]), score)
    return mods.bias(xp, warm, batch, head, q, k, bias)


def drawn_with_functions(seed: int, longest: int = 500) -> tuple[Call, Functions]:
    """A call whose queries are no more than its keys, its functions, and what they read."""
    call, rng = drawn(1000 + seed, longest), np.random.default_rng(seed)
    call = call._replace(s=min(call.s, call.t), packed=False)
    b, s, t, h = call[:4]
    score = (None, _distance, _scaled)[seed % 3]
    mask = (_near, _blocks, None)[seed // 3 % 3] if score else (_near, _blocks)[seed // 3 % 2]
    places = np.cumsum(rng.random((b, t)) < 0.1, axis=1)
    every = {
        "document": rng.permuted(places, axis=1) if seed % 2 else places,
        "prefix": rng.integers(0, t + 1, b).astype(np.int32),
        "keep": rng.integers(0, 2, (t // 7 + 1, t // 7 + 1)),
        "far": rng.integers(0, t + 1, h).astype(np.float32),
        "table": rng.standard_normal((h, 2 * t + 1)).astype(np.float32),
        "slopes": rng.random(h).astype(np.float32),
        "gain": 1 + rng.random(2).astype(np.float32),
        "on": rng.random((b, t)) < 0.5,
        "bias": rng.standard_normal((b, h, s, t)).astype(np.float32),
    }
    named = {name for function in (score, mask) if function for name in signature(function).parameters}
    return call, Functions(score, mask, {name: array for name, array in every.items() if name in named})


def assert_holds_with_functions(
    functions: Functions, found: Mapping[str, np.ndarray], right: Mapping[str, Bounded], what: str
) -> None:
    """Results and gradients are right, those of some elements of what a change of scores reads, too."""
    for name in found.keys() & right.keys():
        right[name].assert_holds(found[name], f"{what}: {name}")
    if not functions.differentiable or functions.score is None:
        return
    (scores, _), (dscores, slack) = right["scores"], right["dscores"]
    b, h, s, t = scores.shape
    at = np.arange(b)[:, None, None, None], np.arange(h)[:, None, None], np.arange(s)[:, None] + (t - s), np.arange(t)
    rng, step = np.random.default_rng(0), 1e-3
    for name in functions.differentiable:
        array = functions.captured[name].astype(np.float64)
        for place in rng.integers(0, array.size, 12):
            ends = []
            for change in (-step, step):
                moved = array.copy()
                moved.flat[place] += change
                ends.append(
                    functions._replace(captured={**functions.captured, name: moved}).of(functions.score, scores, *at)
                )
            slopes = (ends[1] - ends[0]) / (2 * step)
            value = float(np.sum(dscores * slopes))
            allowed = float(np.sum((2 * slack + 2.0**-8 * np.abs(dscores)) * np.abs(slopes))) + 1e-5
            got = found[f"d{name}"].flat[place]
            assert abs(got - value) <= allowed, f"{what}: d{name} at {place}: {got}, not {value} (within {allowed})"


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
    call = Call(draw.randint(1, 3), s, t, g * draw.randint(1, 4), g, d, e, dtype, attrs, draw.random() < 0.3, packed)
    if draw.random() < 0.3:
        attrs["deterministic"] = True
    return call


class Bounded(NamedTuple):
    """An array in float64, and by how much what was found may differ from it."""

    value: np.ndarray
    error: np.ndarray

    def assert_holds(self, found: np.ndarray, what: str) -> None:
        """Infinities are the same, all else is within the error."""
        found, known = np.asarray(found, np.float64), np.isfinite(self.value)
        assert found.shape == self.value.shape, what
        assert (found[~known] == self.value[~known]).all(), what
        excess = np.abs(found[known] - self.value[known]) / self.error[known]
        assert excess.max(initial=0) <= 1, f"{what}: {excess.max():.3g} of what is allowed"


NO_FUNCTIONS = Functions()


def expected(
    call: Call, given: Sequence[np.ndarray | None], cotangents: tuple[np.ndarray, np.ndarray] | None = None,
    functions: Functions = NO_FUNCTIONS,
) -> dict[str, Bounded]:  # fmt: skip
    """Results, and gradients if there are cotangents of both results, of q, k, v and sinks.

    A 16-bit result is rounded once, and weights were rounded before they multiplied: twice the sum of both errors is
    allowed, by sums of absolute values, beside what float32 loses in scores.
    """
    q, k, v = (np.asarray(x, np.float64) for x in given[:3])
    attrs = {"scale": 0.0, "causal": False, "left": -1, "right": -1, "softcap": 0.0, **call.attrs}
    scale, unit, share = attrs["scale"] or call.d**-0.5, UNITS[call.dtype], call.h // call.g
    k, v = (np.repeat(x, share, axis=2) for x in (k, v))
    raw = np.einsum("bshd,bthd->bhst", q, k) * scale
    in_float32 = 2.0**-22 * np.abs(raw).max(initial=1.0) * np.sqrt(call.d)
    cap = attrs["softcap"]
    scores = cap * np.tanh(raw / cap) if cap else raw.copy()
    capped, slope = scores, 1 - np.tanh(raw / cap) ** 2 if cap else np.ones_like(raw)
    place, key = np.arange(call.s)[:, None] + (call.t - call.s), np.arange(call.t)
    at = np.arange(call.batch)[:, None, None, None], np.arange(call.h)[:, None, None], place, key
    if functions.score:
        low, middle, high = (functions.of(functions.score, scores + step, *at) for step in (-1e-5, 0.0, 1e-5))
        scores, slope = middle, slope * (high - low) / 2e-5
        in_float32 = max(in_float32, 2.0**-21 * np.abs(scores).max(initial=1.0))
    right = 0 if attrs["causal"] else attrs["right"]
    seen = np.ones((call.s, call.t), bool)
    if right >= 0:
        seen &= key <= place + right
    if attrs["left"] >= 0:
        seen &= key >= place - attrs["left"]
    if functions.mask:
        seen = seen & functions.of(functions.mask, *at)
    scores = np.where(seen, scores, -np.inf)
    last = np.full((*scores.shape[:-1], 1), -np.inf)
    if given[3] is not None:
        last[:] = np.asarray(given[3], np.float64)[:, None, None]
    scores = np.concatenate([scores, last], axis=-1)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(highest), highest, 0))[..., 0]
    weights = weights / np.where(total > 0, total, 1)
    sink, p = weights[..., -1], weights[..., :-1]

    def product(form: str, x: np.ndarray, y: np.ndarray, factor: float = 1.0) -> Bounded:
        value, terms = np.einsum(form, x, y) * factor, np.einsum(form, np.abs(x), np.abs(y)) * factor
        return Bounded(value, 2 * unit * (terms + np.abs(value)) + 4 * in_float32 * terms + 1e-6)

    found = {"out": product("bhst,bthe->bshe", p, v), "lse": Bounded(lse, np.full(lse.shape, 4 * in_float32))}
    if cotangents is None:
        return found
    dout, dlse = (np.asarray(x, np.float64) for x in cotangents)
    # The kernel reads the rounded output, whose error every term of a row has.
    delta = np.einsum("bshe,bshe->bhs", found["out"].value, dout) - dlse
    of_out = np.einsum("bshe,bshe->bhs", np.abs(found["out"].value), np.abs(dout))[..., None] * unit
    dp = np.einsum("bshe,bthe->bhst", dout, v)
    ds, slack = p * (dp - delta[..., None]) * slope, p * of_out * np.abs(slope)
    if functions.score:  # whose slope is a difference, such as that of 1 and the square of a tanh
        slack = slack + 2.0**-20 * p * np.abs(dp - delta[..., None]) * np.maximum(np.abs(slope), 1)

    def with_slack(form: str, x: np.ndarray, y: np.ndarray, more: np.ndarray) -> Bounded:
        bound = product(form, x, y, scale)
        return bound._replace(error=bound.error + 2 * scale * np.einsum(form, more, np.abs(y)))

    def of_kv(bound: Bounded) -> Bounded:
        grouped = (x.reshape(*x.shape[:2], call.g, share, x.shape[-1]).sum(3) for x in bound)
        return Bounded(*grouped)

    if functions.score:  # for the gradients of what it reads
        found["dscores"], found["scores"] = Bounded(p * (dp - delta[..., None]), p * of_out), Bounded(capped, slack)
    found["dq"] = with_slack("bhst,bthd->bshd", ds, k, slack)
    found["dk"] = of_kv(with_slack("bhst,bshd->bthd", ds, q, slack))
    found["dv"] = of_kv(product("bhst,bshe->bthe", p, dout))
    if given[3] is not None:
        terms = np.einsum("bhs,bhs->h", sink, np.abs(delta) + of_out[..., 0])
        value = -np.einsum("bhs,bhs->h", sink, delta)
        of_lse = np.einsum("bhs,bhs->h", sink, of_out[..., 0])
        found["dsinks"] = Bounded(value, 2.0**-18 * terms + 2 * of_lse + 1e-6)
    return found


def arrays(call: Call, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Q, k, v and sinks, of normal numbers in float32; the caller rounds them."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((call.batch, call.s, call.h, call.d), np.float32)
    k = rng.standard_normal((call.batch, call.t, call.g, call.d), np.float32)
    v = rng.standard_normal((call.batch, call.t, call.g, call.e), np.float32)
    return q, k, v, rng.standard_normal(call.h, np.float32) if call.sinks else None
