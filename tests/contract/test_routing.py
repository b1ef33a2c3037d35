"""Routing of tokens to experts: the largest numbers, weights and balance, tokens in the order of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops.ops.routing.balance import expert_balance
from cute_ops.testing import EPS, numpy_dtype
from tests.contract.adapters import Adapter


@pytest.mark.on_gpus
@pytest.mark.parametrize("seed", range(5))
def test_the_largest_numbers(adapter: Adapter, seed: int) -> None:
    """With equal numbers, infinities, -0 and NaN; rows of one segment and of several."""
    rng = np.random.default_rng(seed)
    n = (128, 5, 1025, int(rng.integers(6, 1000)), 9000)[seed]
    k = int(rng.integers(1, min(n, 128) + 1))
    dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
    x = np.round(8 * rng.standard_normal((2, 3, n))) if seed % 2 else rng.standard_normal((2, 3, n))
    chance = rng.random(x.shape)
    for value, most in ((-0.0, 0.3), (np.inf, 0.05), (-np.inf, 0.03), (np.nan, 0.01)):
        x[chance < most] = value
    x = x.astype(numpy_dtype(dtype))
    wide = x.astype(np.float64)
    # NaN first, then from the largest on; of equal ones the lower column.
    order = np.lexsort((np.broadcast_to(np.arange(n), x.shape), np.where(np.isnan(wide), 0, -wide), ~np.isnan(wide)))
    expected = order[..., :k]
    values, index = map(adapter.numpy, adapter.ours.topk(adapter.array(x), k=k))
    np.testing.assert_array_equal(index, expected)
    np.testing.assert_array_equal(values.astype(np.float64), np.take_along_axis(wide, expected, -1))
    assert values.dtype == x.dtype
    assert index.dtype == np.int32


@pytest.mark.parametrize("n", [9, 2000])
def test_the_gradient_of_the_largest(adapter: Adapter, n: int) -> None:
    rng = np.random.default_rng(3)
    x, d = rng.standard_normal((4, n)).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)
    expected = np.zeros_like(x)
    np.put_along_axis(expected, np.argsort(-x, -1)[:, :5], d, -1)
    run = adapter.usual(lambda x: adapter.ours.topk(x, k=5)[0])
    _, (slope,) = adapter.value_and_gradients(run, [adapter.array(x)], [d])
    np.testing.assert_array_equal(slope, expected)


def by_hand(torch: Any, x: Any, k: int, normalize: bool) -> tuple[Any, Any, Any]:
    """As Hugging Face's Mixtral, and its loss."""
    p = torch.softmax(x, -1)
    weights, index = torch.topk(p, k, sorted=True)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    chosen = torch.nn.functional.one_hot(index, x.shape[-1]).to(x.dtype)
    return weights, index, (chosen.mean(0) * p.mean(0)).sum() * x.shape[-1]


