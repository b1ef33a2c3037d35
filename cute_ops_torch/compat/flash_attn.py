"""Functions of FlashAttention 2 (flash_attn 2.8), by :func:`cute_ops_torch.attention` and its ops for decoding.

Shapes, positions of causal masks and windows, and rows without keys are theirs; the lse of such a row is -inf, theirs
inf. Gradients are summed in a fixed order with ``deterministic``. Head dims that are no multiple of 16 are padded with
zeros, which copies. Dropout is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

import cute_ops_torch
from cute_ops import mods
from cute_ops.ops.attention.decode_attention import MOST_QUERIES
from cute_ops_torch.compat.refusal import missing, only

Tensor = torch.Tensor
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
__getattr__ = missing(__name__, __all__, {})
MULTIPLE = 16  # of head dims that our kernels take


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """``softmax(q @ k.T) @ v`` of (batch, seqlen, heads, headdim), with grouped heads.

    Returns:
        ``out``; with ``return_attn_probs`` ``(out, lse, None)``: there are no probabilities without dropout, as there.
    """
    only("flash_attn_func", dropout_p=(dropout_p, 0.0))
    out, lse = attend(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_func` of (batch, seqlen, 2, heads, headdim), which is not copied."""
    only("flash_attn_kvpacked_func", dropout_p=(dropout_p, 0.0))
    k, v = kv.unbind(2)
    rest = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, k, v, dropout_p, *rest)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_func` of (batch, seqlen, 3, heads, headdim), which is not copied."""
    only("flash_attn_qkvpacked_func", dropout_p=(dropout_p, 0.0))
    q, k, v = qkv.unbind(2)
    rest = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, k, v, dropout_p, *rest)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """:func:`flash_attn_func` of sequences one after another, (tokens, heads, headdim).

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,): where each sequence begins and the last one ends.
        max_seqlen_q, max_seqlen_k: not needed, since a grid here does not depend on them: any value gives the same.
        block_table: pages of each sequence; ``k`` and ``v`` are pools (pages, page size, heads, headdim) then, and
            ``cu_seqlens_k`` says how many keys each sequence has. No gradient.

    Returns:
        ``out``; with ``return_attn_probs`` ``(out, lse, None)``, lse (heads, tokens).
    """
    only("flash_attn_varlen_func", dropout_p=(dropout_p, 0.0))
    where: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        where = {"cu_seqlens_q": cu_seqlens_q, "lengths": lengths, "page_table": block_table}
    out, lse = attend(
        q, k, v, where, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_varlen_func` of (tokens, 2, heads, headdim), which is not copied."""
    only("flash_attn_varlen_kvpacked_func", dropout_p=(dropout_p, 0.0))
    k, v = kv.unbind(1)
    where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p
    rest = *where, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """:func:`flash_attn_varlen_func` of (tokens, 3, heads, headdim), which is not copied."""
    only("flash_attn_varlen_qkvpacked_func", dropout_p=(dropout_p, 0.0))
    q, k, v = qkv.unbind(1)
    where = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p
    rest = *where, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *rest)


def attend(
    q: Tensor, k: Tensor, v: Tensor, where: Mapping[str, Any] = MappingProxyType({}), *,
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool = False, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out`` and lse. ``where`` are the arguments of :func:`cute_ops_torch.attention` that say where sequences lie."""
    _check_scale(softmax_scale)
    size, values = q.shape[-1], v.shape[-1]
    if padded := bool(size % MULTIPLE or values % MULTIPLE):
        q, k, v = _padded(q), _padded(k), _padded(v)
    out, lse = cute_ops_torch.attention(
        q,
        k,
        v,
        sinks,
        scale=(size**-0.5 if size % MULTIPLE else 0.0) if softmax_scale is None else softmax_scale,
        causal=causal,
        left=max(window_size[0], -1),  # any negative number is all keys there
        right=-1 if causal else max(window_size[1], -1),
        softcap=max(softcap, 0.0),
        deterministic=deterministic,
        **where,
        **_biased(alibi_slopes),
    )
    return (out[..., :values] if padded else out), lse


