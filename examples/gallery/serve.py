"""Serving from a bundle: kernels are built ahead, by a machine without a GPU, and the server compiles nothing.

python examples/gallery/serve.py build --arch sm_90a     # where there is a compiler
python examples/gallery/serve.py run                     # where there is a GPU; a CPU runs the references
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

WIDTH = 2048
# What the model below calls, for any number of rows.
MANIFEST = f"""\
rmsnorm x:bfloat16[*,{WIDTH}] weight:bfloat16[{WIDTH}]
swiglu x:bfloat16[*,{2 * WIDTH}]
"""


def build(folder: Path, arch: str) -> None:
    """Compile what the manifest lists."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.txt").write_text(MANIFEST)
    command = ["build", str(folder / "manifest.txt"), "-o", str(folder / "bundle"), "--arch", arch]
    subprocess.run([sys.executable, "-m", "cute_ops", *command], check=True)


def run(folder: Path, requests: int = 3) -> int:
    """Answer some requests; returns the number of kernels that were compiled meanwhile."""
    os.environ["CUTE_OPS_BUNDLE"] = str(folder / "bundle")  # as the server's environment would have it
    import torch

    import cute_ops_torch
    from cute_ops.jit import cache

    compiled, bundled = cache.counters.compiled, cache.counters.bundled
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    up = torch.randn(2 * WIDTH, WIDTH, dtype=torch.bfloat16, device=device) / WIDTH**0.5
    for rows in range(1, requests + 1):
        start = time.perf_counter()
        x = torch.randn(rows, WIDTH, dtype=torch.bfloat16, device=device)
        answer = cute_ops_torch.swiglu(cute_ops_torch.rmsnorm(x, weight) @ up.T)
        print(
            f"request of {rows} rows: mean {answer.float().mean():+.4f}, {1e3 * (time.perf_counter() - start):.1f} ms"
        )
    compiled, bundled = cache.counters.compiled - compiled, cache.counters.bundled - bundled
    print(f"kernels compiled: {compiled}, from the bundle: {bundled}")
    return compiled


def main(arguments: list[str] | None = None) -> None:
    """Build or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "run"])
    parser.add_argument("--arch", default="sm_90a", help="the GPUs to build for")
    parser.add_argument("--folder", type=Path, default=Path("out/serve"))
    options = parser.parse_args(arguments)
    build(options.folder, options.arch) if options.what == "build" else run(options.folder)


if __name__ == "__main__":
    main()
