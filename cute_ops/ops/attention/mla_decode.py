"""Multi-head latent attention of new queries to a cache: declarations, reference maths, cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.attention import config
from cute_ops.ops.attention.attention import HALVES, LONGEST
from cute_ops.ops.attention.decode_attention import MOST_QUERIES, fill_pages, place_of_queries, side_by_side
from cute_ops.ops.attention.softmax import softmax
from cute_ops.ops.checks import MOST_FACTOR

Arrays = Mapping[str, Any]
PLAIN: dict[str, Any] = {"absent": ("page_table",)}
SCALE = 192**-0.5  # of DeepSeek-V2 and V3
CASES = (
    Case("deepseek-v3", {"b": 2, "s": 1, "h": 16, "d": 576, "p": 9, "c": 64, "t": 4}),
    Case("deepseek-v3-speculative", {"b": 2, "s": 2, "h": 24, "d": 576, "p": 2, "c": 130}, {"I": "int64"}, **PLAIN,
         attrs={"batch_invariant": True}),
    Case("small", {"b": 3, "s": 3, "h": 3, "d": 80, "p": 40, "c": 3, "t": 20}, {"P": "int64"},
         attrs={"scale": 0.1, "rank": 64}),
)  # fmt: skip


def reference(
    xp: Any, q: Any, latent_cache: Any, lengths: Any, page_table: Any = None,
    *, scale: float, rank: int, batch_invariant: bool,
) -> tuple[Any, Any]:  # fmt: skip
    del batch_invariant  # about the order of sums alone
    (b, s, h, _), here = q.shape, beside(xp, q)
    if 0 in (b, s, h):
        out = xp.zeros((b, s, h, rank), dtype=q.dtype, **here)
        return out, xp.zeros((b, h, s), dtype=xp.float32, **here)
    wide_q, wide_cache = widen(xp, q, latent_cache)
    (k,), key, there = side_by_side(xp, (wide_cache[:, :, None],), lengths, page_table)
    k = xp.where(there[:, :, None, None], k, xp.zeros_like(k))[:, :, 0]
    scores = xp.permute_dims(wide_q, (0, 2, 1, 3)) @ xp.matrix_transpose(k)[:, None] * scale  # (b, h, s, keys)
    place = place_of_queries(xp, lengths, key, s)
    seen = xp.logical_and(there[:, None, :], key <= place[..., None])[:, None]
    scores = xp.where(seen, scores, xp.asarray(-math.inf, dtype=scores.dtype, **here))
    weights, lse = softmax(xp, scores)
    out = weights @ k[:, None, :, :rank]
    return xp.astype(xp.permute_dims(out, (0, 2, 1, 3)), q.dtype), xp.reshape(lse, (b, h, s))


def check(binding: Binding) -> str | None:
    dims, attrs = binding.dims, binding.attrs
    if dims["d"] % 16 or attrs["rank"] % 64 or not 64 <= attrs["rank"] <= 512 or not attrs["rank"] <= dims["d"] <= 576:
        return (
            "a latent has rank=64, 128 ... 512 elements, and with those of its rotated key a multiple of 16, at most "
            f"576; got rank={attrs['rank']} of d={dims['d']}."
        )
    if not 1 <= dims["s"] <= MOST_QUERIES:
        return f"a sequence has 1 to {MOST_QUERIES} queries, got s={dims['s']}."
    paged = binding.inputs["page_table"] is not None
    if not paged and dims["p"] != dims["b"]:
        said = "without page_table the cache is (batch, capacity, d)"
        return f"{said}, got p={dims['p']} of them for b={dims['b']} sequences."
    keys = dims["c"] * (dims["t"] if paged else 1)
    if isinstance(keys, int) and keys > LONGEST:
        return f"a sequence has at most {LONGEST} keys, got room for {keys}."
    if attrs["scale"] <= 0:
        return f"scale is a positive number, 1 / sqrt of the headdim before absorption; got {attrs['scale']}."
    return _check_scale(attrs["scale"])


def _check_scale(scale: float) -> str | None:
    if scale and not 1.0 / MOST_FACTOR <= scale <= MOST_FACTOR:
        return f"scale is from 2^-126 to 2^126, as float32 holds it, got {scale}."
    return None


def rank_of(dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> int:
    return int(attrs["rank"])


mla_decode = Op(
    "mla_decode",
    inputs={
        "q": Tensor("b s h d", "T", align=16, otherwise="copy"),
        "latent_cache": Tensor("p c d", "T", align=16),
        "lengths": Tensor("b", "I"),
        "page_table": Tensor("b t", "P", optional=True, upper_bound="p"),
    },
    outputs={"out": Tensor("b s h e", "T"), "lse": Tensor("b h s", "float32")},
    dtypes={"T": HALVES, "I": ("int32", "int64"), "P": ("int32", "int64")},
    attrs={"scale": SCALE, "rank": 512, "batch_invariant": False},
    static=("d", "h", "s"),
    derived={"e": rank_of},
    sharding=Sharding(parallel=("h",)),
    check=check,
    cases=CASES,
    reference=reference,
    kernel="cute_ops.kernels.attention.mla:mla_decode",
    tuning=Tuning(config.mla_decode, workspace=config.mla_workspace),
    arrange=fill_pages,
    inference_only="caches have no gradient: train with the framework's attention.",
    doc="""Multi-head latent attention of a few new queries of each sequence to its cached latents, as DeepSeek has it.

    ``out = softmax(scale * q @ latent.T) @ latent[:, :rank]``, and ``lse = log(sum(exp(scores)))``. All heads share one
    latent, which is key and value: its first ``rank`` elements are what keys and values are projected from, the others
    a rotated key. ``q`` is absorbed: ``[q_nope @ w_k, rotated q]``; ``out @ w_v`` are the heads' results. The last
    query stands at the last key, as in :func:`decode_attention`.

    Args:
        q: ``T[b s h d]``: (batch, queries, heads, rank + rotary dim), float16 or bfloat16; 1 to 16 queries a sequence.
        latent_cache: ``T[p c d]``: (pages, page size, rank + rotary dim), pages of any size; or (batch, capacity, rank
            + rotary dim). Pages and slots may have any stride of 16 bytes. :func:`append_kv` writes such caches with
            one head: of ``cache[:, :, None, :rank]`` and ``cache[:, :, None, rank:]``.
        lengths: int32 or int64 ``[b]``: as :func:`decode_attention` has it.
        page_table: int32 or int64 ``[b t]``: as :func:`decode_attention` has it.
        scale: of scores: 1 / sqrt of the headdim before absorption; by default that of DeepSeek-V2 and V3, 128 + 64.
        rank: elements of a latent that are values: 64, 128 ... 512.
        batch_invariant: as :func:`decode_attention` has it.

    Returns:
        ``out``: ``T[b s h rank]`` and ``lse``: ``float32[b h s]``, as :func:`decode_attention` computes them.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a cache whose last dim is not contiguous or that is not aligned.
        NotImplementedError: an input that requires a gradient.

    Source: DeepSeek-V2, 2024; Ye et al., FlashInfer, 2025.
    """,
)


# With the weights that queries and results absorb ---------------------------------------------------------------------


def _run_absorbed(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    q, rotated, w_k, w_v = (inputs[name] for name in ("q", "q_rotated", "w_k", "w_v"))
    (b, s, h, n), rank = q.shape, w_k.shape[-1]

    def by_head(x: Any) -> Any:
        return x.reshape(b * s, h, x.shape[-1]).swapaxes(0, 1)

    def by_token(x: Any) -> Any:
        return x.swapaxes(0, 1).reshape(b, s, h, x.shape[-1])

    absorbed = by_token(xp.product(by_head(q), w_k))  # (b, s, h, rank)
    given = {name: inputs[name] for name in ("latent_cache", "lengths", "page_table")}
    given["q"] = xp.joined((absorbed, rotated), 3)
    scale = attrs["scale"] or (n + rotated.shape[-1]) ** -0.5
    found = call(mla_decode, given, {"scale": scale, "rank": rank, "batch_invariant": attrs["batch_invariant"]})
    return {"out": by_token(xp.product(by_head(found["out"]), w_v.swapaxes(1, 2))), "lse": found["lse"]}


def _check_absorbed(binding: Binding) -> str | None:
    dims, scale = binding.dims, binding.attrs["scale"]
    if dims["d"] != dims["k"] + dims["r"]:
        return f"a latent has k={dims['k']} elements of w_k and r={dims['r']} of q_rotated, got d={dims['d']}."
    return f"scale is not negative, got {scale}." if scale < 0 else _check_scale(scale)


mla_attention = Op(
    "mla_attention",
    inputs={
        "q": Tensor("b s h n", "T"),
        "q_rotated": Tensor("b s h r", "T"),
        "latent_cache": Tensor("p c d", "T", align=16),
        "w_k": Tensor("h n k", "T"),
        "w_v": Tensor("h v k", "T"),
        "lengths": Tensor("b", "I"),
        "page_table": Tensor("b t", "P", optional=True, upper_bound="p"),
    },
    outputs={"out": Tensor("b s h v", "T"), "lse": Tensor("b h s", "float32")},
    dtypes={"T": HALVES, "I": ("int32", "int64"), "P": ("int32", "int64")},
    attrs={"scale": 0.0, "batch_invariant": False},
    static=(),
    sharding=Sharding(parallel=("h",)),
    check=_check_absorbed,
    cases=(
        Case("small", {"b": 3, "s": 2, "h": 3, "n": 24, "r": 16, "k": 64, "v": 40, "d": 80, "p": 40, "c": 3, "t": 20}),
    ),
    kernel=Program(_run_absorbed, (mla_decode,)),
    arrange=fill_pages,
    inference_only="caches have no gradient: train with `attention` to the keys and values of each head.",
    doc="""Multi-head latent attention of new queries to a cache of latents, from weights as models have them.

    ``out = softmax(scale * q @ k.T) @ v`` with a head's keys ``k = [latent[:k] @ w_k.T, latent[k:]]`` and values ``v =
    latent[:k] @ w_v.T``, which are never made: ``[q @ w_k, q_rotated]`` attends to latents by :func:`mla_decode`, whose
    results are multiplied by ``w_v``.

    Args:
        q: ``T[b s h n]``: (batch, queries, heads, headdim without rotation), float16 or bfloat16; 1 to 16 queries.
        q_rotated: ``T[b s h r]``: the rotated part of queries.
        latent_cache: ``T[p c d]``: as :func:`mla_decode` has it, with ``d = k + r``.
        w_k: ``T[h n k]``: what keys are projected from latents by. DeepSeek's ``kv_b_proj`` has both, as views:
            ``w_k, w_v = kv_b_proj.weight.unflatten(0, (heads, -1)).split([n, v], 1)``.
        w_v: ``T[h v k]``: likewise of values.
        lengths: int32 or int64 ``[b]``: as :func:`decode_attention` has it.
        page_table: int32 or int64 ``[b t]``: as :func:`decode_attention` has it.
        scale: of scores; 0 is ``1 / sqrt(n + r)``.
        batch_invariant: as :func:`decode_attention` has it, of attention; the framework's products may differ.

    Returns:
        ``out``: ``T[b s h v]`` and ``lse``: ``float32[b h s]``. Absorbed queries and attention's results are rounded to
        T.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, those that :func:`mla_decode` refuses.
        NotImplementedError: an input that requires a gradient.

    Source: DeepSeek-V2, 2024.
    """,
)
