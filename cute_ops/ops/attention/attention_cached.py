"""Attention to caches of any number of queries, as a prompt in chunks has them: declaration, reference maths, cases."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Problem, Tuning
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.reads import Mod
from cute_ops.hardware import sm
from cute_ops.ops.attention import config, mods
from cute_ops.ops.attention.attention import (
    DTYPES,
    HALVES,
    LONGEST,
    WIDE,
    by_framework,
    check_sizes,
    finite,
)
from cute_ops.ops.attention.decode_attention import (
    FP8,
    SCALES,
    fill_pages,
    room,
    side_by_side,
    wrong_batch,
    wrong_dtypes,
)
from cute_ops.ops.attention.sequences import Sequences, Side, fill_offsets
from cute_ops.ops.attention.weights import grouped, ungrouped, weights_of

PLAIN: dict[str, Any] = {"absent": ("page_table", "sinks", *SCALES), "attrs": {"causal": True}}
PAGED: dict[str, Any] = {"absent": ("sinks", *SCALES), "attrs": {"causal": True}}
CASES = (
    Case("llama3-8b", {"b": 2, "s": 130, "g": 2, "r": 4, "d": 128, "e": 128, "p": 2, "c": 300}, **PLAIN),
    Case("llama3-8b-paged", {"b": 3, "s": 70, "g": 2, "r": 4, "d": 128, "e": 128, "p": 70, "c": 16, "t": 20}, **PAGED),
    Case("gpt-oss-20b", {"b": 2, "s": 77, "g": 1, "r": 8, "d": 64, "e": 64, "p": 9, "c": 64, "t": 4}, {"I": "int64"},
         absent=SCALES, attrs={"causal": True, "left": 127}),
    Case("llama3-8b-float8", {"b": 3, "s": 70, "g": 2, "r": 4, "d": 128, "e": 128, "p": 70, "c": 16, "t": 20},
         {"C": FP8}, absent=("sinks",), attrs={"causal": True}),
    Case("gemma2-9b", {"b": 1, "s": 65, "g": 2, "r": 2, "d": 256, "e": 256, "p": 200, "c": 1, "t": 150},
         {"P": "int64"}, absent=("sinks", *SCALES), attrs={"causal": True, "softcap": 50.0, "scale": 0.0625}),
    Case("deepseek-v3", {"b": 1, "s": 140, "g": 2, "r": 1, "d": 192, "e": 128, "p": 80, "c": 7, "t": 30}, **PAGED),
)  # fmt: skip
PACKED_CASES = (
    Case("llama3-8b", {"s": 300, "b": 5, "g": 2, "r": 4, "d": 128, "e": 128, "p": 90, "c": 16, "t": 12}, **PAGED),
    Case("gpt-oss-20b", {"s": 277, "b": 3, "g": 1, "r": 8, "d": 64, "e": 64, "p": 3, "c": 200},
         absent=("page_table", *SCALES), attrs={"causal": True, "left": 127}),
    Case("no-sequence", {"s": 20, "b": 0, "g": 1, "r": 1, "d": 64, "e": 64, "p": 3, "c": 8, "t": 2}, **PAGED),
)  # fmt: skip


class Batch:
    """The keys that each sequence of a batch has, for :func:`weights_of`.

    Args:
        xp: the namespace of arrays.
        lengths: keys of each sequence.
        there: ``(batch, keys)``.
        queries: of a sequence.
    """

    def __init__(self, xp: Any, lengths: Any, there: Any, queries: Any) -> None:
        self.xp, self.lengths, self.there, self.queries = xp, lengths, there, queries

    def coordinates(self, head: Any, heads: Any) -> list[Any]:
        """Batch, head, q and k of scores (batch, kv heads, heads of one, s, t), and their sizes."""
        xp, place = self.xp, beside(self.xp, self.lengths)
        batch, keys = self.there.shape
        sizes = xp.reshape(xp.astype(self.lengths, head.dtype), (batch, 1, 1, 1, 1))
        number, query, key = (xp.astype(xp.arange(n, **place), head.dtype) for n in (batch, self.queries, keys))
        count, queries = (xp.asarray(n, dtype=head.dtype, **place) for n in (batch, self.queries))
        at = xp.reshape(number, (batch, 1, 1, 1, 1)), xp.reshape(query, (-1, 1)) + sizes - self.queries
        return [at[0], head, at[1], key, count, heads, queries, sizes]

    def seen(self) -> Any:
        """Whether a key is there."""
        return self.there[:, None, None, None, :]


class PackedQueries(Sequences):
    """Sequences of packed queries, and the keys that each has in a cache, one sequence's after another's.

    Args:
        xp: the namespace of arrays.
        offsets: where sequences of queries begin and the last one ends.
        tokens: how many queries there are.
        lengths: keys of each sequence.
        there: ``(batch, keys)``.
    """

    def __init__(self, xp: Any, offsets: Any, tokens: Any, lengths: Any, there: Any) -> None:
        self.xp, self.count = xp, offsets.shape[0] - 1
        self.q, self.there = self.side(offsets, tokens), xp.reshape(there, (-1,))
        token = xp.arange(self.there.shape[0], dtype=xp.int32, **beside(xp, offsets))
        room = max(there.shape[1], 1)
        length = xp.concat([xp.astype(lengths, xp.int32), xp.zeros_like(offsets[:1])])
        self.k = Side(token // room, token % room, length)

    def seen(self) -> Any:
        return super().seen() & self.there


def reference(
    xp: Any, q: Any, k: Any, v: Any, *more: Any, own: mods.Own = mods.NONE, packed: bool = False, **attrs: Any
) -> tuple[Any, Any]:  # fmt: skip
    """``more`` are offsets where queries are packed, lengths, the captured arrays, and pages, sinks and scales or
    None.
    """
    offsets, more = (more[0], more[1:]) if packed else (None, more)
    lengths, count = more[0], len(own.captured)
    captured, (table, sinks, *scales) = more[1 : 1 + count], (*more[1 + count :], *[None] * 4)[:4]
    if 0 in (q.shape[-2], q.shape[-3], lengths.shape[0]):
        lse = xp.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=xp.float32, **beside(xp, q))
        sink = -math.inf if sinks is None else xp.astype(sinks, xp.float32)[:, None]
        return xp.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, **beside(xp, q)), lse + sink
    if k.dtype != q.dtype:
        k, v, *scales = widen(xp, k, v, *scales)
        k, v = (x if scale is None else x * scale[:, None] for x, scale in zip((k, v), scales, strict=True))
    (k, v), key, there = side_by_side(xp, (k, v), lengths, table)
    k, v = (xp.where(there[:, :, None, None], x, xp.zeros_like(x)) for x in (k, v))
    whole = xp.where(lengths < key.shape[0], lengths, xp.full_like(lengths, key.shape[0]))
    lengths = xp.where(whole > 0, whole, xp.zeros_like(whole))
    if offsets is None:
        weights, lse, _ = weights_of(
            xp, (q, k, sinks), attrs, own, captured, Batch(xp, lengths, there, q.shape[-3])
        )  # fmt: skip
        out = ungrouped(xp, weights @ grouped(xp, *widen(xp, v)), q)
        return xp.astype(out, q.dtype), xp.reshape(lse, (*q.shape[:-3], q.shape[-2], q.shape[-3]))
    sequences = PackedQueries(xp, offsets, q.shape[-3], lengths, there)
    k, v = (xp.reshape(x, (-1, *x.shape[2:])) for x in (k, v))
    unknown = sequences.unknown((q,), (k,)), sequences.unknown((), (v,))
    q, k, v = (finite(xp, x) for x in (q, k, v))
    weights, lse, _ = weights_of(xp, (q, k, sinks), attrs, own, captured, sequences)
    of_scores, of_values = (each[sequences.q.number] for each in unknown)
    out = ungrouped(xp, weights @ grouped(xp, *widen(xp, v)), q) + (of_scores + of_values)[:, None, None]
    return xp.astype(out, q.dtype), xp.reshape(lse, (q.shape[-2], q.shape[-3])) + of_scores


def _has_no_kernel(problem: Problem) -> str:
    """Why the framework's functions run; float8 is converted by instructions of SM 8.9."""
    if problem.dtypes["k"] == FP8 and sm(problem.arch) < config.LEAST_SM_OF_FP8:
        return f"float8 needs SM 8.9, not {problem.arch}"
    return ""


