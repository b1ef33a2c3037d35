"""Every product under every transform of JAX: ``linear`` with and without an epilogue, and those with names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops_jax import exporting
from tests.ops.offered_products import PRODUCTS, Product

every_product = pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
Close = Callable[[Any, Any], None]


def function_of(product: Product) -> Callable[..., Any]:
    return product.of(cute_ops_jax)


def loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: sum(jnp.sin(out).sum() for out in jax.tree.leaves(function(*arrays)))


def gradient(product: Product, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(loss_of(function), product.differentiable)


@cache
def exact(name: str) -> tuple[list[Any], Any]:
    """The values of a product's reference, the loss of them and its gradients; in programs, since eagerly each of their
    primitives would be one.
    """
    (product,) = (p for p in PRODUCTS if p.name == name)
    reference, arrays = jax.jit(partial(product.exact, jnp)), product.arrays()
    return list(reference(*arrays)), jax.jit(gradient(product, reference))(*arrays)


@pytest.mark.drawn(0.5)
@pytest.mark.feature("jit, eager, gradients where there are any")
@pytest.mark.parametrize("fused", ["auto", "never"])
@every_product
def test_values_and_gradients(product: Product, fused: str, close: Close) -> None:
    function, arrays = partial(function_of(product), fused=fused), product.arrays()
    values, expected = exact(product.name)
    close(jax.tree.leaves(function(*arrays)), values)
    close(jax.jit(gradient(product, function))(*arrays), expected)
    if fused == "auto":
        close(gradient(product, function)(*arrays), expected)


@pytest.mark.drawn(0.4)
@pytest.mark.feature("zero rows and no terms, and their gradients")
@every_product
def test_of_nothing(product: Product, close: Close) -> None:
    for rows, k in (((0,), 16), ((3, 4), 0)):
        arrays = product.arrays(rows, k)
        exact = jax.jit(partial(product.exact, jnp))(*arrays)
        close(jax.tree.leaves(function_of(product)(*arrays)), list(exact))
        gradients = jax.jit(gradient(product, function_of(product)))(*arrays)[1]
        for place, found in zip(product.differentiable, gradients, strict=True):
            assert found.shape == arrays[place].shape and np.isfinite(found).all()


@pytest.mark.feature("eval_shape")
@pytest.mark.feature("ahead of time: lower, compile")
@every_product
def test_shapes_and_lowering(product: Product, close: Close) -> None:
    function, arrays = function_of(product), product.arrays()
    real = function(*arrays)
    shapes = jax.eval_shape(function, *arrays)
    assert [(s.shape, s.dtype) for s in jax.tree.leaves(shapes)] == [(a.shape, a.dtype) for a in jax.tree.leaves(real)]
    close(jax.jit(function).lower(*arrays).compile()(*arrays), real)


@pytest.mark.feature("vmap over x, one call")
@every_product
def test_vmap_over_rows(product: Product, close: Close) -> None:
    """Batched rows are more rows of one call, of whatever shape weights and angles are."""
    function, single = function_of(product), product.arrays()
    axes = tuple(0 if t.rows and not t.broadcast else None for t in product.inputs.values())
    given = [np.stack([a, a / 2]) if axis == 0 else a for a, axis in zip(single, axes, strict=True)]
    mapped = jax.vmap(function, axes)
    text = str(jax.make_jaxpr(mapped)(*given))
    assert text.count(f" cute_{product.op.name}[") == 1 and "scan" not in text
    each = [function(*(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True))) for i in range(2)]
    close(mapped(*given), jax.tree.map(lambda *leaves: np.stack(leaves), *each))


@pytest.mark.feature("vmap of grad")
@every_product
def test_gradients_per_example(product: Product, close: Close) -> None:
    single, run = product.arrays(), jax.jit(gradient(product, function_of(product)))
    axes = tuple(0 if t.rows and not t.broadcast else None for t in product.inputs.values())
    given = [np.stack([a, a / 2]) if axis == 0 else a for a, axis in zip(single, axes, strict=True)]
    each = [run(*(a[i] if axis == 0 else a for a, axis in zip(given, axes, strict=True))) for i in range(2)]
    close(jax.jit(jax.vmap(run, axes))(*given), jax.tree.map(lambda *leaves: np.stack(leaves), *each))


@pytest.mark.drawn(0.4)
@pytest.mark.feature("scan and its gradient")
@pytest.mark.feature("cond, while")
@pytest.mark.feature("checkpoint")
@every_product
def test_loops_and_checkpoints(product: Product, close: Close, again: Callable[..., Any]) -> None:
    """What is computed in a loop, in a branch or once more is what is written out."""
    step, arrays = again(function_of(product)), product.arrays()

    def written(first: Any, *others: Any) -> Any:
        return jnp.sum(jnp.sin(step(step(first, *others), *others)))

    def scanned(first: Any, *others: Any) -> Any:
        once = jax.checkpoint(lambda carry: step(carry, *others))
        return jnp.sum(jnp.sin(jax.lax.scan(lambda carry, _: (once(carry), None), first, None, length=2)[0]))

    def branched(first: Any, *others: Any) -> Any:
        once = jax.lax.cond(first[0, 0, 0] > -100, step, lambda first, *_: first, first, *others)
        return jnp.sum(jnp.sin(step(once, *others)))

    wrt = product.differentiable
    expected = jax.jit(jax.value_and_grad(written, wrt))(*arrays)
    for run in (scanned, branched):
        close(jax.jit(jax.value_and_grad(run, wrt))(*arrays), expected)
    looped = jax.lax.fori_loop(0, 2, lambda _, carry: step(carry, *arrays[1:]), arrays[0])
    close(jnp.sum(jnp.sin(looped)), expected[0])


@pytest.mark.feature("jvp and second order say what to do")
@every_product
def test_other_derivatives_raise(product: Product) -> None:
    first, *others = product.arrays()
    loss = lambda x: loss_of(function_of(product))(x, *others)  # noqa: E731
    for run in (lambda: jax.jvp(loss, (first,), (first,)), lambda: jax.grad(lambda x: jax.grad(loss)(x).sum())(first)):
        with pytest.raises(
            NotImplementedError,
            match=rf"^cute\.{product.op.called or product.op.name}: only its first derivative exists",
        ):
            run()


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.feature("export with symbolic rows, saved and loaded")
@every_product
def test_export(product: Product, close: Close) -> None:
    function, (m,) = function_of(product), jax.export.symbolic_shape("m")
    shaped = []
    for array, t in zip(product.arrays(), product.inputs.values(), strict=True):
        lead = (m, *array.shape[1:]) if t.rows and not t.broadcast else array.shape
        shaped.append(jax.ShapeDtypeStruct(lead, array.dtype))
    with_gradient = product.name in ("linear", "linear_epilogue")  # it takes longer than all else
    data, _ = exporting._serialized(function, ["cpu"], int(with_gradient), shaped, {})
    program = jax.export.deserialize(bytearray(data)).call
    for count in (2, 5):
        arrays = product.arrays((count, 4))
        close(program(*arrays), function(*arrays))
        if with_gradient:
            close(gradient(product, program)(*arrays), gradient(product, function)(*arrays))


def test_a_warm_call_converts_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """``jnp.asarray`` of an array takes longer than the dispatch of a small program."""
    x, up, gate_up, down = (jnp.ones(shape) for shape in ((4, 16), (32, 16), (64, 16), (16, 32)))
    calls: list[Callable[[], Any]] = [
        lambda: cute_ops_jax.mlp(x, up, None, down), lambda: cute_ops_jax.gated_mlp(x, gate_up, down),
        lambda: cute_ops_jax.linear(x, up), lambda: cute_ops_jax.linear_cross_entropy(x, up, target),
    ]  # fmt: skip
    target = jnp.zeros(4, jnp.int32)
    first = [call() for call in calls]
    monkeypatch.setattr(jnp, "asarray", None)
    for call, out in zip(calls, first, strict=True):
        np.testing.assert_array_equal(call(), out)
