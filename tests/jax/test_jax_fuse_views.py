"""``fuse`` where views between two operations change which rows and columns the second one sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.jax.drawn_graphs import QUICK
from tests.jax.drawn_views import run_seed

Function = Callable[..., Any]
KEY = np.random.default_rng(11)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(KEY.standard_normal(shape).astype(np.float32))


def check(function: Function, *args: Any, compiled: bool = True) -> list[str]:
    """Compare the function's values and gradients with those of what it becomes; returns what that is."""
    places = tuple(i for i, a in enumerate(args) if a.dtype != jnp.int32)

    def gradients(function: Function, *args: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = function(*args)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

        return jax.grad(loss, places, has_aux=True)(*args)

    def both(*args: Any) -> Any:
        return [gradients(each, *args) for each in (function, cute_ops_jax.fuse(function))]

    made = (jax.jit(both, compiler_options=QUICK) if compiled else both)(*args)
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5 * max(1, float(jnp.abs(a).max())))
    return [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args).replaced]


ROWS: dict[str, tuple[Function, bool]] = {
    "joined": (lambda x: x.reshape(8, -1), True), "split again": (lambda x: x.reshape(4, 2, -1), True),
    "one more": (lambda x: x[None], True), "copied": (lambda x: jnp.broadcast_to(x, (2, *x.shape)), False),
    "repeated": (lambda x: jnp.repeat(x, 2, 0), False),
}  # fmt: skip
X, UP, GATE, DOWN, BIAS = draw(2, 4, 8), draw(8, 8), draw(8, 8), draw(8, 8), draw(8)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("name", ROWS)
def test_mlps_whose_hidden_values_get_other_rows(name: str) -> None:
    """An MLP has the rows of its last product; what has copies of rows is none."""
    view, is_one = ROWS[name]
    made = check(lambda x, up, b, down: view(jax.nn.gelu(x @ up + b)) @ down, X, UP, BIAS, DOWN)
    assert ("mlp" in made) == is_one
    made = check(lambda x, gate, up, down: (jax.nn.silu(view(x @ gate)) * view(x @ up)) @ down, X, GATE, UP, DOWN)
    assert ("gated_mlp" in made) == is_one


@pytest.mark.slow
def test_halves_of_a_product_with_one_more_dim() -> None:
    """Whose last dim is one number, as those of a product with columns of ``x[..., None]``."""

    def function(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.nn.glu(jnp.matmul(weight.T, x[..., None])[..., 0])

    weight = draw(8, 16)
    assert check(function, X, weight)
    grad = jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1))
    for a, b in zip(cute_ops_jax.fuse(grad)(X, weight), grad(X, weight), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_gradients_of_copies_in_two_dtypes() -> None:
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(jax.nn.silu(jnp.broadcast_to(x, (2, 4, 8))) * jnp.broadcast_to(y, (2, 4, 8)))

    x, y = draw(2, 1, 8), draw(1, 4, 8).astype("bfloat16")
    got, want = (
        jax.grad(lambda x, y, each=each: jnp.sum(jnp.sin(each(x, y))), (0, 1))(x, y)
        for each in (cute_ops_jax.fuse(function), function)
    )
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=2e-2, atol=2e-2)


