"""Attention in JAX's transforms: devices that share its heads, what a checkpoint keeps, exported programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops.ops.attention.attention import attention

ATTRS = {"causal": True, "left": 5}


def drawn(groups: int, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """q, k, v and sinks."""
    shapes = ((4, 9, 2 * groups, 32), (4, 11, groups, 32), (4, 11, groups, 16), (2 * groups,))
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]


def results_and_gradients(function: Any, *arrays: jax.Array) -> Any:
    results, pull = jax.vjp(function, *arrays)
    return results, pull(jax.tree.map(jnp.cos, results))


def assert_same(found: Any, right: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.02, atol=0.02)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("groups", [4, 2, 3], ids=["whole-groups", "one-each", "fewer-groups"])
def test_devices_share_sequences_and_groups_of_heads(
    groups: int, kind: AxisType, through_ffi: Any, fake_kernels: Any
) -> None:
    """Nothing is gathered where devices have whole groups, of heads as of keys and sinks; the gradient of sinks is
    summed over the devices that share sequences.
    """
    arrays, whole = drawn(groups), groups % 2 == 0
    mesh = jax.make_mesh((2, 2), ("data", "heads"), (kind, kind), devices=jax.devices("cpu")[:4])
    heads = jax.P("data", None, "heads" if whole else None)
    specs = [heads, heads, heads, jax.P("heads" if whole else None)]
    step = partial(results_and_gradients, partial(through_ffi(attention), **ATTRS))
    right = jax.jit(partial(results_and_gradients, partial(cute_ops_jax.attention, **ATTRS)))(*arrays)
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        compiled = jax.jit(step).lower(*given).compile()
        fake_kernels.calls.clear()
        got = jax.block_until_ready(compiled(*given))
    moved = re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())
    assert moved == ["all-reduce"]
    assert {shapes[0] for _, shapes in fake_kernels.calls} == {(2, 9, groups if whole else 2 * groups, 32)}
    assert_same(got, right)


@pytest.mark.slow
def test_a_shard_map_over_sequences_and_heads() -> None:
    arrays, spec = drawn(2), jax.P("data", None, "heads")
    mesh = jax.make_mesh((2, 2), ("data", "heads"), devices=jax.devices("cpu")[:4])
    step = partial(results_and_gradients, partial(cute_ops_jax.attention, **ATTRS))
    specs = (spec, spec, spec, jax.P("heads"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=((spec, jax.P("data", "heads")), specs))
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        found = jax.jit(mapped)(*given)
    assert_same(found, jax.jit(step)(*arrays))


@pytest.mark.slow
def test_vmap_of_gradients() -> None:
    arrays = [jnp.stack([a, a[::-1]]) for a in drawn(2)]
    step = partial(results_and_gradients, partial(cute_ops_jax.attention, **ATTRS))
    right = [step(*(a[i] for a in arrays)) for i in range(2)]
    assert_same(jax.jit(jax.vmap(step))(*arrays), jax.tree.map(lambda *x: jnp.stack(x), *right))


def kept(function: Any, *arrays: Any) -> list[tuple[int, ...]]:
    """The shapes of what a gradient keeps beside its arguments."""
    from jax._src.ad_checkpoint import saved_residuals

    return sorted(aval.shape for aval, why in saved_residuals(function, *arrays) if "argument" not in why)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "runs"), [((), 2), (("cute_attention",), 1)], ids=["nothing", "results"])
def test_a_checkpoint_that_keeps_the_results_runs_no_attention_again(names: Sequence[str], runs: int) -> None:
    """The name covers out and lse, which the gradient reads."""
    arrays = drawn(2)[:3]

    def attended(*given: jax.Array) -> jax.Array:
        return jnp.sin(cute_ops_jax.attention(*given, **ATTRS)[0]).astype(jnp.float32).sum()

    policy = jax.checkpoint_policies.save_only_these_names(*names)
    function = jax.checkpoint(attended, policy=policy)
    assert str(jax.make_jaxpr(jax.grad(function))(*arrays)).count("cute_attention[") == runs
    assert kept(function, *arrays) == ([(4, 4, 9), (4, 9, 4, 16)] if names else [])
    assert_same(jax.grad(function)(*arrays), jax.grad(attended)(*arrays))


@pytest.mark.slow
def test_an_exported_program_of_any_batch_and_length() -> None:
    """Of a call without sinks: JAX has no symbolic size for a product of two."""
    function = jax.jit(lambda *x: cute_ops_jax.attention(*x, **ATTRS))
    b, s = jax.export.symbolic_shape("b, s")
    specs = [jax.ShapeDtypeStruct((b, s, h, 32), jnp.bfloat16) for h in (4, 2, 2)]
    exported = jax.export.deserialize(jax.export.export(function)(*specs).serialize())
    for batch, length in ((1, 5), (3, 40)):
        arrays = [jax.random.normal(jax.random.key(h), (batch, length, h, 32), jnp.bfloat16) for h in (4, 2, 2)]
        assert_same(exported.call(*arrays), function(*arrays))


DRAWS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": 1}, "window": {"local_window_size": 3},
    "two-sided": {"local_window_size": (np.int64(4), 2)},
    "causal-window": {"is_causal": True, "local_window_size": (4, 2)},
    "scale": {"scale": 0.3, "return_residual": True}, "residual": {"is_causal": True, "return_residual": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("attrs", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9), (9, 5)])
def test_the_arguments_of_jax_nn(queries: int, keys: int, attrs: dict[str, Any]) -> None:
    """In 16 bits, and by jax.nn where ours does not compute it."""
    for lead in ((2,), ()):
        q, k, v = (
            jax.random.normal(jax.random.key(i), (*lead, n, h, 32), jnp.bfloat16)
            for i, (n, h) in enumerate(((queries, 4), (keys, 2), (keys, 2)))
        )
        found, right = (
            jax.jit(partial(function, **attrs))(q, k, v)
            for function in (cute_ops_jax.dot_product_attention, jax.nn.dot_product_attention)
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), right)
        assert_same(found, right)
        runs = "cute_attention" in str(jax.make_jaxpr(partial(cute_ops_jax.dot_product_attention, **attrs))(q, k, v))
        causal, window = attrs.get("is_causal"), "local_window_size" in attrs
        assert runs == (queries <= keys if causal else queries == keys or not window)


@pytest.mark.slow
def test_what_is_left_to_jax_nn() -> None:
    q = jax.random.normal(jax.random.key(0), (2, 9, 4, 32), jnp.bfloat16)
    mask, lengths = jnp.ones((2, 1, 9, 9), bool).at[:, :, :, 3].set(False), jnp.array([5, 9], jnp.int32)
    for array, given in (
        (q, {"mask": mask}), (q, {"bias": jnp.where(mask, 0, -9.0)}), (q, {"key_value_seq_lengths": lengths}),
        (q, {"implementation": "xla"}), (q.astype(jnp.float32), {}), (q[..., :20], {}),
    ):  # fmt: skip
        found = cute_ops_jax.dot_product_attention(array, array, array, **given)
        assert_same(found, jax.nn.dot_product_attention(array, array, array, **given))
        jaxpr = jax.make_jaxpr(partial(cute_ops_jax.dot_product_attention, **given))(array, array, array)
        assert "cute_attention" not in str(jaxpr)
    with pytest.raises(ValueError, match="must be a multiple"):
        cute_ops_jax.dot_product_attention(q, q[:, :, :3], q[:, :, :3])


def test_the_gradient_with_the_arguments_of_jax_nn() -> None:
    arrays = drawn(2)[:3]
    arrays[2] = arrays[1] + 1
    steps = [
        partial(results_and_gradients, partial(function, is_causal=True))
        for function in (cute_ops_jax.dot_product_attention, jax.nn.dot_product_attention)
    ]
    assert_same(*(jax.jit(step)(*arrays) for step in steps))
