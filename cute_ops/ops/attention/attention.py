"""Attention: declaration, reference maths, cases."""

from __future__ import annotations

import math
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.attention import config, mods

HALVES = ("bfloat16", "float16")
LONGEST = 1 << 24  # whole numbers up to this one are float32
CAUSAL: dict[str, Any] = {"absent": ("sinks",), "attrs": {"causal": True}}
CASES = (
    Case("llama3-8b", {"m": (2,), "s": 129, "t": 129, "h": 8, "g": 2, "d": 128, "e": 128}, **CAUSAL),
    Case("llama3-8b-continued", {"m": (1,), "s": 5, "t": 300, "h": 8, "g": 2, "d": 128, "e": 128}, **CAUSAL),
    Case("gpt-oss-20b", {"m": (2,), "s": 77, "t": 200, "h": 8, "g": 1, "d": 64, "e": 64},
         attrs={"causal": True, "left": 127}),
    Case("gemma2-9b", {"m": (1,), "s": 65, "t": 65, "h": 4, "g": 2, "d": 256, "e": 256}, absent=("sinks",),
         attrs={"causal": True, "softcap": 50.0, "scale": 0.0625}),
    Case("vit-h", {"m": (3,), "s": 257, "t": 257, "h": 2, "g": 2, "d": 80, "e": 80}, absent=("sinks",)),
    Case("deepseek-v3", {"m": (1,), "s": 200, "t": 200, "h": 2, "g": 2, "d": 192, "e": 128}, **CAUSAL),
    Case("one-query", {"m": (), "s": 1, "t": 1, "h": 1, "g": 1, "d": 64, "e": 64}, absent=("sinks",)),
    Case("before-the-keys", {"m": (1,), "s": 150, "t": 20, "h": 1, "g": 1, "d": 64, "e": 64}, **CAUSAL),
)  # fmt: skip