def check(binding: Binding) -> str | None:
    dims, dtypes = binding.dims, binding.dtypes
    if problem := wrong_dtypes(binding):
        return problem
    if dtypes["C"] == FP8 and (dims["d"] % 32 or dims["e"] % 32):
        return f"a head has 32, 64 ... 256 elements in float8, got d={dims['d']}, e={dims['e']}."
    if problem := wrong_batch(binding):
        return problem
    keys = room(binding)
    if isinstance(keys, int) and keys > LONGEST:
        return f"a sequence has at most {LONGEST} keys, got room for {keys}."
    return check_sizes(dims, binding.attrs)


def fill(xp: Any, arrays: dict[str, Any]) -> None:
    """Make offsets, lengths and pages of random numbers."""
    if "cu_seqlens_q" in arrays:
        fill_offsets(xp, arrays)
    fill_pages(xp, arrays)


_DOC = """Attention of {packed}queries to keys and values in caches, with grouped heads: of a prompt in chunks.

    ``out = softmax(scores) @ v`` with ``scores = softcap(scale * q @ k.T)`` where a query attends to a key, and
    ``lse = log(sum(exp(scores)))``. A sequence's last query stands beside its last key. No cache is copied.
    :func:`append_kv` writes keys and values of the chunk before the call.

    Args:
        q: ``T[{lead}s g*r d]``: {dims}, float16, bfloat16 or float32. All dims but the last may have any
            stride of 16 bytes, as slices of a fused projection have them; others are copied.
        k: ``C[p c g d]``: (pages, page size, kv heads, headdim), pages of any size; or (batch, capacity, kv heads,
            headdim). All dims but the last may have any stride of 16 bytes, as :func:`append_kv` takes them; r
            neighbouring heads of q share one. In the dtype of q or in float8_e4m3fn.
        v: ``C[p c g e]``: as k, with a headdim of its own. d and e are multiples of 16, in float8 of 32, at most
            256.{offsets}
        lengths: int32 or int64 ``[b]``: keys of each sequence, new ones included, as :func:`decode_attention` has it.
        page_table: int32 or int64 ``[b t]``: as :func:`decode_attention` has it.
        sinks: ``S[g*r]``, a float dtype of its own: for each head one more score, which has no value.
        k_scale: float32 ``[g]``, of any strides: what keys in float8 are multiplied by, as
            :func:`decode_attention` has it.
        v_scale: as k_scale, of values.
        scale: of scores; 0 is ``1 / sqrt(d)``.
        causal: a query attends to keys up to its own.
        left: keys before its own that a query attends to at most; -1 is all.
        right: keys after its own that a query attends to at most; -1 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.
        fused: ``"auto"`` runs the kernel in 16 bits, of caches in float8 from SM 8.9 on, and else the same formula in
            the framework's functions, which needs memory for all scores; ``"always"`` the kernel, ``"never"`` the
            framework's functions.

    Returns:
        ``out``: ``T[{lead}s g*r e]`` and ``lse``: ``float32[{lead}g*r s]``, compact. Sums and exponentials in float32;
        weights are rounded to T before they multiply values. A row that attends to nothing is 0, its lse -inf. No
        gradient. Deterministic. Whatever stands in caches beyond a sequence's length, NaN too, changes nothing.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, caches whose last dim is not contiguous or that are not aligned to 16 bytes,
            ``causal`` beside ``right``.
        NotImplementedError: an input that requires a gradient; caches in float8 with
            ``fused="always"`` and a GPU older than SM 8.9.

    Source: Shah et al., FlashAttention-3, 2024; Kwon et al., Efficient Memory Management for Large Language Model
    Serving with PagedAttention, 2023.
    """
