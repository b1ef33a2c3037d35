"""Finds in a function's code which values it reads besides its arguments: globals, closures, attributes of its object.

A read is an expression of the function, ``_of.__globals__['scale']`` or ``_of.__self__.config.limit``. It stands for a
number, a text or a container of these, or for the code of another function, whose reads count, too. If all expressions
have the values that they had, the function does what it did: :func:`reads` raises :class:`Unknown` if that cannot be
said of it.
"""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from cute_ops.constants.exact import PURE_MODULES, Unknown, is_constant

MOST = 200
# Methods of containers and texts that only read them.
_READING = {"get", "items", "keys", "values", "index", "count", "copy", "format", "join", "startswith", "endswith"}
_CONTAINERS = (list, tuple, dict, set, frozenset, str)
_NOTHING = (
    "CACHE",
    "EXTENDED_ARG",
    "NOP",
    "PUSH_NULL",
    "PRECALL",
    "RESUME",
    "COPY_FREE_VARS",
    "MAKE_CELL",
    "NOT_TAKEN",
)
_CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")


class Use(NamedTuple):
    """A value that code uses.

    Attributes:
        root: where it begins: a ``global``, a variable of the closure (``free``), or the function's object (``self``).
        name: of the global or the variable.
        steps: attributes, as texts, and constant indices, as tuples of one.
        compared: whether it is only compared with None.
    """

    root: str
    name: str
    steps: tuple[str | tuple[Any], ...] = ()
    compared: bool = False


def reads(function: Any) -> list[str]:
    """The expressions of what a callable reads, ``_of``.

    Raises:
        Unknown: it reads what has no key, or changes what others see.
    """
    found = _Reads()
    found.use(function, "_of")
    return [*found.texts]


def steps(function: Any) -> Iterator[tuple[Any, Any, str]]:
    """The objects that a callable reads, cells and dicts of globals too: with the attribute or index that it reads of
    each, None for all, and how an error shows that.

    Raises:
        Unknown: it reads what has no key.
    """
    for text in reads(function):
        for node in ast.walk(ast.parse(f"[{text}]", mode="eval")):
            match node:
                case ast.Attribute(value=of, attr=name):
                    pass
                case ast.Subscript(value=of, slice=ast.Constant(value=name)):
                    pass
                case ast.Starred(value=of):
                    name = None
                case _:
                    continue
            with suppress(Exception):  # a property raises
                yield eval(ast.unparse(of), {"_of": function}), name, _variable(text, function) or _shown(text)


def _variable(text: str, function: Any) -> str:
    """The variable of a closure that an expression begins with; empty if it begins with something else."""
    before, mark, after = text.rpartition(".__closure__[")
    if not mark:
        return ""
    of = eval("_of" + before.partition("_of")[2], {"_of": function})  # without a star or `len(`
    return f"`{of.__code__.co_freevars[int(after.partition(']')[0])]}`"


def code_of(function: Any) -> CodeType | None:
    """The code that a callable begins with; None if it is not written in Python."""
    while not isinstance(function, FunctionType):
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        else:
            call = getattr(type(function), "__call__", None)  # noqa: B004 (the method itself)
            return call.__code__ if isinstance(call, FunctionType) else None
    return function.__code__


