"""Public functions that both adapters have: what they share stands in the core, once."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import Signature, cleandoc, signature
from threading import RLock
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Made = TypeVar("Made")
# Held while the op of a call is made: threads whose first calls are alike get one op, since two would have one name.
MAKING = RLock()


def continued(text: str) -> Callable[[Function], Function]:
    """A decorator that appends ``text`` to a function's docstring."""

    def decorate(function: Function) -> Function:
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\n{cleandoc(text)}"
        return function

    return decorate


def flags_checked(make: Callable[..., Made]) -> Callable[..., Made]:
    """``make``, which raises TypeError for a flag that is no bool: one that is true without being it, as is ``"no"``,
    and two ops that would have one name.
    """
    flags = [place for place, p in enumerate(signature(make).parameters.values()) if p.annotation == "bool"]

    def checked(*options: Any) -> Made:
        if any(type(options[place]) is not bool for place in flags if place < len(options)):
            raise TypeError("a flag is no bool")  # `suggesting` says which one
        with MAKING:
            return make(*options)

    return checked


def published(method: Function, module: str, array: str, checked: Callable[[Function], Function]) -> Function:
    """A method, written for the arrays of any framework, as a function of an adapter.

    Args:
        method: it annotates arrays as ``Array``.
        module: the adapter's, where the function is found under the method's name.
        array: what the framework calls an array.
        checked: the adapter's decorator, which names misspelt and wrong arguments.
    """
    function: Any = checked(method)
    header = signature(method)
    parameters = [p.replace(annotation=_renamed(p.annotation, array)) for p in header.parameters.values()]
    function.__signature__ = Signature(parameters, return_annotation=_renamed(header.return_annotation, array))
    function.__annotations__ = {p.name: p.annotation for p in parameters} | {
        "return": function.__signature__.return_annotation
    }
    function.__module__, function.__qualname__ = module, method.__name__
    function.__doc__ = cleandoc(method.__doc__ or "")
    return function  # type: ignore[no-any-return]


def _renamed(annotation: str, array: str) -> str:
    return re.sub(r"\bArray\b", array, annotation)
