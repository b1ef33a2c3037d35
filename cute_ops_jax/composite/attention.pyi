"""Attention: :mod:`cute_ops.composite.attention`. Made by ``python -m cute_ops_jax.tools.stubs``."""

from jax import Array

from cute_ops.composite.attention import Function, Given

def attention(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None = None,
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
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    lengths: Array | None = None,
    page_table: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> tuple[Array, Array]:
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
        deterministic: gradients are summed in a fixed order, too, which takes longer.
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
        lengths: keys of each sequence, int32 or int64 ``[b]``, on the device: then ``k`` and ``v`` are caches that
            :func:`append_kv` writes, (batch, capacity, kv heads, headdim), and nothing is read beyond a length. The
            last query stands beside the last key, as in a prompt's last chunk; queries may be packed. No gradient:
            :func:`attention_cached`. For 1 to 16 queries :func:`decode_attention` is faster.
        page_table: int32 or int64 ``[b t]``: caches are (pages, page size, kv heads, headdim), and key i of a sequence
            is in page ``page_table[i // page size]``.
        k_scale, v_scale: float32 ``[kv heads]``, what caches in float8_e4m3fn are multiplied by.

    Returns:
        ``out``: ``T[*m s g*r e]`` and ``lse``: ``float32[*m g*r s]``, compact. Sums and exponentials in float32;
        weights are rounded to T before they multiply values. A row that attends to nothing is 0, its lse -inf. Both
        have a gradient, which computes the scores again. Results are deterministic, gradients where that is asked for:
        else that of q, or of k and v where heads have more than 128 elements, may differ in the last digits.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous, ``causal`` beside ``right``.
        NotImplementedError: a GPU older than SM 8.0.

    Source: Dao et al., FlashAttention, 2022; Shah et al., FlashAttention-3, 2024.
    """

def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    page_table: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    scale: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    batch_invariant: bool = False,
    *,
    score_mod: Function | None = None,
    captured: Given = (),
) -> tuple[Array, Array]:
    """Attention of a few new queries of each sequence to its cached keys and values.

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
        score_mod: ``score_mod(xp, score, batch, head, q, k, *captured)`` in array-API style: what takes the place of a score,
            after ``softcap``, as :func:`attention` has it. A score of -inf hides a key.
        captured: arrays that it reads by index, without gradients: a tuple or a dict, as :func:`attention` has them.

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
