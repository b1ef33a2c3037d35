"""What Inductor's caches must know of us: the state of this package, and that of every op's declaration.

Code that Inductor keeps on disk calls our functions by name, with the defaults of attributes as they were, and where
``max-autotune`` chose so it holds an op's reference written out. It outlives an edit of any of them.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import cute_ops
from cute_ops import lookup
from cute_ops.jit import source_digest
from cute_ops.op import Op

# What no digest can name: code that was kept under it is of no use to another process.
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

    Of its reference that is the sources of the module, of those that this imports (as for a kernel, see
    :mod:`cute_ops.jit.source_digest`), and the numbers and functions that it has from where it was made. A reference
    without a file, as in a notebook, or with a value that cannot be told by its text is another one in every process.
    """
    if lookup.ours().get(op.name) is op:
        return ""
    parts = [op.name, op.inputs, op.outputs, op.dtypes, op.attrs, op.derived, op.reference]
    return hashlib.sha256("\n".join(_words(parts, {})).encode()).hexdigest()


def _words(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """What a value is made of, in a fixed order: digests of modules and files, and plain values as text."""
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
    elif isinstance(value, partial):
        yield from _words([value.func, value.args, value.keywords], seen)
    elif isinstance(value, MethodType):
        yield from _words([value.__func__, value.__self__], seen)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, seen)
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
    except ImportError:  # a notebook's
        return _NEVER


def _of_function(function: FunctionType, seen: dict[int, Any]) -> Iterator[str]:
    yield f"{_of_module(function.__module__ or '')} {function.__qualname__}"
    # A wrapper has the module of what it wraps; its code tells where it is from.
    try:
        yield source_digest.of_file(function.__code__.co_filename)
    except OSError:
        yield _NEVER
    yield from _words([cell.cell_contents for cell in function.__closure__ or () if cell != CellType()], seen)
    yield from _words([function.__defaults__, function.__kwdefaults__], seen)
    # Numbers of its module may have been set from outside.
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (bool, int, float, str)):
            yield f"{name}={value!r}"
