"""Rotations of heads and losses of logits, in the forms that JAX programs write, become our ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops_jax.fusion import losses, wide_head

B, T, HEADS, D, H, CLASSES = 2, 3, 5, 8, 6, 8
KEY = np.random.default_rng(7)
Function = Callable[..., Any]


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(KEY.standard_normal(shape).astype(np.float32))


X, POSITIONS = draw(B, T, HEADS, D), jnp.asarray([[0, 1, 2], [3, 4, 7]])
HIDDEN, WEIGHT, LOGITS = draw(B, T, H), draw(CLASSES, H), draw(B, T, CLASSES)
TARGET = jnp.asarray([[1, 0, 7], [3, 4, 2]])


def check(function: Function, want: list[str], *args: Any) -> None:
    """What the function becomes, its values and its gradients for floats."""
    assert [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args).replaced] == want
    places = tuple(i for i, a in enumerate(args) if a.dtype != jnp.int32)
    results = []
    for each in (function, cute_ops_jax.fuse(function)):
        loss = lambda *args: (jnp.sum(jnp.sin(out := each(*args).astype(jnp.float32))), out)  # noqa: B023, E731
        results.append(jax.jit(jax.grad(loss, places, has_aux=True))(*args))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=5e-6)


def tables(x: jax.Array, positions: jax.Array, r: int = D // 2) -> tuple[jax.Array, jax.Array]:
    angles = (positions[..., None] * 1e4 ** (-jnp.arange(r) / r))[:, :, None]
    return jnp.cos(angles), jnp.sin(angles)


def split(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = tables(x, positions)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def heads_first(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = (table.transpose(0, 2, 1, 3) for table in tables(x, positions))
    x = x.transpose(0, 2, 1, 3)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return jnp.concatenate((a * cos - b * sin, sin * a + cos * b), -1)


def exchanged(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = (jnp.concatenate([table, table], -1) for table in tables(x, positions))
    return x * cos + jnp.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


def tiled(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = (jnp.tile(table, 2) for table in tables(x, positions))
    return jnp.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin + x * cos


def neighbours(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = tables(x, positions)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)


def pairs(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = tables(x, positions)
    both = x.reshape(*x.shape[:-1], -1, 2)
    a, b = both[..., 0], both[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def of_some_columns(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = tables(x, positions, 2)
    a, b = x[..., :2], x[..., 2:4]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 4:]], -1)


def in_place(x: jax.Array, positions: jax.Array) -> jax.Array:
    cos, sin = tables(x, positions, 2)
    part = x[..., :4]
    a, b = jnp.split(part, 2, -1)
    return jnp.concatenate([jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1), x[..., 4:]], -1)


ROTATIONS = (split, heads_first, exchanged, tiled, neighbours, pairs, of_some_columns, in_place)


@pytest.mark.parametrize("function", ROTATIONS)
def test_rotations(function: Function) -> None:
    check(function, ["rope"], X, POSITIONS)
    assert cute_ops_jax.fuse.report(function, X.astype("bfloat16"), POSITIONS).replaced[0].becomes == "rope"


def test_tables_that_are_learned_have_gradients() -> None:
    def function(x: jax.Array, angles: jax.Array) -> jax.Array:
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    check(function, ["rope"], X, draw(T, D // 2))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("values", [False, True])
def test_projections_to_rotated_heads(heads_first: bool, values: bool) -> None:
    """Products of one input are one; their tables have gradients, too."""

    def function(x: jax.Array, angles: jax.Array, *weights: jax.Array) -> jax.Array:
        cos, sin = (f(angles)[None, None] if heads_first else f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))

        def turned(weight: jax.Array) -> jax.Array:
            heads = (x @ weight).reshape(B, T, -1, 64)
            a, b = jnp.split(heads.transpose(0, 2, 1, 3) if heads_first else heads, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        heads = [jnp.tanh(turned(weight)) for weight in weights[:2]]
        heads = [(each.transpose(0, 2, 1, 3) if heads_first else each).reshape(B, T, -1) for each in heads]
        return jnp.concatenate([*heads, *(x @ weight for weight in weights[2:])], -1)

    weights = draw(H, 128), draw(H, 64), *([draw(H, 64)] if values else [])
    check(function, ["qkv_rope"], draw(B, T, H), draw(T, 32), *weights)


@pytest.mark.slow
def test_what_only_looks_like_a_rotation_is_none() -> None:
    def other_sign(x: jax.Array, positions: jax.Array) -> jax.Array:
        cos, sin = tables(x, positions)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos + b * sin, b * cos + a * sin], -1)

    def other_tables(x: jax.Array, positions: jax.Array) -> jax.Array:
        cos, sin = (jnp.concatenate([table, 2 * table], -1) for table in tables(x, positions))
        return x * cos + jnp.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    for function in (other_sign, other_tables):
        found = cute_ops_jax.fuse.report(function, X, POSITIONS).replaced
        assert "rope" not in [entry.becomes for entry in found]
        np.testing.assert_allclose(cute_ops_jax.fuse(function)(X, POSITIONS), function(X, POSITIONS), atol=1e-5)


def at(values: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, target[..., None], -1)[..., 0]


def of_optax(logits: jax.Array, target: jax.Array) -> jax.Array:
    """As ``optax.softmax_cross_entropy_with_integer_labels``."""
    at_target = jnp.take(jnp.take_along_axis(logits, jnp.expand_dims(target, -1), axis=-1), 0, axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - at_target


LOSSES: dict[str, Function] = {
    "optax": of_optax,
    "log softmax": lambda x, t: -at(jax.nn.log_softmax(x), t),
    "by hand": lambda x, t: jnp.log(jnp.sum(jnp.exp(x - x.max(-1, keepdims=True)), -1)) + x.max(-1) - at(x, t),
    "mean": lambda x, t: -at(jax.nn.log_softmax(x.astype(jnp.float32)), t).mean(),
    "mask": lambda x, t: jnp.where(t > 0, -at(jax.nn.log_softmax(x), t), 0).sum() / jnp.sum(t > 0),
    "rows of a vmap": lambda x, t: -jax.vmap(jax.vmap(lambda x, t: jax.nn.log_softmax(x)[t]))(x, t),
    "rows by number": lambda x, t: -jax.nn.log_softmax(x.reshape(6, -1))[jnp.arange(6), t.reshape(-1)],
}


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_logits_and_of_heads(name: str) -> None:
    """A head's product is part of the loss, whether its weight is ``[n h]`` or ``[h n]``."""
    loss = LOSSES[name]
    beside = ["fused"] if name == "mask" else []
    check(loss, ["cross_entropy", *beside], LOGITS, TARGET)
    check(lambda h, w, t: loss(h @ w.T, t), ["linear_cross_entropy"], HIDDEN, WEIGHT, TARGET)
    if name in ("optax", "mean"):
        check(lambda h, w, t: loss(h @ w, t), ["linear_cross_entropy"], HIDDEN, WEIGHT.T, TARGET)


