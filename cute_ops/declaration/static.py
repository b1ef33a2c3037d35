"""Dims that are compile-time constants, always or while few of their sizes are in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cute_ops.declaration.tensor import Tensor


class WhileFew:
    """Dims that are compile-time constants until a program has called the op with 64 of their sizes:
    ``static=("d", WhileFew("n"))``. One kernel, in which these dims are dynamic, serves all further sizes.
    """

    def __init__(self, *dims: str) -> None:
        self.dims = dims


def static_dims(static: Any, required: Iterable[Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The static dims of an op, and those of them that are static while few: by default ``n`` of a required input.

    What is no tuple of names is returned unchanged, so that validation refuses it.
    """
    if static is None:
        few: tuple[str, ...] = ("n",) if any("n" in dim.names for t in required for dim in t.dims) else ()
        return few, few
    if isinstance(static, str):
        return static, ()  # type: ignore[return-value]
    words = (static,) if isinstance(static, WhileFew) else tuple(static)
    few = tuple(dim for word in words if isinstance(word, WhileFew) for dim in word.dims)
    return tuple(d for word in words for d in (word.dims if isinstance(word, WhileFew) else (word,))), few
