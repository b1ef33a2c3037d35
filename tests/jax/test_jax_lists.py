"""Ops with lists of arrays as functions of JAX."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import cute_ops_jax
from cute_ops import FLOATS, Op, Tensor, testing
from cute_ops_jax import exporting
from cute_ops_jax.tools import runner
from tests.ops import listing

FORWARDS = listing.add_n, listing.scale_all, listing.concatenate
add_n, scale_all, concatenate = (cute_ops_jax.register(op) for op in FORWARDS)


def arrays(*rows: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((r, 8), np.float32)) for r in rows]


CALLS = {
    "add_n": (add_n, sum, (arrays(4, 4, 4),)),
    "scale_all": (scale_all, lambda xs, fs: [x * f for x, f in zip(xs, fs, strict=True)],
                  (arrays(1, 5, 3), jnp.asarray([1.0, 2.0, 3.0]))),
    "concatenate": (concatenate, jnp.concatenate, (arrays(1, 5, 3),)),
}  # fmt: skip
every_call = pytest.mark.parametrize(("function", "expected", "arguments"), CALLS.values(), ids=CALLS)


def loss(found: Any) -> jax.Array:
    return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(found))


def close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@every_call
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_and_a_list_of_gradients(function: Any, expected: Any, arguments: Any, wrap: Any) -> None:
    close(wrap(function)(*arguments), expected(*arguments))
    found, exact = (jax.grad(lambda xs, *rest, f=f: loss(f(xs, *rest))) for f in (wrap(function), expected))
    close(found(*arguments), exact(*arguments))
    one = jax.grad(lambda x: loss(function([*arguments[0][:2], x], *arguments[1:])))
    close(one(arguments[0][2]), exact(*arguments)[2])


def test_tuples_are_lists() -> None:
    xs = tuple(arrays(4, 4))
    close(add_n(xs), add_n(list(xs)))
    assert str(inspect.signature(scale_all)) == (
        "(xs: 'Sequence[ArrayLike]', factors: 'ArrayLike', alpha: 'float' = 1.0) -> 'list[Array]'"
    )


@every_call
def test_vmap(function: Any, expected: Any, arguments: Any) -> None:
    xs, *rest = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arguments)
    close(jax.vmap(function)(xs, *rest), jax.vmap(expected)(xs, *rest))
    gradient, exact = (jax.grad(lambda xs, *rest, f=f: loss(f(xs, *rest))) for f in (function, expected))
    close(jax.vmap(gradient)(xs, *rest), jax.vmap(exact)(xs, *rest))


def test_an_export_for_any_number_of_rows(through_ffi: Any, fake_kernels: Any) -> None:
    """Each array's own, in the lowering for CUDA with the reference as the kernel."""
    sizes = jax.export.symbolic_shape("a, b, c")
    xs = [jax.ShapeDtypeStruct((rows, 8), jnp.float32) for rows in sizes]
    call = through_ffi(listing.concatenate.unrolled({"k": 3}))
    data, _ = exporting._serialized(lambda xs: jnp.sin(call(*xs)), ["cpu"], 0, (xs,), {})
    program = jax.export.deserialize(bytearray(data)).call
    for rows in ((1, 5, 3), (4, 4, 4)):
        close(program(arrays(*rows)), jnp.sin(jnp.concatenate(arrays(*rows))))
    assert len({symbol for symbol, _ in fake_kernels.calls}) == 1


@pytest.mark.parametrize("one", [one for op in FORWARDS for each in (op, *op.steps) for one in each.instances],
                         ids=lambda op: op.name)  # fmt: skip
def test_values_against_float64(one: Op) -> None:
    (case,) = one.cases
    given, attrs = testing.inputs(one, case, "bfloat16"), testing.attributes(one, case)
    testing.check(one, given, attrs, runner.run(one, given, attrs))


def test_inputs_that_are_written_come_back_as_a_list() -> None:
    rows = Tensor("r n", "T", many="k", own=("r",))
    grow = cute_ops_jax.register(
        Op(
            "grow", inputs={"xs": rows, "by": Tensor("k", "float32")}, outputs={}, mutates=("xs",),
            dtypes={"T": FLOATS}, kernel="a:B",
            reference=lambda xp, xs, by: ([x * by[i] for i, x in enumerate(xs)],),
        )
    )  # fmt: skip
    xs = arrays(2, 3)
    close(jax.jit(grow)(xs, jnp.asarray([2.0, 3.0])), [xs[0] * 2, xs[1] * 3])


def test_rows_stay_on_their_devices() -> None:
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu"))
    xs = [jax.device_put(x, NamedSharding(mesh, jax.P("x"))) for x in arrays(8, 8)]
    compiled = jax.jit(add_n).lower(xs).compile()
    assert "all-" not in compiled.as_text()
    found = compiled(xs)
    assert found.sharding.is_equivalent_to(xs[0].sharding, 2)  # whose spec may name the other dim, too
    close(found, xs[0] + xs[1])


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (jnp.ones((3, 8)), TypeError, "argument `xs` must be a list of tensors, got ArrayImpl"),
        ([], ValueError, "argument `xs` is empty, expected one tensor or more"),
        ([jnp.ones((3, 8)), None], TypeError, r"argument `xs\[1\]` is required, but None was given"),
        ([jnp.ones((3, 8))] * 2 + [jnp.ones((3, 7))], ValueError, r"argument `xs\[2\]` has n=7, but n=8"),
        ([jnp.ones((3, 8)), jnp.ones((3, 8), int)], TypeError, r"argument `xs\[1\]` has dtype int32, expected"),
        ([jnp.ones((3, 8)), "a"], TypeError, r"argument `xs\[1\]` must be one array, got str"),
    ],
)
def test_what_is_refused(given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=f"cute.add_n: .*{said}"):
        add_n(given)
