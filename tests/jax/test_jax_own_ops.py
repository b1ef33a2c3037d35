"""Ops of a user's own in ``fuse``: they replace what they mean, with their gradients, as ours do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import FLOATS, Op, Tensor, fused_linear
from cute_ops_jax.fusion import Own
from tests.ops.unit_rows import unit, unit_gradient

ROWS = Tensor("*m n", "T")
X = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, 16)).astype(np.float32))
W = jnp.asarray(np.random.default_rng(4).standard_normal((8, 16)).astype(np.float32))
B = jnp.asarray(np.random.default_rng(5).standard_normal(8).astype(np.float32))


# An output that is kept for the gradient, as in docs/row_kernel.md.
SCALE = Tensor("*m", "float32", hidden=True)
COMMON: dict[str, Any] = {"dtypes": {"T": FLOATS}, "kernel": "no_module:Kernel"}
UNIT = Op(
    "own_unit", inputs={"x": ROWS}, outputs={"out": ROWS, "scale": SCALE}, reference=unit, attrs={"eps": 1e-12},
    no_gradient=("eps",), **COMMON, grad=Op(
        "own_unit_bwd", inputs={"out": ROWS, "scale": SCALE._replace(hidden=False), "dout": ROWS},
        outputs={"dx": ROWS}, reference=unit_gradient, **COMMON,
    ),
)  # fmt: skip
CUBE = Op("own_cube_jax", inputs={"x": ROWS}, outputs={"out": ROWS}, reference=lambda xp, x: x * x * x + 1, **COMMON)
TOTAL = Op(
    "own_total", inputs={"x": ROWS}, outputs={"out": Tensor("*m", "T")},
    reference=lambda xp, x: xp.sum(xp.where(x > 0, x, xp.zeros_like(x)), axis=-1), **COMMON,
)  # fmt: skip


def capped(xp: Any, acc: Any, bias: Any) -> Any:
    return 8.0 * xp.tanh((acc + bias) / 8.0)


CAPPED = Own(fused_linear(capped, operands={"bias": "n"}, name="own_capped"), capped, product=("x", "weight"))
CASES: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {
    "own_unit": (UNIT, lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6), (X,)),
    "own_cube_jax": (CUBE, lambda x: x * x * x + 1, (X,)),
    "own_total": (TOTAL, lambda x: jnp.sum(jnp.where(x > 0, x, 0), -1), (X,)),
    "own_capped": (CAPPED, lambda x, w, b: 8 * jnp.tanh((x @ w.T + b) / 8), (X, W, B)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_they_replace_what_they_mean(name: str) -> None:
    """Also those without a gradient, whose expression has one."""
    op, function, arrays = CASES[name]
    fused, every = cute_ops_jax.fuse(function, own=[op]), tuple(range(len(arrays)))

    def loss(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: jnp.sin(function(*arrays)).sum()

    report = cute_ops_jax.fuse.report(function, *arrays, own=[op])
    assert [entry.becomes for entry in report.replaced] == [name]
    assert name in str(jax.make_jaxpr(fused)(*arrays))
    expected = jax.value_and_grad(loss(function), every)(*arrays)
    for transform in (lambda f: f, jax.jit):
        found = transform(jax.value_and_grad(loss(fused), every))(*arrays)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
    rows = (0, *(None for _ in arrays[1:]))
    np.testing.assert_allclose(jax.vmap(fused, rows)(*arrays), function(*arrays), rtol=2e-5, atol=2e-5)


def test_they_come_before_ours_and_in_loops() -> None:
    def function(x: Any, w: Any) -> Any:
        x = jax.lax.scan(lambda y, _: (y * y * y + 1, None), 0.1 * x, None, length=2)[0]
        return (jnp.tanh(x @ w.T) ** 3 + 1) @ w

    own = (CUBE,)
    report = cute_ops_jax.fuse.report(function, X, W, own=own)
    assert "own_cube_jax" in [entry.becomes for entry in report.replaced]
    found, expected = cute_ops_jax.fuse(function, own=own)(X, W), function(X, W)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_what_an_op_does_not_take_stays() -> None:
    more = COMMON | {"dtypes": {"T": ("bfloat16",)}}
    narrow = Op("own_cube_narrow", inputs=CUBE.inputs, outputs=CUBE.outputs, reference=CUBE.reference, **more)
    report = cute_ops_jax.fuse.report(lambda x: x * x * x + 1, X, own=[narrow])
    assert report.replaced == [] and any("own_cube_narrow" in entry.why for entry in report)


def test_what_is_no_op_of_ones_own() -> None:
    with pytest.raises(
        TypeError, match=r"^cute_ops_jax\.fuse: an op of your own must be an Op, or Own\(op, ...\), got"
    ):
        cute_ops_jax.fuse(lambda x: x, own=["rmsnorm"])  # type: ignore[list-item]
    with pytest.raises(
        ValueError, match=r"^cute_ops_jax\.fuse: own_capped: say what follows the product: Own\(op, mea"
    ):
        cute_ops_jax.fuse.report(lambda x: x, X, own=[CAPPED._replace(meaning=None)])
