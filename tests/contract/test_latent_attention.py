"""Latent attention as models have it: decoding by absorbed weights, prompts by keys and values of each head."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.adapters import Adapter

NOPE, ROTATED, VALUES = 128, 64, 128


class Model:
    """Latents, queries and weights of a few heads, and what is right in float64.

    Args:
        rank: of latents.
        heads: of queries.
        lengths: keys of each sequence; a page has seven slots.
        queries: the last of each sequence.
    """

    def __init__(self, rank: int, heads: int, lengths: tuple[int, ...], queries: int) -> None:
        rng = np.random.default_rng(0)
        most, b, pages = max(lengths), len(lengths), -(-max(lengths) // 7)

        def rounded(*shape: int, scale: float = 1.0) -> np.ndarray:
            x = (rng.standard_normal(shape) * scale).astype(np.float32)
            return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # numbers of bfloat16

        self.lengths, self.scale = lengths, (NOPE + ROTATED) ** -0.5
        self.latents, self.of_keys = rounded(b, pages * 7, rank), rounded(b, pages * 7, ROTATED)
        self.q, self.rotated = rounded(b, queries, heads, NOPE), rounded(b, queries, heads, ROTATED)
        self.w_k, self.w_v = (rounded(heads, n, rank, scale=rank**-0.5) for n in (NOPE, VALUES))
        self.table = rng.permutation(b * pages).reshape(b, pages).astype(np.int32)
        cache = np.concatenate([self.latents, self.of_keys], -1)
        self.cache = np.empty((b * pages, 7, rank + ROTATED), np.float32)
        self.cache[self.table] = cache.reshape(b, pages, 7, -1)
        self.keys, self.values = (
            np.einsum("btr,hnr->bthn", self.latents, w).astype(np.float64)[:, :most] for w in (self.w_k, self.w_v)
        )
        shape = (*self.keys.shape[:3], ROTATED)
        self.keys = np.concatenate([self.keys, np.broadcast_to(self.of_keys[:, :most, None], shape)], -1)
        self.right = np.stack([self._of(i) for i in range(b)])

    def _of(self, i: int) -> np.ndarray:
        length, q = self.lengths[i], np.concatenate([self.q, self.rotated], -1)[i].astype(np.float64)
        scores = np.einsum("shd,thd->hst", q, self.keys[i, :length]) * self.scale
        last = np.arange(len(q))[:, None] + length - len(q)
        weights = np.exp(np.where(np.arange(length) <= last, scores, -np.inf))
        return np.einsum("hst,thd->shd", weights / weights.sum(-1, keepdims=True), self.values[i, :length])


@pytest.mark.on_gpus
@pytest.mark.parametrize(("rank", "queries"), [(64, 1), (128, 3), (512, 2)])
def test_decoding_absorbs_weights(adapter: Adapter, rank: int, queries: int) -> None:
    """Views of one weight, as DeepSeek's projection has both; the result is that of each head's keys and values."""
    model = Model(rank, 5, (40, 9), queries)
    weight = adapter.array(np.concatenate([model.w_k, model.w_v], 1), "bfloat16")
    names = (model.q, model.rotated, model.cache)
    given = [adapter.array(x, "bfloat16") for x in names]
    lengths, table = adapter.array(np.array(model.lengths, np.int32)), adapter.array(model.table)

    def attend(*given):  # type: ignore[no-untyped-def]
        weights = given[3][:, :NOPE], given[3][:, NOPE:]
        return adapter.ours.mla_attention(*given[:3], *weights, lengths, table)[0]

    found = adapter.numpy(adapter.usual(attend)(*given, weight)).astype(np.float64)
    assert np.abs(found - model.right).max() < 0.02 * np.abs(model.values).max()


@pytest.mark.on_gpus
def test_prompts_attend_by_heads_of_192_and_128(adapter: Adapter) -> None:
    """The last queries of a prompt are those of decoding."""
    model = Model(512, 4, (33, 33), 33)
    q = np.concatenate([model.q, model.rotated], -1)
    given = [adapter.array(x.astype(np.float32), "bfloat16") for x in (q, model.keys, model.values)]
    out, _ = adapter.ours.attention(*given, causal=True)
    found = adapter.numpy(out).astype(np.float64)
    assert np.abs(found - model.right).max() < 0.02 * np.abs(model.values).max()
    given = [adapter.array(x, "bfloat16") for x in (model.q[:, -4:], model.rotated[:, -4:], model.cache)]
    weights = [adapter.array(x, "bfloat16") for x in (model.w_k, model.w_v)]
    lengths, table = adapter.array(np.array(model.lengths, np.int32)), adapter.array(model.table)
    last, _ = adapter.ours.mla_attention(*given, *weights, lengths, table)
    assert np.abs(adapter.numpy(last).astype(np.float64) - found[:, -4:]).max() < 0.04 * np.abs(model.values).max()


def test_latents_of_another_size_are_refused(adapter: Adapter) -> None:
    model = Model(64, 2, (9,), 1)
    given = [adapter.array(x, "bfloat16") for x in (model.q, model.rotated[..., :16], model.cache)]
    weights = [adapter.array(x, "bfloat16") for x in (model.w_k, model.w_v)]
    lengths, table = adapter.array(np.array([9], np.int32)), adapter.array(model.table)
    with pytest.raises(ValueError, match=r"cute\.mla_attention: a latent has k=64 elements of w_k and r=16 of q_rot"):
        adapter.ours.mla_attention(*given, *weights, lengths, table)
