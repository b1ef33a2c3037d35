"""Ops of functions in JAX: values and gradients against JAX's own, under jit and vmap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cute_ops import Case, Op, testing
from cute_ops.expressions import evaluate, trace
from cute_ops_jax import fused, linear, register
from tests.ops import epilogues, fusing, reducing

PLAIN = [*fusing.PLAIN, *reducing.PLAIN]


def function_of(declared: Op) -> Callable[..., Any]:
    return getattr(fusing, declared.name, None) or getattr(reducing, declared.name)


def plain(declared: Op) -> Callable[..., Any]:
    """The function by JAX alone."""
    expression = trace(function_of(declared), {name: t.shape for name, t in declared.inputs.items()})

    def run(*arrays: Any) -> Any:
        outputs = evaluate(expression, jnp, arrays)
        return outputs if len(outputs) > 1 else outputs[0]

    return run


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("declared", PLAIN, ids=lambda op: op.name)
def test_values_and_gradients_under_jit_and_vmap(declared: Op) -> None:
    rng, sizes = np.random.default_rng(0), {"m": (3, 2), "n": 8}
    arrays = [jnp.asarray(rng.standard_normal(t.of(sizes)), "float32") for t in declared.inputs.values()]
    stacked = [jnp.stack([a, 2 * a]) for a in arrays]

    def both(function: Callable[..., Any], *arrays: Any) -> Any:
        outputs, pull = jax.vjp(function, *arrays)
        return outputs, pull(jax.tree.map(jnp.cos, outputs))

    for given, transform in ((arrays, lambda f: f), (stacked, jax.vmap)):
        functions = (register(declared), plain(declared))
        found, wanted = (jax.jit(transform(lambda *a, f=f: both(f, *a)))(*given) for f in functions)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, wanted)


def test_a_gradient_keeps_one_sum() -> None:
    declared = next(op for op in PLAIN if op.name == "rms_beside_sum")
    x, weight = jnp.ones((3, 8)), jnp.ones(8)
    outputs, pull = jax.vjp(register(declared), x, 2 * x, weight)
    kept = [a for a in jax.tree.leaves(pull) if a.size > weight.size]
    assert len(kept) == 1 and kept[0] is outputs[1]


def test_a_decorated_function_is_called_without_a_namespace() -> None:
    @fused(operands={"x": "*m n", "weight": "n"}, name="weighted_in_jax")
    def weighted(xp, x, weight):
        """The tanh of x, weighted."""
        return xp.tanh(x) * weight

    x, weight = jnp.arange(24.0).reshape(3, 8) / 24, jnp.arange(8.0)
    np.testing.assert_allclose(jax.jit(weighted)(x, weight=weight), jnp.tanh(x) * weight, rtol=1e-6)
    assert weighted.__doc__ == "The tanh of x, weighted."


def test_rows_without_elements() -> None:
    of_nothing = jax.jit(fused(operands={"x": "*m n"}, name="of_nothing_in_jax")(reducing.of_nothing))
    np.testing.assert_array_equal(jnp.concat(of_nothing(jnp.ones((3, 0))), axis=-1), [[0, np.nan, -np.inf, np.inf]] * 3)
    assert jax.grad(lambda x: of_nothing(x)[2].sum())(jnp.ones((3, 0))).shape == (3, 0)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("declared", epilogues.OPS, ids=lambda op: op.name)
def test_products_with_epilogues(declared: Op) -> None:
    """With leading dims, under vmap over all of x's rows, and of nothing."""
    function, last = register(declared), {"n": epilogues.columns(declared, 16), "k": 8}
    for sizes in ({"m": (2, 3), **last}, {"m": (), "n": epilogues.columns(declared, 5), "k": 0}):
        given = testing.inputs(declared, Case("", sizes), "bfloat16")
        got = jax.tree.leaves(jax.jit(function)(*given.values()))
        testing.check(declared, given, declared.attrs, tuple(map(np.asarray, got)))
    arrays = [jnp.asarray(a) for a in testing.inputs(declared, Case("", {"m": (2, 3), **last}), "bfloat16").values()]
    over = tuple(0 if t.rows else None for t in declared.inputs.values())
    for mapped, whole in zip(
        jax.tree.leaves(jax.vmap(function, in_axes=over)(*arrays)), jax.tree.leaves(function(*arrays)), strict=True
    ):
        np.testing.assert_array_equal(mapped, whole)


def gelu_add(xp, acc, bias, residual=None):
    out = xp.gelu(acc + bias)
    return out if residual is None else out + residual


