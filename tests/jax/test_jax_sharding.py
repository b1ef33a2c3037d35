"""Programs on eight devices: the CUDA lowering on the CPU, with the reference as the kernel, against one device.

The tests read the program that XLA compiled: no all-gather, and a sum over rows is added up once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops import FLOATS, Op, Sharding, Tensor, fused, testing
from cute_ops.ops import OPS
from cute_ops_jax.primitive.primitive import primitive_of
from tests.ops.offered_products import PRODUCTS, Product

LEAD, N = (8, 4), 6
MESH = (4, 2), ("data", "seq")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
Close = Callable[[Any, Any], None]
RMSNORM = next(op for op in OPS if op.name == "rmsnorm")
SILU_MUL = next(op for op in OPS if op.name == "silu_mul")


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh(*MESH, (kind, kind), devices=jax.devices("cpu"))


def collectives(text: str) -> dict[str, int]:
    found = {name: len(re.findall(rf"\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in found.items() if count}


def inputs(op: Op, lead: tuple[int, ...] = LEAD) -> list[np.ndarray]:
    return testing.sample(op, lead, N, np.random.default_rng(3))


def row_specs(op: Op, *axes: Any) -> list[Any]:
    return [jax.P(*axes) if t.rows else jax.P() for t in op.inputs.values()]


def gradient(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """Values and gradients with fixed cotangents, so that no collective comes from a loss."""

    def run(*arrays: Any) -> Any:
        outputs, pull = jax.vjp(
            lambda *given: function(*merged(given, arrays)), *(arrays[i] for i in testing.argnums(op))
        )
        return outputs, pull(jax.tree.map(jnp.cos, outputs))

    def merged(given: Any, arrays: Any) -> list[Any]:
        chosen = dict(zip(testing.argnums(op), given, strict=True))
        return [chosen.get(i, a) for i, a in enumerate(arrays)]

    return run


@cache
def on_one_device(op: Op) -> Any:
    """What every program on a mesh gives."""
    return jax.jit(gradient(op, testing.plain(op, cute_ops_jax.register(op))))(*inputs(op))


def sums(op: Op) -> int:
    return sum(t.rows is None for t in op.grad.outputs.values()) if op.grad else 0


def rows_seen(op: Op, fake_kernels: Any) -> set[int]:
    """The numbers of rows of the first inputs, of all calls of an op and its backward."""
    tail = len(next(iter(op.inputs.values())).dims)
    return {math.prod(shapes[0][: len(shapes[0]) - tail]) for _, shapes in fake_kernels.calls}


def placed(mesh: Any, arrays: Any, specs: Any) -> list[Any]:
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


@pytest.mark.some_ops
@pytest.mark.feature("FFI: row-sharded jit, automatic and explicit mesh, no all-gather")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_each_device_takes_its_rows(
    row_op: Op, kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Close
) -> None:
    """No all-gather, whichever leading dim is sharded; one all-reduce per sharded dim where weights have a gradient."""
    function, arrays = testing.plain(row_op, through_ffi(row_op)), inputs(row_op)
    expected = on_one_device(row_op)
    mesh = mesh_of(kind)
    one_dim = (("data",), 8) if kind == AxisType.Auto else ((None, "seq"), 16)
    for axes, rows in ((("data", "seq"), 4), one_dim):
        with jax.set_mesh(mesh):
            given = placed(mesh, arrays, row_specs(row_op, *axes))
            compiled = jax.jit(gradient(row_op, function)).lower(*given).compile()
            fake_kernels.calls.clear()
            got = jax.block_until_ready(compiled(*given))
        close(jax.device_get(got), jax.device_get(expected))
        assert len(fake_kernels.calls) == 8 * (2 if row_op.grad else 1)
        assert rows_seen(row_op, fake_kernels) == {rows}
        found = collectives(compiled.as_text())
        assert found.keys() <= {"all-reduce"}
        assert found.get("all-reduce", 0) <= sums(row_op) * sum(a is not None for a in axes)
        assert bool(found) == bool(sums(row_op))
        outputs, gradients = got
        for leaf in jax.tree.leaves((outputs, gradients[:1])):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, jax.P(*axes)), leaf.ndim)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_an_op_without_a_gradient_takes_its_rows(kind: AxisType, through_ffi: Any, fake_kernels: Any) -> None:
    """The scales, in a dim that no input has, stay whole."""
    op = next(op for op in OPS if op.name == "add_rmsnorm_fp8")
    function, arrays = through_ffi(op), testing.sample(op, LEAD, 200, np.random.default_rng(3))
    # What stands for the kernel computes the same.
    expected = testing.run_reference(op, dict(zip(op.inputs, arrays, strict=True)), {**op.attrs, "block": 128})
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, row_specs(op, "data", "seq"))
        compiled = jax.jit(lambda *a: function(*a, block=128)).lower(*given).compile()
        got = jax.block_until_ready(compiled(*given))
    assert rows_seen(op, fake_kernels) == {4}
    assert not collectives(compiled.as_text())
    for g, e in zip(got, expected, strict=True):
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, jax.P("data", "seq")), g.ndim)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(e))


def test_one_all_reduce_of_one_weight(through_ffi: Any) -> None:
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Auto)
    x, w = placed(mesh, inputs(RMSNORM)[:2], (jax.P(("data", "seq")), jax.P()))

    def run(x: Any, w: Any) -> Any:
        out, pull = jax.vjp(function, x, w)
        return pull(out)

    text = jax.jit(run).lower(x, w).compile().as_text()
    assert collectives(text) == {"all-reduce": 1}
    assert re.search(r"f32\[6\]\S* all-reduce\(", text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_load_of_experts_is_that_of_all_rows(kind: AxisType) -> None:
    x = np.random.default_rng(0).standard_normal((*LEAD, 8)).astype(np.float32)
    grad = jax.grad(lambda x: cute_ops_jax.route(x, k=2)[2])
    rows = jax.device_put(x, NamedSharding(mesh_of(kind), jax.P("data")))
    for found, exact in ((jax.jit(grad)(rows), grad(x)), (jax.vmap(grad)(x), np.stack([grad(each) for each in x]))):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_no_all_reduce_of_a_frozen_weight(kind: AxisType, through_ffi: Any, fake_kernels: Any) -> None:
    function, mesh = through_ffi(RMSNORM), mesh_of(kind)
    with jax.set_mesh(mesh):
        x, w = placed(mesh, inputs(RMSNORM)[:2], (jax.P(("data", "seq")), jax.P()))
        run = jax.jit(lambda x, w: jax.vjp(lambda x: function(x, w), x)[1](x))
        assert not collectives(run.lower(x, w).compile().as_text())
    assert {variant.op for variant in fake_kernels.variants} == {"rmsnorm_bwd_only_dx"}  # nobody reads the forward


@pytest.mark.some_ops
@pytest.mark.feature("FFI: shard_map, with and without replication checks")
@pytest.mark.parametrize("check", [True, False])
def test_inside_of_shard_map(row_op: Op, check: bool, through_ffi: Any, close: Close) -> None:
    """With replication checks, gradients of replicated inputs come out summed."""
    function, arrays, mesh = testing.plain(row_op, through_ffi(row_op)), inputs(row_op), mesh_of(AxisType.Auto)
    expected = on_one_device(row_op)
    rows = jax.P("data", "seq")
    whole = row_specs(row_op, "data", "seq")
    shared = [i for i, spec in enumerate(whole) if spec == jax.P()]

    def body(*given: Any) -> Any:
        outputs, grads = gradient(row_op, function)(*given)
        if not check:
            grads = tuple(jax.lax.psum(g, ("data", "seq")) if i in shared else g
                          for i, g in zip(testing.argnums(row_op), grads, strict=True))  # fmt: skip
        return outputs, grads

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(whole), check_vma=check,
        out_specs=(rows, tuple(whole[i] for i in testing.argnums(row_op))),
    )  # fmt: skip
    compiled = jax.jit(mapped).lower(*placed(mesh, arrays, whole)).compile()
    close(jax.device_get(compiled(*placed(mesh, arrays, whole))), jax.device_get(expected))
    assert collectives(compiled.as_text()).keys() <= {"all-reduce"}


@pytest.mark.some_ops
def test_backward_ops_in_shard_map(op: Op, through_ffi: Any, close: Close) -> None:
    """A backward op that is called by itself returns each shard's part of a sum, which varies over the mesh."""
    backward, mesh = op.grad, mesh_of(AxisType.Auto)
    arrays, whole = inputs(backward), row_specs(backward, "data")
    results = primitive_of(backward)(dict(zip(backward.inputs, arrays, strict=True)), {})
    served = {
        n: results[t.same_as] if results[n] is None and t.same_as else results[n] for n, t in backward.outputs.items()
    }
    expected = [a for a in served.values() if a is not None]
    rows = [bool(backward.outputs[n].rows) for n, a in served.items() if a is not None]

    def body(*given: Any) -> Any:
        results = jax.tree.leaves(through_ffi(backward)(*given))
        return tuple(r if row else jax.lax.psum(r, "data") for r, row in zip(results, rows, strict=True))

    mapped = jax.shard_map(body, mesh=mesh, in_specs=tuple(whole), axis_names={"data"}, out_specs=tuple(
        jax.P("data") if row else jax.P() for row in rows))  # fmt: skip
    close(jax.tree.leaves(jax.jit(mapped)(*arrays)), expected)


