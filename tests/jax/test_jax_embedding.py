"""Embeddings: values as of ``jnp.take``, gradients against its own in float64, and sharded programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cute_ops_jax

DEVICES = 4


def take(index: Any, weight: Any) -> jax.Array:
    return jnp.take(weight, index, axis=0)


def gradient(function: Callable[..., jax.Array], index: Any, weight: Any, dout: Any) -> jax.Array:
    return jax.vjp(partial(function, index), weight)[1](dout)[0]


def problem(lead: tuple[int, ...] = (8, 6), classes: int = 7, n: int = 12, dtype: str = "float32") -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    made = [jnp.asarray(rng.standard_normal(s), dtype) for s in ((classes, n), (*lead, n))]
    return jnp.asarray(rng.integers(0, classes, lead)), *made


def test_indices_of_no_class() -> None:
    """Indices out of range behave as in ``jnp.take``."""
    index, weight, dout = problem()
    index = index.at[0, 0].set(-1).at[1, 1].set(9).at[2, 2].set(-9).at[3, 3].set(7)
    np.testing.assert_array_equal(cute_ops_jax.embedding(index, weight), take(index, weight))
    np.testing.assert_allclose(*(gradient(f, index, weight, dout) for f in (cute_ops_jax.embedding, take)), atol=1e-5)


@pytest.mark.slow
def test_transforms() -> None:
    index, weight, dout = problem()
    weights = jnp.stack([weight * k for k in range(8)])
    for axes in ((0, None, 0), (0, 0, 0), (None, 0, None)):
        given = (
            index if axes[0] == 0 else index[0],
            weights if axes[1] == 0 else weight,
            dout if axes[2] == 0 else dout[0],
        )
        results = [jax.jit(jax.vmap(partial(gradient, f), axes))(*given) for f in (cute_ops_jax.embedding, take)]
        np.testing.assert_allclose(*results, atol=1e-5)
        results = [jax.vmap(f, axes[:2])(*given[:2]) for f in (cute_ops_jax.embedding, take)]
        np.testing.assert_array_equal(*results)
    loss = lambda f, w: (f(index, w) ** 2).sum()  # noqa: E731
    results = [jax.grad(jax.checkpoint(partial(loss, f)))(weight) for f in (cute_ops_jax.embedding, take)]
    np.testing.assert_allclose(*results, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"^cute\.embedding: only its first derivative exists"):
        jax.grad(lambda w: jax.grad(partial(loss, cute_ops_jax.embedding))(w).sum())(weight)


@pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs four devices")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("cut", ["tokens", "columns"])
def test_devices_share(kind: str, cut: str) -> None:
    """With tokens sharded, each device computes a part of the gradient, and the parts are added up. With columns
    sharded, nothing moves.
    """
    index, weight, dout = problem()
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(getattr(AxisType, kind),))
    spread = {"tokens": (P("d"), P(), P("d")), "columns": (P(), P(None, "d"), P(None, None, "d"))}[cut]
    expected = gradient(take, index, weight, dout)
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((index, weight, dout), spread, strict=True)]
        program = jax.jit(partial(gradient, cute_ops_jax.embedding))
        np.testing.assert_allclose(program(*given), expected, atol=1e-5)
        text = program.lower(*given).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert ("all-reduce" in text) == (cut == "tokens")


@pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs four devices")
@pytest.mark.parametrize("check", [True, False])
def test_in_a_shard_map(check: bool) -> None:
    index, weight, dout = problem()

    def local(*given: Any) -> Any:
        found = gradient(cute_ops_jax.embedding, *given)
        return found if check else jax.lax.psum(found, "d")

    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P(), check_vma=check)
    np.testing.assert_allclose(jax.jit(mapped)(index, weight, dout), gradient(take, index, weight, dout), atol=1e-5)
