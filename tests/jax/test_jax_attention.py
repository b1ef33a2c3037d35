"""Attention in JAX: drawn calls against float64, transforms, and the bits of PyTorch on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.ops.attention_calls import Call, arrays, drawn, expected

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def given(call: Call, seed: int) -> list[Any]:
    q, k, v, sinks = arrays(call, seed)
    halves = [jnp.asarray(x, dtype=call.dtype) for x in (q, k, v)]
    return [*halves, None if sinks is None else jnp.asarray(sinks)]


def wide(x: Any) -> np.ndarray | None:
    return None if x is None else np.asarray(x, dtype=np.float32)


def with_gradients(call: Call, operands: list[Any], dout: Any, dlse: Any) -> list[Any]:
    """Results, and gradients of the operands."""

    @jax.jit
    def both(*x: Any) -> Any:
        results, back = jax.vjp(lambda *y: cute_ops_jax.attention(*y, **call.attrs), *x)
        return [*results, *back((dout, dlse))]

    return both(*operands)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(100, 112))
def test_drawn_calls(seed: int) -> None:
    call = drawn(seed, longest=60)
    operands = given(call, seed)
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((call.batch, call.s, call.h, call.e), np.float32), call.dtype)
    dlse = jnp.asarray(rng.standard_normal((call.batch, call.h, call.s), np.float32))

    found = dict(zip(NAMES, with_gradients(call, [x for x in operands if x is not None], dout, dlse), strict=False))
    for name, bound in expected(call, [*map(wide, operands)], (np.asarray(wide(dout)), np.asarray(dlse))).items():
        bound.assert_holds(np.asarray(wide(found[name])), f"{call.name}: {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_the_bits_are_those_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(6 * part, 6 * part + 6):
        call = drawn(seed)
        call.attrs["deterministic"] = True
        operands = [x for x in given(call, seed) if x is not None]
        dout = jax.random.normal(jax.random.key(seed), (call.batch, call.s, call.h, call.e), call.dtype)
        dlse = jax.random.normal(jax.random.key(seed), (call.batch, call.h, call.s), jnp.float32)
        tensors = [torch.from_dlpack(x).requires_grad_() for x in operands]
        theirs = cute_ops_torch.attention(*tensors, **call.attrs)
        theirs += torch.autograd.grad(theirs, tensors, [torch.from_dlpack(x) for x in (dout, dlse)])
        for ours, right in zip(with_gradients(call, operands, dout, dlse), theirs, strict=True):
            assert torch.equal(torch.from_dlpack(ours), right), f"seed {seed}: {call.name}"


def test_vmap_and_jit_over_sequences() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 2, 9, 2, 32), jnp.bfloat16) for i in range(3))
    out, lse = jax.jit(jax.vmap(lambda *x: cute_ops_jax.attention(*x, causal=True)))(q, k, v)
    for i in range(3):
        each = cute_ops_jax.attention(q[i], k[i], v[i], causal=True)
        assert (out[i] == each[0]).all()
        assert (lse[i] == each[1]).all()
