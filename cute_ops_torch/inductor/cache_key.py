"""The key of programs in Inductor's caches: digests of this package and of every op's declaration.

Code that Inductor keeps on disk calls our functions by name, with the defaults of attributes at that time, and may
contain an op's reference where ``max-autotune`` chose Inductor's fusion. Without the key it would outlive an edit of
any of these.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cute_ops
from cute_ops.calls import lookup
from cute_ops.constants import Unknown, values
from cute_ops.declaration.op import Op
from cute_ops.jit import source_digest

# Stands for what has no digest: no other process finds code under it.
_NEVER = uuid.uuid4().hex


@cache
def package() -> str:
    """The digest of this package: its version and all its modules."""
    return of_folders(cute_ops.__version__, Path(cute_ops.__file__).parent, Path(__file__).parents[1])


def of_folders(version: str, *folders: Path) -> str:
    """The digest of a version and of all modules in some folders."""
    total = hashlib.sha256(version.encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{path.relative_to(folder.parent)} ".encode() + path.read_bytes())
    return total.hexdigest()


@cache
def of_op(op: Op) -> str:
    """The digest of an op's declaration, empty for one of ours, which :func:`package` covers.

    The reference counts with the source of its module, of the modules that this imports (as for a kernel, see
    :mod:`cute_ops.jit.source_digest`), what it reads (:mod:`cute_ops.constants`), and the numbers and functions in its
    closure. That of a traced function is its expression. A reference without a file, as in a notebook, or with a value
    whose text does not identify it, has another digest in every process.
    """
    if lookup.ours().get(op.name) is op:
        return ""
    parts = [op.name, op.inputs, op.outputs, op.dtypes, op.keywords, op.mutates, op.derived, op.reference]
    return hashlib.sha256("\n".join(_words(parts, {})).encode()).hexdigest()


def _words(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """The parts of a value in a fixed order: digests of modules and files, and plain values as text."""
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        yield repr(value)
        return
    yield type(value).__name__
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _words(item, seen)
    elif isinstance(value, Mapping):
        yield from _words([*value.items()], seen)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, seen)
    elif isinstance(value, CodeType):
        code = value.co_code.hex(), value.co_consts, value.co_names, value.co_varnames, value.co_freevars
        yield from _words(code, seen)
    elif isinstance(value, ModuleType):
        yield _of_module(value.__name__)
    elif isinstance(value, (type, BuiltinFunctionType)):
        yield f"{_of_module(value.__module__ or 'builtins')} {value.__qualname__}"
    else:
        yield _of_module(type(value).__module__)
        try:
            parts = value.__reduce_ex__(2)  # as pickle takes objects apart
        except (TypeError, ValueError, AttributeError, RuntimeError):
            yield _NEVER
        else:
            parts = parts if isinstance(parts, tuple) else (parts,)
            yield from _words([list(part) if isinstance(part, Iterator) else part for part in parts], seen)


def _of_module(module: str) -> str:
    top = module.partition(".")[0]
    if top in source_digest.UNFOLLOWED or top in sys.stdlib_module_names:
        return module
    try:
        return source_digest.of_module(module)
    except ImportError:  # of a notebook
        return _NEVER


def _of_function(function: FunctionType, seen: dict[int, Any]) -> Iterator[str]:
    yield f"{_of_module(function.__module__ or '')} {function.__qualname__}"
    # A wrapper has the module name of the function it wraps; its code object names the file.
    try:
        yield source_digest.of_file(function.__code__.co_filename)
    except OSError:  # of a notebook, whose cells may define it again
        yield f"{_NEVER} {id(function)}"
    yield from _words([cell.cell_contents for cell in function.__closure__ or () if cell != CellType()], seen)
    yield from _words([function.__defaults__, function.__kwdefaults__], seen)
    # Other modules, files and variables may have set numbers of its module.
    try:
        yield from _words(values(function), seen)
    except Unknown:
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (bool, int, float, str, dict, list, tuple, set)):
                yield name
                yield from _words(value, seen)
