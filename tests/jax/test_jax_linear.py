"""Products with epilogues in JAX: gradients against the reference's, under jit, vmap, scan and checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import Case, Op, testing
from cute_ops.ops import PRODUCTS
from cute_ops.ops.gemm.accumulate import linear_dweight_add
from cute_ops.ops.gemm.linear import DOUT, X, linear, linear_float32
from cute_ops_jax import register
from tests.ops.epilogues import DIFFERENTIABLE, columns
from tests.ops.epilogues import OPS as EPILOGUES

ALL = [*DIFFERENTIABLE, *PRODUCTS, linear, linear_float32]
BY_NAME = {op.name: op for op in ALL}
every_gradient = pytest.mark.parametrize("product", ALL, ids=lambda op: op.name)


def arrays_of(op: Op, m: tuple[int, ...] = (2, 3), n: int = 16, k: int = 8) -> list[jax.Array]:
    given = testing.inputs(op, Case("", {"m": m, "n": columns(op, n), "k": k}), "float16")
    return [jnp.asarray(a) for a in given.values() if a is not None]


def loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*arrays: Any) -> Any:
        outputs = jax.tree.leaves(function(*arrays))
        return sum((out.astype("float32") * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() for out in outputs)

    return loss


@partial(jax.jit, static_argnums=0)
def gradients(function: Callable[..., Any], arrays: list[jax.Array]) -> Any:
    """Jitted, since eagerly every primitive is a program that XLA compiles."""
    return jax.grad(loss_of(function), tuple(range(len(arrays))))(*arrays)


def wide(arrays: list[jax.Array]) -> list[Any]:
    """In float32, by NumPy: each shape of a cast would be a program that XLA compiles."""
    return [np.asarray(a, "float32") for a in arrays]


@cache
def reference_of(op: Op) -> Callable[..., Any]:
    """One function for each op, so that its gradient is compiled once for arrays of one shape."""
    return lambda *a: op.reference(jnp, *a, **op.attrs)


def exact(op: Op, arrays: list[jax.Array]) -> Any:
    """The gradients of the reference by JAX, in float32."""
    return gradients(reference_of(op), wide(arrays))


def check(found: Any, wanted: Any) -> None:
    """Within what rounding to float16 loses, of sums of like size."""
    for got, gradient in zip(found, wide(wanted), strict=True):
        limit = 2.0**-8 * np.abs(gradient).max(initial=1)
        np.testing.assert_allclose(np.float32(got), gradient, rtol=2.0**-8, atol=limit)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("product", "m"),
    [*((op, (2, 3)) for op in ALL), *((BY_NAME[name], ()) for name in ("linear", "multiplied", "with_residual"))],
    ids=lambda given: getattr(given, "name", None) or str(given),
)
def test_gradients(product: Op, m: tuple[int, ...]) -> None:
    function, arrays = register(product), arrays_of(product, m)
    wanted = exact(product, arrays)
    transformed = (function, jax.jit(function), jax.checkpoint(function))
    for found in jax.jit(lambda *a: [gradients(each, a) for each in transformed])(*arrays):
        assert [g.dtype for g in found] == ["float16"] * len(arrays)
        check(found, wanted)


@every_gradient
def test_gradients_of_nothing(product: Op) -> None:
    for sizes in ({"m": (0, 3)}, {"k": 0}):
        arrays = arrays_of(product, **sizes)
        found = jax.eval_shape(partial(gradients, register(product)), arrays)
        assert [g.shape for g in found] == [a.shape for a in arrays]


@pytest.mark.drawn(0.4)
@every_gradient
def test_gradients_under_vmap(product: Op) -> None:
    function, arrays = register(product), arrays_of(product)
    stacked = [np.stack([a, np.asarray(a) / 2]) for a in arrays]
    each = jax.vmap(lambda *a: gradients(function, a))
    found = jax.jit(each)(*stacked)
    for i in range(2):
        check([np.asarray(g)[i] for g in found], exact(product, [a[i] for a in stacked]))
    # No op runs for each example, but what reduces rows or groups.
    assert (" scan[" in str(jax.make_jaxpr(each)(*stacked))) == (product.batched is None)


@pytest.mark.parametrize(
    ("wanted", "ops"),
    [
        ("x", "multiplied_saving multiplied_bwd_only_dacc linear_kn_of_dacc_dx"),
        ("weight", "multiplied_saving multiplied_bwd_only_dacc linear_kn_of_dacc_dweight"),
        ("other", "multiplied_saving multiplied_bwd_only_dother"),
        ("bias", "multiplied_saving multiplied_bwd_only_dbias"),
    ],
)
def test_only_what_is_wanted_is_in_the_program(wanted: str, ops: str) -> None:
    op = BY_NAME["multiplied"]
    place, arrays = list(op.inputs).index(wanted), arrays_of(op)
    program = str(jax.make_jaxpr(jax.grad(loss_of(register(op)), place))(*arrays))
    assert [name for name in re.findall(r"= cute_(\w+)\[", program) if not name.endswith("_inputs")] == ops.split()


def test_a_residual_gets_the_cotangent_itself() -> None:
    op = BY_NAME["with_residual"]
    x, weight, residual = arrays_of(op)
    for dtype in ("float16", "float32"):
        out, pull = jax.vjp(lambda r: register(op)(x, weight, r), residual.astype(dtype))
        (gradient,) = pull(jnp.cos(out))
        assert gradient.dtype == dtype
        np.testing.assert_array_equal(gradient, jnp.cos(out).astype(dtype))


def test_in_a_scan() -> None:
    op = BY_NAME["with_residual"]
    x, weight, residual = arrays_of(op, n=8, k=8)

    def layers(weights: Any, product: Callable[..., Any]) -> Any:
        return jax.lax.scan(lambda h, w: (product(h, w, residual).astype(h.dtype), None), x, weights)[0].sum()

    weights = jnp.stack([weight / 8, weight / 9])
    found = jax.jit(jax.grad(lambda w: layers(w, register(op))))(weights)
    wanted = jax.grad(lambda w: layers(w, lambda *a: op.reference(jnp, *a)[0]))(weights)
    check([found], [wanted])


@pytest.mark.drawn(0.4)
@every_gradient
def test_both_choices_give_the_same(product: Op) -> None:
    arrays = arrays_of(product)
    given, wanted = [jnp.asarray(a) for a in wide(arrays)], exact(product, arrays)
    auto, never = (partial(register(product), fused=choice) for choice in ("auto", "never"))
    one, other, in_float16, *in_float32 = jax.jit(  # a single program, since compiling takes longest
        lambda a, g: [auto(*a), never(*a), gradients(never, a), gradients(auto, g), gradients(never, g)]
    )(arrays, given)
    check(*map(jax.tree.leaves, (other, one)))
    check(in_float16, wanted)
    # A cotangent has the dtype of its output.
    close = 2.0**-8 if any(t.dtype == "bfloat16" for t in product.outputs.values()) else 1e-5
    for found in in_float32:
        for got, gradient in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, gradient, rtol=close, atol=close)


@pytest.mark.parametrize(
    ("rows", "dtype", "fused", "dots", "kernels"),
    [
        (512, "bfloat16", "auto", 0, ["with_gelu"]),
        (16, "bfloat16", "always", 0, ["with_gelu"]),
        (65536, "bfloat16", "never", 1, ["with_gelu_epilogue"]),
        (512, "bfloat16", "never", 1, []),  # XLA fuses what comes after its product
        (512, "float32", "auto", 1, []),
    ],
)
def test_what_runs_on_a_gpu(
    rows: int, dtype: str, fused: str, dots: int, kernels: list[str], fake_kernels: Any
) -> None:
    op = BY_NAME["with_gelu"]
    arrays = [jax.ShapeDtypeStruct(t.of({"m": (rows,), "n": 64, "k": 64}), dtype) for t in op.inputs.values()]
    traced = jax.jit(partial(register(op), fused=fused)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == dots
    assert re.findall(r"@cute_(\w+)_[0-9a-f]{24}\(", text) == kernels


def test_what_runs_on_a_gpu_of_a_gradient_with_groups(fake_kernels: Any) -> None:
    op = next(op for op in EPILOGUES if op.name == "with_qk_norm")
    given = testing.specs(op, Case("", {"m": (8192,), "n": 4096, "k": 4096}), "bfloat16")
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given.values() if a is not None]
    traced = jax.jit(jax.grad(loss_of(register(op)))).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    called = re.findall(r"@cute_(\w+)_[0-9a-f]{24}\(", text)
    assert called == ["with_qk_norm_saving", "with_qk_norm_bwd_only_dacc", "linear_of_dacc_dx"]


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gated_mlp(save: str, transposed: bool) -> None:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape) / 4, "bfloat16") for shape in ((2, 3, 24), (2 * 33, 24), (20, 33))]

    def run(x: Any, *weights: Any) -> Any:
        given = [w.T if transposed else w for w in weights]
        return cute_ops_jax.gated_mlp(x, *given, save=save, transposed=transposed)

    def plain(x: Any, w_gate_up: Any, w_down: Any) -> Any:
        gate, up = jnp.split(x @ w_gate_up.T, 2, -1)
        return (jax.nn.silu(gate) * up) @ w_down.T

    def summed(function: Any) -> Any:
        return lambda *given: (function(*given).astype("float32") * jnp.cos(jnp.arange(20))).sum()

    wide = [a.astype("float32") for a in arrays]
    for wanted in ((0, 1, 2), (0,), (1,), (2,)):
        found, exact = jax.jit(jax.grad(summed(run), wanted))(*arrays), jax.grad(summed(plain), wanted)(*wide)
        for got, gradient in zip(found, exact, strict=True):
            np.testing.assert_allclose(got.astype("float32"), gradient, rtol=0.03, atol=0.03 * np.abs(gradient).max())
    each = jax.vmap(run, (0, None, None))(*arrays)
    np.testing.assert_array_equal(each, run(*arrays))


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu2", "quick_gelu"])
def test_mlp(activation: str, biased: bool, save: str) -> None:
    rng, shapes = np.random.default_rng(0), ((2, 3, 24), (33, 24), (33,), (20, 33), (20,))
    arrays = [jnp.asarray(rng.standard_normal(s) / 4, "float32" if len(s) == 1 else "bfloat16") for s in shapes]
    exact = {
        "gelu_tanh": jax.nn.gelu, "relu2": lambda x: jax.nn.relu(x) ** 2,
        "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    }[activation]  # fmt: skip
    wanted = (0, 1, 2, 3, 4) if biased else (0, 1, 3)

    def run(x: Any, w_up: Any, b_up: Any, w_down: Any, b_down: Any, transposed: bool = False) -> Any:
        weights = (w_up.T, w_down.T) if transposed else (w_up, w_down)
        biases = (b_up, b_down) if biased else (None, None)
        options: dict[str, Any] = {"save": save, "transposed": transposed}
        return cute_ops_jax.mlp(x, weights[0], biases[0], weights[1], biases[1], activation, **options)

    def plain(x: Any, w_up: Any, b_up: Any, w_down: Any, b_down: Any) -> Any:
        b_up, b_down = (b_up, b_down) if biased else (0, 0)
        return exact(x @ w_up.T + b_up) @ w_down.T + b_down

    def summed(function: Any) -> Any:
        return lambda *given: (function(*given).astype("float32") * jnp.cos(jnp.arange(20))).sum()

    right = jax.grad(summed(plain), wanted)(*(a.astype("float32") for a in arrays))
    for transposed in (False, True):
        found = jax.jit(jax.grad(summed(partial(run, transposed=transposed)), wanted))(*arrays)
        for got, gradient, k in zip(found, right, wanted, strict=True):
            assert got.dtype == arrays[k].dtype
            np.testing.assert_allclose(got.astype("float32"), gradient, rtol=0.03, atol=0.03 * np.abs(gradient).max())
    each = jax.vmap(run, (0, None, None, None, None))(*arrays)
    np.testing.assert_array_equal(each, run(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("save", "transposed"), [("pre", False), ("none", True)])
def test_a_batch_of_mlps_runs_once(save: str, transposed: bool) -> None:
    rng, shapes = np.random.default_rng(0), ((24, 33), (33, 20)) if transposed else ((33, 24), (20, 33))
    given = ((3, 24), shapes[0], (33,), shapes[1], (20,))
    arrays = [jnp.asarray(rng.standard_normal((2, *shape)) / 4, "float32") for shape in given]

    def summed(*given: Any) -> Any:
        return jnp.sin(cute_ops_jax.mlp(*given, save=save, transposed=transposed)).sum()

    every = (0, 1, 2, 3, 4)
    one = jax.jit(jax.grad(summed, every))
    each = [jnp.stack(pair) for pair in zip(*(one(*(a[i] for a in arrays)) for i in range(2)), strict=True)]
    for mapped in (jax.vmap(one), jax.grad(summed, every)):
        assert " scan[" not in str(jax.make_jaxpr(mapped)(*arrays))
        for got, gradient in zip(jax.jit(mapped)(*arrays), each, strict=True):
            np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("save", "transposed"), [("pre", False), ("none", True)])
def test_a_batch_of_gated_mlps_runs_once(save: str, transposed: bool) -> None:
    rng, shapes = np.random.default_rng(0), ((24, 66), (33, 20)) if transposed else ((66, 24), (20, 33))
    arrays = [jnp.asarray(rng.standard_normal((2, *shape)) / 4, "float32") for shape in ((3, 24), *shapes)]

    def summed(*given: Any) -> Any:
        return jnp.sin(cute_ops_jax.gated_mlp(*given, save=save, transposed=transposed)).sum()

    one = jax.jit(jax.grad(summed, (0, 1, 2)))
    each = [jnp.stack(pair) for pair in zip(*(one(*(a[i] for a in arrays)) for i in range(2)), strict=True)]
    for mapped in (jax.vmap(one), jax.grad(summed, (0, 1, 2))):
        assert " scan[" not in str(jax.make_jaxpr(mapped)(*arrays))
        for got, gradient in zip(jax.jit(mapped)(*arrays), each, strict=True):
            np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axes", [(0, None, 0, 0), (0, 0, 0, 0), (None, None, 0, 0)], ids=str)
@pytest.mark.parametrize("halves", [False, True])
def test_vmap_of_rmsnorm_linear_over_weights(halves: bool, axes: tuple[Any, ...]) -> None:
    """Products run once for all examples, forward and backward; a gradient of the norm's weight is one for each."""

    def swiglu(xp, acc, bias):
        n = acc.shape[-1] // 2
        return xp.silu(acc[..., :n] + bias[..., :n]) * (acc[..., n:] + bias[..., n:])

    rng, shapes = np.random.default_rng(0), ((3, 5, 8), (3, 8), (3, 2, 6, 8) if halves else (3, 12, 8), (3, 12))
    options: dict[str, Any] = {"epilogue": swiglu, "packed": True, "halves": True} if halves else {"epilogue": "gelu"}
    given = [jnp.asarray(rng.standard_normal(shape), "float32") / 2 for shape in shapes]
    given = [a if axis == 0 else a[0] for a, axis in zip(given, axes, strict=True)]

    def total(*each: Any) -> Any:
        out = cute_ops_jax.rmsnorm_linear(*each, **options)
        return jnp.sin(out).sum(), out

    run = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)
    mapped = jax.vmap(run, axes)
    program = str(jax.make_jaxpr(mapped)(*given))
    products = [name for name in re.findall(r"= (cute_\w+)", program) if "linear" in name]
    assert len(set(products)) == len(products) and sum("batched" in name for name in products) >= 3
    (_, out), found = jax.jit(mapped)(*given)
    one = jax.jit(run)
    each = [one(*(a if axis is None else a[i] for a, axis in zip(given, axes, strict=True))) for i in range(3)]
    np.testing.assert_allclose(out, np.stack([out for (_, out), _ in each]), rtol=1e-5, atol=1e-5)
    for got, gradients in zip(found, zip(*(g for _, g in each), strict=True), strict=True):
        np.testing.assert_allclose(got, np.stack(gradients), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", ["auto", "never"])
def test_adding_to_a_total(fused: str) -> None:
    add = partial(register(linear_dweight_add), fused=fused)
    dout, x, total = (jnp.cos(jnp.arange(size * 8.0)).reshape(-1, 8) for size in (6, 6, 8))
    half = [a.astype("float16") for a in (dout, x)]
    step = jax.jit(lambda total: jax.lax.fori_loop(0, 3, lambda _, t: add(*half, t), total), donate_argnums=0)
    wanted = total + 3 * half[0].astype("float32").T @ half[1].astype("float32")
    np.testing.assert_allclose(step(total), wanted, rtol=1e-5, atol=1e-5)


def test_adding_to_the_totals_of_a_batch() -> None:
    """One op, also where the total is shared: each example has its own then."""
    add, rng = register(linear_dweight_add), np.random.default_rng(0)
    dout, x = (jnp.asarray(rng.standard_normal(shape), "float16") for shape in ((3, 2, 5, 16), (2, 5, 3, 8)))
    for total, axis in ((jnp.ones((16, 3, 8)), 1), (jnp.ones((16, 8)), None)):
        each = jax.vmap(add, (0, 2, axis))
        assert "cute_linear_dweight_add_batched" in (text := str(jax.make_jaxpr(each)(dout, x, total)))
        assert " scan[" not in text
        exact = 1 + jnp.einsum("bijn,ijbk->bnk", dout.astype("float32"), x.astype("float32"))
        np.testing.assert_allclose(each(dout, x, total), exact, rtol=1e-4, atol=1e-4)


def test_adding_takes_the_memory_of_the_total(fake_kernels: Any) -> None:
    shapes = [jax.ShapeDtypeStruct(t.of({"m": (512,), "n": 64, "k": 64}), "bfloat16") for t in (DOUT, X)]
    total = jax.ShapeDtypeStruct((64, 64), "float32")
    text = jax.jit(register(linear_dweight_add)).trace(*shapes, total).lower(lowering_platforms=("cuda",)).as_text()
    assert "output_operand_alias" in text and "stablehlo.dot_general" not in text


def lowered(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    return jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def test_a_batch_of_weights_is_one_call(fake_kernels: Any) -> None:
    one = partial(register(linear), fused="always")
    for function, x in ((jax.vmap(one), (3, 2, 512, 64)), (jax.vmap(one, (None, 0)), (2, 512, 64))):
        text = lowered(function, x, (3, 128, 64))
        assert text.count("stablehlo.custom_call @cute_linear_batched") == 1
        assert "stablehlo.while" not in text and "stablehlo.dot_general" not in text


def test_what_a_transformer_does_next() -> None:
    """As PyTorch's functions, and in a jitted gradient."""
    generator = np.random.default_rng(0)
    x, weight = generator.standard_normal((2, 5, 24)), generator.standard_normal((4 * 64, 24))
    residual, angles = generator.standard_normal((2, 5, 4 * 64)), generator.uniform(size=(5, 32))
    arrays = [jnp.asarray(a, "float32") for a in (x, weight, np.cos(angles), np.sin(angles))]
    rotated = jax.jit(cute_ops_jax.qkv_rope, static_argnums=4)(*arrays, 3)
    product = (x @ weight.T).reshape(2, 5, 4, 64)
    first, second = np.split(product[..., :3, :], 2, -1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    product[..., :3, :] = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    np.testing.assert_allclose(rotated, product.reshape(2, 5, 256), rtol=1e-5, atol=1e-4)

    given = [jnp.asarray(a, "float32") for a in (x, weight, residual, np.ones(256))]
    out, total = cute_ops_jax.linear_add_rmsnorm(*given, 1e-5)
    exact = x @ weight.T + residual
    np.testing.assert_allclose(total, exact, rtol=1e-5, atol=1e-4)
    normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, normed, rtol=1e-4, atol=1e-4)
    gradient = jax.jit(jax.grad(lambda x: cute_ops_jax.linear_add_rmsnorm(x, *given[1:], 1e-5)[1].sum()))(given[0])
    np.testing.assert_allclose(gradient, np.broadcast_to(weight.sum(0), x.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("epilogue", "biased", "weighted", "transposed"),
    [
        ("gelu", True, True, False),
        ("bias", False, False, False),
        (lambda xp, acc, b: xp.tanh(acc + b), True, True, True),
    ],
)
def test_rmsnorm_linear(epilogue: str, biased: bool, weighted: bool, transposed: bool) -> None:
    """Jitted, with gradients."""
    generator = np.random.default_rng(0)
    given = [generator.standard_normal(shape) for shape in ((2, 3, 32), (32,), (24, 32), (24,))]
    arrays = [jnp.asarray(a, "float32") for a in given]

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def summed(x: Any, norm_weight: Any, weight: Any, bias: Any) -> Any:
            out = function(x, norm_weight if weighted else None, weight, bias if biased else None)
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

        return jax.jit(jax.grad(summed, (0, 1, 2, 3), has_aux=True))

    def plain(x: Any, norm_weight: Any, weight: Any, bias: Any) -> Any:
        normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        acc = (normed if norm_weight is None else normed * norm_weight) @ weight.T
        acc = acc if bias is None else acc + bias
        if epilogue == "gelu":
            return jax.nn.gelu(acc, approximate=False)
        return acc if epilogue == "bias" else jnp.tanh(acc)

    def function(x: Any, norm_weight: Any, weight: Any, bias: Any) -> Any:
        options = {"epilogue": epilogue, "transposed": transposed}
        return cute_ops_jax.rmsnorm_linear(x, norm_weight, weight.T if transposed else weight, bias, **options)

    for got, wanted in zip(*map(jax.tree.leaves, (of(function)(*arrays), of(plain)(*arrays))), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("arch", "rows"), [("sm_90a", 8192), ("sm_90a", 64), ("sm_80", 8200)])
def test_the_next_norm_is_fused_where_that_gains(arch: str, rows: int, fake_kernels: Any, monkeypatch: Any) -> None:
    """On Hopper, of many elements."""
    monkeypatch.setenv("CUTE_OPS_ARCH", arch)
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, 64), (256, 64), (rows, 256), (256,))]
    text = jax.jit(cute_ops_jax.linear_add_rmsnorm).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    fused = arch == "sm_90a" and rows == 8192
    assert ("linear_add_rstd" in text) == ("scaled_rows" in text) == fused
    assert ("cute_add_rmsnorm" in text) != fused


