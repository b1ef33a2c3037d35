"""Attention with heads before positions, as torch and Hugging Face's models have it: where ours computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from cute_ops.ops.attention.attention import HALVES, attention, attention_packed
from cute_ops_torch.composite.autocast import autocast, enabled
from cute_ops_torch.composite.constant import constant
from cute_ops_torch.host.traced_constants import static
from cute_ops_torch.library.modes import EXACT
from cute_ops_torch.library.supported import takes
from cute_ops_torch.library.tensors import checked
from cute_ops_torch.registry import define

Tensor = torch.Tensor
_HALVES = tuple(getattr(torch, name) for name in HALVES)
_FLOATS = (*_HALVES, torch.float32)
_attention, _packed = define(attention).function, define(attention_packed).function
ALL = (-1, -1)  # the limits of a mask that allows all
_calls: dict[Any, tuple[float, bool]] = {}  # scale and causal of direct calls of our op
_MOST_CALLS = 1 << 12
_compiling = torch.compiler.is_dynamo_compiling
_deterministic = torch.are_deterministic_algorithms_enabled


def computes(x: Tensor) -> bool:
    """Whether our attention takes tensors like ``x``, or products of it: in 16 bits, on a CPU or Hopper."""
    return _dtype(x) in _HALVES and (not x.is_cuda or _has_kernel(x.device.index or 0))


@checked
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.scaled_dot_product_attention``, by :func:`attention` where that computes the same.

    It does in 16 bits on Hopper and on a CPU, with head sizes of 16, 32 ... 256. With a mask or dropout, in float32,
    where more queries than keys are causal, and for a single query on a GPU, for which torch's kernel splits the keys,
    torch's function runs. Gradients are summed in a fixed order under ``torch.use_deterministic_algorithms(True)``.

    Args:
        query: ``[*, heads, L, E]``.
        key: ``[*, kv heads, S, E]``.
        value: ``[*, kv heads, S, Ev]``.
        attn_mask: bool, or added to scores.
        dropout_p: the probability that a weight is dropped.
        is_causal: query i attends to keys up to i.
        scale: of scores; None is ``1 / sqrt(E)``.
        enable_gqa: ``heads / kv heads`` neighbouring heads of ``query`` share one of ``key`` and ``value``.

    Returns:
        ``[*, heads, L, Ev]``, a view of memory that has positions before heads.
    """
    if _compiling():
        dropout_p, scale = static(dropout_p), static(scale)
    call = known = None
    if attn_mask is None and dropout_p == 0 and not (_compiling() or enabled()) and _are_plain(query, key, value):
        try:
            call = (
                query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device,
                query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, is_causal, scale, enable_gqa,
            )  # fmt: skip
            known = _calls.get(call)
        except (TypeError, RuntimeError):  # a symbolic shape has no hash, a nested tensor no shape
            call = None
    if known is not None:  # a call like an earlier one: what its shapes mean is known
        q, k, v = query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2)
        return _attention(q, k, v, None, *known, -1, -1, 0.0, _deterministic())[0].transpose(-3, -2)  # type: ignore[no-any-return]
    out = None
    if attn_mask is None and dropout_p == 0:
        out = _by_shapes(query, key, value, call, (is_causal, scale, enable_gqa))
    if out is not None:
        return out.transpose(-3, -2)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _by_shapes(query: Tensor, key: Tensor, value: Tensor, call: Any, options: tuple[bool, Any, bool]) -> Tensor | None:
    """Ours where it computes what torch's function does, kept for calls like this one; else None."""
    (is_causal, scale, enable_gqa), queries, keys = options, query.shape[-2], key.shape[-2]
    alike = enable_gqa or query.shape[:-2] == key.shape[:-2]
    if not alike or (query.is_cuda and queries == 1):
        return None
    if is_causal and queries != keys:  # no query attends to later keys
        first = key[..., :queries, :], value[..., :queries, :]
        return attend(query, *first, (-1, 0), scale=scale) if queries < keys else None
    out = attend(query, key, value, (-1, 0) if is_causal else ALL, scale=scale)
    if out is not None and call is not None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[call] = (0.0 if scale in (None, query.shape[-1] ** -0.5) else scale, bool(is_causal))
    return out


def _are_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return type(query) in EXACT and type(key) in EXACT and type(value) in EXACT


def attend(
    query: Tensor, key: Tensor, value: Tensor, sides: tuple[int, int], *, scale: float | None,
    softcap: float | None = None, sinks: Tensor | None = None, offsets: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:  # fmt: skip
    """Attention to the keys of a band, (*batch, seqlen, heads, headdim); None where ours does not compute it.

    Args:
        query, key, value: (*batch, heads, seqlen, headdim). The last query is beside the last key.
        sides: how many keys before and after its own a query attends to at most; -1 is all.
        scale, softcap, sinks: as :func:`cute_ops_torch.attention` has them; None is the default.
        offsets: where sequences begin in all rows of the batch, one after another, and where the last one ends: of
            queries and of keys. None where each row is one.
    """
    if not (computes(query) and takes(query, key, value) and fits(query, key, value)):
        return None
    if not _takes_options(query, sinks, scale, softcap):
        return None
    if enabled():
        query, key, value = autocast(query, key, value)
    if not query.dtype == key.dtype == value.dtype:
        return None
    left, right = sides
    causal = right == 0
    if scale == query.shape[-1] ** -0.5:
        scale = None  # one kernel serves calls that leave it out, too
    q, k, v = (x.transpose(-3, -2) for x in (query, key, value))
    options = scale or 0.0, causal, left, -1 if causal else right, softcap or 0.0
    return attend_rows(q, k, v, offsets, sinks, options)


def _takes_options(query: Tensor, sinks: Tensor | None, *factors: float | None) -> bool:
    """Whether factors are positive, and sinks those of the heads."""
    fit = sinks is None or (takes(sinks) and sinks.shape == query.shape[-3:-2])
    return fit and all(x is None or x > 0 for x in factors)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor] | None, sinks: Tensor | None, options: Sequence[Any]
) -> Tensor:
    """Attention of (*batch, seqlen, heads, headdim), within sequences that begin at these offsets if there are some.
    ``options``: of the op, in order, without ``deterministic``, which torch is told.
    """
    out: Tensor
    if offsets is None:
        out, _ = _attention(q, k, v, sinks, *options, _deterministic())
        return out
    flat = (x.flatten(0, -3) for x in (q, k, v))
    out = _packed(*flat, *offsets, sinks, *options, _deterministic())[0]
    return out.unflatten(0, q.shape[:-2])  # type: ignore[no-any-return]


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether shapes are those that our attention takes."""
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        return False
    (*batch, heads, _, size), (*_, groups, keys, _) = query.shape, key.shape
    sizes_fit = all(16 <= each <= 256 and each % 16 == 0 for each in (size, value.shape[-1]))
    return (
        sizes_fit
        and key.shape == (*batch, groups, keys, size)
        and value.shape[:-1] == (*batch, groups, keys)
        and groups > 0
        and heads % groups == 0
    )


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product of a tensor has."""
    if not enabled() or x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type) if x.dtype in _FLOATS else x.dtype


def _kernel_on(index: int) -> bool:
    """Whether a GPU is one that attention has a kernel for."""
    return _capability(index) == (9, 0)


_capability = cache(torch.cuda.get_device_capability)
_has_kernel: Any = constant(_kernel_on)
