"""Programs on two GPUs against one: values, the compiled program, and a first call that does not hang.

python -m pytest -m gpu -k two_gpus    # these, and those of PyTorch and of the gallery
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops import Op, testing
from cute_ops.composite import chunks
from cute_ops.ops import OPS

pytestmark = pytest.mark.gpu
P = jax.P
ROOT = Path(cute_ops_jax.__file__).parents[1]
Close = Callable[[Any, Any], None]
SOME = [op for op in OPS if op.name in ("rmsnorm", "rope", "cross_entropy")]
MORE = [op for op in OPS if op.name in ("layernorm", "add_rmsnorm", "silu_mul", "softmax")]


@pytest.fixture(autouse=True)
def two() -> list[jax.Device]:
    found = jax.devices("gpu")
    if len(found) < 2:
        pytest.skip("fewer than two GPUs")
    return found[:2]


def gradient(op: Op) -> Callable[..., Any]:
    """Values and gradients with fixed cotangents, so that no collective comes from a loss."""
    function, at = testing.plain(op, cute_ops_jax.register(op)), testing.argnums(op)

    def run(*arrays: Any) -> Any:
        def chosen(*given: Any) -> Any:
            found = dict(zip(at, given, strict=True))
            return function(*(found.get(i, a) for i, a in enumerate(arrays)))

        outputs, pull = jax.vjp(chosen, *(arrays[i] for i in at))
        return outputs, pull(jax.tree.map(jnp.cos, outputs))

    return run


def problem(op: Op) -> tuple[list[np.ndarray], list[Any]]:
    """Rows and their sharding. Long enough that a psum of the weights' gradients waits for kernels."""
    arrays = testing.sample(op, (64, 33), 512, np.random.default_rng(0))
    return arrays, [P("rows") if t.rows else P() for t in op.inputs.values()]


def calls(text: str) -> int:
    return len(re.findall(r'custom_call_target="cute_', text))


def check_jit(op: Op, kind: AxisType, devices: list[jax.Device], close: Close) -> None:
    arrays, specs = problem(op)
    expected = jax.device_get(jax.jit(gradient(op))(*arrays))
    mesh = jax.make_mesh((2,), ("rows",), (kind,), devices=devices)
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        compiled = jax.jit(gradient(op)).lower(*given).compile()
        got = jax.block_until_ready(compiled(*given))
    close(jax.device_get(got), expected)
    assert calls(compiled.as_text()) >= 2
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("some", [*SOME, *MORE], ids=lambda op: op.name)
def test_automatic(some: Op, two: list[jax.Device], close: Close) -> None:
    check_jit(some, AxisType.Auto, two, close)


@pytest.mark.parametrize("some", SOME, ids=lambda op: op.name)
def test_explicit(some: Op, two: list[jax.Device], close: Close) -> None:
    check_jit(some, AxisType.Explicit, two, close)


@pytest.mark.parametrize("some", SOME, ids=lambda op: op.name)
def test_shard_map(some: Op, two: list[jax.Device], close: Close) -> None:
    arrays, specs = problem(some)
    mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=two)
    out = P("rows"), tuple(specs[i] for i in testing.argnums(some))
    mapped = jax.jit(jax.shard_map(gradient(some), mesh=mesh, in_specs=tuple(specs), out_specs=out))
    close(jax.device_get(mapped(*arrays)), jax.device_get(jax.jit(gradient(some))(*arrays)))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4, "reduction": "sum"}])
