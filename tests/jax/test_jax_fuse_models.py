"""Models of flax.nnx, equinox and plain jnp run untouched through ``fuse``: what they become, and that they compute the
same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops.testing import compare_one, limits_of

for library in ("equinox", "flax", "optax"):
    pytest.importorskip(library)
from tests.jax.drawn_graphs import QUICK  # noqa: E402
from tests.jax.fused_models import NAMES, Model, make  # noqa: E402


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    made = make()
    assert tuple(made) == NAMES
    return made


COPIES = 6  # of the floats, a little different, on which the loss of 16 bits is measured


@pytest.mark.drawn(0.15)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_models(name: str, dtype: str, models: dict[str, Model]) -> None:
    function, args, becomes, attends = models[name]
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def given(floats: list[Any]) -> Any:
        own = dict(zip(places, floats, strict=True))
        return jax.tree.unflatten(tree, [own.get(i, leaf) for i, leaf in enumerate(leaves)])

    def results(run: Any, floats: list[Any]) -> tuple[np.ndarray[Any, Any], ...]:
        def loss(floats: list[Any]) -> Any:
            out = run(*given(floats))
            return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32)))), out

        compiled = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)), compiler_options=QUICK)
        return tuple(map(np.asarray, jax.tree.leaves(compiled(floats))))

    floats = [leaves[place].astype(dtype) for place in places]
    report = cute_ops_jax.fuse.report(function, *given(floats))
    want = ["attention" if dtype == "bfloat16" and i in attends else each for i, each in enumerate(becomes)]
    assert [entry.becomes for entry in report.replaced for _ in range(entry.times)] == want
    rng = np.random.default_rng(3)
    noise = [(1 + 0.1 * rng.standard_normal((COPIES, *a.shape))).astype(dtype) for a in floats]
    many = [jnp.concatenate([a[None], a * each]) for a, each in zip(floats, noise, strict=True)]
    low, got = results(function, many), results(cute_ops_jax.fuse(function), [a[:1] for a in many])
    with jax.enable_x64(True):
        exact = results(function, [a.astype("float64") for a in many])
    each = [
        ({str(i): np.asarray(a[k]) for i, a in enumerate(many)}, tuple(a[k] for a in low), tuple(a[k] for a in exact))
        for k in range(COPIES + 1)
    ]
    for i, (a, b, tolerance) in enumerate(zip(got, each[0][2], limits_of(*each[0], each[1:]), strict=True)):
        compare_one(f"{name}, {dtype}, result {i}", a[0], b, tolerance)
