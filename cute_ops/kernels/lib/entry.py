"""The function that every kernel is exported as."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


class Entry:
    """Takes the arguments that are present plus the stream; hands the kernel those at its ``places``, None for the
    absent ones.

    Where the first tensor has no memory or no element nothing is launched: a call like that only loads the module,
    which is how :func:`cute_ops.jit.loader.preload` gets it onto a device ahead of time.
    """

    def __init__(self, kernel: Any, places: tuple[int | None, ...]) -> None:
        self.kernel = kernel
        self.places = places

    @cute.jit
    def __call__(self, *arguments):
        full = [None if place is None else arguments[place] for place in self.places]
        # A problem without rows (a vector) has no size that could be zero: there only the address says so.
        if arguments[0].iterator.toint() != 0 and cute.size(arguments[0]) > 0:
            self.kernel(*full, arguments[-1])
