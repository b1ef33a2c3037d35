"""Docstrings of functions that both adapters write: what differs stands there, the rest once, in the core."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def continued(text: str) -> Callable[[Function], Function]:
    """A decorator: the function's own docstring, then this."""

    def decorate(function: Function) -> Function:
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{cleandoc(text)}"
        return function

    return decorate
