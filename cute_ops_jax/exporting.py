"""Programs that travel with their kernels: ``export`` writes a folder, ``load`` runs it in another process.

The folder holds one serialised program per architecture and a bundle with every kernel that they call. Exporting
needs the compiler but no GPU; loading needs neither the compiler nor the declarations, nor the function's code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cute_ops.errors import CacheError
from cute_ops.files import json_schema, ownership
from cute_ops.jit import bundle, target
from cute_ops.jit.variant import Variant
from cute_ops_jax import _compat
from cute_ops_jax.primitive import ffi

FORMAT = 2
WHAT = "exported program"
RECORD = {
    "format": int, "platforms": [str], "programs": {str: {"file": str, "sha256": str, "kernels": [str]}},
}  # fmt: skip
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# The program of an export that calls no kernel.
ANY = "any"
_TARGET = re.compile(r"\bcute_\w+_[0-9a-f]{24}\b")


class Program(NamedTuple):
    """One serialised program and the names of the kernels that it calls."""

    data: bytes
    kernels: list[str]


def export(
    path: str | Path,
    function: Callable[..., Any],
    *args: Any,
    platforms: Sequence[str] = ("cuda", "cpu"),
    arch: str | Sequence[str] | None = None,
    vjp_order: int = 0,
    **kwargs: Any,
) -> None:
    """Write a program and the kernels that it calls into a folder.

    Args:
        path: the folder; a former export is replaced, by all of this one or by nothing.
        function: a function of JAX arrays, jitted or not.
        args, kwargs: arrays, or ``jax.ShapeDtypeStruct``; leading dims may be symbolic (``jax.export.symbolic_shape``),
            then at least one row.
        platforms: what the program is to run on: ``cuda``, ``cpu``, ``rocm``, ``tpu``. On all but ``cuda`` it is the
            reference.
        arch: the GPUs to build for, ``"sm_90a"``; by default the one of this machine.
        vjp_order: 1 for a program that can be differentiated.

    Raises:
        ValueError: no such platform or architecture; no ``arch`` for ``cuda`` on a machine without a GPU.
        CompileError: a kernel does not compile.
        CacheError: the folder holds something else.
        NotImplementedError: a symbolic size that a kernel must know; several devices with automatic axes.
    """
    from cute_ops.files import folder_swap  # which only who writes needs

    where = Path(path)
    folder_swap.check_replaceable(where, _files, WHAT)
    platforms = _platforms(platforms)
    chosen = _architectures(arch) if "cuda" in platforms else []
    programs, variants = {}, dict[str, Variant]()
    each: Sequence[target.Target | None] = chosen or [None]
    for one in each:
        with ffi.lowering_for(one):
            data, text = _serialized(function, platforms, vjp_order, args, kwargs)
        known = ffi.known()
        symbols = sorted({s for s in _TARGET.findall(text) if s in known})
        variants |= {s: known[s] for s in symbols}
        programs[str(one or ANY)] = Program(data, symbols)
    with folder_swap.replacing(where, _files, WHAT) as made:
        _fill(made, platforms, programs, list(variants.values()), chosen)


def _files(where: Path) -> set[str]:
    """The files of an exported program, by its record."""
    record = json_schema.parse((where / "program.json").read_bytes(), RECORD)
    found = {"program.json", *(program["file"] for program in record["programs"].values())}
    for name in found:
        ownership.parts_of(name)
    if (where / "kernels").is_dir():
        from cute_ops.aot import build  # which only who writes needs

        found |= {f"kernels/{name}" for name in build.files(where / "kernels")}
    return found


def _platforms(given: str | Sequence[str]) -> list[str]:
    platforms = [given] if isinstance(given, str) else list(given)
    for one in platforms:
        if one not in PLATFORMS:
            raise ValueError(f"cute_ops_jax.export: unknown platform {one!r}; known: {', '.join(PLATFORMS)}")
    if not platforms:
        raise ValueError(f"cute_ops_jax.export: no platform; known: {', '.join(PLATFORMS)}")
    return platforms


def _architectures(arch: str | Sequence[str] | None) -> list[target.Target]:
    if arch:
        return [target.parse(a) for a in ([arch] if isinstance(arch, str) else arch)]
    try:
        return [ffi.device_target()]
    except RuntimeError as error:
        raise ValueError(
            f"cute_ops_jax.export: no GPU is here to build for ({error}): name one, arch='sm_90a', or export for "
            "platforms=('cpu',)"
        ) from error


def _fill(
    where: Path,
    platforms: Sequence[str],
    programs: Mapping[str, Program],
    variants: Sequence[Variant],
    chosen: Sequence[target.Target],
) -> None:
    from cute_ops.aot import build
    from cute_ops.files import folder_swap  # which only who writes needs

    if chosen:
        build.write(variants, chosen, where / "kernels")
    files = {name: f"{name.replace(':', '-')}.jax" for name in programs}
    for name, program in programs.items():
        (where / files[name]).write_bytes(program.data)
    record = {
        "format": FORMAT,
        "platforms": list(platforms),
        "programs": {
            name: {"file": files[name], "sha256": hashlib.sha256(program.data).hexdigest(), "kernels": program.kernels}
            for name, program in programs.items()
        },
    }
    folder_swap.write_record(where / "program.json", json.dumps(record, indent=1, sort_keys=True) + "\n")
    for one in (*where.iterdir(), where):  # whatever the umask: what others can write is not loaded
        one.chmod(one.stat().st_mode & ~ownership.OTHERS)


def load(path: str | Path) -> Callable[..., Any]:
    """The function of an exported program, its kernels loaded on every GPU of this process.

    It may be called inside of ``jit``, and differentiated where it was exported with ``vjp_order=1``. Who can write the
    folder can let this process run anything, so nobody but this user and root may.

    Raises:
        CacheError: no program is there, it is for other GPUs or other versions, a file is damaged, others can write
            one, or the program calls what no exported one does.
        RuntimeError: jax-tvm-ffi is missing or does not fit.
    """
    where = Path(path)
    try:
        return ownership.read_one_state(where, lambda folder: _loaded(where, folder))
    except ownership.Untrusted as error:
        raise CacheError(
            f"cute_ops: exported program {where} {error}; it is code: put it into a new folder that only you or root "
            "can change, from a source that you trust"
        ) from error
    except (OSError, ValueError) as error:
        raise CacheError(f"cute_ops: {where} holds no exported program: {str(error)[:2000]}") from error


def _loaded(where: Path, folder: ownership.Folder) -> Callable[..., Any]:
    record = json_schema.parse(folder.read("program.json"), {"format": int})
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']}, this version of cute_ops reads {FORMAT}")
    json_schema.check(record, RECORD)
    programs = record["programs"]
    if not programs:
        raise ValueError("it has no program")
    chosen = programs[_fitting(where, list(programs)) if _runs_kernels(record) else next(iter(programs))]
    data = folder.read(chosen["file"])
    if hashlib.sha256(data).hexdigest() != chosen["sha256"]:
        raise CacheError(f"cute_ops: {where}: the checksum of {chosen['file']} does not match: export it again")
    program = _deserialized(data, chosen["kernels"])
    if _runs_kernels(record):
        _register(bundle.Bundle(where / "kernels"), chosen["kernels"])
    return program.call


def _deserialized(data: bytes, kernels: Sequence[str]) -> jax.export.Exported:
    """The program of a file. A callback of Python in it would be looked up in this process by a number: XLA follows
    any, to whatever lies there.
    """
    try:
        program = jax.export.deserialize(bytearray(data))
        stages = [program, program.vjp()] if program.has_vjp() else [program]
    except Exception as error:  # flatbuffers' and JAX's readers of something else raise whatever comes first
        raise ValueError(f"its program cannot be read ({type(error).__name__}: {error})") from error
    for stage in stages:
        calls = _compat.custom_calls(stage.mlir_module_serialized) - set(kernels)
        if calls:
            raise ValueError(f"its program calls {', '.join(sorted(calls))[:200]}, which no exported program does")
    return program


def _runs_kernels(record: Mapping[str, Any]) -> bool:
    return jax.default_backend() == "gpu" and "cuda" in record["platforms"]


def _fitting(where: Path, programs: Sequence[str]) -> str:
    """The program for this process's GPU."""
    here = ffi.device_target()
    fitting = [name for name in programs if name.partition(":")[0] == here.arch]
    if not fitting:
        raise CacheError(
            f"cute_ops: {where} was exported for {', '.join(programs)}, this GPU is {here.arch}: export it again "
            f"with arch={here.arch!r}"
        )
    # Any of an architecture runs; one for as many SMs runs best.
    return str(here) if str(here) in fitting else fitting[0]