@pytest.mark.drawn(0.5)
@pytest.mark.some_ops
@pytest.mark.feature("FFI: shard_map over some axes")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_partly_manual(row_op: Op, kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Close) -> None:
    """A shard_map over some axes: of the other axes, explicit ones shard rows, automatic ones shard nothing."""
    function, arrays, mesh = testing.plain(row_op, through_ffi(row_op)), inputs(row_op), mesh_of(kind)
    expected = on_one_device(row_op)
    outer = row_specs(row_op, "data")

    def run(*given: Any) -> Any:
        mapped = jax.shard_map(function, in_specs=tuple(outer), out_specs=jax.P("data"), axis_names={"data"})
        return gradient(row_op, mapped)(*given)

    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, row_specs(row_op, "data", "seq" if kind == AxisType.Explicit else None))
        compiled = jax.jit(run).lower(*given).compile()
        fake_kernels.calls.clear()
        close(jax.device_get(jax.block_until_ready(compiled(*given))), jax.device_get(expected))
    assert rows_seen(row_op, fake_kernels) == {4 if kind == AxisType.Explicit else 8}
    if kind == AxisType.Auto:  # explicit ones, JAX's own shard_map gathers at its border
        assert "all-gather" not in collectives(compiled.as_text())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_dims_called_parallel_are_cut_too(kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Close) -> None:
    """In a tensor-parallel MLP the hidden dim stays sharded."""
    function, arrays, mesh = through_ffi(SILU_MUL), inputs(SILU_MUL), mesh_of(kind)
    expected = gradient(SILU_MUL, cute_ops_jax.silu_mul)(*arrays)
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, [jax.P("data", None, "seq")] * 2)
        compiled = jax.jit(gradient(SILU_MUL, function)).lower(*given).compile()
        fake_kernels.calls.clear()
        close(jax.device_get(jax.block_until_ready(compiled(*given))), jax.device_get(expected))
    assert collectives(compiled.as_text()) == {}
    assert {shapes[0] for _, shapes in fake_kernels.calls} == {(8, 3)}


