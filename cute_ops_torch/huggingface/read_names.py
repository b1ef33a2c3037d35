"""Names that the Python code of a module's call reads outside of the module, and whose values may change unseen.

A replaced ``forward`` runs the original one where a function or number that the original reads among its globals is
another by then (:func:`.bypass.reads`). What else a call reads, such as a global config, a number among the globals of
a method's file, or ``self.__dict__``, nothing compares: modules that read it keep their ``forward``.
"""

from __future__ import annotations

import dis
import enum
import gc
import inspect
import logging
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

# Packages whose functions depend on their arguments alone, as far as modules call them. Others that are installed count
# where a class of the module is theirs.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_FIXED = frozenset({*sys.stdlib_module_names, "cute_ops", "cute_ops_torch", "numpy", "torch"})
_HIDING = frozenset({"__dict__", "__getattribute__", "vars"})  # by which a call reads attributes that are not seen
_NONE = object()


class Names:
    """What the functions that run within :func:`noted` read.

    Args:
        module: the module that is called.
        compared: names of globals of its ``forward`` whose values are compared at each call.
        shared: names of attributes of its classes that are lists, dicts and other objects, which
            ``type(self).name`` reads.

    Attributes:
        unseen: names of what nothing compares.
    """

    def __init__(self, module: nn.Module, compared: Collection[str], shared: Collection[str] = ()) -> None:
        self.hiding = _HIDING.union(shared)
        self.compared, self.scope = compared, inspect.unwrap(type(module).forward).__globals__
        self.homes = {_package(cls.__module__) for each in module.modules() for cls in type(each).__mro__} - _FIXED
        self.seen, self.inner = set[types.CodeType](), set[object]()
        self.unseen: list[str] = []

    def note(self, frame: types.FrameType) -> None:
        code, scope = frame.f_code, frame.f_globals
        self.seen.add(code)
        self.inner.update(code.co_consts)  # functions made within the call hold what that has
        if not self._is_theirs(scope):
            return
        self.unseen += self.hiding.intersection(code.co_names)
        for name, *attributes in _chains(code):
            if name in scope and not self._is_known(name, scope) and not _is_fixed(scope[name], attributes):
                self.unseen.append(name)
        if code.co_freevars and code not in self.inner:
            held = {name: frame.f_locals.get(name) for name in code.co_freevars}
            self.unseen += [name for name, value in held.items() if not (_is_number(value) or _is_fixed(value, ()))]

    def _is_theirs(self, scope: Mapping[str, Any]) -> bool:
        package = _package(str(scope.get("__name__", "")))
        if package in self.homes:
            return True
        return package not in _FIXED and not str(scope.get("__file__", "")).startswith(_INSTALLED)

    def _is_known(self, name: str, scope: Mapping[str, Any]) -> bool:
        return scope is self.scope and name in self.compared and _is_number(scope[name])


@contextmanager
def noted(names: Names) -> Iterator[None]:
    """Note which functions run, in a thread without a profiler. Meanwhile no garbage is collected, whose finalizers
    would be noted.
    """

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in names.seen:
            names.note(frame)

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


@cache
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes that it goes on to read of it."""
    found: list[list[str]] = []
    within = False
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append([each.argval])
            within = True
        elif within and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[-1].append(each.argval)
        elif each.opname != "CACHE":
            within = False
    return tuple(map(tuple, found))


def _is_fixed(value: Any, attributes: Any) -> bool:
    """Whether a value, or what is read of it as of a module or a class, is nothing that programs set: a function, a
    class, a member of an enumeration or what a package that is known has.
    """
    for name in attributes:
        if isinstance(value, types.ModuleType) and _package(value.__name__) in _FIXED:
            return True
        if not isinstance(value, types.ModuleType | type) or isinstance(value, enum.EnumMeta):
            break
        value = getattr(value, name, _NONE)
    if isinstance(value, types.ModuleType | type | enum.Enum | logging.Logger | torch.dtype):
        return True
    return callable(value) and not isinstance(value, nn.Module) and _package(type(value).__module__) in _FIXED


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str | tuple)


def _package(module: str) -> str:
    return module.partition(".")[0]
