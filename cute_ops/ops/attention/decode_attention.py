"""Attention of new queries to caches of keys and values: declaration, reference maths, cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.captured import operands_on
from cute_ops.expressions.reads import Mod
from cute_ops.expressions.reference import evaluate
from cute_ops.ops.attention import config, mods
from cute_ops.ops.attention.attention import DTYPES, HALVES, LONGEST, check_factors
from cute_ops.ops.attention.softmax import softmax

MOST_QUERIES, FP8 = 16, "float8_e4m3fn"
SCALES = ("k_scale", "v_scale")
PLAIN: dict[str, Any] = {"absent": ("page_table", "sinks", *SCALES)}
PAGED: dict[str, Any] = {"absent": ("sinks", *SCALES)}
CASES = (
    Case("llama3-8b-paged", {"b": 3, "s": 1, "g": 2, "r": 4, "d": 128, "e": 128, "p": 40, "c": 16, "t": 20}, **PAGED),
    Case("llama3-8b", {"b": 3, "s": 1, "g": 2, "r": 4, "d": 128, "e": 128, "p": 3, "c": 300}, **PLAIN),
    Case("qwen3-8b-speculative", {"b": 2, "s": 4, "g": 2, "r": 4, "d": 128, "e": 128, "p": 9, "c": 64, "t": 5},
         {"P": "int64"}, **PAGED),
    Case("gpt-oss-20b", {"b": 2, "s": 1, "g": 2, "r": 8, "d": 64, "e": 64, "p": 9, "c": 128, "t": 3},
         absent=SCALES, attrs={"window": 128}),
    Case("llama3-8b-float8", {"b": 3, "s": 1, "g": 2, "r": 4, "d": 128, "e": 128, "p": 40, "c": 16, "t": 20},
         {"C": FP8}, absent=("sinks",)),
    Case("gemma2-9b", {"b": 2, "s": 2, "g": 2, "r": 2, "d": 256, "e": 256, "p": 2, "c": 150}, {"I": "int64"}, **PLAIN,
         attrs={"softcap": 50.0, "scale": 0.0625}),
    Case("phi3-mini", {"b": 1, "s": 1, "g": 3, "r": 1, "d": 96, "e": 96, "p": 200, "c": 1, "t": 170}, **PAGED),
    Case("other-values", {"b": 2, "s": 16, "g": 1, "r": 3, "d": 80, "e": 48, "p": 50, "c": 7, "t": 11}, **PAGED,
         attrs={"batch_invariant": True}),
)  # fmt: skip


def reference(
    xp: Any, q: Any, k_cache: Any, v_cache: Any, lengths: Any, *more: Any, own: mods.Own = mods.NONE, scale: float,
    window: int, softcap: float, batch_invariant: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """``more`` are captured arrays, and pages, sinks and scales or None."""
    del batch_invariant  # about the order of sums alone
    count = len(own.captured)
    captured, optional = more[:count], (*more[count:], *[None] * 4)[:4]
    page_table, sinks, k_scale, v_scale = optional
    (b, s, h, d), (g, e) = q.shape, v_cache.shape[2:]
    here, r = beside(xp, q), h // max(g, 1)
    if 0 in (b, s, h):
        out = xp.zeros((b, s, h, e), dtype=q.dtype, **here)
        return out, xp.zeros((b, h, s), dtype=xp.float32, **here)
    wide_q, k_cache, v_cache, wide_sinks, *scales = widen(xp, q, k_cache, v_cache, sinks, k_scale, v_scale)
    k_cache, v_cache = (
        x if scale is None else x * scale[:, None] for x, scale in zip((k_cache, v_cache), scales, strict=True)
    )
    (k, v), key, there = side_by_side(xp, (k_cache, v_cache), lengths, page_table)
    keys = key.shape[0]
    wide_k, wide_v = (xp.where(there[:, :, None, None], x, xp.zeros_like(x)) for x in (k, v))
    grouped = xp.reshape(xp.permute_dims(wide_q, (0, 2, 1, 3)), (b, g, r * s, d))
    scores = grouped @ xp.permute_dims(wide_k, (0, 2, 3, 1)) * (scale or d**-0.5)
    scores = xp.reshape(scores, (b, h, s, keys))
    place = place_of_queries(xp, lengths, key, s)
    if (change := mods.score_of(softcap, own.score)) is not None:
        at = _coordinates(xp, scores, place)
        (changed,) = evaluate(change.expression, xp, operands_on(change, xp, [scores, *at], captured))
        scores = xp.broadcast_to(changed, scores.shape)
    seen = xp.logical_and(there[:, None, :], key <= place[..., None])
    if window:
        seen = xp.logical_and(seen, key > place[..., None] - window)
    scores = xp.where(seen[:, None], scores, xp.asarray(-math.inf, dtype=scores.dtype, **here))
    weights, lse = softmax(xp, scores, None if wide_sinks is None else xp.reshape(wide_sinks, (1, h, 1, 1)))
    weights = xp.reshape(weights, (b, g, r * s, keys))
    out = xp.reshape(weights @ xp.permute_dims(wide_v, (0, 2, 1, 3)), (b, h, s, e))
    return xp.astype(xp.permute_dims(out, (0, 2, 1, 3)), q.dtype), xp.reshape(lse, (b, h, s))


def _coordinates(xp: Any, scores: Any, place: Any) -> list[Any]:
    """Batch, head, q and k of scores (batch, heads, s, keys), and their sizes; ``place``: the last key that each query
    attends to.
    """
    (b, h, s, keys), dtype, here = scores.shape, scores.dtype, beside(xp, scores)
    numbers = (xp.reshape(xp.arange(n, dtype=dtype, **here), (-1, *[1] * (3 - i))) for i, n in ((0, b), (1, h)))
    q, k = xp.astype(place, dtype)[:, None, :, None], xp.arange(keys, dtype=dtype, **here)
    sizes = [xp.asarray(n, dtype=dtype, **here) for n in (b, h, s)]
    return [*numbers, q, k, *sizes, q[:, :, -1:] + 1]


def side_by_side(xp: Any, caches: Sequence[Any], lengths: Any, page_table: Any) -> tuple[tuple[Any, ...], Any, Any]:
    """Each sequence's part of caches, (batch, keys, heads, headdim); the numbers of keys, and which of them are there:
    NaN may stand in all others.
    """
    p, c = caches[0].shape[:2]
    if page_table is None:
        found, there = tuple(caches), None
        keys = c
    else:
        b, t = page_table.shape
        keys, there = t * c, xp.logical_and(page_table >= 0, page_table < p)
        if p == 0:  # of a pool without pages there is none to take
            caches = [xp.zeros((1, *x.shape[1:]), dtype=x.dtype, **beside(xp, x)) for x in caches]
        pages = xp.reshape(xp.where(there, page_table, xp.zeros_like(page_table)), (-1,))
        found = tuple(xp.reshape(xp.take(x, pages, axis=0), (b, keys, *x.shape[2:])) for x in caches)
        there = xp.reshape(xp.broadcast_to(there[..., None], (b, t, c)), (b, keys))
    key = xp.arange(keys, dtype=lengths.dtype, **beside(xp, lengths))
    written = key < lengths[:, None]
    return found, key, written if there is None else xp.logical_and(there, written)


def place_of_queries(xp: Any, lengths: Any, key: Any, queries: int) -> Any:
    """The last key that each query of a sequence attends to, (batch, queries): the last one stands at the last key."""
    keys = key.shape[0]
    whole = xp.where(lengths < keys, lengths, xp.full_like(lengths, keys))
    return whole[:, None] - queries + xp.arange(queries, dtype=lengths.dtype, **beside(xp, lengths))


def check(binding: Binding) -> str | None:
    dims, attrs = binding.dims, binding.attrs
    if problem := wrong_dtypes(binding) or _of_heads(dims, binding.dtypes["C"] == FP8):
        return problem
    if not 1 <= dims["s"] <= MOST_QUERIES:
        return f"a sequence has 1 to {MOST_QUERIES} queries, got s={dims['s']}; `attention` takes more."
    if problem := wrong_batch(binding):
        return problem
    keys = room(binding)
    if isinstance(keys, int) and keys > LONGEST:
        return f"a sequence has at most {LONGEST} keys, got room for {keys}."
    if attrs["window"] < 0:
        return f"window is not negative, got {attrs['window']}."
    return check_factors(attrs["scale"], attrs["softcap"])


def wrong_dtypes(binding: Binding) -> str:
    """The error text for caches of an unsupported dtype, or for their scales; empty if both are right."""
    q, caches = binding.dtypes["T"], binding.dtypes["C"]
    if caches not in (q, FP8):
        return f"caches are in the dtype of q or in {FP8}, got {caches} for q in {q}."
    if caches != FP8 and (binding.inputs["k_scale"] or binding.inputs["v_scale"]):
        return f"k_scale and v_scale are for caches in {FP8}, got {caches}."
    return ""


def wrong_batch(binding: Binding) -> str:
    """The error text for the number of contiguous caches; empty if it is right, or if caches have pages."""
    dims = binding.dims
    if binding.inputs["page_table"] is not None or dims["p"] == dims["b"]:
        return ""
    said = "without page_table caches are (batch, capacity, kv heads, headdim)"
    return f"{said}, got p={dims['p']} of them for b={dims['b']} sequences."


def room(binding: Binding) -> Any:
    """How many keys the caches have room for in each sequence."""
    dims = binding.dims
    return dims["c"] if binding.inputs["page_table"] is None else dims["t"] * dims["c"]


def _of_heads(dims: Mapping[str, int], eights: bool) -> str:
    for name in ("d", "e"):
        if not 16 <= dims[name] <= 256 or dims[name] % 16:
            return f"a head has 16, 32 ... 256 elements, got {name}={dims[name]}."
        if eights and dims[name] % 32:
            return f"a head has 32, 64 ... 256 elements in float8, got {name}={dims[name]}."
    return ""


def fill_pages(xp: Any, arrays: dict[str, Any]) -> None:
    """Lengths from none to all keys, of which the last is not always there; pages of the pool, and some beyond."""
    lengths, table = arrays["lengths"], arrays.get("page_table")
    pages, size = next(x for name, x in arrays.items() if name == "k" or name.endswith("_cache")).shape[:2]
    room = size * (1 if table is None else table.shape[1])
    if lengths.size:
        lengths[...] = xp.linspace(room, 0, lengths.size).astype(lengths.dtype)
    if table is not None and table.size:
        flat = table.reshape(-1)
        flat[::5] = xp.where(flat[::5] % 2 == 0, -1 - flat[::5], pages + flat[::5])
        table[...] = flat.reshape(table.shape)


def _cache(shape: str) -> Tensor:
    return Tensor(shape, "C", align=16)


DOC = """Attention of a few new queries of each sequence to its cached keys and values.

    ``out = softmax(scores) @ v`` with ``scores = softcap(scale * q @ k.T)`` over the keys of a sequence, and ``lse =
    log(sum(exp(scores)))``. The last query stands at the last key: query i attends to the keys up to ``length - s +
    i``. :func:`append_kv` writes keys and values of the new tokens before the call.

    Args:
        q: ``T[b s g*r d]``: (batch, queries, heads, headdim), float16 or bfloat16; 1 to 16 queries a sequence.
        k_cache: ``C[p c g d]``: (pages, page size, kv heads, headdim), pages of any size; or (batch, capacity, kv
            heads, headdim); in the dtype of q or, from SM 8.9 on, in float8_e4m3fn. All dims but the last may have any
            stride of 16 bytes, as :func:`append_kv` takes them; ``r`` neighbouring heads of q share one.
        v_cache: ``C[p c g e]``: as k_cache, with a headdim of its own. d and e are multiples of 16, in float8 of 32, at
            most 256.
        lengths: int32 or int64 ``[b]``: keys of each sequence, new ones included; on the device, so that one captured
            graph serves all lengths. More than there is room for is all of it, fewer than 0 is none.
        page_table: int32 or int64 ``[b t]``: key i of a sequence is in page ``page_table[i // c]``; without it, caches
            are contiguous. Keys of a page outside of ``[0, p)`` are not attended to, and nothing is read there.
        sinks: ``S[g*r]``, a float dtype of its own: for each head one more score, which has no value.
        k_scale: float32 ``[g]``, of any strides: what keys in float8 are multiplied by, for each head of the cache;
            ``scale.expand(g)`` of one number takes no memory.
        v_scale: float32 ``[g]``: likewise of values.
        scale: of scores; 0 is ``1 / sqrt(d)``.
        window: keys that a query attends to at most, the last ones up to its own; 0 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.
        batch_invariant: whether keys are split after every 512th, so that the bits of a sequence depend on nothing else
            in the batch. By default they depend on the size of the batch, by which keys are split to fill the GPU.

    Returns:
        ``out``: ``T[b s g*r e]`` and ``lse``: ``float32[b g*r s]``. Sums and exponentials in float32; weights are
        rounded to T before they multiply values. Deterministic. Whatever stands in the caches beyond a sequence's
        length, NaN too, changes nothing. A query that attends to nothing gets 0, its lse is -inf.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, caches whose last dim is not contiguous or that are not aligned to 16 bytes.
        NotImplementedError: an input that requires a gradient.

    Source: Dao et al., Flash-Decoding, 2023; Kwon et al., Efficient Memory Management for Large Language Model Serving
    with PagedAttention, 2023.
    """


@cache
def declare(name: str, own: mods.Own = mods.NONE) -> Op:
    """The op with a call's own change of scores; the same op every time."""
    functions = [Mod.parse(own.score)] if own.score else []
    of_head = mods.depends_on_head(functions, [shape for _, _, shape in own.captured])
    forward = partial(reference, own=own) if functions else reference
    return Op(
        name,
        inputs={
            "q": Tensor("b s g*r d", "T", align=16, otherwise="copy"),
            "k_cache": _cache("p c g d"),
            "v_cache": _cache("p c g e"),
            "lengths": Tensor("b", "I"),
            **{array: Tensor(shape, f"C_{array}") for array, _, shape in own.captured},
            "page_table": Tensor("b t", "P", optional=True, upper_bound="p"),
            "sinks": Tensor("g*r", "S", optional=True),
            **{scale: Tensor("g", "float32", optional=True, contiguous=()) for scale in SCALES},
        },
        outputs={"out": Tensor("b s g*r e", "T"), "lse": Tensor("b g*r s", "float32")},
        dtypes={
            "T": HALVES, "C": (*HALVES, FP8), "I": ("int32", "int64"), "P": ("int32", "int64"), "S": FLOATS,
            **{f"C_{array}": DTYPES[kind] for array, kind, _ in own.captured},
        },
        attrs={"scale": 0.0, "window": 0, "softcap": 0.0, "batch_invariant": False},
        static=("d", "e", "r", "s"),
        sharding=Sharding(parallel=() if of_head else ("g",)),
        check=check,
        cases=() if functions else CASES,
        called="decode_attention" if functions else "",
        reference=forward,
        kernel="cute_ops.kernels.attention.decode:decode_attention",
        tuning=Tuning(partial(config.decode_attention, own), workspace=config.decode_workspace),
        arrange=fill_pages,
        inference_only="caches have no gradient: train with the framework's attention.",
        doc=DOC,
    )  # fmt: skip


decode_attention = declare("decode_attention")
