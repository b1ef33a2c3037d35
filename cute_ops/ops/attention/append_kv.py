"""Keys and values of new tokens into a cache: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import count_up_to, numbers, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.attention import config
from cute_ops.ops.rotary import rope

FP8, LARGEST = "float8_e4m3fn", 448.0
SCALES = ("k_scale", "v_scale")
PLAIN: dict[str, Any] = {"absent": ("cos", "sin", *SCALES)}
ROTATED: dict[str, Any] = {"absent": SCALES}
CASES = (
    Case("llama3-8b-decode", {"p": 9, "s": 16, "h": 8, "d": 128, "e": 128, "r": 64, "m": (65,)}, **PLAIN),
    Case("llama3-8b-prefill", {"p": 3, "s": 80, "h": 8, "d": 128, "e": 128, "m": (2, 67)}, {"I": "int32"}, **PLAIN),
    Case("qwen2.5-0.5b", {"p": 9, "s": 64, "h": 2, "d": 64, "e": 64, "m": (257,)}, **PLAIN),
    Case("deepseek-v3", {"p": 4, "s": 64, "h": 16, "d": 192, "e": 128, "m": (33,)}, **PLAIN),
    Case("gemma3-4b", {"p": 2, "s": 128, "h": 4, "d": 256, "e": 256, "m": (2, 3)}, {"I": "int32"}, **PLAIN),
    Case("one-token", {"p": 1, "s": 7, "h": 3, "d": 80, "e": 80, "m": ()}, **PLAIN),
    Case("odd", {"p": 5, "s": 3, "h": 3, "d": 7, "e": 5, "m": (11,)}, **PLAIN),
    Case("more-tokens-than-slots", {"p": 2, "s": 3, "h": 1, "d": 12, "e": 36, "m": (5, 4)}, {"I": "int32"}, **PLAIN),
    Case("llama3-8b-rotated", {"p": 9, "s": 16, "h": 8, "d": 128, "e": 128, "r": 64, "m": (65,)}, {"C": "float32"},
         **ROTATED),
    Case("gpt-neox-20b", {"p": 3, "s": 80, "h": 4, "d": 96, "e": 96, "r": 12, "m": (2, 67)}, leading=rope.SHARED,
         **ROTATED),
    Case("glm4-9b", {"p": 9, "s": 16, "h": 2, "d": 128, "e": 128, "r": 32, "m": (33,)}, attrs={"interleaved": True},
         **ROTATED),
    Case("odd-rotated", {"p": 5, "s": 3, "h": 3, "d": 7, "e": 5, "r": 3, "m": (11,)}, **ROTATED),
)  # fmt: skip


def reference(
    xp: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, slots: Any, *more: Any, interleaved: bool
) -> tuple[Any, Any]:
    """``more`` are cosines and sines, and scales of keys and values, or None."""
    cos, sin, *scales = (*more, *[None] * 4)[:4]
    if cos is not None:
        if scales[0] is not None or k.dtype != k_cache.dtype:  # rounded once
            (k,) = widen(xp, k)
        k = rope.reference(xp, k, cos, sin, interleaved=interleaved)
    pages, size = k_cache.shape[:2]
    flat = xp.reshape(slots, (-1,))
    tokens = flat.shape[0]
    if tokens == 0:
        return k_cache, v_cache
    # Of every slot the last token that names it, if there is one.
    order = xp.argsort(flat, stable=True)
    ordered, places = xp.take(flat, order, axis=0), numbers(xp, pages * size, flat)
    last = count_up_to(xp, ordered, places) - 1
    last = xp.where(last < 0, xp.zeros_like(last), last)
    named = xp.reshape(xp.take(ordered, last, axis=0) == places, (pages, size, 1, 1))
    token = xp.take(order, last, axis=0)

    def written(cache: Any, new: Any, scale: Any) -> Any:
        rows = xp.take(xp.reshape(new, (tokens, *cache.shape[2:])), token, axis=0)
        if scale is None and cache.dtype == new.dtype:
            return xp.where(named, xp.reshape(rows, cache.shape), cache)
        rows, wide = widen(xp, rows, cache)
        if scale is not None:
            rows = rows * (1 / widen(xp, scale)[0])[:, None]
        if cache.dtype != new.dtype:
            rows = xp.where(rows > LARGEST, xp.full_like(rows, LARGEST), rows)
            rows = xp.where(rows < -LARGEST, xp.full_like(rows, -LARGEST), rows)
        return xp.astype(xp.where(named, xp.reshape(rows, cache.shape), wide), cache.dtype)

    return written(k_cache, k, scales[0]), written(v_cache, v, scales[1])


def leave_out_duplicates(xp: Any, arrays: dict[str, Any]) -> None:
    """Slots that differ. The other tokens are left out, by a slot before the first one or past the last one."""
    slots, (pages, size) = arrays["slots"], arrays["k_cache"].shape[:2]
    flat = slots.reshape(-1)
    others = xp.setdiff1d(xp.arange(flat.size), xp.unique(flat, return_index=True)[1])
    flat[others] = xp.where(others % 2 == 0, -1 - others, pages * size + others)
    slots[...] = flat.reshape(slots.shape)


def check(binding: Binding) -> str | None:
    dtypes = binding.dtypes
    if dtypes["K"] not in (dtypes["T"], FP8):
        return f"caches are in the dtype of k and v or in {FP8}, got {dtypes['K']} for {dtypes['T']}."
    return None if binding.inputs["cos"] is None else rope.check(binding)


append_kv = Op(
    "append_kv",
    inputs={
        "k_cache": Tensor("p s h d", "K"),
        "v_cache": Tensor("p s h e", "K"),
        "k": Tensor("*m h d", "T"),
        "v": Tensor("*m h e", "T"),
        "slots": Tensor("*m", "I", upper_bound="p*s"),
        "cos": rope.TABLE._replace(optional=True),
        "sin": rope.TABLE._replace(optional=True, given="cos"),
        **{name: Tensor("h", "float32", optional=True, contiguous=()) for name in SCALES},
    },
    outputs={},
    mutates=("k_cache", "v_cache"),
    dtypes={"T": FLOATS, "K": (*FLOATS, FP8), "I": ("int64", "int32"), "C": FLOATS},
    attrs={"interleaved": False},
    static=("d", "e", "r"),
    sharding=Sharding(parallel=("h",)),
    reference=reference,
    kernel="cute_ops.kernels.attention.append_kv:AppendKV",
    tuning=Tuning(config.append_kv),
    check=check,
    cases=CASES,
    arrange=leave_out_duplicates,
    doc="""Keys and values of new tokens into a paged or contiguous cache, in place.

    ``k_cache[slot // s, slot % s] = k[token]``, ``v_cache`` likewise, with ``slot = slots[token]``; where ``cos`` and
    ``sin`` are given, ``rope(k, cos, sin)`` takes the place of k

    Args:
        k_cache: ``K[p s h d]``: (pages, page size, kv heads, headdim), in the dtype of k or, from SM 8.9 on, in
            float8_e4m3fn; or (batch, longest
            sequence, kv heads, headdim) of a contiguous cache, in which position t of sequence b is the slot ``b * s +
            t``. All dims but the last may have any stride: one of ``kv[:, 0]`` and ``kv[:, 1]``, or heads before slots,
            transposed. It is written.
        v_cache: ``K[p s h e]``: as k_cache, with a headdim of its own, in other memory. It is written.
        k: ``T[*m h d]``: (tokens, kv heads, headdim), or (batch, seqlen, kv heads, headdim), float32, float16 or
            bfloat16; of any strides but the last, as a slice of a fused projection has them.
        v: ``T[*m h e]``.
        slots: int64 or int32 ``[*m]``, of any strides: where a token goes. One outside of ``[0, p * s)``, such as -1,
            leaves its token out. Slots differ: where two tokens name one, it is undefined whose numbers it gets.
        cos: ``C[*#m r]``, a float dtype of its own, as :func:`rope` has it: of each token's position, or (seqlen, r)
            for all of a batch. ``2r`` is the rotary dim, at most d.
        sin: ``C[*#m r]``, likewise; both or none.
        k_scale: float32 ``[h]``, of any strides: what keys of the cache are multiplied by when they are read, for each
            head, as :func:`decode_attention` takes it: ``k / k_scale`` is stored. ``scale.expand(h)`` of one number
            takes no memory; without it the scale is 1.
        v_scale: float32 ``[h]``: likewise of values.
        interleaved: as :func:`rope` has it.

    Returns:
        PyTorch: nothing, the caches are changed. JAX: ``(k_cache, v_cache)``, the new ones, in the memory of the old
        ones where the program donates them or they are its own. Bits are copied; keys that are rotated are computed in
        float32 and rounded once, to the bits of :func:`rope`. To float8 numbers are rounded once, to the nearest, those
        beyond 448 to 448; NaN stays NaN. No gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous, caches that share memory, one of cos and
            sin, ``d < 2r``.
        NotImplementedError: an input that requires a gradient.

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023.
    """,
)
