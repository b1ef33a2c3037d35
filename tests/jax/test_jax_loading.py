"""Several processes: programs from XLA's persistent cache have their kernels, and all processes agree on names."""

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
import hashlib, json, re, sys
sys.modules["torch"] = None  # which TVM-FFI imports where it is there: longer than all the rest
import jax, jax.numpy as jnp, numpy as np
import jax_tvm_ffi
from tests.jax import conftest
from cute_ops.jit import cache, toolchain
from cute_ops.ops import OPS
from cute_ops_jax.primitive import ffi
from cute_ops_jax.primitive.primitive import OpPrimitive
import cute_ops_jax

fakes = conftest.FakeKernels()
cache.get, ffi.cuda_devices, toolchain.versions = fakes.get, list, lambda: ("fake", "process")
"""
ON_CPU = """
real = jax_tvm_ffi.register_ffi_target
def register(name, function, *, arg_spec, platform, allow_cuda_graph):
    real(name, function, arg_spec=arg_spec, platform="cpu")
jax_tvm_ffi.register_ffi_target = register
OpPrimitive.platforms = ("cuda", "cpu")
"""
CACHED = """
jax.config.update("jax_enable_compilation_cache", True)  # tests compile without it
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
from jax.sharding import NamedSharding
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
mesh = jax.make_mesh((8,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu"))
def placed(a, *axes):
    return jax.make_array_from_callback(a.shape, NamedSharding(mesh, jax.P(*axes)), lambda at: a[at])
x, w = np.linspace(-1, 2, 48, dtype=np.float32).reshape(8, 6), np.ones(6, np.float32)
def values_of(op, *given):
    gradient = jax.grad(lambda x, w: jnp.sum(jnp.sin(getattr(cute_ops_jax, op)(x, w))), (0, 1))
    lowered = jax.jit(lambda *given: [jnp.sum(a * jnp.cos(a)) for a in gradient(*given)]).lower(*given)
    # Without the address of a callback, as in the key of XLA's cache.
    programs.append(hashlib.sha256(re.sub(r'"\\d+"', "", lowered.as_text()).encode()).hexdigest())
    return [float(a) for a in lowered.compile()(*given)]
values, programs = [], []
for op in sys.argv[2:5]:
    second, axes = (w, ()) if op == "rmsnorm" else (x, ("rows",))
    values += [values_of(op, x, second), values_of(op, placed(x, "rows"), placed(second, *axes))]
"""
REPORT = """
same = [values, len(fakes.calls), sorted(ffi.known()), programs]
print(json.dumps([same, events.count("cache_hits"), events.count("cache_misses"), jax.process_count()]))
"""
# Four devices in each of two processes.
DISTRIBUTED = """
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[5], 2, int(sys.argv[6]))
"""


# Runs processes in turns, those of one turn at the same time: forks of one that has imported what they need, since
# importing takes longer than most of them. JAX starts no threads before it has a backend.
FORKS = """
import json, os, sys, warnings
warnings.filterwarnings("ignore", "os.fork")
folder, *codes, turns = sys.argv[1:]
exec(codes[0])
for turn, processes in enumerate(json.loads(turns)):
    children = []
    for number, arguments in enumerate(processes):
        if not (child := os.fork()):
            sys.argv[1:], sys.stdout = arguments, open(f"{folder}/{turn}-{number}", "w")
            exec(codes[1])
            sys.stdout.flush()
            sys.modules["jax"].distributed.shutdown()  # waits: if one just ended, JAX would kill the other
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit("one failed")
"""


def run(folder: Path, setup: str, code: str, turns: list[list[list[str]]]) -> list[list[Any]]:
    """What processes print as JSON, by turn and number; each has its own arguments."""
    folder.mkdir()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUTE_OPS_ARCH": "sm_90a"}
    command = [sys.executable, "-c", FORKS, str(folder), setup, code, json.dumps(turns)]
    done = subprocess.run(command, text=True, cwd=ROOT, env=environment, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [
        [json.loads((folder / f"{turn}-{number}").read_text().splitlines()[-1]) for number in range(len(processes))]
        for turn, processes in enumerate(turns)
    ]


def two_of_one_program(*arguments: str) -> list[list[str]]:
    """Arguments of two processes, with the address where they meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return [[*arguments, f"127.0.0.1:{free.getsockname()[1]}", rank] for rank in "01"]


@pytest.mark.slow
def test_the_persistent_cache_in_a_fresh_process(tmp_path: Path) -> None:
    """Programs on one device and on eight are found again, with their kernels; ops of equal shapes are not confused."""
    pytest.importorskip("jax_tvm_ffi")
    arguments = [str(tmp_path), *OPS]
    (one,), (other,) = run(tmp_path / "said", SETUP, ON_CPU + CACHED + REPORT, [[arguments], [arguments]])
    (first, calls, _, _), *_ = one
    assert calls == 3 * 2 * 9
    (again, calls_again, _, _), hits, misses, _ = other
    assert (again, calls_again) == (first, calls)
    assert hits >= 6
    assert misses == 0
    for one, eight in zip(first[::2], first[1::2], strict=True):
        assert eight == pytest.approx(one, rel=1e-5)
    assert first[2] != pytest.approx(first[4], rel=1e-5)


@pytest.mark.slow
def test_two_processes_of_one_program(tmp_path: Path) -> None:
    """Two processes that share a mesh agree on values, on the names of kernels and on the programs, which are our part
    of the key of XLA's cache; the first process finds again what it wrote there.
    """
    pytest.importorskip("jax_tvm_ffi")
    turns = [two_of_one_program(str(tmp_path), *OPS) for _ in range(2)]
    cold, warm = run(tmp_path / "said", SETUP, DISTRIBUTED + ON_CPU + CACHED + REPORT, turns)
    (same, _, _, count), (other, *_) = cold
    assert count == 2
    assert other == same
    values, calls, names, programs = same
    assert calls == 3 * 2 * (1 + 4)  # forward and backward of three ops, on one device and on a process's four
    # The gated products' also of half a row, which a mesh of eight devices may leave.
    assert len(names) == 2 + 2 * 4
    assert len(set(programs)) == 6
    for one, eight in zip(values[::2], values[1::2], strict=True):
        assert eight == pytest.approx(one, rel=1e-5)
    (first, hits, misses, _), (second, *_) = warm
    assert first == second == same
    assert (hits, misses) == (6, 0)


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
import jax, jax.numpy as jnp
import cute_ops_jax
from cute_ops.jit import cache
from jax.experimental import multihost_utils
"""
COMPILING = """
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
x, weight = jnp.ones((8, 64)), jnp.ones(64)
step = jax.jit(jax.grad(lambda x, weight: cute_ops_jax.rmsnorm(x, weight).sum(), (0, 1)))
traced = step.trace(x, weight)
multihost_utils.sync_global_devices("both ask at once")
traced.lower(lowering_platforms=("cuda",))
print(json.dumps(vars(cache.counters)))
"""


@pytest.mark.slow
def test_two_processes_compile_once_and_never_when_warm(tmp_path: Path, cache_folder: Path) -> None:
    """Processes lower their programs for a GPU at the same time, with real kernels."""
    turns = [two_of_one_program() for _ in range(2)]
    cold, warm = run(tmp_path / "said", WITHOUT_TORCH, COMPILING, turns)
    needed = warm[0]["disk"]
    assert needed >= 1 and warm == [{"bundled": 0, "disk": needed, "compiled": 0}] * 2
    # Kernels start when calls are traced, so that of a forward which its gradient's replaces may be on its way still.
    assert all(rank["compiled"] + rank["disk"] >= needed for rank in cold), cold
    compiled = sum(rank["compiled"] for rank in cold)
    assert 1 <= compiled <= len(list(cache_folder.glob("*.so"))), cold  # none twice
