"""Every function on a mesh with explicit axes, also mapped over the dim that they shard, with and without
``jax.set_mesh``: values and gradients are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from tests.jax.every_function import Function, every

FUNCTIONS = every((8, 4))
# The leading dims' axes: of the batch, of the batch and what lies in it, of rows alone, both of the batch.
SHARDED: tuple[Any, ...] = (("d",), ("d", "e"), (None, "e"), (("d", "e"),))


def forms(function: Function) -> Callable[..., dict[str, Any]]:
    """The ways to call a function that maps its rows' first dim, as one program."""
    axes = tuple(0 if rows == 2 else None for rows in function.rows)
    inner = tuple(0 if rows else None for rows in function.rows)
    mapped = jax.vmap(function.call, axes)

    def in_a_loop(*arrays: Any) -> Any:
        def body(carry: Any, given: Any) -> Any:
            return carry, mapped(*(given.get(i, a) for i, a in enumerate(arrays)))

        twice = {i: jnp.stack([a, a]) for i, (a, axis) in enumerate(zip(arrays, axes, strict=True)) if axis == 0}
        return jax.lax.scan(body, 0, twice)[1]

    def of_all(*arrays: Any) -> Any:
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in jax.tree.leaves(mapped(*arrays)))

    def program(*arrays: Any) -> dict[str, Any]:
        found = {
            "call": function.call(*arrays),
            "vmap": mapped(*arrays),
            "vmap of vmap": jax.vmap(jax.vmap(function.call, inner), axes)(*arrays),
            "scan of vmap": in_a_loop(*arrays),
        }
        if function.differentiable:
            found["grad"] = function.gradient(*arrays)
            found["vmap of grad"] = jax.vmap(function.gradient, axes)(*arrays)
            found["grad of vmap"] = jax.grad(of_all, function.differentiable)(*arrays)
        return found

    return program


def placed(function: Function, mesh: Any, axes: tuple[Any, ...]) -> list[jax.Array]:
    """The arrays, those with rows sharded as far as their sizes allow that."""

    def spec(a: Any, rows: int) -> Any:
        return jax.P(*(name if a.shape[i] % 4 == 0 else None for i, name in enumerate(axes[2 - rows :][:rows])))

    rows = zip(function.arrays, function.rows, strict=True)
    return [jax.device_put(a, NamedSharding(mesh, spec(a, count))) for a, count in rows]


def mesh_of(kind: AxisType = AxisType.Explicit) -> Any:
    return jax.make_mesh((2, 2), ("d", "e"), (kind, kind), devices=jax.devices("cpu")[:4])


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_all_forms(function: Function, request: pytest.FixtureRequest, close: Any) -> None:
    """The functions take turns at the shardings, each with and without a mesh in the context."""
    turn = FUNCTIONS.index(function)
    program, mesh = forms(function), mesh_of()
    with jax.set_mesh(mesh) if turn // 4 % 2 else nullcontext():
        got = jax.jit(program)(*placed(function, mesh, SHARDED[turn % 4]))
    close(jax.device_get(got), jax.device_get(jax.jit(program)(*function.arrays)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_eagerly_and_with_the_axis_named(kind: AxisType, close: Any) -> None:
    rmsnorm = FUNCTIONS[0]
    mesh, mapped = mesh_of(kind), jax.vmap(rmsnorm.call, (0, None, None), spmd_axis_name="d")
    with jax.set_mesh(mesh):
        given = placed(rmsnorm, mesh, ("d", None))
        for call in (rmsnorm.call, mapped, jax.jit(mapped)):
            got = call(*given)
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, jax.P("d")), 3)
            close(jax.device_get(got), jax.device_get(rmsnorm.call(*rmsnorm.arrays)))


def test_a_mapped_dim_stays_on_its_devices() -> None:
    """A loop over examples, which a weight of each needs, is one over each device's examples: nothing is gathered."""
    norm = FUNCTIONS[0]
    mesh = mesh_of()
    x, weight, bias = norm.arrays
    given = x, np.stack([weight] * 8), np.stack([bias] * 8)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(a, NamedSharding(mesh, jax.P("d"))) for a in given]
        compiled = jax.jit(jax.vmap(norm.gradient)).lower(*sharded).compile()
        assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all"))
        assert all(a.sharding.spec[0] == "d" for a in compiled(*sharded))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [None, jax.P(), jax.P("d")], ids=["unsharded", "replicated", "sharded"])
@pytest.mark.parametrize("in_context", [False, True], ids=["types", "set_mesh"])
def test_a_target_sharded_otherwise_than_the_rows(spec: Any, in_context: bool, close: Any) -> None:
    mesh = mesh_of()
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(shape, np.float32) for shape in ((8, 6), (12, 6)))
    target = np.arange(8)

    def both(hidden: Any, weight: Any, target: Any) -> Any:
        def of_logits(hidden: Any, weight: Any) -> Any:
            return cute_ops_jax.cross_entropy(hidden @ weight.T, target)

        def of_hidden(hidden: Any, weight: Any) -> Any:
            return cute_ops_jax.linear_cross_entropy(hidden, weight, target)

        return [jax.value_and_grad(loss, (0, 1))(hidden, weight) for loss in (of_logits, of_hidden)]

    put = [
        jax.device_put(hidden, NamedSharding(mesh, jax.P("d"))),
        jax.device_put(weight, NamedSharding(mesh, jax.P())),
    ]
    put.append(jnp.asarray(target) if spec is None else jax.device_put(target, NamedSharding(mesh, spec)))
    with jax.set_mesh(mesh) if in_context else nullcontext():
        got = jax.jit(both)(*put)
    close(jax.device_get(got), jax.device_get(both(hidden, weight, target)))
    logits = hidden.astype(float) @ weight.T.astype(float)
    exact = np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), target])
    for value, _ in got:
        np.testing.assert_allclose(value, exact, rtol=1e-6)