def test_what_is_parallel_gives_slices_of_outputs(op: Op) -> None:
    """Checks what declarations call parallel: the op on slices of such a dim gives slices."""
    for one in (op, op.grad):
        for dim in one.parallel:
            sizes = {**one.example((3,), 8), dim: 8}
            rng = np.random.default_rng(1)
            arrays = [rng.standard_normal(t.of(sizes)).astype(np.float32) for t in one.inputs.values()]
            function = cute_ops_jax.register(one)

            def halves(tensors: Any, arrays: Any, dim: str = dim) -> tuple[list[Any], list[Any]]:
                cuts = [cut(t, a, dim) for t, a in zip(tensors, arrays, strict=True)]
                return [c[0] for c in cuts], [c[1] for c in cuts]

            whole = jax.tree.leaves(function(*arrays))
            for given, wanted in zip(
                halves(one.inputs.values(), arrays), halves(one.outputs.values(), whole), strict=True
            ):
                for a, b in zip(jax.tree.leaves(function(*given)), wanted, strict=True):
                    np.testing.assert_array_equal(a, b)


def cut(tensor: Tensor, array: Any, dim: str) -> tuple[Any, Any]:
    """Halves along a dim; the same array twice where it has none of that name."""
    names = [d.name for d in tensor.dims]
    if dim not in names:
        return array, array
    axis = array.ndim - len(names) + names.index(dim)
    first, second = np.split(np.asarray(array), 2, axis)
    return first, second


