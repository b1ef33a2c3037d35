"""Transformations compose: each result equals the same computation written by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import Op, testing
from cute_ops.ops import OPS
from tests.jax.every_function import every
from tests.ops.crossed import CROSS

pytestmark = pytest.mark.some_ops
SIZE, ROWS, N = 3, 4, 6  # batch, rows, last dim
Close = Callable[[Any, Any], None]


def examples(op: Op, count: int = SIZE) -> list[np.ndarray]:
    """``count`` stacked examples of each input, batch in axis 0."""
    return testing.sample(op, (ROWS,), N, np.random.default_rng(7), count=count)


def function_of(op: Op) -> Callable[..., Any]:
    return testing.plain(op, cute_ops_jax.register(op))


def subsets(op: Op) -> list[tuple[str, ...]]:
    """One, two and all of many inputs, since there are too many subsets."""
    count = len(op.inputs)
    sizes = range(1, count + 1) if count <= 4 else (1, 2, count)
    return [s for k in sizes for s in itertools.combinations(op.inputs, k)]


def loss(op: Op, through: Callable[..., Any] | None = None) -> Callable[..., Any]:
    function = through or function_of(op)

    def run(*arrays: Any) -> Any:
        outputs = jax.tree.leaves(function(*arrays))
        return sum(jnp.sum(jnp.sin(o) * (i + 1)) for i, o in enumerate(outputs))

    return run


@cache
def gradient_of_loss(op: Op) -> Callable[..., Any]:
    """Compiled once for all that is compared with it; eagerly, every primitive would be a program to compile."""
    return jax.jit(jax.grad(loss(op), testing.argnums(op)))


def by_hand(function: Callable[..., Any], arrays: list[np.ndarray], batched: list[bool]) -> Any:
    """``vmap`` as a Python loop; an input that is not batched is its first example."""
    calls = [function(*(a[i] if b else a[0] for a, b in zip(arrays, batched, strict=True))) for i in range(SIZE)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *calls)


@pytest.mark.slow
@pytest.mark.drawn(0.25)
@pytest.mark.feature("vmap, any subset of inputs")
def test_vmap_of_some_inputs_only(any_op: Op, close: Close) -> None:
    """Every subset of the inputs is batched, each time in another dim; all in one program, which XLA compiles once."""
    function, arrays, calls = function_of(any_op), examples(any_op), []
    for turn, subset in enumerate(subsets(any_op)):
        batched = [name in subset for name in any_op.inputs]
        axes = [(turn + k) % a.ndim if b else None for k, (a, b) in enumerate(zip(arrays, batched, strict=True))]
        moved = [a[0] if axis is None else np.moveaxis(a, 0, axis) for a, axis in zip(arrays, axes, strict=True)]
        calls.append((batched, jax.vmap(function, tuple(axes)), moved))
    found = jax.jit(lambda given: [call(*moved) for (_, call, _), moved in zip(calls, given, strict=True)])
    for (batched, *_), got in zip(calls, found([moved for *_, moved in calls]), strict=True):
        close(got, by_hand(function, arrays, batched))


@pytest.mark.drawn(0.5)
@pytest.mark.feature("vmap, any axis in and out")
@pytest.mark.parametrize(("axis", "out_axis"), [(0, 1), (1, -1), (2, 0), (-1, 1)])
def test_vmap_in_every_axis(any_op: Op, axis: int, out_axis: int, close: Close) -> None:
    function, arrays = function_of(any_op), examples(any_op)
    rows = [t.rows is not None for t in any_op.inputs.values()]
    axes = [min(axis, a.ndim - 1) if row else None for a, row in zip(arrays, rows, strict=True)]
    moved = [a[0] if at is None else np.moveaxis(a, 0, at) for a, at in zip(arrays, axes, strict=True)]
    got = jax.vmap(function, tuple(axes), out_axis)(*moved)
    expected = jax.tree.map(lambda a: np.moveaxis(a, 0, out_axis), by_hand(function, arrays, rows))
    close(got, expected)


def test_vmap_over_rows_is_one_call_without_a_loop(row_op: Op) -> None:
    arrays = examples(row_op)
    axes = tuple(0 if t.rows else None for t in row_op.inputs.values())
    moved = [a if axis == 0 else a[0] for a, axis in zip(arrays, axes, strict=True)]
    jaxpr = str(jax.make_jaxpr(jax.vmap(function_of(row_op), axes))(*moved))
    assert jaxpr.count(f"cute_{row_op.name}[") == 1
    assert "scan" not in jaxpr


@pytest.mark.slow
@pytest.mark.parametrize("batched", [(True, False), (False, True), (True, True)], ids=str)
def test_vmap_of_leading_dims_of_two_names(
    batched: tuple[bool, bool], through_ffi: Any, fake_kernels: Any, close: Close
) -> None:
    """Each example of ``*m`` sees its own ``*p``; only batched ``*m`` fold into one call, by name."""
    function, rng = through_ffi(CROSS), np.random.default_rng(0)
    arrays = [rng.standard_normal((SIZE, *lead, 4)).astype(np.float32) for lead in ((2, 3), (5,))]
    given = [a if b else a[0] for a, b in zip(arrays, batched, strict=True)]
    axes = tuple(0 if b else None for b in batched)
    for run in (function, jax.grad(loss(CROSS, function), (0, 1))):
        fake_kernels.calls.clear()
        got = jax.block_until_ready(jax.vmap(run, axes)(*given))
        seen = [shapes[:2] for _, shapes in fake_kernels.calls]
        close(jax.device_get(got), jax.device_get(by_hand(run, arrays, list(batched))))
        if run is function:
            assert seen == ([[(18, 4), (5, 4)]] if batched == (True, False) else [[(6, 4), (5, 4)]] * SIZE)


@pytest.mark.feature("vmap of vmap")
def test_nested_vmap(any_op: Op, close: Close) -> None:
    function, arrays = function_of(any_op), examples(any_op)
    twice = [np.stack([a, a[::-1]]) for a in arrays]
    got = jax.vmap(jax.vmap(function))(*twice)
    close(jax.tree.map(lambda a: a[1], got), jax.vmap(function)(*(a[::-1] for a in arrays)))


def test_vmap_of_no_example(any_op: Op) -> None:
    outputs = jax.vmap(function_of(any_op))(*(a[:0] for a in examples(any_op)))
    shapes = [(0, *any_op.results[n].of(any_op.example((ROWS,), N))) for n in (*any_op.mutates, *any_op.shown)]
    assert [o.shape for o in jax.tree.leaves(outputs)] == shapes


@pytest.mark.feature("vmap of grad")
@pytest.mark.parametrize("share_weights", [True, False])
def test_vmap_of_grad_gives_a_gradient_per_example(op: Op, share_weights: bool, close: Close) -> None:
    arrays = examples(op)
    batched = [t.rows is not None or not share_weights for t in op.inputs.values()]
    gradient = gradient_of_loss(op)
    given = [a if b else a[0] for a, b in zip(arrays, batched, strict=True)]
    got = jax.vmap(gradient, tuple(0 if b else None for b in batched))(*given)
    close(got, by_hand(gradient, arrays, batched))


def test_vmap_of_vjp_with_shared_primals(op: Op, close: Close) -> None:
    """Many cotangents of one point, as a Jacobian asks for: only ``d<output>`` is batched in the backward op."""
    arrays = [a[0] for a in examples(op)]
    function, at = function_of(op), testing.argnums(op)

    def differentiated(*given: Any) -> Any:
        chosen = dict(zip(at, given, strict=True))
        return function(*(chosen.get(i, a) for i, a in enumerate(arrays)))

    outputs, pull = jax.vjp(differentiated, *(arrays[i] for i in at))
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(lambda o: rng.standard_normal((SIZE, *o.shape), np.float32), outputs)
    calls = [pull(jax.tree.map(lambda c, i=i: c[i], cotangents)) for i in range(SIZE)]
    close(jax.vmap(pull)(cotangents), jax.tree.map(lambda *leaves: np.stack(leaves), *calls))


@pytest.mark.feature("grad of vmap")
def test_grad_of_vmap_sums_over_examples(op: Op, close: Close) -> None:
    arrays = examples(op)
    shared = [a if t.rows else a[0] for a, t in zip(arrays, op.inputs.values(), strict=True)]
    axes = tuple(0 if t.rows else None for t in op.inputs.values())
    everything = testing.argnums(op)
    got = jax.jit(jax.grad(lambda *given: jnp.sum(jax.vmap(loss(op), axes)(*given)), everything))(*shared)
    close(got, gradient_of_loss(op)(*shared))


@pytest.mark.slow
@pytest.mark.feature("ahead of time: lower, compile")
@pytest.mark.feature("jit, eager, gradients where there are any")
def test_jit_changes_nothing(any_op: Op, close: Close) -> None:
    arrays = [a[0] for a in examples(any_op)]
    run = jax.value_and_grad(loss(any_op), testing.argnums(any_op)) if any_op.grad else function_of(any_op)
    compiled = jax.jit(lambda *given: run(*given)).lower(*arrays).compile()(*arrays)
    close(compiled, run(*arrays))
    with jax.disable_jit():
        close(run(*arrays), compiled)


def chain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Three calls in a row, each on the output of the former."""

    def run(first: Any, *others: Any) -> Any:
        for _ in range(3):
            first = function(first, *others)
        return jnp.sum(jnp.sin(first))

    return run


