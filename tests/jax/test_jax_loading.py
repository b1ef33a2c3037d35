"""Processes: what XLA's persistent cache finds again still has its kernels, and all processes agree on names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cute_ops_jax

ROOT = Path(cute_ops_jax.__file__).parents[1]

OPS = ("rmsnorm", "silu_mul", "gelu_mul")  # the last two have equal shapes

# The CUDA lowering with the reference as the kernel, in a process of its own.
SETUP = """
import json, sys
sys.path.insert(0, "tests/jax")
import jax, jax.numpy as jnp, numpy as np
import conftest, jax_tvm_ffi
from cute_ops import cache, toolchain
from cute_ops.ops import OPS
from cute_ops_jax import targets
from cute_ops_jax.primitive import stage
import cute_ops_jax

fakes = conftest.FakeKernels()
cache.get, targets.cuda_devices, toolchain.versions = fakes.get, list, lambda: ("fake", "process")
"""
ON_CPU = """
real = jax_tvm_ffi.register_ffi_target
def register(name, function, *, arg_spec, platform, allow_cuda_graph):
    real(name, function, arg_spec=arg_spec, platform="cpu")
jax_tvm_ffi.register_ffi_target = register
for op in OPS:
    if op.name in sys.argv:
        stage(op).run_kernels_on("cpu")
        stage(op.grad).run_kernels_on("cpu")
"""
CACHED = """
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
from jax.sharding import NamedSharding
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
mesh = jax.make_mesh((8,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu"))
x = jax.device_put(np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6), NamedSharding(mesh, jax.P("rows")))
w = jax.device_put(np.ones(6, np.float32), NamedSharding(mesh, jax.P()))
values = []
for op in sys.argv[2:]:
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(getattr(cute_ops_jax, op)(x, w))), (0, 1)))
    second = w if op == "rmsnorm" else x
    for given in ((np.asarray(x), np.asarray(second)), (x, second)):
        values.append([float(jnp.sum(a * jnp.cos(a))) for a in gradient(*given)])
print(json.dumps([values, len(hits), len(fakes.calls)]))
"""


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUTE_OPS_ARCH": "sm_90a"}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, cwd=ROOT, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def result(process: subprocess.Popen[str]) -> Any:
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def test_the_persistent_cache_in_a_fresh_process(tmp_path: Path) -> None:
    """Programs of one device and of eight are found again, with their kernels; equal shapes are not taken for equal."""
    pytest.importorskip("jax_tvm_ffi")
    code = SETUP + ON_CPU + CACHED
    first, hits, calls = result(run(code, str(tmp_path), *OPS))
    assert calls == 3 * 2 * 9
    again, hits_again, calls_again = result(run(code, str(tmp_path), *OPS))
    assert (again, calls_again) == (first, calls)
    assert hits_again >= hits + 6
    for one, eight in zip(first[::2], first[1::2], strict=True):
        assert eight == pytest.approx(one, rel=1e-5)
    assert first[2] != pytest.approx(first[4], rel=1e-5)


NAMES = """
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
for op in OPS[:3]:
    shapes = [jax.ShapeDtypeStruct(t.of(op.example((8,), 64)), jnp.float32) for t in op.inputs.values()]
    lowered = jax.jit(getattr(cute_ops_jax, op.name)).trace(*shapes).lower(lowering_platforms=("cuda",))
    print(op.name, lowered.as_text().count("custom_call @cute_"), file=sys.stderr)
print(json.dumps([jax.process_count(), sorted(targets.known())]))
"""


def test_two_processes_of_one_program_agree_on_names() -> None:
    pytest.importorskip("jax_tvm_ffi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [result(p) for p in [run(SETUP + NAMES, address, str(rank)) for rank in (0, 1)]]
    assert both[0] == both[1]
    assert both[0][0] == 2
    assert len(both[0][1]) == 3
