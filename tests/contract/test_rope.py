"""Rotary tables that broadcast over x, along whichever of its leading dims."""

from __future__ import annotations

import re
from typing import Any

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


@pytest.mark.parametrize("lead", [(5,), (1, 5, 3)], ids=str)
def test_other_leading_dims_are_refused(adapter: Adapter, lead: tuple[int, ...]) -> None:
    x, table = adapter.arrays([problem((5, 3))[0], np.ones((*lead, 32), np.float32)])
    text = rf"argument `cos` has leading dims {re.escape(str(lead))}, expected the last ones of \*m=\(5, 3\), or 1\."
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


def test_packed_heads_are_said(adapter: Adapter) -> None:
    """Heads that are left out would leave x as it is."""
    x, table = (adapter.array(np.ones(shape, np.float32)) for shape in ((5, 3, 8), (5, 4)))
    for given in ({}, {"heads": 0}, {"heads": 4}):
        with pytest.raises(ValueError, match=rf"`heads` is {given.get('heads', 0)}, expected how many heads are rot"):
            adapter.ours.rope_packed(x, table, table, **given)


def test_tables_of_any_strides_and_in_place() -> None:
    """Also in a part of a packed projection, whose other heads stay."""
    torch = pytest.importorskip("torch")
    import cute_ops_torch as ours

    x, angles = torch.randn(2, 5, 6, 16), torch.randn(8, 5)
    cos, sin = angles.cos().t(), angles.sin().t()
    expected = ours.rope(x, cos.contiguous(), sin.contiguous())
    torch.testing.assert_close(ours.rope(x, cos, sin), expected, rtol=0, atol=0)
    whole, part = x.clone(), x.clone()
    ours.rope(whole, cos, sin, out=whole)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)
    ours.rope(part[:, :, :4], cos, sin, out=part[:, :, :4])
    torch.testing.assert_close(part, ours.rope_packed(x, cos, sin, heads=4), rtol=0, atol=0)
    torch.testing.assert_close(part, torch.cat([expected[:, :, :4], x[:, :, 4:]], 2), rtol=0, atol=0)


@pytest.mark.parametrize(("sections", "mixed"), [((), False), ((3, 2, 1), False), ((2, 2, 2), True), ((4, 1, 1), True)])
def test_positions_in_place_of_tables(adapter: Adapter, sections: tuple[int, ...], mixed: bool) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 5, 3, 16)).astype(np.float32)
    at = rng.integers(0, 5000, (3, 2, 5) if sections else (2, 5)).astype(np.int32)
    steps = 100.0 ** (-np.arange(6) / 6)
    owners = [0] * 6
    for k, size in enumerate(sections):  # as transformers' Qwen2-VL and Qwen3-VL have it
        places = range(k, 3 * size, 3) if mixed and k else range(sum(sections[:k]), sum(sections[: k + 1]))
        for j in [] if mixed and not k else places:
            owners[j] = k
    angles = np.stack([(at[k] if sections else at) * step for k, step in zip(owners, steps, strict=True)], -1)
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    options = {"base": 100.0, "rotary_dim": 12, "sections": tuple(map(np.int64, sections)), "mixed": mixed}

    def ours(x: Any) -> Any:
        return adapter.ours.rope_from_positions(x, adapter.array(at), **options)

    results = [
        adapter.value_and_gradients(run, [adapter.array(x)], [np.cos(x)])
        for run in (ours, lambda x: adapter.ours.rope(x, adapter.array(cos), adapter.array(sin)))
    ]
    for (found,), (expected,) in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-3)  # an angle of 5000 in float32
    packed = adapter.ours.rope_from_positions(adapter.array(x), adapter.array(at), heads=np.int64(1), **options)
    np.testing.assert_array_equal(adapter.numpy(packed)[:, :, 1:], x[:, :, 1:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rotary_dim": 7}, "option `rotary_dim` is 7, expected an even number"),
        ({"sections": (1, 2)}, r"option `sections` is \(1, 2\), expected a sum of r=4"),
        ({"sections": (1, 1, 2)}, "argument `positions` has 2 positions of a token, expected 3, one a section"),
        ({"sections": (4,)}, "argument `positions` has 2 positions of a token, expected 1, one a section"),
        ({"sections": (2.0, 2.0)}, "option `sections` is .*, expected a sum of r=4"),
        ({"sections": (1, 3)},
         r"argument `positions` has the shape \[2, 4\], expected the last ones of \*m=\(2, 5\), or 1"),
        ({"sections": (4, 0)}, r"argument `positions` has the shape \[2, 1, 2, 5\], expected the last ones of"),
        ({"heads": -1}, "option `heads` is -1, expected how many heads are rotated, or 0"),
        ({"base": 0.0}, "option `base` is 0.0, expected a positive number"),
        ({"frequencies": np.ones(3, np.float32)}, r"argument `frequencies` has the shape \[3\], expected \[4\]"),
    ],
)  # fmt: skip
def test_what_positions_refuse(adapter: Adapter, options: dict[str, Any], text: str) -> None:
    shape = {(1, 3): (2, 4), (4, 0): (2, 1, 2, 5)}.get(options.get("sections", ()), (2, 5))
    x, at = adapter.array(np.ones((2, 5, 3, 8), np.float32)), adapter.array(np.zeros(shape, np.int32))
    options = {name: adapter.array(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    with pytest.raises(ValueError, match=text):
        adapter.ours.rope_from_positions(x, at, **options)


@pytest.mark.slow
def test_positions_in_programs_and_batches(adapter: Adapter) -> None:
    """Compiled, abstract, under vmap and of other dtypes, a rotation by positions is what it is; positions and
    frequencies have no gradient.
    """
    rng = np.random.default_rng(5)
    x, at = rng.standard_normal((2, 5, 3, 16)).astype(np.float32), rng.integers(0, 50, (3, 2, 5)).astype(np.int32)
    given = [adapter.array(x), adapter.array(at)]

    def run(x: Any, at: Any) -> Any:
        return adapter.ours.rope_from_positions(x, at, sections=(3, 3, 2))

    close = {"rtol": 1e-5, "atol": 1e-5}
    wanted = adapter.numpy(run(*given))
    np.testing.assert_allclose(adapter.numpy(adapter.compiled(run)(*given)), wanted, **close)
    np.testing.assert_allclose(adapter.numpy(adapter.vmap(run, (0, 1))(*given)), wanted, **close)
    assert tuple(adapter.abstract(run, *given).shape) == wanted.shape
    for dtype in ("uint8", "int16", "float32"):
        np.testing.assert_allclose(adapter.numpy(run(given[0], adapter.array(at.astype(dtype)))), wanted, **close)
    floats, steps = adapter.array(at.astype(np.float32)), adapter.array(np.full(8, 0.1, np.float32))

    def of_numbers(at: Any, steps: Any) -> Any:
        return adapter.ours.rope_from_positions(given[0], at[0], frequencies=steps).sum()

    for slope in adapter.grad(of_numbers, (0, 1))(floats, steps):
        assert not adapter.numpy(slope).any()
