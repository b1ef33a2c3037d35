"""What torch.compile knows while it traces: functions that it calls once, numbers, and ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from cute_ops.op import Op
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
    while_traced, known = traced(make), cache(lambda *options: define(make(*options)).function)

    def function(*options: Any) -> Any:
        return while_traced(*options) if torch.compiler.is_dynamo_compiling() else known(*options)

    return function


def number(value: Any) -> Any:
    """A number as a constant, also where torch.compile has a symbol for it: a graph is of this value alone."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # start-up time; torch.compile has imported it

    return guard_scalar(value)
