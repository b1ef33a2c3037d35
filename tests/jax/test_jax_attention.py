"""Attention in JAX: drawn calls against float64, transforms, and the bits of PyTorch on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.ops.attention_calls import Call, arrays, drawn, expected


def given(call: Call, seed: int) -> list[Any]:
    q, k, v, sinks = arrays(call, seed)
    halves = [jnp.asarray(x, dtype=call.dtype) for x in (q, k, v)]
    return [*halves, None if sinks is None else jnp.asarray(sinks)]


def wide(x: Any) -> np.ndarray | None:
    return None if x is None else np.asarray(x, dtype=np.float32)


@pytest.mark.parametrize("seed", range(100, 112))
def test_drawn_calls(seed: int) -> None:
    call = drawn(seed, longest=60)
    operands = given(call, seed)
    out, lse = jax.jit(lambda *x: cute_ops_jax.attention(*x, **call.attrs))(*operands)
    right = expected(call, [*map(wide, operands)])
    for name, found in (("out", out), ("lse", lse)):
        right[name].assert_holds(np.asarray(found, np.float64), f"{call.name}: {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_the_bits_are_those_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(6 * part, 6 * part + 6):
        call = drawn(seed)
        operands = given(call, seed)
        out, lse = jax.jit(lambda *x, _call=call: cute_ops_jax.attention(*x, **_call.attrs))(*operands)
        tensors = [None if x is None else torch.from_dlpack(x) for x in operands]
        theirs = cute_ops_torch.attention(*tensors, **call.attrs)
        assert torch.equal(torch.from_dlpack(out), theirs[0]), f"seed {seed}: {call.name}"
        assert torch.equal(torch.from_dlpack(lse), theirs[1])


def test_vmap_and_jit_over_sequences() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 2, 9, 2, 32), jnp.bfloat16) for i in range(3))
    out, lse = jax.jit(jax.vmap(lambda *x: cute_ops_jax.attention(*x, causal=True)))(q, k, v)
    for i in range(3):
        each = cute_ops_jax.attention(q[i], k[i], v[i], causal=True)
        assert (out[i] == each[0]).all()
        assert (lse[i] == each[1]).all()


def test_a_gradient_is_refused() -> None:
    q = jnp.ones((1, 2, 1, 32), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"cute\.attention"):
        jax.grad(lambda x: cute_ops_jax.attention(x, x, x)[0].astype(jnp.float32).sum())(q)