def test_programs_leave_float32_to_xla(fake_kernels: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No kernel multiplies it, and the log says so."""
    caplog.set_level("DEBUG", "cute_ops")
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 64), (256, 64), (64, 128))]
    text = jax.jit(cute_ops_jax.gated_mlp).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.dot_general") == 2
    said = [m for m in caplog.messages if m.endswith("runs by the framework's product: no kernel takes float32")]
    assert {m.partition("{")[0] for m in said} == {"gated_linear", "linear"}


def test_a_known_call_neither_chooses_nor_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op of an epilogue is found by the shapes of a call; that of a product is registered at import."""
    from cute_ops_jax.composite.products import products

    x, weight, bias = jnp.ones((3, 16)), jnp.ones((8, 16)), jnp.ones(8)

    def calls() -> list[jax.Array]:
        linear, normed = cute_ops_jax.linear, partial(cute_ops_jax.rmsnorm_linear, x, x[0])
        return [linear(x, weight), linear(x, weight, bias, epilogue="gelu"), normed(weight, bias, epilogue="silu")]

    expected = calls()
    monkeypatch.setattr(products, "choose", None)
    monkeypatch.setattr(products, "function", None)
    np.testing.assert_array_equal(np.stack(calls()), np.stack(expected))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        cute_ops_jax.linear(x, weight[:7], bias[:7], epilogue="gelu")


def test_a_function_of_jax_is_no_epilogue() -> None:
    said = "cute.linear: argument `epilogue` is jax's gelu, expected a function of xp and the product, such as"
    with pytest.raises(TypeError, match=said):
        cute_ops_jax.linear(jnp.ones((3, 16)), jnp.ones((8, 16)), epilogue=jax.nn.gelu)