@pytest.mark.parametrize("residual", [None, (2, 8, 8), (8, 8), (2, 8, 1), (8,), (1, 1)], ids=str)
def test_a_function_as_epilogue_of_a_product(residual: tuple[int, ...] | None) -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 8, 16), (8, 16), (8,), *([] if residual is None else [residual])
    x, weight, bias, *others = (jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in shapes)
    acc = jnp.matmul(x, weight.T, preferred_element_type="float32")
    exact = jax.nn.gelu(acc + bias, approximate=False) + sum(others)

    def run(weight: Any, *rest: Any, **options: Any) -> Any:
        return jax.jit(lambda x, *a: linear(x, *a, epilogue=gelu_add, **options))(x, weight, *rest)

    out = run(weight, bias, *others)
    np.testing.assert_allclose(out.astype("float32"), exact, rtol=0.02, atol=0.02)
    np.testing.assert_array_equal(run(weight.T, bias, *others, transposed=True), out)
    one = jax.vmap(lambda x: linear(x, weight, bias, epilogue=gelu_add))(x)
    np.testing.assert_array_equal(one, linear(x, weight, bias, epilogue=gelu_add))


@pytest.mark.slow
def test_a_batch_of_weights() -> None:
    rng = np.random.default_rng(0)
    shapes = (2, 3, 5, 16), (2, 3, 8, 16), (3, 1, 8), (5, 8)
    arrays = [jnp.asarray(rng.standard_normal(shape), "float32") for shape in shapes]

    def plain(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return jax.nn.gelu(x @ weight.mT + bias, approximate=False) + residual

    def run(x: Any, weight: Any, *operands: Any) -> Any:
        return linear(x, weight.mT, *operands, epilogue=gelu_add, transposed=True)

    np.testing.assert_allclose(jax.jit(run)(*arrays), plain(*arrays), rtol=1e-4, atol=1e-4)
    found, exact = (jax.grad(lambda *a, f=f: jnp.cos(f(*a)).sum(), range(4))(*arrays) for f in (run, plain))
    for got, wanted in zip(found, exact, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)
    x, weight = arrays[:2]
    np.testing.assert_allclose(linear(x, weight), x @ weight.mT, rtol=1e-4, atol=1e-4)
    assert linear(x[:0], weight[:0]).shape == (0, 3, 5, 8)
    with pytest.raises(ValueError, match=r"`x` has the leading dims \[3, 5\], but `weight` \[2, 3\]"):
        linear(x[0], weight, arrays[2], epilogue=gelu_add)


@pytest.mark.parametrize("sizes", [(0, 8, 16), (3, 0, 16), (3, 8, 0)], ids=str)
def test_a_function_as_epilogue_of_a_product_of_nothing(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    out = linear(jnp.ones((m, k)), jnp.ones((n, k)), jnp.ones(n), jnp.ones((m, n)), epilogue=gelu_add)
    np.testing.assert_allclose(out, jax.nn.gelu(jnp.full((m, n), 1.0 + (k if n else 0)), False) + 1, rtol=1e-6)


def test_products_without_an_epilogue_and_calls_that_are_refused() -> None:
    x, weight = jnp.ones((3, 16), "bfloat16"), jnp.ones((8, 16), "bfloat16")
    np.testing.assert_array_equal(linear(x, weight), jnp.full((3, 8), 16, "bfloat16"))
    np.testing.assert_array_equal(linear(x, weight.T, transposed=True), linear(x, weight))
    with pytest.raises(ValueError, match=r"cute.linear: argument `bias` has shape \[7\], which does not broadcast to"):
        linear(x, weight, jnp.ones(7), epilogue=gelu_add)


# --- operands' shapes by the call ------------------------------------------------------------------------------------


@fused
def by_call(xp, x, bias, residual):
    """``out = tanh(x + bias) * residual``"""
    return xp.tanh(x + bias) * residual


def plainly(x: Any, bias: Any, residual: Any) -> Any:
    return jnp.tanh(x + bias) * residual


@fused(name="glu_in_jax")
def gated(xp, x, bias=None, *, limit=1.0):
    n = x.shape[-1] // 2
    gate, up = x[..., :n], x[..., n:]
    if bias is not None:
        gate, up = gate + bias[..., :n], up + bias[..., n:]
    return xp.clip(xp.silu(gate) * up, -limit, limit), gate


def drawn(*shapes: Any) -> list[Any]:
    """Arrays of these shapes, in bfloat16 where they are a row; numbers stay."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal(s), "bfloat16" if s == (8,) else "float32") if isinstance(s, tuple) else s
        for s in shapes
    ]


TILE = (3, 4, 8)
CALLS = [
    (TILE, (3, 4, 1), ()), (TILE, (1, 1, 8), 0.5), (2, TILE, (4, 8)), ((3, 1), (8,), (3, 8)), ((1, 8), (1, 1), (8,)),
]  # fmt: skip


def value_and_gradients(function: Callable[..., Any], *given: Any) -> Any:
    """For the cosine of the output as cotangent; of numbers there is no gradient."""
    places = [i for i, a in enumerate(given) if isinstance(a, jax.Array)]

    def run(*arrays: Any) -> Any:
        filled = dict(enumerate(given)) | dict(zip(places, arrays, strict=True))
        return function(*filled.values())

    out, pull = jax.vjp(run, *(given[i] for i in places))
    return out, pull(jnp.cos(out).astype(out.dtype))


def close(found: Any, exact: Any) -> None:
    for a, wanted in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        limit = 2e-6 if a.dtype == "float32" else 2.0**-7
        np.testing.assert_allclose(a.astype("float32"), wanted, rtol=limit, atol=limit * 4)


@pytest.mark.parametrize("shapes", CALLS, ids=str)
def test_calls_broadcast_as_those_of_jax(shapes: tuple[Any, ...]) -> None:
    given = drawn(*shapes)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, "float64") if isinstance(a, jax.Array) else a for a in given]
        exact = jax.tree.map(np.asarray, value_and_gradients(plainly, *wide))
    close(value_and_gradients(by_call, *given), exact)
    # A number is an array under jit.
    np.testing.assert_allclose(jax.jit(by_call)(*given), exact[0], rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_tiles_that_are_all_expanded_and_have_several_dtypes() -> None:
    x, y = (a.astype(dtype) for a, dtype in zip(drawn((3, 1, 8), (1, 4, 8)), ("float32", "bfloat16"), strict=True))
    exact = value_and_gradients(plainly, x, 0.5, y.astype("float32"))
    found = value_and_gradients(by_call, x, 0.5, y)
    assert [a.dtype for a in jax.tree.leaves(found)] == ["float32", "float32", "bfloat16"]
    close(found, exact)


@pytest.mark.slow
def test_calls_under_vmap_and_shard_map() -> None:
    x, row, column = drawn((4, 3, 8), (8,), (4, 3, 1))
    exact = value_and_gradients(plainly, x, row.astype("float32"), column)
    for given, axes in (((x, row, column), (0, None, 0)), ((x, row, 0.5), (0, None, None))):
        np.testing.assert_allclose(jax.vmap(by_call, axes)(*given), plainly(*given), rtol=2e-6, atol=2e-6)
    mesh = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    rows = jax.P("rows")
    mapped = jax.shard_map(by_call, mesh=mesh, in_specs=(rows, jax.P(), rows), out_specs=rows)
    close(jax.jit(lambda *given: value_and_gradients(mapped, *given))(x, row, column), exact)


def test_calls_with_halves_and_attributes() -> None:
    x, bias = drawn((3, 16), (16,))
    out, gate = jax.jit(gated, static_argnames="limit")(x, bias, limit=0.5)
    np.testing.assert_allclose(gate, x[..., :8] + bias[:8], rtol=1e-6)
    np.testing.assert_allclose(out, (jax.nn.silu(gate) * (x + bias)[..., 8:]).clip(-0.5, 0.5), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(gated(np.asarray(x))[1], x[..., :8])
    assert gated.by_call.op("2t_", (("limit", 1.0),)).name.startswith("glu_in_jax_2t__")
    assert (by_call.__doc__, by_call.__module__) == ("``out = tanh(x + bias) * residual``", __name__)
    assert str(inspect.signature(gated)) == "(x, bias=None, *, limit=1.0)"
    with pytest.raises(TypeError, match="attribute `limit` is a kernel's constant: give a number or text, not "):
        jax.jit(gated)(x, bias, limit=0.5)


def test_calls_in_exported_programs() -> None:
    _, row = drawn((3, 8), (8,))
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("m, 8"), "float32")
    exported = jax.export.export(jax.jit(lambda x, row: by_call(x, row, x)))(rows, row)
    np.testing.assert_array_equal(
        exported.call(jnp.ones((5, 8)), row), by_call(jnp.ones((5, 8)), row, jnp.ones((5, 8)))
    )


def test_calls_that_are_refused() -> None:
    x = jnp.ones((3, 8))
    with pytest.raises(ValueError, match=r"cute.by_call: argument `bias` has shape \[7\], which does not broadcast"):
        by_call(x, jnp.ones(7), x)
    with pytest.raises(TypeError, match="argument `residual` has dtype int16, expected int32, int64 or uint8"):
        by_call(x, 1.0, x.astype("int16"))
    with pytest.raises(TypeError, match="argument `bias` must be an array, a number or None, got list"):
        by_call(x, [1.0], x)