@pytest.mark.feature("scan and its gradient")
def test_scan_and_its_gradient(op: Op, close: Close, again: Callable[..., Any]) -> None:
    arrays = [a[0] for a in examples(op)]
    function = again(function_of(op))

    def scanned(first: Any, *others: Any) -> Any:
        def step(carry: Any, _: Any) -> tuple[Any, Any]:
            return function(carry, *others), None

        return jnp.sum(jnp.sin(jax.lax.scan(step, first, None, length=3)[0]))

    everything = testing.argnums(op)
    expected = jax.jit(jax.value_and_grad(chain(function), everything))(*arrays)
    close(jax.jit(jax.value_and_grad(scanned, everything))(*arrays), expected)


def test_checkpoint_recomputes_and_agrees(op: Op, close: Close, again: Callable[..., Any]) -> None:
    arrays = [a[0] for a in examples(op)]
    everything = testing.argnums(op)
    chained = chain(again(function_of(op)))
    plain, saved = jax.grad(chained, everything), jax.grad(jax.checkpoint(chained), everything)
    close(jax.jit(saved)(*arrays), jax.jit(plain)(*arrays))
    name = f"cute_{op.name}["
    # The last call's output is only summed, so its input suffices; how many come back is JAX's choice.
    assert str(jax.make_jaxpr(saved)(*arrays)).count(name) > str(jax.make_jaxpr(plain)(*arrays)).count(name)


