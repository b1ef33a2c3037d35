"""Time from a fresh process to the first result: nothing cached, the disk cache warm, a bundle and no cache, and a
second call in memory.

Every figure is of a process of its own. It first imports its framework, makes the CUDA context and the inputs; only
then the clock starts: our import, TVM-FFI's import as our loader makes it (without torch where torch is not in use),
the first result. The process fails if the compiler was imported; with a warm cache or a bundle it cannot be.
``own first result`` is the framework's own function in the same place, for comparison; ``all of ours`` is what a
program pays for these ops beside TVM-FFI: our import and the first result.

    python benchmarks/startup.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, Table, first_line, spread
from rich.console import Console
from rich.table import Table as View

PHASES = (
    "import ours", "import tvm_ffi", "first result", "second result", "all to first result", "own first result",
    "all of ours",
)  # fmt: skip
CACHES = ("cold", "warm", "bundle")
COLUMNS = ("framework", "cache", "phase", "status", "ms", "ms_min", "ms_max", "runs")
SCENARIOS = ("torch", "jax")

PRELUDE = """
import json, os, sys, time
if os.environ.get("BLOCK_COMPILER"):
    sys.modules["cutlass"] = None
def clock(): return time.perf_counter() * 1e3
"""
TORCH = """
import torch, torch.nn.functional as F
device = "cuda" if torch.cuda.is_available() else "cpu"
n = 4096 if device == "cuda" else 64  # on a CPU, which is not measured, quickly
x = torch.randn(n, n, device=device, dtype=torch.bfloat16)
weight = torch.ones(n, device=device, dtype=torch.bfloat16)
def finish(out):
    if device == "cuda": torch.cuda.synchronize()
finish(x + x)
def own(): finish(F.rms_norm(x, (n,), weight, 1e-6))
def ours(): finish(package.rmsnorm(x, weight))
NAME = "cute_ops_torch"
"""
JAX = """
import jax, jax.numpy as jnp
n = 4096 if jax.default_backend() == "gpu" else 64
x = jnp.ones((n, n), jnp.bfloat16)
weight = jnp.ones(n, jnp.bfloat16)
(x + x).block_until_ready()
def rmsnorm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)
own_jit = jax.jit(rmsnorm)
def own(): own_jit(x, weight).block_until_ready()
def ours(): package.rmsnorm(x, weight).block_until_ready()
NAME = "cute_ops_jax"
"""
MEASURE = """
import importlib
t0 = clock()
package = importlib.import_module(NAME)
t1 = clock()
from cute_ops.jit.loader import tvm_ffi
tvm_ffi()
t2 = clock()
ours()
t3 = clock()
ours()
t4 = clock()
compiler = [name for name in sys.modules if name.partition(".")[0] == "cutlass"]
own()
t5 = clock()
compiler = [name for name in compiler if sys.modules[name]]
ms = [t1 - t0, t2 - t1, t3 - t2, t4 - t3, t3 - t0, t5 - t4, t1 - t0 + t3 - t2]
print(json.dumps({"ms": ms, "compiler": compiler}))
"""


def run(scenario: str, cache: Path, **more: str) -> list[float]:
    """Milliseconds by phase, of one process.

    Raises:
        RuntimeError: the process failed, or imported the compiler.
    """
    script = PRELUDE + (TORCH if scenario == "torch" else JAX) + MEASURE
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "CUTE_OPS_CACHE_DIR": str(cache), "PYTHONPATH": path, **more}
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if answer["compiler"]:
        raise RuntimeError(f"the compiler was imported: {answer['compiler'][0]}")
    return answer["ms"]


def measure(scenario: str, cache: str, runs: int) -> list[list[float]]:
    """One list of phases per run: with an empty cache, a filled one, or a bundle of what a first run recorded."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if cache == "cold":
            return [run(scenario, folder / f"cold{i}") for i in range(runs)]
        manifest, bundle = folder / "manifest.txt", folder / "bundle"
        run(scenario, folder / "cache", CUTE_OPS_RECORD=str(manifest))
        if cache == "warm":
            return [run(scenario, folder / "cache", BLOCK_COMPILER="1") for _ in range(runs)]
        if manifest.exists():  # on a CPU no kernel runs
            command = [sys.executable, "-m", "cute_ops", "build", str(manifest), "-o", str(bundle)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUTE_OPS_CACHE_DIR": str(folder / "cache")}
            subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        named = {"CUTE_OPS_BUNDLE": str(bundle)} if bundle.exists() else {}
        return [run(scenario, folder / "none", BLOCK_COMPILER="1", **named) for _ in range(runs)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for startup.csv")
    parser.add_argument("--runs", type=int, default=7, help="processes per figure (3 for a cold cache)")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    options = parser.parse_args(arguments)
    console = Console(width=110)
    table = Table(options.out / "startup.csv", COLUMNS)
    view = View("framework", "cache", "phase", "ms", "spread", title="fresh process, after the framework's own start")
    for scenario in options.scenarios:
        for cache in options.caches:
            row: dict[str, object] = {"framework": scenario, "cache": cache}
            try:
                samples = measure(scenario, cache, min(options.runs, 3) if cache == "cold" else options.runs)
            except RuntimeError as failure:
                table.add(row | {"status": f"failed: {first_line(failure)}"})
                view.add_row(scenario, cache, f"failed: {failure}", "", "")
                continue
            for phase, values in zip(PHASES, zip(*samples, strict=True), strict=True):
                ms = spread(values)
                table.add(
                    row | {"phase": phase, "status": "ok", "runs": len(values)}
                    | {"ms": ms.median, "ms_min": ms.low, "ms_max": ms.high}
                )  # fmt: skip
                view.add_row(scenario, cache, phase, f"{ms.median:.1f}", f"{ms.low:.1f} to {ms.high:.1f}")
            view.add_section()
    console.print(view)


if __name__ == "__main__":
    main()
