"""Epilogues whose reductions depend on each other, in JAX: values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cute_ops_jax import linear
from tests.ops import late

ROW = {"axis": -1, "keepdims": True}


def layer_norm(acc: Any, weight: Any, bias: Any) -> Any:
    return jax.nn.standardize(acc, epsilon=1e-5) * weight + bias, acc


EXACT = {
    late.softmax: lambda acc, bias: jax.nn.softmax(acc + bias), late.layer_norm: layer_norm,
    late.log_sum_exp: lambda acc: jax.nn.logsumexp(acc, **ROW), late.total: lambda acc: acc.sum(**ROW),
}  # fmt: skip


@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("function", EXACT, ids=lambda function: function.__name__)
def test_values_and_gradients(function: Any, fused: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (6, 32), (24, 32), *[(24,)] * len(late.OPERANDS[function])
    given = [jnp.asarray(rng.standard_normal(shape) / (4 if shape == (24, 32) else 1), "float32") for shape in shapes]

    def both(call: Any) -> Any:
        outputs, pull = jax.vjp(call, *given)
        return outputs, pull(jax.tree.map(jnp.cos, outputs))

    found = jax.jit(lambda: both(lambda *a: linear(*a, epilogue=function, fused=fused)))()
    exact = both(lambda x, w, *a: EXACT[function](jnp.matmul(x, w.T, precision="highest"), *a))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, exact)
    assert jax.tree.leaves(linear(*(a.astype("bfloat16") for a in given), epilogue=function))[0].dtype == (
        "float32" if function in (late.log_sum_exp, late.total) else "bfloat16"
    )
    with pytest.raises(ValueError, match="no kernel computes a product and such reductions of its rows"):
        linear(*given, epilogue=function, fused="always")