BIAS, SEEN = draw(CLASSES), jnp.asarray([[1, 0, 1], [1, 1, 0]], bool)


def logp_at(logits: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    logp = jax.nn.log_softmax(logits)
    return logp, at(logp, t)


def smoothed(logits: jax.Array, t: jax.Array) -> jax.Array:
    logp, picked = logp_at(logits, t)
    return (-0.9 * picked - 0.1 * logp.mean(-1)).mean()


def smoothed_by_a_sum(logits: jax.Array, t: jax.Array) -> jax.Array:
    logp, picked = logp_at(logits, t)
    return -(0.9 * picked + 0.1 / CLASSES * logp.sum(-1)).sum()


def one_hot(logits: jax.Array, t: jax.Array) -> jax.Array:
    """As ``optax.softmax_cross_entropy``."""
    return -jnp.sum(jax.nn.one_hot(t, CLASSES) * jax.nn.log_softmax(logits), -1).mean()


def smoothed_rows(t: jax.Array) -> jax.Array:
    """As ``optax.smooth_labels`` of one-hot rows."""
    return 0.9 * jax.nn.one_hot(t, CLASSES) + 0.1 / CLASSES


def t5x_rows(t: jax.Array) -> jax.Array:
    """As ``onehot`` of T5X, with a number for the target and another one for all other classes."""
    return jax.lax.select(
        t[..., None] == jnp.arange(CLASSES), jnp.full((B, T, CLASSES), 0.93), jnp.full((B, T, CLASSES), 0.01)
    )


def t5x(logits: jax.Array, rows: jax.Array, z_loss: float = 1e-2) -> jax.Array:
    """As ``cross_entropy_with_logits`` of T5X, without its derivative."""
    most = logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits - most)
    total = jnp.sum(exponentials, -1, keepdims=True)
    loss = -jnp.sum(rows * (logits - most - jnp.log(total)), -1)
    return loss + z_loss * jax.lax.square(jnp.squeeze(jnp.log(total) + most, -1))


