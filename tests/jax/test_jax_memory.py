"""Operands whose declarations say which dim is contiguous: transposed in the program, they go in as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops.ops.gemm.linear import linear
from tests.ops import layouts


def operands(*lead: int) -> tuple[jax.Array, ...]:
    """x, the weight transposed, and a bias."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((*lead, 8), (4, 8), (4,)))


def plain(x: Any, w: Any, bias: Any) -> Any:
    return x @ w + bias


def orders(fake_kernels: Any, op: str) -> list[tuple[int, ...]]:
    variant = next(v for v in fake_kernels.variants if v.op == op)
    return [key.order for key in variant.args if key]


@pytest.mark.parametrize("turned", [False, True])
def test_transposed_operands_are_no_copies(turned: bool, through_ffi: Any, fake_kernels: Any, close: Any) -> None:
    function = through_ffi(layouts.by_columns)
    x, wt, bias = operands(6)

    def call(x: Any, wt: Any, bias: Any) -> Any:
        return function(x.T if turned else x, wt.T, bias)

    given = (jnp.asarray(np.asarray(x).T) if turned else x, wt, bias)
    program = jax.jit(call).lower(*given).compile()
    assert not any(word in program.as_text() for word in (" transpose(", " copy(", " fusion("))
    close(program(*given), plain(x, wt.T, bias))
    assert orders(fake_kernels, "by_columns") == [(1, 0) if turned else (), (1, 0), (), ()]


def test_what_is_not_transposed_is_laid_out(through_ffi: Any, fake_kernels: Any, close: Any) -> None:
    """The kernel that wants columns gets them from any array; the one that takes both takes what there is."""
    function = through_ffi(layouts.by_columns)
    x, wt, bias = operands(2, 3)
    w = jnp.asarray(np.asarray(wt).T)
    close(jax.jit(function)(x, w, bias), plain(x, w, bias))
    close(function(x, w, bias), plain(x, w, bias))
    # A leading dim that is not the last one is none that a kernel takes.
    moved = jnp.asarray(np.moveaxis(np.asarray(x), 0, -1))
    close(jax.jit(lambda y: function(jnp.moveaxis(y, -1, 0), w, bias))(moved), plain(x, w, bias))
    columns = jnp.asarray(np.moveaxis(np.asarray(x), -1, 0))
    close(jax.jit(lambda y: function(jnp.moveaxis(y, 0, -1), w, bias))(columns), plain(x, w, bias))
    assert {v.args[0].order for v in fake_kernels.variants} == {(), (1, 0)}


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "eager": lambda function: function,
    "checkpoint": jax.checkpoint,
    "vmap": lambda function: lambda x, wt, b: jax.vmap(function, (0, None, None))(x[:, None], wt, b)[:, 0],
    "scan": lambda function: lambda x, wt, b: jax.lax.scan(lambda c, row: (c, function(row, wt, b)), 0, x)[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients(transform: str, through_ffi: Any, fake_kernels: Any, close: Any) -> None:
    function = through_ffi(layouts.by_columns)
    fake_kernels.ops["by_columns_bwd"] = layouts.by_columns.grad
    given = operands(6)

    def gradients(call: Callable[..., Any]) -> Any:
        wrapped = TRANSFORMS[transform](lambda x, wt, bias: call(x, wt.T, bias))
        return jax.grad(lambda *args: jnp.sum(jnp.sin(wrapped(*args))), (0, 1, 2))(*given)

    close(gradients(function), gradients(plain))


def test_weight_of_a_product_by_its_transpose(through_ffi: Any, fake_kernels: Any) -> None:
    x, weight = jnp.ones((3, 5, 8), jnp.bfloat16), jnp.ones((8, 16), jnp.bfloat16)
    function = through_ffi(linear)
    program = jax.jit(lambda x, weight: function(x, weight.T)).lower(x, weight).compile()
    assert " transpose(" not in program.as_text() and " copy(" not in program.as_text()
    np.testing.assert_array_equal(program(x, weight), x @ weight)


def test_rows_that_are_not_aligned(fake_kernels: Any) -> None:
    function = cute_ops_jax.register(layouts.aligned)
    assert jax.jit(function)(jnp.ones((4, 8)), jnp.ones((4, 8))).shape == (4, 8)
    for platform in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="`x` has a stride of 9 elements, expected a multiple of 4: pad its rows"):
            jax.jit(function).trace(jnp.ones((4, 9)), jnp.ones((4, 9))).lower(lowering_platforms=(platform,))
