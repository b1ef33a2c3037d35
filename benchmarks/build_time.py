"""How long a bundle of the whole op set takes to build from nothing, on this machine's cores; needs no GPU.

The bundle holds every op and gradient in all its declared cases, for every target. ``load`` is how many processes
wanted a core meanwhile, ours among them.

    python benchmarks/build_time.py --out out/benchmarks [--dtype bfloat16] [--arch sm_80,sm_90a,sm_100a]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, Table

from cute_ops import FLOATS, testing
from cute_ops.calls import manifest
from cute_ops.declaration.binding import bind
from cute_ops.ops import OPS, PARTS

COLUMNS = ("calls", "kernels", "targets", "dtype", "cores", "load", "seconds", "megabytes")


def calls(dtype: str) -> Iterator[manifest.Call]:
    """Every declared case of every op and gradient, as a manifest has it."""
    for op in (*OPS, *PARTS, *(op.grad for op in OPS if op.grad)):
        for case in op.cases:
            binding = bind(op, testing.specs(op, case, dtype), testing.attributes(op, case))
            call = None if binding.empty else manifest.call_of(binding, {})
            if call is not None:
                yield call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--dtype", default="bfloat16", choices=FLOATS)
    parser.add_argument("--arch", default="sm_80,sm_90a,sm_100a", help="targets, with commas between them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listed, made = Path(folder, "manifest.txt"), Path(folder, "bundle")
        count = manifest.write(listed, list(calls(options.dtype)))
        build = [sys.executable, "-m", "cute_ops", "build", str(listed), "-o", str(made), "--arch", options.arch]
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        environment = {**os.environ, "CUTE_OPS_CACHE_DIR": str(Path(folder, "cache")), "PYTHONPATH": path}
        begin = time.perf_counter()
        subprocess.run(build, env=environment, check=True)
        seconds = time.perf_counter() - begin
        sizes = [file.stat().st_size for file in made.rglob("*.so")]
        row = {
            "calls": count, "kernels": len(sizes), "targets": options.arch.replace(",", " "), "dtype": options.dtype,
            "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[1], "seconds": seconds,
            "megabytes": sum(sizes) / 1e6,
        }  # fmt: skip
        Table(options.out / "build_time.csv", COLUMNS).add(row)
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
