"""Every declared op through its primitive: values, gradients, shapes, and the functions' signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import Op, Tensor, testing
from cute_ops.ops import OPS
from cute_ops_jax.primitive.primitive import primitive_of
from cute_ops_jax.tools import stubs


@pytest.mark.drawn(0.4)
def test_values_against_float64_and_torch(value_problem: Any, run_op: Callable[..., Any], torch_arrays: Any) -> None:
    """On the CPU both adapters run one reference, so they agree up to the order of sums."""
    op, arrays, attrs = value_problem.op, value_problem.inputs(), value_problem.attrs
    ours = run_op(op, arrays, attrs)
    exacts, limits = testing.limits(op, arrays, attrs)
    testing.compare(op, ours, exacts, limits)
    if find_spec("torch") is None:
        return
    from cute_ops_torch.tools import runner

    raw = runner.functional(op)(*torch_arrays.to_torch(arrays, "cpu"), *attrs.values())
    for mine, other, limit in zip(ours, raw if isinstance(raw, tuple) else (raw,), limits, strict=True):
        if mine is None:
            assert other.numel() == 0  # torch's schema has a fixed number of outputs
            continue
        other = torch_arrays.to_numpy(other)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        # Each of the two may be off by the limit.
        assert np.all(np.abs(mine.astype(np.float64) - other.astype(np.float64)) <= 2 * limit)


def gradients(function: Callable[..., Any], given: Any, cotangents: Any) -> Any:
    return jax.vjp(function, given)[1](cotangents)[0]


@pytest.mark.drawn(0.4)
def test_gradients_against_the_float64_vjp_of_the_reference(problem: Any) -> None:
    """Gradients meet the tolerance of the backward op on the same values."""
    op, attrs = problem.op, problem.attrs
    # Quarters: sums of inputs are exact in every dtype, so that float64 sees the values that the op sees.
    arrays = {
        n: a if a is None else (np.round(a.astype(np.float32) * 4) / 4).astype(a.dtype)
        for n, a in problem.inputs().items()
    }
    present = {n: a for n, a in arrays.items() if a is not None}
    fixed = {n: a for n, a in present.items() if n not in op.differentiable}
    present = {n: a for n, a in present.items() if n not in fixed}
    function = testing.plain(op, cute_ops_jax.register(op))

    def ours(given: Any) -> Any:
        return function(**given, **fixed, **attrs)

    rng = np.random.default_rng(3)
    cotangents = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), jax.eval_shape(ours, present))
    named = lambda given: primitive_of(op)({**given, **fixed}, attrs)  # noqa: E731
    got, named_outputs = jax.jit(lambda given, d: (gradients(ours, given, d), named(given)))(present, cotangents)

    with jax.enable_x64(True):
        wide = {n: jnp.asarray(a.astype(np.float64)) for n, a in present.items()}
        wide_cotangents = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), cotangents)

        def reference(given: Any) -> Any:
            inputs = {n: {**given, **fixed}.get(n) for n in op.inputs}
            results = testing.differentiated(op, inputs, op.reference(jnp, *inputs.values(), **attrs), attrs)
            return results if len(results) > 1 else results[0]

        exact = jax.jit(partial(gradients, reference))(wide, wide_cotangents)

    named_cotangents = dict(zip((f"d{n}" for n in op.shown), jax.tree.leaves(cotangents), strict=True))
    pool = {**arrays, **{n: np.asarray(a) for n, a in named_outputs.items() if a is not None}, **named_cotangents}
    limits = dict(
        zip(op.grad.outputs, testing.tolerances(op.grad, {n: pool[n] for n in op.grad.inputs}, attrs), strict=True)
    )
    # A gradient from a rounded output, as frameworks save it, carries that rounding; by how much, float64 says.
    saved = {n: pool[n] for n in op.grad.inputs}
    drift: dict[str, Any] = {}
    if any(n in op.shown and saved[n].dtype.itemsize < 4 for n in saved):
        pairs = zip(op.grad.outputs, testing.expected(op.grad, saved, attrs), strict=True)
        drift = {n: np.abs(d - np.asarray(exact[n[1:]])) for n, d in pairs if d is not None}
    for name, gradient in got.items():
        if name not in op.differentiable:
            assert not np.any(gradient), f"{name} has no gradient"
            continue
        declared = op.grad.outputs[f"d{name}"]
        unit = testing.EPS[problem.dtype] * max(1, np.abs(exact[name]).max())
        assert np.all(drift.get(f"d{name}", 0) <= 8 * unit)
        limit = limits[f"d{name}"] if limits[f"d{name}"] is not None else limits[declared.same_as]
        assert gradient.dtype == present[name].dtype
        error = np.abs(np.asarray(gradient, np.float64) - np.asarray(exact[name]))
        assert np.all(error <= limit + drift.get(f"d{name}", 0)), f"d{name}: {error.max():.3g} > {np.max(limit):.3g}"


@pytest.mark.drawn(0.5)
def test_shapes_without_values(problem: Any) -> None:
    shaped = {n: None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in problem.inputs().items()}
    function = testing.plain(problem.op, cute_ops_jax.register(problem.op))
    outputs = jax.eval_shape(lambda given: function(**given, **problem.attrs), shaped)
    exact = testing.shown(problem.op, testing.run_reference(problem.op, problem.inputs(), problem.attrs))
    assert [(o.shape, o.dtype) for o in jax.tree.leaves(outputs)] == [(e.shape, e.dtype) for e in exact]


@pytest.mark.some_ops
def test_symbolic_rows_are_exported_once_for_all(op: Op, close: Callable[..., Any]) -> None:
    (rows,) = jax.export.symbolic_shape("rows")

    def shaped(tensor: Tensor) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            tensor.of(op.example((2, rows), 6)), jnp.int32 if tensor.upper_bound else jnp.float32
        )

    function = testing.plain(op, cute_ops_jax.register(op))
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*map(shaped, op.inputs.values()))
    for count in (1, 5):
        rng = np.random.default_rng(count)
        arrays = testing.sample(op, (2, count), 6, rng)
        close(exported.call(*arrays), function(*arrays))


@pytest.mark.some_ops
def test_one_dim_is_one_row(op: Op) -> None:
    arrays, function = (
        testing.sample(op, (), 6, np.random.default_rng(0)), testing.plain(op, cute_ops_jax.register(op))
    )  # fmt: skip
    one = function(*arrays)
    two = function(*(a[None] if t.rows else a for a, t in zip(arrays, op.inputs.values(), strict=True)))
    assert [a.shape for a in jax.tree.leaves(one)] == [op.outputs[n].of(op.example((), 6)) for n in op.shown]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b[0])


@pytest.mark.some_ops
@pytest.mark.parametrize("lead", [(0,), (3, 0), (0, 2)])
def test_zero_rows_need_no_kernel(op: Op, lead: tuple[int, ...]) -> None:
    arrays = testing.sample(op, lead, 6, np.random.default_rng(0))
    function = testing.plain(op, cute_ops_jax.register(op))

    def loss(*given: Any) -> Any:
        return sum(jnp.sum(o) for o in jax.tree.leaves(function(*given)))

    differentiate = jax.grad(loss, testing.argnums(op))
    assert "= cute_" not in str(jax.make_jaxpr(differentiate)(*arrays))  # no such primitive; its outputs have names
    shapes = [op.outputs[n].of(op.example(lead, 6)) for n in op.shown]
    assert [o.shape for o in jax.tree.leaves(function(*arrays))] == shapes
    wanted = [arrays[i] for i in testing.argnums(op)]
    for gradient, array in zip(jax.jit(differentiate)(*arrays), wanted, strict=True):
        assert gradient.dtype == array.dtype
        np.testing.assert_array_equal(gradient, np.zeros_like(array))


def test_function_looks_like_its_declaration(op: Op) -> None:
    function = getattr(cute_ops_jax, op.name)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*op.inputs, *op.attrs, *op.options]
    assert [p.default for p in parameters.values() if p.default is not p.empty] == [
        *(None for t in op.inputs.values() if t.optional), *op.attrs.values(), *op.options.values(),
    ]  # fmt: skip
    assert function.__name__ == op.name
    assert function.__doc__ == op.doc
    assert cute_ops_jax.register(op) is function
    assert op.name in cute_ops_jax.__all__


@pytest.mark.parametrize("name", ["embedding", "linear_cross_entropy"])
def test_compositions_are_documented(name: str) -> None:
    function = getattr(cute_ops_jax, name)
    headline, *parts = function.__doc__.split("\n\n")
    assert headline.endswith(".") and {part.split("\n")[0] for part in parts} >= {"Args:", "Returns:", "Raises:"}
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter}: " in function.__doc__


def test_attributes_by_position_and_by_name() -> None:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)
    by_name = cute_ops_jax.rmsnorm(x, x[0], eps=0.5, weight_offset=1.0)
    np.testing.assert_array_equal(cute_ops_jax.rmsnorm(x, x[0], None, 0.5, 1.0), by_name)
    assert not np.array_equal(cute_ops_jax.rmsnorm(x, x[0]), by_name)


def test_stub_files_are_up_to_date() -> None:
    for path, content in stubs.files().items():
        assert path.read_text() == content, "run python -m cute_ops_jax.tools.stubs"


def test_stubs_name_every_argument() -> None:
    found: dict[str, Any] = {}
    exec(stubs.text(), found)
    for op in OPS:
        parameters = inspect.signature(found[op.name]).parameters
        assert {n: p.default for n, p in parameters.items()} == {
            n: p.default for n, p in inspect.signature(getattr(cute_ops_jax, op.name)).parameters.items()
        }


def reference_scale(xp: Any, x: Any, *, factor: float) -> Any:
    return x * factor


def scale_op(**changes: Any) -> Op:
    declaration: dict[str, Any] = {
        "inputs": {"x": Tensor("*m n", "T")}, "outputs": {"out": Tensor("*m n", "T")}, "dtypes": {"T": ("float32",)},
        "attrs": {"factor": 2.0}, "reference": reference_scale, "kernel": "cute_ops.kernels.norm.rmsnorm:RMSNorm",
    }  # fmt: skip
    return Op("scale", **{**declaration, **changes})


def test_a_users_op_is_registered_like_ours() -> None:
    scale = cute_ops_jax.register(scale_op())
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(scale, in_axes=1))(x), 2 * x.T)
    np.testing.assert_array_equal(scale(x, factor=3.0), 3 * x)


def tied_reference(xp: Any, q: Any, k: Any, ends: Any) -> Any:
    heads = xp.reshape(q, (*k.shape[:-1], q.shape[-2] // k.shape[-2], q.shape[-1])) * k[..., None, :]
    flat = xp.reshape(heads, q.shape)
    return flat[..., : q.shape[-1] // 2] - flat[..., q.shape[-1] // 2 :]


def test_sizes_that_follow_from_others_may_be_symbolic() -> None:
    tied = cute_ops_jax.register(Op(
        "tied", inputs={"q": Tensor("*m b g*r d", "T"), "k": Tensor("*m b g d", "T"), "ends": Tensor("b+1", "int32")},
        outputs={"out": Tensor("*m b g*r d/2", "T")}, dtypes={"T": ("float32",)}, reference=tied_reference,
        kernel="m:K",
    ))  # fmt: skip
    m, b, g, r, half = jax.export.symbolic_shape("m, b, g, r, half")

    def specs(heads: Any) -> list[jax.ShapeDtypeStruct]:
        shapes = (m, b, heads, 2 * half), (m, b, g, 2 * half), (b + 1,)
        return [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, ("float32", "float32", "int32"), strict=True)]

    assert jax.eval_shape(tied, *specs(g * r)).shape == (m, b, g * r, half)
    exported = jax.export.export(jax.jit(tied))(*specs(3 * g))  # JAX finds no sizes from a product of two
    assert exported.out_avals[0].shape == (m, b, 3 * g, half)
    rng, ends = np.random.default_rng(0), np.zeros(5, np.int32)
    q, k = (rng.standard_normal((3, 4, heads, 8), np.float32) for heads in (6, 2))
    np.testing.assert_array_equal(exported.call(q, k, ends), tied_reference(np, q, k, ends))
    np.testing.assert_array_equal(jax.vmap(tied, (1, 1, None), 1)(q[:, None], k[:, None], ends)[:, 0], tied(q, k, ends))


def test_a_reference_that_breaks_its_declaration_is_named() -> None:
    wrong = cute_ops_jax.register(scale_op(reference=lambda xp, x, *, factor: xp.sum(x * factor, axis=-1)))
    with pytest.raises(TypeError) as caught:
        wrong(np.ones((2, 3), np.float32))
    assert str(caught.value) == "cute.scale: its reference returned float32[2] for `out`, declared is float32[2, 3]."
    wrong = cute_ops_jax.register(scale_op(reference=lambda xp, x, *, factor: (x, x)))
    with pytest.raises(TypeError, match="its reference returned 2 outputs, declared are 1"):
        wrong(np.ones((2, 3), np.float32))
    wrong = cute_ops_jax.register(scale_op(reference=lambda xp, x, *, factor: [x]))
    with pytest.raises(TypeError, match="its reference returned a list for `out`, declared is float32"):
        wrong(np.ones((2, 3), np.float32))


@pytest.mark.parametrize("outputs", [("total",), ("total", "same")])
def test_an_empty_input_leaves_no_output_unwritten(outputs: tuple[str, ...]) -> None:
    """A kernel's entry returns at once where its first argument is empty, and a sum may start at a value."""
    rows, row = Tensor("*m n", "T"), Tensor("n", "T")
    op = Op(
        "start", inputs={"x": rows, "value": row}, dtypes={"T": ("float32",)}, kernel="nowhere:Start",
        outputs={name: {"total": row, "same": rows}[name] for name in outputs},
        reference=lambda xp, x, value: (xp.sum(x, axis=0) + value, x)[: len(outputs)],
    )  # fmt: skip
    function, given = cute_ops_jax.register(op), (np.ones((0, 6), np.float32), np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(jax.tree.leaves(function(*given))[0], given[1])
    assert "= cute_" not in str(jax.make_jaxpr(function)(*given))