def _register(kernels: bundle.Bundle, symbols: Sequence[str]) -> None:
    def get(variant: Variant) -> Callable[..., Any]:
        function = kernels.load(variant)
        if function is None:
            raise CacheError(f"cute_ops: bundle {kernels.where} does not hold {variant.symbol}")
        return function

    for symbol in symbols:
        if symbol not in kernels.kernels:
            raise CacheError(f"cute_ops: bundle {kernels.where} does not hold {symbol}")
        ffi.ensure(kernels.variant(symbol), get)


def _serialized(
    function: Callable[..., Any], platforms: Sequence[str], vjp_order: int, args: Any, kwargs: Any
) -> tuple[bytes, str]:
    """The serialised program, and the text of all that is in it."""
    # A function of its own, so that no lowering for another architecture is taken from JAX's caches.
    program = jax.jit(lambda *a, **k: function(*a, **k))
    while True:
        # jax.export wants the names of custom calls that its promises do not cover; ours are known once it has lowered.
        names = set(ffi.known())
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in sorted(names)]
        try:
            made = jax.export.export(program, platforms=list(platforms), disabled_checks=checks)(*args, **kwargs)
            data = made.serialize(vjp_order=vjp_order)
            return bytes(data), made.mlir_module() + (made.vjp().mlir_module() if vjp_order else "")
        except NotImplementedError as error:
            if "host_callbacks" not in str(error):
                raise
            raise NotImplementedError(
                "cute_ops_jax.export: callbacks cannot be written to a file. On several devices with automatic axes "
                "XLA asks this process how to cut kernels: use jax.shard_map or a mesh with explicit axes."
            ) from error
        except ValueError:
            if names == set(ffi.known()):
                raise
