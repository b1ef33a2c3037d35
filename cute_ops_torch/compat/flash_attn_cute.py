"""Functions of FlashAttention 4 (``flash_attn.cute``, flash-attn-4 4.0.0b36), by :func:`cute_ops_torch.attention`.

Shapes, positions of causal masks and windows, sinks, and rows without keys are theirs. Gradients are summed in a fixed
order with ``deterministic``. Head dims that are no multiple of 16 are padded with zeros, which copies. Functions of the
CuTe DSL (``score_mod``, ``mask_mod``), sparse MLA and block sparsity are refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_ops_torch.compat.flash_attn import attend
from cute_ops_torch.compat.refusal import missing, only

Tensor = torch.Tensor
Window = tuple[int | None, int | None]
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
_MORE = {
    "flash_attn_with_kvcache": "cute_ops_torch.compat.flash_attn has it",
    "flash_attn_": "cute_ops_torch.compat.flash_attn has FlashAttention 2's",
}
__getattr__ = missing(__name__, __all__, _MORE)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None, return_lse: bool = False, gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``softmax(q @ k.T) @ v`` of (batch, seqlen, heads, headdim), with grouped heads.

    Args:
        window_size: how many keys before and after its own a query attends to; None is all, as two negative numbers.
        learnable_sink: (heads,): a score of each head that takes part in the softmax and has no value.
        num_splits, pack_gqa: change no result: ours chooses.
        return_lse: return the log-sum-exp, too, which has a gradient.

    Returns:
        ``(out, lse)``; lse, (batch, heads, seqlen), is None without ``return_lse``.
    """
    only(
        "flash_attn_func", qv=(qv, None), gather_kv_indices=(gather_kv_indices, None), score_mod=(score_mod, None),
        score_mod_bwd=(score_mod_bwd, None), mask_mod=(mask_mod, None), aux_tensors=(aux_tensors, None),
        aux_scalars=(aux_scalars, None), block_sparse_tensors=(block_sparse_tensors, None),
        block_sparse_tensors_bwd=(block_sparse_tensors_bwd, None),
        gather_bwd_recompute_p=(gather_bwd_recompute_p, False), gather_bwd_token_chunk=(gather_bwd_token_chunk, None),
    )  # fmt: skip
    out, lse = attend(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=_sides("flash_attn_func", window_size, causal),
        softcap=softcap, alibi_slopes=None, deterministic=deterministic, sinks=learnable_sink,
    )  # fmt: skip
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """:func:`flash_attn_func` of sequences one after another, (tokens, heads, headdim), or of rows of which each has as
    many keys as ``seqused_k`` says.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,): where each sequence begins and the last one ends. Without the
            former queries are (batch, seqlen, heads, headdim), without the latter keys are, and have no gradient beside
            packed queries.
        max_seqlen_q, max_seqlen_k, min_seqlen_k, num_splits, pack_gqa, scheduler_metadata, disable_scheduler_metadata:
            change no result.
        seqused_k: int32 (batch,): how many keys each row or each sequence's pages have; None is all. No gradient.
        page_table: int32 (batch, pages): the pages of each sequence; ``k`` and ``v`` are pools (pages, page size,
            heads, headdim) then. No gradient.

    Returns:
        ``(out, lse)``; lse, (heads, tokens) or (batch, heads, seqlen), is None without ``return_lse``.
    """
    name = "flash_attn_varlen_func"
    only(
        name, qv=(qv, None), seqused_q=(seqused_q, None), gather_kv_indices=(gather_kv_indices, None),
        score_mod=(score_mod, None), score_mod_bwd=(score_mod_bwd, None), mask_mod=(mask_mod, None),
        block_sparse_tensors=(block_sparse_tensors, None), aux_tensors=(aux_tensors, None),
        aux_scalars=(aux_scalars, None), seqlen_k_per_split=(seqlen_k_per_split, None),
        gather_bwd_recompute_p=(gather_bwd_recompute_p, False), gather_bwd_token_chunk=(gather_bwd_token_chunk, None),
    )  # fmt: skip
    where: dict[str, Any] = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}
    if cu_seqlens_k is not None:
        only(f"{name} with cu_seqlens_k", seqused_k=(seqused_k, None), page_table=(page_table, None))
        if cu_seqlens_q is None:
            raise NotImplementedError(f"{name}: cu_seqlens_k without cu_seqlens_q is not implemented.")
        where["cu_seqlens_k"] = cu_seqlens_k
    elif not (seqused_k is page_table is cu_seqlens_q is None):
        if seqused_k is None:
            rows, pages = (k.shape[0], 1) if page_table is None else page_table.shape
            seqused_k = torch.full((rows,), pages * k.shape[1], dtype=torch.int32, device=k.device)
        where |= {"lengths": seqused_k, "page_table": page_table}
    out, lse = attend(
        q, k, v, where, softmax_scale=softmax_scale, causal=causal, window_size=_sides(name, window_size, causal),
        softcap=softcap, alibi_slopes=None, deterministic=deterministic, sinks=learnable_sink,
    )  # fmt: skip
    return out, lse if return_lse else None


def _sides(function: str, window_size: Window, causal: bool) -> tuple[int, int]:
    """A window as FlashAttention 2 has it, -1 for None."""
    left, right = window_size
    if left is not None and right is not None and left < 0 and right < 0:
        return -1, -1
    if any(side is not None and side < 0 for side in ((left,) if causal else (left, right))):
        raise NotImplementedError(
            f"{function}: window_size={window_size} is not implemented, only None and numbers from 0 on."
        )
    return -1 if left is None else left, -1 if right is None else right
