"""What torch.compile knows while it traces: functions that it calls once, numbers, and ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from operator import is_
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch

from cute_ops.constants.state import globals_reader, reader_of
from cute_ops.declaration.op import Op
from cute_ops_torch.registry import define

Function = TypeVar("Function", bound=Callable[..., str | tuple[str, ...]])


def constant(function: Function) -> Function:
    """As ``torch.compiler.assume_constant_result``, which imports Dynamo: arguments and result are constants."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced(make: Callable[..., Op], namespace: str = "cute") -> Callable[..., Any]:
    """From arguments of ``make``, constants, to what torch.compile calls in place of its op's function."""

    @constant
    def name(*options: Any) -> str:
        op = make(*options)
        define(op, namespace)
        return op.name

    def function(*options: Any) -> Any:
        return getattr(getattr(torch.ops, namespace), name(*options)).default

    return function


def functions(make: Callable[..., Op]) -> Callable[..., Callable[..., Any]]:
    """``function(*options)``: that of the op ``make(*options)``, or what torch.compile calls in its place."""
    flags = [place for place, p in enumerate(signature(make).parameters.values()) if p.annotation == "bool"]

    def checked(*options: Any) -> Op:
        # Two ops that differ in a flag's type alone would have one name.
        if any(type(options[place]) is not bool for place in flags if place < len(options)):
            raise TypeError("a flag is no bool")
        return make(*options)

    while_traced, known = traced(checked), cache(lambda *options: define(checked(*options)).function)

    def function(*options: Any) -> Any:
        return while_traced(*options) if torch.compiler.is_dynamo_compiling() else known(*options)

    return function


PARTS = 4


def parts(function: Any) -> tuple[Any, ...]:
    """A function as what torch.compile makes constants of: the function itself, of a bound method with its object, of a
    partial one with its arguments.
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(function, partial):
        function, args, keywords = function.func, function.args, function.keywords
    owner = None
    if isinstance(function, MethodType):
        function, owner = function.__func__, function.__self__
    return function, owner, tuple(map(number, args)), tuple((name, number(v)) for name, v in keywords.items())


def whole(function: Any, owner: Any, args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> Any:
    """A function from its :func:`parts`."""
    function = function if owner is None else MethodType(function, owner)
    return partial(function, *args, **dict(keywords)) if args or keywords else function


class _Readers:
    """Functions that read what others read, as attributes: torch.compile guards each by itself."""


_readers = _Readers()


@constant
def _seen(*of: Any) -> str:
    """``again`` for the same parts of a function as in the last call."""
    global _last
    again = len(_last) == len(of) and all(map(is_, _last, of))
    _last = () if again else of  # which keeps no object alive
    return "again" if again else ""


_last: tuple[Any, ...] = ()


@constant
def _unmade(held: Any, names: tuple[str, ...]) -> str:
    """An attribute that an object lacks, as one that is made in what is compiled does until that runs; else empty."""
    return next((name for name in names if name not in vars(held)), "")


@constant
def _reader(*function: Any) -> str:
    """The attribute of a function's reader; empty where it cannot be known what the function reads."""
    made = reader_of(whole(*function))
    if made is None:
        return ""
    name = f"of_{id(made)}"
    setattr(_readers, name, made.read)
    if isinstance(function[0], FunctionType):
        setattr(_readers, f"{name}_globals", globals_reader(made, function[0]))
    return name


def guard(function: Any) -> None:
    """Read what a function reads, while torch.compile traces: the graph is of these values alone.

    A function that is made in what is compiled is another one whenever it is a constant, and cannot be read there: what
    it closes over is part of the graph already, so only globals are read.
    """
    if isinstance(function, str):
        return
    if isinstance(function, partial) and isinstance(function.func, MethodType):
        function = function.func
    of, owner, *_ = parts(function)
    held = of if owner is None else owner
    has_state = not isinstance(held, FunctionType | type | partial) and hasattr(held, "__dict__")
    if has_state and (missing := _unmade(held, tuple(vars(held)))):
        raise TypeError(
            "cute_ops_torch: an epilogue's object is made in a function that torch.compile compiles, where its "
            f"`{missing}` cannot be read: make it outside, or let a function close over the number."
        )
    _seen(of, owner)
    seen, name = _seen(of, owner), _reader(*parts(function))
    if name:
        for value in getattr(_readers, name)(function) if seen else getattr(_readers, f"{name}_globals")():
            number(value)


def number(value: Any) -> Any:
    """A number as a constant, also where torch.compile has a symbol for it: a graph is of this value alone.

    Anything else, such as a member of an ``IntEnum``, as it is.
    """
    if type(value) not in (bool, int, float):
        return value
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # start-up time; torch.compile has imported it

    return guard_scalar(value)
