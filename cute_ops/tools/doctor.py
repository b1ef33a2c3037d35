"""The checks of ``python -m cute_ops doctor``.

The adapters check their frameworks in subprocesses: the core imports no framework, and a crash of one is reported as a
finding.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from cute_ops import __version__, env, processes
from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.errors import CacheError, CompileError, first_line, meant
from cute_ops.files import cache_dir
from cute_ops.jit import bundle, cache, compiler, target, toolchain
from cute_ops.jit.compile_pool import worker
from cute_ops.ops import OPS

_FRAMEWORKS = {"torch": "cute_ops_torch", "jax": "cute_ops_jax"}
TIMEOUT_SECONDS = 300.0


class Finding(NamedTuple):
    """One line of the report; ``bad`` makes the exit code 1."""

    level: Literal["ok", "note", "bad"]
    text: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """All findings; findings on which others depend come first."""
    yield from _versions()
    yield from _variables()
    yield from _device()
    yield from _cache()
    yield from _bundles()
    yield from _compiler()
    for framework, adapter in _FRAMEWORKS.items():
        yield from _framework(framework, adapter)


def _variables() -> Iterator[Finding]:
    known = [variable.name for variable in env.VARIABLES]
    for name in sorted(os.environ):
        if name.startswith("CUTE_OPS_") and name not in known:
            yield Finding("note", f"{name} is no variable of cute_ops{meant(name, known)}")
    for problem in env.wrong():
        yield Finding("bad", problem)
    try:
        for name in filter(None, [env.ARCH.read()]):
            target.parse(name)
    except ValueError as error:
        yield Finding("bad", f"{env.ARCH.name}: {error}", f"unset {env.ARCH.name}, or name one of these")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", f"cute_ops {__version__}, Python {sys.version.split()[0]}")
    dsl, tvm_ffi = toolchain.versions()
    install = "pip install 'cute-ops'"
    if not dsl:
        yield Finding("bad", f"{toolchain.DSL} is not installed: no kernel compiles or runs", install)
    elif not dsl.startswith(toolchain.DSL_TESTED + "."):
        yield Finding("bad", f"{toolchain.DSL} {dsl}; tested with {toolchain.DSL_TESTED}", install)
    else:
        yield Finding("ok", f"{toolchain.DSL} {dsl}, runtime {toolchain.runtime_library()}")
    if tvm_ffi:
        yield Finding("ok", f"{toolchain.TVM_FFI} {tvm_ffi}")
    else:
        yield Finding("bad", f"{toolchain.TVM_FFI} is not installed", install)


def _device() -> Iterator[Finding]:
    driver = target.driver_version()
    if driver is None:
        yield Finding("note", "no CUDA driver: ops run their reference on the CPU; compiling for a GPU still works")
        return
    yield Finding("ok", f"driver for CUDA {driver[0]}.{driver[1]}")
    library = toolchain.runtime_library()
    if library and "cu13" in library.parts and driver < (13, 0):
        remedy = "pip install nvidia-cutlass-dsl, whose libraries for CUDA 12 are missing"
        yield Finding("bad", "the CUDA 13 flavour of the DSL needs a newer driver", remedy)
    count = target.device_count()
    if not count:
        yield Finding("bad", "a driver but no visible GPU", "look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    for index in range(count):
        try:
            found = target.of_device(index)
        except (NotImplementedError, RuntimeError) as error:
            yield Finding("bad", str(error), "run on a supported GPU, or hide this one by CUDA_VISIBLE_DEVICES")
        else:
            yield Finding("ok", f"GPU {index}: {found.arch}, {found.sm_count} SMs")


def _cache() -> Iterator[Finding]:
    where = cache_dir.folder()
    chosen = "set CUTE_OPS_CACHE_DIR to a private folder that you can write"
    try:
        cache_dir.make(where)
        cache_dir.check_trusted(where)
        with tempfile.TemporaryFile(dir=where):
            pass
    except CacheError as error:
        yield Finding("bad", str(error), chosen)
    except OSError as error:
        yield Finding("bad", f"cache folder {where} cannot be written ({error}): every start compiles again", chosen)
    else:
        entries = cache.entries()
        yield Finding("ok", f"cache folder {where}: {len(entries)} kernels")


def _bundles() -> Iterator[Finding]:
    for where in env.BUNDLE.read():
        yield _bundle(where, f"bundle {where}", "build it again, or unset CUTE_OPS_BUNDLE", "build it again")
    for found in bundle.installed():
        fitting = "install the release of it that was built with the versions above"
        yield _bundle(found.where, f"package {found.package}", "install it again", fitting, installed=True)


def _bundle(where: Path, name: str, anew: str, fitting: str, installed: bool = False) -> Finding:
    """The findings about a bundle; ``anew`` is what to do if it is damaged, ``fitting`` if it does not fit."""
    try:
        found = bundle.Bundle(where, installed)
        count, changed = found.verify(), found.changed()
    except CacheError as error:
        remedy = fitting if isinstance(error, bundle.Misfit) else anew
        return Finding("bad", f"{name}: {error}" if installed else str(error), remedy)
    kernels = f"{name}: {count} kernels for {', '.join(found.targets)}"
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        return Finding("bad", f"{kernels}, built from other sources of {changed[0]}{more} than are here", fitting)
    if target.device_count():
        try:
            here = target.of_device()
        except (NotImplementedError, RuntimeError):
            pass  # the GPU's own line says so
        else:
            if here.arch not in {word.partition(":")[0] for word in found.targets}:
                return Finding("note", f"{kernels}, none for this GPU, {here}: its kernels are compiled")
            if str(here) not in found.targets:
                return Finding("note", f"{kernels}; kernels that depend on this GPU's {here.sm_count} SMs are compiled")
    return Finding("ok", f"{kernels}, sound")


def _compiler() -> Iterator[Finding]:
    if find_spec("cutlass") is None:
        text = "the compiler is not installed: only what bundles and the cache hold runs"
        yield Finding("note", text, f"pip install {toolchain.DSL} to compile kernels")
        return
    if compiler.linker() is None:
        yield Finding("bad", "no linker: compiled kernels cannot be kept", "install gcc, clang or lld")
        return
    op = OPS[0]
    where = target.of_device() if target.device_count() else target.parse("sm_90a")
    variant = dispatch.foresee(
        bind(op, {"x": Array((4, 1024), "bfloat16"), "weight": Array((1024,), "bfloat16")}), {}, where
    ).variant
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = worker.compile(variant, Path(folder, f"{variant.symbol}.so"))
        except CompileError as error:
            yield Finding(
                "bad", str(error), "reinstall nvidia-cutlass-dsl; report it with this text if that does not help"
            )
        else:
            yield Finding("ok", f"compiles: {variant.describe()} in {seconds:.1f} s")


def _framework(framework: str, adapter: str) -> Iterator[Finding]:
    if find_spec(framework) is None:
        yield Finding("note", f"{framework} is not installed", f"pip install 'cute-ops[{framework}]' to use it")
        return
    found: list[Finding] = []
    process = processes.Process(__name__, f"{adapter}.tools.doctor")
    try:
        problem = process.ask({}, TIMEOUT_SECONDS, lambda step: found.append(Finding(*step["finding"]))).get("error")
    except processes.Ended as ended:
        problem = f"the process that examines it {ended.line}"
    finally:
        process.stop()
    yield from found
    if problem:
        yield Finding("bad", f"{framework}: {problem}", f"run: python -c 'import {adapter}'")


def serve(module: str) -> None:
    """Run in a subprocess: send the findings of an adapter's module, see :func:`cute_ops.processes.requests`."""
    for _, say in processes.requests(TIMEOUT_SECONDS):
        try:
            for finding in import_module(module).examine():
                say(step=True, finding=finding)
            say()
        except Exception as error:  # the client reports every error
            say(error=first_line(error))