@pytest.mark.feature("cond, while")
def test_cond_and_while(any_op: Op, close: Close, again: Callable[..., Any]) -> None:
    function, arrays = again(function_of(any_op)), [a[0] for a in examples(any_op)]
    first = function(*arrays)
    got = jax.jit(lambda flag, *given: jax.lax.cond(flag, lambda: function(*given), lambda: given[0]))
    close(got(True, *arrays), first)
    close(got(False, *arrays), arrays[0])
    wrt = testing.argnums(any_op)
    for flag, branch in ((True, function), (False, lambda *given: given[0])) if wrt else ():
        through = jax.grad(lambda *given, flag=flag: jnp.sum(jnp.sin(got(flag, *given))), wrt)
        alone = jax.jit(jax.grad(lambda *given, branch=branch: jnp.sum(jnp.sin(branch(*given))), wrt))
        close(through(*arrays), alone(*arrays))
    looped = jax.lax.while_loop(
        lambda state: state[0] < 2,
        lambda state: (state[0] + 1, function(state[1], *arrays[1:])),
        (0, arrays[0]),
    )[1]
    close(looped, function(first, *arrays[1:]))


@pytest.mark.feature("inside a custom_vjp")
def test_an_op_inside_a_users_custom_vjp(op: Op, close: Close) -> None:
    arrays = [a[0] for a in examples(op)]
    plain = loss(op)
    wrapped = jax.custom_vjp(plain)
    wrapped.defvjp(lambda *given: jax.vjp(plain, *given), lambda pull, cotangent: pull(cotangent))
    close(jax.jit(jax.grad(wrapped, testing.argnums(op)))(*arrays), gradient_of_loss(op)(*arrays))


def policies(op: Op) -> dict[str, Any]:
    return {
        "named": jax.checkpoint_policies.save_only_these_names(f"cute_{op.name}"),
        "by primitive": lambda primitive, *_, **__: primitive.name == f"cute_{op.name}",
        "none": jax.checkpoint_policies.nothing_saveable,
    }