HEADS, KEYS = Tensor("*m g r d", "T"), Tensor("*m g d", "T")
GROUPED_BWD = Op(
    "grouped_bwd", inputs={"dout": HEADS, "q": HEADS, "k": KEYS}, outputs={"dq": HEADS, "dk": KEYS},
    dtypes={"T": FLOATS}, reference=lambda xp, dout, q, k: (dout * k[..., None, :], xp.sum(dout * q, axis=-2)),
    kernel="cute_ops.kernels:K", sharding=Sharding(("g", "r")),
)  # fmt: skip
PRODUCT = Op(
    "product", inputs={"x": Tensor("*m k", "T"), "w": Tensor("n k", "T")}, outputs={"out": Tensor("*m n", "T")},
    dtypes={"T": FLOATS}, reference=lambda xp, x, w: x @ w.T, kernel="cute_ops.kernels:K", static=(),
    sharding=Sharding(("n",), contracted=("k",)),
)  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("declared", "shapes", "specs", "seen"),
    [
        (GROUPED_BWD, ((3, 2, 4, 6), (3, 2, 4, 6), (3, 2, 6)), ((None, None, "data"),) * 2 + ((),), (3, 2, 1, 6)),
        (PRODUCT, ((3, 8), (6, 8)), ((None, "data"), (None, "data")), (3, 2)),
    ],
    ids=["grouped", "product"],
)
def test_what_lacks_a_sharded_dim_is_a_sum(
    declared: Op, shapes: Any, specs: Any, seen: Any, kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Close
) -> None:
    """Outputs without the dim are added up, the others stay sharded, and nothing is gathered."""
    rng = np.random.default_rng(0)
    arrays, mesh = [rng.standard_normal(s).astype(np.float32) for s in shapes], mesh_of(kind)
    function = through_ffi(declared)
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, [jax.P(*spec) for spec in specs])
        compiled = jax.jit(function).lower(*given).compile()
        fake_kernels.calls.clear()
        got = jax.device_get(jax.block_until_ready(compiled(*given)))
    close(got, declared.reference(np, *arrays))
    assert collectives(compiled.as_text()) == {"all-reduce": 1} and {s[0] for _, s in fake_kernels.calls} == {seen}


def _spread(xp: Any, q: Any, k: Any) -> Any:
    return xp.repeat(k, q.shape[-2] // k.shape[-2], -2)


TIED = Tensor("*m g*r d", "T")
GROUPED: dict[str, Any] = {"dtypes": {"T": FLOATS}, "kernel": "cute_ops.kernels:K", "sharding": Sharding(("g",))}
TIED_HEADS = Op(
    "tied_heads", inputs={"q": TIED, "k": KEYS}, outputs={"out": TIED},
    reference=lambda xp, q, k: q * _spread(xp, q, k),
    grad=Op(
        "tied_heads_bwd", inputs={"dout": TIED, "q": TIED, "k": KEYS}, outputs={"dq": TIED, "dk": KEYS}, **GROUPED,
        reference=lambda xp, dout, q, k: (
            dout * _spread(xp, q, k), xp.sum(xp.reshape(dout * q, (*k.shape[:-1], -1, k.shape[-1])), axis=-2),
        ),
    ), **GROUPED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "axes", "kind"),
    [
        (8, "data", AxisType.Auto), (8, "data", AxisType.Explicit), (2, "data", AxisType.Auto),
        (4, ("seq", "data"), AxisType.Auto), (4, ("data", "seq"), AxisType.Auto),
    ],
    ids=["auto", "explicit", "few", "part", "more"],
)  # fmt: skip
def test_groups_of_tied_heads_stay_on_their_devices(
    groups: int, axes: Any, kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Close
) -> None:
    """A device has whole groups, of heads as of keys; where there are fewer groups than devices, each has all."""
    rng = np.random.default_rng(0)
    q, k, dout = (rng.standard_normal((3, h, 6)).astype(np.float32) for h in (2 * groups, groups, 2 * groups))
    function, mesh = through_ffi(TIED_HEADS), mesh_of(kind)

    def step(q: Any, k: Any, dout: Any) -> Any:
        out, pull = jax.vjp(function, q, k)
        return out, pull(dout)

    with jax.set_mesh(mesh):
        spec = jax.P(None, axes)
        given = placed(mesh, (q, k, dout), [spec, spec if groups == 8 else jax.P(), spec])
        compiled = jax.jit(step).lower(*given).compile()
        fake_kernels.calls.clear()
        got = jax.device_get(jax.block_until_ready(compiled(*given)))
    close(got, (TIED_HEADS.reference(np, q, k), TIED_HEADS.grad.reference(np, dout, q, k)))
    if groups == 8:
        assert {shapes[0] for _, shapes in fake_kernels.calls} == {(3, 4, 6)}
        assert collectives(compiled.as_text()) == {}
        for leaf in jax.tree.leaves(compiled(*given)):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


