"""Dropout in one pass with a norm: which elements are dropped, and that both frameworks drop the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.expressions.philox import philox, uniform
from tests.contract.adapters import Adapter

ZEROS = np.zeros((3, 400), np.float32)


def dropped(adapter: Adapter, seed: int, p: float, rows: np.ndarray = ZEROS) -> np.ndarray:
    """Where an element of ones is dropped."""
    ones, weight = adapter.array(rows + 1), adapter.array(np.ones(rows.shape[-1], np.float32))
    _, total = adapter.ours.dropout_add_rmsnorm(
        ones, adapter.array(rows), weight, adapter.array(np.array(seed, np.int32)), p=p
    )
    found = adapter.numpy(total)
    np.testing.assert_allclose(found[found != 0], 1 / (1 - p), rtol=1e-6)
    return found == 0


def test_the_words_are_those_of_the_paper() -> None:
    """Salmon et al.'s known answers, of ten rounds."""
    for fill, wanted in (
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        word = np.full(1, fill, np.uint32)
        assert tuple(int(x[0]) for x in philox(np, (word,) * 4, (word, word), np.uint32, rounds=10)) == wanted


def test_numbers_are_uniform_and_independent() -> None:
    u = uniform(np, np.array(7), (500, 1001)).astype(np.float64)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / u.size)
    counts = np.histogram(u, 64, (0, 1))[0]
    assert (abs(counts - u.size / 64) < 5 * np.sqrt(u.size / 64)).all()
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u, uniform(np, np.array(8), u.shape))):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


@pytest.mark.on_gpus
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_which_elements_are_dropped(adapter: Adapter, p: float) -> None:
    """A share p, by the seed and the place alone; another seed drops others."""
    many = np.zeros((64, 1000), np.float32)
    found = dropped(adapter, 5, p, many)
    assert abs(found.mean() - p) < 4 * np.sqrt(p * (1 - p) / found.size)
    np.testing.assert_array_equal(found, uniform(np, np.array(5), many.shape) < p)
    np.testing.assert_array_equal(dropped(adapter, 5, p, many[:7]), found[:7])
    assert abs((dropped(adapter, 6, p, many) & found).mean() - p * p) < 0.01


def test_compiled_calls_drop_what_eager_ones_drop(adapter: Adapter) -> None:
    x = adapter.array(np.random.default_rng(0).standard_normal(ZEROS.shape).astype(np.float32))
    weight, seed = adapter.array(np.ones(400, np.float32)), adapter.array(np.array(3, np.int32))

    def run(x: Any, seed: Any) -> Any:
        return adapter.ours.dropout_add_rmsnorm(x, x, weight, seed, p=0.3)[0]

    compiled = adapter.compiled(run)
    for each in (seed, adapter.array(np.array(4, np.int32))):  # one program for all seeds
        np.testing.assert_allclose(adapter.numpy(compiled(x, each)), adapter.numpy(run(x, each)), rtol=1e-5, atol=1e-6)


def test_the_gradient_has_the_mask_of_the_forward(adapter: Adapter) -> None:
    mask = dropped(adapter, 9, 0.4)
    weight, seed = (adapter.array(a) for a in (np.ones(400, np.float32), np.array(9, np.int32)))
    x = np.random.default_rng(1).standard_normal(ZEROS.shape).astype(np.float32)

    def run(x: Any, residual: Any) -> Any:
        return adapter.ours.dropout_add_rmsnorm(x, residual, weight, seed, p=0.4)

    cotangents = [np.ones_like(x), np.ones_like(x)]
    _, (dx, dresidual) = adapter.value_and_gradients(adapter.usual(run), adapter.arrays([x, x]), cotangents)
    np.testing.assert_array_equal(dx == 0, mask)
    np.testing.assert_allclose(dx[~mask], dresidual[~mask] / 0.6, rtol=1e-5)


def test_modules_drop_in_training_only() -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch.nn as ours

    x = torch.randn(4, 64)
    for made in (ours.DropoutAddRMSNorm(64, 0.5), ours.DropoutAddLayerNorm(64, 0.5)):
        torch.manual_seed(0)
        first, second = made(x, x)[1], made(x, x)[1]
        torch.manual_seed(0)
        torch.testing.assert_close(made(x, x)[1], first, rtol=0, atol=0)
        assert not torch.equal(first, second)
        torch.testing.assert_close(made.eval()(x, x)[1], x + x)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"p": 1.0}, "attribute `p` is 1.0, expected at least 0 and less than 1"), ({"eps": -1.0}, "attribute `eps`")],
)  # fmt: skip
def test_what_is_refused(adapter: Adapter, options: dict[str, float], text: str) -> None:
    x, weight = adapter.array(ZEROS), adapter.array(np.ones(400, np.float32))
    with pytest.raises(ValueError, match=text):
        adapter.ours.dropout_add_rmsnorm(x, x, weight, adapter.array(np.array(0, np.int32)), **options)


def test_stochastic_rounding_is_unbiased(adapter: Adapter) -> None:
    """Of many roundings of drawn numbers: the mean is the number, and each is one of its two neighbours."""
    rng = np.random.default_rng(3)
    rows, n = 4000, 33
    target = rng.standard_normal(n).astype(np.float32)
    zeros = np.zeros((rows, n), np.float32)
    given = [np.zeros((rows, n), testing.numpy_dtype("bfloat16")), zeros + target, zeros, zeros]
    seed, ones = np.array(11, np.int32), np.ones(rows, np.float32)
    # With betas of zero and an eps of one the step is `step_size * grad / (|scale| * |grad| + 1)`.
    numbers = [ones, -ones, 0 * ones]
    arrays = adapter.arrays([*given, seed, *numbers])
    found = adapter.ours.adamw_stochastic(*arrays, beta1=0.0, beta2=0.0, eps=1.0)[0]
    got = adapter.numpy(found).astype(np.float64)
    below = np.abs(np.frombuffer((target.view(np.uint32) & 0xFFFF0000).tobytes(), np.float32)).astype(np.float64)
    above = below + 2.0 ** (np.floor(np.log2(below)) - 7)
    assert ((np.abs(got) == below) | (np.abs(got) == above)).all()
    odds = (np.abs(target) - below) / (above - below)
    deviation = np.sqrt(odds * (1 - odds) / rows) * (above - below)
    assert (np.abs(got.mean(0) - target) <= 5 * deviation + 1e-12).all()