HEADS_OF_LOSSES: dict[str, Function] = {
    "smoothed rows": lambda h, w, b, t: -jnp.sum(smoothed_rows(t) * jax.nn.log_softmax(h @ w.T), -1).mean(),
    "smoothed rows in an einsum": lambda h, w, b, t: jnp.einsum(
        "btv,btv->bt", (1 - smoothed_rows(t)) - 1, jax.nn.log_softmax(h @ w.T)
    ).sum(),
    "one-hot rows with z-loss": lambda h, w, b, t: t5x(h @ w.T, jax.nn.one_hot(t, CLASSES)).mean(),
    "smoothed rows of t5x": lambda h, w, b, t: t5x(h @ w.T + b, t5x_rows(t)).sum(),
    "one-hot rows of logits": lambda h, w, b, t: (
        lambda x: jax.nn.logsumexp(x, -1) - jnp.einsum("btv,btv->bt", x, jax.nn.one_hot(t, CLASSES))
    )(h @ w.T).mean(),
    "smoothed": lambda h, w, b, t: smoothed(h @ w.T, t),
    "smoothed by a sum": lambda h, w, b, t: smoothed_by_a_sum(h @ w.T, t),
    "z-loss": lambda h, w, b, t: (lambda x: of_optax(x, t) + 1e-2 * jax.nn.logsumexp(x, -1) ** 2)(h @ w.T).mean(),
    "one-hot": lambda h, w, b, t: one_hot(h @ w.T, t),
    "one-hot in an einsum": lambda h, w, b, t: jnp.einsum(
        "btv,btv->bt", jax.nn.one_hot(t, CLASSES), -jax.nn.log_softmax(h @ w.T)
    ).mean(),
    "sum of all of a one-hot product": lambda h, w, b, t: (
        -jnp.sum(jax.nn.one_hot(t, CLASSES) * jax.nn.log_softmax(h @ w.T))
    ),
    "einsum to a number": lambda h, w, b, t: (
        -jnp.einsum("btv,btv->", jax.nn.log_softmax(h @ w.T), jax.nn.one_hot(t, CLASSES))
    ),
    "one-hot rows times a mask": lambda h, w, b, t: (
        -jnp.sum(jax.nn.log_softmax(h @ w.T) * (jax.nn.one_hot(t, CLASSES) * SEEN.astype(h.dtype)[..., None]))
    ),
    "one-hot rows times a mask, by rows": lambda h, w, b, t: (
        -((SEEN[..., None] * jax.nn.log_softmax(h @ w.T)) * jax.nn.one_hot(t, CLASSES)).sum(-1).sum() / SEEN.sum()
    ),
    "one-hot rows less the log-sum-exp": lambda h, w, b, t: (
        lambda x: -((x - jax.nn.logsumexp(x, -1, keepdims=True)) * jax.nn.one_hot(t, CLASSES)).sum(-1).mean()
    )(h @ w.T * 0.5),
    "one-hot rows times the log-sum-exp less logits": lambda h, w, b, t: (
        lambda x: jnp.einsum("btv,btv->bt", jax.nn.one_hot(t, CLASSES), jax.nn.logsumexp(x, -1, keepdims=True) - x)
    )(h @ w.T).mean(),
    "smoothed rows times the log-sum-exp less logits": lambda h, w, b, t: (
        lambda x: jnp.sum((jax.nn.logsumexp(x, -1)[..., None] - x) * smoothed_rows(t), -1)
    )(h @ w.T + b).sum(),
    "indices of all dims": lambda h, w, b, t: (
        -jax.nn.log_softmax(h @ w.T)[jnp.arange(B)[:, None], jnp.arange(T)[None], t].mean()
    ),
    "bias": lambda h, w, b, t: of_optax(h @ w.T + b, t).mean(),
    "cap": lambda h, w, b, t: of_optax(jnp.tanh(h @ w.T / 3) * 3, t).mean(),
    "cap of a bias, scaled": lambda h, w, b, t: of_optax(jnp.tanh((h @ w.T + b) * 0.25) * 2, t).mean(),
    "scale": lambda h, w, b, t: of_optax((h @ w.T) * 0.25, t).mean(),
    "shift": lambda h, w, b, t: of_optax((h @ w.T)[:, :-1], t[:, 1:]).mean(),
    "joined rows": lambda h, w, b, t: of_optax(
        (h @ w.T).astype(jnp.float32).reshape(-1, CLASSES), t.reshape(-1)
    ).mean(),
    "mask": lambda h, w, b, t: (of_optax(h @ w.T, t) * SEEN).sum() / SEEN.sum(),
}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("name", HEADS_OF_LOSSES)
def test_losses_of_heads_that_models_write(name: str) -> None:
    function = HEADS_OF_LOSSES[name]
    check(function, ["linear_cross_entropy"], HIDDEN, WEIGHT, BIAS, TARGET)