ROWS, COLUMNS, TERMS = jax.P("data"), jax.P(None, None, "data"), jax.P(None, "data")
CUTS = {  # of the inputs that are not whole
    "rows": {"x": ROWS, "residual": ROWS},
    "columns": {"weight": ROWS, "bias": ROWS, "residual": COLUMNS},
    "terms": {"x": COLUMNS, "weight": TERMS},
    "hidden": {"w_up": ROWS, "b_up": ROWS, "w_down": TERMS},
}


def every_product(cut: str) -> list[Product]:
    """Those that may be cut so."""
    whole = {"rows": set[str](), "columns": {"n"}, "terms": {"k"}, "hidden": {"n"}}[cut]
    found = [p for p in PRODUCTS if whole <= {*p.op.parallel, *p.op.contracted, *p.op.inner}]
    return [p for p in found if not {*CUTS[cut]}.isdisjoint(p.op.inputs)]


@cache
def product_on_one_device(name: str) -> tuple[Callable[..., Any], Any]:
    """The function of a product, and what every program on a mesh gives."""
    (product,) = (p for p in PRODUCTS if p.name == name)
    plain = partial(cute_ops_jax.register(product.op), **product.attrs)
    return plain, jax.jit(gradient(product.op, plain))(*product.arrays((4, 8)))


@pytest.mark.drawn(0.4)
@pytest.mark.feature("sharded jit, automatic and explicit mesh, shard_map: nothing is gathered")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("product", "cut"), [pytest.param(p, cut, id=f"{p.name}-{cut}") for cut in CUTS for p in every_product(cut)]
)
def test_products_of_slices(
    product: Product, cut: str, kind: AxisType, request: pytest.FixtureRequest, close: Close
) -> None:
    """Cut by rows, by columns and along the sum, after which the epilogue comes. Nothing is gathered, and there is one
    sum over devices: of gradients that devices share, or of the product; of a hidden layer both.
    """
    op, arrays = product.op, product.arrays((4, 8))
    plain, expected = product_on_one_device(product.name)
    # A program has no kernel of its own to stand in for.
    programs = op.program or any(step.program for step in op.steps)
    function = plain if programs else partial(request.getfixturevalue("through_ffi")(op), **product.attrs)
    mesh = mesh_of(kind)
    specs = [CUTS[cut].get(n, jax.P()) for n in op.inputs]
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, specs)
        forward = jax.jit(function).lower(*given).compile()
        both = jax.jit(gradient(op, function)).lower(*given).compile()
        close(jax.device_get(jax.block_until_ready(both(*given))), jax.device_get(expected))
    assert collectives(forward.as_text()) == ({"all-reduce": 1} if cut in ("terms", "hidden") else {})
    assert collectives(both.as_text()) == {"all-reduce": 2 if cut == "hidden" else 1}
    if cut == "rows" and kind == AxisType.Auto:
        of_gradients = tuple(specs[i] for i in testing.argnums(op))
        mapped = jax.shard_map(
            gradient(op, function), mesh=mesh, in_specs=tuple(specs), out_specs=(ROWS, of_gradients),
            axis_names={"data"},
        )  # fmt: skip
        close(jax.device_get(jax.jit(mapped)(*arrays)), jax.device_get(expected))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("transposed", [False, True])
def test_halves_of_packed_weights_are_shared(transposed: bool, kind: AxisType, close: Close) -> None:
    """Each device has its rows of gate and of up: nothing is gathered, and parts of sums are added up."""
    rng, mesh = np.random.default_rng(0), mesh_of(kind)
    shapes = ((8, 16), (16, 2, 32), (32, 12)) if transposed else ((8, 16), (2, 32, 16), (12, 32))
    arrays = [rng.standard_normal(shape, np.float32) / 4 for shape in shapes]
    specs = (jax.P(), jax.P(None, None, "data"), ROWS) if transposed else (jax.P(), TERMS, TERMS)

    def summed(*given: Any) -> Any:
        out = cute_ops_jax.gated_mlp(*given, transposed=transposed, halves=True)
        return jnp.sin(out).sum()

    both = jax.jit(jax.value_and_grad(summed, (0, 1, 2)))
    gate_up = arrays[1].reshape((16, 64) if transposed else (64, 16))
    expected = both(*arrays)
    unpacked = jax.jit(lambda *given: jnp.sin(cute_ops_jax.gated_mlp(*given, transposed=transposed)).sum())
    assert expected[0] == unpacked(arrays[0], gate_up, arrays[2])
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, specs)
        compiled = both.lower(*given).compile()
        close(jax.device_get(compiled(*given)), jax.device_get(expected))
    assert collectives(compiled.as_text()) == {"all-reduce": 2}  # of the output, and of the gradient of x


