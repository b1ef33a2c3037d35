"""Attention with the arguments of ``jax.nn.dot_product_attention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cute_ops.errors import shown
from cute_ops.ops.attention.attention import HALVES, attention
from cute_ops_jax.primitive.arrays import as_array, checked
from cute_ops_jax.primitive.function import register

Array = jax.Array
Integer = int | np.integer[Any]
Sides = tuple[int, int]
_NAME = "cute.dot_product_attention"


@checked
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: float | None = None, is_causal: bool | Integer = False, query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None, local_window_size: Integer | tuple[Integer, Integer] | None = None,
    implementation: str | None = None, return_residual: bool = False,
) -> Any:  # fmt: skip
    """``jax.nn.dot_product_attention``, by :func:`attention` where that computes the same.

    It does in 16 bits, with any number of key/value heads that divides those of queries, head sizes of 16, 32 ... 256,
    causal masks and windows. With a bias, a mask or lengths, in other dtypes, where more queries than keys are causal,
    with windows of different numbers of queries and keys, and where an ``implementation`` is named,
    ``jax.nn.dot_product_attention`` runs.

    Args:
        query: ``[B, T, N, H]`` or ``[T, N, H]``.
        key, value: ``[B, S, K, H]`` or ``[S, K, H]``; K divides N.
        bias, mask: broadcast to ``[B, N, T, S]``.
        scale: of scores; None is ``1 / sqrt(H)``.
        is_causal: query i attends to keys up to i.
        query_seq_lengths, key_value_seq_lengths: ``int32[B]``.
        local_window_size: keys that a query attends to, on both sides or ``(left, right)``.
        implementation: ``"xla"`` or ``"cudnn"``, of ``jax.nn``.
        return_residual: whether to return the log-sum-exp of scores, ``[B, T, N]``, too.

    Returns:
        ``[B, T, N, H]``, as ``query``; with ``return_residual`` a tuple of that and the residual.
    """
    q, k, v = map(as_array, (query, key, value))
    _check(q, k, v)
    causal, window = _flag(is_causal), _window(local_window_size)
    sides = _sides(q, k, causal, window) if _takes(q, k, v, scale) else None
    others = bias, mask, query_seq_lengths, key_value_seq_lengths, implementation
    if sides is None or any(each is not None for each in others):
        theirs: Any = jax.nn.dot_product_attention
        try:
            return theirs(
                q, k, v, bias, mask, scale=scale, is_causal=causal, query_seq_lengths=query_seq_lengths,
                key_value_seq_lengths=key_value_seq_lengths, local_window_size=window,
                implementation=implementation, return_residual=return_residual,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):  # what is wrong with a program, such as a traced flag
                raise
            raise type(error)(f"{_NAME}: in jax.nn.dot_product_attention: {error}") from error
    if causal:  # no query attends to later keys
        k, v = (x[..., : q.shape[-3], :, :] for x in (k, v))
    left, right = sides
    out, lse = register(attention)(q, k, v, scale=scale or 0.0, causal=causal, left=left, right=right)
    return (out, jnp.swapaxes(lse, -1, -2).astype(out.dtype)) if return_residual else out


def _check(q: Array, k: Array, v: Array) -> None:
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim not in (3, 4):
            raise ValueError(f"{_NAME}: argument `{name}` has {array.ndim} dims, expected 3 or 4: [B, S, K, H].")


def _flag(is_causal: Any) -> bool:
    if not isinstance(is_causal, bool | np.bool_ | int | np.integer) or is_causal not in (0, 1):
        raise TypeError(f"{_NAME}: option `is_causal` must be bool, got {shown(is_causal)}.")
    return bool(is_causal)


def _window(window: Any) -> Sides | None:
    """The keys before and after its own that a query attends to; None for all."""
    if window is None:
        return None
    sides = window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(isinstance(side, int | np.integer) and type(side) is not bool for side in sides):
        raise TypeError(f"{_NAME}: option `local_window_size` is {shown(window)}, expected an int or two of them.")
    left, right = map(int, sides)
    return left, right


def _takes(q: Array, k: Array, v: Array, scale: float | None) -> bool:
    """Whether :func:`attention` takes these arrays."""
    if not (q.ndim == k.ndim == v.ndim and q.ndim in (3, 4) and k.shape == v.shape and q.shape[:-3] == k.shape[:-3]):
        return False
    (heads, size), groups = q.shape[-2:], k.shape[-2]
    fits = size == k.shape[-1] and 16 <= size <= 256 and size % 16 == 0 and groups > 0 and heads % groups == 0
    own = scale is None or (isinstance(scale, float | int) and scale > 0)
    return fits and own and q.dtype == k.dtype == v.dtype and q.dtype.name in HALVES


def _sides(q: Array, k: Array, is_causal: bool, window: Sides | None) -> Sides | None:
    """How many keys before and after its own a query attends to, -1 for all; None where that is no window beside the
    last key. Causal calls read as many keys as there are queries.
    """
    queries, keys = q.shape[-3], k.shape[-3]
    left, right = window or (-1, -1)
    if window is not None and (left < 0 or right < 0):
        return None
    if is_causal:
        return (left, -1) if queries == keys or (isinstance(keys, int) and queries < keys) else None
    return (left, right) if window is None or queries == keys else None
