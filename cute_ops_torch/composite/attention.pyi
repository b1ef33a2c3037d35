"""Attention: :mod:`cute_ops.composite.attention`. Made by ``python -m cute_ops_torch.tools.stubs``."""

from collections.abc import Sequence

from torch import Tensor

from cute_ops.composite.attention import Function, Given

def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    scale: float = 0.0,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    *,
    fused: str = "auto",
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    captured: Given = (),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys and values, with grouped heads.

    ``out = softmax(scores) @ v`` with ``scores = softcap(scale * q @ k.T)`` where a query attends to a key, and
    ``lse = log(sum(exp(scores)))``. Query i stands beside key ``i + t - s``: the last query beside the last key.

    Args:
        q: ``T[*m s g*r d]``: (batch, seqlen_q, heads, headdim), float16, bfloat16 or float32. All dims but the last may
            have any stride of 16 bytes, as slices of a fused projection have them; others are copied.
        k: ``T[*m t g d]``: (batch, seqlen_k, kv heads, headdim); r neighbouring heads of q share one.
        v: ``T[*m t g e]``: as k, with a headdim of its own. d and e are multiples of 16, at most 256.
        sinks: ``S[g*r]``, a float dtype of its own: for each head one more score, which has no value.
        scale: of scores; 0 is ``1 / sqrt(d)``.
        causal: a query attends to keys up to its own.
        left: keys before its own that a query attends to at most; -1 is all.
        right: keys after its own that a query attends to at most; -1 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.
        deterministic: the gradient of q is summed in a fixed order, too, which takes longer where d = e is 64 or 128
            and the GPU is SM 9.0.
        fused: ``"auto"`` runs the kernel in 16 bits, and else the same formula in the framework's functions, which
            needs memory for all scores; ``"always"`` the kernel, ``"never"`` the framework's functions.
        score_mod: ``score_mod(xp, score, batch, head, q, k, *captured)`` in array-API style: what takes the place
            of a score, after ``softcap``. :mod:`cute_ops.mods` says what it may do, and has such functions.
        mask_mod: ``mask_mod(xp, batch, head, q, k, *captured)``: whether a query attends to a key. One that ``causal``,
            ``left`` and ``right`` leave out stays so.
        captured: arrays that these functions read by index, such as ``slopes[head]`` or ``document[batch, q]``: as a
            tuple both get all of them, as a dict each function gets those that its parameters name. Floats that a
            score is computed from have a gradient; whole numbers reach up to 2^24.
        cu_seqlens_q: of sequences that are packed one after another, ``q`` (tokens, heads, headdim): int32 ``[b+1]``,
            where each begins and the last one ends. Then places, ``batch`` and masks are those within a sequence:
            :func:`attention_packed`.
        cu_seqlens_k: where sequences of keys begin and the last one ends; None where keys lie as queries do.

    Returns:
        ``out``: ``T[*m s g*r e]`` and ``lse``: ``float32[*m g*r s]``, compact. Sums and exponentials in float32;
        weights are rounded to T before they multiply values. A row that attends to nothing is 0, its lse -inf. Both
        have a gradient, which computes the scores again. Results are deterministic, gradients but that of q, too.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous, ``causal`` beside ``right``.
        NotImplementedError: a GPU older than SM 8.0.

    Source: Dao et al., FlashAttention, 2022; Shah et al., FlashAttention-3, 2024.
    """