@pytest.mark.slow
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_modules_of_halves_gather_nothing(library: str, close: Close) -> None:
    """Devices share hidden features, so their outputs are added up."""
    x, mesh = np.random.default_rng(0).standard_normal((8, 16), np.float32), mesh_of(AxisType.Auto)
    if library == "nnx":
        nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
        module = pytest.importorskip("cute_ops_jax.nnx").PackedGatedMLP(16, 32, halves=True, rngs=nnx.Rngs(0))
    else:
        pytest.importorskip("equinox", reason="equinox is not installed")
        module = pytest.importorskip("cute_ops_jax.equinox").GatedMLP(16, 32, halves=True, key=jax.random.key(0))
    leaves, structure = jax.tree.flatten(module)
    run = jax.jit(lambda leaves, x: jax.tree.unflatten(structure, leaves)(x))
    specs = [jax.P(*("data" if size == 32 else None for size in leaf.shape)) for leaf in leaves]
    with jax.set_mesh(mesh):
        given = placed(mesh, leaves, specs)
        compiled = run.lower(given, x).compile()
        close(jax.device_get(compiled(given, x)), jax.device_get(module(x)))
    assert collectives(compiled.as_text()) == {"all-reduce": 1}


def gated_with_bias(xp: Any, acc: Any, bias: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n] + bias[..., :n]) * (acc[..., n:] + bias[..., n:])


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["gated_linear", "linear", "rmsnorm_linear"])
def test_halves_of_one_product_are_shared(name: str, transposed: bool, kind: AxisType, close: Close) -> None:
    """Each device has its columns of gate and of up, and so of the output."""
    rng, mesh = np.random.default_rng(0), mesh_of(kind)
    x, weight, bias = (rng.standard_normal(shape, np.float32) / 4 for shape in ((8, 16), (2, 32, 16), (64,)))
    weight, spec = (weight.transpose(2, 0, 1), COLUMNS) if transposed else (weight, TERMS)

    def summed(halves: bool, x: Any, weight: Any, bias: Any) -> Any:
        options = {"epilogue": gated_with_bias, "packed": True, "transposed": transposed, "halves": halves}
        if name == "gated_linear":
            out = cute_ops_jax.gated_linear(x, weight, transposed=transposed, halves=halves)
        elif name == "linear":
            out = cute_ops_jax.linear(x, weight, bias, **options)
        else:
            out = cute_ops_jax.rmsnorm_linear(x, None, weight, bias, **options)
        return jnp.sin(out).sum()

    both = jax.jit(jax.value_and_grad(partial(summed, True), (0, 1)))
    packed = weight.reshape((16, 64) if transposed else (64, 16))
    expected = both(x, weight, bias)
    np.testing.assert_array_equal(expected[0], jax.jit(partial(summed, False))(x, packed, bias))
    with jax.set_mesh(mesh):
        given = placed(mesh, (x, weight, bias), (jax.P(), spec, jax.P()))
        compiled = both.lower(*given).compile()
        close(jax.device_get(compiled(*given)), jax.device_get(expected))
    assert set(collectives(compiled.as_text())) == {"all-reduce"}  # of the loss, and of the gradient of x


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_transposed_product_before_a_norm_is_added_up(kind: AxisType, close: Close) -> None:
    """The norm comes after the sum over devices."""
    rng, mesh = np.random.default_rng(0), mesh_of(kind)
    shapes = ((8, 16), (16, 24), (8, 24), (24,))
    arrays = [rng.standard_normal(shape, np.float32) / 4 for shape in shapes]
    run = jax.jit(partial(cute_ops_jax.linear_add_rmsnorm, transposed=True))
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, (jax.P(None, "data"), ROWS, jax.P(), jax.P()))
        close(jax.device_get(run(*given)), jax.device_get(run(*arrays)))
        assert collectives(run.lower(*given).compile().as_text()) == {"all-reduce": 1}


