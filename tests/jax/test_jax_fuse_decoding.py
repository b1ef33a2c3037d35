"""Steps of decoding that programs write out become `decode_attention`, whatever they compare keys with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops_jax.fusion import layers
from tests.jax.drawn_decoding import Step, drawn
from tests.jax.drawn_graphs import QUICK


def became(function: Any, *args: Any) -> list[str]:
    return [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args).replaced]


def check(step: Step) -> None:
    got, want = (
        np.asarray(jax.jit(f, compiler_options=QUICK)(*step.args), "float32")
        for f in (cute_ops_jax.fuse(step.function), step.function)
    )
    # Weights are rounded to 16 bits by both, scores by those programs that keep them so.
    np.testing.assert_allclose(got, want, rtol=0.03, atol=0.03, err_msg=step.said)


@pytest.mark.drawn(0.25)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(48))
def test_drawn_steps(number: int) -> None:
    step = drawn(number)
    assert set(became(step.function, *step.args)) - {"fused"} == {"decode_attention"}, step.said
    check(step)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(16))
def test_drawn_steps_on_a_gpu(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEW_KEYS", 0)
    monkeypatch.setattr(layers, "MANY_HEADS", 0)
    step = drawn(number)
    assert set(became(step.function, *step.args)) - {"fused"} == {"decode_attention"}, step.said
    check(step)


def test_strict_promotions() -> None:
    *given, lengths = arrays()

    def function(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bgrd,bngd->bgrn", q.reshape(3, 2, 2, 16), k).astype(jnp.float32)
        place = jax.lax.broadcasted_iota(jnp.int32, (3, 1, 1, 40), 3)
        ends = lengths.reshape(3, 1, 1, 1)
        seen = (place < ends) & (place >= ends - 7)
        p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(v.dtype)
        return jnp.einsum("bgrn,bngd->bgrd", p, v)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert became(function, *given) == ["decode_attention"]
        check(Step("strict", function, tuple(given)))
        gradients = jax.grad(lambda *x: cute_ops_jax.fuse(function)(*x).astype("float32").sum(), (0, 1, 2))
        jax.jit(gradients, compiler_options=QUICK)(*given)


def written(q: Any, k: Any, v: Any, lengths: Any, fill: float = -jnp.inf) -> Any:
    b, heads, d = q.shape
    by_group = q.reshape(b, k.shape[2], heads // k.shape[2], d)
    scores = jnp.einsum("bgrd,bngd->bgrn", by_group, k).astype(jnp.float32) * d**-0.5
    seen = jnp.arange(k.shape[1]) < lengths[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, fill), -1).astype(v.dtype)
    return jnp.einsum("bgrn,bngd->bgrd", p, v).reshape(b, heads, -1)


def test_a_mask_of_jax_nn() -> None:
    """Which ands it with one that is known to be true."""

    def function(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        seen = jnp.arange(k.shape[1]) < lengths[0]
        return jax.nn.dot_product_attention(q[:, None], k, v, mask=seen[None, None, None])

    assert became(function, *arrays()) == ["decode_attention"]
    check(Step("jax.nn", function, arrays()))


def test_a_mask_that_is_added_to_hidden_scores() -> None:
    """A key that two masks hide has a lower score than one that one of them hides, which a query without keys shows."""
    *given, lengths = arrays()

    def function(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bgrd,bngd->bgrn", q.reshape(3, 2, 2, 16), k).astype(jnp.float32)
        place, ends, begins = jnp.arange(k.shape[1]), *(lengths.at[1].set(x)[:, None, None, None] for x in (0, 20))
        scores = jnp.where(place < ends, scores, -1e30) + jnp.where(place >= begins - 3, 0.0, -1e30)
        return jnp.einsum("bgrn,bngd->bgrd", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    check(Step("two masks", function, tuple(given)))


def arrays(b: int = 3, n: int = 40, kv: int = 2, heads: int = 4, d: int = 16) -> tuple[Any, ...]:
    rng = np.random.default_rng(3)
    shapes = (b, heads, d), (b, n, kv, d), (b, n, kv, d)
    q, k, v = (jnp.asarray(rng.standard_normal(shape).astype(jnp.bfloat16)) for shape in shapes)
    return q, k, v, jnp.asarray(rng.integers(1, n + 1, b).astype("int32"))


@pytest.mark.parametrize(
    ("b", "kv", "group", "keys", "found"),
    [
        (5, 8, 4, 256, True), (39, 1, 4, 256, False), (1, 8, 4, 4096, True), (1, 8, 4, 4095, False),
        (64, 8, 4, 255, False), (48, 1, 17, 2048, True), (48, 1, 17, 2047, False), (48, 1, 65, 4096, False),
    ],
)  # fmt: skip
def test_where_a_gpu_runs_it(
    monkeypatch: pytest.MonkeyPatch, b: int, kv: int, group: int, keys: int, found: bool
) -> None:  # fmt: skip
    """Elsewhere the step stays as it is, or becomes `attention`."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = (b, kv * group, 64), (b, keys, kv, 64), (b, keys, kv, 64)
    args = (*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), jax.ShapeDtypeStruct((b,), jnp.int32))
    assert ("decode_attention" in became(written, *args)) is found


