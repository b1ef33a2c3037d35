"""Constants for torch.compile while it traces: functions that it calls once, numbers, and ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from cute_ops.composite.public import flags_checked
from cute_ops.declaration.op import Op
from cute_ops_torch.composite.compile_guards import capture, captured, function_of, guard_zero, problem
from cute_ops_torch.host.traced_constants import static
from cute_ops_torch.registry import define

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Mark a function whose arguments and result are constants; ``torch.compiler``'s own mark would import Dynamo."""
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
    checked = flags_checked(make)
    while_traced, known = traced(checked), cache(lambda *options: define(checked(*options)).function)

    def function(*options: Any) -> Any:
        return while_traced(*options) if torch.compiler.is_dynamo_compiling() else known(*options)

    return function


def overloads(make: Callable[..., Op]) -> Callable[..., Callable[..., Any]]:
    """``overload(*options)``: torch's op of ``make(*options)``, which is defined once; torch.compile may trace this."""
    while_traced, known = traced(make), cache(lambda *options: define(make(*options)).overload)

    def overload(*options: Any) -> Any:
        return while_traced(*options) if torch.compiler.is_compiling() else known(*options)

    return overload


_captured, _problem = constant(captured), constant(problem)


def guard(function: Any) -> tuple[str, ...]:
    """Let torch.compile, which traces this, guard what a function reads: the graph is of these values alone.

    Returns:
        What :func:`whole` makes the function of; a function is no constant where its object is none.
    """
    from torch._dynamo.comptime import comptime  # start-up time; torch.compile has imported it

    comptime(capture)
    if said := _problem():
        raise RuntimeError(said)
    return (_captured(),)


def whole(function: str | tuple[str, ...]) -> Any:
    """A function from what :func:`guard` returned; a text as it is."""
    return function if isinstance(function, str) else function_of(*function)


def attribute(name: str, value: Any) -> Any:
    """An attribute as a constant. torch.compile takes a number of NumPy as an array, whose value it does not know."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        raise TypeError(
            f"cute_ops_torch: attribute `{name}` is an array to torch.compile, as numbers of NumPy are, too: give "
            f"float({name}), int({name}) or bool({name})."
        )
    return number(value)


def number(value: Any) -> Any:
    """A number as a constant, also where torch.compile has a symbol for it: a graph is of this value alone.

    Anything else, such as a member of an ``IntEnum``, as it is.
    """
    value = static(value)
    if type(value) not in (bool, int, float):
        return value
    # Start-up time; torch.compile has imported them.
    from torch._dynamo.comptime import comptime
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    found = guard_scalar(value)
    if type(found) is float and found == 0.0:
        comptime(guard_zero)
    return found
