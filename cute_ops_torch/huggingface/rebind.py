"""Copies of a ``forward`` in which some global names mean other functions."""

from __future__ import annotations

import types
from typing import Any

from cute_ops_torch.huggingface.match import Forward


def rebind(forward: Any, **names: Forward) -> Forward:
    """A copy of ``forward`` that finds these functions under these global names, beneath its decorators too."""
    inner, closure = getattr(forward, "__wrapped__", None), forward.__closure__
    if inner is not None:
        rebound = rebind(inner, **names)
        closure = tuple(types.CellType(rebound) if cell.cell_contents is inner else cell for cell in closure)
        names = {}
    # Leave out `__name__`: Dynamo would look names up in the module of that name.
    scope = {k: v for k, v in forward.__globals__.items() if k != "__name__"} | names
    copy = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def can_rebind(forward: Any) -> bool:
    """Whether each decorator of ``forward`` holds what it wraps in its closure, where :func:`rebind` replaces it."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        cells = forward.__closure__ or () if isinstance(forward, types.FunctionType) else ()
        if not any(cell.cell_contents is inner for cell in cells):
            return False
        forward = inner
    return isinstance(forward, types.FunctionType)