@pytest.mark.feature("FFI: checkpoint, policies that name the op")
def test_policies_of_checkpoint_know_the_op(op: Op, through_ffi: Any, close: Close) -> None:
    """The forward runs once where its outputs are saved, twice where they are not."""
    arrays, wrt = examples_of_one(op), testing.argnums(op)
    function = testing.plain(op, through_ffi(op))

    def run(*given: Any) -> Any:
        return sum(jnp.sum(jnp.sin(o)) for o in jax.tree.leaves(function(*given)))

    expected = jax.jit(jax.value_and_grad(run, wrt))(*arrays)
    for name, policy in policies(op).items():
        lowered = jax.jit(jax.value_and_grad(jax.checkpoint(run, policy=policy), wrt)).lower(*arrays)
        close(lowered.compile()(*arrays), expected)
        # As lowered: on CPUs, XLA merges equal calls again.
        calls = re.findall(rf"custom_call @cute_{op.name}_[0-9a-f]{{24}}\(", lowered.as_text())
        assert len(calls) == (2 if name == "none" else 1), name


@pytest.mark.feature("eval_shape")
def test_eval_shape_runs_nothing(any_op: Op) -> None:
    function, arrays = testing.plain(any_op, cute_ops_jax.register(any_op)), examples_of_one(any_op)
    shapes = jax.eval_shape(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    real = function(*arrays)
    assert [(o.shape, o.dtype) for o in jax.tree.leaves(shapes)] == [(o.shape, o.dtype) for o in jax.tree.leaves(real)]
    if wrt := testing.argnums(any_op):
        gradients = jax.eval_shape(jax.grad(loss(any_op), wrt), *arrays)
        assert [(g.shape, g.dtype) for g in gradients] == [(arrays[i].shape, arrays[i].dtype) for i in wrt]


@pytest.mark.feature("FFI: donated arguments")
def test_donated_arguments_are_used_up(any_op: Op, through_ffi: Any, device: jax.Device, close: Close) -> None:
    """Donated inputs may be overwritten, and every result is still right."""
    function, arrays = testing.plain(any_op, through_ffi(any_op)), examples_of_one(any_op)

    def step(first: Any, *others: Any) -> Any:
        leaves = jax.tree.leaves(function(first, *others))
        return (first + jnp.sum(leaves[0], dtype=jnp.float32).astype(first.dtype), *leaves)

    expected = step(*arrays)
    given = [jax.device_put(a, device) for a in arrays]
    close(jax.jit(step, donate_argnums=0)(*given), expected)
    assert given[0].is_deleted()


def examples_of_one(op: Op) -> list[np.ndarray]:
    return testing.sample(op, (ROWS,), N, np.random.default_rng(7))


def test_an_unused_output_costs_no_zeros() -> None:
    """A cotangent that does not exist is left out instead of read as zeros."""
    x = np.ones((ROWS, N), np.float32)
    gradient = jax.grad(lambda *given: jnp.sum(cute_ops_jax.add_rmsnorm(*given)[0]), (0, 1))
    jaxpr = str(jax.make_jaxpr(gradient)(x, x))
    assert "names=('residual_out', 'dout')" in jaxpr


def test_only_the_other_output_used(close: Close) -> None:
    """A missing cotangent that the backward op requires is zeros."""
    x = np.ones((ROWS, N), np.float32)
    got = jax.grad(lambda *given: jnp.sum(cute_ops_jax.add_rmsnorm(*given)[1]), (0, 1))(x, x)
    close(got, (x, x))


def test_shared_gradient_serves_both_inputs() -> None:
    x = np.linspace(-1, 1, N, dtype=np.float32)
    dx, dresidual = jax.grad(lambda *given: jnp.sum(jnp.sin(cute_ops_jax.add_rmsnorm(*given)[0])), (0, 1))(x, x)
    np.testing.assert_array_equal(dx, dresidual)
    wide = x.astype(jnp.bfloat16)
    dx, dresidual = jax.grad(lambda *given: jnp.sum(cute_ops_jax.add_rmsnorm(*given)[1]), (0, 1))(wide, x)
    assert (dx.dtype, dresidual.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.feature("FFI: many threads")
def test_threads_may_trace_at_once(any_op: Op, device: jax.Device, through_ffi: Any, close: Close) -> None:
    from concurrent.futures import ThreadPoolExecutor

    arrays = [jax.device_put(a[0], device) for a in examples(any_op)]
    ours, plain = testing.plain(any_op, through_ffi(any_op)), function_of(any_op)
    if any_op.grad:
        ours, plain = jax.grad(loss(any_op, ours)), jax.grad(loss(any_op))
    with ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(lambda _: jax.jit(lambda *given: ours(*given)).lower(*arrays), range(4)))
        assert len({program.as_text() for program in programs}) == 1
        compiled = programs[0].compile()  # and once, since they are one program
        results = list(pool.map(lambda _: compiled(*arrays), range(4)))
    expected = jax.jit(plain)(*arrays)
    for result in results:
        close(result, expected)


def scanned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls whose first input is differentiated in the second turn, whether or not the first turn's is."""
    return lambda x, w: jax.lax.scan(lambda c, _: (jnp.sin(function(c, w) @ w), None), x, None, length=2)[0]


def on_two_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P("rows"))


WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda function: function, "jit": jax.jit, "checkpoint": jax.checkpoint, "scan": scanned,
    "shard_map": on_two_devices, "vmap": lambda function: jax.vmap(function, (0, None)),
    "scan of checkpoint": lambda function: scanned(jax.checkpoint(function)),
    "jit of shard_map": lambda function: jax.jit(on_two_devices(function)),
}  # fmt: skip


X_AND_W = tuple(map(np.random.default_rng(0).standard_normal, ((2, 3, 4), (5, 4)), (np.float32, np.float32)))


def gradient_of(function: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., Any]:
    return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums)


@cache
def gradient_of_tanh(way: str, argnums: tuple[int, ...]) -> Any:
    """Compiled once for all that is compared with it."""
    return jax.jit(gradient_of(WAYS[way](lambda x, w: jnp.tanh(x @ w.T)), argnums))(*X_AND_W)


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_a_gradient_run_where_somebody_reads_them(product: Any, way: str, close: Close) -> None:
    """One function, of which another call wants other gradients."""
    x, w = X_AND_W
    function = cute_ops_jax.register(product.op)
    found: dict[tuple[int, ...], set[str]] = {}
    for argnums in ((0, 1), (0,), (1,), (0, 1)):
        ours = WAYS[way](lambda x, w: function(x, w))  # one that JAX has not traced
        wanted = {"inner", *(("dgrad", "wgrad")[k] for k in argnums)}
        # The second turn of a scan needs the gradient of what the first one made from w.
        wanted |= {"dgrad"} if "scan" in way else set()
        gradient, expected = gradient_of(ours, argnums), gradient_of_tanh(way, argnums)
        product.ran.clear()
        named = set(re.findall(r"cute_(inner|dgrad|wgrad)_", str(jax.make_jaxpr(gradient)(x, w))))
        # Inside of a shard_map programs run while traced. JAX 0.12 does not trace again what it has traced.
        ran = named | product.ran - {"product", "tanh"} or found.get(argnums, set())
        found[argnums] = ran
        assert ran == wanted
        close(jax.jit(gradient)(x, w), expected)


def test_what_only_an_unwanted_gradient_reads_is_not_saved(product: Any) -> None:
    x, w, function = jnp.ones((2, 4)), jnp.ones((5, 4)), jax.jit(cute_ops_jax.register(product.op))
    for given, other, kept in ((x, w, {(5, 4), (2, 5)}), (w, x, {(2, 4), (2, 5)})):
        call = (lambda x: function(x, other)) if given is x else (lambda w: function(other, w))  # noqa: B023
        _, pull = jax.vjp(call, given)
        assert {a.shape for a in jax.tree.leaves(pull) if a.size} == kept