def test_a_kernel_gives_way_where_devices_share_its_sum(through_ffi: Any, fake_kernels: Any) -> None:
    op, mesh = next(p.op for p in PRODUCTS if p.name == "linear_gelu"), mesh_of(AxisType.Auto)
    arrays = [jnp.ones(shape, "bfloat16") for shape in ((4, 16), (32, 16), (32,))]
    run = jax.jit(partial(through_ffi(op), fused="always"))
    for of_x, of_weight, kernel in ((ROWS, jax.P(), "linear_gelu"), (TERMS, TERMS, "linear_gelu_epilogue")):
        fake_kernels.calls.clear()
        jax.block_until_ready(run(*placed(mesh, arrays, (of_x, of_weight, jax.P()))))
        assert {symbol.rpartition("_")[0] for symbol, _ in fake_kernels.calls} == {f"cute_{kernel}"}


def test_a_row_that_is_cut_comes_together(through_ffi: Any, close: Close) -> None:
    """A norm needs whole rows: XLA gathers them, and the rows themselves stay where they are."""
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Auto)
    x, w = inputs(RMSNORM)[:2]
    given = placed(mesh, (x, w), (jax.P("data", None, "seq"), jax.P("seq")))
    compiled = jax.jit(function).lower(*given).compile()
    close(jax.device_get(jax.block_until_ready(compiled(*given))), cute_ops_jax.rmsnorm(x, w))
    assert set(collectives(compiled.as_text())) == {"all-gather"}


def test_gradients_are_sharded_by_type_as_what_they_are_of(through_ffi: Any, close: Close) -> None:
    """Also where the op gathers that first."""
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Explicit)
    x, w, dout = (np.asarray(a) for a in (*inputs(RMSNORM)[:2], inputs(RMSNORM)[0]))

    def gradients(function: Any, x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: jnp.sum(function(x, w) * dout), (0, 1))(x, w)

    expected = gradients(cute_ops_jax.rmsnorm, x, w)
    specs = jax.P("data", None, "seq"), jax.P("seq")
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, w: gradients(function, x, w))(*placed(mesh, (x, w), specs))
    assert tuple(gradient.sharding.spec for gradient in got) == specs
    close(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize("rows", [6, 12, 3])
def test_rows_that_do_not_divide(rows: int, through_ffi: Any, close: Close) -> None:
    """The padding of uneven slices never gets into a sum."""
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Auto)
    x, w = inputs(RMSNORM, (rows, 4))[:2]
    whole = NamedSharding(mesh, jax.P(("data", "seq")))

    def run(function: Any, constrain: Any) -> Any:
        def program(x: Any, w: Any) -> Any:
            out, pull = jax.vjp(lambda x, w: constrain(function(constrain(x), w)), x, w)
            return out, pull(jnp.cos(out))

        return program

    program = run(function, lambda a: jax.lax.with_sharding_constraint(a, whole))
    # What a program gives must divide.
    got = jax.jit(program, out_shardings=NamedSharding(mesh, jax.P()))(x, w)
    close(jax.device_get(got), jax.device_get(run(cute_ops_jax.rmsnorm, lambda a: a)(x, w)))


def test_slices_along_parts_of_an_axis_come_together(through_ffi: Any, close: Close) -> None:
    """A reshape leaves two dims of two with one mesh axis of four, whose parts have no names."""
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Auto)
    x, w = inputs(RMSNORM, (4, 6))[:2]

    def run(function: Any, x: Any, w: Any) -> Any:
        out, pull = jax.vjp(lambda x, w: function(x.reshape(2, 2, 6, N), w), x, w)
        return out, pull(jnp.cos(out))

    got = jax.jit(partial(run, function))(*placed(mesh, (x, w), (jax.P("data"), jax.P())))
    close(jax.device_get(got), jax.device_get(run(cute_ops_jax.rmsnorm, x, w)))


def test_parts_of_a_sum_are_rounded_once(through_ffi: Any, fake_kernels: Any) -> None:
    """bfloat16 weights: eight parts are added in float32."""
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Auto)
    x, w = (a.astype(jnp.bfloat16) for a in inputs(RMSNORM)[:2])

    def run(x: Any, w: Any) -> Any:
        out, pull = jax.vjp(function, x, w)
        return pull(out)[1]

    one = run(x, w)
    eight = jax.jit(run)(*placed(mesh, (x, w), (jax.P(("data", "seq")), jax.P())))
    assert eight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(eight), np.asarray(one))
    assert fake_kernels.variants[-1].tensors["dweight"].dtype == "float32"


