"""Every word at special numbers, values and gradients: as JAX's own functions have them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cute_ops_jax import fused
from tests.ops import special

TABLE = special.words(None, jax)


@pytest.mark.parametrize("name", TABLE)
def test_values_and_gradients(name: str) -> None:
    word = TABLE[name]
    arrays = [special.ROWS] if word.rows else special.pairs(len(word.operands))
    given = [jnp.asarray(a) for a in arrays]
    # XLA on a CPU takes subnormal numbers for 0.
    subnormal = special.is_subnormal(*arrays)
    subnormal = subnormal.any(-1, keepdims=True) if word.rows else subnormal

    def both(function: object) -> dict[str, np.ndarray]:
        out, pull = jax.vjp(function, *given)
        return dict(
            zip(("out", "dx", "dy", "dz"), map(np.asarray, (out, *pull(jnp.full_like(out, 1.5)))), strict=False)
        )

    found, wanted = both(fused(word.ours, name="special_in_jax")), both(lambda *a: word.jax(*a))
    for what, ours in found.items():
        wrong = special.differ(ours, wanted[what]) & ~subnormal
        if (name, what) in special.NOT_JAX:
            wrong &= ~special.NOT_JAX[name, what](*arrays)
        assert not wrong.any(), special.told(name, what, wrong, arrays if not word.rows else [], ours, wanted[what])
