"""Docstrings of functions that both adapters define: each adapter writes what differs, the core the rest, once."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def continued(text: str) -> Callable[[Function], Function]:
    """A decorator that appends ``text`` to a function's docstring."""

    def decorate(function: Function) -> Function:
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{cleandoc(text)}"
        return function

    return decorate
