"""The kernels under JAX on a GPU: values, transformations, CUDA graphs, and a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import Case, Op, testing
from cute_ops.autotune.dispatch import foresee, limit_static
from cute_ops.calls.lookup import ours
from cute_ops.cli.author import NOT_SWEPT
from cute_ops.composite import chunks
from cute_ops.declaration.binding import bind
from cute_ops.jit import cache, target
from cute_ops.ops.gemm.linear import PRODUCTS
from cute_ops.tools import sweep
from cute_ops_jax.primitive.primitive import primitive_of
from cute_ops_jax.tools import runner
from tests.ops.epilogues import OPS as EPILOGUES
from tests.ops.epilogues import columns

pytestmark = pytest.mark.gpu
ROOT = Path(cute_ops_jax.__file__).parents[1]


def test_values_against_float64(any_problem: Any, run_op: Callable[..., Any]) -> None:
    arrays = any_problem.inputs()
    testing.check(any_problem.op, arrays, any_problem.attrs, run_op(any_problem.op, arrays, any_problem.attrs))


def others(trial: sweep.SweepCall, arrays: testing.Arrays) -> list[testing.Arrays]:
    """More inputs of a trial, on which the reference's loss is measured if it has few numbers."""
    return [testing.inputs(*trial[:3], seed) for seed in range(1, 1 + testing.draws(arrays))]


def test_a_sample_of_the_sweep() -> None:
    """Lengths of one round of the sweep that PyTorch runs whole; ``CUTE_OPS_SWEEP_SEED`` repeats a run."""
    seed = int(os.environ.get("CUTE_OPS_SWEEP_SEED") or time.time_ns() % 2**31)
    ops = [op for op in ours().values() if op.name not in NOT_SWEPT]
    where = target.of_device()
    some = [t for op in ops for t in sweep.trials(op, where, seed % 12, seed, 0.0003) if t.fixed]
    # A program has no kernel of its own; its ops' are compiled when it calls them.
    bindings = [bind(t.op, testing.specs(t.op, t.case, t.dtype), t.case.attrs) for t in some if t.op.kernel]
    cache.build_all(foresee(binding, {}, where).variant for binding in bindings)
    limit_static(1 << 30)
    for trial in some:
        arrays, attrs = testing.inputs(*trial[:3]), testing.attributes(*trial[:2])
        try:
            testing.check(trial.op, arrays, attrs, runner.run(trial.op, arrays, attrs), partial(others, trial, arrays))
        except AssertionError as error:
            raise AssertionError(f"CUTE_OPS_SWEEP_SEED={seed}: {trial}: {error}") from error


def test_a_compiled_program_calls_the_kernel(op: Op) -> None:
    for one in (op, op.grad):
        some = testing.sample(one, (33,), 256, np.random.default_rng(0), "bfloat16")
        given = dict(zip(one.inputs, some, strict=True))
        text = jax.jit(lambda arrays, one=one: primitive_of(one)(arrays, {})).lower(given).compile().as_text()
        assert f'custom_call_target="cute_{one.name}_' in text


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def widened(a: Any) -> Any:
    return a if a.dtype == jnp.float64 else a.astype(jnp.float32)


