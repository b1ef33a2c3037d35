"""Packed sequences in a causal convolution: each is as if it were alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.contract.adapters import Adapter

LENGTHS = [(5, 1, 9), (0, 3, 0, 2, 1), (7,), (1, 1, 1, 0), (2, 30)]


@pytest.mark.on_gpus
@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)
def test_packed_sequences_are_those_apart(adapter: Adapter, lengths: tuple[int, ...]) -> None:
    """Against each sequence by itself in float64."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(len(lengths))
    width, n, t = 2 + len(lengths) % 3, 24, sum(lengths)
    x, weight, bias, d = (rng.standard_normal(s).astype(np.float32) for s in ((t, n), (n, width), (n,), (t, n)))
    ends = np.cumsum((0, *lengths)).astype(np.int32)
    given, activation = adapter.array(ends), ("silu", "none")[len(lengths) % 2]

    def packed(x: Any, weight: Any, bias: Any) -> Any:
        return adapter.ours.causal_conv1d_packed(x, weight, given, bias, activation=activation)

    (out,), slopes = adapter.value_and_gradients(adapter.usual(packed), adapter.arrays([x, weight, bias]), [d])
    wide = [torch.from_numpy(a).double().requires_grad_() for a in (x, weight, bias)]
    parts = []
    for start, stop in pairwise(ends.tolist()):
        padded = torch.nn.functional.pad(wide[0][start:stop], (0, 0, width - 1, 0))
        parts.append(sum(padded[j : j + stop - start] * wide[1][:, j] for j in range(width)) + wide[2])
    exact = torch.cat(parts)
    exact = torch.nn.functional.silu(exact) if activation == "silu" else exact
    gradients = torch.autograd.grad(exact, wide, torch.from_numpy(d).double())
    for got, wanted in zip((out, *slopes), (exact, *gradients), strict=True):
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.on_gpus
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_states_are_the_last_tokens(adapter: Adapter, lengths: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).standard_normal((sum(lengths), 5)).astype(np.float32)
    ends = np.cumsum((0, *lengths)).astype(np.int32)
    found = adapter.numpy(adapter.ours.causal_conv1d_states(adapter.array(x), adapter.array(ends), length=3))
    for i, (start, stop) in enumerate(pairwise(ends)):
        padded = np.concatenate([np.zeros((3, 5), np.float32), x[start:stop]])
        np.testing.assert_array_equal(found[i], padded[-3:])


def test_what_is_refused(adapter: Adapter) -> None:
    x, ends = adapter.array(np.ones((4, 6), np.float32)), adapter.array(np.array([0, 4], np.int32))
    with pytest.raises(ValueError, match=r"argument `weight` has w=5, expected 2, 3 or 4"):
        adapter.ours.causal_conv1d_packed(x, adapter.array(np.ones((6, 5), np.float32)), ends)
    with pytest.raises(ValueError, match=r"attribute `length` is 0, expected at least 1"):
        adapter.ours.causal_conv1d_states(x, ends, length=0)
