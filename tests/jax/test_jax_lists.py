"""Ops with lists of arrays as functions of JAX."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import cute_ops_jax
from cute_ops_jax import exporting
from tests.ops import listing

FORWARDS = listing.add_n, listing.scale_all, listing.concatenate
add_n, scale_all, concatenate = (cute_ops_jax.register(op) for op in FORWARDS)


def arrays(*rows: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((r, 8), np.float32)) for r in rows]


def close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_signatures_have_lists() -> None:
    assert str(inspect.signature(scale_all)) == (
        "(xs: 'Sequence[ArrayLike]', factors: 'ArrayLike', alpha: 'float' = 1.0) -> 'list[Array]'"
    )


def test_an_export_for_any_number_of_rows(through_ffi: Any, fake_kernels: Any) -> None:
    """Each array's own, in the lowering for CUDA with the reference as the kernel."""
    sizes = jax.export.symbolic_shape("a, b, c")
    xs = [jax.ShapeDtypeStruct((rows, 8), jnp.float32) for rows in sizes]
    call = through_ffi(listing.concatenate.unrolled({"k": 3}))
    data, _ = exporting._serialized(lambda xs: jnp.sin(call(*xs)), ["cpu"], 0, (xs,), {})
    program = jax.export.deserialize(bytearray(data)).call
    for rows in ((1, 5, 3), (4, 4, 4)):
        close(program(arrays(*rows)), jnp.sin(jnp.concatenate(arrays(*rows))))
    assert len({symbol for symbol, _ in fake_kernels.calls}) == 1


def test_rows_stay_on_their_devices() -> None:
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu"))
    xs = [jax.device_put(x, NamedSharding(mesh, jax.P("x"))) for x in arrays(8, 8)]
    compiled = jax.jit(add_n).lower(xs).compile()
    assert "all-" not in compiled.as_text()
    found = compiled(xs)
    assert found.sharding.is_equivalent_to(xs[0].sharding, 2)  # whose spec may name the other dim, too
    close(found, xs[0] + xs[1])