@pytest.mark.parametrize(("rows", "part"), [((24,), slice(5)), ((4, 3, 2), (slice(None), slice(2)))])
def test_a_slice_of_other_rows_is_none_of_the_heads(rows: tuple[int, ...], part: Any) -> None:
    """The second leaves as many rows as the same slice of the head's, but other ones."""
    hidden, target = draw(2, 3, 4, H), jnp.arange(24).reshape(rows)[part] % CLASSES
    check(
        lambda h, w, t: of_optax((h @ w.T).reshape(*rows, CLASSES)[part], t), ["cross_entropy"], hidden, WEIGHT, target
    )


@pytest.mark.parametrize("function", [
    lambda x, t: (lambda logp, a: jnp.minimum(-0.9 * a - 0.1 * logp.mean(-1), 50.0))(*logp_at(x, t)),
    lambda x, t: (lambda logp, a: -0.9 * a - 0.2 * logp.mean(-1))(*logp_at(x, t)),
    lambda x, t: -0.9 * at(x, t) - 0.1 * x.mean(-1) + jax.nn.logsumexp(x, -1) + 0.1 * x.max(-1),
    lambda x, t: (jax.nn.one_hot(t, CLASSES) * x).sum(-1),
    lambda x, t: -((jax.nn.one_hot(t, CLASSES) * 0.9 + 0.1) * jax.nn.log_softmax(x)).sum(-1),
    lambda x, t: jax.nn.logsumexp(x, -1) - 2 * (jax.nn.one_hot(t, CLASSES) * x).sum(-1),
    lambda x, t: jax.nn.logsumexp(x, -1) - (jax.nn.one_hot(t, CLASSES) * jnp.tanh(x)).sum(-1),
])  # fmt: skip
def test_what_is_nearly_a_loss_stays(function: Function) -> None:
    """A bound, weights that are not one together, a maximum, logits without a softmax, and other ones."""
    found = cute_ops_jax.fuse.report(function, LOGITS, TARGET).replaced
    attrs = [entry.becomes for entry in found]
    got, want = cute_ops_jax.fuse(function)(LOGITS, TARGET), function(LOGITS, TARGET)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=5e-6)
    assert "linear_cross_entropy" not in attrs


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("exponent", [-8.2, -9.1, -11.6, -15.4, -21.8])
@pytest.mark.parametrize("form", [
    lambda x, t, lse: jnp.take_along_axis(lse - x, t[..., None], -1),
    lambda x, t, lse: lse[..., 0] - at(x, t),
    lambda x, t, lse: 0.9 * (lse[..., 0] - at(x, t)) + 0.1 * (lse - x).mean(-1),
    lambda x, t, lse: -(jax.nn.one_hot(t, CLASSES) * (x - lse)).sum(-1),
])  # fmt: skip
def test_a_sum_with_anything_added_is_no_log_sum_exp(form: Function, exponent: float) -> None:
    """Logits whose sum of exponentials is as small as the number that is added to it."""
    few = LOGITS + exponent * np.log(10)

    def loss(x: jax.Array, t: jax.Array) -> jax.Array:
        return form(x, t, jnp.log(jnp.exp(x).sum(-1, keepdims=True) + 10**exponent))

    np.testing.assert_allclose(cute_ops_jax.fuse(loss)(few, TARGET), loss(few, TARGET), rtol=2e-5, atol=5e-6)