def _check_scale(softmax_scale: float | None) -> None:
    """Raise NotImplementedError for scales that are not positive: 0.0 is our ops' default, one over the root of d."""
    if softmax_scale is not None and softmax_scale <= 0:
        raise NotImplementedError(
            f"flash_attn: softmax_scale={softmax_scale} is not implemented, only positive numbers and None."
        )


_NO_BIAS: Mapping[str, Any] = {}


def _biased(alibi_slopes: Tensor | None) -> Mapping[str, Any]:
    """The options of attention with these slopes."""
    if alibi_slopes is None:
        return _NO_BIAS
    mod = mods.alibi if alibi_slopes.ndim == 1 else _alibi_of_each_example
    return {"score_mod": mod, "captured": (alibi_slopes,)}


def _alibi_of_each_example(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, slopes: Any) -> Any:
    return score - slopes[batch, head] * xp.abs(q - k)


def _padded(x: Tensor) -> Tensor:
    """Zeros behind each head, whose products are 0, up to a head dim that our kernels take."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % MULTIPLE)) if x.shape[-1] % MULTIPLE else x


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of new queries of each sequence to a cache, contiguous or in pages of any size: by
    :func:`cute_ops_torch.decode_attention` up to 16 that are causal, else by :func:`cute_ops_torch.attention`.

    Sequence i has row ``cache_batch_idx[i]`` of contiguous caches, in which its keys begin at ``cache_leftpad[i]`` and
    end at ``cache_seqlens[i]``: what stands before, NaN too, is not read.

    With ``k`` and ``v`` the new keys and values are written into the cache behind ``cache_seqlens`` others first, in
    place, keys rotated where ``rotary_cos`` and ``rotary_sin``, (positions, rotary dim / 2), are given; so are queries:
    as the keys behind ``cache_seqlens`` with a causal mask or a window, else all as the first of them. New tokens that
    have no room are left out. Keys are split over the GPU by our own heuristic. No gradient.

    Returns:
        ``out``; with ``return_softmax_lse`` ``(out, lse)``.
    """
    name = "flash_attn_with_kvcache"
    only(name, num_splits=(num_splits, 0))
    _check_rows(block_table, cache_batch_idx, cache_leftpad)
    _check_scale(softmax_scale)
    _check_together(k, v, rotary_cos, rotary_sin, cache_seqlens)
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    if k is not None and v is not None:
        angles = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin, rotary_interleaved)
        local = causal or tuple(window_size) != (-1, -1)
        slots = _slots(cache_seqlens, k.shape[1], k_cache.shape[1], block_table, cache_batch_idx)
        q = _append((k_cache, v_cache), (q, k, v), slots, cache_seqlens, angles, local)
        cache_seqlens = cache_seqlens + k.shape[1]
    if block_table is None:
        (k_cache, v_cache), cache_seqlens, block_table = _in_pages(
            (k_cache, v_cache), cache_seqlens, cache_batch_idx, cache_leftpad
        )
    left, right = (int(side) for side in window_size)  # a tensor of two numbers, too
    if q.shape[1] > MOST_QUERIES or not (causal or right == 0 or q.shape[1] == 1):
        out, lse = attend(
            q, k_cache, v_cache, {"lengths": cache_seqlens, "page_table": block_table}, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        )  # fmt: skip
    else:
        out, lse = cute_ops_torch.decode_attention(
            q, k_cache, v_cache, cache_seqlens, block_table, scale=softmax_scale or 0.0, window=max(left, -1) + 1,
            softcap=max(softcap, 0.0), **_biased(alibi_slopes),
        )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _check_rows(block_table: Tensor | None, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None) -> None:
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError(
            "flash_attn_with_kvcache: cache_batch_idx and cache_leftpad are for caches without block_table."
        )


