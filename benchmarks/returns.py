"""How often a first call moves between our source files, which is what a reader who follows it has to do.

Each of these is counted in a process of its own, after imports, those of the first compile and of the first declaration
included:

- three first calls of rmsnorm: in PyTorch with an empty cache (the kernel is compiled), in PyTorch with the kernel on
  disk, and the lowering of a JAX program with an empty cache;
- the first call of JAX's ``linear``;
- the declaration of an op with a gradient, ``examples/custom_op/softcap.py``, and its registration in each framework.

A file counts as *entered* when Python calls a function in it and the call before was in another file of ours. It is a
*return* when that file had been entered earlier. Calls in other packages, and in code that we generate, do not count;
nor do comprehensions, which are no calls from Python 3.12 on, and generators that are resumed. No GPU is needed or
used: everything is prepared for sm_90a, the tensors lie in host memory and the kernel is not launched.

    python benchmarks/returns.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cute_ops", "cute_ops_torch", "cute_ops_jax")
COLUMNS = ("call", "files", "entries", "returns")
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
SHAPE, ARCH = (4096, 4096), "sm_90a"


class Walk(NamedTuple):
    """The files that a call entered, in order; no two neighbours are the same."""

    files: list[str]

    @property
    def returns(self) -> list[tuple[str, str]]:
        """The entries of files that were entered before: from which file, to which."""
        seen: set[str] = set()
        found = []
        for before, file in zip(["", *self.files], self.files, strict=False):
            if file in seen:
                found.append((before, file))
            seen.add(file)
        return found


def walk(call: Callable[[], object]) -> Walk:
    """Run a call and note which of our files it enters. Other threads are not followed."""
    ours = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)
    files: list[str] = []
    begun: dict[int, FrameType] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code, file = frame.f_code, frame.f_code.co_filename
        if event != "call" or code.co_name in COMPREHENSIONS or (code.co_flags & CO_GENERATOR and id(frame) in begun):
            return
        if code.co_flags & CO_GENERATOR:
            begun[id(frame)] = frame  # kept, so that no other frame gets its number
        if file.startswith(ours) and (not files or files[-1] != file):
            files.append(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk([str(Path(file).relative_to(ROOT)) for file in files])


def torch_call() -> Walk:
    """A first call as ``torch.ops.cute.rmsnorm`` makes it for CUDA tensors, without the launch."""
    import torch

    from cute_ops.jit import cache, compile_pool, target  # noqa: F401 - the pool is imported by the first compile
    from cute_ops.ops import rmsnorm
    from cute_ops_torch.host import launch

    compiled = cache.get

    def get(variant: Any) -> Callable[..., None]:
        compiled(variant)
        return lambda *tensors: None

    # There may be no GPU: its name is given, and what would be launched is replaced once it is loaded.
    target.of_device = lambda index=0: target.parse(ARCH)  # type: ignore[assignment]
    cache.get = get
    run = launch.Launcher(rmsnorm).launch
    x, weight = torch.ones(SHAPE, dtype=torch.bfloat16), torch.ones(SHAPE[-1:], dtype=torch.bfloat16)
    return walk(lambda: run(x, weight))


def jax_lowering() -> Walk:
    """The lowering of a program that calls ``rmsnorm``."""
    import jax
    import jax.numpy as jnp

    import cute_ops_jax
    from cute_ops.jit import compile_pool  # noqa: F401 - imported by the first compile

    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (SHAPE, SHAPE[-1:]))
    program = jax.jit(lambda x, weight: cute_ops_jax.rmsnorm(x, weight))
    return walk(lambda: program.trace(x, weight).lower(lowering_platforms=("cuda",)))


def jax_linear() -> Walk:
    """A first call of ``linear`` outside of ``jit``, which runs the reference on the CPU."""
    import jax.numpy as jnp

    from cute_ops_jax import linear

    x, weight = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
    return walk(lambda: linear(x, weight))


def register(framework: str) -> Walk:
    """The declaration and the registration of an op and its gradient."""
    adapter = import_module(f"cute_ops_{framework}")
    import_module("cute_ops.declaration.checks")  # imported by the first declaration
    sys.path.insert(0, str(ROOT / "examples" / "custom_op"))
    return walk(lambda: adapter.register(import_module("softcap").softcap))


WALKS = {
    "torch cold": torch_call, "torch warm": torch_call, "jax lowering": jax_lowering, "jax linear": jax_linear,
    "torch register": partial(register, "torch"), "jax register": partial(register, "jax"),
}  # fmt: skip
CALLS = tuple(WALKS)
# Registering an op is no part of a call of ``linear``.
MOST_RETURNS = dict.fromkeys(CALLS, 40) | {"jax linear": 12, "torch register": 25, "jax register": 25}


def count(*calls: str) -> list[Walk]:
    """The walks of some of :data:`CALLS`, each in a process of its own.

    Raises:
        RuntimeError: a process failed.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        kept = {n: v for n, v in os.environ.items() if not n.startswith("CUTE_OPS_")}
        environment = {**kept, "CUTE_OPS_ARCH": ARCH, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        for call in calls:
            chosen = {"CUTE_OPS_CACHE_DIR": f"{folder}/{call.split()[0]}", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, __file__, "--here", call]
            for _ in range(1 + (call == "torch warm" and "torch cold" not in calls)):
                done = subprocess.run(command, env=environment | chosen, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{call}: {done.stderr.strip()}")
            found.append(Walk(json.loads(done.stdout.strip().splitlines()[-1])))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for returns.csv; without it nothing is written")
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=CALLS)
    parser.add_argument("--verbose", action="store_true", help="also list every file that is entered, in order")
    parser.add_argument("--here", choices=CALLS, help=argparse.SUPPRESS)  # the process that is counted
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(WALKS[options.here]().files))
        return

    from common import Table
    from rich.console import Console
    from rich.table import Table as View

    console, table = Console(width=110), Table(options.out / "returns.csv", COLUMNS) if options.out else None
    view = View("first call", "files", "entries", "returns", "at most", title="moves between our files")
    for call, found in zip(options.calls, count(*options.calls), strict=True):
        row = (call, len(set(found.files)), len(found.files), len(found.returns))
        view.add_row(*map(str, row), str(MOST_RETURNS[call]))
        if table:
            table.add(dict(zip(COLUMNS, row, strict=True)))
        if options.verbose:
            seen: set[str] = set()
            for file in found.files:
                console.print(f"{'  <- ' if file in seen else '     '}{file}", highlight=False)
                seen.add(file)
    console.print(view)


if __name__ == "__main__":
    main()
