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
    at = source.find("import")
    while at >= 0:
        begin = at + len("import")
        if source[begin : begin + 1] in {" ", "\t", "(", "\\"}:
            before = _before(source, at).rpartition(";")[2].split()
            listed = _after(source, begin).partition(";")[0]
            for sign in ",()":
                listed = listed.replace(sign, " ")
            names = [word for word in listed.split() if word.replace(".", "_").isidentifier()]
            if len(before) > 1 and before[-2] == "from":
                yield before[-1], names
            elif not before or before[-1].endswith(":"):
                yield from ((name, []) for name in names)
        at = source.find("import", begin)


def _before(source: str, at: int) -> str:
    """The statement's line as far as there; a backslash joins two."""
    start = source.rfind("\n", 0, at) + 1
    text = source[start:at]
    while source.endswith("\\\n", 0, start):
        end = start - 2
        start = source.rfind("\n", 0, end) + 1
        text = f"{source[start:end]} {text}"
    return text


def _after(source: str, begin: int) -> str:
    """The rest of the statement without comments; a backslash or an open parenthesis takes more lines to it."""
    text, end = "", begin
    while end < len(source):
        end = source.find("\n", begin)
        end = len(source) if end < 0 else end
        text += source[begin:end].partition("#")[0]
        begin = end + 1
        if text.endswith("\\"):
            text = text[:-1]
        elif "(" not in text or ")" in text:
            break
        text += " "
    return text
