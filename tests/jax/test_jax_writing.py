"""Ops that write their inputs or take run-time scalars: functional, but with no copy where XLA needs none."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import cute_ops_jax
from cute_ops import testing
from cute_ops.ops.attention.append_kv import append_kv as APPEND
from cute_ops_jax.tools import runner
from tests.ops import writing

STORE, FOLLOW = cute_ops_jax.register(writing.store), cute_ops_jax.register(writing.follow)
INDEX = jnp.array([7, 0, 3], jnp.int32)


def rows(*lead: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(lead)), (*lead, 8))


def stepped(state: Any, x: Any, gain: Any, keep: float, steps: int) -> tuple[Any, Any]:
    kept = state
    for _ in range(steps):
        kept = keep * state
        state = kept + gain * x
    return state, kept


@pytest.mark.parametrize(
    "own", [writing.store, writing.follow, writing.axpy, writing.axpy.grad], ids=lambda own: own.name
)
def test_values_against_float64(own: Any) -> None:
    arrays, attrs = testing.inputs(own, own.cases[0], "float32"), testing.attributes(own, own.cases[0])
    testing.check(own, arrays, attrs, runner.run(own, arrays, attrs))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_new_arrays_come_before_the_outputs(kernels: bool, through_ffi: Any, fake_kernels: Any) -> None:
    store, follow = (through_ffi(writing.store), through_ffi(writing.follow)) if kernels else (STORE, FOLLOW)
    cache, state, x = rows(12), rows(2, 3), rows(3)
    before = np.array(cache)
    new = store(cache, x, INDEX)
    np.testing.assert_array_equal(new, cache.at[INDEX].set(x))
    np.testing.assert_array_equal(cache, before)
    got = follow(state, state + 1, jnp.float32(2.0), keep=0.25)
    for a, b in zip(got, stepped(state, state + 1, 2.0, 0.25, 1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert bool(fake_kernels.calls) == kernels


def test_a_loop_of_steps_copies_no_cache(through_ffi: Any) -> None:
    """Within a loop, and where the caller donates it."""
    store = through_ffi(writing.store)

    def decode(cache: jax.Array, x: jax.Array) -> jax.Array:
        step = lambda i, c: store(c, x + i, (INDEX + i) % 12)  # noqa: E731
        return jax.lax.fori_loop(0, 4, step, store(cache, x, INDEX))

    cache, x = rows(12), rows(3)
    expected = cache.at[INDEX].set(x)
    for i in range(4):
        expected = expected.at[(INDEX + i) % 12].set(x + i)
    compiled = jax.jit(decode, donate_argnums=0).lower(cache, x).compile()
    text = compiled.as_text()
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in text
    assert "output_to_operand_aliasing={{}: (0, {})}" in text
    assert not re.findall(r"f32\[12,8\]\S* copy\(", text)
    np.testing.assert_array_equal(compiled(cache, x), expected)
    kept = jax.jit(decode).lower(expected, x).compile().as_text()
    assert len(re.findall(r"f32\[12,8\]\S* copy\(", kept)) == 1, "what the caller keeps is copied once"


@pytest.mark.slow
def test_scalars_are_attributes_of_one_kernel(through_ffi: Any, fake_kernels: Any) -> None:
    axpy, x, y = through_ffi(writing.axpy), rows(3), rows(3) + 1
    values = [0.1, -0.0, 3, 1e30, math.inf, math.nan, 2.5]
    for alpha in values:
        for first in (0, 5, 2**40, -1):
            expected = np.where(np.arange(8) >= first, alpha * np.asarray(x) + np.asarray(y), np.asarray(y))
            np.testing.assert_allclose(axpy(x, y, alpha, first), expected, rtol=1e-6)
    assert len({v.symbol for v in fake_kernels.variants}) == 1
    assert len(fake_kernels.calls) == 4 * len(values)


def test_a_lowered_call_names_aliases_and_scalars(fake_kernels: Any) -> None:
    given = jax.ShapeDtypeStruct((5, 3, 8), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32)
    traced = jax.jit(lambda s, g: FOLLOW(s, s, g, keep=0.25)).trace(*given)
    (call,) = (
        line for line in traced.lower(lowering_platforms=("cuda",)).as_text().splitlines() if "custom_call" in line
    )
    assert "mhlo.backend_config = {keep = 2.500000e-01 : f64}" in call
    assert "output_tuple_indices = [1], operand_index = 0, operand_tuple_indices = []" in call


def test_a_traced_number_is_an_array(through_ffi: Any) -> None:
    axpy, follow = through_ffi(writing.axpy), through_ffi(writing.follow)
    problem = (
        r"^cute.axpy: scalar `alpha` must be float, got a JAX array float32\[\]: it is a number of the host; "
        r"declare it as an input of shape \(\) to take an array"
    )
    with pytest.raises(TypeError, match=problem):
        jax.jit(lambda a: axpy(rows(3), rows(3), a))(2.0)
    with pytest.raises(TypeError, match=r"^cute.axpy: scalar `alpha` must be float, got True"):
        axpy(rows(3), rows(3), True)
    step = jax.jit(lambda gain: follow(rows(3), rows(3), gain))
    for gain in (1.0, 2.0):
        np.testing.assert_allclose(step(gain)[0], (0.5 + gain) * rows(3), rtol=1e-6)
    assert step._cache_size() == 1


def test_gradients(through_ffi: Any) -> None:
    """By the scalars' values; through what is written there is none."""
    axpy, follow = through_ffi(writing.axpy), through_ffi(writing.follow)
    for alpha in (1.5, 2.5):
        dx, dy = jax.grad(lambda x, y, alpha=alpha: jnp.sum(axpy(x, y, alpha, 5)), (0, 1))(rows(3), rows(3))
        np.testing.assert_array_equal(dx, np.where(np.arange(8) >= 5, alpha, 0) * np.ones((3, 8)))
        np.testing.assert_array_equal(dy, np.ones((3, 8)))
    with pytest.raises(NotImplementedError, match=r"^cute.follow: no gradient is declared for it"):
        jax.grad(lambda s: jnp.sum(follow(s, s, jnp.float32(1.0))[1]))(rows(3))


