"""Packed sequences in a causal convolution: each is as if it were alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.contract.adapters import Adapter

LENGTHS = [(5, 1, 9), (0, 3, 0, 2, 1), (7,), (1, 1, 1, 0), (2, 30)]


@pytest.mark.on_gpus
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_packed_sequences_are_those_apart(adapter: Adapter, activation: str, lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(lengths))
    width, n, t = 2 + len(lengths) % 3, 24, sum(lengths)
    x, weight, bias, d = (rng.standard_normal(s).astype(np.float32) for s in ((t, n), (n, width), (n,), (t, n)))
    ends = np.cumsum((0, *lengths)).astype(np.int32)
    given = adapter.array(ends)

    def packed(x: Any, weight: Any, bias: Any) -> Any:
        return adapter.ours.causal_conv1d_packed(x, weight, given, bias, activation=activation)

    (out,), slopes = adapter.value_and_gradients(adapter.usual(packed), adapter.arrays([x, weight, bias]), [d])
    exact = [np.zeros_like(a) for a in (x, x, weight, bias)]
    for start, stop in pairwise(ends):
        if start == stop:
            continue

        def alone(x: Any, weight: Any, bias: Any) -> Any:
            return adapter.ours.causal_conv1d(x, weight, bias, activation=activation)[0]

        one = adapter.arrays([x[start:stop], weight, bias])
        (part,), (dx, dweight, dbias) = adapter.value_and_gradients(adapter.usual(alone), one, [d[start:stop]])
        exact[0][start:stop], exact[1][start:stop] = part, dx
        exact[2] += dweight
        exact[3] += dbias
    for got, wanted in zip((out, *slopes), exact, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


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