@pytest.mark.parametrize("fill", [-jnp.inf, -1e30])
def test_derivatives_are_those_of_the_program(fill: float) -> None:
    """Caches of our op have none: forward and reverse mode take those of the formula."""
    *given, lengths = arrays()

    def loss(function: Any, q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(jnp.sin(function(q, k, v, lengths, fill).astype("float32")))

    two = [jnp.asarray(np.stack([x, np.asarray(x) + 1])) for x in given[1:]]
    ends = jnp.asarray(np.stack([lengths, np.asarray(lengths) - 1]))

    def derivatives(f: Any) -> Any:
        def run(given: Any, two: Any, ends: Any) -> Any:
            return (
                jax.grad(lambda *x: loss(f, *x), (0, 1, 2))(*given),
                jax.jvp(lambda *x: loss(f, *x), given, [jnp.ones_like(x) for x in given]),
                jax.vmap(lambda *x: f(*x, fill), (None, 0, 0, 0))(given[0], *two, ends),
            )

        return jax.tree.leaves(jax.jit(run, compiler_options=QUICK)(given, two, ends))

    for got, want in zip(derivatives(cute_ops_jax.fuse(written)), derivatives(written), strict=True):
        np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("number", [504, 505, 509, 513])
def test_gradients_of_drawn_steps(number: int) -> None:
    step = drawn(number)

    def gradients(function: Any) -> Any:
        def loss(*args: Any) -> Any:
            return jnp.sum(jnp.sin(function(*args).astype("float32")))

        return jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=QUICK)(*step.args)

    assert set(became(step.function, *step.args)) - {"fused"} == {"decode_attention"}, step.said
    for got, want in zip(*map(gradients, (cute_ops_jax.fuse(step.function), step.function)), strict=True):
        np.testing.assert_allclose(*(x.astype("float32") for x in (got, want)), rtol=0.06, atol=0.06, err_msg=step.said)


@pytest.mark.parametrize("fill", [-jnp.inf, -1e30])
@pytest.mark.parametrize("length", [0, -3, 1, 39, 40, 43])
def test_lengths_at_the_ends(length: int, fill: float) -> None:
    """A sequence without keys gives what the program gives it: NaN, or the mean of all values."""
    *given, lengths = arrays()
    check(Step(f"{length=}", lambda *x: written(*x, fill), (*given, lengths.at[1].set(length))))


def test_large_numbers_are_not_constants() -> None:
    """Comparisons with two numbers that float32 rounds to one are two."""

    def function(x: Any, index: Any) -> Any:
        return jnp.where(index < 2**24 + 1, x, 0.0) * 2 + jnp.where(index < 2**24, x, 1.0)

    args = jnp.ones(4), jnp.asarray([0, 2**24 - 1, 2**24, 2**24 + 1], jnp.int32)
    np.testing.assert_array_equal(cute_ops_jax.fuse(function)(*args), function(*args))