class _Reads:
    def __init__(self) -> None:
        self.texts: dict[str, None] = {}
        self._inside: dict[int, str] = {}

    def add(self, text: str) -> None:
        self.texts[text] = None
        if len(self.texts) > MOST:
            raise Unknown(f"it reads more than {MOST} values")

    def use(self, value: Any, path: str) -> None:
        """A value is used as a whole."""
        kind = type(value)
        if is_constant(value):
            self.add(path)
        elif kind in (list, tuple, set, frozenset, dict):
            self._contents(value, path)
        elif kind is FunctionType:
            self._function(value, path)
        elif kind is MethodType and type(value.__func__) is FunctionType:
            self._function(value.__func__, f"{path}.__func__", value.__self__, f"{path}.__self__")
        elif kind is partial:
            for name in ("func", "args", "keywords"):
                self.use(getattr(value, name), f"{path}.{name}")
        elif path == "_of" and isinstance(call := getattr(kind, "__call__", None), FunctionType):  # noqa: B004
            self._function(call, f"{path}.__class__.__call__", value, path)
        else:
            raise Unknown(f"it uses {_shown(path)}, a {kind.__name__}")

    def _contents(self, value: Any, path: str) -> None:
        self.add(f"{path}.__class__")
        values = [*value.values()] if isinstance(value, dict) else [*value]
        if all(map(is_constant, values)):
            self.add(f"*{path}")
        elif isinstance(value, list | tuple):
            self.add(f"len({path})")
            for i, each in enumerate(value):
                self.use(each, f"{path}[{i}]")
            return
        if not isinstance(value, dict):
            if not all(map(is_constant, values)):
                raise Unknown(f"it uses {_shown(path)}, a {type(value).__name__} of objects")
        elif all(map(is_constant, values)):
            self.add(f"*{path}.values()")
        else:
            self.add(f"*{path}")
            for key, each in value.items():
                if type(key) not in (str, int):
                    raise Unknown(f"it uses {_shown(path)}, a dict of objects")
                self.use(each, f"{path}[{key!r}]")

    def _function(self, function: FunctionType, path: str, owner: Any = None, owner_path: str = "") -> None:
        if id(function) in self._inside:  # it calls itself
            return self.add(f"{path} is {self._inside[id(function)]}")
        if self._inside:  # that of the first one is known
            self.add(f"{path}.__code__")
        self._inside[id(function)] = path
        for name in ("__defaults__", "__kwdefaults__"):
            if (value := getattr(function, name)) is not None:
                self.use(value, f"{path}.{name}")
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for use in uses(function.__code__, bool(owner_path)):
            if use.root == "self":
                self._follow(use, owner, owner_path)
            elif use.root == "free":
                place = function.__code__.co_freevars.index(use.name)
                try:
                    value = closure[use.name].cell_contents
                except ValueError:
                    raise Unknown(f"it uses `{use.name}`, which is not defined yet") from None
                self._follow(use, value, f"{path}.__closure__[{place}].cell_contents")
            elif use.name in function.__globals__:
                self._follow(use, function.__globals__[use.name], f"{path}.__globals__[{use.name!r}]")
            elif is_constant(getattr(builtins, use.name, self)):
                self.add(f"{path}.__globals__.get({use.name!r})")
            else:
                raise Unknown(f"it uses `{use.name}`")
        del self._inside[id(function)]
        return None

    def _follow(self, use: Use, value: Any, path: str) -> None:
        """The value that attributes and indices lead to."""
        for step in use.steps:
            if type(value) in _CONTAINERS and isinstance(step, str):
                if step not in _READING:
                    raise Unknown(f"it uses {_shown(path)}.{step}")
                break
            try:
                value = getattr(value, step) if isinstance(step, str) else value[step[0]]
            except Exception:  # the line was not run, or a property raises
                break
            path += f".{step}" if isinstance(step, str) else f"[{step[0]!r}]"
        else:
            if use.compared:
                return self.add(f"{path} is None")
        return self.use(value, path)


def _shown(path: str) -> str:
    """A path in terms of the user's function."""
    for mark in (".__globals__['", ".__closure__"):
        if mark in path:
            return f"`{path.rpartition(mark)[2].replace(chr(39) + ']', '', 1)}`"
    return f"`{path.replace('_of.__self__', 'self').replace('_of', 'self')}`"


@lru_cache(1024)
def uses(code: CodeType, bound: bool) -> tuple[Use, ...]:
    """Names that code uses and does not define; ``bound``, its first parameter is an object.

    Raises:
        Unknown: it changes what others see, or takes its object in ``*args``, as decorated methods do.
    """
    if bound and not code.co_argcount:
        raise Unknown(f"`{code.co_qualname}` takes its object in `*args`")
    first = code.co_varnames[0] if bound else ""
    return tuple(dict.fromkeys(_uses(code, frozenset(code.co_freevars), first, first)))


