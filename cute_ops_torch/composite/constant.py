"""What torch.compile knows while it traces: functions that it calls once, and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., str])


def constant(function: Function) -> Function:
    """As ``torch.compiler.assume_constant_result``, which imports Dynamo: arguments and result are constants."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def number(value: Any) -> Any:
    """A number as a constant, also where torch.compile has a symbol for it: a graph is of this value alone."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # start-up time; torch.compile has imported it

    return guard_scalar(value)