def programs(op: Op, function: Callable[..., Any], again: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    everything = testing.argnums(op)
    rows = tuple(0 if t.rows else None for t in op.inputs.values())

    def loss(*given: Any) -> Any:
        return sum(jnp.sum(jnp.sin(widened(o))) for o in jax.tree.leaves(function(*given)))

    def scanned(first: Any, *others: Any) -> Any:
        step = jax.checkpoint(lambda carry: again(function)(carry, *others))
        last = jax.lax.scan(lambda carry, _: (step(carry), None), first, None, length=3)[0]
        return jnp.sum(jnp.sin(widened(last)))

    def empty(*given: Any) -> Any:
        return jax.grad(loss, everything)(
            *(a[:, :0] if t.rows else a for a, t in zip(given, op.inputs.values(), strict=True))
        )

    return {
        "eager": function,
        "jit of grad": jax.jit(jax.grad(loss, everything)),
        "eager grad": jax.grad(loss, everything),
        "vmap": jax.jit(jax.vmap(function, rows)),
        "vmap of every input": jax.jit(jax.vmap(lambda *given: function(given[0] * 2, *given[1:]), rows)),
        "vmap over axis 1": jax.jit(jax.vmap(function, tuple(1 if r == 0 else None for r in rows), 1)),
        "vmap of grad": jax.jit(jax.vmap(jax.grad(loss, everything), rows)),
        "grad of scan of checkpoint": jax.jit(jax.grad(scanned, everything)),
        "zero rows": jax.jit(empty),
    }


# How often a program applies the op or its gradient in a row: each may lose one float32 unit of the largest value.
APPLIED = {"grad of scan of checkpoint": 6}


def moved(program: Callable[..., Any], wide: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    """How much the exact results of a chain change when its float inputs change by one float32 unit.

    A chain enlarges some roundings and not others, which depends on its inputs: of two equally good orders of a sum,
    one loses up to forty times as much as the other after three rounds.
    """
    rng = np.random.default_rng(7)
    far = [0.0] * len(exact)
    for _ in range(4):
        steps = [
            0.0 if a.dtype.kind == "i" else testing.EPS["float32"] * rng.choice([-1.0, 1.0], a.shape) for a in wide
        ]
        near = leaves(program(*((a + a * step).astype(a.dtype) for a, step in zip(wide, steps, strict=True))))
        far = [max(f, float(np.max(np.abs(b - e), initial=0.0))) for f, b, e in zip(far, near, exact, strict=True)]
    return far


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [64, 1000, 4097])
def test_transformations_against_float64(op: Op, dtype: str, n: int, again: Callable[..., Any]) -> None:
    """Whole programs meet the rule of :mod:`cute_ops.testing`: they lose at most twice what the same program loses on
    the CPU, where every op is the reference and rounds its outputs, or with the reference inlined on the GPU. A chain
    may also lose what a change of its inputs by one unit makes.
    """
    rng = np.random.default_rng(2)
    arrays = testing.sample(op, (3, 5), n, rng, dtype)
    ours = testing.plain(op, cute_ops_jax.register(op))
    results = {name: leaves(program(*arrays)) for name, program in programs(op, ours, again).items()}

    def reference(*given: Any) -> Any:
        results = testing.shown(op, op.reference(jnp, *given, **op.attrs))
        return results if len(results) > 1 else results[0]

    inlined = {name: leaves(program(*arrays)) for name, program in programs(op, reference, again).items()}
    with jax.default_device(jax.devices("cpu")[0]):
        # Op by op: in a jitted program XLA inlines the reference and may keep what it should round.
        with jax.disable_jit():
            called = {name: leaves(program(*arrays)) for name, program in programs(op, ours, again).items()}
        with jax.enable_x64(True):
            wide = [a if a.dtype.kind == "i" else a.astype(np.float64) for a in arrays]
            exactly = programs(op, reference, again)
            exacts = {name: leaves(program(*wide)) for name, program in exactly.items()}
            units = {name: moved(exactly[name], wide, exacts[name]) for name in APPLIED}
    # The programs take the sine of what the op returns: of a large argument they keep its rounding, not their own.
    largest = max(float(np.max(np.abs(a), initial=1.0)) for a in exacts["eager"])
    for name, mine in results.items():
        steps = units.get(name, [0.0] * len(mine))
        for got, low, other, exact, step in zip(mine, called[name], inlined[name], exacts[name], steps, strict=True):
            assert (got.shape, got.dtype) == (low.shape, low.dtype), name
            unit = testing.EPS[str(low.dtype)] * np.abs(exact)
            losses = [np.max(np.abs(a.astype(np.float64) - exact) - unit, initial=0.0) for a in (low, other)]
            beyond = max(losses)
            floor = APPLIED.get(name, 1) * testing.EPS["float32"] * np.max(np.abs(exact), initial=largest)
            excess = np.abs(got.astype(np.float64) - exact) - 2 * (unit + max(beyond, floor, step))
            assert np.all(excess <= 0), (
                f"{name}: {np.max(excess):.3g} beyond tolerance, of values up to {np.max(np.abs(exact)):.3g}; "
                f"the reference loses {losses[0]:.3g} on the CPU and {losses[1]:.3g} on the GPU; "
                f"a unit of the inputs makes {step:.3g}"
            )


def test_per_example_gradients_are_those_of_single_calls(op: Op) -> None:
    rng = np.random.default_rng(4)
    arrays = testing.sample(op, (37,), 512, rng, count=3)
    function = testing.plain(op, cute_ops_jax.register(op))
    gradient = jax.jit(
        jax.grad(
            lambda *given: sum(jnp.sum(jnp.sin(o)) for o in jax.tree.leaves(function(*given))),
            testing.argnums(op),
        )
    )
    together = jax.vmap(gradient)(*arrays)
    for i in range(3):
        for mine, other in zip(together, gradient(*(a[i] for a in arrays)), strict=True):
            np.testing.assert_allclose(mine[i], other, rtol=1e-4, atol=1e-4)


CHAIN = """
import json, sys
import jax, jax.numpy as jnp, cute_ops_jax
x = jax.random.normal(jax.random.key(0), (8, 256), jnp.bfloat16)
def chain(x):
    for _ in range(32):
        x = cute_ops_jax.rmsnorm(x)
    return x
compiled = jax.jit(chain).lower(x).compile()
for _ in range(50):
    y = compiled(x).block_until_ready()
print(json.dumps({
    "calls": compiled.as_text().count('custom_call_target="cute_rmsnorm_'),
    "sum": float(y.astype(jnp.float32).sum()), "compiler": "cutlass" in sys.modules,
}))
"""


def fresh(code: str, **environment: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_calls_are_captured_in_a_cuda_graph(tmp_path: Path) -> None:
    """XLA reports that one command buffer holds all the calls."""
    fresh(CHAIN)  # compiled once, so that the runs below are warm starts
    dump = f"--xla_dump_to={tmp_path}"
    captured = fresh(CHAIN, XLA_FLAGS=dump)
    (thunks,) = tmp_path.glob("*jit_chain.thunk_sequence_after_thunk_passes.txt")
    lines = thunks.read_text().splitlines()
    assert "kCommandBuffer" in lines[0]
    assert sum("kCustomCall" in line and line.startswith(" ") for line in lines) == 32
    launched = fresh(CHAIN, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    assert captured["calls"] == launched["calls"] == 32
    assert captured["sum"] == launched["sum"]
    assert not captured["compiler"], "a warm start imports the compiler"


LAYER = """
import json
import jax, jax.numpy as jnp, cute_ops_jax
m, k = 304, 256
shapes = (m, k), (k, k), (k,), (2 * 520, k), (k, 520), (4 * 64, k)
given = [jax.random.normal(jax.random.key(i), s, jnp.bfloat16) / s[-1] ** 0.5 for i, s in enumerate(shapes)]
angles = jax.random.uniform(jax.random.key(9), (m, 32))
def loss(x, weight, bias, gate_up, down, qkv):
    x = cute_ops_jax.linear(x, weight, bias, epilogue="gelu", fused="always")
    x = cute_ops_jax.gated_mlp(x, gate_up, down, fused="always")
    out = cute_ops_jax.qkv_rope(x, qkv, jnp.cos(angles), jnp.sin(angles), 3, fused="always")
    return jnp.sin(out.astype(jnp.float32)).sum()
compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4, 5))).lower(*given).compile()
for _ in range(5):
    gradients = jax.block_until_ready(compiled(*given))
sizes = [float(jnp.abs(g.astype(jnp.float32)).mean()) for g in gradients]
print(json.dumps({"calls": compiled.as_text().count('custom_call_target="cute_'), "sizes": sizes}))
"""


def test_products_and_their_gradients_are_captured_in_a_cuda_graph(tmp_path: Path) -> None:
    """An epilogue, a gated MLP and rotated projections: no call of ours is outside of a command buffer."""
    captured = fresh(LAYER, XLA_FLAGS=f"--xla_dump_to={tmp_path}")
    (thunks,) = tmp_path.glob("*jit_loss.thunk_sequence_after_thunk_passes.txt")
    lines = thunks.read_text().splitlines()
    ours = [line for line in lines if "kCustomCall" in line]
    assert any("kCommandBuffer" in line for line in lines) and all(line.startswith(" ") for line in ours)
    launched = fresh(LAYER, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    assert captured["calls"] == launched["calls"] == len(ours) >= 10  # four products, each with two gradients
    np.testing.assert_allclose(captured["sizes"], launched["sizes"], rtol=1e-6)
    assert min(captured["sizes"]) > 0


def test_persistent_compilation_cache_in_a_fresh_process(tmp_path: Path) -> None:
    """The second process takes XLA's executable from disk and must know the targets in it."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "JAX_ENABLE_COMPILATION_CACHE": "1",
    }  # fmt: skip
    first = fresh(CHAIN, **environment)
    entries = sorted(tmp_path.iterdir())
    assert entries
    second = fresh(CHAIN, **environment)
    assert second["sum"] == first["sum"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")) == [
        p.name for p in entries if p.name.endswith("-cache")
    ]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("parallel", [False, True], ids=["whole", "slice"])
def test_linear_cross_entropy(
    parallel: bool, reduction: str, device: jax.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uneven chunks agree with float64, also in the program for sharded classes, on one device."""
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: 48)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(s, np.float32) / 8 for s in ((101, 64), (3 * 1003, 64)))
    target = rng.integers(0, len(weight), 101).astype(np.int32)
    target[7] = -100

    def loss(hidden: Any, weight: Any) -> Any:
        if not parallel:
            return cute_ops_jax.linear_cross_entropy(hidden, weight, target, **options)
        call = partial(cute_ops_jax.vocab_parallel_linear_cross_entropy, axis_name="model", **options)
        mesh = jax.make_mesh((1,), ("model",), (jax.sharding.AxisType.Auto,), devices=[device])
        specs = jax.P(), jax.P("model"), jax.P()
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=jax.P())(hidden, weight, target)

    def exact(hidden: Any, weight: Any) -> Any:
        logits = hidden @ weight.T
        lse = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, jnp.maximum(target, 0)[:, None], axis=1)[:, 0]
        each = lse - 0.9 * picked - 0.1 * jnp.mean(logits, axis=-1) + 1e-3 * lse**2
        each = jnp.where(target == -100, 0.0, each)
        return each if reduction == "none" else jnp.sum(each) / jnp.sum(target != -100)

    def summed(function: Any) -> Any:
        return lambda *given: jnp.sum(jnp.sin(function(*given)))

    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.value_and_grad(summed(loss), (0, 1)))(hidden, weight)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = jax.value_and_grad(summed(exact), (0, 1))(hidden.astype(np.float64), weight.astype(np.float64))
        wide = jax.tree.map(np.asarray, wide)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.max(np.abs(b)))


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda op: op.name)
@pytest.mark.parametrize("k", [264, 263])
def test_products_of_integers_are_exact(product: Op, k: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [t.of({"m": (3, 101), "n": 520, "k": k}) for t in product.inputs.values()]
    given = [rng.integers(-4, 5, shape).astype(jnp.bfloat16) for shape in shapes]
    (exact,) = testing.run_reference(product, dict(zip(product.inputs, given, strict=True)), {})
    got = jax.jit(partial(cute_ops_jax.register(product), fused="always"))(*map(jnp.asarray, given))
    np.testing.assert_array_equal(np.asarray(got, np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda op: op.name)
@pytest.mark.parametrize("sizes", [(303, 520, 264), (67, 130, 17)], ids=str)
def test_products_with_epilogues(epilogue: Op, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    given = testing.inputs(epilogue, Case("", {"m": (m,), "n": columns(epilogue, n), "k": k}), "bfloat16")
    by_kernel = partial(cute_ops_jax.register(epilogue), **({"fused": "always"} if epilogue.fallback else {}))
    got = jax.tree.leaves(jax.jit(by_kernel)(*given.values()))
    testing.check(epilogue, given, epilogue.attrs, tuple(map(np.asarray, got)))


LOADED = """
import sys
sys.modules["torch"] = sys.modules["cutlass"] = None
import jax, jax.numpy as jnp, numpy as np
import cute_ops_jax
program = cute_ops_jax.load(sys.argv[1])
with np.load(sys.argv[2]) as given:
    x, w = given["x"], given["w"]
dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(program(x, w))), (0, 1)))(x, w)
np.savez(sys.argv[3], out=program(x, w), dx=dx, dw=dw)
"""


@pytest.mark.parametrize("lead", [(1, 1), (37, 129)])
def test_an_exported_program_runs_in_a_process_without_the_compiler(lead: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    b, s = jax.export.symbolic_shape("b, s")
    shapes = jax.ShapeDtypeStruct((b, s, 512), jnp.float32), jax.ShapeDtypeStruct((512,), jnp.float32)
    cute_ops_jax.export(tmp_path / "program", lambda x, w: cute_ops_jax.rmsnorm(x, w), *shapes, vjp_order=1)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((*lead, 512), np.float32), rng.standard_normal(512, np.float32)
    np.savez(tmp_path / "in.npz", x=x, w=w)
    files = [str(tmp_path / name) for name in ("program", "in.npz", "out.npz")]
    done = subprocess.run([sys.executable, "-c", LOADED, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(cute_ops_jax.rmsnorm(x, w))), (0, 1)))
    dx, dw = gradient(x, w)
    with np.load(tmp_path / "out.npz") as got:
        np.testing.assert_array_equal(got["out"], cute_ops_jax.rmsnorm(x, w))
        np.testing.assert_array_equal(got["dx"], dx)
        # Rows meet in another order: scratch arrays are as large as for very many.
        np.testing.assert_allclose(got["dw"], dw, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 333, 1001), (7, 1000, 2049), (16, 77, 135)])
def test_few_rows_off_vectors(m: int, n: int, k: int) -> None:
    """Integers, whose sums are exact; NaN in a row of each operand stays there."""
    rng = np.random.default_rng(m)
    x, weight = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((m + 1, k), (n, k)))
    x[-1] = weight[-1] = np.nan
    call = jax.jit(partial(cute_ops_jax.linear, fused="always"))
    out = call(*(jnp.asarray(a, jnp.bfloat16) for a in (x, weight)))
    exact = jnp.asarray(x.astype(np.float64) @ weight.astype(np.float64).T, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(exact, np.float32))