def _uses(code: CodeType, free: frozenset[str], first: str, owner: str) -> Iterator[Use]:
    """``first``: the parameter that is the object; ``owner``: its name as a variable of an enclosing function."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _NOTHING]
    stored = [name for each in steps for name in _stored(each)]
    if first and first in stored:
        raise Unknown(f"it assigns `{first}`")
    aliases: dict[str, Use] = {}
    loaded: set[str] = set()  # before they are aliases: in a loop's next round
    for i, each in enumerate(steps):
        _refuse_change(each, free)
        loaded.update(_loaded(each))
        use = _root(each, free, first, owner, aliases)
        if use is None:
            continue
        use, after = _chain(use, steps, i + 1)
        name = steps[after].argval if after < len(steps) and steps[after].opname == "STORE_FAST" else ""
        if name and stored.count(name) == 1 and name not in {*_parameters(code), *loaded}:
            aliases[name] = use
        else:
            yield use
    for inner in filter(lambda constant: isinstance(constant, CodeType), code.co_consts):
        known = owner if owner in inner.co_freevars else ""
        yield from _uses(inner, free.intersection(inner.co_freevars), "", known)


def _refuse_change(each: dis.Instruction, free: frozenset[str]) -> None:
    """Raise Unknown if an instruction changes what others see, or imports a module that is not known to be pure."""
    operation = each.opname
    if operation in _CHANGES or (operation in ("STORE_DEREF", "DELETE_DEREF") and each.argval in free):
        raise Unknown(f"it changes `{each.argval}`" if each.argval else "it changes an element")
    if operation == "IMPORT_NAME" and each.argval not in PURE_MODULES:
        raise Unknown(f"it imports `{each.argval}`")


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _loaded(each: dis.Instruction) -> Sequence[str]:
    if not each.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST")):
        return ()
    return each.argval if isinstance(each.argval, tuple) else (each.argval,)


def _stored(each: dis.Instruction) -> Sequence[str]:
    if not each.opname.startswith(("STORE_FAST", "DELETE_FAST")):
        return () if each.opname != "STORE_DEREF" else (each.argval,)
    if isinstance(each.argval, tuple):  # two instructions in one
        return each.argval if each.opname == "STORE_FAST_STORE_FAST" else each.argval[:1]
    return (each.argval,)


def _root(
    each: dis.Instruction, free: frozenset[str], first: str, owner: str, aliases: dict[str, Use]
) -> Use | None:  # fmt: skip
    operation, name = each.opname, each.argval
    if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
        return Use("global", name)
    if operation in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
        return Use("free", name) if name in free else Use("self", "") if owner and name == owner else None
    if not operation.startswith(("LOAD_FAST", "STORE_FAST_LOAD_FAST")):
        return None
    if isinstance(name, tuple):
        if operation.startswith("LOAD_FAST") and (name[0] in aliases or (first and name[0] == first)):
            raise Unknown(f"it uses `{name[0]}`")
        name = name[1]
    return Use("self", "") if first and name == first else aliases.get(name)


def _chain(use: Use, steps: Sequence[dis.Instruction], i: int) -> tuple[Use, int]:
    """The attributes and constant indices that follow a value, and where they end."""
    while i < len(steps):
        operation = steps[i].opname
        if operation in ("LOAD_ATTR", "LOAD_METHOD"):
            use, i = use._replace(steps=(*use.steps, steps[i].argval)), i + 1
        elif i + 1 < len(steps) and operation in ("LOAD_CONST", "LOAD_SMALL_INT") and _indexes(steps[i + 1]):
            if type(steps[i].argval) not in (str, int):
                break
            use, i = use._replace(steps=(*use.steps, (steps[i].argval,))), i + 2
        else:
            compared = operation.startswith("POP_JUMP") and operation.endswith("NONE")
            if operation == "LOAD_CONST" and steps[i].argval is None and i + 1 < len(steps):
                compared |= steps[i + 1].opname == "IS_OP"
            return use._replace(compared=compared), i
    return use, i


def _indexes(each: dis.Instruction) -> bool:
    return each.opname == "BINARY_SUBSCR" or (each.opname == "BINARY_OP" and each.argrepr == "[]")