HEADS: dict[str, tuple[Function, int, str]] = {
    "by row": (lambda y: y.reshape(4, 4, -1, 64), 1, "qkv_rope"),
    "by head": (lambda y: y.reshape(4, 4, -1, 64).transpose(0, 2, 1, 3), 2, "qkv_rope"),
    "as if by head": (lambda y: y.reshape(4, -1, 4, 64), 2, "rope"),
    "batch and positions exchanged": (lambda y: y.reshape(4, 4, -1, 64).transpose(1, 0, 2, 3), 2, "rope"),
    "batch and heads exchanged": (lambda y: y.reshape(4, 4, -1, 64).transpose(2, 1, 0, 3), 2, "rope"),
    "columns apart": (lambda y: y.reshape(4, 4, 64, -1).transpose(0, 3, 1, 2), 2, "rope"),
}  # fmt: skip


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_a_projection(name: str) -> None:
    """There are as many heads as positions, so shapes do not show which dim is which."""
    view, axis, want = HEADS[name]
    angles = (jnp.arange(4)[:, None] * 0.9 ** jnp.arange(32)).reshape([4 if i == axis else 1 for i in range(3)] + [32])
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def function(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        def turned(weight: jax.Array) -> jax.Array:
            a, b = jnp.split(view(x @ weight), 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        return jnp.sin(turned(first)) * jnp.cos(turned(second))

    assert want in check(function, draw(4, 4, 8), draw(8, 256), draw(8, 256))


def copied_to(x: jax.Array, axes: tuple[int, ...], shape: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """An array with these axes of a shape, copied to all others in an order of these, which then are transposed."""
    dims = [order.index(axis) for axis in axes]
    x = x.transpose(sorted(range(len(dims)), key=dims.__getitem__))
    copies = jax.lax.broadcast_in_dim(x, tuple(shape[axis] for axis in order), sorted(dims))
    return copies.transpose([order.index(axis) for axis in range(len(shape))])


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_are_copied_before_they_are_transposed(seed: int) -> None:
    """As libraries of named dims copy: to new dims in front, which are then brought into the value's order. Rows and
    columns may have the same sizes.
    """
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(2, 5))
    shape, order = tuple(map(int, rng.choice([4, 8], rank))), tuple(map(int, rng.permutation(rank)))
    rows, columns = tuple(range(rank - 1)), (rank - 1,)

    def norm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        centred = x - copied_to(x.mean(-1), rows, shape, order)
        y = centred * copied_to(jax.lax.rsqrt(jnp.mean(centred * centred, -1) + 1e-5), rows, shape, order)
        return y * copied_to(w, columns, shape, order) + copied_to(b, columns, shape, order)

    assert check(norm, draw(*shape), draw(shape[-1]), draw(shape[-1])) == ["layernorm"]


@pytest.mark.parametrize("axes", [(0, 2), (1, 2), (1, 0)])
def test_statistics_of_other_rows_are_no_norm(axes: tuple[int, ...]) -> None:
    """All dims have the same size."""

    def function(x: jax.Array) -> jax.Array:
        return x * copied_to(jax.lax.rsqrt(jnp.mean(x * x, -1) + 1e-5), axes, x.shape, (2, 0, 1))

    assert "rmsnorm" not in check(function, draw(4, 4, 4))


def softmax_over(x: jax.Array, axis: int) -> jax.Array:
    """With columns that come last between its maximum and its sum, as those of a ``vmap`` over the other dims."""
    most, moved = jnp.max(jnp.tanh(x) * 3, axis), jnp.moveaxis(jnp.tanh(x) * 3, axis, -1)
    exponentials = jnp.exp(moved - most[..., None])
    return exponentials / jnp.sum(exponentials, -1, keepdims=True)


def norm_over(x: jax.Array, axis: int) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis)
    return jnp.moveaxis(x, axis, -1) * jax.lax.rsqrt(mean_square + 1e-5)[..., None]


@pytest.mark.parametrize("axis", range(3))
def test_reductions_of_what_is_transposed_between(axis: int) -> None:
    """All dims have the same size."""
    assert check(lambda x: norm_over(x, axis), draw(4, 4, 4)) == ["rmsnorm"]
    assert check(lambda x: softmax_over(x, axis), draw(4, 4, 4)) == ["fused"]


def test_heads_that_are_rotated_by_a_vmap_over_them() -> None:
    """As equinox documents its rotations: of (positions, heads, columns), in the middle dim."""
    angles = jnp.arange(4)[:, None] * 0.9 ** jnp.arange(4)

    def head(x: jax.Array) -> jax.Array:
        cos, sin = (jnp.tile(table, (1, 2)) for table in (jnp.cos(angles), jnp.sin(angles)))
        return x * cos + jnp.concatenate([-x[..., 4:], x[..., :4]], -1) * sin

    assert check(lambda x: jax.vmap(jax.vmap(head, 1, 1))(x), draw(2, 4, 4, 8)) == ["rope"]


@pytest.mark.parametrize("seed", range(16))
def test_drawn_orders_of_dims(seed: int) -> None:
    """Functions of elements of values that were transposed, which are read in other orders and reduced over any dim.
    All dims have the same size. (Not compiled: XLA's own gradients of some are NaN on a CPU.)
    """
    rng = np.random.default_rng([3, seed])
    before, axis, joined = tuple(map(int, rng.permutation(3))), int(rng.integers(3)), int(rng.integers(3))
    after = [i for i in range(3) if i != axis] + [axis] if rng.random() < 0.7 else list(map(int, rng.permutation(3)))
    kinds = tuple(map(int, rng.integers(0, 4, 4)))

    def function(x: jax.Array, y: jax.Array, row: jax.Array) -> jax.Array:
        x, y = (each.transpose(before) if kinds[0] else each for each in (x, y))
        z = jnp.tanh(x) * y + (row if kinds[1] else row[:, None])
        if kinds[1] > 1:
            z = jnp.concatenate([z, jnp.where(x > 0, y, 2.0)], joined)[tuple(slice(-4, None) for _ in range(3))]
        if kinds[2] > 1:
            z = jnp.concatenate([z, jnp.exp(-x * x)], joined)
        moved = z.transpose(after)
        if kinds[3] == 0:
            return moved + jnp.sin(z.transpose(after)) * moved
        rows = jnp.sum(z * z, axis) if kinds[3] == 1 else jnp.max(z, axis)
        return jnp.exp(jnp.moveaxis(z, axis, -1) / 4 - rows[..., None] / 8) if kinds[3] < 3 else jnp.cos(moved) * 2

    check(function, draw(4, 4, 4), draw(4, 4, 4), draw(4), compiled=False)


LOGITS, TARGET = draw(8, 8), jnp.asarray(KEY.integers(0, 8, 8), jnp.int32)


def picked(x: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, t[:, None], -1)[:, 0]


@pytest.mark.parametrize("function", [
    lambda x, t: jnp.log(jnp.exp(x).sum(0)) - picked(x, t),
    lambda x, t: jax.nn.logsumexp(x, 0) - picked(x, t),
    lambda x, t: -picked(jax.nn.log_softmax(x, 0), t),
    lambda x, t: -((t[:, None] == jax.lax.broadcasted_iota(jnp.int32, (8, 8), 0)) * jax.nn.log_softmax(x)).sum(-1),
    lambda x, t: -((t[:, None] == jnp.arange(8)[:, None] * jnp.ones((1, 8), int)) * jax.nn.log_softmax(x)).sum(-1),
    lambda x, t: -(
        (t[:, None] == jax.lax.broadcast_in_dim(jnp.arange(8), (8, 8), (0,))) * jax.nn.log_softmax(x)
    ).sum(-1),
    lambda x, t: jax.nn.logsumexp(x, -1)[::-1] - picked(x, t),
    lambda x, t: jax.nn.logsumexp(x.reshape(8, 1, 8), -1) - x.reshape(1, 8, 8)[
        jnp.zeros((8, 1), int), jnp.arange(8)[:, None], t[:, None]
    ] + 0 * t[:, None],
    lambda x, t: -jax.nn.log_softmax(jnp.stack([x, 2 * x]).reshape(4, 4, 8))[
        jnp.arange(4)[None], jnp.arange(4)[:, None], t[:4, None]
    ].sum(-1),
])  # fmt: skip
def test_what_reads_other_rows_is_no_loss(function: Function) -> None:
    """There are as many rows as classes."""
    assert "cross_entropy" not in check(function, LOGITS, TARGET)


@pytest.mark.parametrize("function", [
    lambda x, s: jnp.exp(x - s[:, None]) * jnp.exp(s[None]),
    lambda x, s: (x.T - s).T + s,
    lambda x, s: (x - s[:, None]) @ jnp.ones((8, 8)) + 8 * s,
])  # fmt: skip
def test_a_stopped_number_that_is_added_at_other_rows_stays_stopped(function: Function) -> None:
    check(lambda x: function(x, jax.lax.stop_gradient(jnp.tanh(x).max(-1))), LOGITS)


@pytest.mark.slow
def test_copies_of_rows_in_16_bits_have_gradients() -> None:
    """The copies' gradients are summed in float32, where the output is in 16 bits."""

    def function(x: jax.Array) -> jax.Array:
        copies = jnp.broadcast_to(jnp.sin(x), (4, 2, 8))
        return jax.nn.softmax(copies.astype(jnp.float32), -1).astype(x.dtype)

    scale = draw(4, 2, 8)
    x = draw(1, 2, 8).astype("bfloat16")
    got, want = (
        jax.grad(lambda x, each=each: jnp.sum(each(x) * scale))(x.astype(dtype))
        for each, dtype in ((cute_ops_jax.fuse(function), "bfloat16"), (function, "float32"))
    )
    assert got.dtype == "bfloat16"
    np.testing.assert_allclose(got.astype("float32"), want, rtol=2e-2, atol=2e-2)


@pytest.mark.drawn(0.25)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_programs(seed: int) -> None:
    """``python -m tests.jax.drawn_views --count 500`` runs more."""
    run_seed(seed)
