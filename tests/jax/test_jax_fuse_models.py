"""Models of flax.nnx, equinox and plain jnp run untouched through ``fuse``: what they become, and that they compute the
same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax

for library in ("equinox", "flax", "optax"):
    pytest.importorskip(library)
sys.path.append(str(Path(__file__).parent))
from fused_models import make  # noqa: E402

MODELS = make()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    function, args, becomes = MODELS[name]
    report = cute_ops_jax.fuse.report(function, *args)
    assert [entry.becomes for entry in report.replaced for _ in range(entry.times)] == becomes
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def loss(fused: bool, floats: list[Any]) -> Any:
        given = list(leaves)
        for place, array in zip(places, floats, strict=True):
            given[place] = array
        run = cute_ops_jax.fuse(function) if fused else function
        out = run(*jax.tree.unflatten(tree, given))
        return jnp.sum(jnp.sin(out)), out

    floats = [leaves[place] for place in places]
    both = (jax.jit(jax.grad(loss, 1, has_aux=True), static_argnums=0)(fused, floats) for fused in (True, False))
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        # Of keys' biases, which change no softmax, gradients are rounding alone.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * max(1, np.abs(want).max()))