_OFFSETS_DOC = """
        cu_seqlens_q: int32 ``[b+1]``: where sequences of queries begin, and where the last one ends; as
            :func:`attention_packed` has it."""


def _doc(packed: bool) -> str:
    if packed:
        return _DOC.format(packed="packed ", lead="", dims="(tokens, heads, headdim)", offsets=_OFFSETS_DOC)
    return _DOC.format(packed="", lead="b ", dims="(batch, queries, heads, headdim)", offsets="")


def _cache(shape: str) -> Tensor:
    return Tensor(shape, "C", align=16)


@cache
def declare(name: str, own: mods.Own = mods.NONE, packed: bool = False) -> Op:
    """Attention to caches with a call's own functions, of a batch or of packed queries; the same op every time."""
    functions = [Mod.parse(text) for text in (own.score, own.mask) if text]
    of_head = mods.depends_on_head(functions, [shape for _, _, shape in own.captured])
    lead = "" if packed else "b "
    given = {
        "q": Tensor(f"{lead}s g*r d", "T", align=16, otherwise="copy"), "k": _cache("p c g d"), "v": _cache("p c g e"),
        **({"cu_seqlens_q": Tensor("b+1", "int32", upper_bound="s")} if packed else {}),
        "lengths": Tensor("b", "I"),
        **{name: Tensor(shape, f"C_{name}") for name, _, shape in own.captured},
        "page_table": Tensor("b t", "P", optional=True, upper_bound="p"),
        "sinks": Tensor("g*r", "S", optional=True),
        **{scale: Tensor("g", "float32", optional=True, contiguous=()) for scale in SCALES},
    }  # fmt: skip
    forward = partial(reference, own=own, packed=packed)
    return Op(
        name,
        inputs=given,
        outputs={"out": Tensor(f"{lead}s g*r e", "T"), "lse": Tensor(f"{lead}g*r s", "float32")},
        dtypes={"T": HALVES, "C": (*HALVES, FP8), "I": ("int32", "int64"), "P": ("int32", "int64"), "S": FLOATS,
                **{f"C_{name}": DTYPES[kind] for name, kind, _ in own.captured}},
        attrs={"scale": 0.0, "causal": False, "left": -1, "right": -1, "softcap": 0.0, "fused": FUSED},
        static=("d", "e"),
        sharding=Sharding(parallel=() if of_head else ("g",)),
        check=check,
        cases=() if functions else PACKED_CASES if packed else CASES,
        called="attention" if functions else "",
        arrange=fill,
        reference=forward,
        fallback=by_framework(forward, [*given], ("out", "lse"), _has_no_kernel, {**WIDE, "C": WIDE["T"]}),
        kernel=Kernel("cute_ops.kernels.attention.fwd:attention_cached"),
        tuning=Tuning(partial(config.attention_cached, own), workspace=partial(config.workspace_cached, own)),
        inference_only="caches have no gradient: train with attention to keys and values of their own.",
        doc=_doc(packed),
    )  # fmt: skip


attention_cached = declare("attention_cached")
attention_cached_packed = declare("attention_cached_packed", packed=True)
