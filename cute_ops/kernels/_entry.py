"""The function that every kernel is exported as."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


class Entry:
    """Takes the tensors that are present plus the stream; hands the kernel None for the absent ones."""

    def __init__(self, kernel: Any, present: tuple[bool, ...]) -> None:
        self.kernel = kernel
        self.present = present

    @cute.jit
    def __call__(self, *arguments):
        given = iter(arguments[:-1])
        full = [next(given) if here else None for here in self.present]
        self.kernel(*full, arguments[-1])
