"""Kernels that a notebook's cells define: written to a module that the compiler's process can import.

The module holds the kernel's class and all that it refers to: functions and classes of other cells, imports, numbers
and text. Its name is a hash of its content, so a compiled kernel is found again when the notebook runs anew.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import hashlib
import inspect
import linecache
import os
import shutil
import symtable
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

PREFIX = "cute_ops_cell_"
# Types whose values can be written as source by repr. A float's repr may be inf or nan.
_LITERALS = (bool, int, str, bytes, type(None))


def module_of(name: str, namespace: Mapping[str, Any]) -> str | None:
    """The name of an importable module with one of a notebook's definitions; None if its source is not known, as in a
    program that is read from standard input.

    Raises:
        ValueError: it is not defined yet, or refers to an object that cannot be written as source.
    """
    if name not in namespace:
        raise ValueError(f"the kernel's class {name!r} is not defined: define it before the op that names it")
    if _source(name, namespace[name]) is None:
        return None
    sources: dict[str, str] = {}
    _collect(name, name, namespace, sources)
    future = ["from __future__ import annotations"] if namespace.get("annotations") is __future__.annotations else []
    text = "\n\n".join([*future, *filter(None, sources.values())]) + "\n"
    module = PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]
    path = os.path.join(_folder(), f"{module}.py")  # noqa: PTH118 (start-up time)
    if not os.path.exists(path):  # noqa: PTH110
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
    return module


def _collect(name: str, user: str, namespace: Mapping[str, Any], sources: dict[str, str]) -> None:
    """Add the source of a name of the notebook, after that of all names that it refers to."""
    if name in sources or name not in namespace:
        return
    value, sources[name] = namespace[name], ""
    text = _imported(name, value) or _literal(name, value)
    if text is None:
        if (text := _source(name, value)) is None:
            raise ValueError(
                f"{user!r} of this notebook uses {name!r}, a {type(value).__name__} that cannot be written to the "
                "module its kernel is compiled from: define that inside the class, or move both to a file"
            )
        for each in _globals(text):
            _collect(each, name, namespace, sources)
    del sources[name]  # to insert it last: definitions stand after what they refer to
    sources[name] = text


def _imported(name: str, value: Any) -> str | None:
    """An import statement for a module, or for what a module other than the notebook defines; else None."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    home, known = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if home != "__main__" and known and getattr(sys.modules.get(home or ""), known, None) is value:
        return f"from {home} import {known} as {name}"
    return None


def _literal(name: str, value: Any) -> str | None:
    if isinstance(value, float):
        return f"{name} = float({str(value)!r})"
    plain = isinstance(value, _LITERALS) or (
        isinstance(value, tuple) and all(isinstance(each, _LITERALS) for each in value)
    )
    return f"{name} = {value!r}" if plain else None


def _source(name: str, value: Any) -> str | None:
    """The source, with decorators, of a class or function that a cell defines under this name; None if none does."""
    if getattr(value, "__name__", None) != name:
        return None
    functions = vars(value).values() if isinstance(value, type) else (value,)
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in functions if callable(each)]
    files = [code.co_filename for code in codes if code is not None]
    # A class may have no functions, which name their cell: the last cell that defines the name counts.
    cells = [file for file, entry in reversed(linecache.cache.items()) if len(entry) == 4 and entry[1] is None]
    for file in dict.fromkeys([*files, *cells]):
        lines = linecache.getlines(file)
        for node in _definitions("".join(lines), name):
            first = min(each.lineno for each in (node, *node.decorator_list))
            return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    return None


def _definitions(source: str, name: str) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """The definitions of a name at the top level of a cell, the last one first."""
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError):
        return
    yield from (n for n in reversed(nodes) if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name)


def _globals(source: str) -> list[str]:
    """The global names that a definition refers to, in a fixed order."""
    tables, found = [symtable.symtable(source, "<cell>", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return sorted(found)


@cache
def _folder() -> str:
    """A private folder on ``sys.path``, removed at the end of the program."""
    folder, owner = tempfile.mkdtemp(prefix=PREFIX), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child ends before its parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    sys.path.append(folder)
    return folder
