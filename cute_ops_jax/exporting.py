"""``export``: writes a program and the kernels that it calls into a folder, for :func:`cute_ops_jax.load`.

The folder holds one serialised program per architecture and a bundle with every kernel that they call. Exporting needs
the compiler but no GPU. This module is not called ``export`` because it would hide the function of that name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cute_ops.aot import build
from cute_ops.errors import header_of, meant, suggesting, wrong_arguments
from cute_ops.files import cache_dir, folder_swap, json_schema, ownership
from cute_ops.jit import target
from cute_ops.jit.variant import Variant
from cute_ops_jax.loading import FORMAT, RECORD
from cute_ops_jax.primitive import ffi

WHAT = "exported program"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# The program of an export that calls no kernel.
ANY = "any"
_TARGET = re.compile(r"\bcute_\w+_[0-9a-f]{24}\b")


class SerializedProgram(NamedTuple):
    """One serialised program and the names of the kernels that it calls."""

    data: bytes
    kernels: list[str]


@suggesting
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
        args, kwargs: arrays, or ``jax.ShapeDtypeStruct``, whose sizes may be symbolic (``jax.export.symbolic_shape``)
            unless they are constants of every kernel; they are then at least 1.
        platforms: what the program is to run on: ``cuda``, ``cpu``, ``rocm``, ``tpu``. On all but ``cuda`` it is the
            reference.
        arch: the GPUs to build for, ``"sm_90a"``; by default the one of this machine.
        vjp_order: 1 for a program that can be differentiated.

    Raises:
        TypeError: the function does not take these arguments, or an argument here has another type.
        ValueError: no such platform or architecture; no ``arch`` for ``cuda`` on a machine without a GPU.
        CompileError: a kernel does not compile.
        CacheError: the folder holds something else.
        NotImplementedError: a symbolic size that a kernel must know; several devices with automatic axes.
    """
    _check_arguments(path, function, vjp_order, args, kwargs)
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
        programs[str(one or ANY)] = SerializedProgram(data, symbols)
    with folder_swap.replacing(where, _files, WHAT) as made:
        _fill(made, platforms, programs, list(variants.values()), chosen)


def _check_arguments(path: Any, function: Any, vjp_order: Any, args: Any, kwargs: Any) -> None:
    """Refuse what JAX would refuse in terms of its own, or take for something else."""
    fail = "cute_ops_jax.export:"
    if not isinstance(path, str | Path):
        raise TypeError(f"{fail} argument `path` must be a folder's path, got {type(path).__name__}.")
    header = header_of(function, f"{fail} argument `function`")
    if problem := wrong_arguments(header, args, kwargs):
        near = next(filter(None, (meant(name, ("platforms", "arch", "vjp_order")) for name in kwargs)), "")
        raise TypeError(f"{fail} {getattr(function, '__name__', 'the function')}: {problem.rstrip('.')}{near}.")
    if type(vjp_order) is not int or vjp_order < 0:
        raise TypeError(f"{fail} argument `vjp_order` must be 0, or 1 for a gradient, got {vjp_order!r}.")


def _files(where: Path) -> set[str]:
    """The files of an exported program, by its record."""
    record = json_schema.parse((where / "program.json").read_bytes(), RECORD)
    found = {"program.json", *(program["file"] for program in record["programs"].values())}
    for name in found:
        ownership.components(name)
    if (where / "kernels").is_dir():
        found |= {f"kernels/{name}" for name in build.files(where / "kernels")}
    return found


def _platforms(given: str | Sequence[str]) -> list[str]:
    platforms = [given] if isinstance(given, str) else list(given or ())
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
                "XLA asks this process how to partition kernels: use jax.shard_map or a mesh with explicit axes."
            ) from error
        except ValueError:
            if names == set(ffi.known()):
                raise


def _fill(
    where: Path,
    platforms: Sequence[str],
    programs: Mapping[str, SerializedProgram],
    variants: Sequence[Variant],
    chosen: Sequence[target.Target],
) -> None:
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
    lines = json.dumps(record, indent=1, sort_keys=True) + "\n"
    cache_dir.write_whole(where, {"program.json": lines.encode()}, 0o644)
    for one in (*where.iterdir(), where):  # whatever the umask: load refuses what others can write
        one.chmod(one.stat().st_mode & ~ownership.OTHERS)
