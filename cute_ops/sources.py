"""A digest of a kernel's sources: its module and the local modules that it imports.

Local means in the same package or folder, or one of ours that a user's kernel builds on. Nothing is
imported and nothing is executed. Every warm start pays for it: import statements are found by plain search, since
parsing, and patterns even, would take longer than all the rest. To find one too many costs nothing.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec


@cache
def digest(kernel: str) -> str:
    """The digest of the sources behind ``module:Class``.

    Raises:
        ImportError: the module cannot be found.
    """
    first = kernel.partition(":")[0]
    found: dict[str, bytes] = {}
    queue: list[tuple[str, list[str]]] = [(first, [])]
    while queue:
        module, members = queue.pop()
        path = _file(module)
        if path is None or path.endswith("__init__.py"):  # what is imported from a package may be a module
            queue += [(f"{module}.{member}", []) for member in members]
        if path is not None and module not in found:
            with open(path, "rb") as file:
                source = file.read()
            found[module] = hashlib.sha256(source).digest()
            queue += _local_imports(module, path, source.decode(errors="replace"))
    if first not in found:
        raise ImportError(f"cute_ops: kernel module {first!r} of {kernel!r} cannot be found")
    total = hashlib.sha256()
    for module in sorted(found):
        total.update(module.encode() + b"\0" + found[module])
    return total.hexdigest()


def _file(module: str) -> str | None:
    """The module's file, found without importing it or its packages (but for a loaded top-level one)."""
    top, *rest = module.split(".")
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) if loaded else None
    if spec is None and top != "__main__":
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            return None
    if not rest:
        origin = spec.origin if spec else getattr(loaded, "__file__", None)
        return origin if origin and origin.endswith(".py") else None
    folders = (spec.submodule_search_locations or ()) if spec else ()
    for folder in folders:
        stem = os.path.join(folder, *rest)
        for path in (f"{stem}.py", os.path.join(stem, "__init__.py")):
            if os.path.exists(path):
                return path
    return None


def _local_imports(module: str, path: str, source: str) -> Iterator[tuple[str, list[str]]]:
    """Local modules that are imported, and what is imported from them."""
    package = module.rpartition(".")[0]

    def local(name: str) -> bool:
        if name.startswith("cute_ops.kernels."):
            return True
        if package:
            return name.startswith(package + ".")
        return os.path.exists(os.path.join(os.path.dirname(path), f"{name}.py"))

    for origin, members in _imports(source):
        base = origin.lstrip(".")
        if dots := len(origin) - len(base):
            base = ".".join([*module.split(".")[:-dots], *([base] if base else [])])
        if local(base):
            yield base, members
        else:
            yield from ((name, []) for member in members if local(name := f"{base}.{member}"))


def _imports(source: str) -> Iterator[tuple[str, list[str]]]:
    """What stands in import statements, relative ones with their dots: a module, and what is imported from it."""
    at = source.find("import ")
    while at >= 0:
        before = source[source.rfind("\n", 0, at) + 1 : at].split()
        begin = at + len("import ")
        if source.startswith("(", begin):
            listed = source[begin + 1 :].partition(")")[0]
        else:
            listed = source[begin:].partition("\n")[0].partition("#")[0]
        names = [word for word in listed.replace(",", " ").split() if word.replace(".", "_").isidentifier()]
        if not before:
            yield from ((name, []) for name in names)
        elif before[0] == "from" and len(before) == 2:
            yield before[1], names
        at = source.find("import ", begin)
