"""``load``: runs a program that :func:`cute_ops_jax.export` wrote, in another process.

Loading needs neither the compiler nor the declarations, nor the function's code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cute_ops.errors import CacheError, suggesting
from cute_ops.files import json_schema, ownership
from cute_ops.jit import bundle
from cute_ops.jit.variant import Variant
from cute_ops_jax import _compat
from cute_ops_jax.primitive import ffi

# ``program.json``, whose keys are those of RECORD.
FORMAT = 2
RECORD = {
    "format": int, "platforms": [str], "programs": {str: {"file": str, "sha256": str, "kernels": [str]}},
}  # fmt: skip


@suggesting
def load(path: str | Path) -> Callable[..., Any]:
    """The function of an exported program, its kernels loaded on every GPU of this process.

    It may be called inside of ``jit``, and differentiated where it was exported with ``vjp_order=1``. Anybody who can
    write the folder can make this process run anything, so only this user and root may.

    Raises:
        CacheError: no program is there, it is for other GPUs or other versions, a file is damaged, others can write
            one, or the program calls what no exported one does.
        RuntimeError: jax-tvm-ffi is missing or does not fit.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"cute_ops_jax.load: argument `path` must be a folder's path, got {type(path).__name__}.")
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
        programs = [program, program.vjp()] if program.has_vjp() else [program]
    except Exception as error:  # flatbuffers' and JAX's readers of something else raise whatever comes first
        raise ValueError(f"its program cannot be read ({type(error).__name__}: {error})") from error
    for each in programs:
        calls = _compat.custom_calls(each.mlir_module_serialized) - set(kernels)
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