def test_logits_that_something_else_reads_are_computed_once() -> None:
    def function(h: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        logits = h @ w.T
        return of_optax(logits, t).mean() + logits.max()

    check(function, ["cross_entropy"], HIDDEN, WEIGHT, TARGET)


def test_no_logits_are_held() -> None:
    """Neither in the forward nor in the backward is there an array of rows and classes."""
    rows, classes = 4096, 3000
    hidden, weight = jnp.zeros((rows, H)), jnp.zeros((classes, H))
    target = jnp.zeros(rows, jnp.int32)
    loss = lambda h, w: of_optax(h @ w.T, target).mean()  # noqa: E731
    compiled = jax.jit(jax.grad(cute_ops_jax.fuse(loss), (0, 1))).lower(hidden, weight).as_text()
    assert f"{rows}x{classes}" in jax.jit(jax.grad(loss, (0, 1))).lower(hidden, weight).as_text()
    assert f"{rows}x{classes}" not in compiled


OF_ROWS: dict[str, Function] = {
    "optax": of_optax,
    "log softmax": lambda x, t: -at(jax.nn.log_softmax(x), t),
    "nearest class": lambda x, t: -jnp.take_along_axis(jax.nn.log_softmax(x), t[..., None], -1, mode="clip")[..., 0],
    "rows by number": lambda x, t: -jax.nn.log_softmax(x)[jnp.arange(B)[:, None], jnp.arange(T)[None], t],
    "one-hot": lambda x, t: -(jax.nn.one_hot(t, CLASSES) * jax.nn.log_softmax(x)).sum(-1),
    "smoothed rows": lambda x, t: -jnp.sum(smoothed_rows(t) * jax.nn.log_softmax(x), -1),
    "one-hot with z-loss": lambda x, t: t5x(x, jax.nn.one_hot(t, CLASSES)),
    "smoothed rows of t5x": lambda x, t: t5x(x, t5x_rows(t)),
    "one-hot rows of logits": lambda x, t: jax.nn.logsumexp(x, -1) - jnp.sum(x * jax.nn.one_hot(t, CLASSES), -1),
    "smoothed": lambda x, t: (lambda logp, a: -0.9 * a - 0.1 * logp.mean(-1))(*logp_at(x, t)),
}
REDUCED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "mean": lambda each, t: each.mean(),
    "mask": lambda each, t: jnp.where((t >= 0) & (t < CLASSES), each, 0).sum(),
    "sum without NaN": lambda each, t: jnp.nansum(each),
    "mean of masked means": lambda each, t: jnp.where((t >= 0) & (t < CLASSES), each, 0).mean(-1).mean(),
    "weights": lambda each, t: (each * jnp.linspace(0.5, 1.5, T)).sum(),
}


@pytest.mark.slow
@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("reduced", REDUCED)
def test_targets_that_are_no_class(name: str, reduced: str) -> None:
    """Losses and gradients are those of the program's gather or one-hot rows, of logits and of heads."""
    rng = np.random.default_rng([len(name), len(reduced)])
    target = jnp.asarray(rng.choice([-100, -CLASSES - 1, -1, 0, 3, CLASSES - 1, CLASSES, 1000], (B, T)), jnp.int32)
    for head in (False, True):
        args = (HIDDEN, WEIGHT) if head else (LOGITS, jnp.eye(CLASSES))

        def total(h: jax.Array, w: jax.Array) -> jax.Array:
            logits = h @ w.T if head else h  # noqa: B023
            return REDUCED[reduced](OF_ROWS[name](logits, target), target)

        found = [entry.becomes for entry in cute_ops_jax.fuse.report(total, *args).replaced]
        assert ("linear_cross_entropy" if head else "cross_entropy") in found
        want, got = (jax.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (total, cute_ops_jax.fuse(total)))
        for a, b in zip(*map(jax.tree.leaves, (want, got)), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=5e-6, err_msg=str(target))


@pytest.mark.parametrize("mean", [lambda loss: loss.mean(-1).mean(), lambda loss: (-loss.sum(0) / B).sum() * 2])
def test_sums_of_sums_are_one(mean: Function) -> None:
    """As the mean over examples of the mean of each, which ``vmap`` makes."""
    function = cute_ops_jax.fuse(lambda h, w: mean(of_optax(h @ w.T, TARGET)))
    assert "linear_cross_entropy_total" in str(jax.make_jaxpr(function)(HIDDEN, WEIGHT))