def reference(
    xp: Any, q: Any, k: Any, v: Any, sinks: Any = None,
    *, scale: float, causal: bool, left: int, right: int, softcap: float,
) -> tuple[Any, Any]:  # fmt: skip
    (*lead, s, h, d), (t, g), e = q.shape, k.shape[-3:-1], v.shape[-1]
    if h == 0 or s == 0:
        return xp.zeros((*lead, s, h, e), dtype=q.dtype, **beside(xp, q)), xp.zeros((*lead, h, s), dtype=xp.float32)
    wide_q, wide_k, wide_v, sink = widen(xp, q, k, v, sinks)
    batch = math.prod(lead)
    # (batch, kv heads, heads of one, seqlen, headdim)
    wide_q = xp.permute_dims(xp.reshape(wide_q, (batch, s, g, h // g, d)), (0, 2, 3, 1, 4))
    wide_k = xp.permute_dims(xp.reshape(wide_k, (batch, t, g, 1, d)), (0, 2, 3, 4, 1))
    wide_v = xp.permute_dims(xp.reshape(wide_v, (batch, t, g, 1, e)), (0, 2, 3, 1, 4))
    scores = (wide_q @ wide_k) * (scale or d**-0.5)
    queries, keys = (xp.arange(size, **beside(xp, q)) for size in (s, t))
    at = None, None, xp.reshape(queries, (s, 1)), keys, t - s
    if (change := mods.soft_cap(softcap)) is not None:
        scores = change(xp, scores, *at)
    if (mask := mods.band(left, 0 if causal else right)) is not None:
        scores = xp.where(mask(xp, *at), scores, xp.full_like(scores[:1, :1, :1, :1, :1], -math.inf))
    # A last column without a value: the sink, or a score of no weight.
    last = xp.full((batch, g, h // g, s, 1), -math.inf, dtype=scores.dtype, **beside(xp, q))
    if sink is not None:
        last = xp.broadcast_to(xp.astype(xp.reshape(sink, (1, g, h // g, 1, 1)), last.dtype), last.shape)
    scores = xp.concat([scores, last], axis=-1)
    highest = xp.max(scores, axis=-1, keepdims=True)
    highest = xp.where(highest > -math.inf, highest, xp.zeros_like(highest))
    weights = xp.exp(scores - highest)
    total = xp.sum(weights, axis=-1, keepdims=True)
    some = xp.where(total > 0, total, xp.ones_like(total))
    out = (weights[..., :-1] / some) @ wide_v
    lse = xp.where(total > 0, xp.log(some) + highest, xp.full_like(total, -math.inf))
    out = xp.reshape(xp.permute_dims(out, (0, 3, 1, 2, 4)), (*lead, s, h, e))
    return xp.astype(out, q.dtype), xp.reshape(lse, (*lead, h, s))


def check(binding: Binding) -> str | None:
    dims, attrs = binding.dims, binding.attrs
    if dims["g"] == 0 or dims["h"] % dims["g"]:
        return f"heads of k, g={dims['g']}, must divide those of q, h={dims['h']}."
    for name in ("d", "e"):
        if not 16 <= dims[name] <= 256 or dims[name] % 16:
            return f"a head has 16, 32 ... 256 elements, got {name}={dims[name]}."
    if max(dims["s"], dims["t"]) > LONGEST:
        return f"a sequence has at most {LONGEST} tokens, got s={dims['s']}, t={dims['t']}."
    if attrs["causal"] and attrs["right"] >= 0:
        return f"causal=True is right=0, got right={attrs['right']}, too."
    if attrs["scale"] < 0 or attrs["softcap"] < 0:
        return f"scale and softcap are not negative, got scale={attrs['scale']}, softcap={attrs['softcap']}."
    return None


def _heads(shape: str) -> Tensor:
    return Tensor(shape, "T", merged=True, align=16, otherwise="copy")


attention = Op(
    "attention",
    inputs={
        "q": _heads("*m s h d"),
        "k": _heads("*m t g d"),
        "v": _heads("*m t g e"),
        "sinks": Tensor("h", "S", optional=True),
    },
    outputs={"out": Tensor("*m s h e", "T", merged=True), "lse": Tensor("*m h s", "float32", merged=True)},
    dtypes={"T": HALVES, "S": FLOATS},
    attrs={"scale": 0.0, "causal": False, "left": -1, "right": -1, "softcap": 0.0},
    static=("d", "e"),
    sharding=Sharding(),
    reference=reference,
    kernel=Kernel("cute_ops.kernels.attention.fwd_sm90:AttentionFwd", least_sm=90),
    tuning=Tuning(config.attention),
    check=check,
    cases=CASES,
    doc="""Attention of queries to keys and values, with grouped heads.

    ``out = softmax(scores) @ v`` with ``scores = softcap(scale * q @ k.T)`` where a query attends to a key, and
    ``lse = log(sum(exp(scores)))``. Query i stands beside key ``i + t - s``: the last query beside the last key.

    Args:
        q: ``T[*m s h d]``: (batch, seqlen_q, heads, headdim), float16 or bfloat16. All dims but the last may have any
            stride of 16 bytes, as slices of a fused projection have them; others are copied.
        k: ``T[*m t g d]``: (batch, seqlen_k, kv heads, headdim); g divides h, and ``h / g`` neighbouring heads of q
            share one.
        v: ``T[*m t g e]``: as k, with a headdim of its own. d and e are multiples of 16, at most 256.
        sinks: ``S[h]``, a float dtype of its own: for each head one more score, which has no value.
        scale: of scores; 0 is ``1 / sqrt(d)``.
        causal: a query attends to keys up to its own.
        left: keys before its own that a query attends to at most; -1 is all.
        right: keys after its own that a query attends to at most; -1 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.

    Returns:
        ``out``: ``T[*m s h e]`` and ``lse``: ``float32[*m h s]``, compact. Sums and exponentials in float32; weights
        are rounded to T before they multiply values. Deterministic. A row that attends to nothing is 0, its lse -inf.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous, ``causal`` beside ``right``.
        NotImplementedError: an input that requires a gradient; a GPU that is no SM 9.0.

    Source: Dao et al., FlashAttention, 2022; Shah et al., FlashAttention-3, 2024.
    """,
)
