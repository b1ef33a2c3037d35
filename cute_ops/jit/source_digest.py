"""Digests of the sources that a kernel is compiled from: its own, and those of the compiler driver.

A kernel's own sources are the Python files that importing its module runs: the module, the packages it is in, and
everything they import, directly or not. Imports are followed in the kernel's package, in this package and in modules
that are not installed. Of other installed packages only the modules that import statements name count. The standard
library, the frameworks and the compiler do not count: they are large, and the variant holds the compiler's version.
Sources that no import statement names (``importlib``, data files) must be declared, see
:class:`cute_ops.declaration.kernel.Kernel`.

Nothing is imported or executed. Every warm start computes digests, so import statements are found by plain text search:
parsing, or even regular expressions, would take longer than the rest of the start. A name that is found by mistake does
no harm.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import NamedTuple

from cute_ops.version import __version__

# The modules that every compile runs besides the kernel's: a change in one changes every kernel's name. A test compares
# this list with the modules of this package that a compiling process imports.
DRIVER = (
    "cute_ops", "cute_ops.declaration", "cute_ops.declaration.array_api", "cute_ops.declaration.attributes",
    "cute_ops.declaration.case", "cute_ops.declaration.checks", "cute_ops.declaration.checks.dims",
    "cute_ops.declaration.checks.gradient", "cute_ops.declaration.checks.lists", "cute_ops.declaration.checks.names",
    "cute_ops.declaration.checks.tensors", "cute_ops.declaration.config", "cute_ops.declaration.dims",
    "cute_ops.declaration.fields", "cute_ops.declaration.finish", "cute_ops.declaration.gradient",
    "cute_ops.declaration.kernel", "cute_ops.declaration.lists", "cute_ops.declaration.messages",
    "cute_ops.declaration.op", "cute_ops.declaration.program", "cute_ops.declaration.shapes",
    "cute_ops.declaration.split", "cute_ops.declaration.static", "cute_ops.declaration.tensor", "cute_ops.env",
    "cute_ops.errors", "cute_ops.files", "cute_ops.files.json_schema", "cute_ops.garbage", "cute_ops.hardware",
    "cute_ops.jit",
    "cute_ops.jit.compile_pool", "cute_ops.jit.compiler", "cute_ops.jit.source_digest", "cute_ops.jit.target",
    "cute_ops.jit.toolchain", "cute_ops.jit.variant", "cute_ops.kernels", "cute_ops.kernels.lib",
    "cute_ops.kernels.lib.entry", "cute_ops.processes", "cute_ops.version",
)  # fmt: skip
UNFOLLOWED = frozenset({
    "cuda", "cute_ops_jax", "cute_ops_torch", "cutlass", "jax", "jaxlib", "numpy", "torch", "triton", "tvm_ffi",
})  # fmt: skip
# The compiler's environment variables: their prefix, and those that affect logs and the places of files only.
_SETTINGS, _QUIET = "CUTE_DSL_", (
    "ARCH", "CACHE_DIR", "DISABLE_FILE_CACHING", "DUMP_DIR", "FILTER_", "JIT_", "KEEP", "LIBS", "LOG_", "NO_CACHE",
    "PRINT_", "SHOW_",
)  # fmt: skip
_STDLIB = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_SUFFIXES = (*EXTENSION_SUFFIXES, ".py")  # in Python's order


def key(kernel: str, declared: Sequence[str] = ()) -> str:
    """The digest of all sources behind the machine code of ``module:Class``; raises as :func:`digest`."""
    return hashlib.sha256(f"{digest(kernel, tuple(declared))} {driver()}".encode()).hexdigest()


@cache
def digest(kernel: str, declared: tuple[str, ...] = ()) -> str:
    """The digest of the sources of ``module:Class`` alone.

    Args:
        declared: further files, folders and modules, as the op's declaration names them.

    Raises:
        ImportError: the module cannot be found, or something declared is neither a file nor a module.
    """
    return _digest(kernel.partition(":")[0], declared, f"kernel module {{}} of {kernel!r}")


@cache
def of_module(module: str) -> str:
    """The digest of the sources of a module that is not a kernel's.

    Raises:
        ImportError: the module cannot be found.
    """
    return _digest(module, (), "module {}")


@cache
def driver() -> str:
    """The digest of what all compiles share: this package's version, :data:`DRIVER` and the compiler's settings."""
    settings = [(n, v) for n, v in sorted(os.environ.items()) if n.startswith(_SETTINGS)]
    heard = [(n, v) for n, v in settings if not n.removeprefix(_SETTINGS).startswith(_QUIET)]
    finder, total = _Finder(), hashlib.sha256(f"{__version__} {heard}".encode())
    for name in DRIVER:
        module = finder.find(name)
        if module is None or module.path is None:
            raise ImportError(f"cute_ops: the source of {name} cannot be found, which is part of every kernel's name")
        total.update(name.encode() + b"\0" + _read(module.path).digest)
    return total.hexdigest()


def forget() -> None:
    """Forget all files and digests: they are read again when they are next needed."""
    for cached in (digest, of_module, driver, _read, _imported):
        cached.cache_clear()


def _digest(first: str, declared: tuple[str, ...], what: str) -> str:
    finder = _Finder()
    module = finder.find(first)
    if module is None or module.path is None:
        hint = "; this program has no file that the compiler's process could import: put the kernel in one"
        raise ImportError(f"cute_ops: {what.format(repr(first))} cannot be found{hint if first == '__main__' else ''}")
    folder = os.path.dirname(module.path)
    files = {name: os.path.join(folder, name) for name in declared if os.path.exists(os.path.join(folder, name))}
    modules = [name for name in declared if name not in files]
    for name in modules:
        if finder.find(name) is None:
            raise ImportError(
                f"cute_ops: {name!r}, which is declared as a source of {first!r}, is neither a file or folder in "
                f"{folder} nor a module"
            )
    found = {name: _read(path).digest for name, path in finder.reached(first, modules).items()}
    try:
        found |= {f"file {name}": bytes.fromhex(of_file(path)) for name, path in files.items()}
    except OSError as error:
        raise ImportError(f"cute_ops: a declared source of {first!r} cannot be read: {error}") from error
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode() + b"\0" + found[name])
    return total.hexdigest()


def of_file(path: str) -> str:
    """The digest of a file, or of all files in a folder.

    Raises:
        OSError: it cannot be read.
    """
    if not os.path.isdir(path):
        return _read(path).digest.hex()
    total = hashlib.sha256()
    for where, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            total.update(os.path.relpath(os.path.join(where, name), path).encode() + b"\0")
            total.update(_read(os.path.join(where, name)).digest)
    return total.hexdigest()


class _File(NamedTuple):
    """A file's digest, and its text if it is Python."""

    digest: bytes
    text: str