@pytest.mark.on_gpus
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("dtype", "k"), [("float32", 3), ("bfloat16", 3), ("float32", 17)])
def test_routes(adapter: Adapter, dtype: str, k: int, normalize: bool) -> None:
    """One kernel routes a token to few experts, several kernels to more."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    x = rng.permuted(np.linspace(-3, 3, 33 * (k + 5)).reshape(33, -1), axis=None).astype(numpy_dtype(dtype))
    leaf = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    weights, index, balance = by_hand(torch, leaf, k, normalize)
    d = rng.standard_normal((33, k)).astype(x.dtype)
    (exact,) = torch.autograd.grad((weights * torch.from_numpy(d.astype(np.float64))).sum() + balance, leaf)
    run = adapter.usual(lambda x: adapter.ours.route(x, k=k, normalize=normalize)[::2])
    found, (slope,) = adapter.value_and_gradients(run, [adapter.array(x)], [d, np.ones((), np.float32)])
    np.testing.assert_array_equal(
        adapter.numpy(adapter.ours.route(adapter.array(x), k=k)[1]), index.numpy().astype(np.int32)
    )
    off = 4 * EPS[dtype]
    np.testing.assert_allclose(found[0].astype(np.float64), weights.detach().numpy(), rtol=off, atol=off)
    np.testing.assert_allclose(found[1], balance.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(slope.astype(np.float64), exact.numpy(), rtol=off, atol=off)


@pytest.mark.on_gpus
@pytest.mark.parametrize("seed", range(3))
def test_tokens_by_expert_and_back(adapter: Adapter, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, k, experts, n = (int(rng.integers(1, most)) for most in (40, 5, 9, 70))
    x, w = rng.standard_normal((rows, n)).astype(np.float32), rng.random((rows, k)).astype(np.float32)
    index = rng.integers(0, experts, (rows, k)).astype(np.int32)
    order = np.argsort(index.reshape(-1), kind="stable")
    out, place, ends = map(
        adapter.numpy, adapter.ours.permute_tokens(adapter.array(x), adapter.array(index), experts=experts)
    )
    np.testing.assert_array_equal(out, x[order // k])
    np.testing.assert_array_equal(out[place], np.broadcast_to(x[:, None], (rows, k, n)))
    np.testing.assert_array_equal(ends, np.cumsum(np.bincount(index.reshape(-1), minlength=experts)))
    given = adapter.array(index)

    def there_and_back(x: Any, w: Any) -> Any:
        out, place, _ = adapter.ours.permute_tokens(x, given, experts=experts)
        return adapter.ours.unpermute_tokens(out * out, place, w)

    d = rng.standard_normal((rows, n)).astype(np.float32)
    (value,), (dx, dw) = adapter.value_and_gradients(adapter.usual(there_and_back), adapter.arrays([x, w]), [d])
    wide = [a.astype(np.float64) for a in (x, w, d)]
    np.testing.assert_allclose(value, wide[0] ** 2 * wide[1].sum(-1, keepdims=True), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, 2 * wide[0] * wide[2] * wide[1].sum(-1, keepdims=True), rtol=1e-5, atol=1e-5)
    products = (wide[0] ** 2 * wide[2]).sum(-1, keepdims=True)
    np.testing.assert_allclose(dw, np.broadcast_to(products, w.shape), rtol=1e-4, atol=1e-4)


def test_sums_without_weights(adapter: Adapter) -> None:
    y, place = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([[5, 0], [1, 2], [3, 4]], np.int32)
    run = adapter.usual(lambda y: adapter.ours.unpermute_tokens(y, adapter.array(place)))
    (out,), (dy,) = adapter.value_and_gradients(run, [adapter.array(y)], [np.array([[1, 2], [3, 4], [5, 6.0]], "f4")])
    np.testing.assert_array_equal(out, y[place].sum(1))
    np.testing.assert_array_equal(dy, np.array([[1, 2], [3, 4], [3, 4], [5, 6], [5, 6], [1, 2]], np.float32))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ours, x: ours.topk(x, k=0), "attribute `k` is 0, expected a number from 1 to 128"),
        (lambda ours, x: ours.topk(x, k=6), "attribute `k` is 6, but rows of `x` have n=5"),
        (lambda ours, x: ours.route(x, k=6), "attribute `k` is 6, but rows of `logits` have n=5"),
        (lambda ours, x: ours.route(x, k=129), "attribute `k` is 129, expected a number from 1 to 128"),
    ],
    ids=["none", "more", "route", "most"],
)
def test_what_is_refused(adapter: Adapter, call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(adapter.ours, adapter.array(np.ones((3, 5), np.float32)))


def test_too_many_experts_are_refused(adapter: Adapter) -> None:
    with pytest.raises(ValueError, match=r"argument `logits` has n=1025, expected at most 1024 experts"):
        adapter.ours.route(adapter.array(np.ones((1, 1025), np.float32)), k=2)


@pytest.mark.on_gpus
@pytest.mark.parametrize("number", range(3))
def test_the_balance_of_weighted_tokens(adapter: Adapter, number: int) -> None:
    """Of drawn tokens, experts and weights, against the formula in float64."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng((53, number))
    tokens, n = int(rng.integers(1, 60)), int(rng.integers(3, 140))
    k = int(rng.integers(1, min(n, 9)))  # not all of them, which would balance themselves
    kind = numpy_dtype(("float32", "bfloat16", "float16")[number])
    # No two are equal, of which either may be taken.
    logits = (rng.permuted(np.tile(np.arange(n), (tokens, 1)), axis=1) * 4 / n - 2).astype(kind)
    weights = rng.integers(0, 2, tokens).astype(np.float32) if number else None
    if weights is not None:
        weights[0] = 1
    balance = adapter.register(expert_balance)

    def of(x: Any) -> Any:
        return balance(x, None if weights is None else adapter.array(weights), k)

    (value,), (slope,) = adapter.value_and_gradients(adapter.usual(of), [adapter.array(logits)])
    leaf = torch.from_numpy(logits.astype(np.float64)).requires_grad_()
    own = torch.ones(tokens).double() if weights is None else torch.from_numpy(weights).double()
    p = leaf.softmax(-1)
    chosen = torch.zeros(tokens, n).double().scatter_(-1, p.topk(k).indices, 1.0)
    mean, load = ((own[:, None] * each).sum(0) / own.sum() for each in (p, chosen))
    wanted = n * (mean * load).sum()
    wanted.backward()
    assert abs(float(value) - wanted.item()) <= 64 * EPS["float32"] * wanted.item()
    exact = leaf.grad.numpy()
    # Where experts are balanced, each slope is the small difference of two terms that float32 has rounded.
    term = (p * n * load * own[:, None] / own.sum()).detach().numpy().max()
    limit = 8 * max(EPS[kind.name] * np.abs(exact).max(), 4 * EPS["float32"] * term)
    assert np.abs(slope.astype(np.float64) - exact).max() <= limit


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_experts_that_no_token_has(adapter: Adapter, weighted: bool) -> None:
    """Padded experts: the gradient of these rows is zero, whatever they hold."""
    rng = np.random.default_rng(3)
    for tokens, each, rows in ((5, 2, 14), (0, 2, 7), (1, 1, 3), (4, 3, 12)):
        y, slope = (rng.standard_normal((n, 6)).astype(np.float32) for n in (rows, tokens))
        place = rng.permutation(rows)[: tokens * each].reshape(tokens, each).astype(np.int32)
        weights = rng.random((tokens, each)).astype(np.float32)
        share = weights if weighted else np.ones_like(weights)
        y[np.setdiff1d(np.arange(rows), place)] = np.nan
        expected, wanted = (y[place] * share[..., None]).sum(1), np.zeros_like(y)
        wanted[place.reshape(-1)] = (slope[:, None] * share[..., None]).reshape(-1, 6)
        places, of = adapter.array(place), adapter.array(weights) if weighted else None
        (found,), (dy,) = adapter.value_and_gradients(
            lambda y, places=places, of=of: adapter.ours.unpermute_tokens(y, places, of), [adapter.array(y)], [slope]
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dy, wanted, rtol=1e-5, atol=1e-6)
