"""Commands that record the calls of a program, compile them ahead of time and ship the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cute_ops import env
from cute_ops.aot.build import build as build_bundle
from cute_ops.aot.build import variants_of
from cute_ops.aot.hf_config import calls_of_model
from cute_ops.calls import manifest
from cute_ops.cli import AllowFiles, Arches, console, fail, progress, read_calls, table_of, targets
from cute_ops.declaration.shapes import FLOATS
from cute_ops.errors import CacheError
from cute_ops.jit import bundle, cache

Manifests = Annotated[list[Path], typer.Argument(help="Manifest files; more than one are read together.")]


def record(
    command: Annotated[list[str], typer.Argument(help="The program, after --.", metavar="-- COMMAND ...")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The manifest; calls are added to one that is there.")
    ] = Path("manifest.txt"),
) -> None:
    """Run a program and write down the calls it makes: the manifest to build or warm up from.

    The same as CUTE_OPS_RECORD=manifest.txt in the program's environment, but sorted and without duplicates at the end.
    Kernels run on a GPU only; under JAX a program may be lowered for one elsewhere: CUTE_OPS_ARCH=sm_90a.

    Example: python -m cute_ops record -o train.txt -- python train.py
    """
    try:
        out.open("a").close()  # now, because the program may run for long
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}")
    environment = {**os.environ, env.RECORD.name: str(out.resolve())}
    try:
        code = subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        fail(f"cannot run {command[0]}: {error.strerror}")
    try:
        calls = manifest.tidy(out)
    except ValueError as error:
        fail(error)
    hint = "" if calls else "; kernels run on a GPU only: on a CPU the references ran"
    console.print(f"{out}: {calls} kinds of calls{hint}", markup=False)
    raise typer.Exit(code)


def model(
    config: Annotated[Path, typer.Argument(help="The config.json of a Hugging Face model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The manifest to write.")] = Path("manifest.txt"),
    dtype: Annotated[str, typer.Option(help=f"Dtype of the activations: {', '.join(FLOATS)}.")] = "",
    train: Annotated[bool, typer.Option(help="Also the gradients and the loss.")] = False,
) -> None:
    """Write the manifest of a model from its configuration; nothing is downloaded and no model is built.

    Example: python -m cute_ops manifest config.json --train -o llama.txt
    """
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        calls = calls_of_model(settings, dtype or None, train=train)
    except OSError as error:
        fail(error)
    except (ValueError, KeyError) as error:
        fail(f"{config}: {f'not JSON: {error}' if isinstance(error, json.JSONDecodeError) else error}")
    if not calls:
        fail(f"{config}: no layer that is known; it needs rms_norm_eps, hidden_act, vocab_size and so on")
    console.print(f"{out}: {manifest.write(out, calls)} kinds of calls", markup=False)


def build(
    manifests: Manifests,
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle's folder; a bundle that is there is replaced.")],
    arch: Arches = None,
    allow_files: AllowFiles = False,
) -> None:
    """Compile all calls of manifests for all targets into a bundle; needs no GPU.

    Example: python -m cute_ops build manifest.txt -o bundle/ --arch sm_80,sm_90a,sm_100a

    A program started with CUTE_OPS_BUNDLE=bundle/ compiles nothing of it. A package ships a bundle as a folder inside
    it that an entry point of the group cute_ops.bundles names: any-name = "package.folder".
    """
    calls, wanted, start = read_calls(manifests, allow_files), targets(arch), time.perf_counter()
    try:
        total = len(variants_of(calls, wanted, lambda text: None))
        with progress(total, f"{out}:") as done:
            built = build_bundle(calls, wanted, out, done, _skipped)
    except (CacheError, ValueError, TypeError, NotImplementedError) as error:
        fail(error)
    _report(built, start)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.print(f"{out}: {len(built)} kernels for {', '.join(map(str, wanted))}, {size / 1e6:.2f} MB", markup=False)


def warm_up(manifests: Manifests, arch: Arches = None, allow_files: AllowFiles = False) -> None:
    """Compile all calls of manifests into the cache, as many at a time as there are cores.

    Example: python -m cute_ops warm-up manifest.txt
    """
    calls, start = read_calls(manifests, allow_files), time.perf_counter()
    try:
        variants = variants_of(calls, targets(arch), _skipped)
    except (ValueError, TypeError, NotImplementedError) as error:
        fail(error)
    with progress(len(variants), "warm-up:") as done:
        _report(cache.build_all(variants, done), start)


def show(where: Annotated[Path, typer.Argument(help="The bundle's folder.")]) -> None:
    """Check a bundle against this machine and every checksum in it, and list what it holds."""
    try:
        found = bundle.Bundle(where)
        count = found.verify()
    except CacheError as error:
        fail(error)
    table = table_of("kernel", "KB", "symbol")
    for symbol, record in found.kernels.items():
        names = (escape(name) for name in (found.variant(symbol).describe(), symbol))
        table.add_row(next(names), f"{record['bytes'] / 1e3:.1f}", next(names))
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    text = f"{where}: {count} kernels for {', '.join(found.targets)}, sound; {versions}"
    console.print(text, highlight=False, markup=False)


def _skipped(text: str) -> None:
    console.print(text, style="yellow", highlight=False, markup=False)


def _report(built: list[cache.Built], start: float) -> None:
    failed = sum(one.error is not None for one in built)
    compiled = [one.seconds for one in built if one.seconds]
    console.print(
        f"{len(compiled)} compiled in {time.perf_counter() - start:.1f} s ({sum(compiled):.1f} s of work), "
        f"{len(built) - len(compiled) - failed} were there" + (f", {failed} failed" if failed else "")
    )
    if failed:
        raise typer.Exit(1)