def test_kernels_of_a_partitioned_program_are_known_when_it_is_lowered(through_ffi: Any, fake_kernels: Any) -> None:
    """XLA's persistent cache skips the partitioner, so nothing may wait for it; and the program names its kernels."""
    function, mesh = through_ffi(RMSNORM), mesh_of(AxisType.Auto)
    given = placed(mesh, inputs(RMSNORM)[:2], (jax.P("data"), jax.P()))
    lowered = jax.jit(lambda x, w: jax.vjp(function, x, w)[1](x)).lower(*given)
    known = {v.symbol for v in fake_kernels.variants}
    assert all(symbol in lowered.as_text() for symbol in known if "bwd" in symbol)
    jax.block_until_ready(lowered.compile()(*given))
    assert {symbol for symbol, _ in fake_kernels.calls} <= known


def test_kernels_of_every_slice_are_known_where_the_cache_may_be_hit(through_ffi: Any, fake_kernels: Any) -> None:
    """With JAX's option that has XLA's cache find partitioned programs: kernels of slices may be other ones."""
    function, mesh = through_ffi(SILU_MUL), mesh_of(AxisType.Auto)
    given = placed(mesh, inputs(SILU_MUL), [jax.P("data", None, "seq")] * 2)
    option = "jax_remove_custom_partitioning_ptr_from_cache_key"
    jax.config.update(option, True)
    try:
        lowered = jax.jit(function).lower(*given)
    finally:
        jax.config.update(option, False)
    known = {v.symbol for v in fake_kernels.variants}
    assert len(known) > 1
    assert all(symbol in lowered.as_text() for symbol in known)
    jax.block_until_ready(lowered.compile()(*given))
    assert {symbol for symbol, _ in fake_kernels.calls} < known


@pytest.mark.parametrize("jitted", [True, False])
def test_arrays_that_nobody_placed(jitted: bool, through_ffi: Any, close: Close) -> None:
    """Under a mesh, arrays without a sharding are computed whole by every device."""
    function, (x, w, *_) = through_ffi(RMSNORM), inputs(RMSNORM)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        got = (jax.jit(function) if jitted else function)(x, w)
    close(jax.device_get(got), cute_ops_jax.rmsnorm(x, w))


@pytest.mark.some_ops
def test_other_platforms_are_partitioned_by_xla(op: Op, close: Close) -> None:
    """XLA partitions the reference by itself."""
    function, arrays, mesh = testing.plain(op, cute_ops_jax.register(op)), inputs(op), mesh_of(AxisType.Auto)
    compiled = jax.jit(gradient(op, function)).lower(*placed(mesh, arrays, row_specs(op, "data"))).compile()
    got = compiled(*placed(mesh, arrays, row_specs(op, "data")))
    close(jax.device_get(got), jax.device_get(on_one_device(op)))
    assert "custom_call" not in compiled.as_text()


@pytest.mark.parametrize("axes", [("data",), (None, "seq"), ("data", "seq")], ids=str)
def test_examples_and_their_rows_are_shared(axes: tuple[str | None, ...], through_ffi: Any, close: Close) -> None:
    """Devices take examples, or rows of each: then what an example's rows share has sums to add up, and nothing is
    gathered.
    """

    def modulated(xp: Any, x: Any, gain: Any, shift: Any) -> Any:
        return xp.tanh(x) * (1.0 + gain) + shift

    op = fused(modulated, operands={"x": "*m n", "gain": "*b n", "shift": "*b 1"}, name="modulated_examples")
    rng, function, mesh = np.random.default_rng(5), through_ffi(op), mesh_of(AxisType.Auto)
    given = [jnp.asarray(rng.standard_normal(s), "float32") for s in ((8, 4, 24), (8, 24), (8, 1))]
    wanted = gradient(op, cute_ops_jax.register(op))(*given)
    with jax.set_mesh(mesh):
        x = jax.device_put(given[0], NamedSharding(mesh, jax.P(*axes)))
        compiled = jax.jit(gradient(op, function)).lower(x, *given[1:]).compile()
        close(jax.device_get(compiled(x, *given[1:])), jax.device_get(wanted))
    assert "all-gather" not in collectives(compiled.as_text())
    assert ("all-reduce" in collectives(compiled.as_text())) == ("seq" in axes)
