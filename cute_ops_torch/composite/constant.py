"""Functions that torch.compile calls once, while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., str])


def constant(function: Function) -> Function:
    """As ``torch.compiler.assume_constant_result``, which imports Dynamo: arguments and result are constants."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