def of_its_own(logits: jax.Array, rows: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """Loss and z-loss of rows of probabilities."""
    lse = jax.nn.logsumexp(logits, -1, keepdims=True)
    penalty = z_loss * jnp.squeeze(lse, -1) ** 2
    return penalty - jnp.sum(rows * (logits - lse), -1), penalty


def with_rule(slope: Function, of: Function = of_its_own) -> Function:
    """The function with a gradient of its own, as T5X's and MaxText's losses have it: of logits, for the first output,
    as if a row's probabilities were one together.
    """
    function = jax.custom_vjp(of)

    def forward(logits: jax.Array, rows: jax.Array, z_loss: float) -> Any:
        most = logits.max(-1, keepdims=True)
        exponentials = jnp.exp(logits - most)
        total = exponentials.sum(-1, keepdims=True)
        penalty = z_loss * jax.lax.square(jnp.squeeze(jnp.log(total) + most, -1))
        loss = penalty - jnp.sum(rows * (logits - most - jnp.log(total)), -1)
        return (loss, penalty), (rows, z_loss, exponentials / total, jnp.log(total) + most)

    def backward(saved: Any, cotangents: Any) -> Any:
        rows, z_loss, p, lse = saved
        return slope(cotangents[0][..., None], rows, p, 2 * z_loss * lse), None, None

    function.defvjp(forward, backward)
    return function


OWN = with_rule(lambda dout, rows, p, z: dout * ((1 + z) * p - rows))
SOME_CLASSES = jnp.asarray([[1, 0, 7], [-100, CLASSES, 2]])
WITH_METRICS: dict[str, tuple[Function, str]] = {
    "rule": (lambda x, t: OWN(x, jax.nn.one_hot(t, CLASSES), 1e-2)[0].sum(), "linear_cross_entropy"),
    "rule with its z-loss": (lambda x, t: OWN(x, jax.nn.one_hot(t, CLASSES), 1e-2), "linear_cross_entropy_metrics"),
    "rule of smoothed rows": (
        lambda x, t: OWN(x, jnp.where(t[..., None] == jnp.arange(CLASSES), 0.93, 0.01), 1e-2),
        "linear_cross_entropy_metrics",
    ),
    "rule without z-loss": (lambda x, t: OWN(x, smoothed_rows(t), 0.0)[0], "linear_cross_entropy"),
    "accuracy": (lambda x, t: (of_optax(x, t).mean(), (x.argmax(-1) == t).mean()), "linear_cross_entropy_metrics"),
    "log-sum-exp": (
        lambda x, t: (one_hot(x.astype(jnp.float32), t), jax.nn.logsumexp(x, -1).mean()),
        "linear_cross_entropy_metrics",
    ),
    "z-loss before labels": (
        lambda x, t: (
            jnp.square(lse := jax.nn.logsumexp(x, -1)).mean(),
            (lse - jnp.take_along_axis(x, jnp.clip(t - 1, 0)[..., None], -1)[..., 0]).mean(),
        ),
        "linear_cross_entropy_metrics",
    ),
    "both, of smoothed losses": (
        lambda x, t: (t5x(x, smoothed_rows(t)), x.argmax(-1), jnp.log(jnp.exp(x).sum(-1))),
        "linear_cross_entropy_metrics",
    ),
    "nearest class and accuracy": (
        lambda x, t: (
            -jnp.take_along_axis(jax.nn.log_softmax(x), t[..., None], -1, mode="clip").sum(),
            (jnp.argmax(x, -1) == t).sum(),
        ),
        "linear_cross_entropy_metrics",
    ),
}


@pytest.mark.drawn(0.6)
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("target", [TARGET, SOME_CLASSES], ids=["classes", "others, too"])
@pytest.mark.parametrize("name", WITH_METRICS)
def test_losses_with_metrics_and_with_gradients_of_their_own(
    name: str, target: jax.Array, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's logits are not held for its loss, whoever wrote the gradient; for an accuracy beside it small ones."""
    monkeypatch.setattr(losses, "MOST_HELD", 1000 if held else 0)
    function, becomes = WITH_METRICS[name]

    def of_head(h: jax.Array, w: jax.Array, b: jax.Array) -> Any:
        made = jax.tree.leaves(function(jnp.tanh((h @ w.T + b) / 3) * 3, target))
        return sum(jnp.sum(jnp.sin(each)) for each in made if each.dtype == jnp.float32), made

    found = cute_ops_jax.fuse.report(of_head, HIDDEN, WEIGHT, BIAS).replaced
    assert [entry.becomes for entry in found if "cross_entropy" in entry.becomes] == [becomes]
    want, got = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(HIDDEN, WEIGHT, BIAS)
        for f in (of_head, cute_ops_jax.fuse(of_head))
    )
    for a, b in zip(*map(jax.tree.leaves, (want, got)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=5e-6)


WIDE: dict[str, Function] = {
    "mean": lambda x, t: of_optax(x, t).mean(),
    "rule and accuracy": lambda x, t: (OWN(x, jax.nn.one_hot(t, CLASSES), 1e-2), (x.argmax(-1) == t).mean()),
    "some, with a bias": lambda x, t: 0.3 * jnp.where(t > 1, of_optax(x + BIAS, t), 0).sum(),
    "nearest class": lambda x, t: -jnp.take_along_axis(jax.nn.log_softmax(x + BIAS), t[..., None], -1, mode="clip"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("name", WIDE)
def test_float32_products_of_16_bit_operands(name: str, rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits stay in float32, and are not held; ``rows``: how many at a time. None holds those with metrics."""
    if rows:
        monkeypatch.setattr(wide_head, "rows_per_chunk", lambda *args: rows)
        monkeypatch.setattr(losses, "MOST_HELD", 0)
    h, w = HIDDEN.astype("bfloat16"), WEIGHT.astype("bfloat16")

    def of_head(h: jax.Array, w: jax.Array, target: jax.Array) -> Any:
        made = jax.tree.leaves(WIDE[name](jnp.einsum("bth,nh->btn", h, w, preferred_element_type=jnp.float32), target))
        return sum(jnp.sum(jnp.sin(each)) for each in made), made

    for target in (TARGET, SOME_CLASSES):
        found = cute_ops_jax.fuse.report(of_head, h, w, target).replaced
        assert found[0].becomes.startswith("linear_cross_entropy")
        want, got = (
            jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(h, w, target)
            for f in (of_head, cute_ops_jax.fuse(of_head))
        )
        for a, b in zip(*map(jax.tree.leaves, (want, got)), strict=True):
            assert a.dtype == b.dtype
            rtol = 2e-2 if a.dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(*(each.astype("float32") for each in (b, a)), rtol=rtol, atol=rtol)


RULES: dict[str, Function] = {
    "twice": with_rule(lambda dout, rows, p, z: 2 * dout * ((1 + z) * p - rows)),
    "without its z-loss": with_rule(lambda dout, rows, p, z: dout * (p - rows)),
    "bounded": with_rule(lambda dout, rows, p, z: jnp.clip(dout * ((1 + z) * p - rows), -0.3, 0.3)),
    "of another loss": with_rule(
        lambda dout, rows, p, z: dout * ((1 + z) * p - rows),
        lambda x, rows, z_loss: (2 * of_its_own(x, rows, z_loss)[0], of_its_own(x, rows, z_loss)[1]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_loss_with_another_gradient_stays(name: str) -> None:
    loss = lambda h, w: RULES[name](h @ w.T, jax.nn.one_hot(TARGET, CLASSES), 1e-2)[0].sum()  # noqa: E731
    found = cute_ops_jax.fuse.report(loss, HIDDEN, WEIGHT)
    assert not [entry for entry in found.replaced if "cross_entropy" in entry.becomes]
    assert "custom_vjp_call" in str(found)
    want, got = (jax.value_and_grad(f, (0, 1))(HIDDEN, WEIGHT) for f in (loss, cute_ops_jax.fuse(loss)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("of_all", [lambda dout: dout.mean(), lambda dout: dout[None, :]], ids=["mean", "columns"])
def test_a_gradient_of_other_rows_cotangents_is_none_of_a_loss(of_all: Function) -> None:
    def value(x: jax.Array, rows: jax.Array) -> jax.Array:
        return -jnp.sum(rows * jax.nn.log_softmax(x), -1)

    def backward(saved: Any, dout: jax.Array) -> Any:
        x, rows = saved
        return of_all(dout) * (jax.nn.softmax(x) - rows), None

    loss = jax.custom_vjp(value)
    loss.defvjp(lambda x, rows: (value(x, rows), (x, rows)), backward)
    total = lambda h, w: jnp.sin(loss(h @ w.T, jax.nn.one_hot(jnp.arange(CLASSES)[::-1], CLASSES))).sum()  # noqa: E731
    check(total, [], draw(CLASSES, 8), draw(CLASSES, 8))


def test_a_loss_whose_derivative_calls_it() -> None:
    loss = jax.custom_vjp(lambda x, rows: -jnp.sum(rows * jax.nn.log_softmax(x), -1))
    loss.defvjp(
        lambda x, rows: (loss(x, rows), (x, rows)),
        lambda saved, dout: (dout[..., None] * (jax.nn.softmax(saved[0]) - saved[1]), None),
    )
    check(lambda h, w: loss(h @ w.T, jax.nn.one_hot(TARGET, CLASSES)), ["linear_cross_entropy"], HIDDEN, WEIGHT)


@pytest.mark.slow
def test_metrics_that_a_loss_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that follow from the predicted classes, logits that something else reads, and rows with a NaN."""

    def own_labels(h: jax.Array, w: jax.Array) -> jax.Array:
        logits = h @ w.T
        return of_optax(logits, logits.argmax(-1)).mean()

    def read(h: jax.Array, w: jax.Array) -> jax.Array:
        logits = h @ w.T
        return of_optax(logits, TARGET).mean() + jnp.sum(logits.argmax(-1) == TARGET) + logits.min()

    check(own_labels, ["cross_entropy"], HIDDEN, WEIGHT)
    check(read, ["cross_entropy"], HIDDEN, WEIGHT)
    predicted = cute_ops_jax.fuse(lambda h, w: ((x := h @ w.T).argmax(-1), of_optax(x, TARGET)))
    bad = WEIGHT.at[3].set(jnp.nan)
    np.testing.assert_array_equal(predicted(HIDDEN, bad)[0], 3)
    monkeypatch.setattr(losses, "MOST_HELD", 0)
    np.testing.assert_array_equal(predicted(HIDDEN, bad)[0], 3)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_labels_of_any_integers(dtype: str) -> None:
    """Also where their dtype does not hold the number of classes."""
    target = TARGET.astype(dtype)
    check(lambda h, w: one_hot(h @ w.T, target), ["linear_cross_entropy"], HIDDEN, WEIGHT)
    wide = jnp.tile(WEIGHT, (40, 1)) * 0.1
    picks = lambda h, w: -jnp.take_along_axis(jax.nn.log_softmax(h @ w.T), target[..., None], -1, mode="clip")  # noqa: E731
    check(picks, ["linear_cross_entropy"], HIDDEN, wide)


@pytest.mark.slow
def test_one_hot_rows_of_more_classes_than_a_dtype_counts() -> None:
    """Places of 320 classes in int8 repeat, so a row has several ones: it is no loss of ours."""
    wide, target = jnp.tile(WEIGHT, (40, 1)) * 0.1, TARGET.astype("int8")
    loss = lambda h, w: -(jax.nn.one_hot(target, 320) * jax.nn.log_softmax(h @ w.T)).sum()  # noqa: E731
    assert loss(HIDDEN, wide) > 8 * -jax.nn.log_softmax(HIDDEN @ wide.T)[0, 0, 1]
    np.testing.assert_allclose(cute_ops_jax.fuse(loss)(HIDDEN, wide), loss(HIDDEN, wide), rtol=1e-5)


def test_a_comparison_with_one_number_is_no_one_hot_row() -> None:
    function = lambda x, t: (jnp.where(x == t[0, 0], x, 0.5) * jnp.sin(x)).sum(-1)  # noqa: E731
    for label in (TARGET, TARGET.astype("float32")):
        np.testing.assert_allclose(cute_ops_jax.fuse(function)(LOGITS, label), function(LOGITS, label), rtol=1e-5)
    whole = lambda x, t: (jnp.where(t[..., None] == jnp.int32(3), x, 0.5) * x).sum(-1)  # noqa: E731
    np.testing.assert_allclose(cute_ops_jax.fuse(whole)(LOGITS, TARGET), whole(LOGITS, TARGET), rtol=1e-5)


@pytest.mark.slow
def test_an_example_without_a_class_leaves_the_others_as_they_are() -> None:
    target = TARGET.at[0, 1].set(CLASSES)
    loss = lambda h, t: of_optax(h @ WEIGHT.T, t).sum()  # noqa: E731
    for each in (loss, lambda h, t: jax.checkpoint(loss)(h, t)):
        results = [jax.vmap(jax.value_and_grad(f))(HIDDEN, target) for f in (each, cute_ops_jax.fuse(each))]
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=5e-6)


def test_a_negative_index_counts_from_the_end() -> None:
    check(LOSSES["optax"], ["cross_entropy"], LOGITS, TARGET - CLASSES)