@pytest.mark.parametrize(
    ("frozen", "suffix"), [((), ""), (("bias",), "_dweight"), (("weight", "bias"), ""), (("weight",), "_dbias")]
)
@pytest.mark.parametrize("name", ["rmsnorm", "add_rmsnorm", "layernorm"])
def test_frozen_weights_of_norms_have_no_gradient(
    name: str, frozen: tuple[str, ...], suffix: str, close: Close
) -> None:
    op = next(op for op in OPS if op.name == name)
    arrays = testing.sample(op, (ROWS,), N, np.random.default_rng(7))
    every = range(len(arrays))
    argnums = tuple(k for k, n in enumerate(op.inputs) if n not in frozen)
    expected = jax.jit(jax.grad(loss(op), tuple(every)))(*arrays)
    stopped = lambda *given: loss(op)(  # noqa: E731
        *(jax.lax.stop_gradient(a) if n in frozen else a for n, a in zip(op.inputs, given, strict=True))
    )
    first = "_dx_dresidual" if name == "add_rmsnorm" else "_dx"
    for run, chosen in ((jax.grad(loss(op), argnums), argnums), (jax.grad(stopped, tuple(every)), every)):
        found = set(re.findall(rf"cute_({name}_bwd\w*)\[", str(jax.make_jaxpr(run)(*arrays))))
        assert found == {f"{name}_bwd" + (f"_only{first}{suffix}" if frozen else "")}
        got = dict(zip(chosen, jax.jit(run)(*arrays), strict=True))
        for k, a in got.items():
            close(a, expected[k] if k in argnums else np.zeros_like(expected[k]))


def test_examples_of_a_frozen_norm_are_one_backward() -> None:
    """A gradient of the weight would be one for each example, in a loop."""
    op = next(op for op in OPS if op.name == "rmsnorm")
    x, w = examples(op)[0], jnp.ones(N)
    for argnums, loops in ((0, False), ((0, 1), True)):
        text = str(jax.make_jaxpr(jax.vmap(jax.grad(loss(op), argnums), (0, None)))(x, w))
        assert ("scan[" in text or "while[" in text) == loops


# By function, an argument, and the ops of the gradient to it alone.
ALONE = {
    "rmsnorm": (1, ["rmsnorm_bwd_only_dweight"]),
    "layernorm": (2, ["layernorm_bwd_only_dbias"]),
    "linear": (1, ["linear_dweight"]),
    "linear_add": (2, []),
    "gated_mlp": (2, ["gated_mlp_bwd_only_hidden", "gated_mlp_dw_down"]),
    "mlp": (2, ["mlp_bwd_only_hidden", "mlp_dw_down"]),
    "linear_add_rmsnorm": (0, ["linear_add_rmsnorm_bwd_only_dresidual", "linear_of_dresidual_dx"]),
    "rmsnorm_linear": (2, ["rmsnorm_linear_dx", "rmsnorm_linear_norm_bwd_only_dnorm_weight"]),
    "embedding": (1, ["embedding_bwd"]),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_gradient_alone_computes_no_other(name: str, close: Close) -> None:
    function = next(f for f in every((2, 4)) if f.name == name)
    k, expected = ALONE[name]
    alone = jax.grad(function.loss, k)
    jaxpr = str(jax.make_jaxpr(alone)(*function.arrays))
    called = re.findall(r"\bcute_(\w+)\[", jaxpr)
    assert [one for one in called if re.search(r"_(bwd|dx|dweight|dw)(_|$)", one)] == expected
    close(alone(*function.arrays), function.gradient(*function.arrays)[function.differentiable.index(k)])


@pytest.mark.parametrize("how", ["rank", "dtype"])
def test_programs_that_refuse_promotion(how: str) -> None:
    x, w, t = jnp.ones((4, 8), jnp.bfloat16), jnp.ones(8), jnp.zeros(4, jnp.int32)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        y = cute_ops_jax.dropout_add_rmsnorm(x, x, w, 3)[0]
        z = cute_ops_jax.rope_from_positions(y[None, :, None], jnp.arange(4))
        losses = cute_ops_jax.linear_log_probs(z[:, :, 0], x, t[None])
        return losses.sum() + cute_ops_jax.linear_cross_entropy(y, x, t)

    gradient = jax.grad(run, (0, 1))
    strict = {"rank": jax.numpy_rank_promotion("raise"), "dtype": jax.numpy_dtype_promotion("strict")}[how]
    with strict:
        found = jax.jit(gradient)(x, w)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found, jax.jit(gradient)(x, w)))


def test_the_gradient_of_an_op_with_a_number_for_an_array() -> None:
    x, w = jnp.ones((4, 8)), jnp.ones(8)

    def gradient(seed: Any) -> jax.Array:
        return jax.grad(lambda x: jnp.sin(cute_ops_jax.dropout_add_rmsnorm(x, 2 * x, w, seed, 0.5)[0]).sum())(x)

    np.testing.assert_array_equal(gradient(3), gradient(jnp.int32(3)))
