"""Attention to caches in JAX: drawn calls against float64, loops that decode, and the bits of PyTorch on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.ops.attention_calls import NO_FUNCTIONS
from tests.ops.decode_calls import Decoding, arrays, drawn, drawn_latent, expected, functions_of, latent, of_latent


def given(call: Decoding, seed: int) -> dict[str, Any]:
    return {name: jnp.asarray(np.ascontiguousarray(a)) for name, a in arrays(call, seed).items()}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_drawn_calls(part: int) -> None:
    for seed in range(300 + 3 * part, 303 + 3 * part):
        call = drawn(seed, longest=60)
        functions = functions_of(call, seed) if seed % 2 else NO_FUNCTIONS
        captured = {name: jnp.asarray(a) for name, a in functions.captured.items()}
        run = partial(cute_ops_jax.decode_attention, score_mod=functions.score, **call.attrs)
        found = jax.jit(lambda x, c, _run=run: _run(**x, captured=c))(given(call, seed), captured)
        right = expected(call, arrays(call, seed), functions)
        for name, x in zip(("out", "lse"), found, strict=True):
            right[name].assert_holds(np.asarray(x, np.float64), f"{call.name}: {name}")


@pytest.mark.slow
def test_float8_caches_are_written_and_read() -> None:
    """Numbers are divided by their head's scale, and rounded to the nearest."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 7, 2, 32), np.float32) for _ in range(2))
    caches = [jnp.zeros((2, 9, 2, 32), jnp.float8_e4m3fn) for _ in range(2)]
    slots, scale = jnp.arange(2)[:, None] * 9 + jnp.arange(7), np.array([0.01, 0.02], np.float32)
    write = jax.jit(cute_ops_jax.append_kv, donate_argnums=(0, 1))
    caches = write(*caches, k, v, slots, k_scale=scale, v_scale=scale)
    for cache, new in zip(caches, (k, v), strict=True):
        right = (new * (1 / scale)[:, None]).clip(-448, 448).astype(cache.dtype)
        assert np.array_equal(np.asarray(cache)[:, :7].view(np.uint8), right.view(np.uint8))
    q = jnp.asarray(rng.standard_normal((2, 1, 4, 32)), jnp.bfloat16)
    out, _ = cute_ops_jax.decode_attention(q, *caches, jnp.array([7, 7]), k_scale=scale, v_scale=scale)
    plain, _ = cute_ops_jax.decode_attention(q, *(jnp.asarray(x, jnp.bfloat16) for x in (k, v)), jnp.array([7, 7]))
    assert np.abs(np.asarray(out - plain, np.float32)).max() < 0.2


def test_latent_attention() -> None:
    for seed in range(300, 302):
        call = drawn_latent(seed, longest=60)
        known = latent(call, seed)
        operands = {name: jnp.asarray(a) for name, a in known.items()}
        found = jax.jit(lambda x, _call=call: cute_ops_jax.mla_decode(**x, **_call.attrs))(operands)
        right = of_latent(call, known)
        for name, x in zip(("out", "lse"), found, strict=True):
            right[name].assert_holds(np.asarray(x, np.float64), f"{call.name}: {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_the_bits_are_those_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(3 * part, 3 * part + 3):
        call = drawn(seed)
        operands = given(call, seed)
        found = jax.jit(lambda x, _call=call: cute_ops_jax.decode_attention(**x, **_call.attrs))(operands)
        theirs = cute_ops_torch.decode_attention(
            **{name: torch.from_dlpack(x) for name, x in operands.items()}, **call.attrs
        )
        for ours, other in zip(found, theirs, strict=True):
            assert torch.equal(torch.from_dlpack(ours), other), f"seed {seed}: {call.name}"


@pytest.mark.slow
def test_a_loop_with_donated_caches() -> None:
    """Lengths are the loop's state: the program neither reads them nor copies a cache."""
    steps, batch = 9, 3
    q, k, v = (
        jax.random.normal(jax.random.key(i), (steps, batch, 1, h, 32), jnp.bfloat16) for i, h in enumerate((4, 2, 2))
    )

    def step(state: Any) -> Any:
        i, lengths, k_cache, v_cache, found = state
        slots = jnp.arange(batch, dtype=jnp.int32)[:, None] * k_cache.shape[1] + lengths[:, None]
        k_cache, v_cache = cute_ops_jax.append_kv(k_cache, v_cache, k[i], v[i], slots)
        lengths = lengths + 1
        out, _ = cute_ops_jax.decode_attention(q[i], k_cache, v_cache, lengths)
        return i + 1, lengths, k_cache, v_cache, found.at[i].set(out)

    def run(k_cache: Any, v_cache: Any) -> Any:
        state = (0, jnp.zeros(batch, jnp.int32), k_cache, v_cache, jnp.zeros((steps, batch, 1, 4, 32), jnp.bfloat16))
        return jax.lax.while_loop(lambda state: state[0] < steps, step, state)[2:]

    caches = [jnp.full((batch, 16, 2, 32), jnp.nan, jnp.bfloat16) for _ in range(2)]
    *_, found = jax.jit(run, donate_argnums=(0, 1))(*caches)
    whole = [jnp.swapaxes(x[:, :, 0], 0, 1) for x in (q, k, v)]
    right, _ = cute_ops_jax.attention(*whole, causal=True)
    found = jnp.swapaxes(found[:, :, 0], 0, 1)
    np.testing.assert_allclose(found.astype(np.float32), right.astype(np.float32), atol=0.02, rtol=0.02)


@pytest.mark.slow
def test_merged_states_are_those_of_all_keys() -> None:
    call = Decoding((20, 20), 2, 2, 2, 32, 16, 0, 20)
    x = given(call, 0)
    first = cute_ops_jax.attention(x["q"], x["k_cache"][:, :8], x["v_cache"][:, :8])
    second = cute_ops_jax.decode_attention(x["q"], x["k_cache"][:, 8:], x["v_cache"][:, 8:], x["lengths"] - 8)
    found = jax.jit(cute_ops_jax.merge_states)(*first, *second)
    for part, right in zip(found, cute_ops_jax.decode_attention(**x), strict=True):
        np.testing.assert_allclose(part.astype(np.float32), right.astype(np.float32), atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 3])
def test_an_exported_program_of_any_batch(size: int) -> None:
    call = Decoding((5, 3, 7), 2, 2, 2, 32, 32, size, 9)
    operands = given(call, 0)
    (batch,) = jax.export.symbolic_shape("b")
    of_batch = ("q", "lengths", "page_table") if size else tuple(operands)
    specs = {
        name: jax.ShapeDtypeStruct((batch, *x.shape[1:]) if name in of_batch else x.shape, x.dtype)
        for name, x in operands.items()
    }
    function = jax.jit(lambda x: cute_ops_jax.decode_attention(**x))
    exported = jax.export.deserialize(jax.export.export(function)(specs).serialize())
    for found, right in zip(exported.call(operands), function(operands), strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.slow
def test_vmap_over_groups_of_sequences() -> None:
    operands = given(Decoding((5, 3, 0, 4), 1, 2, 2, 32, 32, 0, 6), 0)
    grouped = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in operands.items()}
    out, lse = jax.jit(jax.vmap(lambda x: cute_ops_jax.decode_attention(**x)))(grouped)
    right = cute_ops_jax.decode_attention(**operands)
    assert (out.reshape(right[0].shape) == right[0]).all()
    assert (lse.reshape(right[1].shape) == right[1]).all()