def _in_pages(
    caches: tuple[Tensor, Tensor], seqlens: Tensor, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """Contiguous caches, how many keys each sequence has, and its pages: None if its row is that with its number."""
    if cache_leftpad is not None:
        seqlens = seqlens.clamp(max=caches[0].shape[1]) - cache_leftpad
        table = _table_of_slots(*caches, cache_batch_idx, cache_leftpad)
        return (_pool_of_slots(caches[0]), _pool_of_slots(caches[1])), seqlens, table
    # Pages that are as long as a row.
    return caches, seqlens, None if cache_batch_idx is None else cache_batch_idx[:, None]


def _append(
    caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor, Tensor], slots: Tensor, seqlens: Tensor,
    angles: tuple[Tensor, Tensor, bool] | None, local: bool,
) -> Tensor:  # fmt: skip
    """Write new keys and values to slots of caches; returns the queries, rotated as keys are.

    Args:
        new: queries, keys and values.
        seqlens: how many keys each sequence has.
        angles: cosines and sines of positions, and whether pairs are neighbours; or None.
        local: whether queries have positions of their own, not all that of the first key.
    """
    q, k, v = new
    if angles is None:
        cute_ops_torch.append_kv(*caches, k, v, slots)
        return q
    (cos, sin, interleaved), first = angles, seqlens[:, None]
    at = first + torch.arange(k.shape[1], device=q.device)
    cute_ops_torch.append_kv(*caches, k, v, slots, cos[at], sin[at], interleaved=interleaved)
    at = first + torch.arange(q.shape[1], device=q.device) * int(local)
    return cute_ops_torch.rope(q, cos[at], sin[at], interleaved)


def _check_together(
    k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None, seqlens: int | Tensor | None
) -> None:
    name = "flash_attn_with_kvcache"
    if (k is None) != (v is None) or (cos is None) != (sin is None):
        raise ValueError(f"{name}: k and v are given together, and so are rotary_cos and rotary_sin.")
    if k is None and cos is not None:
        raise ValueError(f"{name}: rotary_cos rotates new keys: it needs k and v.")
    if seqlens is None and k is not None:
        raise ValueError(f"{name}: cache_seqlens says behind how many keys k and v are written, and is not given.")


def _slots(
    seqlens: Tensor, new: int, size: int, block_table: Tensor | None, cache_batch_idx: Tensor | None
) -> Tensor:  # fmt: skip
    """The slots of the cache for the new tokens of each sequence; -1 for those that it has no room for."""
    places = seqlens[:, None] + torch.arange(new, device=seqlens.device)  # (batch, new)
    if block_table is None:
        room, slots = size, _rows(cache_batch_idx, places)[:, None] * size + places
    else:
        pages = block_table.shape[1]
        room, page = pages * size, block_table.gather(1, (places // size).clamp(max=pages - 1)).long()
        slots = page * size + places % size
    return torch.where(places < room, slots, -1)


def _rows(cache_batch_idx: Tensor | None, like: Tensor) -> Tensor:
    """Which row of contiguous caches each sequence has."""
    return torch.arange(like.shape[0], device=like.device) if cache_batch_idx is None else cache_batch_idx.long()


def _steps(cache: Tensor) -> tuple[int, int, int]:
    """How many elements are between neighbours if all slots of contiguous caches are pages of one pool, and how many of
    its pages a row and a slot are behind the one before.
    """
    row, slot = cache.stride()[:2]
    step = math.gcd(row, slot) or 1
    return step, row // step, slot // step


def _pool_of_slots(cache: Tensor) -> Tensor:
    """Contiguous caches as a pool of pages with one slot each, without a copy."""
    (rows, slots, heads, size), (step, row, slot) = cache.shape, _steps(cache)
    pages = (rows - 1) * row + (slots - 1) * slot + 1 if rows and slots else 0
    return cache.as_strided((pages, 1, heads, size), (step, step, *cache.stride()[2:]))


def _table_of_slots(k_cache: Tensor, v_cache: Tensor, cache_batch_idx: Tensor | None, first: Tensor) -> Tensor:
    """The pages of each sequence in such pools: its row's slots, from its first key on."""
    (_, row, slot), of_values = _steps(k_cache), _steps(v_cache)[1:]
    if (row, slot) != of_values:
        raise ValueError(
            "flash_attn_with_kvcache: with cache_leftpad rows and slots of k_cache and of v_cache lie alike, "
            f"got strides {k_cache.stride()} and {v_cache.stride()}."
        )
    places = first[:, None] + torch.arange(k_cache.shape[1], device=first.device)
    return (_rows(cache_batch_idx, first)[:, None] * row + places * slot).int()
