"""Keys of values: two keys are equal if no Python function can tell the values apart."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from math import copysign
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NoReturn

# Values of these types are equal only to values that nothing tells from them, if the types are equal.
_PLAIN = (int, bool, str, bytes, NoneType, type(...), range, CodeType, Fraction)
_SEQUENCES = (tuple, list)
_SETS = (set, frozenset)
# Modules of functions that depend on their arguments alone.
PURE_MODULES = ("math", "cmath", "operator", "_operator")
# Builtin functions and classes that read something else, or whose results do.
_IMPURE = {
    "__build_class__", "__import__", "breakpoint", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals",
    "hasattr", "hash", "id", "input", "iter", "locals", "memoryview", "next", "object", "open", "setattr", "super",
    "type", "vars",
}  # fmt: skip
# Of NumPy: functions that read files or a state.
_IMPURE_STARTS = ("random", "load", "from", "genfrom", "memmap", "get", "set", "err", "seterr", "geterr", "save")
_NUMPY_FUNCTIONS = ("ufunc", "_ArrayFunctionDispatcher")
# Methods of enumerations that say how members are made and printed.
_OF_MEMBERS = ("__new__", "__init__", "__str__", "__repr__", "__format__", "__hash__", "_missing_")
# Classes of libraries whose instances are values, and classes that are called or named.
_VALUES = {("torch", "dtype"), ("torch", "device"), ("torch", "memory_format"), ("torch", "layout")}
_LIBRARIES = ("numpy", "ml_dtypes", "jax")


class Unknown(TypeError):
    """A value has no key: an object that may change, or a function that reads what is not known."""


def exact(value: Any, other: Callable[[Any], Hashable] | None = None) -> Hashable:
    """The key of a value: of numbers with type and sign, of containers with their contents.

    Args:
        value: a number, a text, a container of such, or what a library has as a constant.
        other: gives the key of anything else.

    Raises:
        Unknown: it is none of these.
    """
    kind = type(value)
    if (key := _KEYS.get(kind)) is not None:
        return key(value, other)
    if is_constant(value):
        return (kind, value.dtype.str, value.tobytes()) if _is_numpy_number(value) else (kind, value)
    return _unknown(value) if other is None else other(value)


Other = Callable[[Any], Hashable] | None
# The key of a value of these types.
_KEYS: dict[type, Callable[[Any, Other], Hashable]] = {
    **dict.fromkeys(_PLAIN, lambda value, other: (type(value), value)),
    int: lambda value, other: value,
    str: lambda value, other: value,
    # 0.0 equals -0.0, and NaN nothing.
    float: lambda value, other: (float, value if value and value == value else repr(value)),
    complex: lambda value, other: (complex, exact(value.real), exact(value.imag)),
    Decimal: lambda value, other: (Decimal, str(value)),
    **dict.fromkeys(_SEQUENCES, lambda value, other: (type(value), *(exact(each, other) for each in value))),
    **dict.fromkeys(_SETS, lambda value, other: (type(value), frozenset(exact(each, other) for each in value))),
    dict: lambda value, other: (dict, *((exact(k, other), exact(each, other)) for k, each in value.items())),
    slice: lambda value, other: (slice, *(exact(e, other) for e in (value.start, value.stop, value.step))),
}


def of_attributes(values: Sequence[Any]) -> tuple[Hashable, ...]:
    """The key of a call's attributes, which are numbers, flags and texts: a fifth of what :func:`exact` takes. For
    tables of ours; :class:`Exact` holds the values themselves, for frameworks that compare a call's parameters.
    """
    signs = [copysign(1.0, value) for value in values if not value and type(value) is float]
    return (*values, *map(type, values), *signs)


class Exact(tuple[Any, ...]):
    """A tuple that is equal to another one only if the keys of both are: ``Exact((0.0,)) != Exact((-0.0,))``."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and _key(self) == _key(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__  # equal keys have equal hashes, and frameworks hash often


def _key(values: Iterable[Any]) -> Hashable:
    return exact(tuple(values), lambda value: (type(value), value))


def is_constant(value: Any) -> bool:
    """Whether a value never changes, and neither does what it returns if it is called."""
    kind = type(value)
    if kind in _PLAIN or kind in (float, complex, Decimal):
        return True
    if kind in (tuple, frozenset):
        return all(map(is_constant, value))
    if isinstance(value, enum.Enum):
        return _is_plain_member(value)
    if (kind.__module__, kind.__name__) in _VALUES or _is_numpy_number(value):
        return True
    if kind.__module__ in ("numpy.dtypes", "numpy"):
        return _pure_of_numpy(value)
    if kind is FunctionType:
        return is_ours(value)
    if kind is BuiltinFunctionType:
        of_builtins = value.__self__ is builtins and value.__name__ not in _IMPURE
        return of_builtins or (isinstance(value.__self__, ModuleType) and value.__module__ in PURE_MODULES)
    return isinstance(value, type) and _is_constant_type(value)


def _is_constant_type(kind: type) -> bool:
    top = kind.__module__.partition(".")[0]
    if top == "builtins":
        return kind.__name__ not in _IMPURE
    return top in _LIBRARIES or (top == "torch" and kind.__name__ in ("finfo", "iinfo"))


def is_ours(function: FunctionType) -> bool:
    """Whether a function is one of this package's that always do the same. Those of ``mods`` are like users' own."""
    module = function.__module__ or ""
    return module.partition(".")[0] == "cute_ops" and module != "cute_ops.mods" and function.__closure__ is None


def _is_plain_member(member: enum.Enum) -> bool:
    """Whether a member of an enumeration has a constant value, and neither attributes nor methods besides: these may
    read anything.
    """
    own = [
        name for each in type(member).__mro__ if each.__module__ not in ("enum", "builtins")
        for name, value in vars(each).items() if name not in _OF_MEMBERS and _runs_code(value)
    ]  # fmt: skip
    return not own and is_constant(member.value) and all(name.startswith("_") for name in vars(member))


def _runs_code(value: Any) -> bool:
    """Whether an attribute of an enumeration's class is a method or property that ``enum`` did not put there."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return isinstance(value, FunctionType) and value.__globals__ is not vars(enum)


def _is_numpy_number(value: Any) -> bool:
    kind = type(value)  # arrays have `__array_finalize__`, and a void is a view of one
    return kind.__module__ in ("numpy", "ml_dtypes") and hasattr(kind, "tobytes") and not (
        hasattr(kind, "__array_finalize__") or kind.__name__ == "void"
    )  # fmt: skip


def _pure_of_numpy(value: Any) -> bool:
    """Whether a value is a dtype or a function of NumPy, not a user's function or an array in one of its classes."""
    kind, name = type(value), str(getattr(value, "__name__", ""))
    if kind.__module__ == "numpy.dtypes":
        return True
    # `frompyfunc` makes ufuncs with names such as "scaled (vectorized)".
    return kind.__name__ in _NUMPY_FUNCTIONS and name.isidentifier() and not name.startswith(_IMPURE_STARTS)


def _unknown(value: Any) -> NoReturn:
    raise Unknown(f"a {type(value).__name__} may change, so that no kernel can be found by it")
