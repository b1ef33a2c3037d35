"""A digest of a kernel's sources: its module and the local modules that it imports.

Local means in the same package or folder, or one of ours that a user's kernel builds on. Nothing is
imported and nothing is executed; import statements are found by a pattern, since every warm start pays for
it (parsing would take longer than all the rest of it). To find one too many costs nothing.
"""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+([^\n#]+))", re.MULTILINE
)
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@cache
def digest(kernel: str) -> str:
    """The digest of the sources behind ``module:Class``.

    Raises:
        ImportError: the module cannot be found.
    """
    first = kernel.partition(":")[0]
    found: dict[str, Path] = {}
    queue = [first]
    while queue:
        module = queue.pop()
        if module in found:
            continue
        path = _file(module)
        if path is None:
            if module == first:
                raise ImportError(f"cute_ops: kernel module {module!r} of {kernel!r} cannot be found")
            continue
        found[module] = path
        queue += _local_imports(module, path)
    total = hashlib.sha256()
    for module in sorted(found):
        total.update(module.encode() + b"\0" + hashlib.sha256(found[module].read_bytes()).digest())
    return total.hexdigest()


def _file(module: str) -> Path | None:
    """The module's file, found without importing it or its packages (but for a loaded top-level one)."""
    top, *rest = module.split(".")
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) if loaded else None
    if spec is None and top != "__main__":
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not rest:
        origin = spec.origin if spec else getattr(loaded, "__file__", None)
        return Path(origin) if origin and origin.endswith(".py") else None
    for folder in folders:
        stem = Path(folder, *rest)
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.exists():
                return path
    return None


def _local_imports(module: str, path: Path) -> list[str]:
    package = module.rpartition(".")[0]
    names: list[str] = []
    for origin, members, plain in _IMPORT.findall(path.read_text()):
        if plain:
            names += _NAME.findall(plain)
            continue
        dots = len(origin) - len(origin.lstrip("."))
        base = origin.lstrip(".")
        if dots:
            parent = module.split(".")[:-dots]
            base = ".".join([*parent, base] if base else parent)
        names += [base, *(f"{base}.{member}" for member in _NAME.findall(members))]

    def local(name: str) -> bool:
        if name.startswith("cute_ops.kernels."):
            return True
        return name.startswith(package + ".") if package else (path.parent / f"{name}.py").exists()

    return [name for name in names if local(name)]