@pytest.mark.parametrize("shared", ["nothing", "state", "x"])
def test_vmap(through_ffi: Any, shared: str) -> None:
    """Functional: where what is written is shared, every example gets its own."""
    follow, store = through_ffi(writing.follow), through_ffi(writing.store)
    state, x = (rows(3) if shared == name else rows(5, 3) + 1 for name in ("state", "x"))
    axes = tuple(None if shared == name else 0 for name in ("state", "x"))
    got = jax.vmap(lambda s, a: follow(s, a, jnp.float32(2.0), keep=0.25), axes)(state, x)
    for a, b in zip(got, stepped(*(jnp.broadcast_to(a, (5, 3, 8)) for a in (state, x)), 2.0, 0.25, 1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    caches = jax.vmap(store, (0, None, None))(rows(5, 12), rows(3), INDEX)
    np.testing.assert_array_equal(caches[:, INDEX], jnp.broadcast_to(rows(3), (5, 3, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
def test_what_is_written_stays_on_its_devices(explicit: bool) -> None:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        state, x = (jax.device_put(a, NamedSharding(mesh, PartitionSpec("d", None))) for a in (rows(8), rows(8) + 1))
        new, kept = jax.jit(lambda s, a: FOLLOW(s, a, jnp.float32(2.0)))(state, x)
        assert all(a.sharding.is_equivalent_to(state.sharding, 2) for a in (new, kept))
        np.testing.assert_allclose(new, 0.5 * rows(8) + 2 * (rows(8) + 1), rtol=1e-6)
        cache = jax.device_put(rows(12), NamedSharding(mesh, PartitionSpec()))
        index = jnp.arange(8, dtype=jnp.int32)
        np.testing.assert_array_equal(jax.jit(STORE)(cache, x, index)[:8], rows(8) + 1)


HEADS, SLOTS = (4, 8), jnp.array([7, 0, -1, 11, 12], jnp.int32)


def tokens(count: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, *HEADS))


def appended(cache: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Tokens whose slot is none of the cache's are left out, negative ones too."""
    return cache.reshape(-1, *HEADS).at[jnp.where(slots < 0, 12, slots)].set(new, mode="drop").reshape(cache.shape)


@pytest.mark.slow
def test_decoding_copies_no_cache(through_ffi: Any) -> None:
    """Prefill, then a loop of steps, in caches that the caller donates."""
    append = through_ffi(APPEND)

    def decode(caches: Any, k: jax.Array, v: jax.Array, how: Any) -> Any:
        caches = how(*caches, k, v, SLOTS)
        return jax.lax.fori_loop(0, 4, lambda i, c: how(*c, k[:1] + i, v[:1] + i, i[None] + 4), caches)

    by_hand = lambda kc, vc, k, v, slots: (appended(kc, k, slots), appended(vc, v, slots))  # noqa: E731
    caches, k, v = tuple(tokens(12, i).reshape(3, 4, *HEADS) for i in range(2)), tokens(5, 2), tokens(5, 3)
    expected = decode(caches, k, v, by_hand)
    compiled = jax.jit(lambda c, k, v: decode(c, k, v, append), donate_argnums=0).lower(caches, k, v).compile()
    text = compiled.as_text()
    assert "{0}: (0, {}, may-alias), {1}: (1, {}, may-alias)" in text
    assert not re.findall(r"f32\[3,4,4,8\]\S* copy\(", text)
    for got, right in zip(compiled(caches, k, v), expected, strict=True):
        np.testing.assert_array_equal(got, right)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["automatic", "explicit"])
def test_devices_write_their_heads_of_caches(explicit: bool, through_ffi: Any, fake_kernels: Any) -> None:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    append, caches = through_ffi(APPEND), [tokens(12, i).reshape(3, 4, *HEADS) for i in range(2)]
    k, v = tokens(5, 2), tokens(5, 3)
    tables = jnp.split(tokens(5, 4)[:, 0, :6], 2, axis=-1) if explicit else []
    turned = cute_ops_jax.rope(k, *tables) if tables else k
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
        given = [place(a, *(None,) * (a.ndim - 2), "d", None) for a in (*caches, k, v)]
        given += [place(SLOTS), *map(place, tables)]
        compiled = jax.jit(append).lower(*given).compile()
        got = jax.block_until_ready(compiled(*given))
    assert not re.findall(r"\ball-\w+|collective-permute", compiled.as_text())
    assert [shapes[:3] for _, shapes in fake_kernels.calls] == [[(3, 4, 1, 8), (3, 4, 1, 8), (5, 1, 8)]] * 4
    for one, cache, new in zip(got, caches, (turned, v), strict=True):
        assert one.sharding.is_equivalent_to(given[0].sharding, 4)
        np.testing.assert_array_equal(one, appended(cache, new, SLOTS))