@cache
def _read(path: str) -> _File:
    """A file, read once per process, so that all kernels that share it use the same digest."""
    with open(path, "rb") as file:
        source = file.read()
    text = source.removeprefix(codecs.BOM_UTF8).decode(errors="replace") if path.endswith(".py") else ""
    return _File(hashlib.sha256(source).digest(), text)


@cache
def _imported(path: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple(_imports(_read(path).text))


# Finding modules


class _Module(NamedTuple):
    """A module's file, None for a folder without ``__init__.py``, and the folders of its submodules."""

    path: str | None
    folders: tuple[str, ...]


class _Finder:
    """Finds modules as Python would, without importing them or their packages."""

    def __init__(self) -> None:
        self._known: dict[str, _Module | None] = {}
        self._listed: dict[str, frozenset[str]] = {}

    def reached(self, first: str, declared: Sequence[str]) -> dict[str, str]:
        """The files that importing a module may run, its own included, by module name."""
        followed = {name.partition(".")[0] for name in (first, "cute_ops", *declared)}
        queue, seen, files = [first, *declared], set(DRIVER), {}
        while queue:
            name = queue.pop()
            module = None if name in seen else self.find(name)
            seen.add(name)
            if module is None:
                continue
            above, _, _ = name.rpartition(".")
            if above:
                queue.append(above)
            if module.path is not None:
                files[name] = module.path
                if name.partition(".")[0] in followed or not _installed(module.path):
                    queue += self._named(name, module)
        return files

    def find(self, name: str) -> _Module | None:
        """A module's file and folders; None if it is not found or does not count."""
        if name not in self._known:
            above, _, leaf = name.rpartition(".")
            package = self.find(above) if above else None
            self._known[name] = self._in(package.folders, leaf) if package else None if above else _top(name)
        return self._known[name]

    def _in(self, folders: Sequence[str], leaf: str) -> _Module | None:
        """A submodule, looked for in Python's order."""
        spaces = []
        for folder in folders:
            stem = os.path.join(folder, leaf)
            if leaf in self._entries(folder) and os.path.isdir(stem):
                for suffix in _SUFFIXES:
                    if f"__init__{suffix}" in self._entries(stem):
                        return _Module(os.path.join(stem, f"__init__{suffix}"), (stem,))
            for suffix in _SUFFIXES:
                if leaf + suffix in self._entries(folder):
                    return _Module(stem + suffix, ())
            if leaf in self._entries(folder) and os.path.isdir(stem):
                spaces.append(stem)
        return _Module(None, tuple(spaces)) if spaces else None

    def _entries(self, folder: str) -> frozenset[str]:
        if folder not in self._listed:
            try:
                self._listed[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._listed[folder] = frozenset()
        return self._listed[folder]

    def _named(self, name: str, module: _Module) -> Iterator[str]:
        """The names in a module's import statements that may be modules."""
        package = name if module.folders else name.rpartition(".")[0]
        for origin, members in _imported(module.path or ""):
            base = origin.lstrip(".")
            if dots := len(origin) - len(base):
                above = package.split(".")
                base = ".".join([*above[: len(above) - dots + 1], *([base] if base else [])])
            yield base
            found = self.find(base) if members else None
            if found is not None and found.folders:  # a name imported from a package may be a module
                yield from (f"{base}.{member}" for member in members)
                if "*" in members:
                    yield from (f"{base}.{member}" for member in self._all(found))

    def _all(self, package: _Module) -> Iterator[str]:
        """Submodules that ``import *`` may import: those whose quoted names a package with ``__all__`` contains."""
        text = _read(package.path).text if package.path else ""
        for folder in package.folders if "__all__" in text else ():
            for name in self._entries(folder):
                stem = name.partition(".")[0]
                if f'"{stem}"' in text or f"'{stem}'" in text:
                    yield stem


def _top(name: str) -> _Module | None:
    """A top-level module or package: as it was loaded, else as it would be imported."""
    if name in UNFOLLOWED or name in sys.builtin_module_names:
        return None
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None)
    if spec is None and loaded is None:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            return None
    path = (spec.origin if spec.has_location else None) if spec else getattr(loaded, "__file__", None)
    folders = tuple(spec.submodule_search_locations or ()) if spec else ()
    if path is None:
        return _Module(None, folders) if folders else None
    path = os.path.abspath(path)
    if path.startswith(_STDLIB) and not _installed(path):
        return None
    return _Module(path, folders) if path.endswith(_SUFFIXES) else None


def _installed(path: str) -> bool:
    return any(part in path for part in _INSTALLED)


# Reading import statements


def _imports(source: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names imported from it) of every import statement; relative modules keep their dots."""
    if "\r" in source:
        source = source.replace("\r\n", "\n").replace("\r", "\n")
    source = source.replace("\\\n", " ")
    at = source.find("import")
    while at >= 0:
        end = at + len("import")
        if source[end : end + 1] in {" ", "\t", "\f", "(", "*"}:
            line = source.rfind("\n", 0, at) + 1
            before = source[max(line, source.rfind(";", line, at) + 1) : at].strip()
            if origin := _origin(before):
                yield origin, _names(source, end)
            elif not before or before[-1] == ":":
                yield from ((name, ()) for name in _names(source, end))
        at = source.find("import", end)


def _origin(before: str) -> str:
    """The module after ``from`` in the text before ``import``; empty if there is none."""
    text = " ".join(before.split())
    for sign, dot in (("from ", ""), ("from.", ".")):
        head, found, rest = text.rpartition(sign)
        if found and not (head and (head[-1].isalnum() or head[-1] == "_")):
            return dot + _name(rest)
    return ""


def _names(source: str, begin: int) -> tuple[str, ...]:
    """The names after ``import``, without ``as`` names; a list in parentheses may span lines."""
    text = ""
    while begin < len(source):
        end = source.find("\n", begin)
        end = len(source) if end < 0 else end
        text += source[begin:end].partition("#")[0] + " "
        begin = end + 1
        if "(" not in text or ")" in text:
            break
    listed = text.partition(";")[0].replace("(", " ").replace(")", " ").split(",")
    return tuple(filter(None, (_name(" ".join(part.split()).partition(" as ")[0]) for part in listed)))


def _name(text: str) -> str:
    """A module's name without blanks around dots; empty if the text is not a name but prose."""
    words = text.split()
    name = "".join(words)
    if len(words) > 1 and "." not in name:
        return ""
    return name if name == "*" or not name.strip(".") or name.strip(".").replace(".", "_").isidentifier() else ""
