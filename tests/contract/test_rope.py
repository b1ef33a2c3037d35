"""Rotary tables that broadcast over x, along whichever of its leading dims."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.adapters import Adapter

LEADS = [(5, 1), (1, 3), (5, 3), (3,), (1,), (1, 1), ()]


def problem(lead: tuple[int, ...]) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Heads of 5 positions and 3 sequences, tables with these leading dims, and the same tables written out."""
    rng = np.random.default_rng(0)
    x, angles = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3, 2, 64), (*lead, 32)))
    whole = np.broadcast_to(angles, (5, 3, 32))
    return x, [np.cos(angles), np.sin(angles)], [np.cos(whole), np.sin(whole)]


@pytest.mark.on_gpus
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_tables_broadcast_along_any_leading_dim(adapter: Adapter, lead: tuple[int, ...]) -> None:
    x, tables, whole = problem(lead)
    results = []
    for given in (tables, whole):
        cos, sin = adapter.arrays(given)
        values, gradients = adapter.value_and_gradients(
            lambda x, cos=cos, sin=sin: adapter.ours.rope(x, cos, sin), [adapter.array(x)], [np.cos(x)]
        )
        results.append([*values, *gradients])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_batches_of_tables(adapter: Adapter, lead: tuple[int, ...]) -> None:
    (x, given, others), rope, numpy = problem(lead), adapter.ours.rope, adapter.numpy
    tables, whole = adapter.arrays(given), adapter.arrays(others)
    several = np.stack([x, -2 * x])
    expected = np.stack([numpy(rope(adapter.array(each), *whole)) for each in several])
    both = adapter.arrays([np.stack([t, t]) for t in given])
    single, batch = adapter.array(x), adapter.array(several)
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(numpy(adapter.vmap(lambda x: rope(x, *tables))(batch)), expected, **close)
    np.testing.assert_allclose(numpy(adapter.vmap(rope)(batch, *both)), expected, **close)
    np.testing.assert_allclose(numpy(adapter.vmap(lambda *t: rope(single, *t))(*both))[1], expected[0], **close)


def test_other_leading_dims_are_refused(adapter: Adapter) -> None:
    x, table = adapter.arrays([problem((5, 3))[0], np.ones((5, 32), np.float32)])
    text = r"argument `cos` has leading dims \(5,\), expected the last ones of \*m=\(5, 3\), or 1\."
    with pytest.raises(ValueError, match=text):
        adapter.ours.rope(x, table, table)


@pytest.mark.on_gpus
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_are_rows_of_the_tables(adapter: Adapter, interleaved: bool) -> None:
    rng = np.random.default_rng(6)
    x, d = (rng.standard_normal((4, 3, 2, 64)).astype(np.float32) for _ in "xd")
    angles, positions = rng.standard_normal((11, 24)).astype(np.float32), rng.integers(0, 11, (4, 3)).astype(np.int32)
    tables, at = [np.cos(angles), np.sin(angles)], adapter.array(positions)
    whole, chosen = adapter.arrays(tables), adapter.arrays([t[positions] for t in tables])
    found = adapter.value_and_gradients(
        lambda x: adapter.ours.rope_at(x, at, *whole, interleaved=interleaved), [adapter.array(x)], [d]
    )
    expected = adapter.value_and_gradients(
        lambda x: adapter.ours.rope(x, *chosen, interleaved=interleaved), [adapter.array(x)], [d]
    )
    for got, wanted in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="heads have d=64 elements, expected at least 2r=80 for r=40 angles"):
        adapter.ours.rope_at(adapter.array(x), at, *adapter.arrays([np.ones((11, 40), np.float32)] * 2))