def test_a_vocabulary_on_two_gpus(options: dict[str, Any], two: list[jax.Device], close: Close) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(s, np.float32) / 8 for s in ((300, 64), (2 * 4099, 64)))
    target = rng.integers(0, len(weight), 300).astype(np.int32)
    target[3] = -100
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=two)

    def sharded(h: Any, w: Any, t: Any) -> Any:
        return cute_ops_jax.vocab_parallel_linear_cross_entropy(h, w, t, "model", **options)

    def whole(h: Any, w: Any, t: Any) -> Any:
        return cute_ops_jax.linear_cross_entropy(h, w, t, **options)

    mapped = jax.shard_map(sharded, mesh=mesh, in_specs=(P(), P("model"), P()), out_specs=P())
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(jax.value_and_grad(mapped, (0, 1))).lower(hidden, weight, target).compile()
        expected = jax.jit(jax.value_and_grad(whole, (0, 1)))(hidden, weight, target)
        close(jax.device_get(compiled(hidden, weight, target)), jax.device_get(expected))
    assert calls(compiled.as_text()) >= 2
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("cut", ["rows", "classes"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_loop_over_chunks_on_two_gpus(
    kind: AxisType, cut: str, two: list[jax.Device], monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    """Each device has its own rows, or all rows and its own classes."""
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda rows, *sizes: max(rows // 2, 1))
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(s, np.float32) / 8 for s in ((256, 64), (2 * 4099, 64)))
    target = rng.integers(0, len(weight), 256).astype(np.int32)
    mesh = jax.make_mesh((2,), ("gpus",), (kind,), devices=two)
    specs = (P("gpus"), P(), P("gpus")) if cut == "rows" else (P(), P("gpus"), P())

    def loss() -> Any:
        return jax.jit(jax.value_and_grad(lambda h, w, t: cute_ops_jax.linear_cross_entropy(h, w, t), (0, 1)))

    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(loss()(hidden, weight, target))
        with jax.set_mesh(mesh):
            pairs = zip((hidden, weight, target), specs, strict=True)
            given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in pairs]
            compiled = loss().lower(*given).compile()
            close(jax.device_get(compiled(*given)), expected)
    assert calls(compiled.as_text()) >= 1
    assert "all-gather" not in compiled.as_text()


FIRST = """
import jax, jax.numpy as jnp, cute_ops_jax
from jax.sharding import AxisType, NamedSharding
mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])
x = jax.device_put(jnp.ones((4096, 1024)), NamedSharding(mesh, jax.P("rows")))
w = jax.device_put(jnp.ones(1024), NamedSharding(mesh, jax.P()))

@jax.jit
def step(x, w):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(cute_ops_jax.rmsnorm(cute_ops_jax.rmsnorm(x, w), w))), (0, 1))(x, w)

print(float(jax.block_until_ready(step(x, w))[1].sum()))
"""


LATER = """
import jax, jax.numpy as jnp, cute_ops_jax
from jax.sharding import AxisType, NamedSharding
mesh = jax.make_mesh((2,), ("gpus",), (AxisType.Auto,), devices=jax.devices()[:2])
put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, jax.P(*spec)))
a, b = put(jnp.full((4096, 4096), 1e-4), None, "gpus"), put(jnp.ones((4096, 4096)), "gpus")

@jax.jit
def busy(a, b):  # an all-reduce after each product
    return jax.lax.fori_loop(0, 50, lambda _, c: put_like((c @ b) * 1e-2, c), a)

def put_like(x, _):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(None, "gpus")))

jax.block_until_ready(busy(a, b))
for n in (1088, 1152, 1216, 1280):
    running = [busy(a, b) for _ in range(8)]  # on their way while the next program's kernels are compiled and loaded
    x, w = put(jnp.ones((2048, n)), "gpus"), put(jnp.ones(n))
    step = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(cute_ops_jax.rmsnorm(x, w))), (0, 1)))
    found = step(x, w)
    jax.block_until_ready((running, found))
print(float(found[1].sum()))
"""


@pytest.mark.parametrize("program", [FIRST, LATER], ids=["first", "later"])
def test_loading_a_kernel_does_not_hang(program: str) -> None:
    """In a fresh process, before any collective runs; and while other programs run collectives."""
    finished(["-c", program], lambda out: np.isfinite(float(out)))


def test_the_mesh_of_the_gallery() -> None:
    def right(out: str) -> bool:
        found = re.search(r"loss (\S+) on (\d+) devices, (\S+) on one; gradients differ by (\S+)", out)
        assert found, out
        sharded, devices, whole, error = map(float, found.groups())
        return devices >= 2 and abs(sharded - whole) < 1e-4 and error < 1e-4

    finished([str(ROOT / "examples" / "gallery" / "jax_mesh.py")], right)


def finished(arguments: list[str], right: Callable[[str], bool]) -> None:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT,
        env={**environment, "PYTHONPATH": path}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert right(done.stdout), done.stdout
