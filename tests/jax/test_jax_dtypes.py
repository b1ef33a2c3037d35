"""Functions of tiles of several dtypes, outputs that say theirs, and gradients of what is expanded, in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cute_ops import testing
from cute_ops.ops.expression.by_call import DTYPES
from cute_ops_jax import fused
from tests.ops import mixing
from tests.ops.mixing import Mixed

DRAWN = [*mixing.drawn(3, 18)]


def arrays_of(mixed: Mixed, rows: tuple[int, ...] = (3, 4), n: int = 24) -> list[jax.Array]:
    """Tiles of the drawn dtypes; a row vector and an expanded tile in bfloat16."""
    rng, letters, found = np.random.default_rng(0), iter(mixed.letters), []
    for kind in mixing.FUNCTIONS[mixed.function].replace("2t", "T"):
        shape = (n,) if kind == "r" else (rows[0], 1, n) if kind == "e" else (*rows, n * (1 + (kind == "T")))
        found.append(jnp.asarray(rng.standard_normal(shape), DTYPES[next(letters)] if kind in "tT" else "bfloat16"))
    return found


@pytest.mark.parametrize("mixed", DRAWN, ids=lambda mixed: f"{mixed.op.name[:-13]}_{mixed.letters}")
def test_values_and_gradients(mixed: Mixed) -> None:
    op, given = mixed.op, arrays_of(mixed)
    outputs, pull = jax.vjp(fused(mixed.function), *given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wide = [jnp.broadcast_to(a, outputs[0].shape) if mixing.is_expanded(a) else a for a in given]
    arrays = {name: np.asarray(a) for name, a in zip(op.inputs, wide, strict=True)}
    testing.check(op, arrays, {}, tuple(map(np.asarray, outputs)))
    cotangents = [jnp.cos(out.astype("float32")).astype(out.dtype) for out in outputs]
    found = pull(cotangents[0] if len(cotangents) == 1 else tuple(cotangents))
    assert [a.dtype for a in found] == [a.dtype for a in given]
    known = arrays | {name: np.asarray(out) for name, out in zip(op.outputs, outputs, strict=True)}
    known |= {f"d{name}": np.asarray(c) for name, c in zip(op.outputs, cotangents, strict=True)}
    gradients = dict(zip((f"d{name}" for name in op.inputs), map(np.asarray, found), strict=True))
    for name, out in op.handed_on.items():
        np.testing.assert_array_equal(gradients[f"d{name}"], known[f"d{out}"].astype(gradients[f"d{name}"].dtype))
    if not any(map(mixing.is_expanded, given)):
        read = {name: known[name] for name in op.grad.inputs}
        declared = testing.run_reference(op.grad, read, {})
        results = [None if d is None else gradients[n] for n, d in zip(op.grad.outputs, declared, strict=True)]
        testing.check(op.grad, read, {}, tuple(results))


def test_dtypes_under_jit_and_vmap() -> None:
    function = fused(mixing.momentum)
    x, y, z = jnp.ones((3, 8), "bfloat16"), jnp.ones((3, 8)), jnp.ones((3, 8), "float16")
    for transform in (lambda f: f, jax.jit, jax.vmap):
        assert [out.dtype for out in transform(function)(x, y, z)] == ["float32", "float16"]
        assert [out.dtype for out in transform(function)(x, x, x)] == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_gradients_of_what_is_expanded_are_rounded_once(transform: Any) -> None:
    @fused
    def modulate(xp, x, scale, shift):
        return x * (1 + scale) + shift

    rng, shape = np.random.default_rng(0), (2, 2048, 16)
    x, cotangent = (jnp.asarray(rng.standard_normal(shape), "bfloat16") for _ in range(2))
    scale = jnp.asarray(rng.standard_normal((2, 1, 16)), "bfloat16")
    shift = jnp.asarray(rng.standard_normal((2, 1, 1)), "bfloat16")
    wide = np.asarray(cotangent, "float64")
    exact = (wide * np.asarray(x, "float64")).sum(1, keepdims=True), wide.sum((1, 2), keepdims=True)

    def gradients(x: Any, scale: Any, shift: Any) -> Any:
        return jax.vjp(modulate, x, scale, shift)[1](cotangent)

    for gradient, wanted in zip(transform(gradients)(x, scale, shift)[1:], exact, strict=True):
        assert gradient.dtype == "bfloat16"
        np.testing.assert_allclose(np.asarray(gradient, "float64"), wanted, rtol=2.0**-8, atol=1e-4)
    one = jax.vmap(modulate)(x[:, None], scale[:, None], shift[:, None])[:, 0]
    np.testing.assert_array_equal(one, modulate(x, scale, shift))
