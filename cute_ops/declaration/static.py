"""Dims that are compile-time constants while few of their sizes are in use."""

from __future__ import annotations


class WhileFew:
    """Dims that are compile-time constants until a program has called the op with 64 of their sizes:
    ``static=("d", WhileFew("n"))``. One kernel, in which these dims are dynamic, serves all further sizes.
    """

    def __init__(self, *dims: str) -> None:
        self.dims = dims
